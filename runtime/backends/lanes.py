"""The protocol of a backend: where a lane's instructions run, how they copy, and what an event is to the device.

An event is a flag on the host, set once the recording lane has *issued* everything before it, plus the device's own event
if the lane's work runs on after it was issued. Waiting is both: a lane that is a device queue lets the device wait, a lane
that works on the host waits for the device.
"""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.ir.program import Lane
from megacompile.runtime.backends.clock import Clock
from megacompile.runtime.optimizer.adam import AdamSegment


class Backend(Protocol):
    """What a device must offer. All methods are called from the thread of the lane that they concern."""

    device: torch.device

    def lane(self, lane: Lane) -> AbstractContextManager[object]:
        """Entered once by a lane's thread: sets device, stream, grad mode."""

    def memory(self, size: int) -> Tensor:
        """uint8 [size] on the device, for a slot."""

    def lock(self, host: Tensor) -> None:
        """Pins host memory, so that copies of it run beside everything else. Idempotent."""

    def unlock(self, host: Tensor) -> None: ...

    def copy(self, destination: Tensor, source: Tensor, lane: Lane) -> None:
        """uint8 -> uint8 of one size, issued to the lane; done on return in lanes that work on the host."""

    def norms(self, views: Sequence[Tensor], out: Tensor) -> None:
        """The Euclidean norm of each of n tensors on the device, bf16 or fp32, into fp32 [n]."""

    def adamw(self, weights: Tensor, remainder: Tensor | None, gradient: Tensor, m: Tensor, v: Tensor,
              segments: Sequence[AdamSegment], gradient_scale: float, judged: tuple[Tensor, Tensor] | None = None,
              lane: Lane = Lane.COMPUTE) -> None:
        """`adam.adamw` on tensors of the device, issued to compute or h2d; the same bits. `judged`: the gradients' norms,
        fp32 [n], and int32 [1]: where a norm is not finite nothing is changed, and the latter becomes 1."""

    def record(self, lane: Lane) -> Any:
        """The device's event behind everything issued to the lane; None if issuing is doing."""

    def wait(self, lane: Lane, event: Any) -> None:
        """The lane goes no further before the device's event."""

    def clock(self) -> Clock:
        """Of what happens in the lanes, from now on. The device must be idle."""

    def synchronize(self) -> None:
        """Waits for everything on the device. Raises `LaneError` if the device is lost to this process."""

    def delay(self, lane: Lane, seconds: float) -> None:
        """Makes the lane late on purpose: tests show with it that events, not luck, order the lanes."""

    def enter(self, tensors: list[Tensor]) -> None:
        """Caller's thread: compute waits for the caller's stream; the caller may drop the tensors at any time."""

    def exit(self, tensors: list[Tensor]) -> None:
        """Caller's thread: the caller's stream waits for compute; the tensors are the caller's from here on."""

    def peak_bytes(self) -> int:
        """Most device memory ever reserved, in bytes; 0 where the device is the host."""

    def trim(self) -> None:
        """Gives the device what was freed and is kept for later, with what libraries keep beside it: they make it anew. The
        lanes are at rest."""

    def free_bytes(self) -> int:
        """Device memory that could be had now, in bytes."""
