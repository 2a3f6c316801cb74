"""How an optimizer may keep its state in host memory: the combinations of its options, with their bytes."""
from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from megacompile.runtime.memory.state_layout import ADAMW_STATE, ElementState
from megacompile.runtime.optimizer.state_format import EIGHT_BITS, FLOAT32, FORMATS, StateFormat
from megacompile.weights.tiling import Tiling


@dataclass(frozen=True)
class StateChoice:
    """`format`: of moments. `exact`: bf16 weights have FP32 masters. `on_arrival`: tiles are updated as their gradients arrive,
    so that no gradient waits in host memory, and nothing is clipped. `moments`: how many most parameters have."""

    format: StateFormat = FLOAT32
    exact: bool = True
    on_arrival: bool = False
    moments: int = 2

    @property
    def options(self) -> str:
        """The optimizer's options that select it."""
        master, overlap = "master='bfloat16'" * (not self.exact), "overlap='backward'" * self.on_arrival
        return ", ".join(filter(None, (f"state_dtype='{self.format.name}'", master, overlap)))

    @property
    def state(self) -> ElementState:
        """The optimizer state of most parameters."""
        return ElementState(ADAMW_STATE.moments[:self.moments], self.format, self.exact)

    def bytes(self, dtype: torch.dtype) -> float:
        """Bytes of host memory for each trained parameter of a dtype: weight, gradient and state."""
        return dtype.itemsize * (1 if self.on_arrival else 2) + self.state.bytes(dtype)


#: What an optimizer keeps if nothing else is asked for.
EXACT = StateChoice()


def combinations(dtypes: Iterable[torch.dtype], clipped: bool = False) -> list[StateChoice]:
    """All choices for weights of these dtypes. `clipped`: without updates on arrival."""
    masters = (True, False) if set(dtypes) == {torch.bfloat16} else (True,)  # an FP32 weight is its own master
    arrivals = (False,) if clipped else (False, True)
    return [StateChoice(*each[::-1]) for each in itertools.product(arrivals, masters, FORMATS.values())]


def by_accuracy(dtypes: Iterable[torch.dtype], clipped: bool = False) -> list[StateChoice]:
    """The choices that are proposed where memory is short. Those that cost less accuracy come first, and those that clip before
    those that do not."""
    def rank(choice: StateChoice) -> tuple[bool, bool]:
        return not choice.exact, choice.on_arrival

    alone = [c for c in combinations(dtypes, clipped) if c.format is EIGHT_BITS or (c.exact and not c.on_arrival)]
    return sorted(alone, key=rank)  # stable: formats stay in their order


def bytes_each(tiling: Tiling, on_arrival: bool) -> float:
    """Bytes of host memory for each parameter of a tile that is trained."""
    trained = [layout for layout in tiling.host.values() if layout.trainable]
    on_disk = sum(tiling.host[tile].host_parts()["moments"] for tile in tiling.on_disk)
    there = sum(layout.host_bytes(not on_arrival) for layout in trained) - on_disk
    return there / max(1, sum(layout.parameters for layout in trained))


def with_choice(tiling: Tiling, choice: StateChoice) -> Tiling:
    """The tiling of the same weights with the same moments, kept as `choice` says."""
    return tiling.with_states({name: replace(state, format=choice.format, exact=choice.exact)
                               for name, state in tiling.states.items()})
