"""Ops that a template must not contain: random ones, since a recompute would draw other numbers than the forward did, and
reads of device values by the host, which would stall every layer."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.compat.core import OpOverload
from megacompile.compat.symbols import free_unbacked_symbols
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.graph.split import Section
from megacompile.frontend.tracing.layer_calls import source_line
from megacompile.frontend.tracing.model_graph import called_name

_RANDOM = ("dropout", "rand", "bernoulli", "normal", "multinomial", "exponential", "rrelu", "uniform")
#: Ops that return a tensor of the same memory which autograd does not treat as a view.
_SAME_MEMORY = ("detach", "detach_", "_get_data_attr")


def refuse_ops(joint: fx.GraphModule, section: Section) -> None:
    """Raises `UnsupportedError` if `joint`, traced from `section`, draws random numbers, and `CaptureError` if it reads a value
    on the host. Both name the module and the line. Also raises `UnsupportedError` for `as_strided` of a parameter that is not
    contiguous: its tile is contiguous, so the same strides would read other elements."""
    if strided := _strided_parameter(section):
        raise UnsupportedError(
            f"{_module_of(strided, section.name)} reads a parameter that is not contiguous with as_strided: make the parameter "
            f"contiguous, or read it with transpose, slices and views{source_line(strided)}")
    for node in joint.graph.nodes:
        if draws(node.target, node.args, node.kwargs):
            module, line = _culprit(section, lambda name: any(part in name for part in _RANDOM))
            raise UnsupportedError(
                f"{module} draws random numbers with {node.target}; streaming supports only dropout that does not change its "
                f"input: use F.dropout without inplace=True, or set the noise scale to 0{line}")
        if node.target is torch.ops.aten._local_scalar_dense.default:
            module, line = _culprit(section, lambda name: name in ("item", "tolist"))
            raise CaptureError(
                f"{module} reads a tensor's value on the host (.item()): keep it a tensor, the host would wait for the "
                f"device in every layer{line}")


def refuse_unknown_sizes(graph: fx.GraphModule, name: str) -> None:
    """Raises `CaptureError` if a Dynamo-level graph makes a tensor whose size depends on values (boolean indices do), since its
    cost could not be known in advance. Names the module of `name` that does so, and the line."""
    for node in graph.graph.nodes:
        if _unknown_size(node) and not any(map(_unknown_size, node.all_input_nodes)):
            raise CaptureError(
                f"{_module_of(node, name)} makes a tensor whose size depends on values ({called_name(node)}): let all sizes "
                f"be those of the inputs, with masks and torch.where in place of selections{source_line(node)}")


def _unknown_size(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return any(isinstance(v, Tensor) and bool(free_unbacked_symbols(v))
               for v in (value if isinstance(value, tuple | list) else (value,)))


def draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a call of an aten op draws random numbers. Attention ops are tagged as random for their dropout argument even if
    it is 0."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    arguments = [a.name for a in op._schema.arguments]
    if "dropout_p" in arguments:
        position = arguments.index("dropout_p")
        given = args[position] if position < len(args) else 0.0
        return bool(kwargs.get("dropout_p", given) != 0.0)
    return True


def _culprit(section: Section, named: Callable[[str], bool]) -> tuple[str, str]:
    """The module in the section whose call of a function has this name, and its source line."""
    for node in section.graph.graph.nodes:
        inactive = "dropout" in called_name(node) and 0.0 in (*node.args[1:2], node.kwargs.get("p"))
        if node.op in ("call_function", "call_method") and named(called_name(node)) and not inactive:
            return _module_of(node, section.name), source_line(node)
    return section.name, ""


def _module_of(node: fx.Node, section: str) -> str:
    """The innermost module of `nn_module_stack`, as the model names it, with its class; else `section`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return section
    path, cls = stack[-1]
    path = str(path).split("]", 1)[-1]  # L['model'].blocks[0].drop, G['model']._modules['blocks']...
    for noise in ("_modules", "[", "]", "'"):
        path = path.replace(noise, "." if noise == "[" else "")
    path = ".".join(part for part in path.split(".") if part)
    return f"{path or section} ({cls if isinstance(cls, str) else cls.__name__}, in {section})"


def line_of_mutation(section: Section) -> str:
    """The source line that changes an input of `section` in place, including a parameter's `.data`; "" if there is none."""
    for node in section.graph.graph.nodes:
        in_place = node.op in ("call_function", "call_method") and re.fullmatch(r"\w*[a-z]_", called_name(node))
        if in_place and _input_of(node.args[0]):
            return source_line(node)
    return ""


def _strided_parameter(section: Section) -> fx.Node | None:
    """The call of `as_strided` on the memory of a parameter that is not contiguous, or None."""
    placeholders = section.graph.graph.find_nodes(op="placeholder")
    scattered = {node for node, source in zip(placeholders, section.sources, strict=True)
                 if source.kind == "parameter" and not node.meta["example_value"].is_contiguous()}
    return next((node for node in section.graph.graph.nodes if called_name(node) == "as_strided"
                 and _input_of(node.all_input_nodes[0]) in scattered), None)


def _input_of(node: Any) -> fx.Node | None:
    """The input whose memory a node's value is in, or None."""
    while isinstance(node, fx.Node) and node.op != "placeholder":
        value = node.meta.get("example_value")
        if not (isinstance(value, Tensor) and (value._is_view() or called_name(node) in _SAME_MEMORY) and node.all_input_nodes):
            return None
        node = node.all_input_nodes[0]
    return node if isinstance(node, fx.Node) else None
