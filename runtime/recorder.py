"""Records what the lanes of an executor do: each instruction, with the times of its start and end.

State: lists that grow, one for each lane, written by that lane's thread alone."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from megacompile.ir.program import Lane, lane_of, op_of, operands
from megacompile.runtime.backends.timestamps import Timestamps

if TYPE_CHECKING:
    from megacompile.runtime.run import Event, Run


@dataclass(eq=False, frozen=True)
class Executed:
    """An instruction that ran. `run` counts sections in the order of submission. `begun` and `ended` are time stamps.
    For a `wait` both are its end, and `waits_for` is the event that it waited for."""

    run: int
    section: str
    node: fx.Node
    lane: Lane
    begun: Any
    ended: Any
    waits_for: Event | None = None


class Recorder:
    def __init__(self, timestamps: Timestamps) -> None:
        self.timestamps = timestamps
        self.lanes: dict[Lane, list[Executed]] = {lane: [] for lane in Lane}
        self.recorded: dict[Event, Executed] = {}  # the last instruction that an event covers

    def begin(self, lane: Lane, node: fx.Node) -> Any:
        """Called before an instruction is issued. The stamp of its start, for `end`."""
        return None if op_of(node).name in ("record", "wait") else self.timestamps.stamp(lane)

    def end(self, run: Run, lane: Lane, node: fx.Node, begun: Any) -> None:
        """Called after an instruction was issued."""
        done = self.lanes[lane]
        match op_of(node).name:
            case "record":
                event = run.events[node]
                if event is not None and done:
                    self.recorded[event] = done[-1]
            case "wait":
                stamp = self.timestamps.stamp(lane)
                done.append(Executed(run.number, run.section, node, lane, stamp, stamp, run.events[operands(node, "event")[0]]))
            case _ if lane_of(node) is not None:  # a node without a lane is not an instruction, though compute evaluates it
                done.append(Executed(run.number, run.section, node, lane, begun, self.timestamps.stamp(lane)))
