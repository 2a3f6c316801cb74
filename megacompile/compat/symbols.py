"""Private parts of PyTorch for sizes that are symbols. Importing it imports sympy."""
from __future__ import annotations

from torch.fx.experimental.sym_node import SymNode  # arithmetic on sizes: paddings are rewritten as multiples
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,  # marks the number of rows as a symbol
    ShapeEnv,  # the symbols of a trace, and its guards on them
    free_unbacked_symbols,  # finds sizes that depend on values
    statically_known_true,  # compares sizes without a guard
)
from torch.utils._sympy import functions as size_functions  # the functions in expressions of sizes
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod  # those that paddings consist of
from torch.utils._sympy.interp import sympy_interp  # computes an expression of sizes by ops of a graph
from torch.utils._sympy.reference import PythonReferenceAnalysis  # which ops these are

__all__ = ["DimDynamic", "FloorDiv", "Mod", "PythonMod", "PythonReferenceAnalysis", "ShapeEnv", "SymNode",
           "free_unbacked_symbols", "known_of", "size_functions", "statically_known_true", "sympy_interp"]


def known_of(environment: ShapeEnv) -> str:
    """The facts that an environment has about its symbols, as text: numbers for hints, ranges, guards, equal expressions,
    assertions."""
    hints = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val
    tables = (hints, environment.var_to_range, environment.replacements, environment.deferred_runtime_asserts)
    return str([*(sorted(f"{symbol}: {known}" for symbol, known in table.items()) for table in tables),
                [str(guard.expr) for guard in environment.guards]])
