"""Lengths padded to a multiple of a block, written as that multiple.

Models with linear attention pad a row to whole chunks: `pad = (c - T % c) % c`. Symbolic sizes keep this literally. Then the
reshape to chunks of c positions makes a dimension of (T + pad) // ((T + pad) // c), each later size is a longer expression,
and each question about them takes longer: a layer of Qwen3-Next had 400 conditions on sizes, and now has two. With pad = c *
ceil(T / c) - T, the same number, T + pad is c * ceil(T / c), and the dimension is c.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy

from megacompile.compat.symbols import FloorDiv, Mod, PythonMod, ShapeEnv, SymNode


@contextlib.contextmanager
def rounded_sizes() -> Iterator[None]:
    """A context in which the padding of a symbolic size to a multiple is written with that multiple."""
    remainder: Any = SymNode._mod  # type: ignore[attr-defined]

    def written(self: SymNode, other: SymNode) -> SymNode:
        result: SymNode = remainder(self, other)
        result._expr = padding(result._expr)
        return result

    SymNode._mod = written  # type: ignore[attr-defined]
    try:
        yield
    finally:
        SymNode._mod = remainder  # type: ignore[attr-defined]


def padding(expression: sympy.Expr) -> sympy.Expr:
    """Rewrites (c - x % c) % c and -x % c as c * ceil(x / c) - x, where c is a positive number and x a size. Anything else is
    returned unchanged."""
    if not isinstance(expression, Mod | PythonMod):
        return expression
    missing, block = expression.args
    if not (isinstance(block, sympy.Integer) and block > 0):
        return expression
    whole, rest = missing.as_coeff_Add()
    size = -rest
    if whole % block or rest == 0 or not size.is_nonnegative:
        return expression
    if isinstance(size, Mod | PythonMod) and size.args[1] == block:
        size = size.args[0]
    return block * FloorDiv(size + block - 1, block) - size


@contextlib.contextmanager
def sizes_stay_symbols() -> Iterator[None]:
    """A context in which a size that the code compares with its traced number stays a symbol: the comparison is a condition of
    the graph. PyTorch would put the number in the place of the symbol. At 64 tokens, for example, the strides of a row cut from
    whole chunks of 64 are those of a row that was not cut."""
    replace: Any = ShapeEnv._set_replacement

    def kept(self: ShapeEnv, symbol: Any, target: Any, *more: Any) -> None:
        if not target.is_number:
            replace(self, symbol, target, *more)

    ShapeEnv._set_replacement = kept  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ShapeEnv._set_replacement = replace  # type: ignore[method-assign]
