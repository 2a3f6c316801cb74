"""The state that ops read and write: one run of a section, and the host memory that this rank copies and updates."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from megacompile.ir.program import Access, Kept, Lane, argument
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
    """The bytes of a whole tile's slot that this rank copies and updates."""
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


# -------------------- A section on its way through the lanes, and the events that order lanes and sections
class Event:
    """Fires when its lane has issued everything that it covers. `device`: the device's own event."""

    def __init__(self) -> None:
        self.issued = threading.Event()
        self.device: Any = None

    def fire(self, device: Any) -> None:
        self.device = device
        self.issued.set()


E = TypeVar("E")


@dataclass
class CarriedEvents(Generic[E]):
    """For each place and lane: the kind of the last access, and an event that covers it. Kept across sections. The executor and
    the simulator use different event types."""

    table: dict[str, dict[Lane, tuple[Access, E]]] = field(default_factory=dict)

    def enter(self, place: str, access: Access, lane: Lane) -> E | None:
        """The event of the lane's last access if that access could conflict; None if there was none."""
        past = self.table.get(place, {}).get(lane)
        if past is None or (access == Access.WRITE and past[0] != Access.WRITE):
            return None
        return past[1]

    def leave(self, left: Iterable[tuple[str, Access, Lane, E]]) -> None:
        """Stores a section's events. A write was ordered after all earlier accesses to its place, so it replaces them. A read
        is added."""
        left = list(left)
        for place in {place for place, access, _, _ in left if access == Access.WRITE}:
            self.table[place] = {}
        for place, access, lane, event in left:
            lanes = self.table.setdefault(place, {})
            before = lanes.get(lane, (access, event))[0]
            lanes[lane] = (Access.WRITE if Access.WRITE in (access, before) else access, event)


@dataclass
class Run:
    """A section on its way through the lanes. `waits`: the executor's wait for events, which raises a lane's failure."""

    frame: Frame
    events: dict[fx.Node, Event | None]
    pending: dict[Lane, threading.Event]
    waits: Callable[[Iterable[threading.Event]], None]
    number: int
    section: str = ""

    def wait(self, lanes: Iterable[Lane] | None = None) -> None:
        """Waits until these lanes (all, if None) have issued the section. Raises `LaneError` if any lane failed."""
        self.waits(self.pending[lane] for lane in (self.pending if lanes is None else lanes) if lane in self.pending)

    def reach(self, record: fx.Node) -> Any:
        """Waits until a `record` of the section was issued, and returns the device's event. Raises `LaneError` if any lane
        failed."""
        event = self.events[record]
        assert event is not None, "a record makes an event"
        self.waits((event.issued,))
        return event.device
