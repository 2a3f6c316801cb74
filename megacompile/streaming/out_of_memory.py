"""Out of device memory in the middle of a step: the step is abandoned, its memory is released, and the error has numbers."""
from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from megacompile.errors import DeviceMemoryError, first_line
from megacompile.ir.plan import Shape
from megacompile.sizes import format_bytes


def allocator_error(error: BaseException) -> torch.OutOfMemoryError | None:
    """The allocator's own error, if that made a lane or a caller fail."""
    cause = error if isinstance(error, torch.OutOfMemoryError) else error.__cause__
    return cause if isinstance(cause, torch.OutOfMemoryError) else None


def device_memory_error(error: BaseException, cause: torch.OutOfMemoryError, planned: tuple[Shape, int] | None, budget: int,
                        free_bytes: Callable[[], int], torn: bool) -> DeviceMemoryError:
    """The error for the caller. `planned`: the shape that ran, and the device bytes that its plan predicted. Frees what the
    failed instruction's frames hold, since the caller may keep the error while it runs a smaller batch."""
    traceback.clear_frames(cause.__traceback__)
    predicted = "" if planned is None else (
        f"; the plan for {planned[0].batch} x {planned[0].length} tokens predicted {format_bytes(planned[1])}")
    changed = "the weights are torn" if torn else "no weight has changed"
    where = first_line(error).split(":")[0] if error is not cause else "making a slot or a result"
    return DeviceMemoryError(
        f"out of device memory ({where}){predicted}, and the budget is {format_bytes(budget)}; {changed}: "
        "run a smaller batch, or stream() with less device_memory, so that plans leave room for other programs on the device\n"
        f"{format_bytes(free_bytes())} are free now; the allocator said: {first_line(cause)}")
