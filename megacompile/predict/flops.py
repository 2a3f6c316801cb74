"""The work of a template's variant, as functions of batch B and length T: FLOPs by kind, and bytes that it moves.

    GEMMs        2 x (elements of the first matrix) x (columns of the second). Gradients that a variant returns as two operands,
                 which the runtime multiplies, count too. Grouped GEMMs, those of experts, are counted separately, and so are
                 products in float8
    attention    pairs of positions that are computed: half of all, or those in a window. The backward takes 5 products, the
                 forward 2. Counted by kernel, each with the FLOPs of one additional key per query
    the rest     bytes read and written in device memory, with elementwise chains fused as a kernel compiler fuses them

Recomputed work counts like any other. `fusion.py` decides what is fused.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx

from megacompile.frontend.templates.template import LENGTH, Template, Variant
from megacompile.ir.token_loop import TokenLoop, Tokens, token_loops
from megacompile.predict.fusion import GEMMS, computes, fuse, inputs, kernel_of, tensor_of

_ZERO = sympy.Integer(0)


class Attention(NamedTuple):
    """FLOPs of all pairs that one kernel computes, and of one additional key for each query."""

    flops: sympy.Expr = _ZERO
    per_key: sympy.Expr = _ZERO


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes in B and T. `gemm_bytes` are those of the operands and results of GEMMs, grouped ones and those in
    float8 included; a large GEMM hides them. `bytes` are all others. `kernels`: how many are launched. `attention`: by kernel
    and direction, such as ("cudnn", "backward")."""

    gemm_flops: sympy.Expr = _ZERO
    float8_flops: sympy.Expr = _ZERO
    grouped_flops: sympy.Expr = _ZERO
    gemm_bytes: sympy.Expr = _ZERO
    bytes: sympy.Expr = _ZERO
    kernels: sympy.Expr | int = 0
    attention: Mapping[tuple[str, str], Attention] = field(default_factory=dict)

    @property
    def flops(self) -> sympy.Expr:
        return sum((each.flops for each in self.attention.values()), self.gemm_flops + self.float8_flops + self.grouped_flops)

    def repeated(self, length: sympy.Symbol, chunk: int) -> Work:
        """The work for `length` positions, a chunk at a time, if this is the work of one pass over `length`."""
        assert not self.attention, "attention reads other tokens, so a loop over chunks cannot have any"
        count = sympy.Max(1, length / chunk)
        times = {each.name: count * sympy.sympify(getattr(self, each.name)).subs(length, sympy.Min(chunk, length))
                 for each in fields(self) if each.name != "attention"}
        return Work(**{**times, "kernels": sympy.ceiling(length / chunk) * self.kernels})

    def __add__(self, other: Work) -> Work:
        attention = dict(self.attention)
        for key, (flops, per_key) in other.attention.items():
            mine = attention.get(key, Attention())
            attention[key] = Attention(mine.flops + flops, mine.per_key + per_key)
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name)
                for each in fields(self) if each.name != "attention"}
        return Work(**sums, attention=attention)


def variant_work(template: Template, variant: Variant, fused: bool = True) -> Work:
    """The work of one run of a variant, including the products that make its gradients and their accumulation. `fused`: each
    elementwise chain runs as one kernel; else every op reads and writes memory."""
    sizes, loops = _Sizes(template), token_loops(variant.graph)
    graph = variant.graph.graph
    total = _graph_work(graph, sizes, fused and not loops)  # ops around loops run one by one
    for loop in loops.values():
        total += _loop_work(loop, sizes, fused)
    results: Sequence[fx.Node] = graph.output_node().args[0]  # type: ignore[assignment]
    parameters = {i for i, x in enumerate(template.inputs) if x.role.kind == "parameter"}
    for gradient in variant.gradients:
        if gradient.input in parameters:
            total += _accumulation([results[i] for i in gradient.results], sizes)
    return total


def _graph_work(graph: fx.Graph, sizes: _Sizes, fused: bool) -> Work:
    return sum((_kernel_work(node, sizes) for node in graph.nodes), (_fused_rest if fused else _unfused_rest)(graph, sizes))


def _loop_work(loop: TokenLoop, sizes: _Sizes, fused: bool) -> Work:
    """The work of a chunk times the number of chunks. Each chunk's results are also copied to their place."""
    body = loop.body.graph
    results: list[fx.Node] = list(body.output_node().args[0])  # type: ignore[arg-type]
    work = _graph_work(body, sizes, fused)
    for output in loop.outputs:
        if isinstance(output, Tokens):
            work += Work(bytes=2 * sizes.bytes(results.pop(0)), kernels=1)
        else:
            work += _accumulation([results.pop(0) for _ in range(2 if output.product else 1)], sizes)
    return work.repeated(LENGTH, loop.chunk)


class _Sizes:
    """Sizes of a graph's values in B and T."""

    def __init__(self, template: Template) -> None:
        self.template = template

    def shape(self, value: Any) -> list[sympy.Expr]:
        value = value.meta["val"] if isinstance(value, fx.Node) else value
        return [self.template.symbolic(size) for size in value.shape]

    def count(self, value: Any) -> sympy.Expr:
        return sympy.Mul(*self.shape(value))

    def bytes(self, *values: Any) -> sympy.Expr:
        total = _ZERO
        for value in values:
            value = value.meta.get("val") if isinstance(value, fx.Node) else value
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor):
                    total += self.template.bytes_of(tensor)
        return total


# ---------------------------------------------------------------- kernels other than elementwise chains

