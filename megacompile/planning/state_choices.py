"""What an optimizer may keep in host memory for each parameter, from the exact state on: each choice takes less."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megacompile.runtime.memory.state_layout import ADAMW_STATE, ElementState
from megacompile.runtime.optimizer.state_format import BFLOAT16, EIGHT_BITS, FLOAT32, StateFormat


@dataclass(frozen=True)
class StateChoice:
    """`options`: those of the optimizer that select it. `on_arrival`: tiles are updated as their gradients arrive, so that no
    gradient waits in host memory, and nothing is clipped."""

    options: str
    state: ElementState
    on_arrival: bool = False

    def bytes(self, dtype: torch.dtype) -> float:
        """Bytes of host memory for each trained parameter of a dtype: weight, gradient and state."""
        return dtype.itemsize * (1 if self.on_arrival else 2) + self.state.bytes(dtype)


def choices(moments: Sequence[str], dtypes: Iterable[torch.dtype]) -> list[StateChoice]:
    """The choices for an optimizer that keeps these moments and for weights of these dtypes. Those that cost less accuracy come
    first, and those that clip before those that do not."""
    found = []

    def add(options: str, stored: StateFormat, exact: bool = True, on_arrival: bool = False) -> None:
        found.append(StateChoice(options, ElementState(tuple(moments), stored, exact), on_arrival))

    add("state_dtype='float32'", FLOAT32)
    add("state_dtype='bfloat16'", BFLOAT16)
    add("state_dtype='8bit'", EIGHT_BITS)
    add("state_dtype='8bit', overlap='backward'", EIGHT_BITS, on_arrival=True)
    if set(dtypes) == {torch.bfloat16}:  # an FP32 weight is its own master
        add("state_dtype='8bit', master='bfloat16'", EIGHT_BITS, exact=False)
        add("state_dtype='8bit', master='bfloat16', overlap='backward'", EIGHT_BITS, exact=False, on_arrival=True)
    return found


#: What AdamW keeps if nothing else is asked for.
EXACT = choices(ADAMW_STATE.moments, {torch.bfloat16})[0]
