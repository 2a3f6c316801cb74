"""A pipeline is a tuple of passes. To change a pipeline, make another tuple.

    passes = insert_after(PIPELINE, "prefetch", my_pass)
    model = megacompile.stream(model, passes=passes)

A pass is a module or an object with a `name` and a pure `run`. A pass over programs has `requires`, the stage that it needs,
and `provides`, the stage of its result; a pass that adds no stage provides the one that it requires. A pass over templates
has a `level` (`megacompile.passes.template`).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from megacompile.errors import MegacompileError
from megacompile.ir.program import STAGES

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
    """The pipeline with these passes, or none, in place of the one called `name`. Raises `MegacompileError` if there is no such
    pass."""
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
