"""How an optimizer may keep its state in host memory: the combinations of its options, with their bytes."""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megacompile.runtime.memory.state_layout import ADAMW_STATE, ElementState
from megacompile.runtime.optimizer.state_format import EIGHT_BITS, FORMATS
from megacompile.weights.tiling import Tiling


@dataclass(frozen=True)
class StateChoice:
    """`on_arrival`: tiles are updated as their gradients arrive, so that no gradient waits in host memory, and nothing is
    clipped."""

    state: ElementState = ADAMW_STATE
    on_arrival: bool = False

    @property
    def options(self) -> str:
        """The optimizer's options that select it."""
        master, overlap = "master='bfloat16'" * (not self.state.exact), "overlap='backward'" * self.on_arrival
        return ", ".join(filter(None, (f"state_dtype='{self.state.format.name}'", master, overlap)))

    def bytes(self, dtype: torch.dtype) -> float:
        """Bytes of host memory for each trained parameter of a dtype: weight, gradient and state."""
        return dtype.itemsize * (1 if self.on_arrival else 2) + self.state.bytes(dtype)


#: What an optimizer keeps if nothing else is asked for.
EXACT = StateChoice()


def with_choice(tiling: Tiling, choice: StateChoice) -> Tiling:
    """The tiling of the same weights with this state of all trained parameters."""
    return tiling.with_states({s.name: choice.state for layout in tiling.host.values() if layout.trainable
                               for s in layout.slices if s.trainable})


def combinations(moments: Sequence[str], dtypes: Iterable[torch.dtype]) -> list[StateChoice]:
    """All choices for an optimizer that keeps these moments, and for weights of these dtypes."""
    masters = (True, False) if set(dtypes) == {torch.bfloat16} else (True,)  # an FP32 weight is its own master
    return [StateChoice(ElementState(tuple(moments), stored, exact), on_arrival)
            for on_arrival, exact, stored in itertools.product((False, True), masters, FORMATS.values())]


def by_accuracy(moments: Sequence[str], dtypes: Iterable[torch.dtype]) -> list[StateChoice]:
    """The choices that are proposed where memory is short. Those that cost less accuracy come first, and those that clip before
    those that do not."""
    def rank(choice: StateChoice) -> tuple[bool, bool]:
        return not choice.state.exact, choice.on_arrival

    alone = [c for c in combinations(moments, dtypes) if c.state.format is EIGHT_BITS or (c.state.exact and not c.on_arrival)]
    return sorted(alone, key=rank)  # stable: formats stay in their order
