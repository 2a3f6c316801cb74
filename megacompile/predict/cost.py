"""The memory of templates, as functions of batch B and length T: bytes of a variant at its peak, of results and residuals.
(`flops.py` counts what they execute.)

The model: liveness over a variant's graph. Every op's result has its own memory, views share that of their base, and our own
ops hold a workspace in addition. Compiled code fuses ops and so holds less. The planner's margin covers workspaces of matrix
kernels and rounding by the allocator.
"""
from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.codegen.scaled_products import WORKSPACE_BYTES
from megacompile.frontend.ops import exchanges  # noqa: F401  # registers the ops
from megacompile.frontend.ops.attention_kernels import BLOCK
from megacompile.frontend.ops.mixer_ops import REGISTERED, op_name, with_shapes
from megacompile.frontend.ops.patch_encoder import PATCHES_AT_ONCE, encoder_of
from megacompile.frontend.templates.joint import base_of
from megacompile.frontend.templates.template import Template, Variant
from megacompile.ir.token_loop import TokenLoop, Total, token_loops, total_dtype
from megacompile.runtime.memory.activation_checkpoints import ALIGNMENT

#: Peaks so far, by (batch, length, fused): the planner asks for the same ones hundreds of times.
_peaks: weakref.WeakKeyDictionary[Variant, dict[tuple[int, int, bool], int]] = weakref.WeakKeyDictionary()
#: Sizes of outputs and residuals so far.
_sizes: weakref.WeakKeyDictionary[Template, dict[tuple[str | int, ...], int]] = weakref.WeakKeyDictionary()


def at(template: Template, batch: int, length: int) -> Callable[[Any], int]:
    """A function that evaluates a size from a graph's `meta["val"]` at this batch and length."""
    values = dict(zip(template.symbols, (batch, length), strict=True))
    return lambda size: int(template.symbolic(size).subs(values)) if isinstance(size, torch.SymInt) else int(size)


def tensor_bytes(value: Any, size: Callable[[Any], int]) -> int:
    if isinstance(value, torch.Tensor):
        return size(value.numel()) * value.element_size()
    if isinstance(value, tuple | list):
        return sum(tensor_bytes(v, size) for v in value)
    return 0


