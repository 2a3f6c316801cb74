"""The padding of a size to a multiple is the same number, however it is written."""
from __future__ import annotations

import pytest
import sympy
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from megacompile.frontend.templates.symbolic_sizes import padding, rounded_sizes

T = sympy.Symbol("T", integer=True, positive=True)


@pytest.mark.parametrize("written", [
    Mod(64 - Mod(T, 64), 64), PythonMod(-T, 7), PythonMod(14 - T, 7), Mod(128 - Mod(3 * T, 64), 64)])
def test_padding_is_the_same_number(written: sympy.Expr) -> None:
    found = padding(written)
    assert found != written
    assert all(found.subs(T, length) == written.subs(T, length) for length in range(1, 200))


@pytest.mark.parametrize("written", [Mod(T, 7), PythonMod(1 - T, 7), PythonMod(-T, T + 1), T + 1])
def test_an_expression_that_is_not_padding_is_kept(written: sympy.Expr) -> None:
    assert padding(written) is written


def test_a_padded_length_is_whole_chunks() -> None:
    padded = T + padding(Mod(64 - Mod(T, 64), 64))
    assert FloorDiv(padded, FloorDiv(padded, 64)) == 64


def test_sizes_are_written_as_before_afterwards() -> None:
    before = SymNode._mod  # type: ignore[attr-defined]
    with rounded_sizes():
        assert SymNode._mod is not before  # type: ignore[attr-defined]
    assert SymNode._mod is before  # type: ignore[attr-defined]
