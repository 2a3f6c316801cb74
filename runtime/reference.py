"""The reference interpreter: one thread, program order, each instruction finished before the next begins.

It defines the meaning of a program. Events have no effect, since nothing runs concurrently. The lanes must give the same bits.
With `poison`, a slot is filled with NaN when it is released, so that a read of a released value is noticed.
"""
from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import fx

from megacompile.errors import LaneError
from megacompile.ir.program import Lane, argument, lane_of, nodes, op_of, operands
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.frame import Frame
from megacompile.runtime.operations import OPERATIONS


class ReferenceRun:
    """A finished run."""

    def wait(self, lanes: object = None) -> None:
        pass

    def reach(self, record: fx.Node) -> None:
        pass


class ReferenceExecutor:
    """Has the interface of `executor.Executor`."""

    def __init__(self, backend: Backend, poison: bool = True) -> None:
        self.backend, self.poison = backend, poison
        self.probe: Callable[[fx.Node], None] | None = None
        self.lost: LaneError | None = None  # always None: a lost device raises at once

    def submit(self, section: fx.Graph, frame: Frame, name: str = "") -> ReferenceRun:
        with self.backend.lane(Lane.COMPUTE):
            for node in nodes(section):
                op = op_of(node).name
                if op in ("record", "wait", "enter", "leave"):
                    continue
                try:
                    if self.probe is not None:
                        self.probe(node)
                    if op == "release" and lane_of(node) is None:
                        self._free(frame, node)
                    else:
                        frame.values[node] = OPERATIONS[op](frame, node)
                except LaneError:
                    raise
                except Exception as error:
                    self.backend.synchronize()
                    raise LaneError(f"{op} failed: {type(error).__name__}: {error}") from error
                self.backend.synchronize()
        return ReferenceRun()

    def _free(self, frame: Frame, node: fx.Node) -> None:
        (value,) = operands(node, "value")
        if self.poison:
            memory = frame.memory(argument(value, "into"))
            memory.view(torch.int16).fill_(0x7FFF)  # a NaN in bf16, in fp16 and, twice, in fp32
        frame.values.pop(value, None)

    def idle(self, sooner: threading.Event | None = None) -> None:
        pass

    def check(self) -> None:
        pass

    check_own = check

    def recover(self) -> None:
        pass

    def close(self, then: Callable[[], None] | None = None) -> None:
        if then is not None:
            then()