def _attention_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str, backward: bool) -> int:
    """Bytes of explicit scores, [B, H, T, T] in float32, times the number that are alive at once. Flash kernels hold no scores,
    but their backward on CUDA has buffers for sums."""
    softcap, kernel = node.args[5 + 3 * backward:7 + 3 * backward]
    query, key = (argument.meta["val"] for argument in node.args[backward:backward + 2])  # type: ignore[union-attr]
    batch, heads, length, width = map(size, query.shape)
    if kernel in ("flash", "flash_packed", "cudnn") and backward:
        # The query's gradient is summed in float32; those of keys and values first have as many heads as the query.
        grouped = 0 if size(key.shape[1]) == heads else 2 * tensor_bytes(query, size)
        columns = -(-width // 32) * 32 if width <= 192 else 256
        return batch * heads * (-(-length // 128) * 128) * 4 * (columns + 1) + grouped
    if kernel == "cudnn":  # of a block of queries: sums in float32, and the results of more keys, before and after scaling
        return 0 if length <= BLOCK else batch * heads * BLOCK * width * (4 + query.element_size() + 4)
    own_masks = _masks_of_heads(node.args[7 + 3 * backward:], size)
    if kernel == "efficient":  # its bias
        return batch * max(own_masks, 1) * length * (length + 15) * query.element_size()
    if kernel not in ("math", "neutral", "packed", "math_packed"):
        return 0
    half = query.element_size() if query.element_size() < 4 else 0
    if kernel == "math_packed":  # one sequence at a time, which may fill a row
        batch = 1
    scores = batch * heads * length**2 * (4 * ((6 if softcap else 5) if backward else 3) + half)
    positions = (10 + batch * own_masks) * length**2  # distances, int64, and what they hide
    expanded = 0 if size(key.shape[1]) == heads else 2 * batch * heads * length * width * query.element_size()
    return scores + positions + expanded + (tensor_bytes(query, size) if backward else 0)


def _masks_of_heads(segments: Sequence[Any], size: Callable[[Any], int]) -> int:
    """The number of heads with separate masks of pairs; 0 without a mask, or if all heads share one."""
    given = [each.meta["val"] for each in segments if isinstance(each, fx.Node)]
    heads = max((size(mask.shape[1]) for mask in given if mask.dim() == 4), default=1)
    return heads if heads > 1 else 0


#: Tokens of a chunk of a recurrence's kernel. It keeps the state before each.
RECURRENCE_CHUNK = 64


def _recurrence_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str, backward: bool) -> int:
    """Bytes of what a recurrence's kernel makes for each chunk: a state [K, V] for each head, products of pairs of tokens, and
    the values and keys that the delta rule corrects. The backward runs the forward again and has the gradients of all these."""
    given: Any = node.args[backward:backward + 5]
    query, _, value, decay, beta = (argument and argument.meta["val"] for argument in given)
    batch, length, heads, width = map(size, value.shape)
    channels = size(query.shape[3])
    tokens = batch * -(-length // RECURRENCE_CHUNK) * RECURRENCE_CHUNK * heads
    states = channels * width // RECURRENCE_CHUNK
    if node.args[backward + 6] == "fla":
        wide = 2 * channels if decay.dim() == 4 else 0  # decayed keys and queries
        if beta is None:
            expanded = 0 if size(query.shape[2]) == heads else 2 * channels
            values = 2 * expanded + 3 * states + 2 * channels if backward else expanded + states
        elif backward:
            values = 2 * states + 3 * channels + 4 * width + 2 * RECURRENCE_CHUNK + 4 + 2 * wide
        else:
            values = states + channels + 2 * width + RECURRENCE_CHUNK + wide
        return tokens * values * value.element_size()
    pairs = RECURRENCE_CHUNK * (channels if decay.dim() == 4 else 1)
    values = 4 * (5 * channels + 4 * width + states) + 8 * (channels if decay.dim() == 4 else 1)
    return tokens * (values + (16 * pairs + 24 * (channels + width + states) if backward else pairs // 8))


def _conv_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str, backward: bool) -> int:
    """Bytes of float32 copies of the values that a short convolution shifts. A kernel of CUDA has none, but its backward makes
    the result twice, with and without the activation, and the weights' gradients for each block of tokens."""
    x, weight = (argument.meta["val"] for argument in node.args[backward:backward + 2])  # type: ignore[union-attr]
    count, taps = size(x.numel()), size(weight.shape[1])
    if node.args[backward + 4] == "fla":
        return 2 * count * x.element_size() + count * taps * 4 // RECURRENCE_CHUNK if backward else 0
    return count * 4 * (3 * taps + 4 if backward else 4)


def _exchange_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str) -> int:
    """Bytes of values as they are sent, or as they arrive; of several rows, of both."""
    value = tensor_of(node)
    return tensor_bytes(value, size) * (1 if size(value.shape[0]) == 1 else 2)


#: Bytes for each token while tokens are sorted by whether they have a target: keys and numbers, each twice.
ORDER_BYTES = 20


def _cross_entropy_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str) -> int:
    """Bytes of a chunk's scores and their gradient, in the weights' dtype, of the scores of the chunk before, and of a copy of
    the chunk's tokens with their numbers. On the CPU, where the op runs unfused, also of float32 values in between."""
    hidden, weight = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
    scale, softcap, chunk = node.args[6:9]
    assert isinstance(chunk, int)
    rows, count = chunk, size(hidden.shape[0])
    values = min(rows, count) * size(weight.shape[0])
    chosen = min(rows, count) * size(hidden.shape[1]) * hidden.element_size() + ORDER_BYTES * count
    if device_type == "cuda":
        return (3 if count > rows else 2) * values * weight.element_size() + chosen
    return values * (4 * (6 + (2 if softcap else int(scale != 1))) + 1) + chosen


def _encoder_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str, backward: bool) -> int:
    """Bytes of an encoder's values for the images that it processes together, if every token belongs to an image: all images,
    or as many as it takes at once, or the largest image that fits a sequence. If there are more, gradients are summed in
    float32."""
    patches: Any = node.args[backward]
    encoder = encoder_of(node.args[4 + backward])  # type: ignore[arg-type]
    rows, length = (size(n) for n in patches.meta["val"].shape[:2])
    largest = length * encoder.per_feature
    at_once = min(rows * largest, max(largest, PATCHES_AT_ONCE))
    sums = 4 * sum(size(tensor.numel()) for tensor in node.meta["val"]) if backward and at_once < rows * largest else 0
    return at_once * encoder.held_bytes[backward] + sums


def _scaled_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str) -> int:
    """Bytes of the operands in FP32 and of the product before it is rounded, if it is emulated."""
    a, b = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
    return _emulated_bytes(*map(size, (*a.shape, b.shape[1]))) if node.args[6] == "emulated" else 0


