"""A section's joint forward and backward graph (AOT), the values that its backward needs saved, and how variants are cut from
it."""
from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.compat import aot
from megacompile.compat.aot import min_cut_rematerialization_partition
from megacompile.compat.core import FakeTensorMode, LazyGraphModule, pytree
from megacompile.frontend.ops.experts import DECOMPOSITIONS
from megacompile.frontend.templates.graph_cache import functional_graph

# --------------------
# Results that a device's kernels return in other dtypes or shapes than the CPU's kernels, on which graphs are traced:
# statistics of normalizations, and values that only the CPU's backward needs.
aten = torch.ops.aten

_DIFFERING = {
    # For bf16 values the CPU keeps means and deviations in bf16, CUDA in float32.
    aten.native_layer_norm.default, aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default,
    # The CPU keeps exponentials for the backward; CUDA computes them again, and returns an empty tensor.
    aten.log_sigmoid_forward.default,
}


def correct_results(module: fx.GraphModule, fakes: FakeTensorMode, device_type: str) -> None:
    """Gives `meta["val"]` of nodes the dtypes and shapes that they have on `device_type`. Compiled code trusts the stated
    dtype: it would read the bits of float32 as bf16."""
    if device_type == "cpu":
        return
    changed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.target in _DIFFERING:
            found = _evaluated(node, fakes, torch.device(device_type))
        elif changed.intersection(node.all_input_nodes) and node.op == "call_function":
            found = _evaluated(node, fakes, torch.device("cpu"))
        else:
            continue
        if _forms(found) != _forms(node.meta["val"]):
            node.meta["val"] = _on(found, fakes, torch.device("cpu"))
            changed.add(node)


def _evaluated(node: fx.Node, fakes: FakeTensorMode, device: torch.device) -> Any:
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: _on(argument.meta["val"], fakes, device))
    with fakes:
        return target(*args, **kwargs)


def _on(value: Any, fakes: FakeTensorMode, device: torch.device) -> Any:
    """Fakes of the same shapes on a device. The device need not exist, since nothing is copied."""
    with fakes:
        return pytree.tree_map_only(
            Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), value)


def _forms(value: Any) -> list[tuple[torch.dtype, str] | None]:
    """Dtypes and shapes. Sizes are compared as text: comparing symbols would add guards."""
    return [(each.dtype, str(tuple(each.shape))) if isinstance(each, Tensor) else None for each in pytree.tree_leaves(value)]


# A lean cut: with these bans of the partitioner off, cheap elementwise chains are recomputed instead of saved.
_LEAN = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
}
#: The ops for products of a mixture: transformers multiplies weights that are not bfloat16 by an op of its own.
_GROUPED_PRODUCTS = ("._grouped_mm.", ".grouped_mm_fallback.")
#: A value is small if the largest weight that it is computed from has at least this many times its bytes.
_SMALL_RATIO = 64


@dataclasses.dataclass
class JointGraph:
    """`graph` computes outputs from inputs, and gradients from inputs and tangents. All lists hold its nodes. `tangents`: one
    for each output with a gradient. `gradients`: by index of the input. `residuals`: the values that `forward_saving` keeps;
    some are sizes, Python ints at run time. `reached`: for each input that autograd differentiates, the outputs whose gradients
    its gradient is computed from."""

    graph: fx.GraphModule
    inputs: list[fx.Node]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: dict[int, fx.Node]
    residuals: list[fx.Node]
    reached: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)

    def attention_results(self) -> list[fx.Node]:
        """The results of our attention and of recurrences in the forward. If `forward_saving` only keeps these, everything else
        is computed again."""
        attention = torch.ops.megacompile.attention.default
        return [*(n for n in self.graph.graph.find_nodes(op="call_function", target=operator.getitem)
                  if n.args[0].target is attention),
                *self.graph.graph.find_nodes(op="call_function", target=torch.ops.megacompile.recurrence.default)]

    def pairs_of_experts(self) -> list[tuple[fx.Node, fx.Node]]:
        """For each mixture, where each expert's pairs end, int32 [experts], which is the third operand of its grouped products;
        and the number of each pair's expert, int64 [pairs], token by token, by whose sorting these ends are known."""
        found: dict[fx.Node, fx.Node] = {}
        for product in (n for n in self.graph.graph.nodes if any(op in str(n.target) for op in _GROUPED_PRODUCTS)):
            node = ends = product.args[2]
            while node.all_input_nodes and node.target is not torch.ops.aten.sort.default:
                node = node.all_input_nodes[0]
            if node.all_input_nodes:
                found[ends] = node.args[0]
        return list(found.items())


