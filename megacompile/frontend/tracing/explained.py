"""Translates Dynamo's exceptions: one line of cause and remedy, with the module and the line of the model, then Dynamo's own
text."""
from __future__ import annotations

import inspect
import itertools
import re
import sys
import textwrap
from typing import Any, NamedTuple

from torch import nn

from megacompile.errors import CaptureError, MegacompileError, UnsupportedError
from megacompile.frontend.tracing.model_options import config_name

# -------------------- Which errors mean that code cannot be traced, and which are unrelated errors that happen during a trace
#: Classes of Dynamo's, AOT's and the fakes' errors (all of which are RuntimeErrors, ValueErrors or failed assertions), and of
#: what a model's own code raises when it is given fakes. A `MemoryError`, an `OSError` (`TimeoutError` is one), and whatever
#: else a user's code or signal handler raises says nothing about the model: it goes to the caller as it is.
TRACING_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ArithmeticError, NameError,
                  ImportError)
_FOREIGN = (MemoryError, OSError)


def raise_foreign(error: BaseException) -> None:
    """Raises the memory or system error that caused a tracing error, if there is one: Dynamo wraps every error."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, _FOREIGN):
            raise seen
        seen = seen.__cause__ or seen.__context__


FIXED_SIZES_REMEDY = "compute with the sizes of the inputs, not with constants"
#: Phrases in Dynamo's texts if Python reads a value of a tensor. Fakes of several modes meet where
#: `.tolist()` gives sizes.
_READS_VALUES = ("data-dependent", "DataDependent", "Mixing fake modes", "_local_scalar_dense")


class Line(NamedTuple):
    """A line of the model's code."""

    file: str
    number: int
    code: str

    def __str__(self) -> str:
        return f" at {self.file}:{self.number} ({self.code})"


def explained(model: nn.Module, reason: Exception) -> MegacompileError:
    """The error to raise for an exception of Dynamo's."""
    text = str(reason)
    refused = re.search(r"UnsupportedError\((['\"])(.+?)\1\)", text)  # raised by our attention function, in a layer
    if refused:
        return UnsupportedError(refused[2])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    name, line = type(model).__name__, user_line(reason, lines)
    source = str(line or "")
    if "onstraint" in type(reason).__name__ or "ConstraintViolation" in text:
        return CaptureError(f"{name} fixes the batch size or the length{source}: {FIXED_SIZES_REMEDY}\n{text}")
    views = re.search(r"aliasing detected at nodes (\w+) and (\w+)", text)
    # Dynamo takes attributes of weights out of a layer.
    if "Freevar has no source" in text or (views and any(view.startswith("getattr") for view in views.groups())):
        return CaptureError(f"{name} reads a weight and its .T within one layer{source}: write weight.t() in the place of "
                            f"weight.T\n{text}")
    if views:
        return CaptureError(f"{name} gives a layer, or gets from one, two views of one tensor ({views[1]} and {views[2]})"
                            f"{source}: pass or return {views[1]}.clone()\n{text}")
    kept = re.search(r"intermediate tensor '(\w+)' created inside .*aliases", text)
    if kept:
        return CaptureError(f"{name} reads {kept[1]} outside of the layer that made and kept it{source}, and it shares memory "
                            f"with another value of that layer: keep {kept[1]}.clone()\n{text}")
    if "_hook_installation_lock" in text:
        own = user_line(reason, lines, ones_own=True) or ""
        return CaptureError(f"{name} asks the transformers model inside it for hidden states{own}, which transformers collects "
                            "in a way that cannot be captured: call its decoder (get_decoder()) and pass last_hidden_state to "
                            f"its head\n{text}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return CaptureError(f"{name} has an encoder and a decoder, whose layers do not form one chain: use a model that is "
                            f"only a decoder\n{text}")
    if any(sign in text for sign in _READS_VALUES):
        return CaptureError(
            f"{name} cannot be captured as one graph{source}: {_reader(model, line)} has Python control flow that depends on "
            "tensor values; give it a forward that computes the same operations for all values, with masks or torch.where\n"
            f"{text}")
    if "a leaf Variable that requires grad is being used in an in-place operation" in text:
        return CaptureError(f"{name} changes a layer's output or a parameter in place{source}: make a new value of it, such as "
                            f"x = x.mul(2) in the place of x.mul_(2)\n{text}")
    explanation = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    cause = re.sub(r"<(\S+) object at 0x\w+>", r"\1", explanation or (lines[0] if lines else type(reason).__name__))
    cause = textwrap.shorten(cause, 200, placeholder=" ...")
    return CaptureError(
        f"{name} cannot be captured as one graph{source}: {cause.rstrip('.')}; in forward, control flow must not depend on "
        f"tensor values, and Python state must not change\n{text}")


def user_line(reason: Exception, lines: list[str], ones_own: bool = False) -> Line | None:
    """The line of the innermost frame outside of torch and megacompile (and outside of transformers, if `ones_own`), if Dynamo
    reports one."""
    frames = [Line(frame.filename, frame.lineno, frame.line) for frame in getattr(reason, "real_stack", None) or ()]
    for line, code in itertools.pairwise(lines):
        if line.startswith('File "'):
            frames.append(Line(line.split('"')[1], int(line.split("line ")[1].split(",")[0]), code))
    known = ["/torch/", "/megacompile/frontend/", *(["/transformers/"] if ones_own else [])]
    theirs = [frame for frame in frames if not any(part in frame.file for part in known)]
    return theirs[-1] if theirs else None


def _reader(model: nn.Module, line: Line | None) -> str:
    """The module whose class has a line, with the options of its config that it reads there; else "the model"."""
    found = next(((path, m) for path, m in model.named_modules() if line and _has_line(type(m), line)), None)
    if found is None or line is None:
        return "the model"
    path, module = found
    said = f"{path} ({type(module).__name__})" if path else type(module).__name__
    read = {name: _value(module, name) for name in re.findall(r"\b(?:self\.config|self|config)\.(\w+)", line.code)}
    options = [f"{config_name(model, module, name, value)}={value!r}" for name, value in read.items() if value is not None]
    return f"{said}, with {', '.join(options)}," if options else said


def _value(module: nn.Module, name: str) -> Any:
    """An option that a module or its config holds: a number, a word or a flag. None for anything else, such as an option that
    differs between layers' configs."""
    config = getattr(module, "config", None)
    of_layers = name in (getattr(config, "per_layer_attributes", None) or ())
    value = getattr(module, name, None if of_layers else getattr(config, name, None))
    return value if isinstance(value, int | float | str) and hasattr(config, "to_dict") else None


def _has_line(cls: type, line: Line) -> bool:
    """True if a line is in the source of a class."""
    if getattr(sys.modules.get(cls.__module__), "__file__", None) != line.file:
        return False
    try:
        code, first = inspect.getsourcelines(cls)
    except (OSError, TypeError):  # a class made at run time has no source
        return False
    return first <= line.number < first + len(code)