def _emulated_bytes(rows: int, summed: int, columns: int) -> int:
    """Both operands and the product, or the product before and after it is scaled."""
    return 4 * (rows * columns + max(rows * summed + summed * columns, rows * columns))


def _registered_workspace(node: fx.Node, size: Callable[[Any], int], device_type: str) -> int:
    count = REGISTERED[op_name(node.target)].workspace_bytes
    return 0 if count is None else int(count(*with_shapes(node, size)))


#: Memory that our ops hold in addition to their results: (node, size, device type) -> bytes.
WORKSPACE: dict[Any, Callable[[fx.Node, Callable[[Any], int], str], int]] = {
    torch.ops.megacompile.attention.default: partial(_attention_workspace, backward=False),
    torch.ops.megacompile.attention_backward.default: partial(_attention_workspace, backward=True),
    torch.ops.megacompile.recurrence.default: partial(_recurrence_workspace, backward=False),
    torch.ops.megacompile.recurrence_backward.default: partial(_recurrence_workspace, backward=True),
    torch.ops.megacompile.causal_conv.default: partial(_conv_workspace, backward=False),
    torch.ops.megacompile.causal_conv_backward.default: partial(_conv_workspace, backward=True),
    torch.ops.megacompile.to_heads.default: _exchange_workspace,
    torch.ops.megacompile.to_tokens.default: _exchange_workspace,
    torch.ops.megacompile.linear_cross_entropy.default: _cross_entropy_workspace,
    torch.ops.megacompile.scaled_mm.default: _scaled_workspace,
    torch.ops.megacompile.encode_patches.default: partial(_encoder_workspace, backward=False),
    torch.ops.megacompile.encode_patches_backward.default: partial(_encoder_workspace, backward=True),
}


def peak_bytes(template: Template, variant: Variant, batch: int, length: int, fused: bool = False) -> int:
    """The most bytes that a variant's values take at once, without its inputs. `fused`: it runs compiled, so values inside
    fused kernels take no memory."""
    known = _peaks.setdefault(variant, {})
    if (batch, length, fused) not in known:
        known[batch, length, fused] = _peak_bytes(template, variant, batch, length, fused)
    return known[batch, length, fused]


def _peak_bytes(template: Template, variant: Variant, batch: int, length: int, fused: bool) -> int:
    device_type, loops = template.device_type, token_loops(variant.graph)

    def workspace(node: fx.Node, size: Callable[[Any], int]) -> int:
        if node.op == "call_module":
            loop = loops[str(node.target)]
            order = 0 if loop.targets is None else ORDER_BYTES * batch * length
            return _loop_workspace(loop, at(template, batch, min(loop.chunk, length)), device_type, fused) + order
        if node.op == "output":
            return _products_bytes(template, variant, size)
        inside = WORKSPACE.get(node.target, _registered_workspace if op_name(node.target) in REGISTERED else None)
        return (inside(node, size, device_type) if inside else 0) + (_hole_bytes(node, size, device_type) if loops else 0)

    # Ops around loops run one by one.
    size = at(template, batch, length)
    return (_graph_peak(variant.graph.graph, size, fused and not loops, workspace)
            + (_reordered_bytes(variant.graph.graph, size) if fused else 0))


