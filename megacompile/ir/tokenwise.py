"""Classifies the ops of a template's graph: those that treat each token alone, and those that sum over tokens.

A value *has tokens* if exactly one of its dimensions has the size T, or B x T. Symbolic shapes say so, so that no dimension
qualifies by coincidence. An op is *tokenwise* if it computes every token of its results from that token of its inputs alone. It
is a *sum* if its result is the sum of its results on chunks of the tokens. An op that is not known to be either is neither.
"""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

aten = torch.ops.aten

TOKENWISE, SUM = "tokenwise", "sum"

#: Pointwise ops that PyTorch does not tag as such.
_POINTWISE = frozenset({
    aten._to_copy, aten.fill, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.copy, aten.detach,
    aten.alias, aten.lift_fresh_copy, aten.leaky_relu_backward, aten.hardswish_backward, aten.hardtanh_backward,
    aten.elu_backward, aten.softplus_backward, aten.mish_backward, aten.log_sigmoid_forward, aten.log_sigmoid_backward})
#: Ops that rearrange dimensions; the shapes of their results say where the tokens are.
_REARRANGING = frozenset({aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.expand, aten.repeat})
_CREATING = frozenset({aten.full, aten.zeros, aten.ones, aten.empty, aten.new_full, aten.new_zeros, aten.new_ones,
                       aten.new_empty, aten.new_empty_strided})
#: Ops that mix one dimension -> (position of the argument that names it, its default).
MIXING = {
    aten.slice: (1, 0), aten.select: (1, 0), aten.split: (2, 0), aten.split_with_sizes: (2, 0), aten.unbind: (1, 0),
    aten.cat: (1, 0), aten.stack: (1, 0), aten.slice_backward: (2, 0), aten.select_backward: (2, 0),
    aten._softmax: (1, -1), aten._log_softmax: (1, -1), aten._softmax_backward_data: (2, -1),
    aten._log_softmax_backward_data: (2, -1), aten.cumsum: (1, -1), aten.topk: (2, -1), aten.sort: (1, -1),
    aten.gather: (1, 0), aten.scatter: (1, 0), aten.scatter_add: (1, 0), aten.squeeze: (1, None), aten.glu: (1, -1),
    aten.glu_backward: (2, -1)}
#: Those of them whose results have more or fewer dimensions.
_SHIFTING = frozenset({aten.stack, aten.unbind, aten.select, aten.select_backward, aten.squeeze})
#: Slices -> the position of the argument where they start; their end follows.
_SLICES = {aten.slice: 2, aten.slice_backward: 3}
#: Reductions. Their second argument names the dimensions that they reduce; none means all.
REDUCING = frozenset({aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean, aten.std, aten.logsumexp,
                       aten.argmax, aten.argmin, aten.any, aten.all, aten.max, aten.min})
VIEWS = frozenset({aten.view, aten._unsafe_view, aten.reshape})
_NORMS = frozenset({aten.native_layer_norm, aten._fused_rms_norm})
#: Their first result has tokens; the others are sums over tokens.
_NORM_BACKWARDS = frozenset({aten.native_layer_norm_backward, aten._fused_rms_norm_backward})
_GEMMS = frozenset({aten.mm, aten.bmm, aten.addmm, aten.baddbmm})
#: Ops whose integer arguments are sizes. Integer arguments of all other ops are numbers to compute with.
TAKING_SIZES = VIEWS | _CREATING | {
    aten.expand, aten.repeat, aten.slice, aten.slice_backward, aten.select_backward, aten.split_with_sizes}


class NotTokensError(Exception):
    """A value's shape depends on T, but not through exactly one dimension of size T or B x T."""


class Layout:
    """The positions of tokens in the values of a graph. `symbols`: the symbols of its shapes -> B and T."""

    def __init__(self, symbols: dict[sympy.Symbol, sympy.Symbol]) -> None:
        self.symbols = symbols
        self.batch, self.length = (next(s for s in symbols.values() if s.name == name) for name in "BT")

    def size(self, value: Any) -> sympy.Expr:
        """A size in B and T."""
        return sympy.sympify(value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat) else value).xreplace(
            self.symbols)

    def dim(self, value: Tensor) -> int | None:
        """The dimension of the tokens; None if the shape has no T. Raises `NotTokensError`."""
        shape = [self.size(size) for size in value.shape]
        found = [i for i, size in enumerate(shape) if self.length in size.free_symbols]
        if not found:
            return None
        if len(found) > 1 or shape[found[0]] not in (self.length, self.batch * self.length):
            raise NotTokensError
        return found[0]

    def folded(self, value: Tensor, dim: int) -> bool:
        return bool(self.size(value.shape[dim]) != self.length)

    def order(self, value: Tensor) -> tuple[int, ...]:
        """The dimensions from outermost to innermost in memory, for any sizes."""
        strides = [self.size(s).subs({self.batch: 3, self.length: 1 << 20}) for s in value.stride()]
        return tuple(sorted(range(value.dim()), key=lambda d: -strides[d]))

    def token_bytes(self, value: Tensor) -> float:
        """Bytes per token of a value that has tokens."""
        return float(self.size(value.numel()).subs({self.batch: 1, self.length: 1})) * value.element_size()


