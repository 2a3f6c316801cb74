"""Tunes the kernels of recurrent mixers while inductor compiles their templates.

flash-linear-attention's kernels are compiled for a GPU and tuned when they first run: that takes as long as inductor takes for
the templates. Here each op of a template first runs in a thread, on random values.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
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


def mixer_calls(template: Template, variant: Variant, batch: int, length: int) -> Iterator[tuple[MixerCall, MixerCall]]:
    """The calls of a variant whose kernels tune themselves: each for a fixed number of tokens, which identifies it, and for
    `batch` rows of at most `length` tokens."""
    few = min(length, max(64, _TOKENS // batch // 64 * 64))
    sizes = [{BATCH: sympy.Integer(rows), LENGTH: sympy.Integer(tokens)} for rows, tokens in ((2, 64), (batch, few))]

    def value(argument: Any, numbers: dict[sympy.Symbol, sympy.Integer]) -> Any:
        if not isinstance(argument, torch.fx.Node):
            return argument
        found = argument.meta["val"]
        return Values(tuple(int(template.symbolic(size).xreplace(numbers)) for size in found.shape), found.dtype)

    for node in variant.graph.graph.nodes:
        if op_name(node.target) in _OPS and TUNED_KERNELS.intersection(a for a in node.args if isinstance(a, str)):
            kind, call = (MixerCall(node.target, tuple(value(each, numbers) for each in node.args)) for numbers in sizes)
            yield kind, call


@contextlib.contextmanager
def tuned_beside(calls: Sequence[MixerCall], device: torch.device,
                 issuing: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """A context that runs the calls in a thread, each once, and ends when they are done. `issuing`: a context for the stream of
    the steps, which then take over the memory that the calls have freed. Raises what a call raises. If there is too little
    memory for one, it is tuned when it runs in a step."""
    if not calls:
        yield
        return
    stopped = threading.Event()

    def run() -> None:
        generator = torch.Generator(device).manual_seed(0)  # the user's random numbers do not change
        with torch.no_grad(), issuing():
            for call in calls:
                if not stopped.is_set():
                    with contextlib.suppress(torch.OutOfMemoryError):
                        call.op(*(_random(each, device, generator) if isinstance(each, Values) else each
                                  for each in call.arguments))

    with sharing_caches(device), ThreadPoolExecutor(1, "megacompile tuning") as thread:
        done = thread.submit(run)
        try:
            yield
            done.result()
        except BaseException:
            stopped.set()  # the thread ends after its current call
            raise


def _random(values: Values, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Values from -1 to 0, as logarithms of decays are; zeros for numbers of sequences."""
    if not values.dtype.is_floating_point:
        return torch.zeros(values.shape, dtype=values.dtype, device=device)
    return torch.rand(values.shape, device=device, dtype=torch.float32, generator=generator).sub_(1).to(values.dtype)
