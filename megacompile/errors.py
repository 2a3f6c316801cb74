"""Every exception that megacompile raises on purpose. The first line of a message gives the cause, then the remedy.

`MegacompileError` and its subclasses report problems that a user can fix; a failed `assert` is a bug in megacompile. Errors
about a program show the program around the fault; errors about a model name the module.
"""
from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

#: Maximum length of a message in characters. A value that a message quotes may be longer and is shortened.
LONGEST_MESSAGE = 10_000
#: Maximum length in characters of a value that a message quotes.
_LONGEST_PIECE = 200


def shortened(text: str, longest: int = _LONGEST_PIECE) -> str:
    """The text; if it has more than `longest` characters, its beginning and end around the number of characters."""
    if len(text) <= longest:
        return text
    gap, tail = f" ... ({len(text):,} characters) ... ", longest // 6
    return text[:longest - len(gap) - tail] + gap + text[len(text) - tail:]


def listed(names: Collection[str], most: int = 20) -> str:
    """Names for a message, separated by commas: the first `most`, and the number of the rest."""
    some = [shortened(name) for _, name in zip(range(most), names, strict=False)]
    rest = len(names) - len(some)
    return ", ".join([*some, *([f"and {rest:,} more"] if rest else [])])


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def named_line(error: BaseException) -> str:
    """The error's type and the first line of its message: "KeyError: 'x'"."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")


class MegacompileError(ValueError):
    """Base class of all errors that megacompile raises on purpose. Its message has at most `LONGEST_MESSAGE` characters."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(str(message), LONGEST_MESSAGE))


class ArgumentError(MegacompileError):
    """An unknown name (of a stage, a layer range, hardware, a model). The message lists the known ones. The command line exits
    with code 2."""


class CaptureError(MegacompileError):
    """The model could not be turned into templates: no layer stack, data-dependent control flow, a broken chain."""


class UnsupportedError(MegacompileError):
    """An argument, mask, dropout or module feature that is not supported yet. Never ignored silently."""


class CompilationError(MegacompileError):
    """Inductor cannot compile a layer, or the compiled code does not run. The model can still be streamed uncompiled."""


class InsufficientMemoryError(MegacompileError):
    """The plan needs more host or device memory than there is. The message gives the bytes needed and available."""


class NoFittingPlanError(InsufficientMemoryError):
    """No plan fits. Attributes: `need`, the device memory in bytes that the smallest plan would take; `cause`, the message
    without its `remedy`."""

    def __init__(self, cause: str, remedy: str, need: int) -> None:
        super().__init__(f"{cause}: {remedy}")
        self.cause, self.need = cause, need


class DeviceUnavailableError(MegacompileError):
    """The requested device (CUDA, CuPy) is not available on this machine."""


class LeaseError(MegacompileError):
    """A backward that is not supported: stale weights, a second backward, `retain_graph`, gradients of some parameters."""


class ProgramError(MegacompileError):
    """A program that does not parse or does not verify. The message shows the program around the fault."""


class HazardError(ProgramError):
    """Two accesses to one place are not ordered, or a place is overwritten while its value is still needed."""


class LaneError(MegacompileError, RuntimeError):
    """An instruction failed in a lane. `__cause__` is the original exception; the message shows the program around it."""


class StallError(LaneError):
    """No lane made progress for too long. The message gives the instruction that each lane is waiting at."""


class RankError(StallError):
    """Another rank of a job with several ranks has ended, has failed, or does something else. The message names the rank and
    the cause. The job cannot go on: start it again from the last checkpoint."""


class DiskError(LaneError):
    """The disk that holds optimizer state is too small, cannot be used, or has failed in the middle of a step."""


class DeviceMemoryError(InsufficientMemoryError, LaneError):
    """The device ran out of memory in the middle of a step. The step was abandoned."""


class NonFiniteError(LaneError):
    """The gradients of a step are not finite. Attributes: `step`, the number that the step would have had; `loss` and `norm`;
    `tiles`, the names of the tiles whose gradients are not finite; `folder`, where the step was dumped, or None."""

    def __init__(self, message: str, step: int, loss: float, norm: float, tiles: tuple[str, ...],
                 folder: Path | None = None) -> None:
        super().__init__(message)
        self.step, self.loss, self.norm, self.tiles, self.folder = step, loss, norm, tiles, folder


class CheckpointError(MegacompileError):
    """A checkpoint (of weights or of a run) cannot be read or written, is damaged, or does not belong to the model. The message
    names the file and the reason."""


class TornError(MegacompileError):
    """An update stopped halfway. Complete it or load a checkpoint before training or saving again."""


class ServerError(MegacompileError, ConnectionError):
    """A vLLM server that generates completions has ended, hangs or fails, and did not come back in time. The policy and its
    optimizer are whole. Attribute: `cause`, the message without the remedy."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"{cause}: start it again, and train on or resume from the last checkpoint; training waits for it as "
                         "long as vllm_server_timeout says")
        self.cause = cause


class PackingWarning(UserWarning):
    """Sequences that share a row of a batch read each other. Said once for each kind of batch."""


class PaddingWarning(UserWarning):
    """A training batch is not packed, and much of it is padding. Said once for each reason."""
