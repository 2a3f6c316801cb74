"""A section of the model graph -> a `Template`: passes of level "model", then the joint graph, with its inputs described."""
from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacompile.compat.core import FakeTensorMode, LazyGraphModule, get_decompositions
from megacompile.errors import CaptureError, MegacompileError, first_line
from megacompile.frontend.graph.split import Section, relative
from megacompile.frontend.ops import (  # noqa: F401  # registers the ops that fuse_loss and float8 insert
    linear_cross_entropy,
    scaled_linear,
)
from megacompile.frontend.templates.joint import forward_graph, joint_graph
from megacompile.frontend.templates.refused_ops import line_of_mutation, refuse_ops, refuse_unknown_sizes
from megacompile.frontend.templates.symbolic_sizes import rounded_sizes
from megacompile.frontend.templates.template import (
    BATCH,
    LENGTH,
    TargetLike,
    Template,
    TemplateInput,
    TemplatePass,
    run_template_pass,
)
from megacompile.frontend.tracing.explained import FIXED_SIZES_REMEDY, TRACING_ERRORS, raise_foreign
from megacompile.frontend.tracing.model_graph import ModelGraph

#: Decompositions of losses into ops that are known to treat each token alone.
LOSSES_OF_TOKENS = get_decompositions([torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss_backward])
Renaming = dict[sympy.Symbol, sympy.Symbol]  # the graph's symbols -> B and T


def build_template(
    name: str, section: Section, fakes: FakeTensorMode, renaming: Renaming, target: TargetLike,
    pipeline: Sequence[TemplatePass], head: bool = False, tokens_at_once: int = 0,
) -> Template:
    """The template of `section`. The epilogue's, whose first result is the loss, has the epilogue's variants. The caller
    differentiates a `head`'s results. Raises `UnsupportedError` for random ops, `CaptureError` for code that cannot be
    differentiated or reads values on the host."""
    epilogue = section.name == "epilogue"
    refuse_unknown_sizes(section.graph, section.name)
    stages = {"captured": section.graph.code}
    trained = with_results(section, [0]).graph if epilogue else section.graph
    layer = not (epilogue or head or section.name == "prologue")
    if layer:
        trained.meta["weights"] = tuple(source.name if source.kind == "parameter" else "" for source in section.sources)
    trained = _run_model_passes(trained, target, pipeline, stages)
    has_gradient = section.has_gradient[:1] if epilogue else section.has_gradient
    carried = [index for index, source in enumerate(section.sources) if source.kind == "carried"]
    placeholders = section.graph.graph.find_nodes(op="placeholder")
    again = [index for index, (node, source) in enumerate(zip(placeholders, section.sources, strict=True))
             if source.kind == "parameter" and (target.precision or not node.meta["example_value"].requires_grad)]
    inference = None
    try:
        with _portable_attention(target), rounded_sizes():
            joint = joint_graph(trained, fakes, has_gradient, partition=not (epilogue or head), awaited=carried,
                                decompositions=LOSSES_OF_TOKENS if tokens_at_once else None,
                                device_type=target.device_type, parameters=again)
            if epilogue:  # with logits as a result, no loss can be fused
                inference = forward_graph(_run_model_passes(section.graph, target, pipeline, {}), fakes)
    except MegacompileError:
        raise
    except TRACING_ERRORS as reason:
        raise_foreign(reason)
        raise CaptureError(
            f"{section.name} cannot be differentiated as one graph: {first_line(reason).rstrip('.')}; use "
            f"differentiable, functional torch ops, and change no input in place{line_of_mutation(section)}") from reason
    stages["joint"] = joint.graph.code
    refuse_ops(joint.graph, section)

    def symbolic(size: Any) -> sympy.Expr:
        return (size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)).xreplace(renaming)

    inputs = []
    for index, (node, source) in enumerate(zip(placeholders, section.sources, strict=True)):
        value = node.meta["example_value"]
        shape = tuple(map(symbolic, value.shape)) if isinstance(value, Tensor) else ()
        dtype = value.dtype if isinstance(value, Tensor) else None
        inputs.append(TemplateInput(relative(source, section), shape, dtype, index in joint.gradients))
    return Template(name, inputs, has_gradient, section.carried, joint, inference, renaming, target, pipeline, stages, head,
                    tokens_at_once, section.share, trained.meta.get("products", ()), section.graph.meta.get("targets"))