def example_values(graph: fx.GraphModule) -> list[Any]:
    """The fakes of a Dynamo-level graph's placeholders."""
    return [n.meta["example_value"] for n in graph.graph.find_nodes(op="placeholder")]


def forward_graph(
    graph: fx.GraphModule, fakes: FakeTensorMode, decompositions: dict[Any, Any] | None = None,
) -> JointGraph:
    """Only the forward of a Dynamo-level section, made functional."""
    with fakes, torch.no_grad():
        traced = functional_graph(graph, example_values(graph), fakes, trace_joint=False,
                                  decompositions=DECOMPOSITIONS | (decompositions or {}))
    return JointGraph(traced, traced.graph.find_nodes(op="placeholder"), [], _results(traced), {}, [])


def joint_graph(
    graph: fx.GraphModule, fakes: FakeTensorMode, has_gradient: Sequence[bool], partition: bool,
    awaited: Sequence[int] = (), decompositions: dict[Any, Any] | None = None, device_type: str = "cpu",
    parameters: Sequence[int] = (),
) -> JointGraph:
    """Forward and backward of a Dynamo-level section, for a device of this type. Residuals are chosen if `partition`. Each of
    the `awaited` inputs that requires a gradient gets one: zero if it is read but not differentiated. Values that depend on
    these `parameters` alone (the values of quantized weights, weights in float8) are computed again, not saved, unless they are
    small."""
    examples = example_values(graph)
    if not any(has_gradient):
        alone = forward_graph(graph, fakes)
        waited_for = [i for i in awaited if examples[i].requires_grad]
        alone.gradients.update({i: _zeros_like(alone.graph.graph, alone.inputs[i]) for i in waited_for})
        return alone
    with fakes:
        joint = functional_graph(graph, examples, fakes, trace_joint=True,
                                 decompositions=DECOMPOSITIONS | (decompositions or {}))
    correct_results(joint, fakes, device_type)
    saved: set[str] = set()
    if partition:
        with fakes, aot.config.patch(_LEAN):
            # This also merges common subexpressions of `joint`, in place: take no node before this line.
            _, backward = min_cut_rematerialization_partition(joint, examples, num_fwd_outputs=len(has_gradient))
        saved = {n.name for n in backward.graph.find_nodes(op="placeholder")}
    placeholders = joint.graph.find_nodes(op="placeholder")
    inputs, tangents = placeholders[: len(examples)], placeholders[len(examples):]
    assert len(tangents) == sum(has_gradient), f"{len(tangents)} tangents for outputs {has_gradient}"
    results = _results(joint)
    outputs, gradients = results[: len(has_gradient)], results[len(has_gradient):]
    # Min-cut saves t(W), a view of a weight slot that holds another layer's weights by then. A view of an input is not a
    # residual: the backward views the input that it gets.
    again = _made_of(joint.graph, [inputs[position] for position in parameters])
    residuals = [n for n in joint.graph.nodes if n.name in saved and n not in again and base_of(n).op != "placeholder"]
    behind = dict(zip(tangents, (i for i, wanted in enumerate(has_gradient) if wanted), strict=True))
    reached = _computed_from(joint.graph, behind, {i: g for i, g in enumerate(gradients) if g is not None})
    for position in awaited:
        if gradients[position] is None and examples[position].requires_grad:
            gradients[position] = _zeros_like(joint.graph, inputs[position])
    return JointGraph(
        joint, inputs, tangents, outputs, {i: g for i, g in enumerate(gradients) if g is not None}, residuals, reached)


def _computed_from(graph: fx.Graph, marked: Mapping[fx.Node, int], nodes: Mapping[int, fx.Node]) -> dict[int, frozenset[int]]:
    """The numbers of the `marked` nodes that each of `nodes` is computed from."""
    found: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        own = (frozenset({marked[node]}),) if node in marked else ()
        found[node] = frozenset().union(*own, *(found[used] for used in node.all_input_nodes))
    return {number: found[node] for number, node in nodes.items()}


