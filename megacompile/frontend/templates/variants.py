"""Running variants: as the fx graph itself, or compiled by inductor, for one concrete shape or for any size of packed rows.

If a variant runs a chunk of tokens at a time, the loops' bodies are compiled: one kernel for all chunks, and one for a shorter
last chunk. The few ops around the loops, attention and views, run one by one.
"""
from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from megacompile.codegen.inductor import Inductor
from megacompile.compat.core import FakeTensorMode, LazyGraphModule, enable_python_dispatcher, make_fx
from megacompile.compat.symbols import ShapeEnv
from megacompile.errors import CompilationError, MegacompileError, UnsupportedError, named_line
from megacompile.frontend.templates.joint import tolerate_strides
from megacompile.frontend.templates.symbolic_sizes import CodeForAnySize, Runnable, SymbolicSizes
from megacompile.frontend.templates.template import BATCH, Variant
from megacompile.ir.token_loop import TokenLoop, token_loops

_UNCOMPILED = "stream(model, compile=False) runs it op by op"


def compile_variant(variant: Variant, example_args: Sequence[Tensor | int | None], mode: str = "eager",
                    inductor: Inductor | None = None) -> Runnable:
    """The variant as a function of its positional arguments that returns its flat results as a tuple.

    mode "eager": the graph op by op, for any shape, with the same bits in every run on the CPU. "inductor": compiled for the
    shapes, strides, dtypes and device of `example_args`, none of which is kept. Arguments that the variant does not read may
    be None, also in `example_args`. The result may be called from any thread. `inductor` counts compilations. Raises
    `UnsupportedError` for another mode.
    """
    if mode == "eager":
        return variant.graph.forward
    if mode != "inductor":
        raise UnsupportedError(f'mode must be "eager" or "inductor", not "{mode}"')
    inductor = inductor or Inductor()
    if token_loops(variant.graph):
        return _compile_loops(variant, example_args, inductor)
    return _compile_graph(variant.graph, variant.reads, [example_args[i] for i in variant.reads], inductor)


def compile_for_any_size(variant: Variant, example_args: Sequence[Tensor | int | torch.SymInt | None], sizes: SymbolicSizes,
                         inductor: Inductor) -> CodeForAnySize | None:
    """`compile_variant` by inductor, for any number that the symbols of `sizes` may be; the examples have these sizes. None if
    the variant or inductor's code only holds for one number, or if it runs a chunk of tokens at a time."""
    if token_loops(variant.graph):
        return None
    return code_for_any_size(_specialise(variant.graph, variant.reads, [example_args[i] for i in variant.reads], sizes), sizes,
                             inductor)


def code_for_any_size(traced: Traced, sizes: SymbolicSizes, inductor: Inductor) -> CodeForAnySize | None:
    """Code for any number that the symbols of `sizes` may be. `traced` has these sizes, and `sizes.numbers` as its first
    inputs. Returns None if the graph or inductor's code only holds for one number, or if inductor fails with a symbol."""
    if sizes.are_fixed:
        return None
    try:
        compiled = _compile_traced(traced, inductor)
    except CompilationError:  # symbolic sizes are harder for inductor; with a number it may still compile
        return None
    if sizes.are_fixed:
        return None
    strides = tuple(tuple(sizes.written(one) for one in example.stride()) for example in traced.tensors)
    return CodeForAnySize(compiled, sizes.symbols, strides, sizes.conditions(),
                          functools.partial(_runnable, traced.positions, traced.dtypes))


def _compile_graph(graph: fx.GraphModule, reads: Sequence[int], live: Sequence[Tensor | int | None],
                   inductor: Inductor) -> Runnable:
    """`graph` as a function of all its arguments. It reads those at `reads`, like `live`."""
    traced = _specialise(graph, reads, live)
    compiled = _compile_traced(traced, inductor)
    return _runnable(traced.positions, traced.dtypes, compiled, [example.stride() for example in traced.tensors])


def _compile_traced(traced: Traced, inductor: Inductor) -> Callable[..., Any]:
    try:
        return inductor.compile(traced.graph, traced.examples)
    except (MegacompileError, MemoryError, TimeoutError, torch.OutOfMemoryError):
        raise
    except Exception as reason:  # anything that a compiler raises for code that it does not know, or when it is missing
        raise CompilationError(f"inductor cannot compile a layer ({named_line(reason)}): {_UNCOMPILED}, or see what this "
                               "machine lacks with megacompile doctor") from reason


def _runnable(positions: tuple[int, ...], dtypes: tuple[torch.dtype, ...], compiled: Callable[..., Any],
              strides: Sequence[tuple[int, ...]]) -> Runnable:
    """`compiled`, which only takes the arguments at `positions`, in these dtypes and strides, as a function of all arguments.
    """

    def run(*args: Tensor | int | None) -> tuple[Any, ...]:
        given: list[Any] = [args[i] for i in positions]
        # Compiled code checks sizes and strides, but not dtypes: it would misread the bits.
        assert tuple(value.dtype for value in given) == dtypes, f"compiled for {dtypes}, given {[v.dtype for v in given]}"
        # The results of another graph have the layout that its compiler chose: views of larger results, or expanded ones.
        given = [value if value.stride() == stride else _laid_out(value, stride)
                 for value, stride in zip(given, strides, strict=True)]
        try:
            return tuple(compiled(*given))
        except AssertionError as reason:  # a kernel returned another layout than inductor expected
            if _is_ours(reason):
                raise
            raise CompilationError(
                f"inductor's code of a layer does not run ({named_line(reason)}): {_UNCOMPILED}") from reason

    return run