def tensors(node: fx.Node) -> list[Tensor]:
    """The tensors that a node makes."""
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, Tensor)]


def is_gemm(node: fx.Node) -> bool:
    return packet(node) in _GEMMS or is_scaled(node)


def is_scaled(node: fx.Node) -> bool:
    """True if a node is a product in float8 of its first two arguments, with the scales that follow."""
    return str(packet(node)) == "megacompile.scaled_mm"


def is_view(node: fx.Node) -> bool:
    """True if a node is a view of existing memory."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    return getattr(node.target, "is_view", False) or packet(node) is aten._unsafe_view


def is_size(node: fx.Node) -> bool:
    """True if a node is an integer: the size of an input, or computed from sizes."""
    return node.op in ("placeholder", "call_function") and isinstance(node.meta.get("val"), int | torch.SymInt)


def packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def role(node: fx.Node, roles: dict[fx.Node, str], layout: Layout) -> str | None:
    """TOKENWISE, SUM, or None for a node that needs all tokens or has none. `roles`: of earlier nodes."""
    if node.op != "call_function" or not tensors(node):
        return None
    if is_view(node) and not any(used in roles for used in node.all_input_nodes):
        return None  # a view is free, and in a loop its result would be a copy
    if node.target is operator.getitem:
        producer: fx.Node = node.args[0]  # type: ignore[assignment]
        if producer not in roles:
            return None
        return SUM if packet(producer) in _NORM_BACKWARDS and node.args[1] else TOKENWISE
    try:
        given = [layout.dim(v) for used in node.all_input_nodes for v in tensors(used)]
        made = [layout.dim(v) for v in tensors(node)]
        if all(dim is None for dim in (*given, *made)):
            return None
        return _role(node, layout, made)
    except NotTokensError:
        return None


def across_tokens(graph: fx.Graph, symbols: dict[sympy.Symbol, sympy.Symbol]) -> fx.Node | None:
    """The first op of a functional graph that is not known to treat each token alone, or that computes with the number of
    tokens. None if there is none. Then results for a token depend only on that token."""
    layout, roles = Layout(symbols), dict[fx.Node, str]()
    for node in graph.nodes:
        if found := role(node, roles, layout):
            roles[node] = found
        if node.op != "call_function" or is_size(node):
            continue
        counts = packet(node) not in TAKING_SIZES and any(_counts(used, layout) for used in node.all_input_nodes)
        sees = any(has_tokens(each, layout) for each in (*node.all_input_nodes, node))
        if counts or roles.get(node) == SUM or (sees and node not in roles and not is_view(node)):
            return node  # type: ignore[no-any-return]
    return None


def _counts(node: fx.Node, layout: Layout) -> bool:
    return is_size(node) and bool({layout.batch, layout.length} & layout.size(node.meta["val"]).free_symbols)


def has_tokens(node: fx.Node, layout: Layout) -> bool:
    """True if the shape of a tensor that a node makes depends on the number of tokens."""
    return any(layout.length in layout.size(size).free_symbols for value in tensors(node) for size in value.shape)


def _role(node: fx.Node, layout: Layout, made: Sequence[int | None]) -> str | None:
    op, args = packet(node), node.args
    first = args[0] if args and isinstance(args[0], fx.Node) else None
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if op is None or tagged:
        return None
    if op in _GEMMS:
        return _gemm(node, layout)
    if is_scaled(node):
        return _scaled(node, layout)
    if op in _NORM_BACKWARDS or op in _NORMS:
        shape: Any = args[2] if op in _NORM_BACKWARDS else args[1]
        dim = _dim(first, layout)
        return TOKENWISE if dim is not None and dim < _value(first).dim() - len(shape) else None
    if op in REDUCING:
        return _reduction(node, layout)
    if any(dim is None for dim in made):
        return None
    if op in VIEWS:
        return TOKENWISE if _same_stride(_value(first), _value(node), layout) else None
    if op in MIXING:
        position, default = MIXING[op]
        mixed: Any = args[position] if len(args) > position else node.kwargs.get("dim", default)
        same = op in _SHIFTING or _aligned(node, layout)
        mixed = mixed if isinstance(mixed, list | tuple) else [mixed]
        if op in _SLICES and same and _all_of_it(node):
            return TOKENWISE
        return TOKENWISE if same and _keeps(op, mixed, node, layout) else None
    if op is aten.embedding:
        return TOKENWISE if _dim(first, layout) is None else None
    if op in _CREATING or op in _REARRANGING:
        return TOKENWISE
    pointwise = op in _POINTWISE or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
    return TOKENWISE if pointwise and _broadcasts(node, layout) else None


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _dim(node: Any, layout: Layout) -> int | None:
    return layout.dim(_value(node)) if isinstance(node, fx.Node) else None


def _broadcasts(node: fx.Node, layout: Layout) -> bool:
    """True if the tokens of all inputs line up with those of the results."""
    result = tensors(node)[0]
    from_right = layout.dim(result) - result.dim()  # type: ignore[operator]
    for used in node.all_input_nodes:
        for value in tensors(used):
            dim = layout.dim(value)
            if dim is not None and dim - value.dim() != from_right:
                return False
    return True


def _aligned(node: fx.Node, layout: Layout) -> bool:
    """True if all inputs and results have tokens, in the same dimension."""
    values = [v for used in (*node.all_input_nodes, node) for v in tensors(used)]
    return len({layout.dim(v) for v in values}) == 1


def _keeps(op: Any, mixed: Sequence[int | None], node: fx.Node, layout: Layout) -> bool:
    """True if the dimension of the tokens is not in `mixed`."""
    # Dimensions are the input's; those of a stack are the result's.
    value = tensors(node)[0] if op in (aten.stack, aten.select_backward) else tensors(node.all_input_nodes[0])[0]
    dim = layout.dim(value)
    if dim is None or any(d is None for d in mixed):
        return False
    return all(d % value.dim() != dim for d in mixed)  # type: ignore[operator]


def _all_of_it(node: fx.Node) -> bool:
    """True if a slice keeps the whole dimension, for any size."""
    bounds: list[Any] = list(node.args[_SLICES[packet(node)]:])
    start, end, step = bounds + [0, None, 1][len(bounds):]
    return start in (0, None) and end in (None, (1 << 63) - 1) and bool(step == 1)


def _same_stride(before: Tensor, after: Tensor, layout: Layout) -> bool:
    """True if a reshape keeps tokens in place: the distance in elements from one token to the next stays the same."""
    def inside(value: Tensor) -> sympy.Expr:
        return sympy.Mul(*map(layout.size, value.shape[layout.dim(value) + 1:]))  # type: ignore[operator]

    return layout.dim(before) is not None and bool(inside(before) == inside(after))


def _reduction(node: fx.Node, layout: Layout) -> str | None:
    value = _value(node.args[0])
    dim = layout.dim(value)
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = [given] if isinstance(given, int) else list(given or range(value.dim()))
    if len(node.all_input_nodes) != 1 or dim is None:
        return None
    if all(d % value.dim() != dim for d in dims):
        return TOKENWISE
    return SUM if packet(node) is aten.sum else None


def _gemm(node: fx.Node, layout: Layout) -> str | None:
    bias = [_dim(node.args[0], layout)] if packet(node) in (aten.addmm, aten.baddbmm) else []
    a, b = (_dim(x, layout) for x in node.args[len(bias):len(bias) + 2])
    rows = _value(node).dim() - 2  # the dimension of a's rows
    if bias not in ([], [None]) or node.kwargs:
        return None
    if (a, b) in ((rows, None), (None, rows + 1)) or rows == 1 and (a, b) == (0, 0):
        return TOKENWISE
    # (A bias would be added once for each chunk.)
    return SUM if (a, b) == (rows + 1, rows) and not bias else None


def _scaled(node: fx.Node, layout: Layout) -> str | None:
    """The role of a product in float8. A scale has tokens if its rows are tokens."""
    a, b, scale_a, scale_b, bias = (_dim(x, layout) for x in node.args[:5])
    if (a, b) == (0, None) and scale_a in (None, 0) and (scale_b, bias) == (None, None):
        return TOKENWISE
    return SUM if (a, b, scale_a, scale_b) == (1, 0, None, None) and node.args[4] is None else None
