"""The duration of each node of a program alone, in seconds: work of templates and bytes of tiles over a machine's rates.
`simulate.py` adds how lanes slow each other down."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import sympy
import torch
from tabulate import tabulate
from torch import Tensor, fx

from megacompile.compat.symbols import size_functions
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.ops.mixer_ops import REGISTERED, op_name, with_shapes
from megacompile.frontend.templates.template import BATCH, LENGTH, Template, Variant
from megacompile.ir.ops import TEMPLATE_OPS
from megacompile.ir.plan import Plan
from megacompile.ir.program import Op, Program, argument, op_of, operands
from megacompile.ir.token_loop import TokenLoop, Tokens, token_loops
from megacompile.predict import cost
from megacompile.predict.cost import GEMMS, NARROW, RECURRENCE_CHUNK, computes, fuse, inputs, kernel_of, tensor_of
from megacompile.predict.hardware import Hardware
from megacompile.predict.simulate import Timeline, simulate
from megacompile.runtime.memory.shards import held_by
from megacompile.runtime.memory.state_layout import ADAMW_STATE, ElementState
from megacompile.runtime.memory.tiles import TileLayout

# --------------------
# The work of a template's variant, as functions of batch B and length T: FLOPs by kind, and bytes that it moves.
#
#     GEMMs        2 x (elements of the first matrix) x (columns of the second). Gradients that a variant returns as two
#                  operands, which the runtime multiplies, count too. Grouped GEMMs, those of experts, are counted separately,
#                  and so are products in float8
#     attention    pairs of positions that are computed: half of all, or those in a window. The backward takes 5 products, the
#                  forward 2. Counted by kernel, each with the FLOPs of one additional key per query
#     the rest     bytes read and written in device memory, with elementwise chains fused as a kernel compiler fuses them
#
# Recomputed work counts like any other. `cost.py` decides what is fused.
_ZERO = sympy.Integer(0)


class Attention(NamedTuple):
    """FLOPs of all pairs that one kernel computes, and of one additional key for each query."""

    flops: sympy.Expr = _ZERO
    per_key: sympy.Expr = _ZERO


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes in B and T. `grouped_row`: FLOPs of one more row for each group of grouped GEMMs. `gemm_bytes`: of the
    operands and results of GEMMs, including grouped ones and those in float8; a large GEMM hides them. `narrow_bytes`: of GEMMs
    that do not. `bytes`: all others. `exchanged`: bytes that come from other ranks. `kernels`: the number of launches.
    `recurrence_flops`: of linear recurrences. `attention`: by kernel and direction, such as ("cudnn", "backward")."""

    gemm_flops: sympy.Expr = _ZERO
    float8_flops: sympy.Expr = _ZERO
    grouped_flops: sympy.Expr = _ZERO
    grouped_row: sympy.Expr = _ZERO
    recurrence_flops: sympy.Expr = _ZERO
    gemm_bytes: sympy.Expr = _ZERO
    narrow_bytes: sympy.Expr = _ZERO
    bytes: sympy.Expr = _ZERO
    exchanged: sympy.Expr = _ZERO
    kernels: sympy.Expr | int = 0
    attention: Mapping[tuple[str, str], Attention] = field(default_factory=dict)

    @property
    def flops(self) -> sympy.Expr:
        return sum((each.flops for each in self.attention.values()),
                   self.gemm_flops + self.float8_flops + self.grouped_flops + self.recurrence_flops)

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
    elementwise chain runs as one kernel. Otherwise every op reads and writes memory."""
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
            grouped = node.target is torch.ops.aten._grouped_mm.default
            operands = _operands(moved, *sizes.shape(a)[-2:], sizes.shape(b)[-1], grouped=grouped)
            if grouped:
                result = tensor_of(node) if tensor_of(node).dim() == 3 else tensor_of(b)
                row = 2 * sizes.count(result) * (1 if result.dim() == 3 else sizes.shape(a)[-1])
                return _grouped_product(flops, row, operands, sizes)
            return Work(gemm_flops=flops, kernels=1) + operands
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
        case "recurrence":
            return Work(recurrence_flops=_recurrence(node.args, sizes), kernels=6)
        case "recurrence_backward":
            return Work(recurrence_flops=3 * _recurrence(node.args[1:], sizes), kernels=14)
        case "causal_conv":  # reads a value for each tap
            return Work(bytes=(sizes.shape(node.args[1])[1] + 1) * sizes.bytes(node), kernels=1)
        case "causal_conv_backward":  # the result is computed again
            return Work(bytes=(5 * sizes.shape(node.args[2])[1] + 1) * sizes.bytes(node.args[1]), kernels=4)
        case "to_heads" | "to_tokens" | "all_tokens":  # values are arranged for the ranks that get them, and again at their end
            moved, ranks = sizes.bytes(node), sympy.sympify(node.args[1])
            return Work(bytes=4 * moved, exchanged=moved * (ranks - 1) / ranks, kernels=4)
        case "linear_cross_entropy":
            return _linear_cross_entropy(node, sizes)
        case "registered":
            count = REGISTERED[op_name(node.target)].flops
            moved = sizes.bytes(node, *node.all_input_nodes)
            return Work(bytes=moved, kernels=1) if count is None else Work(
                recurrence_flops=sympy.sympify(count(*with_shapes(node, sizes.template.symbolic))), kernels=1)
    return Work()


def _recurrence(arguments: Sequence[Any], sizes: _Sizes) -> sympy.Expr:
    query, _, value, _, beta = arguments[:5]
    *rows, width = sizes.shape(value)
    return sympy.Mul(*rows) * recurrence_flops(sizes.shape(query)[3], width, delta=beta is not None)


def recurrence_flops(channels: Any, width: Any, delta: bool) -> Any:
    """FLOPs of a recurrence for each token and head: products of pairs of tokens within a chunk, and with the states. A delta
    rule has products of keys with keys, and corrects values and keys by a triangular system. The backward has three times as
    many, with the forward that it runs again."""
    pairs = RECURRENCE_CHUNK * (channels + width + (2 * channels + width + RECURRENCE_CHUNK if delta else 0))
    return 2 * (pairs + (3 if delta else 2) * channels * width)


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




#: Narrow grouped products move bytes at this share of the memory's rate: a factor of rank 16 fills an eighth of a tile.
NARROW_GROUPED_SHARE = sympy.Rational(1, 2)


def _operands(moved: sympy.Expr, *sides: sympy.Expr, grouped: bool = False) -> Work:
    """The bytes of a product's operands and result."""
    narrow = any(side.is_Integer and side < NARROW for side in sides)
    if not narrow:
        return Work(gemm_bytes=moved)
    return Work(narrow_bytes=moved / NARROW_GROUPED_SHARE if grouped else moved)


