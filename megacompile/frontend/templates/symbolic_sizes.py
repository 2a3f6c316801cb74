"""Sizes of packed rows that are symbols: kernels are compiled once, for any number of rows and any length.

The number of rows is a symbol. The length is a multiple of `UNIT` tokens, and the number of units is a symbol: inductor then
knows what divides strides, as it does for a number. The environment of the symbols records what the graph's ops, and then
inductor, assume of them. Code is not used for sizes that break one of these conditions.

PyTorch makes no symbol of a size of 1, and takes each symbol to be at least 2. Code for two or more rows also serves one row
with as many tokens: a dimension of as many rows is never broadcast, and templates name the dimensions that they squeeze.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch

from megacompile.compat.core import FakeTensorMode, without_cache
from megacompile.compat.dynamo import ConstantSource
from megacompile.compat.symbols import DimDynamic, FloorDiv, Mod, PythonMod, ShapeEnv, SymNode
from megacompile.frontend.templates.template import BATCH, LENGTH

#: Tokens. The shortest packed rows have two units.
UNIT = 32
#: The number of units in a row.
UNITS = sympy.Symbol("U", integer=True, positive=True)
#: A size, or a stride: a number, or an expression in B and U.
Size: TypeAlias = int | sympy.Expr
#: Compiled code of a variant: its positional arguments -> its flat results.
Runnable: TypeAlias = Callable[..., tuple[Any, ...]]


def can_be_symbols(rows: int, length: int) -> tuple[sympy.Symbol, ...]:
    """The symbols among B and U that can replace the sizes [rows, length] in code for two rows or more of two units or more. A
    single row needs four units, since such code may assume at least as many tokens."""
    units = length // UNIT if length % UNIT == 0 else 0
    if units > 1 and rows * units >= 4:
        return BATCH, UNITS
    return (BATCH,) if rows > 1 else ()


class SymbolicSizes:
    """The sizes of one variant that is being compiled. `rows` (at least 2), `length`: numbers, for which inductor chooses
    kernels. `symbols`: which of B and U are symbols; the others are these numbers. `fakes`: the mode of all fakes with such
    sizes. `numbers`: the symbols as sizes. State: the environment, with the conditions so far."""

    def __init__(self, rows: int, length: int, symbols: Sequence[sympy.Symbol]) -> None:
        assert rows > 1 and symbols and set(symbols) <= set(can_be_symbols(rows, length)), f"{symbols} for {rows} x {length}"
        self.symbols, self._environment = tuple(symbols), ShapeEnv()
        hints = {BATCH: sympy.Integer(rows), UNITS: sympy.Integer(length // UNIT)}
        create = self._environment.create_symbol
        self._own = {symbol: create(int(hints[symbol]), ConstantSource(symbol.name), DimDynamic.DYNAMIC)
                     for symbol in self.symbols}
        self._hints: dict[sympy.Expr, Any] = {BATCH: hints[BATCH], LENGTH: sympy.Integer(length), UNITS: hints[UNITS]}
        self._sizes: dict[sympy.Expr, Any] = self._hints | self._own
        if UNITS in self._own:
            self._sizes[LENGTH] = self._own[UNITS] * UNIT
        self.fakes = without_cache(FakeTensorMode(shape_env=self._environment))
        self.numbers = [self.size(symbol) for symbol in self.symbols]

    def size(self, expression: sympy.Expr) -> int | torch.SymInt:
        """An expression in B, T and U, as the size of a fake."""
        size = expression.xreplace(self._sizes)
        hint = int(expression.xreplace(self._hints))
        return self._environment.create_symintnode(size, hint=hint) if size.free_symbols else hint

    @property
    def are_fixed(self) -> bool:
        """True if something asked for a symbol's number. Then the traced or compiled code only holds for the hint."""
        return any(self._environment.simplify(own) != own for own in self._own.values())

    def written(self, size: int | torch.SymInt) -> Size:
        """A fake's size or stride, without a reference to the environment."""
        return self._free(size.node.expr) if isinstance(size, torch.SymInt) else size

    def conditions(self) -> tuple[sympy.Basic, ...]:
        """The conditions on B and U so far."""
        return tuple(self._free(guard.expr) for guard in self._environment.guards)

    def _free(self, expression: sympy.Basic) -> sympy.Basic:
        return expression.xreplace({own: symbol for symbol, own in self._own.items()})


@dataclass(frozen=True, eq=False)
class CodeForAnySize:
    """Compiled code that holds if its `conditions` do. `function`: takes the numbers of `symbols`, then tensors. `prepare`:
    makes the callable from it, for these strides. State: the callables so far, by the numbers."""

    function: Callable[..., Any]
    symbols: tuple[sympy.Symbol, ...]
    strides: tuple[tuple[Size, ...], ...]
    conditions: tuple[sympy.Basic, ...]
    prepare: Callable[[Callable[..., Any], list[tuple[int, ...]]], Runnable]
    _made: dict[tuple[int, ...], Runnable] = field(default_factory=dict)

    def of(self, rows: int, length: int) -> Runnable | None:
        """The code for rows of this length; None if it does not hold for them."""
        if not set(self.symbols) <= set(can_be_symbols(rows, length)):
            return None
        known = {BATCH: sympy.Integer(rows), UNITS: sympy.Integer(length // UNIT)}
        numbers = tuple(int(known[symbol]) for symbol in self.symbols)
        if numbers not in self._made:
            if not all(condition.xreplace(known) == sympy.true for condition in self.conditions):
                return None
            strides = [tuple(int(sympy.sympify(one).xreplace(known)) for one in stride) for stride in self.strides]
            self._made[numbers] = self.prepare(functools.partial(self.function, *numbers), strides)
        return self._made[numbers]


# -------------------- Lengths padded to a multiple of a block, written as that multiple
#
# Models with linear attention pad a row to whole chunks: `pad = (c - T % c) % c`. Symbolic sizes keep this literally. Then the
# reshape to chunks of c positions makes a dimension of (T + pad) // ((T + pad) // c), each later size is a longer expression,
# and each question about them takes longer: a layer of Qwen3-Next had 400 conditions on sizes, and now has two. With pad = c *
# ceil(T / c) - T, the same number, T + pad is c * ceil(T / c), and the dimension is c.
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
    the graph. PyTorch would replace the symbol by the number. At 64 tokens, for example, the strides of a row cut from whole
    chunks of 64 are those of a row that was not cut."""
    replace: Any = ShapeEnv._set_replacement

    def kept(self: ShapeEnv, symbol: Any, target: Any, *more: Any) -> None:
        if not target.is_number:
            replace(self, symbol, target, *more)

    ShapeEnv._set_replacement = kept  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ShapeEnv._set_replacement = replace  # type: ignore[method-assign]
