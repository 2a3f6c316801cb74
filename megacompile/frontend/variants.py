"""Running variants: as the fx graph itself, or compiled by inductor for one concrete shape."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megacompile.errors import UnsupportedError
from megacompile.frontend.template import Variant

Runnable = Callable[..., tuple[Any, ...]]


def compile_variant(variant: Variant, example_args: Sequence[Tensor | int | None], mode: str = "eager") -> Runnable:
    """A function of the variant's positional arguments that returns its flat results as a tuple.

    mode "eager": the graph op by op, for any shape, the same bits in every run on the CPU. "inductor": compiled for the
    shapes, strides, dtypes and device of `example_args`, none of which is kept. Arguments that the variant does not
    read may be None, in `example_args` too. The result may be called from any thread.
    Raises `UnsupportedError` for another mode.
    """
    if mode == "eager":
        return variant.graph.forward
    if mode != "inductor":
        raise UnsupportedError(f'mode "{mode}" is none of "eager" and "inductor"')
    reads = variant.reads
    live = [example_args[i] for i in reads]
    graph, tensors, examples = _specialise(variant.graph, reads, live)
    compiled: Any = torch._inductor.compile(graph, [*examples])
    positions = tuple(reads[i] for i in tensors)

    def run(*args: Tensor | int | None) -> tuple[Any, ...]:
        return tuple(compiled(*[args[i] for i in positions]))

    return run


def _specialise(
    variant: fx.GraphModule, reads: Sequence[int], live: Sequence[Tensor | int | None]
) -> tuple[fx.GraphModule, list[int], list[Tensor]]:
    """The graph over its live tensors alone, with the sizes of this call; which of `live` those are; their fakes.

    A template's symbols mean "at least 2", so that a batch of one must be traced again; and inductor makes better code
    for sizes that it knows."""
    count = len(variant.graph.find_nodes(op="placeholder"))
    tensors = [i for i, value in enumerate(live) if isinstance(value, Tensor)]
    fakes = FakeTensorMode()
    with fakes:  # only shapes, strides, dtypes and devices matter: examples may be fakes themselves
        examples = [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                    for value in live if isinstance(value, Tensor)]

    def function(*given: Tensor) -> tuple[Any, ...]:
        args: list[Any] = [None] * count
        for position, value in zip(reads, live, strict=True):
            args[position] = value if not isinstance(value, Tensor) else None
        for i, value in zip(tensors, given, strict=True):
            args[reads[i]] = value
        return variant(*args)  # type: ignore[no-any-return]

    with fakes, torch.no_grad():
        return make_fx(function, tracing_mode="real")(*examples), tensors, examples