def _grouped_product(flops: sympy.Expr, row: sympy.Expr, operands: Work, sizes: _Sizes) -> Work:
    """A grouped product, which skips the rows of other pieces. `row`: FLOPs of one more row for each group."""
    return Work(grouped_flops=flops * sympy.Rational(sizes.template.share), grouped_row=row, kernels=1) + operands


def _accumulation(results: Sequence[fx.Node], sizes: _Sizes) -> Work:
    """The work of adding a parameter's gradient, or the product that makes it, to its FP32 accumulator."""
    match results:
        case [value]:
            return Work(bytes=sizes.bytes(value) + 8 * sizes.count(value), kernels=1)
        case [a, b]:
            rows, columns = sizes.shape(a)[0], sizes.shape(b)[-1]
            operands = _operands(sizes.bytes(a, b) + 8 * rows * columns, rows, columns)
            return Work(gemm_flops=2 * sizes.count(a) * columns, kernels=1) + operands
        case [rows, others, ends]:  # multiplied, then added
            side, columns, width = sizes.shape(rows)[-1], sizes.shape(others)[-1], rows.meta["val"].element_size()
            made = sizes.count(ends) * side * columns
            operands = _operands(sizes.bytes(rows, others) + width * made, side, columns, grouped=True)
            return (_grouped_product(2 * sizes.count(rows) * columns, 2 * made, operands, sizes)
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
    """The memory traffic of fused kernels. Each reads a value from outside of its stage once, and writes the values that are
    read outside of it."""
    fusion = fuse(graph)
    # Values that a stage makes itself are in registers or in a cache.
    fetched = {at: {s for s in read if s not in fusion.stored or fusion.stage[s] != at} for at, read in fusion.reads().items()}
    written = {s for s in fusion.stored if s in fusion.read_by_kernels or any(s in found for found in fetched.values())}
    moved = sizes.bytes(*written) + sum((sizes.bytes(*found) for found in fetched.values()), _ZERO)
    return Work(bytes=moved, kernels=len(fetched))


#: At one batch and length: (FLOPs of GEMMs, of products in float8, of grouped GEMMs, of one more row for each of their groups,
#: of recurrences, bytes of GEMMs, other bytes, exchanged bytes, kernels), and for each attention kernel its FLOPs and those of
#: one more key.
_Numbers = tuple[tuple[float, float, float, float, float, float, float, float, int], tuple[tuple[float, float], ...]]


class Seconds(NamedTuple):
    """Seconds of a variant's run: in grouped products of experts, in attention's kernels, and in everything else."""

    experts: float
    attention: float
    rest: float


#: Functions in sizes other than sums and products, such as `-(-T // 8)` in a layer that pads to a multiple of 8.
_SIZE_FUNCTIONS = {name: getattr(size_functions, name) for name in size_functions.__all__}


#: Steps of the iteration that makes a matrix orthogonal: what `torch.optim.Muon` does by default.
MATRIX_STEPS = 5
#: The duration of each op in words; `Durations._node` computes it. The others take no time, or move a few bytes.
COSTS: dict[str, str] = {
    **dict.fromkeys(sorted(TEMPLATE_OPS), "products over the GEMM rate, or their bytes over memory bandwidth where that is "
                    "longer; attention and recurrences over their rates; other bytes over memory bandwidth; at least the "
                    "launches"),
    "prefetch": "weight bytes / h2d rate", "prefetch_shard": "weight bytes / ranks / h2d rate",
    "prefetch_routed": "most bytes of chosen experts / h2d rate",
    **dict.fromkeys(("gather", "gather_resident", "gather_momentum"), "weight bytes of other shards / "
                    "peer bandwidth; between hosts at least those of other hosts / network bandwidth of all devices"),
    "momentum": "(gradient + state bytes) / ranks / h2d rate",
    "reduce_scatter": "accumulators of other shards / peer bandwidth; between hosts as for gather",
    "all_reduce": "2 x (copies - 1) / copies x accumulators of a shard / network bandwidth",
    "fetch_gradients": "gradient bytes / h2d rate",
    "fetch_held": "(state bytes, and those of weights that are not on the device) / h2d rate",
    "return_weights": "weight bytes / d2h rate", "return_state": "state bytes / d2h rate",
    "offload": "gradient bytes / d2h rate", "offload_weights": "weight bytes / d2h rate",
    "stash": "bytes / d2h rate", "fetch": "bytes / h2d rate",
    **dict.fromkeys(("pack", "pack_shard"), "weight bytes / host copy rate"),
    **dict.fromkeys(("fetch_state", "store_state"), "state bytes / host copy rate"),
    "accumulate": "gradient bytes / host copy rate; twice that where it adds",
    **dict.fromkeys(("update", "update_from_sum"), "parameters / rate of the update with this state"),
    **{f"update_{part}": f"the same over the rate of its {part} alone" for part in ("weights", "moments")},
    "update_visiting": "(weight + gradient + state bytes) / h2d rate + (weight + state bytes) / d2h rate; products of matrices "
                     "over the GEMM rate",
    "read_state": "bytes / rate of the disk's reads",
    "write_state": "bytes / rate of the disk's writes",
    "add_to_sum": "(gradient + FP32 sum bytes; the sum's twice where it adds) / (2 x host copy rate)",
    "norms_of_sum": "FP32 sum bytes / (2 x host copy rate)",
    **dict.fromkeys(("update_on_device", "update_held"), "(gradient + 2 x weight + 2 x state bytes) / memory bandwidth; "
                    "products of matrices over the GEMM rate"),
    "hold": "2 x (gradient and weight bytes) / memory bandwidth",
    "zeros": "accumulators / memory bandwidth",
    "reduce": "(accumulators + 2 x gradient bytes) / memory bandwidth", "scale": "2 x bytes / memory bandwidth"}


def cost_table() -> str:
    """The cost of ops as a Markdown table, with ops of the same cost in one row."""
    rows = [[", ".join(f"`{op}`" for op in COSTS if COSTS[op] == cost), cost] for cost in dict.fromkeys(COSTS.values())]
    return str(tabulate(rows, ["op", "seconds"], tablefmt="github"))


@functools.cache
def _moved_bytes(state: ElementState, dtype: torch.dtype) -> float:
    """Bytes that the host's update reads and writes for each element of this dtype."""
    return 3 * dtype.itemsize + 2 * state.bytes(dtype)  # weights both ways, gradients once, state both ways


def update_rate(hardware: Hardware, state: ElementState, dtype: torch.dtype) -> float:
    """Elements/s of the host's update. Rules other than AdamW take time in proportion to their bytes."""
    exact = state.exact or dtype == torch.float32  # otherwise weights are rounded at random
    share = hardware.adam_formats.get(state.format.name, 1.0) if exact else hardware.adam_rounded[state.format.name]
    alike = replace(ADAMW_STATE, format=state.format, exact=exact)
    return hardware.adam * share * _moved_bytes(alike, torch.bfloat16) / _moved_bytes(state, dtype)


@dataclass
class Durations:
    """The seconds that nodes take, for one model on one machine. State: the work of the variants so far. `fused`: templates run
    compiled. A kernel takes the time of its products, or of reading and writing their operands if that is longer, plus the time
    of its elementwise chains, and at least the time of its launch."""

    captured: CapturedModel
    layouts: Mapping[str, TileLayout]
    hardware: Hardware
    fused: bool = True
    _work: dict[Variant, tuple[Work, Callable[[int, int], _Numbers]]] = field(default_factory=dict)
    _seconds: dict[tuple[Variant, int, int], Seconds] = field(default_factory=dict)

    def of(self, program: Program, plan: Plan) -> Callable[[fx.Node], float]:
        """The duration of each node of a program under its plan."""
        return lambda node: self._node(program, node, plan)

    def simulate(self, program: Program, plan: Plan, without: Callable[[Op], bool] | None = None) -> Timeline:
        """A few training steps of a program under its plan. Ops for which `without` is true take no time."""
        seconds = self.of(program, plan)
        speeds = functools.partial(self.hardware.speeds, ranks=program.ranks // program.spread, network=program.spread > 1)
        if without is None:
            return simulate(program, seconds, speeds)
        return simulate(program, lambda node: 0.0 if without(op_of(node)) else seconds(node), speeds)

    def work(self, template: str, variant: str, chunk: int = 0, residuals: str = "all") -> Work:
        """A variant's FLOPs and bytes in B and T."""
        found = self.captured.templates[template]
        return self._known(found, found.variant(variant, chunk, residuals))[0]

    def seconds(self, template: str, variant: str, batch: int, length: int, chunk: int = 0, residuals: str = "all") -> Seconds:
        """Seconds of one run of a variant. `chunk` and `residuals`: of the plan."""
        found = self.captured.templates[template]
        cut = found.variant(variant, found.chunk(batch, chunk), residuals)
        key = cut, batch, length
        if key not in self._seconds:
            work, numbers = self._known(found, cut)
            (gemm, float8, grouped, row, recurrence, gemm_bytes, other_bytes, exchanged, kernels), attentions = numbers(
                batch, length)
            rates = self.hardware
            rate = self.gemm_rate(found)
            experts = (grouped + rates.grouped_overhead * row) / rates.grouped_efficiency / rate
            products = gemm / rate + (float8 and float8 / self.float8_rate(found))
            waiting = max(0.0, gemm_bytes / rates.memory_bandwidth - products - experts)  # for operands
            attention = sum((flops + rates.attention_overhead[way] * per_key) / rates.attention_share(kernel, way)
                            for (kernel, way), (flops, per_key) in zip(work.attention, attentions, strict=True)) / rate
            rest = products + recurrence / rates.recurrence_efficiency / rate + waiting + other_bytes / rates.memory_bandwidth
            rest += exchanged / rates.peer_rate
            self._seconds[key] = Seconds(experts, attention, max(rest, kernels * rates.launch_s - experts - attention))
        return self._seconds[key]

    def gemm_rate(self, template: Template) -> float:
        """FLOP/s of products in the dtype of a template's parameters."""
        dtypes = [x.dtype for x in template.inputs if x.role.kind == "parameter" and x.dtype is not None]
        low = any(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)
        return self.hardware.gemm_flops["bfloat16" if low else "float32"]

    def float8_rate(self, template: Template) -> float:
        """FLOP/s of products in float8, casts not included. Emulated ones run in FP32. A machine whose rate is not known is
        taken to have 1.5 times its bfloat16 rate: in training, an H200 does not keep up the twofold rate of its data sheet."""
        rates, recipe = self.hardware.gemm_flops, template.precision
        if recipe is not None and recipe.emulated:
            return rates["float32"]
        return rates.get("float8", 1.5 * rates["bfloat16"])

    def update_s(self, layout: TileLayout) -> float:
        """Seconds of the host's update of a whole tile."""
        return sum(s.count / update_rate(self.hardware, layout.state_of(position), layout.dtype)
                   for position, s in enumerate(layout.slices) if s.trainable)

    def _products_s(self, layout: TileLayout) -> float:
        """Seconds of the products of an update of whole matrices, in bf16, on the rank with parts of the most. Each of
        `MATRIX_STEPS` multiplies a matrix twice with a square one of its smaller side, and that square one with itself."""
        matrices = layout.matrices

        def flops(held: slice) -> int:
            sides = (sorted((rows, columns)) for start, rows, columns, _ in matrices
                     if start < held.stop and start + rows * columns > held.start)
            return sum(MATRIX_STEPS * (4 * least * least * most + 2 * least ** 3) for least, most in sides)

        most = max(flops(held_by(layout, rank)) for rank in range(layout.ranks))
        return most / self.hardware.gemm_flops["bfloat16"]

    def _known(self, template: Template, variant: Variant) -> tuple[Work, Callable[[int, int], _Numbers]]:
        if variant not in self._work:
            work = variant_work(template, variant, self.fused)
            numbers = sympy.lambdify((BATCH, LENGTH), (
                (work.gemm_flops, work.float8_flops, work.grouped_flops, work.grouped_row, work.recurrence_flops,
                 work.gemm_bytes, work.bytes + work.narrow_bytes, work.exchanged, work.kernels),
                tuple(map(tuple, work.attention.values()))), modules=[_SIZE_FUNCTIONS, "math"])
            self._work[variant] = work, numbers
        return self._work[variant]

    # ---------------------------------------------------------------- nodes
    def of_template(self, program: Program, node: fx.Node, plan: Plan) -> Seconds:
        """The seconds of a node that runs a template."""
        mb = argument(node, "mb")
        return self.seconds(argument(node, "template"), op_of(node).name, program.micro_batches[mb], plan.length_of(mb),
                            plan.token_chunk, plan.residuals)

    def _node(self, program: Program, node: fx.Node, plan: Plan) -> float:
        op, hardware = op_of(node).name, self.hardware
        if op in TEMPLATE_OPS:
            return sum(self.of_template(program, node, plan))
        tile: Any = program.tiles.get(argument(node, "tile") or "")
        ranks, hosts = program.ranks, program.spread  # all ranks of a host share its rates, and each does its share of the work
        match op:
            case "prefetch" | "prefetch_routed" | "prefetch_shard" | "fetch_gradients" | "fetch" | "fetch_held":
                return program.moved_bytes(node) / hardware.link["h2d"]
            case "offload" | "offload_weights" | "offload_norms" | "stash" | "return_weights" | "return_state":
                return program.moved_bytes(node) / hardware.link["d2h"]
            case "momentum":
                return (tile.gradient_bytes + tile.state_bytes) / ranks / hardware.link["h2d"]
            case "gather" | "gather_resident" | "gather_momentum":
                return self._exchange_s(program, tile.weight_bytes)
            case "reduce_scatter":
                return self._exchange_s(program, 4 * self.layouts[tile.name].elements)
            case "all_reduce":  # each element is sent to where it is added up, and the sum is sent back
                shard = 4 * self.layouts[tile.name].elements / ranks
                return 2 * shard * (program.hosts - 1) / program.hosts / hardware.network_rate
            case "pack" | "pack_shard":
                return tile.weight_bytes / hosts / hardware.host_copy
            case "fetch_state" | "store_state":
                return tile.state_bytes / hosts / hardware.host_copy
            case "accumulate":  # adding also reads the old gradients and takes the norm: twice the traffic of a copy
                return tile.gradient_bytes * (1 if argument(node, "overwrite") else 2) / hosts / hardware.host_copy
            case "add_to_sum":  # the copy rate counts bytes that are both read and written
                passes = 1 if argument(node, "overwrite") else 2
                return (tile.gradient_bytes + passes * self.layouts[tile.name].sum_bytes) / hosts / (2 * hardware.host_copy)
            case "norms_of_sum":
                return self.layouts[tile.name].sum_bytes / hosts / (2 * hardware.host_copy)
            case "update" | "update_from_sum":
                return self.update_s(self.layouts[tile.name]) / hosts
            case "read_state":  # all ranks share the drives' rates
                return ranks // hosts * tile.disk_bytes / hardware.disk["read"]
            case "write_state":
                return ranks // hosts * tile.disk_bytes / hardware.disk["write"]
            case "update_weights":
                return self.update_s(self.layouts[tile.name]) / hosts / hardware.adam_parts["weights"]
            case "update_moments":
                return self.update_s(self.layouts[tile.name]) / hosts / hardware.adam_parts["moments"]
            case "update_visiting":  # an elementwise update overlaps the next copy
                back = tile.weight_bytes + tile.state_bytes
                copies = ((back + tile.gradient_bytes) / hardware.link["h2d"] + back / hardware.link["d2h"]) / ranks
                return copies + self._products_s(self.layouts[tile.name])
            case "hold":
                return self._through_memory(2 * (tile.gradient_bytes + tile.weight_bytes))
            case "update_on_device" | "update_held":  # gradients are read, weights and state read and written
                moved = (tile.gradient_bytes + 2 * (tile.weight_bytes + tile.state_bytes)) / ranks
                return self._through_memory(moved) + self._products_s(self.layouts[tile.name])
            case "zeros":
                return self._through_memory(4 * self.layouts[tile.name].elements)
            case "reduce":  # reads FP32, writes gradients, and reads them for their norms
                return self._through_memory((4 * self.layouts[tile.name].elements + 2 * tile.gradient_bytes) / ranks)
            case "scale":
                return self._through_memory(2 * self._held(program, operands(node, "value")[0], plan))
        return 0.0

    def _exchange_s(self, program: Program, count: int) -> float:
        """Seconds in which each rank gets the other ranks' shards of `count` bytes. Between hosts, each byte comes to a host
        once, through the network of all its devices."""
        ranks, hosts = program.ranks, program.spread
        across = count * (hosts - 1) / hosts / (ranks // hosts * self.hardware.network_rate)
        return max(count * (ranks - 1) / ranks / self.hardware.peer_rate, across)

    def _through_memory(self, count: float) -> float:
        return max(count / self.hardware.memory_bandwidth, self.hardware.launch_s)

    def _held(self, program: Program, value: fx.Node, plan: Plan) -> int:
        """Bytes of the accumulators, or of the gradient of a micro-batch's hidden states, that a lease keeps."""
        if (tile := argument(value, "tile")) is not None:
            return 4 * self.layouts[tile].elements
        mb = argument(value, "mb")
        template = self.captured.templates[program.calls[0].template]
        return cost.output_bytes(template, program.micro_batches[mb], plan.length_of(mb))
