"""What a captured graph assumes of a batch: the symbols of its sizes, and conditions on them with the source lines that caused
them."""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import sympy
import torch

from megacompile.errors import CaptureError
from megacompile.frontend.templates.build import Renaming
from megacompile.frontend.templates.template import BATCH, LENGTH
from megacompile.frontend.tracing.explained import FIXED_SIZES_REMEDY
from megacompile.frontend.tracing.model_graph import ModelGraph


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