def _is_ours(error: AssertionError) -> bool:
    """True if the failed assertion came from an op of ours that compiled code called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).partition(".")[0] == __package__.partition(".")[0]


def _laid_out(value: Tensor, stride: Sequence[int]) -> Tensor:
    if all(size == 1 or one == other for size, one, other in zip(value.shape, value.stride(), stride, strict=True)):
        return value.as_strided(value.shape, stride)
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _compile_loops(variant: Variant, example_args: Sequence[Tensor | int | None], inductor: Inductor) -> Runnable:
    graph = variant.graph
    arguments = dict(zip(graph.graph.find_nodes(op="placeholder"), example_args, strict=True))
    device = next(value.device for value in example_args if isinstance(value, Tensor))
    loops: dict[str, TokenLoop] = {}
    for node in graph.graph.find_nodes(op="call_module"):
        loop = getattr(graph, node.target)
        batch, length = (arguments[size.args[0]].shape[size.args[1]] for size in node.args[:2])
        loops[node.target] = loop.with_kernels({
            count: _compile_body(variant, loop, batch, length, count, device, inductor) for count in loop.counts(length)})
    attributes = {n.target: getattr(graph, n.target) for n in graph.graph.find_nodes(op="get_attr")}
    compiled = LazyGraphModule({**attributes, **loops}, graph.graph)
    return compiled.forward


def _compile_body(variant: Variant, loop: TokenLoop, batch: int, length: int, count: int, device: torch.device,
                  inductor: Inductor) -> Runnable:
    """The body of a loop, compiled for chunks of `count` positions. Numbers in it are computed for all tokens."""
    symbols: dict[sympy.Symbol, sympy.Symbol] = variant.graph.meta["symbols"]

    def size(value: Any, positions: int) -> Any:
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        found = value.node.expr.xreplace({raw: batch if s == BATCH else positions for raw, s in symbols.items()})
        return int(found) if isinstance(value, torch.SymInt) else float(found)

    _, _, *placeholders = loop.body.graph.find_nodes(op="placeholder")
    examples: list[Any] = [batch, count]
    with FakeTensorMode():
        for placeholder, tokens in zip(placeholders, loop.inputs, strict=True):
            value = placeholder.meta["val"]
            if not isinstance(value, Tensor):
                examples.append(size(value, length))
                continue
            shape = [size(s, count) for s in value.shape]
            options: dict[str, Any] = {"dtype": value.dtype, "device": device}
            examples.append(torch.empty_permuted(shape, tokens.order, **options) if tokens is not None else
                            torch.empty_strided(shape, [size(s, length) for s in value.stride()], **options))
    return _compile_graph(loop.body, range(len(examples)), examples, inductor)


@dataclass(frozen=True)
class Traced:
    """`graph`: reads only live tensors. `examples`: its inputs, fakes of one mode; numbers that are symbols come first.
    `positions`: which arguments of the variant the tensors are."""

    graph: fx.GraphModule
    examples: list[Any]
    positions: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [example for example in self.examples if isinstance(example, Tensor)]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(example.dtype for example in self.tensors)


def _specialise(variant: fx.GraphModule, reads: Sequence[int], live: Sequence[Tensor | int | torch.SymInt | None],
                sizes: SymbolicSizes | None = None) -> Traced:
    """The variant's graph, reading only the live tensors, with the sizes of `live`, some of which may be symbols. A template's
    symbols mean "at least 2", so a batch of one must be traced again. Inductor also makes better code for known sizes."""
    count = len(variant.graph.find_nodes(op="placeholder"))
    tensors = [i for i, value in enumerate(live) if isinstance(value, Tensor)]
    # Without an environment inductor looks nothing up in its cache, though no size is symbolic.
    fakes = FakeTensorMode(shape_env=ShapeEnv()) if sizes is None else sizes.fakes
    with fakes:  # only shapes, strides, dtypes and devices matter: examples may be fakes themselves
        examples = [torch.empty_strided(value.shape, _without_overlap(value), dtype=value.dtype, device=value.device)
                    for value in live if isinstance(value, Tensor)]
    # Inputs of their own: inductor's cache only keeps conditions on symbols that are inputs.
    numbers = [] if sizes is None else sizes.numbers

    def function(*given: Any) -> tuple[Any, ...]:
        args: list[Any] = [None] * count
        for position, value in zip(reads, live, strict=True):
            args[position] = value if not isinstance(value, Tensor) else None
        for i, value in zip(tensors, given[len(numbers):], strict=True):
            args[reads[i]] = value
        return variant(*args)  # type: ignore[no-any-return]

    # Some ops have sizes that are symbols only in Python.
    dispatching = contextlib.nullcontext() if sizes is None else enable_python_dispatcher()
    with fakes, torch.no_grad(), dispatching:
        specialised = make_fx(function, tracing_mode="real")(*numbers, *examples)
    tolerate_strides(specialised)  # inductor's decompositions use other layouts than the ops do
    return Traced(specialised, [*numbers, *examples], tuple(reads[i] for i in tensors))


def _without_overlap(value: Tensor) -> Sequence[int]:
    """The strides of an example. For an expanded one, the strides of a copy, so that both can be passed."""
    if not any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
        return value.stride()
    return [math.prod(value.shape[dim + 1:]) for dim in range(value.dim())]
