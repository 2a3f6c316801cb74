"""Detects lanes that hang, and says where each lane is.

A lane only notes which instruction it begins. A thread that waits for lanes looks from time to time. Time is counted in looks,
so that a process that was stopped, or paused in a debugger, does not count as hanging. While a checkpoint is being written no
time counts: an update may wait for the disk for any time.
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
    """State: the instruction that each busy lane has begun, and what the last look saw.

    `timeout_s`: seconds without any lane beginning an instruction after which lanes hang; None: no limit."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.begun: dict[Lane, tuple[Run, fx.Node]] = {}
        self._seen: list[tuple[int, fx.Node]] = []  # runs by number: a finished run must not be kept alive, it holds gigabytes
        self._still_s = 0.0

    def look(self, passed_s: float) -> bool:
        """Called by a waiting thread, `passed_s` seconds after its last look. Whether the timeout has passed."""
        if self.timeout_s is None:
            return False
        begun = list(self.begun.values())
        stands = [(run.number, node) for run, node in begun]
        waiting_for_disk = any(run.frame.store.snapshot is not None for run, _ in begun)
        moved, self._seen = stands != self._seen, stands
        self._still_s = 0.0 if moved or waiting_for_disk else self._still_s + passed_s
        return self._still_s > self.timeout_s

    def error(self, lanes: Iterable[Lane]) -> StallError:
        """The error for the caller: where each lane is."""
        lines = [f"no lane has begun an instruction for {self.timeout_s:g} s, and the model cannot be used any more: start a "
                 "new process and load the last checkpoint (stall_timeout of stream() is how long to wait)"]
        begun = dict(self.begun)
        for lane in lanes:
            lines += _stands(lane, *begun[lane]) if lane in begun else [f"{lane:<8} is idle"]
        return StallError("\n".join(lines))

    def forget(self) -> None:
        self._seen, self._still_s = [], 0.0


def _stands(lane: Lane, run: Run, node: fx.Node) -> list[str]:
    """The line of a lane, and, if it waits for an event, the line of the event."""
    lines = [f"{lane:<8} stands at  {print_node(node)}  of {run.section}"]
    if op_of(node).name == "wait":
        (event,) = operands(node, "event")
        lines.append(f"{'':<8} waits for  {print_node(event)}  in {lane_of(event) or 'an earlier section'}")
    return lines
