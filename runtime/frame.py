"""What ops work on: one run of a section, and the host memory that this rank copies and updates."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.ir.program import Kept, argument
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.kernels import Batch, Kernel
from megacompile.runtime.memory.activation_checkpoints import HostCheckpoint
from megacompile.runtime.memory.arena import Arena
from megacompile.runtime.memory.shards import Share
from megacompile.runtime.memory.store import Store
from megacompile.runtime.ranks import Ranks
from megacompile.runtime.update import Update


@dataclass
class Frame:
    """One run of one section."""

    backend: Backend
    store: Store
    arena: Arena
    kernels: Mapping[tuple[str, str, int], Kernel]  # (call, op, micro-batch)
    batch: Batch
    lease: dict[Kept, Any] = field(default_factory=dict)
    host: Mapping[str, HostCheckpoint] = field(default_factory=dict)  # by slot
    update: Update | None = None
    ranks: Ranks | None = None  # None: this process alone
    values: dict[fx.Node, Any] = field(default_factory=dict)

    @property
    def together(self) -> Ranks:
        """The ranks that run the section together."""
        assert self.ranks is not None, "a program of several ranks in a process that trains alone"
        return self.ranks

    def memory(self, slot: str) -> Tensor:
        return self.host[slot].memory if slot in self.host else self.arena.slots[slot]

    def read(self, node: fx.Node, name: str) -> Any:
        """The value of a parameter, or a tuple of values if the program has a tuple."""
        what = argument(node, name)
        if isinstance(what, tuple | list):
            return tuple(self.values[n] for n in what)
        return None if what is None else self.values[what]


def own_bytes(tile: Share, memory: Tensor) -> Tensor:
    """The bytes of a slot of a whole tile that this rank copies and updates."""
    size = tile.layout.dtype.itemsize
    return memory[tile.held.start * size:tile.held.stop * size]


def gradients_of(tile: Share) -> Tensor:
    """The elements of the host tile's gradients."""
    assert tile.home.gradients is not None, f"{tile.layout.name} has no gradients"
    return tile.home.layout.flat(tile.home.gradients)


def norms_of(tile: Share) -> Tensor:
    """The norms of a tile's gradients, FP32 [parameters]."""
    assert tile.norm_bytes is not None, f"{tile.layout.name} has nothing to train"
    return tile.norm_bytes.view(torch.float32)


def sums_of(tile: Share) -> Tensor:
    """The host tile's sums of gradients, FP32 [elements]."""
    assert tile.home.sums is not None, f"{tile.layout.name} has no sum"
    return tile.home.sums
