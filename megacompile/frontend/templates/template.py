"""Templates: one graph for all equal layers, whose weights are inputs, cut into variants on demand.

A template's variants are all cut from one joint forward and backward graph:

    forward             inputs                       -> outputs
    forward_saving      inputs                       -> outputs, residuals
    backward            inputs, residuals, tangents  -> gradients
    recompute_backward  inputs, tangents             -> gradients

Residuals are "all" that the backward needs, or only the results of "attention"; the backward then computes the rest again from
the inputs. The epilogue's variants are `loss` (inputs -> loss, gradients for a unit loss), `evaluate` (inputs -> loss, logits)
and `outputs` (inputs -> logits). A head, whose outputs the caller differentiates, has `outputs` and `recompute_backward`.
Everything is positional: running another layer means passing other tensors.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from fractions import Fraction
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor, fx

from megacompile.compat.core import OpOverload
from megacompile.errors import CaptureError, MegacompileError
from megacompile.frontend.ops.patch_encoder import encoder_of
from megacompile.frontend.templates.joint import (
    JointGraph,
    base_of,
    cut_graph,
    replace_unit_tangent,
    retarget,
    tolerate_strides,
)
from megacompile.ir.precision import Float8
from megacompile.ir.token_loop import token_loops

# --------------------
# A graph as text that is the same in every process: without addresses, and without the symbols and numbers of one process.
#: The position of the encoder's number among the arguments of an encoder call.
_NUMBERED = {torch.ops.megacompile.encode_patches.default: 4, torch.ops.megacompile.encode_patches_backward.default: 5}


def lines_of(joint: JointGraph, symbolic: Callable[[int | torch.SymInt], Any]) -> Iterator[str]:
    """A line for each node, with the shapes, strides and dtypes of its values. `symbolic` formats sizes. The last lines are the
    joint graph's inputs, results and residuals, and what the graph reads."""
    for node in joint.graph.graph.nodes:
        yield repr((node.op, node.name, _target(node.target), _arguments(node), dict(node.kwargs),
                    _value(node.meta.get("val"), symbolic)))
    yield repr((joint.inputs, joint.tangents, joint.outputs, joint.gradients, joint.residuals))


def _target(target: Any) -> str:
    if isinstance(target, str | OpOverload):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"  # the text of a function has its address


def _arguments(node: fx.Node) -> list[Any]:
    given: list[Any] = list(node.args)
    if node.target in _NUMBERED:
        at = _NUMBERED[node.target]  # type: ignore[index]
        encoder = encoder_of(given[at])
        given[at] = encoder.per_feature, encoder.patch, encoder.levels, encoder.held_bytes
    return given


def _value(value: Any, symbolic: Callable[[int | torch.SymInt], Any]) -> Any:
    if isinstance(value, tuple | list):
        return [_value(each, symbolic) for each in value]
    if isinstance(value, torch.Tensor):
        return value.dtype, [symbolic(size) for size in value.shape], [symbolic(size) for size in value.stride()]
    return symbolic(value) if isinstance(value, int | torch.SymInt) else type(value).__name__


BATCH, LENGTH = sympy.symbols("B T", integer=True, positive=True)
#: Variants that can run a chunk of tokens at a time; others keep, or begin with, residuals of all tokens.
CHUNKED = frozenset({"forward", "recompute_backward", "loss", "outputs"})
#: Variants that keep residuals, or begin with them.
KEEPING = frozenset({"forward_saving", "backward"})


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of one positional input of a call.

    kind: "parameter" | "buffer" | "batch" | "size" | "carried" | "shared" | "loss_denominator" | "share" | "total" |
        "random".
    name: parameter, buffer: the qualified name in the model, a tied parameter's first; batch, size: the batch argument.
    index: size: the dimension; carried: which output of the previous call; shared: which output of the prologue;
        total: its number; random: the number of the call.
    """

    kind: str
    name: str = ""
    index: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
    """One use of a template: the prologue, each layer ("model.layers.3"), the epilogue. Sources are in input order. `again`:
    for a later run of a layer ("model.layers.3@2"), the name of its first call."""

    name: str
    template: str
    sources: tuple[Source, ...]
    again: str = ""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The form in which a backward variant returns the gradient of template input `input`.

    results: (i,): result i is the gradient; (i, j): the gradient is results[i] @ results[j], two 2-D tensors, so that
    it can be accumulated inside the GEMM; (i, j, k): of all experts, [groups, K, N], results [rows, K] and [rows, N] and
    where each group's rows end, int32 [groups]; (i, j, k, l): results i and j are float8, multiplied with the scales k and l by
    `kernel` (`scaled_products.py`). A parameter's gradient has the parameter's dtype or float32.
    """

    input: int
    results: tuple[int, ...]
    kernel: str = ""