def _reordered_bytes(graph: fx.Graph, size: Callable[[Any], int]) -> int:
    """Bytes that are alive because a compiler reorders the products of experts in a backward that recomputes them. It makes the
    down projection's input and a part of the gate's gradient in one kernel, so the gradient's operands are alive early."""
    products = [node for node in graph.find_nodes(op="call_function", target=aten._grouped_mm.default)
                if tensor_of(node).dim() == 2 and min(map(size, tensor_of(node.args[1]).shape[1:])) >= NARROW]
    if len(products) < 4:  # two forward, two backward
        return 0
    return 2 * min(tensor_bytes(tensor_of(node.args[0]), size) for node in products)


def _graph_peak(graph: fx.Graph, size: Callable[[Any], int], fused: bool,
                workspace: Callable[[fx.Node, Callable[[Any], int]], int] = lambda node, size: 0) -> int:
    fusion = fuse(graph) if fused else None
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            base = base_of(used)
            for value in fusion.sources[base] if fusion is not None else (base,):
                last[value] = node  # a value that is computed again keeps its sources alive
    inside: set[fx.Node] = set()
    made: dict[fx.Node, Collection[fx.Node]] = {}  # what is allocated with a stored value: its group, or nothing
    if fusion is not None:
        inside = {n for n in graph.nodes if computes(n) and n not in fusion.stored}
        for group in fusion.made_together():
            begin, end = min(group), max(group)  # in the order of the graph
            last |= {value: max(last[value], end) for node in group for value in fusion.made_from[node]}
            made |= {**dict.fromkeys(group, frozenset()), begin: group}
    dies: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        dies.setdefault(node, []).append(value)
    held = peak = 0
    for node in graph.nodes:
        if node.op == "output":
            peak = max(peak, held + workspace(node, size))
        elif node.op in _MAKING and base_of(node) is node and node not in inside:
            held += sum(_made_bytes(each, size) for each in made.get(node, [node]))
            peak = max(peak, held + workspace(node, size))
        for value in dies.get(node, ()):
            if value.op in _MAKING:
                held -= _left_bytes(value, size)
    return peak


