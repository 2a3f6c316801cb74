"""Random ops are refused: a recompute would draw other numbers than the forward did."""
from __future__ import annotations

import torch
from torch import fx

from megacompile.errors import UnsupportedError
from megacompile.frontend.split import Section, source_line

_RANDOM_NAMES = ("dropout", "rand", "bernoulli", "normal", "multinomial", "exponential", "rrelu", "uniform")


def refuse_random_ops(joint: fx.GraphModule, section: Section) -> None:
    """Raise `UnsupportedError`, naming the module and the line, if `joint`, traced from `section`, draws random numbers."""
    drawn = [n for n in joint.graph.nodes if _draws(n)]
    if not drawn:
        return
    culprit = next((n for n in section.graph.graph.nodes if _looks_random(n)), None)
    module = section.name if culprit is None else _module_path(culprit, section.name)
    raise UnsupportedError(
        f"{module} draws random numbers ({drawn[0].target}), which streaming does not support: set its dropout "
        "probability p to 0 (in transformers, config.attention_dropout=0 and the like)"
        + (source_line(culprit) if culprit is not None else ""))


def _draws(node: fx.Node) -> bool:
    """Whether an aten node draws; attention ops are tagged for their dropout argument even where it is 0."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    arguments = [a.name for a in node.target._schema.arguments]
    if "dropout_p" in arguments:
        position = arguments.index("dropout_p")
        dropout = node.kwargs.get("dropout_p", node.args[position] if position < len(node.args) else 0.0)
        return dropout != 0.0
    return True


def _looks_random(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    inactive = "dropout" in name and (0.0 in node.args[1:2] or node.kwargs.get("p") == 0.0)
    return node.op in ("call_function", "call_method") and any(r in name for r in _RANDOM_NAMES) and not inactive


def _module_path(node: fx.Node, layer: str) -> str:
    """The innermost module of `nn_module_stack`, as the model names it; the layer's name where it is not told."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return layer
    path, cls = stack[-1]
    return f"{_readable(str(path))} ({cls if isinstance(cls, str) else cls.__name__}, in {layer})"


def _readable(path: str) -> str:
    for noise in ("L['self']", "L['model']", "G['model']", "_modules", "['", "']"):
        path = path.replace(noise, "." if noise in ("['",) else "")
    return ".".join(part for part in path.split(".") if part)
