"""Out of device memory in the middle of a step: the step is given up, what it held is let go, and the error has numbers."""
from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import torch

from megacompile.errors import DeviceMemoryError, first_line
from megacompile.sizes import format_bytes

if TYPE_CHECKING:
    from megacompile.streaming.streamed import Streamed


def exhausted(error: BaseException) -> torch.OutOfMemoryError | None:
    """The allocator's own error, if that is what a lane or a caller failed with."""
    cause = error if isinstance(error, torch.OutOfMemoryError) else error.__cause__
    return cause if isinstance(cause, torch.OutOfMemoryError) else None


def explained(streamed: Streamed, error: BaseException, cause: torch.OutOfMemoryError) -> DeviceMemoryError:
    """What the caller is told, after the lanes have recovered. Frees what the failed instruction's frames hold: whoever catches
    the error may keep it, and run a smaller batch meanwhile."""
    traceback.clear_frames(cause.__traceback__)
    shape = streamed.running
    planned = "" if shape is None else (
        f", whose plan for {shape.shape.batch} x {shape.shape.length} tokens foresaw {format_bytes(shape.estimate.total)}")
    changed = "the weights are torn" if streamed.torn else "no weight has changed"
    where = first_line(error).split(":")[0] if error is not cause else "making a slot or a result"
    return DeviceMemoryError(
        f"out of device memory ({where}){planned}, of a budget of {format_bytes(streamed.planner.device_bytes)}; {changed}: "
        "run a smaller batch, or stream() with less device_memory, so that plans leave room for what else is on the device\n"
        f"{format_bytes(streamed.backend.free_bytes())} are free now; the allocator said: {first_line(cause)}")
