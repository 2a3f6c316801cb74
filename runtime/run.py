"""A section on its way through the lanes, and the events that order lanes and sections."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import fx

from megacompile.ir.program import Access, Lane
from megacompile.runtime.operations import Frame


class Event:
    """Fires when its lane has issued what it covers; `device` is then the device's own event."""

    def __init__(self) -> None:
        self.issued = threading.Event()
        self.device: Any = None

    def fire(self, device: Any) -> None:
        self.device = device
        self.issued.set()


E = TypeVar("E")


@dataclass
class CarriedEvents(Generic[E]):
    """Per place and lane: whether its last access was a write, and the event behind it. Kept across sections. What an
    event is is the executor's, or the simulator's, own."""

    table: dict[str, dict[Lane, tuple[Access, E]]] = field(default_factory=dict)

    def enter(self, place: str, access: Access, lane: Lane) -> E | None:
        """The event of the lane's last access, if that access could conflict; None if there was none."""
        past = self.table.get(place, {}).get(lane)
        if past is None or (access == Access.WRITE and past[0] != Access.WRITE):
            return None
        return past[1]

    def leave(self, left: Iterable[tuple[str, Access, Lane, E]]) -> None:
        """A write of a place was ordered after all that came before it: only this section's accesses remain. A read adds."""
        left = list(left)
        for place in {place for place, access, _, _ in left if access == Access.WRITE}:
            self.table[place] = {}
        for place, access, lane, event in left:
            lanes = self.table.setdefault(place, {})
            before = lanes.get(lane, (access, event))[0]
            lanes[lane] = (Access.WRITE if Access.WRITE in (access, before) else access, event)


@dataclass
class Run:
    """A section on its way through the lanes. `waits`: the executor's wait for events, which raises what a lane failed with."""

    frame: Frame
    events: dict[fx.Node, Event | None]
    pending: dict[Lane, threading.Event]
    waits: Callable[[Iterable[threading.Event]], None]
    number: int
    section: str = ""

    def wait(self, lanes: Iterable[Lane] | None = None) -> None:
        """Until these lanes (all, if None) have issued the section. Raises `LaneError` if any lane failed."""
        self.waits(self.pending[lane] for lane in (self.pending if lanes is None else lanes) if lane in self.pending)
