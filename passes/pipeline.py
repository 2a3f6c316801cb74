"""A pipeline is a tuple of passes. To change a pipeline, make another tuple.

    passes = insert_after(PIPELINE, "prefetch", my_pass)
    model = megacompile.stream(model, passes=passes)

A pass is a module or an object with a `name` and a pure `run`. A pass over programs has `requires`, the stage that it needs,
and `provides`, the stage of its result; a pass that adds no stage provides the one that it requires. A pass over templates
has a `level` (`megacompile.passes.template`).
"""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tabulate import tabulate

from megacompile.errors import MegacompileError, ProgramError
from megacompile.ir.plan import Plan
from megacompile.ir.program import STAGES, Lane, Program, lane_of, nodes, op_of, reached
from megacompile.verify.verifier import verify


# -------------------- How many nodes a program has of each op, and how many bytes each of its sections copies
def op_counts(program: Program) -> Counter[str]:
    """The number of nodes of each op in all sections."""
    return Counter(op_of(node).name for graph in program.sections.values() for node in nodes(graph))


def summary(program: Program) -> str:
    """A row for each section: its nodes, the number of each op, its events, and the bytes that it copies in each direction."""
    rows = []
    for name, graph in program.sections.items():
        counts = Counter(op_of(node).name for node in nodes(graph))
        events = counts["record"] + counts["enter"]
        marks = ("record", "wait", "enter", "leave", "release")
        work = ", ".join(f"{count} {op}" for op, count in counts.items() if op not in marks)
        moved = dict.fromkeys((Lane.PACK, Lane.H2D, Lane.D2H), 0)
        for node in nodes(graph):
            lane = lane_of(node)
            if lane in moved:
                moved[lane] += program.moved_bytes(node)
        rows.append([name, sum(counts.values()), work, events, counts["wait"], *moved.values()])
    header = ["section", "nodes", "work", "events", "waits", "pack bytes", "h2d bytes", "d2h bytes"]
    return str(tabulate(rows, header, tablefmt="simple", intfmt=","))


LEVELS = ("model", "variant")


class Named(Protocol):
    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=Named)


def insert_after(pipeline: Sequence[P], name: str, *passes: P) -> tuple[P, ...]:
    """The pipeline with these passes after the one called `name`. Raises `MegacompileError` if there is none."""
    at = _position(pipeline, name) + 1
    return (*pipeline[:at], *passes, *pipeline[at:])


def insert_before(pipeline: Sequence[P], name: str, *passes: P) -> tuple[P, ...]:
    """The pipeline with these passes before the one called `name`. Raises `MegacompileError` if there is none."""
    at = _position(pipeline, name)
    return (*pipeline[:at], *passes, *pipeline[at:])


def replace_pass(pipeline: Sequence[P], name: str, *passes: P) -> tuple[P, ...]:
    """The pipeline with these passes, or none, instead of the one called `name`. Raises `MegacompileError` if that is
    missing."""
    at = _position(pipeline, name)
    return (*pipeline[:at], *passes, *pipeline[at + 1:])


def _position(pipeline: Sequence[Named], name: str) -> int:
    names = [each.name for each in pipeline]
    if name not in names:
        raise MegacompileError(f"the pipeline has no pass {name!r}: choose one of {', '.join(names)}")
    return names.index(name)


def check_pipeline(pipeline: Any) -> None:
    """Raises `MegacompileError` unless each pass over programs gets the stage that it requires, stages never go backwards, and
    the last pass provides a program that can run."""
    made, previous = ["model"], "the beginning"
    for each in _each(pipeline, "passes", ("requires", "provides")):
        for word in ("requires", "provides"):
            if getattr(each, word) not in STAGES:
                raise MegacompileError(f"pass {each.name} {word} stage {getattr(each, word)!r}, which does not exist: name one "
                                       f"of {', '.join(STAGES)}")
        if each.requires not in made:
            raise MegacompileError(f"pass {each.name} requires stage {each.requires}, which no pass before it provides: insert "
                                   f"it after one that does (after {previous} the program is at stage {made[-1]})")
        if STAGES.index(each.provides) < STAGES.index(made[-1]):
            raise MegacompileError(f"pass {each.name} provides stage {each.provides}, but the program is already at stage "
                                   f"{made[-1]} there: insert it before {previous}, or make it provide {made[-1]}")
        made.append(each.provides)
        previous = f"pass {each.name}"
    if made[-1] != STAGES[-1]:
        raise MegacompileError(f"the pipeline ends at stage {made[-1]}, and lanes need events to run: end it with a pass that "
                               f"provides {STAGES[-1]}")


def check_template_pipeline(pipeline: Any) -> None:
    """Raises `MegacompileError` unless each pass over templates has a valid level."""
    for each in _each(pipeline, "template_passes", ("level",)):
        if each.level not in LEVELS:
            raise MegacompileError(f"template pass {each.name} has level {each.level!r}: name one of {', '.join(LEVELS)}")


def _each(pipeline: Any, option: str, words: Sequence[str]) -> Iterator[Any]:
    if not isinstance(pipeline, tuple | list):
        raise MegacompileError(f"{option} must be a tuple of passes, not {pipeline!r}: insert_after() and its like make one")
    names: set[str] = set()
    for each in pipeline:
        lacks = [word for word in ("name", *words) if not isinstance(getattr(each, word, None), str)]
        lacks += ["run"] if not callable(getattr(each, "run", None)) else []
        if lacks:
            raise MegacompileError(f"{each!r} is not a pass of {option}: it lacks {', '.join(lacks)}")
        if each.name in names or (option == "passes" and each.name == "model"):
            raise MegacompileError(f"{option} has two passes called {each.name}: give each a name of its own")
        names.add(each.name)
        yield each


# --------------------
# Runs passes in order: checks what each requires, keeps every stage, verifies after every pass, logs what changed.
class Pass(Protocol):
    """A module (or object) with a name, the stage that it needs, the stage that it makes, and a pure `run`."""

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
        """The result of the pipeline for `model`, which differs from this program's model only in its sizes, under a plan with
        as many micro-batches and the same choices. Sizes of slots must not depend on the sizes of micro-batches."""
        made = {stage: program.evolve(calls=model.calls, micro_batches=plan.micro_batches)
                for stage, program in self.stages.items()}
        return Compiled(made | {model.stage: model}, self.log)


def compile_program(model: Program, plan: Plan, pipeline: Sequence[Pass],
                    say: Callable[[str], None] | None = None, verify_stages: bool = True) -> Compiled:
    """Runs the pipeline (`check_pipeline`) over a program of stage "model". Raises `ProgramError`, naming the pass, if a stage
    is unsound. `verify_stages` False: for a program that resembles one whose stages were verified. Then only the program that
    will run is verified. If it is unsound, the stages before it are verified too, to name the pass."""
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
    """The program that a pass returns, unverified. Raises `MegacompileError` if it is not a program of the stage that the pass
    provides. An exception from the pass itself gets a note with the pass's name."""
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
