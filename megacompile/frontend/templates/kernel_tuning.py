"""Tunes the kernels of recurrent mixers while inductor compiles their templates.

flash-linear-attention's kernels are compiled for a GPU and tuned when they first run: that takes as long as inductor takes for
the templates. Here each op of a template first runs in a thread, on random values.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import sympy
import torch

from megacompile.codegen.inductor import sharing_caches
from megacompile.frontend.ops.mixer_ops import op_name
from megacompile.frontend.templates.template import BATCH, LENGTH, Template, Variant

#: The ops that have such kernels, and the names of these kernels among their arguments.
_OPS = frozenset(f"megacompile.{name}{backward}" for name in ("recurrence", "causal_conv") for backward in ("", "_backward"))
TUNED_KERNELS = frozenset({"fla"})
#: Tokens that a kernel is tuned with, at most. Its variants serve any number.
_TOKENS = 4096


class Values(NamedTuple):
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class MixerCall(NamedTuple):
    """An op and its arguments, with `Values` for tensors."""

    op: Callable[..., Any]
    arguments: tuple[Any, ...]


def mixer_calls(template: Template, variant: Variant, batch: int, length: int) -> Iterator[MixerCall]:
    """The calls of a variant whose kernels tune themselves, for `batch` rows of at most `length` tokens."""
    numbers = {BATCH: sympy.Integer(batch), LENGTH: sympy.Integer(min(length, max(64, _TOKENS // batch // 64 * 64)))}

    def value(argument: Any) -> Any:
        if not isinstance(argument, torch.fx.Node):
            return argument
        found = argument.meta["val"]
        return Values(tuple(int(template.symbolic(size).xreplace(numbers)) for size in found.shape), found.dtype)

    for node in variant.graph.graph.nodes:
        if op_name(node.target) in _OPS and TUNED_KERNELS.intersection(a for a in node.args if isinstance(a, str)):
            yield MixerCall(node.target, tuple(map(value, node.args)))


@contextlib.contextmanager
def tuned_beside(calls: Iterable[MixerCall], device: torch.device, tuned: Collection[MixerCall]) -> Iterator[None]:
    """A context that runs the calls in a thread, each once, and ends when they are done. Leaves out those in `tuned`. Raises
    what a call raises. If there is too little memory for one, it is tuned when it runs in a step."""
    missing = [call for call in dict.fromkeys(calls) if call not in tuned]
    if not missing:
        yield
        return
    stopped = threading.Event()
    with sharing_caches(device), ThreadPoolExecutor(1, "megacompile tuning") as thread:
        done = thread.submit(_run, missing, device, stopped)
        try:
            yield
        except BaseException:
            stopped.set()
            raise
        done.result()


def _run(calls: Iterable[MixerCall], device: torch.device, stopped: threading.Event) -> None:
    generator = torch.Generator(device).manual_seed(0)  # the user's random numbers do not change
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for call in calls:
            if stopped.is_set():
                return
            with contextlib.suppress(torch.OutOfMemoryError):
                call.op(*(_random(each, device, generator) if isinstance(each, Values) else each for each in call.arguments))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the caller may free what the calls read


def _random(values: Values, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Values from -1 to 0, as logarithms of decays are; zeros for numbers of sequences."""
    if not values.dtype.is_floating_point:
        return torch.zeros(values.shape, dtype=values.dtype, device=device)
    return torch.rand(values.shape, device=device, dtype=torch.float32, generator=generator).sub_(1).to(values.dtype)