def _made_of(graph: fx.Graph, inputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that are computed from these inputs alone, ignoring inputs that are small beside them, such as scales."""
    found = {node: _bytes(node) for node in inputs}  # node -> bytes of the largest input that it is made of
    for node in graph.nodes:
        if node.all_input_nodes and all(used in found for used in node.all_input_nodes):
            found[node] = max(found[used] for used in node.all_input_nodes)
    return {node for node, largest in found.items() if _bytes(node) * _SMALL_RATIO > largest}


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0


def _results(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.output_node().args[0])  # type: ignore[arg-type]


def _zeros_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        zeros = graph.call_function(torch.ops.aten.zeros_like.default, (node,))
    zeros.meta["val"] = node.meta["val"]
    return zeros


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory `node` views; itself if it owns its memory."""
    while node.op == "call_function":
        # An item of split, unbind, ... views what the split does.
        producer: Any = node.args[0] if node.target is operator.getitem else node
        shares = getattr(producer.target, "is_view", False) or producer.target is torch.ops.aten._unsafe_view.default
        if not shares or not isinstance(producer.args[0], fx.Node):  # a view of a constant
            break
        node = producer.args[0]
    return node


def cut_graph(joint: fx.GraphModule, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of `joint` that computes `results` from `inputs`. Every input stays a placeholder, in order. Copies only what
    the results depend on. fx's dead-code elimination treats attention, which has a dropout argument, as impure, and would keep
    the forward's attention in a backward that does not read it. No result shares memory with an input: such a result is
    cloned."""
    given, needed, stack = set(inputs), set(), list(results)
    while stack:
        node = stack.pop()
        if node not in needed and node not in given:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.node_copy(node) if node.op == "placeholder" else graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        copies[node].meta.pop("from_node", None)
    for node in joint.graph.nodes:
        if node in needed:
            assert node.op != "placeholder", f"{node.name} is read by a variant that does not take it"
            copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = []
    for node in results:
        copy = copies[node]
        if base_of(copy).op == "placeholder" and isinstance(node.meta["val"], Tensor):
            copy = graph.call_function(torch.ops.aten.clone.default, (copy,))
            copy.meta["val"] = node.meta["val"]
        returned.append(copy)
    graph.output(tuple(returned))
    return LazyGraphModule(joint, graph)


def replace_unit_tangent(module: fx.GraphModule, tangents: int) -> None:
    """Replaces the last `tangents` placeholders, gradients of a loss, by one, so that products with them disappear."""
    for tangent in module.graph.find_nodes(op="placeholder")[-tangents:] if tangents else ():
        for user in list(tangent.users):
            other = [a for a in user.all_input_nodes if a is not tangent]
            if user.target is torch.ops.aten.mul.Tensor and len(other) == 1:
                ours, theirs = user.meta["val"], other[0].meta["val"]
                if isinstance(theirs, Tensor) and (ours.dtype, ours.dim()) == (theirs.dtype, theirs.dim()):
                    user.replace_all_uses_with(other[0])
                    module.graph.erase_node(user)
        if tangent.users:
            with module.graph.inserting_after(tangent):
                value = tangent.meta["val"]
                one = module.graph.call_function(
                    torch.ops.aten.full.default, ((), 1.0), {"dtype": value.dtype, "device": value.device})
                one.meta["val"] = value
            tangent.replace_all_uses_with(one)
        module.graph.erase_node(tangent)
    module.recompile()


def tolerate_strides(module: fx.GraphModule) -> None:
    """Lets every view copy if it must: some kernels return other strides than their fakes (softplus' backward does)."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    module.recompile()


def retarget(module: fx.GraphModule, device_type: str) -> None:
    """Moves the tensors that the graph creates, and its constants, to `device_type`: the graph was traced on the CPU."""
    if device_type == "cpu":
        return
    device = torch.device(device_type)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        elif node.op == "get_attr":
            with module.graph.inserting_after(node):
                moved = module.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"device": device})
            moved.meta = dict(node.meta)
            node.replace_all_uses_with(moved, delete_user_cb=lambda user, moved=moved: user is not moved)
    module.recompile()
