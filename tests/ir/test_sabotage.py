"""The verifier is tested by breaking programs, one edit at a time, against an independent oracle (`oracle.py`).

The oracle decides whether an edit is harmful. The verifier must refuse every harmful edit, and must not report a harmless one
as a hazard. It may refuse a harmless edit by a rule that is not about order (a value that is never released, a tile whose
gradients are offloaded twice). These are counted by rule. Counts are printed at the end.

    pytest tests/ir/test_sabotage.py                                      some edits of each golden, and of 8 random programs
    pytest tests/ir/test_sabotage.py --nightly --sabotage-programs 500    many more of each golden, and 500 random programs

Random programs are as many of one rank and of several.
"""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from edits import Edit, double, single
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from machine import MAY_TOUCH, MAY_TOUCH_OF_SEVERAL, TOUCHES, Machine, instructions
from mathematics import Training
from oracle import Oracle, beside_any_section, collision, interleave, link, meaning, removable
from plans import NAMED, OF_SEVERAL, plan_of, schedules

from megacompile.ir.program import SLOT_KINDS, TILE_PARTS, Access, Program, lanes_that, reached
from megacompile.ir.text import parse
from megacompile.passes.pipeline import Compiled
from megacompile.verify.verifier import judge, verify

GOLDENS = sorted((Path(__file__).parents[1] / "golden").glob("*.txt"))
Schedules = Callable[..., Compiled]
#: Edits of each kind and program, of goldens and of random programs; and of goldens in the long run.
SOME, MANY = 2, 30


#: Every fourth of the named schedules is broken per commit, beside all goldens.
BROKEN = [*GOLDENS, *(pytest.param(name, marks=[pytest.mark.nightly] * (number % 4 != 0))
                      for number, name in enumerate([*NAMED, *OF_SEVERAL]))]


@pytest.fixture(params=BROKEN, ids=lambda param: getattr(param, "stem", param))
def golden(request: pytest.FixtureRequest, make_schedule: Schedules) -> Program:
    text = request.param
    program = parse(text.read_text()) if isinstance(text, Path) else make_schedule(**(NAMED | OF_SEVERAL)[text]).program
    assert reached(program, "synchronize")
    return program


@pytest.fixture(scope="session")
def programs(pytestconfig: pytest.Config) -> int:
    """How many random programs."""
    return int(pytestconfig.getoption("--sabotage-programs"))


def chosen(program: Program, count: int, rng: random.Random) -> Iterator[Edit]:
    """So many edits of each kind."""
    by_kind: dict[str, list[Edit]] = {}
    for edit in (*single(program), *double(program, rng, count)):
        by_kind.setdefault(edit.kind, []).append(edit)
    for edits in by_kind.values():
        yield from rng.sample(edits, min(count, len(edits)))


def refused_by(program: Program) -> str | None:
    """The first rule that a program breaks."""
    verdicts, _ = judge(program)
    return next((verdict.rule for verdict in verdicts if verdict.holds is False), None)


def sabotage(program: Program, oracle: Oracle, edits: Iterator[Edit], tally: Counter[str]) -> None:
    for edit in edits:
        broken = edit.apply(program)
        harm, rule = oracle.harm(broken, edit.section), refused_by(broken)
        what = f"{edit.kind} in {edit.section}: {edit.what}"
        assert harm is None or rule is not None, f"the verifier accepts {what}, but {harm}"
        assert harm is not None or rule != "ordered", f"the verifier calls {what} a hazard, and the oracle finds no harm"
        tally["edits"] += 1
        tally["edits, harmful"] += harm is not None
        tally["edits, harmful: refused"] += harm is not None and rule is not None
        tally["edits, harmless"] += harm is None
        tally["edits, harmless: accepted"] += harm is None and rule is None
        if harm is None and rule is not None:
            tally[f"edits, harmless: refused by {rule}"] += 1


def assert_harmless(oracle: Oracle) -> None:
    for name, section in oracle.sections.items():
        assert beside_any_section(section, oracle.job.several) is None, name
    for loop in oracle.loops:
        assert collision(link(oracle.sections, loop, oracle.job)) is None, loop


def test_goldens_are_harmless_and_interleave_as_they_like(golden: Program) -> None:
    oracle = Oracle(golden)
    assert_harmless(oracle)
    for loop in oracle.loops:
        steps = link(oracle.sections, tuple(line for line in loop if not line[0].endswith("_lost")), oracle.job)
        expected = meaning(steps).reads
        for seed in range(8):
            assert interleave(steps, expected, str(seed)) is None


