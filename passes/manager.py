"""Runs passes in order: checks what each requires, keeps every stage, verifies after every pass, logs what changed."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megacompile.errors import MegacompileError, ProgramError
from megacompile.ir.counts import op_counts
from megacompile.ir.plan import Plan
from megacompile.ir.program import Program, reached
from megacompile.verify.verifier import verify


class Pass(Protocol):
    """A module (or object) with a name, the stage it needs, the stage it makes, and a pure `run`."""

    @property
    def name(self) -> str: ...
    @property
    def requires(self) -> str: ...
    @property
    def provides(self) -> str: ...
    @property
    def run(self) -> Callable[[Program, Plan], Program]: ...


def named_stage(stages: Mapping[str, Program], name: str) -> Program:
    """The program after the pass `name`. Raises `MegacompileError` if no pass has this name."""
    if name not in stages:
        raise MegacompileError(f"unknown stage {name!r}: choose one of {', '.join(stages)}")
    return stages[name]


@dataclass
class Compiled:
    """Every stage of one program, in order, and a log of what each pass did."""

    stages: dict[str, Program] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    @property
    def program(self) -> Program:
        return next(reversed(self.stages.values()))

    def resized(self, model: Program, plan: Plan) -> Compiled:
        """What the pipeline makes of `model`, which differs from this program's only in its sizes, under a plan with as many
        micro-batches and the same choices. Sizes of slots must not depend on those of micro-batches."""
        made = {stage: program.evolve(calls=model.calls, micro_batches=plan.micro_batches)
                for stage, program in self.stages.items()}
        return Compiled(made | {model.stage: model}, self.log)


def compile_program(model: Program, plan: Plan, pipeline: Sequence[Pass],
                    say: Callable[[str], None] | None = None, verify_stages: bool = True) -> Compiled:
    """Runs the pipeline (`check_pipeline`) over a program of stage "model". Raises `ProgramError`, naming the pass, if a stage
    is unsound. `verify_stages` False: for a program like another one whose stages were verified. Then the program that will run
    is verified, and the stages before it only if it is unsound, to name the pass."""
    if not verify_stages:
        compiled = _run_all(model, plan, pipeline, say, check=lambda program: None)
        try:
            verify(compiled.program)
        except ProgramError:
            compile_program(model, plan, pipeline)
            raise
        return compiled
    verify(model)
    return _run_all(model, plan, pipeline, say, verify)


def _run_all(model: Program, plan: Plan, pipeline: Sequence[Pass], say: Callable[[str], None] | None,
             check: Callable[[Program], None]) -> Compiled:
    compiled = Compiled({model.stage: model})
    for number, each in enumerate(pipeline, 1):
        before = compiled.program
        assert reached(before, each.requires), f"{each.name} requires stage {each.requires}, which no pass has made"
        started = time.perf_counter()
        after = run_pass(each, before, plan)
        try:
            check(after)
        except ProgramError as error:
            raise type(error)(f"pass {each.name} breaks the program: {error}") from None
        compiled.stages[each.name] = after
        compiled.log.append(f"{number}/{len(pipeline)} {each.name}: {_count(before)} -> {_count(after)} nodes"
                            f"{_difference(before, after)} ({(time.perf_counter() - started) * 1e3:.1f} ms)")
        if say is not None:
            say(compiled.log[-1])
    return compiled


def run_pass(each: Pass, program: Program, plan: Plan) -> Program:
    """The program that a pass returns, unverified. Raises `MegacompileError` if that is not a program of the stage that the
    pass provides. An exception from the pass itself gets a note with the pass's name."""
    try:
        made = each.run(program, plan)
    except Exception as error:
        error.add_note(f"in pass {each.name}")
        raise
    if not isinstance(made, Program):
        raise MegacompileError(f"pass {each.name} returns {type(made).__name__}, not a program: make run return the new one")
    if made.stage != each.provides:
        raise MegacompileError(f"pass {each.name} provides stage {each.provides}, but its program says {made.stage}: return "
                               f"program.evolve(stage={each.provides!r}, ...)")
    return made


def _count(program: Program) -> int:
    return sum(op_counts(program).values())


def _difference(before: Program, after: Program) -> str:
    old, new = op_counts(before), op_counts(after)
    changes = [f"{new.get(op, 0) - old.get(op, 0):+d} {op}" for op in {**old, **new} if new.get(op, 0) != old.get(op, 0)]
    return f", {', '.join(changes)}" if changes else ""