def _products_bytes(template: Template, variant: Variant, size: Callable[[Any], int]) -> int:
    """Twice the largest gradient that the runtime computes from results of a variant. It is allocated and freed among smaller
    blocks that stay, and the holes that it leaves in the allocator's memory are too small for the next one. (Gradients of plain
    GEMMs are added in place.) For an emulated product, also its operands in FP32. A product in float8 with one scale for each
    operand is added in place, and takes cuBLASLt's workspace."""
    results: Any = variant.graph.graph.output_node().args[0]
    found = [0]
    for gradient in variant.gradients:
        elements = math.prod(map(int, template.inputs[gradient.input].shape)) if len(gradient.results) > 2 else 0
        first = results[gradient.results[0]].meta["val"]
        if gradient.kernel:
            emulated = _emulated_bytes(size(first.shape[0]), size(first.shape[1]), elements // size(first.shape[0]))
            by_rows = results[gradient.results[2]].meta["val"].dim() > 0
            found.append(emulated if gradient.kernel == "emulated" else 2 * 4 * elements if by_rows else WORKSPACE_BYTES)
        elif elements:
            found.append(2 * elements * first.element_size())
    return max(found)


def _hole_bytes(node: fx.Node, size: Callable[[Any], int], device_type: str) -> int:
    """Bytes of unusable holes in the allocator's memory during attention's backward, the peak of a layer that computes in
    chunks. Such a layer allocates almost only whole-sequence values. Among the values that stay, keys, values and their
    gradients, if smaller than queries, leave holes that no later value fits."""
    if node.target is not torch.ops.megacompile.attention_backward.default or device_type != "cuda":
        return 0
    operands = [argument.meta["val"] for argument in node.args[1:4]]  # type: ignore[union-attr]
    sizes = [tensor_bytes(value, size) for value in (*operands, *node.meta["val"][:3])]
    return sum(each for each in sizes if each < max(sizes))


_MAKING = ("call_function", "call_module")


def _made_bytes(node: fx.Node, size: Callable[[Any], int]) -> int:
    """Bytes that a node allocates. A loop allocates its results itself. The nodes that read them from it allocate nothing."""
    taken_out = node.target is operator.getitem and node.args[0].op == "call_module"  # type: ignore[union-attr]
    return 0 if taken_out else tensor_bytes(node.meta.get("val"), size)


def _left_bytes(node: fx.Node, size: Callable[[Any], int]) -> int:
    """Bytes that are freed after the last use of a node."""
    return 0 if node.op == "call_module" else tensor_bytes(node.meta.get("val"), size)


def _loop_workspace(loop: TokenLoop, size: Callable[[Any], int], device_type: str, fused: bool) -> int:
    """Bytes that a loop over chunks holds in addition to its results: copies of its inputs' chunks, which not every layout
    needs, and the body's values; also a product's operands in float32, where no GEMM accumulates in float32."""
    body = loop.body.graph
    _, _, *placeholders = body.find_nodes(op="placeholder")
    pieces = sum(tensor_bytes(node.meta["val"], size) for node, tokens in zip(placeholders, loop.inputs, strict=True) if tokens)
    results: Any = list(body.output_node().args[0])  # type: ignore[arg-type]
    widened = 0
    for output in loop.outputs:
        operands = [results.pop(0).meta["val"] for _ in range(2 if isinstance(output, Total) and output.product else 1)]
        wide = total_dtype(operands[0].dtype)
        if len(operands) == 2 and device_type != "cuda" and wide != operands[0].dtype:
            widened = max(widened, sum(size(x.numel()) for x in operands) * wide.itemsize)
    return pieces + _graph_peak(body, size, fused) + widened


def result_bytes(template: Template, variant: Variant, batch: int, length: int) -> int:
    """Bytes of all results of a variant."""
    size = at(template, batch, length)
    results = variant.graph.graph.output_node().all_input_nodes
    return sum(tensor_bytes(node.meta.get("val"), size) for node in dict.fromkeys(results))


def output_bytes(template: Template, batch: int, length: int) -> int:
    """Bytes of a template's outputs, which a checkpoint keeps."""
    return _evaluated(template, "output_bytes", batch, length)


def activation_checkpoint_bytes(template: Template, length: int) -> int:
    """Bytes that a template's outputs for one sequence take in a buffer, each of them aligned. n sequences take at most n times
    as much."""
    return output_bytes(template, 1, length) + (template.outputs - 1) * ALIGNMENT


def residual_bytes(template: Template, batch: int, length: int, residuals: str = "all") -> int:
    return _evaluated(template, "residual_bytes", batch, length, residuals)


def _evaluated(template: Template, size: str, batch: int, length: int, *options: str) -> int:
    known = _sizes.setdefault(template, {})
    if (size, batch, length, *options) not in known:
        values = dict(zip(template.symbols, (batch, length), strict=True))
        known[size, batch, length, *options] = int(getattr(template, size)(*options).subs(values))
    return known[size, batch, length, *options]


# --------------------
# The fusions of a kernel compiler in a template's graph: the values that exist in memory, and their inputs.
#
# Matrix products and attention are separate kernels. The ops between them form stages, each of which is one fused kernel. Cheap
# values are computed again wherever they are read. A value is *stored* if a reduction makes it, if a separate kernel reads it,
# or if it is a result.
aten = torch.ops.aten

#: Positions of the two matrices of a GEMM.
GEMMS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2),
         aten._grouped_mm.default: (0, 1)}
#: Products with a side below this, such as those of adapters, take as long as reading and writing their operands.
NARROW = 128
_REDUCTIONS = frozenset({aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.logsumexp, aten._softmax,
                         aten._log_softmax, aten.cumsum, aten.sort, aten.topk})
#: Ops that read as many elements of their first input as they write, whatever its size.
_GATHERS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index})
#: A value that can be computed from at most this many others is computed again, not stored.
_INLINED_READS = 4


