"""A section on its way through the lanes, and the events that order lanes and sections."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import fx

from megacompile.ir.program import Access, Lane
from megacompile.runtime.frame import Frame


class Event:
    """Fires when its lane has issued everything that it covers; `device` is then the device's own event."""

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
    the simulator each use an event type of their own."""

    table: dict[str, dict[Lane, tuple[Access, E]]] = field(default_factory=dict)

    def enter(self, place: str, access: Access, lane: Lane) -> E | None:
        """The event of the lane's last access, if that access could conflict; None if there was none."""
        past = self.table.get(place, {}).get(lane)
        if past is None or (access == Access.WRITE and past[0] != Access.WRITE):
            return None
        return past[1]

    def leave(self, left: Iterable[tuple[str, Access, Lane, E]]) -> None:
        """Takes over a section's events. A write was ordered after all earlier accesses to its place, so it replaces them; a
        read is added."""
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