def _run_model_passes(
    graph: fx.GraphModule, target: TargetLike, pipeline: Sequence[TemplatePass], stages: dict[str, str]
) -> fx.GraphModule:
    for template_pass in pipeline:
        if template_pass.level == "model":
            graph = run_template_pass(template_pass, graph, target)
            stages[template_pass.name] = graph.code
    return graph


def with_results(section: Section, positions: Sequence[int]) -> Section:
    """A section with only some of its results. Code that only the others need stays until AOT, including in-place ops."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    (results,) = (section.graph.graph.output_node().args)
    graph.graph_copy(section.graph.graph, copies)
    graph.output(tuple(copies[results[i]] for i in positions))  # type: ignore[index]
    return dataclasses.replace(section, graph=LazyGraphModule(section.graph, graph), sources=list(section.sources),
                               has_gradient=[section.has_gradient[i] for i in positions],
                               carried=[section.carried[i] for i in positions])


@contextlib.contextmanager
def _portable_attention(target: TargetLike) -> Iterator[None]:
    """A context in which a model's own `scaled_dot_product_attention` that no pass mapped onto our op is traced as plain aten
    ops if it will not run on the CPU. Otherwise it would become the CPU's kernel, since fakes are on the CPU."""
    if target.device_type == "cpu":
        yield
    else:
        with sdpa_kernel([SDPBackend.MATH]):
            yield


# --------------------
# The assumptions of a captured graph about a batch: the symbols of its sizes, and conditions on them with the source lines
# that caused them.
@dataclasses.dataclass(frozen=True)
class Condition:
    """A sympy condition on B and T, and " at file:line (code)" of the model's code that requires it, or ""."""

    expression: Any
    line: str = dataclasses.field(default="", compare=False)


def batch_symbols(graph: ModelGraph, name: str) -> Renaming:
    """The graph's symbols of batch and length -> B and T.

    Raises `CaptureError`, with the line of the model, if a dimension was silently specialized to the captured size.
    """
    examples = (n.meta["example_value"] for n, s in graph.sources.items() if s.kind == "batch")
    example = next(value for value in examples if value.dim() >= 2 and not value.is_floating_point()
                   and (value.dim() == 2 or value.dtype != torch.bool))
    env = graph.shape_env
    found: list[sympy.Symbol] = []
    for dimension in (0, 1):
        size = example.shape[dimension]
        expression = env.simplify(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)
        if not isinstance(expression, sympy.Symbol) or expression in found:
            what = ("batch size", "length")[dimension]
            lines = (_line(env.replacements_slocs.get(symbol)) for symbol, value in env.replacements.items()
                     if value == expression)
            raise CaptureError(f"{name} fixes the {what} to {expression}{next(filter(None, lines), '')}: {FIXED_SIZES_REMEDY}")
        found.append(expression)
    renaming: Renaming = dict(zip(found, (BATCH, LENGTH), strict=True))
    # Symbols of the other inputs were replaced by those of the first.
    for symbol, value in env.replacements.items():
        if value in renaming:
            renaming[symbol] = renaming[value]
    return renaming


def conditions(guards: Iterable[Any], renaming: Renaming) -> tuple[Condition, ...]:
    """The guards of a `ShapeEnv` that are not trivially true or false, each once."""
    found = (Condition(guard.expr.xreplace(renaming), _line(guard.sloc)) for guard in guards)
    return tuple(c for c in dict.fromkeys(found) if c.expression not in (sympy.true, sympy.false))


def _line(place: Any) -> str:
    """Parses torch's description of a line: "code # path:line in function"."""
    found = re.match(r"(.*?)\s*# (\S+:\d+) in ", getattr(place, "maybe_user_loc", None) or "")
    return f" at {found[2]} ({found[1]})" if found and "megacompile/frontend/" not in found[2] else ""
