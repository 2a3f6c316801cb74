"""Pinned host buffers for activation checkpoints: one set for each open forward.

The buffers of a set have the names of the program's H slots. The program orders copies by slot name, for all sets
alike. So a set may be lent again while the last copies of the forward that used it are still in flight.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError
from megacompile.ir.program import Slot
from megacompile.runtime.backends.lanes import Backend
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import available_host_bytes, host_memory
from megacompile.system.progress import under_way

#: Bytes. Each tensor in a buffer is aligned to this, which kernels expect of their inputs.
ALIGNMENT = 128


@dataclass(eq=False)
class HostCheckpoint:
    """`memory`: uint8, pinned. `parts`: the last checkpoint that was stashed there, on the meta device."""

    memory: Tensor
    parts: tuple[Tensor, ...] = ()

    def pieces(self) -> Iterator[tuple[Tensor, slice]]:
        """Each part, and the range of its bytes."""
        start = 0
        for part in self.parts:
            stop = start + part.numel() * part.element_size()
            yield part, slice(start, stop)
            start = -(-stop // ALIGNMENT) * ALIGNMENT


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy if its memory has gaps or overlaps."""
    return tensor if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else tensor.contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, uint8 [bytes], in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_tensor(memory: Tensor, part: Tensor) -> Tensor:
    """Bytes -> a tensor like `part`."""
    return memory.view(part.dtype).as_strided(part.shape, part.stride())


def described(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, device="meta") for tensor in tensors)


Buffers = dict[str, HostCheckpoint]


class HostCheckpoints:
    """State: all sets of buffers that were `made`, and the `idle` ones, which no open forward uses."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.made: list[Buffers] = []
        self.idle: list[Buffers] = []

    def lend(self, owner: object, slots: Mapping[str, Slot],
             settle: Callable[[], None]) -> tuple[Buffers, Callable[[], object]]:
        """A set that has buffers for these slots, and a function that returns it. The function is called at the latest when
        `owner` is freed. `settle` waits until lanes are idle, since a copy may still use a buffer that is too small. Raises
        `InsufficientMemoryError`."""
        if not slots:
            return {}, lambda: None
        if not self.idle:
            self.made.append({})
            self.idle.append(self.made[-1])
        large_enough = (i for i, buffers in enumerate(self.idle) if not _missing(buffers, slots))
        buffers = self.idle.pop(next(large_enough, -1))
        give_back = weakref.finalize(owner, self.idle.append, buffers)
        try:
            self._grow(buffers, _missing(buffers, slots), settle)
        except BaseException:
            give_back()
            raise
        return buffers, give_back

    def _grow(self, buffers: Buffers, slots: Sequence[Slot], settle: Callable[[], None]) -> None:
        if not slots:
            return
        if any(slot.name in buffers for slot in slots):
            settle()
        for slot in slots:
            if (small := buffers.pop(slot.name, None)) is not None:
                self.backend.unpin(small.memory)
        needed, available = sum(slot.bytes for slot in slots), available_host_bytes()
        if needed > available:
            raise InsufficientMemoryError(
                f"activation checkpoints need {format_bytes(needed)} of host memory and "
                f"{format_bytes(available)} are available: use fewer or shorter sequences, or run backward (or drop the loss) "
                "before the next forward")
        with under_way("pinning memory for activations"):
            for slot in slots:
                memory = host_memory(slot.bytes)
                memory.zero_()  # touched pages are pinned six times faster
                self.backend.pin(memory)
                buffers[slot.name] = HostCheckpoint(memory)

    def bytes(self) -> int:
        return sum(buffer.memory.numel() for buffers in self.made for buffer in buffers.values())

    def close(self) -> None:
        """Frees all memory. Lanes must be idle. Afterwards no open forward can run its backward."""
        for buffers in self.made:
            for buffer in buffers.values():
                self.backend.unpin(buffer.memory)
        self.made.clear()
        self.idle.clear()


def _missing(buffers: Buffers, slots: Mapping[str, Slot]) -> list[Slot]:
    return [slot for slot in slots.values()
            if slot.name not in buffers or buffers[slot.name].memory.numel() < slot.bytes]