def test_every_harmful_edit_of_a_golden_is_refused(golden: Program, programs: int, tally: Counter[str]) -> None:
    edits = chosen(golden, MANY if programs >= 500 else SOME, random.Random("goldens"))
    sabotage(golden, Oracle(golden), edits, tally)
    assert tally["edits, harmful"] > 10


@pytest.mark.parametrize("several", [False, True], ids=["one rank", "several ranks"])
def test_every_harmful_edit_of_a_random_program_is_refused(make_schedule: Schedules, programs: int, several: bool,
                                                           tally: Counter[str]) -> None:
    """And each of these programs computes what training is, whatever its plan, and races with nothing."""
    @settings(max_examples=programs, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(schedule=schedules(several=several), seed=st.integers(0, 1 << 30))
    def broken_in_all_ways(schedule: dict[str, object], seed: int) -> None:
        program = make_schedule(**schedule).program
        oracle = Oracle(program)
        assert_harmless(oracle)
        for loop, computed in zip(oracle.loops, oracle.expected, strict=True):
            training = Training(program, plan_of(schedule))
            training.run(loop)
            assert computed.results == training.results
            for place, content in computed.host.items():  # of gradients that stay on the device, the host has the norms
                assert (content[1] if isinstance(content, tuple) else content) == training.host[place], place
        tally["random programs"] += 1
        sabotage(program, oracle, chosen(program, SOME, random.Random(seed)), tally)

    broken_in_all_ways()


def test_no_event_can_go(golden: Program, tally: Counter[str]) -> None:
    """Each wait is needed, and each event with its waits and leaves."""
    for name, graph in golden.sections.items():
        section = instructions(graph)
        assert not (unneeded := removable(section, golden.ranks * golden.hosts > 1)), f"{name}: {unneeded}"
        tally["events and waits"] += sum(each.op in ("wait", "record", "enter") for each in section)


def test_programs_of_two_shapes_share_memory_without_races(make_schedule: Schedules) -> None:
    one, other = (make_schedule(**NAMED[name]).program for name in ("streamed", "blocks of two, three micro-batches"))
    verify(one, [other])
    for a in one.sections.values():
        for b in other.sections.values():
            for pair in ([a, b], [b, a]):
                machine = Machine()
                steps = [step for number, graph in enumerate(pair) for step in machine.run(instructions(graph), number)]
                assert collision(steps) is None


# The oracle itself

def test_what_the_oracle_calls_a_race_shows_when_lanes_interleave(make_schedule: Schedules) -> None:
    program = make_schedule(**NAMED["streamed"]).program
    oracle = Oracle(program)
    waits = [edit for edit in single(program) if edit.kind == "wait removed" and edit.section == "forward"
             and "for record" in edit.what]
    assert len(waits) > 5
    for edit in waits:
        sections = {**oracle.sections, edit.section: instructions(edit.apply(program).section(edit.section))}
        steps = link(sections, oracle.loops[0])
        assert collision(steps) is not None
        expected = meaning(steps).reads
        assert any(interleave(steps, expected, str(seed)) for seed in range(100)), edit.what


def test_ops_on_optimizer_state_are_ordered_by_the_weights() -> None:
    """So programs do not state the order of the state itself. Moments alone are ordered by the gradients, and what returns to
    the host by the lane in which the next gradients arrive."""
    touching = [(lane, "weights/" in writes, (*reads, *writes)) for op, (lane, reads, writes) in TOUCHES.items()
                if "state/" in (*reads, *writes) and op not in ("update_moments", "return_state", "fetch_held", "momentum")]
    assert TOUCHES["return_state"][0] == TOUCHES["offload"][0]
    # They read, as those do that write no weights; the lanes are idle after a `store_state`.
    assert all({"gradients/", "weights/"} < {*TOUCHES[op][1]} for op in ("fetch_held", "momentum"))
    lane, reads, _ = TOUCHES["update_moments"]
    assert "gradients/" in reads and all("gradients/" in touched for other, _, touched in touching if other != lane)
    assert len(touching) >= 5 and all("weights/" in touched for _, _, touched in touching)
    for lane, writes, _ in touching:
        assert all(writes or also for other, also, _ in touching if other != lane)


def test_oracle_and_vocabulary_agree_on_lanes() -> None:
    """Both were written down by themselves."""
    for several, may_touch in ((False, MAY_TOUCH), (True, MAY_TOUCH_OF_SEVERAL)):
        assert may_touch.keys() == {*SLOT_KINDS, *TILE_PARTS}
        for kind, touching in may_touch.items():
            for access in Access:
                lanes = {lane for lane, there in touching if there == access}
                assert lanes == lanes_that(access, kind, several), (kind, access)
