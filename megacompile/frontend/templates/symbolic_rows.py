"""A number of rows that is a symbol: kernels of packed rows are compiled once, for any number of rows from 2 on.

Sizes of such rows are expressions of the symbol. Its environment records what the graph's ops, and then inductor, assume of
it. Code is not used for a number of rows that breaks one of these conditions.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch

from megacompile.frontend.templates.template import BATCH
from megacompile.torch_compat.core import FakeTensorMode
from megacompile.torch_compat.dynamo import ConstantSource
from megacompile.torch_compat.symbols import DimDynamic, ShapeEnv

#: A size, or a stride: a number, or an expression of the symbol.
Size: TypeAlias = int | sympy.Expr
#: Compiled code of a variant: its positional arguments -> its flat results.
Runnable: TypeAlias = Callable[..., tuple[Any, ...]]


class SymbolicRows:
    """The number of rows of one variant that is being compiled. `hint`: a number, at least 2, for which inductor chooses
    kernels; `fakes`: the mode of all fakes with such sizes; `count`: the number itself, as a size. State: the environment,
    with the conditions so far."""

    def __init__(self, hint: int) -> None:
        assert hint > 1, "sizes of 1 are never symbols"
        self._hint, self._environment = hint, ShapeEnv()
        self._symbol = self._environment.create_symbol(hint, ConstantSource("rows"), DimDynamic.DYNAMIC)
        self.fakes = FakeTensorMode(shape_env=self._environment)
        self.count = self.size(BATCH)

    def size(self, expression: sympy.Expr) -> int | torch.SymInt:
        """An expression in B alone, as the size of a fake."""
        return self._environment.create_symintnode(expression.xreplace({BATCH: self._symbol}),
                                                   hint=int(expression.xreplace({BATCH: sympy.Integer(self._hint)})))

    @property
    def is_fixed(self) -> bool:
        """Whether something asked for the number itself, so that the traced or compiled code only holds for the hint."""
        return bool(self._environment.simplify(self._symbol) != self._symbol)

    def written(self, size: int | torch.SymInt) -> Size:
        """A fake's size or stride, free of the environment."""
        return size.node.expr.xreplace({self._symbol: BATCH}) if isinstance(size, torch.SymInt) else size

    def conditions(self) -> tuple[sympy.Basic, ...]:
        """What is assumed of B so far."""
        return tuple(guard.expr.xreplace({self._symbol: BATCH}) for guard in self._environment.guards)


@dataclass(frozen=True, eq=False)
class CodeForAnyRows:
    """Compiled code that holds wherever its `conditions` do. `function`: takes the number of rows, then tensors; `prepare`:
    makes what runs of it, for these strides. State: what it has made, by the number of rows."""

    function: Callable[..., Any]
    strides: tuple[tuple[Size, ...], ...]
    conditions: tuple[sympy.Basic, ...]
    prepare: Callable[[Callable[..., Any], list[tuple[int, ...]]], Runnable]
    _made: dict[int, Runnable] = field(default_factory=dict)

    def of(self, rows: int) -> Runnable | None:
        """The code for this number of rows, at least 2; None if it does not hold there."""
        known = {BATCH: sympy.Integer(rows)}
        if rows not in self._made:
            if not all(condition.xreplace(known) == sympy.true for condition in self.conditions):
                return None
            strides = [tuple(int(sympy.sympify(one).xreplace(known)) for one in stride) for stride in self.strides]
            self._made[rows] = self.prepare(functools.partial(self.function, rows), strides)
        return self._made[rows]
