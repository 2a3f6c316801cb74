"""Every exception that megacompile raises on purpose. First line of a message: the cause, then the remedy.

`MegacompileError` and its children are for users; a failed `assert` is a fault of ours. Errors about a program show
the program around the fault (`verify.py`), errors about a model name the module.
"""
from __future__ import annotations


class MegacompileError(ValueError):
    """Base of all errors that a user can cause and mend."""


class ArgumentError(MegacompileError):
    """A name that stands for nothing (a stage, a layer range, hardware, a model); the message says which do. The command line
    exits with 2."""


class CaptureError(MegacompileError):
    """The model could not be turned into templates: no layer stack, data-dependent control flow, a broken chain."""


class UnsupportedError(MegacompileError):
    """An argument, mask, dropout or module feature that cannot be honoured yet. Never ignored silently."""


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


class LaneError(RuntimeError):
    """An instruction failed in a lane. `__cause__` is the original exception; the text shows the program around it."""


class TornError(MegacompileError):
    """An update stopped half-way: complete it, or load a checkpoint, before training or saving goes on."""


class CheckpointError(MegacompileError):
    """A checkpoint that cannot be read or written, or that does not belong to the model; the message names file and reason."""