def _kernel_work(node: fx.Node, sizes: _Sizes) -> Work:
    match kernel_of(node):
        case "gemm":
            a, b = (node.args[i] for i in GEMMS[node.target])  # type: ignore[index]
            flops, moved = 2 * sizes.count(a) * sizes.shape(b)[-1], sizes.bytes(a, b, node)
            if node.target is torch.ops.aten._grouped_mm.default:
                return _grouped_product(flops, moved, sizes)
            return Work(gemm_flops=flops, gemm_bytes=moved, kernels=1)
        case "scaled_mm":
            a, b = node.args[:2]
            return Work(float8_flops=2 * sizes.count(a) * sizes.shape(b)[-1], gemm_bytes=sizes.bytes(a, b, node), kernels=1)
        case "attention":
            found = {(str(node.args[6]), "forward"): _attention(node.args[0], node.args[2], node.args[4], sizes)}
            if not any(sinks is not None for sinks in node.args[8:]):
                return Work(attention=found, kernels=1)
            return Work(attention=found, bytes=2 * sizes.bytes(node), kernels=5)  # results are read, changed and written
        case "attention_backward":
            # Five products; the forward has two. It runs as three kernels: a sum, the gradients, a conversion.
            forward = _attention(node.args[1], node.args[3], node.args[7], sizes)
            backward = Attention(*(sympy.Rational(5, 2) * flops for flops in forward))
            return Work(attention={(str(node.args[9]), "backward"): backward}, kernels=3)
        case "linear_cross_entropy":
            return _linear_cross_entropy(node, sizes)
    return Work()


def _attention(query: Any, value: Any, window: Any, sizes: _Sizes) -> Attention:
    """Products with keys and values for the pairs that a causal mask allows (`window`: number of positions; 0: all)."""
    batch, heads, length, width = sizes.shape(query)
    seen = sympy.Min(window, length) if window else length
    pairs = seen * (2 * length - seen) / 2
    pair = 2 * batch * heads * (width + sizes.shape(value)[-1])
    return Attention(pair * pairs, pair * length)


def _linear_cross_entropy(node: fx.Node, sizes: _Sizes) -> Work:
    """Scores, the gradient of hidden states and, if the weight is trained, that of the weight, a chunk of tokens at a time."""
    hidden, weight, chunk, trained = node.args[0], node.args[1], node.args[8], bool(node.args[9])
    tokens, (vocabulary, _) = sizes.shape(hidden)[0], sizes.shape(weight)
    width = tensor_of(hidden).element_size()
    chunks = tokens / chunk
    scores = tokens * vocabulary * width
    per_chunk = 2 * sizes.bytes(weight) + (8 * sizes.count(weight) if trained else 0)  # read twice; FP32 read and written
    products = 3 if trained else 2
    return Work(
        gemm_flops=products * 2 * tokens * sizes.count(weight), gemm_bytes=chunks * per_chunk + products * scores,
        bytes=3 * scores,  # read for the maximum, read for the gradient, overwritten by it
        kernels=4)


def _grouped_product(flops: sympy.Expr, moved: sympy.Expr, sizes: _Sizes) -> Work:
    """A grouped product, which skips the rows of other pieces."""
    return Work(grouped_flops=flops * sympy.Rational(sizes.template.share), gemm_bytes=moved, kernels=1)


def _accumulation(results: Sequence[fx.Node], sizes: _Sizes) -> Work:
    """The work of adding a parameter's gradient, or the product that makes it, to its FP32 accumulator."""
    match results:
        case [value]:
            return Work(bytes=sizes.bytes(value) + 8 * sizes.count(value), kernels=1)
        case [a, b]:
            rows, columns = sizes.shape(a)[0], sizes.shape(b)[-1]
            return Work(gemm_flops=2 * sizes.count(a) * columns, gemm_bytes=sizes.bytes(a, b) + 8 * rows * columns, kernels=1)
        case [rows, others, ends]:  # multiplied, then added
            columns, width = sizes.shape(others)[-1], rows.meta["val"].element_size()
            made = sizes.count(ends) * sizes.shape(rows)[-1] * columns
            return (_grouped_product(2 * sizes.count(rows) * columns, sizes.bytes(rows, others) + width * made, sizes)
                    + Work(bytes=(width + 8) * made, kernels=1))
        case [a, b, scale, _]:
            made = sizes.shape(a)[0] * sizes.shape(b)[-1]
            product = Work(float8_flops=2 * sizes.count(a) * sizes.shape(b)[-1], gemm_bytes=sizes.bytes(a, b), kernels=1)
            if scale.meta["val"].dim():  # a temporary in bfloat16, which is widened, then added
                return product + Work(gemm_bytes=2 * made, bytes=18 * made, kernels=2)
            return product + Work(gemm_bytes=8 * made)
    raise AssertionError(f"a gradient of {len(results)} results")


# ---------------------------------------------------------------- the rest

def _unfused_rest(graph: fx.Graph, sizes: _Sizes) -> Work:
    computed = [n for n in graph.nodes if computes(n)]
    return Work(bytes=sum((sizes.bytes(n, *set(inputs(n))) for n in computed), _ZERO), kernels=len(computed))


def _fused_rest(graph: fx.Graph, sizes: _Sizes) -> Work:
    """A fused kernel reads each value from outside of its stage once, and writes the values that are read outside of it."""
    fusion = fuse(graph)
    # Values that a stage makes itself are in registers or in a cache.
    fetched = {at: {s for s in read if s not in fusion.stored or fusion.stage[s] != at} for at, read in fusion.reads().items()}
    written = {s for s in fusion.stored if s in fusion.read_by_kernels or any(s in found for found in fetched.values())}
    moved = sizes.bytes(*written) + sum((sizes.bytes(*found) for found in fetched.values()), _ZERO)
    return Work(bytes=moved, kernels=len(fetched))
