"""Stretches of a template's graph that can run on a chunk of tokens at a time: their ops, and values that cross them.

Stretch 0 comes first, then ops that need all tokens and read only its results, then stretch 1, and so on. An op is in the
stretch of the ops that read it, not in the earliest possible one: the MLP's backward begins with the gradient from the next
layer, and would hold the widest values of all tokens if it ran before the stretch of its forward. A later stretch recomputes
values that need no GEMM; for others the narrowest value from which they can be computed without a GEMM is kept.
"""
from __future__ import annotations

from torch import fx

from megacompile.ir.tokenwise import SUM, TOKENWISE, Layout, is_gemm, is_size, role, tensors


class Stretches:
    """`count` stretches. An op that is in none runs before a stretch, or after the last one."""

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
        """Ops that are in no stretch and run before this one (`count`: after the last), without inputs."""
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
        """How many stretches `reader` must come after `producer`: only a tokenwise value can be read in its own stretch."""
        if producer not in self.roles or self.roles[producer] == TOKENWISE and reader in self.roles:
            return 0
        return 1

    def _earliest(self) -> dict[fx.Node, int]:
        stage: dict[fx.Node, int] = {}
        for node in self.order:
            stage[node] = max((stage[u] + self._after(u, node) for u in self.inputs[node]), default=0)
        return stage

    def _latest(self, earliest: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """For each op the latest stretch in which ops that need all tokens can still read it; otherwise the first after its
        inputs."""
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
        sizes = (size for each in (*self.inputs[node], node) for value in tensors(each) for size in value.shape)
        return any(self.layout.length in self.layout.size(size).free_symbols for size in sizes)

    # ---------------------------------------------------------------- what crosses
    def _needed(self, number: int) -> list[fx.Node]:
        """The ops that a stretch must run for its results. Adds the values that it reads of earlier stretches to `kept`."""
        found: set[fx.Node] = set()
        stack = list(self.results(number))
        while stack:
            node = stack.pop()
            if node in found or node not in self.roles:
                continue
            if self.stage[node] < number:
                if self._is_there(node):
                    continue
                if not self._is_cheap(node, {}):
                    self.kept.add(self._narrowest(node))
                    stack.append(node)
                    continue
            found.add(node)
            stack.extend(self.inputs[node])
        return [n for n in self.order if n in found]

    def _is_there(self, node: fx.Node) -> bool:
        """Whether a value of an earlier stretch is in memory anyway."""
        return node not in self.roles or self.roles[node] == SUM or node in self.kept

    def _is_cheap(self, node: fx.Node, known: dict[fx.Node, bool]) -> bool:
        """Whether a value can be computed without a GEMM from values in memory."""
        if node not in known:
            known[node] = not is_gemm(node) and all(
                self._is_there(u) or self._is_cheap(u, known) for u in self.inputs[node])
        return known[node]

    def _narrowest(self, node: fx.Node) -> fx.Node:
        """The smallest value on the chain of single values that `node` depends on."""
        best, known = node, dict[fx.Node, bool]()
        while not is_gemm(node):
            hangs_on = [u for u in self.inputs[node] if not self._is_there(u) and not self._is_cheap(u, known)]
            if len(hangs_on) != 1:
                break
            (node,) = hangs_on
            value = node.meta["val"]
            if not isinstance(value, tuple | list) and self.layout.token_bytes(value) <= self.layout.token_bytes(
                    best.meta["val"]):
                best = node
        assert not isinstance(best.meta["val"], tuple | list), f"{best} makes several values, none of which can be kept"
        return best