@dataclasses.dataclass(frozen=True)
class TemplateInput:
    """One input: its role (a layer's own parameters are named relative to the layer), shape in B and T (an `int`-valued
    "size" has shape () and dtype None), and whether backward variants return a gradient for it."""

    role: Source
    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype | None
    differentiable: bool


class TargetLike(Protocol):
    """The device and dtype of templates: `megacompile.passes.template.Target`."""

    @property
    def device_type(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def precision(self) -> Float8 | None: ...


class TemplatePass(Protocol):
    """A template pass: a module of `megacompile.passes.template`."""

    @property
    def name(self) -> str: ...
    @property
    def level(self) -> str: ...
    def run(self, graph: fx.GraphModule, target: Any) -> fx.GraphModule: ...


def run_template_pass(template_pass: TemplatePass, graph: fx.GraphModule, target: TargetLike) -> fx.GraphModule:
    """The graph that a pass returns. Raises `MegacompileError`, naming the pass, if the result is not a graph, or has other
    inputs or results than before. Errors of the pass itself get its name as a note."""
    try:
        made = template_pass.run(graph, target)
        if isinstance(made, fx.GraphModule):
            made.graph.lint()
    except Exception as error:
        error.add_note(f"in template pass {template_pass.name}")
        raise
    if not isinstance(made, fx.GraphModule):
        raise MegacompileError(f"template pass {template_pass.name} returns {type(made).__name__}, not a GraphModule: let run "
                               "return the new graph")
    for what, count in (("inputs", _inputs), ("results", _results)):
        if count(made) != count(graph):
            raise MegacompileError(f"template pass {template_pass.name} changes the number of {what} from {count(graph)} to "
                                   f"{count(made)}: return a graph with the same inputs and results (meta['gradients'] says "
                                   "how gradients are returned)")
    return made


def _inputs(graph: fx.GraphModule) -> int:
    return len(graph.graph.find_nodes(op="placeholder"))


def _results(graph: fx.GraphModule) -> int:
    """The results without gradients, which passes may split into several results."""
    (results,) = graph.graph.output_node().args
    return len(results) - sum(len(leaving) for _, leaving, *_ in graph.meta.get("gradients", ()))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One runnable graph: functional aten and megacompile ops, symbolic shapes in `meta["val"]`.

    Its flat results are `outputs` outputs, `residuals` residuals, `JointGraph.pairs_of_experts` of each mixture in a forward,
    then what `gradients` names. `reads` are the indices of the placeholders that the graph uses: any other argument may be
    None.
    """

    name: str
    graph: fx.GraphModule
    outputs: int
    residuals: int
    gradients: tuple[Gradient, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(self.graph.graph.find_nodes(op="placeholder")) if n.users)


class Template:
    """One joint graph and the variants cut from it.

    Attributes: `name`; `inputs`; `outputs`, how many; `carried_outputs` and `has_gradient`, a bool for each output; `symbols`,
    (B, T); `variant_names`; `stages`, the graph as Python text after each pass, by name; `tokens_at_once`, the most tokens
    whose values may exist at a time, overriding the plan (0: as the plan says); `share`, the part of a layer's experts that it
    runs, as a fraction of what they compute; `products`, what the pass `float8` says of each `linear`; `targets`, the number of
    the input where `IGNORED` says that a token's results are zeros, or None. Thread-compatible: cut variants before sharing a
    template between threads.
    """

    def __init__(
        self, name: str, inputs: Sequence[TemplateInput], has_gradient: Sequence[bool], carried_outputs: Sequence[bool],
        joint: JointGraph, inference: JointGraph | None, symbols: dict[sympy.Symbol, sympy.Symbol],
        target: TargetLike, pipeline: Sequence[TemplatePass], stages: dict[str, str], head: bool = False,
        tokens_at_once: int = 0, share: Fraction = Fraction(1), products: Sequence[tuple[tuple[str, ...], str]] = (),
        targets: int | None = None,
    ) -> None:
        self.name, self.inputs, self.outputs = name, tuple(inputs), len(has_gradient)
        self.has_gradient, self.carried_outputs = tuple(has_gradient), tuple(carried_outputs)
        self.symbols, self.stages, self.tokens_at_once = (BATCH, LENGTH), stages, tokens_at_once
        self.share, self.products, self.targets = share, tuple(products), targets
        self._joint, self._inference, self._renaming = joint, inference, symbols
        self._target, self._pipeline = target, tuple(p for p in pipeline if p.level == "variant")
        self._variants: dict[tuple[str, int, str], Variant] = {}
        self._recipes: dict[str, Callable[[str, int, str], Variant]] = {
            "forward": self._forward, "forward_saving": self._forward,
            "backward": self._backward, "recompute_backward": self._backward}
        if head:
            self._recipes = {"outputs": self._forward, "recompute_backward": self._backward}
        elif inference is not None:
            self._recipes = {"loss": self._loss, "evaluate": self._evaluate}
            if len(inference.outputs) > 1:
                self._recipes["outputs"] = self._evaluate

    @functools.cached_property
    def has_experts(self) -> bool:
        """True if it runs experts as grouped products."""
        return bool(self._joint.pairs_of_experts())

    @property
    def variant_names(self) -> tuple[str, ...]:
        return tuple(self._recipes)

    @property
    def device_type(self) -> str:
        """The type of the device that the template was lowered to."""
        return self._target.device_type

    @property
    def precision(self) -> Float8 | None:
        """The recipe for its products in float8."""
        return self._target.precision

    def variant(self, name: str, chunk: int = 0, residuals: str = "all") -> Variant:
        """The variant called `name`, cut and lowered at its first use. `chunk`: how many positions of a sequence it runs at a
        time, for variants that can (`CHUNKED`, or with no residuals but attention's); 0: all at once. `residuals`: which ones
        are kept. Raises `CaptureError` if the template lacks the variant."""
        if name not in self._recipes:
            raise CaptureError(f"template {self.name} has no variant {name}: it has {', '.join(self._recipes)}")
        kept = residuals if name in KEEPING else "all"
        key = name, chunk if name in CHUNKED or kept != "all" else 0, kept
        if key not in self._variants:
            self._variants[key] = self._recipes[name](*key)
        return self._variants[key]

    def chunk(self, rows: int, planned: int) -> int:
        """The number of positions that run at a time in a micro-batch of `rows` sequences, given the plan's number `planned`;
        0: all at once."""
        limit = max(1, self.tokens_at_once // rows) if self.tokens_at_once else 0
        return min(planned, limit) if planned and limit else planned or limit

    def reached_from(self, outputs: Collection[int]) -> list[int]:
        """The inputs to which autograd gives a gradient if these outputs have one. The backward also computes zeros for some of
        the others."""
        return [i for i, behind in self._joint.reached.items() if outputs and (not behind or not behind.isdisjoint(outputs))]

    @property
    def renaming(self) -> dict[sympy.Symbol, sympy.Symbol]:
        """Maps the symbols of its graphs to B and T."""
        return self._renaming

    def forward_graph(self) -> fx.Graph:
        """The forward without gradients, before passes on variants. An epilogue's gives loss and logits."""
        source = self._inference or self._joint
        return cut_graph(source.graph, source.inputs, source.outputs).graph

    def inputs_of_experts(self) -> set[int]:
        """The inputs whose values, and nothing but parameters, are the weights of grouped products."""
        graph = self.forward_graph()
        made: dict[fx.Node, set[int]] = {}
        for position, node in enumerate(graph.find_nodes(op="placeholder")):
            if self.inputs[position].role.kind == "parameter":
                made[node] = {position}
        found: set[int] = set()
        for node in graph.nodes:
            if node.all_input_nodes and all(used in made for used in node.all_input_nodes):
                made[node] = set().union(*(made[used] for used in node.all_input_nodes))
            elif node.target is torch.ops.aten._grouped_mm.default:
                found |= made.get(node.args[1], set())
        return found

    @functools.cached_property
    def digest(self) -> str:
        """A digest of everything that decides variants and their costs. It is the same in every process."""
        lines = [repr((self.inputs, self.has_gradient, self.carried_outputs, self.tokens_at_once, self.share, self.targets,
                       self.variant_names, self._target, [p.name for p in self._pipeline]))]
        for joint in (self._joint, self._inference):
            lines += [] if joint is None else lines_of(joint, self.symbolic)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def symbolic(self, size: int | torch.SymInt) -> sympy.Expr:
        """A size of a graph's `meta["val"]` as an expression in B and T."""
        expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        return expression.xreplace(self._renaming)

    def bytes_of(self, value: Any) -> sympy.Expr:
        """Bytes of a tensor in `meta["val"]`, in B and T; 0 for a number."""
        return self.symbolic(value.numel()) * value.element_size() if isinstance(value, Tensor) else sympy.Integer(0)

    def residual_bytes(self, residuals: str = "all") -> sympy.Expr:
        """Bytes of residuals that `forward_saving` keeps for `backward`, in B and T. Residuals that share memory count once."""
        return sum((self.bytes_of(n.meta["val"]) for n in self._residual_memory(residuals)), sympy.Integer(0))

    def output_values(self) -> list[Any]:
        """The fakes of the outputs. An epilogue's are loss and logits."""
        return [n.meta["val"] for n in (self._inference or self._joint).outputs]

    def output_bytes(self) -> sympy.Expr:
        """Bytes of all outputs, in B and T."""
        return sum((self.bytes_of(n.meta["val"]) for n in self._joint.outputs), sympy.Integer(0))

    # -------------------------------------------------------------- recipes: which inputs and results make a variant
    def _kept(self, residuals: str) -> list[fx.Node]:
        return self._joint.residuals if residuals == "all" else self._joint.attention_results()

    def _residual_memory(self, residuals: str) -> dict[fx.Node, None]:
        """The values that own the memory of residuals."""
        return dict.fromkeys(map(base_of, self._kept(residuals)))

    def _forward(self, name: str, chunk: int, residuals: str) -> Variant:
        joint, kept = self._joint, self._kept(residuals) if name in KEEPING else []
        pairs = [each for pair in joint.pairs_of_experts() for each in pair] if not chunk and name != "outputs" else []
        return self._lower(name, chunk, joint, joint.inputs, joint.outputs, kept, {}, residuals, pairs)

    def _backward(self, name: str, chunk: int, residuals: str) -> Variant:
        joint, kept = self._joint, self._kept(residuals) if name in KEEPING else []
        return self._lower(name, chunk, joint, [*joint.inputs, *kept, *joint.tangents], [], [], joint.gradients, residuals)

    def _loss(self, name: str, chunk: int, residuals: str) -> Variant:
        joint = self._joint
        return self._lower(name, chunk, joint, [*joint.inputs, *joint.tangents], joint.outputs, [], joint.gradients)

    def _evaluate(self, name: str, chunk: int, residuals: str) -> Variant:
        assert self._inference is not None
        outputs = self._inference.outputs[1:] if name == "outputs" else self._inference.outputs
        return self._lower(name, chunk, self._inference, self._inference.inputs, outputs, [], {})

    def _lower(
        self, name: str, chunk: int, joint: JointGraph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node],
        residuals: Sequence[fx.Node], gradients: dict[int, fx.Node], kept: str = "all",
        pairs: Sequence[fx.Node] = (),
    ) -> Variant:
        graph = cut_graph(joint.graph, inputs, [*outputs, *residuals, *pairs, *gradients.values()])
        if name == "loss":
            replace_unit_tangent(graph, len(joint.tangents))
        first = len(outputs) + len(residuals) + len(pairs)
        graph.meta["gradients"] = tuple((i, (first + k,)) for k, i in enumerate(gradients))
        graph.meta["parameters"] = tuple(i for i, x in enumerate(self.inputs) if x.role.kind == "parameter")
        graph.meta["symbols"], graph.meta["chunk"], graph.meta["targets"] = self._renaming, chunk, self.targets
        label = f"{name}{f' ({kept})' if kept != 'all' else ''}{f' in chunks of {chunk}' if chunk else ''}"
        for template_pass in self._pipeline:
            graph = run_template_pass(template_pass, graph, self._target)
            self.stages[f"{label}.{template_pass.name}"] = graph.code
        loops = token_loops(graph)
        for module in (graph, *(loop.body for loop in loops.values())):
            tolerate_strides(module)
            retarget(module, self.device_type)
        self.stages[label] = graph.code
        self.stages.update({f"{label}.{target}": loop.body.code for target, loop in loops.items()})
        described = tuple(Gradient(*each) for each in graph.meta["gradients"])
        return Variant(name, graph, len(outputs), len(residuals), described)
