"""Every exception that megacompile raises on purpose. First line of a message: the cause, then the remedy.

`MegacompileError` and its children are for users; a failed `assert` is a fault of ours. Errors about a program show
the program around the fault (`verify.py`), errors about a model name the module.
"""
from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

#: Characters of a message. What was given, and is repeated in it, may be larger.
LONGEST_MESSAGE = 10_000
#: Characters of something that was given, where a message repeats it.
_LONGEST_PIECE = 200


def shortened(text: str, longest: int = _LONGEST_PIECE) -> str:
    """A text, or its beginning and its end with what lies between left out."""
    if len(text) <= longest:
        return text
    gap, tail = f" ... ({len(text):,} characters) ... ", longest // 6
    return text[:longest - len(gap) - tail] + gap + text[len(text) - tail:]


def listed(names: Collection[str], most: int = 20) -> str:
    """Names for a message: all, or the first of many."""
    some = [shortened(name) for _, name in zip(range(most), names, strict=False)]
    rest = len(names) - len(some)
    return ", ".join([*some, *([f"and {rest:,} more"] if rest else [])])


def first_line(error: BaseException) -> str:
    """Of an error's text; of one without, its type's name."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def named_line(error: BaseException) -> str:
    """The type's name and the first line: "KeyError: 'x'"."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")


class MegacompileError(ValueError):
    """Base of all errors that megacompile raises on purpose. Its text has at most `LONGEST_MESSAGE` characters."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(str(message), LONGEST_MESSAGE))


class ArgumentError(MegacompileError):
    """A name that stands for nothing (a stage, a layer range, hardware, a model); the message says which do. The command line
    exits with 2."""


class CaptureError(MegacompileError):
    """The model could not be turned into templates: no layer stack, data-dependent control flow, a broken chain."""


class UnsupportedError(MegacompileError):
    """An argument, mask, dropout or module feature that cannot be honoured yet. Never ignored silently."""


class CompilationError(MegacompileError):
    """Inductor cannot compile a layer, or what it made does not run. Uncompiled the model streams all the same."""


class InsufficientMemoryError(MegacompileError):
    """Host or device memory does not hold what the plan needs; the message gives bytes needed and available."""


class DeviceUnavailableError(MegacompileError):
    """A device was asked for (CUDA, CuPy) that this machine does not have."""


class LeaseError(MegacompileError):
    """A backward that cannot be honoured: stale weights, a second backward, `retain_graph`, gradients of some parameters."""


class ProgramError(MegacompileError):
    """A program that does not parse or does not verify. Shows the program around the fault."""


class HazardError(ProgramError):
    """Two accesses to one place are not ordered, or a place is overwritten while its value is alive."""


class LaneError(MegacompileError, RuntimeError):
    """An instruction failed in a lane. `__cause__` is the original exception; the text shows the program around it."""


class StallError(LaneError):
    """No lane has moved for too long. The text has the instruction at which each one stands."""


class DeviceMemoryError(InsufficientMemoryError, LaneError):
    """The device ran out of memory in the middle of a step, which was given up."""


class NonFiniteError(LaneError):
    """The gradients of a step are not finite. Attributes: `step`, the number that it would have had; `loss` and `norm`;
    `tiles`, those whose gradients are not finite; `folder`, where it was dumped, or None."""

    def __init__(self, message: str, step: int, loss: float, norm: float, tiles: tuple[str, ...],
                 folder: Path | None = None) -> None:
        super().__init__(message)
        self.step, self.loss, self.norm, self.tiles, self.folder = step, loss, norm, tiles, folder


class CheckpointError(MegacompileError):
    """A checkpoint, of weights or of a run, that cannot be read or written, is damaged or does not belong to the model; the
    message names the file and the reason."""


class TornError(MegacompileError):
    """An update stopped half-way: complete it, or load a checkpoint, before training or saving goes on."""
