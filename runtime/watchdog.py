"""Whether lanes that somebody waits for still move, and where they stand if not.

A lane says which instruction it begins, and that is all that it does for this. Whoever waits for it looks from time to time;
the time is counted in looks, so that a process which was stopped, or stood in a debugger, is not taken for one that hangs.
While a checkpoint is being written nothing counts: an update may wait for the disk as long as that takes.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import fx

from megacompile.errors import StallError
from megacompile.ir.program import Lane, lane_of, op_of, operands
from megacompile.ir.text import print_node

if TYPE_CHECKING:
    from megacompile.runtime.run import Run


class Watchdog:
    """State: the instruction that each busy lane has begun, and what was seen at the last look.

    `timeout_s`: how long no lane may begin anything; None: for ever."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.begun: dict[Lane, tuple[Run, fx.Node]] = {}
        self._seen: list[tuple[int, fx.Node]] = []  # runs by number: a run that is over must not be kept, it has gigabytes
        self._still_s = 0.0

    def look(self, passed_s: float) -> bool:
        """Called by a thread that waits, `passed_s` seconds after its last look. Whether the time is over."""
        if self.timeout_s is None:
            return False
        begun = list(self.begun.values())
        stands = [(run.number, node) for run, node in begun]
        waiting_for_disk = any(run.frame.store.snapshot is not None for run, _ in begun)
        moved, self._seen = stands != self._seen, stands
        self._still_s = 0.0 if moved or waiting_for_disk else self._still_s + passed_s
        return self._still_s > self.timeout_s

    def error(self, lanes: Iterable[Lane]) -> StallError:
        """What a caller raises."""
        lines = [f"no lane has begun an instruction for {self.timeout_s:g} s, and the model cannot be used any more: start a "
                 "new process and load the last checkpoint (stall_timeout of stream() is how long to wait)"]
        begun = dict(self.begun)
        for lane in lanes:
            lines += _stands(lane, *begun[lane]) if lane in begun else [f"{lane:<8} is at rest"]
        return StallError("\n".join(lines))

    def forget(self) -> None:
        self._seen, self._still_s = [], 0.0


def _stands(lane: Lane, run: Run, node: fx.Node) -> list[str]:
    """A lane's line, and, where it waits for an event, the event's."""
    lines = [f"{lane:<8} stands at  {print_node(node)}  of {run.section}"]
    if op_of(node).name == "wait":
        (event,) = operands(node, "event")
        lines.append(f"{'':<8} waits for  {print_node(event)}  in {lane_of(event) or 'an earlier section'}")
    return lines
