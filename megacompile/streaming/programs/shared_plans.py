"""The program of a shape that all ranks run: rank 0 chooses the plan, and every rank makes the program from it.

A search simulates dozens of programs, so one rank searches and the others get its plan. Only rank 0's plans are kept on disk
for the next start: ranks that find different plans could not run together.
"""
from __future__ import annotations

from collections.abc import Collection

from megacompile.errors import MegacompileError, RankError
from megacompile.ir.plan import Plan, Shape
from megacompile.planning.planner import Choice
from megacompile.runtime.ranks import Ranks
from megacompile.streaming.programs.shapes import CompiledShape, Shapes


def compiled_by_all(shapes: Shapes, shape: Shape, keep: Collection[CompiledShape], ranks: Ranks) -> CompiledShape:
    """The program of a shape, the same on every rank. All ranks call this. Raises what `Shapes.get` raises, on every rank, and
    `RankError` if the ranks' programs differ."""
    found = shapes.known(shape, keep)
    digests = ranks.agree("compile", None if found is None else found.digest)
    if None in digests:
        found = _from_one_plan(shapes, shape, keep, ranks)
        digests = ranks.agree("compile", found.digest)
    ranks.require_equal("program", digests)
    return shapes.get(shape, keep)


def _from_one_plan(shapes: Shapes, shape: Shape, keep: Collection[CompiledShape], ranks: Ranks) -> CompiledShape:
    if ranks.rank == 0:
        try:
            found = shapes.get(shape, keep)
        except MegacompileError:
            ranks.agree("plan")
            raise
        ranks.agree("plan", (found.plan.values(), shapes.stateful))
        return found
    chosen = ranks.agree("plan")[0]
    if chosen is None:
        shapes.get(shape, keep)  # raises what it raises on rank 0
        raise RankError("rank 0 cannot plan this step, and this rank can: give every rank the same model and options")
    values, stateful = chosen
    return shapes.known(shape, keep) or shapes.get(shape, keep, Choice(Plan.of(**values), stateful))