@dataclass
class Fusion:
    """The fusion of one graph. `made_from`: for each stored value, in the order of the graph, the values that it is computed
    from. `sources`: for each value the stored values that it is computed from (itself, if it is stored or the result of a
    separate kernel). `stage`: the stage of each value. `read_by_kernels`: the values that separate kernels read."""

    made_from: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    sources: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    read_by_kernels: set[fx.Node] = field(default_factory=set)

    @property
    def stored(self) -> Set[fx.Node]:
        """The stored values."""
        return self.made_from.keys()

    def reads(self) -> dict[int, set[fx.Node]]:
        """The values that each stage reads."""
        found: dict[int, set[fx.Node]] = {}
        for node, values in self.made_from.items():
            found.setdefault(self.stage[node], set()).update(values)
        return found

    def made_together(self) -> list[set[fx.Node]]:
        """The stored values in groups, each of which one kernel writes. A compiler fuses ops of a stage that read the same
        values of the results' size, or each other's results. It allocates all results of a kernel before it frees an input."""
        groups: dict[fx.Node, set[fx.Node]] = {}
        first: dict[tuple[int, fx.Node], fx.Node] = {}  # a stage and a value -> the first stored value that it is part of
        for node, read in self.made_from.items():
            groups[node] = {node}
            size = _elements(node)
            for value in (node, *read):
                if _elements(value) == size:
                    other = first.setdefault((self.stage[node], value), node)
                    smaller, larger = sorted((groups[other], groups[node]), key=len)
                    if smaller is not larger:
                        larger |= smaller
                        groups |= dict.fromkeys(smaller, larger)
        return list({id(group): group for group in groups.values()}.values())


def fuse(graph: fx.Graph) -> Fusion:
    found = Fusion()
    found.read_by_kernels = {
        base_of(used) for node in graph.nodes if node.op == "output" or kernel_of(node) for used in inputs(node)}
    stage, sources = found.stage, found.sources
    for node in graph.nodes:
        before = max((stage[base_of(used)] for used in node.all_input_nodes), default=0)
        if not computes(node):
            stage[node], sources[node] = before + (kernel_of(node) is not None), {node}
            continue
        made_from: set[fx.Node] = set().union(*(sources[used] for used in inputs(node)))
        stage[node], sources[node] = max((stage[s] for s in made_from), default=0), made_from
        if _targets_any(node, _REDUCTIONS) or node in found.read_by_kernels or len(made_from) > _INLINED_READS:
            found.made_from[node] = made_from
            sources[node] = {node}
    return found


def kernel_of(node: fx.Node) -> str | None:
    """The name of a separate kernel; None for ops that a compiler fuses, and for nodes that compute nothing. (A fused graph has
    no loops over chunks of tokens: callers look at the loops' bodies instead.)"""
    if node.op != "call_function":
        return None
    if node.target in GEMMS:
        return "gemm"
    if op_name(node.target) in REGISTERED:
        return "registered"
    namespace, _, name = str(getattr(node.target, "name", lambda: "")()).partition("::")
    return name if namespace == "megacompile" else None


def tensor_of(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _elements(node: fx.Node) -> str:
    """The number of elements of a value, as text, since comparing symbolic numbers would fix them."""
    return str(tensor_of(node).numel())


def computes(node: fx.Node) -> bool:
    """True if a node allocates its result and its op is not a separate kernel."""
    return (node.op == "call_function" and isinstance(node.meta.get("val"), Tensor) and base_of(node) is node
            and node.target is not operator.getitem and kernel_of(node) is None)


def inputs(node: fx.Node) -> Iterator[fx.Node]:
    """The values that a node reads. The rows that a gather reads count as its result, not as an input."""
    for used in node.all_input_nodes:
        gathered = _targets_any(node, _GATHERS) and used is node.args[0]
        if isinstance(used.meta.get("val"), Tensor) and not gathered:
            yield base_of(used)


def _targets_any(node: fx.Node, ops: Collection[Any]) -> bool:
    return getattr(node.target, "overloadpacket", None) in ops
