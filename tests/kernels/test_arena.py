"""Slots and slabs: a slab that was not pinned is not there."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError
from megacompile.ir.program import Slot
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.runtime.memory.arena import Arena


def test_a_slab_that_could_not_be_pinned_is_pinned_at_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, pinned = ThreadBackend(), list[Tensor]()

    def pin(memory: Tensor) -> None:
        if not tries:
            tries.append(memory)
            raise InsufficientMemoryError("the system does not allow so much pinned memory")
        pinned.append(memory)

    tries: list[Tensor] = []
    monkeypatch.setattr(backend, "pin", pin)
    arena, slabs = Arena(backend), {"D0": Slot("D0", 4096)}
    with pytest.raises(InsufficientMemoryError, match="pinned memory"):
        arena.reserve(slabs)
    arena.reserve(slabs)
    assert [each.data_ptr() for each in pinned] == [arena.slots["D0"].data_ptr()]
    assert arena.slots["D0"].dtype == torch.uint8
