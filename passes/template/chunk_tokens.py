"""chunk_tokens: tokenwise ops run on a chunk of tokens at a time, for sequences so long that a layer's widest values
do not fit.

Before: any variant. After, if the module's `meta["chunk"]` is not 0: tokenwise ops and sums over tokens (`tokenwise.py`) are
in as few `TokenLoop`s as the ops that need all tokens allow. A decoder layer's `recompute_backward` has three loops: one up to
attention, one from there to attention's backward, with the MLP's forward and backward in the same chunk, and one for the rest.
Gradients of weights are returned as float32 totals. `forward_saving`, `backward`, and graphs with sizes other than those of B
and T are not changed. Loops that read the input `meta["targets"]` may leave out the tokens that it ignores.
"""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from megacompile.compat.core import LazyGraphModule
from megacompile.ir.token_loop import TokenLoop, Tokens, Total, total_dtype
from megacompile.ir.tokenwise import (
    SUM,
    TAKING_SIZES,
    TOKENWISE,
    Layout,
    has_tokens,
    is_gemm,
    is_size,
    is_view,
    packet,
    role,
    tensors,
)
from megacompile.passes.template import Target


# --------------------
# Stretches of a template's graph that can run on a chunk of tokens at a time: their ops, and values that cross them.
#
# Stretch 0 comes first, then ops that need all tokens and read only its results, then stretch 1, and so on. An op is in the
# stretch of the ops that read it, not in the earliest possible one: the MLP's backward begins with the gradient from the next
# layer, and would hold the widest values of all tokens if it ran before the stretch of its forward. A later stretch recomputes
# values that need no GEMM; for others the narrowest value from which they can be computed without a GEMM is kept.
class Stretches:
    """The division of a graph's ops into `count` stretches. An op outside of them runs before a stretch, or after the last."""

    def __init__(self, graph: fx.Graph, layout: Layout) -> None:
        self.layout = layout
        # A size is known before its tensor is computed, so its readers do not depend on the tensor.
        self.order = [n for n in graph.nodes if not is_size(n)]
        self.inputs = {n: [u for u in n.all_input_nodes if not is_size(u)] for n in self.order}
        self.readers: dict[fx.Node, list[fx.Node]] = {n: [u for u in n.users if not is_size(u)] for n in self.order}
        self.roles: dict[fx.Node, str] = {}
        for node in self.order:
            if found := role(node, self.roles, layout):
                self.roles[node] = found
        self.stage = self._latest(self._earliest())
        self.count = max((self.stage[n] + 1 for n in self.roles), default=0)
        #: Tokenwise values that are kept between stretches.
        self.kept = {n for n in self.roles if self.roles[n] == TOKENWISE and any(u not in self.roles for u in self.readers[n])}
        self._nodes: dict[int, list[fx.Node]] = {}
        for number in reversed(range(self.count)):
            self._nodes[number] = self._needed(number)

    def before(self, number: int) -> list[fx.Node]:
        """Ops outside of all stretches that run before this one (`count`: after the last), without inputs."""
        return [n for n in self.order if n not in self.roles and n.op not in ("placeholder", "output")
                and self.stage[n] == number]

    def nodes(self, number: int) -> list[fx.Node]:
        """The ops of a stretch, in order, including those that it recomputes."""
        return self._nodes.get(number, [])

    def results(self, number: int) -> list[fx.Node]:
        """Values of a stretch that others read: sums over tokens, and kept values."""
        return [n for n in self.order if n in self.roles and self.stage[n] == number
                and (self.roles[n] == SUM or n in self.kept)]

    # ---------------------------------------------------------------- which stretch
    def _after(self, producer: fx.Node, reader: fx.Node) -> int:
        """1 if `reader` must be in a later stretch than `producer`, else 0. A tokenwise value can be read in its own
        stretch."""
        if producer not in self.roles or self.roles[producer] == TOKENWISE and reader in self.roles:
            return 0
        return 1

    def _earliest(self) -> dict[fx.Node, int]:
        stage: dict[fx.Node, int] = {}
        for node in self.order:
            stage[node] = max((stage[u] + self._after(u, node) for u in self.inputs[node]), default=0)
        return stage

    def _latest(self, earliest: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """For each op, the latest stretch in which ops that need all tokens can read it, or else the first after its inputs."""
        bound: dict[fx.Node, int] = {}
        for node in reversed(self.order):
            bounds = [bound[u] - self._after(node, u) for u in self.readers[node] if u in bound]
            if node not in self.roles and node.op == "call_function" and self._sees_tokens(node):
                bounds.append(earliest[node])
            if bounds:
                bound[node] = min(bounds)
        stage: dict[fx.Node, int] = {}
        for node in self.order:
            producer = self.inputs[node][0] if self._is_item(node) else None
            if producer is not None:
                stage[node] = stage[producer]  # one of several values of one op
            elif node in bound:
                stage[node] = bound[node]
            else:
                stage[node] = max((stage[u] + self._after(u, node) for u in self.inputs[node]), default=0)
        return stage

    def _is_item(self, node: fx.Node) -> bool:
        return node in self.roles and any(isinstance(u.meta.get("val"), tuple | list) for u in self.inputs[node])

    def _sees_tokens(self, node: fx.Node) -> bool:
        return any(has_tokens(each, self.layout) for each in (*self.inputs[node], node))

    # ---------------------------------------------------------------- what crosses
    def _needed(self, number: int) -> list[fx.Node]:
        """The ops that a stretch must run for its results. Adds the values of earlier stretches that it reads to `kept`."""
        found: set[fx.Node] = set()
        stack = list(self.results(number))
        while stack:
            node = stack.pop()
            if node in found or node not in self.roles:
                continue
            if self.stage[node] < number:
                if self._is_in_memory(node):
                    continue
                if not self._is_cheap(node, {}):
                    self.kept.add(self._narrowest(node))
                    stack.append(node)
                    continue
            found.add(node)
            stack.extend(self.inputs[node])
        return [n for n in self.order if n in found]

    def _is_in_memory(self, node: fx.Node) -> bool:
        """True if a value of an earlier stretch is in memory anyway."""
        return node not in self.roles or self.roles[node] == SUM or node in self.kept

    def _is_cheap(self, node: fx.Node, known: dict[fx.Node, bool]) -> bool:
        """True if a value can be computed without a GEMM from values in memory."""
        if node not in known:
            known[node] = not is_gemm(node) and all(
                self._is_in_memory(u) or self._is_cheap(u, known) for u in self.inputs[node])
        return known[node]

    def _narrowest(self, node: fx.Node) -> fx.Node:
        """The smallest value on the chain of single values that `node` depends on."""
        best, known = node, dict[fx.Node, bool]()
        while not is_gemm(node):
            hangs_on = [u for u in self.inputs[node] if not self._is_in_memory(u) and not self._is_cheap(u, known)]
            if len(hangs_on) != 1:
                break
            (node,) = hangs_on
            value = node.meta["val"]
            if not isinstance(value, tuple | list) and self.layout.token_bytes(value) <= self.layout.token_bytes(
                    best.meta["val"]):
                best = node
        assert not isinstance(best.meta["val"], tuple | list), f"{best} makes several values, none of which can be kept"
        return best


name = "chunk_tokens"
level = "variant"

aten = torch.ops.aten

class _WholeError(Exception):
    """The reason why a graph must stay whole."""


def run(graph: fx.GraphModule, target: Target) -> fx.GraphModule:
    """`graph` with its tokenwise stretches in loops."""
    if not graph.meta.get("chunk"):
        return graph
    try:
        return _Rewrite(graph).run()
    except _WholeError:
        return graph


class _Rewrite:
    """State: the new graph so far; `made`, the new node of each old one; `exact`, new nodes that are float32 although the old
    node has a lower precision."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.chunk = module, int(module.meta["chunk"])
        self.layout = Layout(module.meta["symbols"])
        self.stretches = Stretches(module.graph, self.layout)
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.exact: set[fx.Node] = set()
        self.loops: dict[str, TokenLoop] = {}

    def run(self) -> fx.GraphModule:
        if any(isinstance(node.meta["val"], tuple | list) for node in self.stretches.kept):
            raise _WholeError  # one of an op's several values is None: nothing says where it belongs
        for node in self.module.graph.find_nodes(op="placeholder"):
            self.made[node] = _copied(self.graph, node, self.made.__getitem__)
        self.sizes = _Sizes(self.graph, self.layout, *self._batch_and_length())
        for number in range(self.stretches.count + 1):
            for node in self.stretches.before(number):
                self._copy(node)
            nodes = self.stretches.nodes(number)
            if self._holds_values(number, nodes):
                self._loop(number, nodes)
            else:
                for node in nodes:
                    if node not in self.made:
                        self._copy(node)
        self._return()
        for node in reversed(self.graph.nodes):
            if _is_constant(node) and not node.users:
                self.graph.erase_node(node)  # only loops read it
        attributes = {n.target: getattr(self.module, str(n.target)) for n in self.graph.find_nodes(op="get_attr")}
        result = LazyGraphModule({**attributes, **self.loops}, self.graph)
        result.meta.update(self.module.meta)
        return result

    def _batch_and_length(self) -> tuple[fx.Node, fx.Node]:
        found: dict[sympy.Expr, tuple[fx.Node, int, Any]] = {}
        for old in self.module.graph.find_nodes(op="placeholder"):
            for value in tensors(old) if old.users else ():
                for dim, size in enumerate(value.shape):
                    found.setdefault(self.layout.size(size), (self.made[old], dim, size))
        sizes = []
        for symbol in (self.layout.batch, self.layout.length):
            if symbol not in found:
                raise _WholeError
            node, dim, value = found[symbol]
            sizes.append(self.graph.call_function(aten.sym_size.int, (node, dim)))
            sizes[-1].meta["val"] = value
        return sizes[0], sizes[1]

    # ---------------------------------------------------------------- nodes outside of loops
    def _copy(self, node: fx.Node) -> None:
        """Copies a node outside of all loops."""
        if node.op == "output" or is_size(node):
            return
        keeps_exact = node.op == "call_function" and is_view(node) and len(node.all_input_nodes) == 1
        copy = _copied(self.graph, node, lambda n: self._read(n, keeps_exact))
        if keeps_exact and any(used in self.exact for used in copy.all_input_nodes):
            given = [x.meta["val"] if isinstance(x, fx.Node) else x for x in copy.args]
            with _fake_mode(node):
                copy.meta["val"] = node.target(*given)  # type: ignore[operator]
            self.exact.add(copy)
        self.made[node] = copy

    def _read(self, node: fx.Node, exact: bool = False) -> Any:
        """The new node of an old value, in its dtype unless `exact`."""
        if is_size(node):
            return self.sizes.of(node)
        found = self.made[node]
        if found in self.exact and not exact:
            old: Tensor = node.meta["val"]
            found = self.graph.call_function(aten._to_copy.default, (found,), {"dtype": old.dtype})
            found.meta["val"] = old
        return found

    def _return(self) -> None:
        """Adds the output. Gradients of parameters may have a higher precision than the parameters."""
        results: Any = self.module.graph.output_node().args[0]
        parameters = set(self.module.meta["parameters"])
        exact = {i for index, indices, *_ in self.module.meta["gradients"] if index in parameters for i in indices}
        self.graph.output(tuple(self._read(node, i in exact) if isinstance(node, fx.Node) else node
                                for i, node in enumerate(results)))

    # ---------------------------------------------------------------- loops
    def _holds_values(self, number: int, nodes: list[fx.Node]) -> bool:
        """True if a stretch makes values that are not among its results. Otherwise a loop saves no memory."""
        results = set(self.stretches.results(number))
        return any(node not in results and not is_view(node) and node.target is not operator.getitem for node in nodes)

    def _loop(self, number: int, nodes: list[fx.Node]) -> None:
        body = _Body(self.layout, nodes, self.stretches.results(number))
        loop = TokenLoop(body.module, self.chunk, body.inputs, body.outputs, self._targets(body))
        target = f"tokens_{number}"
        self.loops[target] = loop
        sizes = map(self.sizes.write, (self.layout.batch, self.layout.length))
        call = self.graph.create_node("call_module", target, (*sizes, *map(self._read, body.reads)))
        values = []
        for node, output in zip(body.results, loop.outputs, strict=True):
            old: Tensor = node.meta["val"]
            with _fake_mode(node):
                if isinstance(output, Tokens):
                    values.append(torch.empty_permuted(old.shape, output.order, dtype=old.dtype, device=old.device))
                else:
                    values.append(old.new_empty(old.shape, dtype=total_dtype(old.dtype)))
        call.meta["val"] = tuple(values)
        for position, node in enumerate(body.results):
            item = self.graph.call_function(operator.getitem, (call, position))
            item.meta["val"] = values[position]
            self.made[node] = item
            if values[position].dtype != node.meta["val"].dtype:
                self.exact.add(item)

    def _targets(self, body: _Body) -> int | None:
        """The position of the loop's input that marks tokens with results of zero. None if there is no such input, or if in
        some value the dimension of sequences is not just before that of tokens."""
        position = self.module.meta.get("targets")
        if position is None:
            return None
        targets = self.module.graph.find_nodes(op="placeholder")[position]
        found = [number for number, used in enumerate(body.reads) if _viewed(used) is targets]
        values = zip((*body.reads, *body.results), (*body.inputs, *body.outputs), strict=True)
        apart = any(isinstance(tokens, Tokens) and not tokens.folded and (
            tokens.dim == 0 or self.layout.size(node.meta["val"].shape[tokens.dim - 1]) != self.layout.batch)
            for node, tokens in values)
        return found[0] if found and not apart else None


class _Body:
    """The graph of a loop. `reads`: the old nodes that it takes. `results`: those that it returns, products as operands."""

    def __init__(self, layout: Layout, nodes: list[fx.Node], results: list[fx.Node]) -> None:
        self.results, inside = results, set(nodes)
        found: list[fx.Node] = list(dict.fromkeys(
            used for node in nodes for used in node.all_input_nodes
            if used not in inside and not (is_size(used) and packet(node) in TAKING_SIZES)))
        self.reads = [node for node in found if not _is_constant(node)]
        graph = fx.Graph()
        sizes = _Sizes(graph, layout, graph.placeholder("batch"), graph.placeholder("count"))
        copies: dict[fx.Node, fx.Node] = {}
        self.inputs: list[Tokens | None] = []
        for node in self.reads:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta["val"] = node.meta["val"]
            self.inputs.append(_tokens(layout, node.meta["val"]) if isinstance(node.meta["val"], Tensor) else None)
        for node in found:
            if _is_constant(node):
                copies[node] = _copied(graph, node, copies.__getitem__)
        returned: list[fx.Node] = []
        self.outputs: list[Tokens | Total] = []
        given = set(results)
        for node in nodes:
            if node in given and _is_product(node, layout):
                continue
            read = functools.partial(_written, sizes, copies) if packet(node) in TAKING_SIZES else copies.__getitem__
            copies[node] = _copied(graph, node, read)
            if node in given and packet(node) is aten.sum:
                _sum_exactly(copies[node])
        for node in results:
            if _is_product(node, layout):
                returned.extend(copies[used] for used in node.args[:2])  # type: ignore[index]
                self.outputs.append(Total(product=True))
            else:
                returned.append(copies[node])
                self.outputs.append(_tokens(layout, node.meta["val"]) or Total(product=False))
        graph.output(tuple(returned))
        self.module = LazyGraphModule({}, graph)


def _viewed(node: fx.Node) -> fx.Node:
    """The node whose elements this one has in the same order, in another shape. The node itself if it is not such a view."""
    while packet(node) in (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_constant(node: fx.Node) -> bool:
    """True if a node makes a tensor from numbers alone, such as a range. Inside a loop a compiler computes its elements where
    they are read, without storing them."""
    return node.op == "call_function" and not node.all_input_nodes and isinstance(node.meta.get("val"), Tensor)


def _written(sizes: _Sizes, copies: dict[fx.Node, fx.Node], node: fx.Node) -> Any:
    return sizes.of(node) if is_size(node) else copies[node]


def _tokens(layout: Layout, value: Tensor) -> Tokens | None:
    dim = layout.dim(value)
    return None if dim is None else Tokens(dim, layout.folded(value, dim), layout.order(value))


def _is_product(node: fx.Node, layout: Layout) -> bool:
    """True if a result of a loop is a matrix product that sums over tokens."""
    return packet(node) is aten.mm and layout.dim(node.meta["val"]) is None


def _sum_exactly(node: fx.Node) -> None:
    """Makes a chunk's sum have the dtype of the total."""
    value: Tensor = node.meta["val"]
    if value.dtype != total_dtype(value.dtype):
        node.kwargs = {**node.kwargs, "dtype": total_dtype(value.dtype)}
        with _fake_mode(node):
            node.meta["val"] = value.new_empty(value.shape, dtype=total_dtype(value.dtype))


def _copied(graph: fx.Graph, node: fx.Node, read: Callable[[fx.Node], Any]) -> fx.Node:
    copy = graph.node_copy(node, read)
    copy.meta.pop("from_node", None)
    if packet(node) in (aten.view, aten._unsafe_view):
        # A chunk, and the results of a loop, may have other strides than the whole values.
        copy.target = aten.reshape.default
    return copy


def _fake_mode(node: fx.Node) -> Any:
    return next(v.fake_mode for v in tensors(node))  # type: ignore[attr-defined]


class _Sizes:
    """Writes sizes into a graph as arithmetic on two of its nodes."""

    def __init__(self, graph: fx.Graph, layout: Layout, batch: fx.Node, length: fx.Node) -> None:
        self.graph, self.layout = graph, layout
        self.written: dict[sympy.Expr, Any] = {layout.batch: batch, layout.length: length}

    def of(self, node: fx.Node) -> Any:
        """The size `node` as a node of this graph, or as a number. Raises `_WholeError` unless it consists of sums and products
        of B, T and numbers."""
        return self.write(self.layout.size(node.meta["val"]))

    def write(self, size: sympy.Expr) -> Any:
        if size not in self.written:
            operation = operator.add if size.is_Add else operator.mul if size.is_Mul else None
            if size.is_Integer:
                self.written[size] = int(size)
            elif operation is None:
                raise _WholeError
            else:
                self.written[size] = functools.reduce(
                    lambda a, b: self.graph.call_function(operation, (a, b)), map(self.write, size.args))
        return self.written[size]
