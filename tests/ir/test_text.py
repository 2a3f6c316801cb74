"""Programs as text: a printed program parses, and any other text is refused with its position."""
from __future__ import annotations

import builtins
import pathlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megacompile.errors import ProgramError
from megacompile.ir.placement import Placement, Placements, Updated
from megacompile.ir.plan import RESIDUALS, BatchSpec, Plan
from megacompile.ir.precision import FORMATS, Float8
from megacompile.ir.printing import excerpt, op_table
from megacompile.ir.program import OPS, STAGES, Builder, Program, argument, copy_section, find, lane_of, nodes, op_of
from megacompile.ir.text import KINDS, form, parse, parse_with_plan, print_node, print_program
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import summary
from megacompile.predict.durations import COSTS, cost_table
from megacompile.verify.ordering import placed
from megacompile.verify.verifier import handed_on, ordered, rule_table, verify

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "golden"
#: One node of each op, as text.
EVERY_OP = '''# megacompile program, stage model
program = Program(stage="model", micro_batches=(2, 1))
program.tile("layers.0", parameters=16, weight_bytes=32, gradient_bytes=32, trainable=True, state_bytes=160)
program.tile("frozen", parameters=16, weight_bytes=32, gradient_bytes=0, trainable=False, routed_bytes=8)
program.call("layers.0", role="layer", template="decoder", tiles=("layers.0",), weightless=("backward",), output_bytes=64)
program.call("head", role="epilogue", template="head", tiles=())
program.slot("W0", bytes=4096)

def forward(p):
    e = p.enter("W0", "read", "compute")
    k = p.pack("layers.0", into="S0")                                                  # pack
    w = p.prefetch("layers.0", staging=k, into="W0")                                   # h2d
    k_1 = p.pack_shard("layers.0", into="S0")                                          # pack
    n = p.prefetch_shard("layers.0", staging=k_1, into="P0")                           # h2d
    w_1 = p.gather("layers.0", shard=n, into="W0")                                     # collective
    v = p.resident("layers.0", into="R0")
    h = p.forward("decoder", "layers.0", mb=0, weights=(w,), inputs=())                # compute
    w_2 = p.prefetch_routed("frozen", router=h, into="W0")                             # h2d
    r = p.forward_saving("decoder", "layers.0", mb=1, weights=(w, v), inputs=(h, h))   # compute
    a = p.zeros("layers.0")                                                            # compute
    l = p.loss("head", "head", mb=0, inputs=(h,), accumulators=(a,))                   # compute
    v_1 = p.evaluate("head", "head", mb=0, inputs=(h,))                                # compute
    v_2 = p.outputs("head", "head", mb=0, inputs=(h,))                                 # compute
    t = p.output_gradient("head", mb=0)                                                # compute
    p.scale(l)                                                                         # compute
    g = p.recompute_backward("decoder", "layers.0", mb=0, inputs=(h, h), gradient=l)   # compute
    g_1 = p.backward("decoder", "layers.0", mb=0, inputs=(h, h), saved=r, gradient=l)  # compute
    p.reduce_scatter("layers.0", accumulators=a)                                       # collective
    p.all_reduce("layers.0", accumulators=a)                                           # collective
    d = p.reduce("layers.0", accumulators=a, into="G0")                                # compute
    p.share_norms("layers.0", reduced=d)                                               # collective
    o = p.offload("layers.0", reduced=d, into="D0")                                    # d2h
    p.accumulate("layers.0", slab=o, overwrite=False)                                  # cpu
    p.offload_norms("layers.0", reduced=d)                                             # d2h
    p.add_to_sum("layers.0", slab=o, overwrite=True)                                   # cpu
    p.add_to_sum("layers.0", overwrite=False)                                          # cpu
    p.norms_of_sum("layers.0")                                                         # cpu
    p.share_host_norms("layers.0")                                                     # cpu
    q = p.fetch_gradients("layers.0", into="RG0")                                      # cpu
    q_1 = p.resident_gradients("layers.0", into="RG0")
    c = p.clip(tiles=("layers.0",))                                                    # cpu
    s = p.fetch_state("layers.0", into="RS0")                                          # cpu
    s_1 = p.resident_state("layers.0", into="RS0")
    p.update_on_device("layers.0", resident=v, state=s, reduced=q, clip=c)             # compute
    p.gather_resident("layers.0", resident=v)                                          # collective
    p.store_state("layers.0", state=s_1)                                               # cpu
    p.offload_weights("layers.0", resident=v)                                          # d2h
    update = p.update("layers.0", clip=c)                                              # cpu
    p.update_weights("layers.0", clip=c)                                               # cpu
    p.update_moments("layers.0", rule="lion", clip=c)                                  # cpu
    p.update_from_sum("layers.0", clip=c)                                              # cpu
    j = p.momentum("layers.0", clip=c, into="N0")                                      # h2d
    p.gather_momentum("layers.0", momentum=j)                                          # collective
    v_3 = p.update_visiting("layers.0", clip=c, momentum=j, into="V0")                 # h2d
    u = p.hold("layers.0", reduced=d, current=w, into="RH0")                           # compute
    p.fetch_held("layers.0", held=u)                                                   # h2d
    u_1 = p.held("layers.0", into="RH0")
    p.update_held("layers.0", held=u_1, clip=c)                                        # h2d
    p.return_weights("layers.0", held=u_1)                                             # d2h
    p.return_state("layers.0", held=u_1, clip=c)                                       # d2h
    m = p.read_state("layers.0", into="M0")                                            # disk_read
    p.write_state("layers.0", moments=m)                                               # disk_write
    p.announce(tiles=("layers.0",))                                                    # cpu
    z = p.total_loss(values=(l,))                                                      # compute
    p.share_loss(z)                                                                    # collective
    p.result("loss", values=(l,))                                                      # compute
    p.lease(h)                                                                         # compute
    x = p.leased("layers.0", mb=0)                                                     # compute
    x_3 = p.leased(tile="layers.0")                                                    # compute
    p.release(x)                                                                       # compute
    x_1 = p.stash("layers.0", mb=0, value=h, into="H0")                                # d2h
    x_2 = p.stashed("layers.0", mb=1, into="H1")
    y = p.fetch("layers.0", mb=0, stashed=x_1, into="C0")                              # h2d
    p.release(w)
    e_1 = p.record(update)                                                             # cpu
    p.wait("h2d", e_1)                                                                 # h2d
    p.leave("weights/layers.0", "write", e_1)

def load(p):
    pass
'''
CASES: dict[str, dict[str, Any]] = {
    "streamed": {"micro_batches": (2, 1)},
    "blocks, slabs": {"micro_batches": (1, 1), "checkpoint_interval": 2, "weight_slots": 3, "pinned": False},
    "resident": {"resident": ("layers.1", "epilogue")},
    "tied": {"tied": True, "saved_layers": 1},
    "outputs": {"outputs": True, "micro_batches": (1, 1)},
    "checkpoints on the host": {"micro_batches": (2, 1), "host_checkpoints": 2},
    "updated on the device": {"resident": ("prologue", "layers.1"), "resident_state": ("prologue", "layers.1")},
    "two ranks": {"micro_batches": (2, 1), "ranks": 2},
    "two ranks, slabs": {"micro_batches": (1, 1), "pinned": False, "ranks": 2},
    "two ranks, updated on the device": {"resident": ("layers.0", "layers.1"), "resident_state": ("layers.1",), "ranks": 2},
    "two ranks on each of three hosts": {"micro_batches": (2, 1), "ranks": 2, "hosts": 3},
    "one rank on each of two hosts": {"micro_batches": (1, 1), "hosts": 2},
    "moments on disk": {"disk_state": ("prologue", "layers.1", "layers.2"), "state_slabs": 1},
    "held for the update": {"whole_step": True, "micro_batches": (1, 1), "waves": 2, "resident": ("layers.1",),
                            "held_state": ("layers.1", "layers.2", "epilogue")},
    "visiting the device": {"resident": ("layers.1",), "visiting_state": ("prologue", "layers.1"), "deferred_moments": True},
}


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(EVERY_OP.splitlines()) if text in line)


def test_every_op_prints_as_it_was_written() -> None:
    program = parse(EVERY_OP)
    assert {op_of(node).name for node in nodes(program.section("forward"))} == set(OPS)
    assert print_program(program) == EVERY_OP


def test_every_parameter_has_a_kind() -> None:
    assert {p for op in OPS.values() for p in op.parameters} <= set(KINDS)


@pytest.mark.parametrize("case", CASES)
def test_what_prints_parses_at_every_stage(case: str, make_schedule: Callable[..., Any]) -> None:
    stages = make_schedule(**CASES[case]).stages
    assert list(stages) == ["model", *(each.name for each in PIPELINE)]
    assert [*dict.fromkeys(program.stage for program in stages.values())] == list(STAGES)
    for program in stages.values():
        again = parse(print_program(program))
        assert again == program
        assert again.tiles == program.tiles
        assert again.calls == program.calls
        assert again.slots == program.slots
        for name, graph in program.sections.items():
            assert [lane_of(node) for node in nodes(graph)] == [lane_of(node) for node in nodes(again.section(name))]


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `make_schedule`: any small model under any plan that it can have."""
    layers = draw(st.integers(1, 5))
    tiles = ["prologue", *(f"layers.{i}" for i in range(layers)), "epilogue"]
    micro_batches = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    interval = draw(st.integers(1, layers))
    resident = draw(st.lists(st.sampled_from(tiles), unique=True))
    stateful = draw(st.lists(st.sampled_from(resident), unique=True)) if resident else []
    whole = draw(st.booleans())
    waves = draw(st.integers(1, len(micro_batches))) if whole else 1
    return {
        "layers": layers, "micro_batches": micro_batches, "checkpoint_interval": interval, "whole_step": whole,
        "weight_slots": draw(st.integers(interval, interval + 2)), "saved_layers": draw(st.integers(0, layers)),
        "resident": tuple(t for t in tiles if t in resident), "resident_state": tuple(t for t in tiles if t in stateful),
        "pinned": draw(st.booleans()), "tied": draw(st.booleans()),
        "waves": waves, "host_sums": tuple(t for t in tiles if waves > 1 and t not in stateful and draw(st.booleans())),
        "update": draw(st.sampled_from(("step", "arrival"))) if whole else "step"}


#: Its second wave's sum has the name that its first one, which no line names, would take.
NAMELESS = dict(layers=1, micro_batches=(1, 1), whole_step=True, waves=2, host_sums=("prologue", "layers.0"))


@settings(max_examples=25)
@given(plan=plans())
@example(plan=NAMELESS)
def test_the_text_of_every_stage_of_any_plan_is_exact(plan: dict[str, Any], make_schedule: Callable[..., Any]) -> None:
    for program in make_schedule(**plan).stages.values():
        text = print_program(program)
        again = parse(text)
        assert print_program(again) == text
        assert (again.tiles, again.calls, again.slots) == (program.tiles, program.calls, program.slots)
        for name, graph in program.sections.items():
            for ours, theirs in zip(nodes(graph), nodes(again.section(name)), strict=True):
                assert print_node(ours) == print_node(theirs)
                assert (op_of(ours), lane_of(ours)) == (op_of(theirs), lane_of(theirs))


@given(spec=st.builds(BatchSpec, st.just(3), st.integers(1, 9), st.booleans(), st.booleans(), st.booleans(),
                       st.sampled_from(("step", "arrival")), st.booleans()),
       plan=st.builds(Plan, st.just(3), st.integers(1, 9), st.just((2, 1)), st.integers(1, 9), st.integers(0, 9),
                      weight_slots=st.integers(1, 9), pinned=st.booleans(), waves=st.integers(1, 2),
                      token_chunk=st.integers(0, 9)),
       placed=st.dictionaries(st.sampled_from(["a", "b c", "d", "e", "f"]), st.builds(
           Placement, st.sampled_from(Updated), st.booleans())),
       residuals=st.sampled_from(RESIDUALS))
def test_the_shape_and_the_plan_in_a_text_are_exact(spec: BatchSpec, plan: Plan, placed: dict[str, Placement],
                                                    residuals: str) -> None:
    placements = Placements(placed)
    plan = replace(plan, length=spec.length, checkpoint_interval=1 if residuals != "all" else plan.checkpoint_interval,
                   residuals=residuals, waves=2 if placements.lists["host_sums"] else plan.waves, placements=placements,
                   update="step" if placements.lists["visiting_state"] or placements.lists["held_state"] else "arrival")
    program = parse(EVERY_OP)
    text = print_program(program, made_for=(spec, plan))
    assert parse_with_plan(text) == (program, spec, plan)
    assert print_program(program, made_for=(spec, parse_with_plan(text)[2])) == text
    assert parse(text) == program


@settings(max_examples=25)
@given(recipe=st.builds(Float8, st.sampled_from(("tensor", "row")), st.sampled_from(sorted(FORMATS)),
                        st.sampled_from(("float8", "bfloat16")), st.sampled_from(("none", "forward", "all")),
                        st.lists(st.sampled_from(("down_proj", "layers.0")), unique=True), st.integers(1, 2**24),
                        st.booleans()))
def test_the_precision_in_a_text_is_exact(recipe: Float8) -> None:
    without = parse(EVERY_OP)
    program = without.evolve(precision=recipe)
    text = print_program(program)
    assert parse(text).precision == recipe and print_program(parse(text)) == text
    assert program != without and without.precision is None
    (line,) = set(text.splitlines()) - set(EVERY_OP.splitlines())
    assert line.startswith("program.precision(")


def test_fields_of_a_precision_may_be_absent_from_a_text() -> None:
    text = EVERY_OP.replace("program.tile(", 'program.precision(scaling="row")\nprogram.tile(', 1)
    assert parse(text).precision == Float8(scaling="row")


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDENS.glob("*.txt")))
def test_the_text_of_every_golden_program_is_exact(name: str) -> None:
    text = (GOLDENS / name).read_text(encoding="utf-8")
    assert print_program(parse(text)) == text


def test_a_section_prints_alone(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule().program
    assert program.text(section="update").startswith("def update(p):\n")
    assert program.text(section="update") in program.text()


def test_printing_is_deterministic_and_keeps_a_copy_equal(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule(micro_batches=(2, 1)).program
    copy = program.evolve(sections={name: copy_section(graph) for name, graph in program.sections.items()})
    assert print_program(copy) == print_program(program)


def test_names_with_quotes_and_umlauts_survive() -> None:
    program = parse(EVERY_OP.replace('"loss"', r'"h\"\\ü"'))
    assert argument(next(find(program.section("forward"), "result")), "key") == 'h"\\ü'
    assert parse(print_program(program)) == program


MALFORMED = {  # name: (what to replace, by what, what the message says)
    "unknown op": ("p.zeros(", "p.zeroes(", "unknown op zeroes; expected one of pack, prefetch"),
    "unknown argument": ("slab=o", "slap=o",
                         "unexpected argument slap; expected `p.accumulate(tile, slab=..., overwrite=...)`"),
    "missing argument": (", overwrite=False", "", "missing overwrite; expected `p.accumulate("),
    "missing positional": ('p.zeros("layers.0")', "p.zeros()", "missing tile"),
    "argument twice": ("reduced=d,", "reduced=d, reduced=d,", "reduced"),
    "positional by name": ('p.zeros("layers.0")', 'p.zeros(tile="layers.0")', "unexpected argument tile"),
    "keyword by position": ("slab=o, overwrite=False", "o, False", "too many positional arguments"),
    "starred": ("inputs=(h,))", "inputs=(*h,))", "inputs has another kind of value"),
    "double starred": ("(a,))  ", "(a,), **a)  ", "unexpected argument **"),
    "unknown lane": ('p.wait("h2d"', 'p.wait("gpu"', "unknown lane gpu; expected one of compute, h2d"),
    "unknown access": ('"W0", "read"', '"W0", "touch"', "unknown access touch; expected one of read, write"),
    "unknown stage": ('stage="model", micro', 'stage="late", micro', "unknown stage late; expected one of model"),
    "undefined name": ("slab=o", "slab=oo", "oo is not defined here"),
    "used before defined": ("staging=k", "staging=h", "h is not defined here"),
    "redefined name": ("v_1 =", "h =", "h is defined twice"),
    "name of the builder": ("v_1 =", "p =", "p is defined twice"),
    "name that Python has": ("v_1 =", "print =", "print cannot be the name of a value"),
    "value without a name": ("v_1 = ", "", "evaluate has no name"),
    "string for a value": ("staging=k", 'staging="k"', "staging has another kind of value; expected the name of a node above"),
    "value for a string": ('p.zeros("layers.0")', "p.zeros(k)", "tile has another kind of value; expected a printable string"),
    "number for a flag": ("overwrite=False", "overwrite=0", "expected True or False"),
    "flag for a number": ("mb=1", "mb=True", "mb has another kind of value; expected a whole number"),
    "negative number": ("mb=1", "mb=-1", "mb has another kind of value"),
    "huge number": ("mb=1", f"mb={2**63}", "expected a whole number below 2**63"),
    "gigantic number": ("mb=1", f"mb={'9' * 5000}", "expected a whole number below 2**63"),
    "number with a leading zero": ("mb=1", "mb=01", "expected a whole number"),
    "float": ("bytes=4096", "bytes=4096.0", "bytes has another kind of value"),
    "tuple for a value": ("staging=k", "staging=(k,)", "staging has another kind of value"),
    "list for a tuple": ("inputs=(h,))", "inputs=[h])", "expected a tuple of names"),
    "value for a tuple": ("weights=(w,)", "weights=w", "expected a tuple of names"),
    "call in an argument": ("staging=k", "staging=open('x')", "staging has another kind of value"),
    "expression in an argument": ('p.result("loss",', 'p.result("lo" + "ss",', "key has another kind of value"),
    "bytes": ('p.result("loss"', 'p.result(b"loss"', "key has another kind of value"),
    "unprintable name": ('p.result("loss"', 'p.result("\\n"', "key has another kind of value"),
    "endless name": ('p.result("loss"', f'p.result("{"h" * 2000}"', "key has another kind of value"),
    "other object": ("p.scale(l)", "q.scale(l)", "not a node; expected `name = p.op(...)`"),
    "two targets": ("o = p", "o = oo = p", "not a node; expected `name = p.op(...)`"),
    "annotated": ("update = p", "update: int = p", "not a node"),
    "augmented": ("p.scale(l)", "l += p.scale(l)", "not a node"),
    "returned": ("p.scale(l)", "return p.scale(l)", "not a node"),
    "import": ("p.scale(l)", "import os", "not a node"),
    "statement in a section": ("p.scale(l)", "if l: p.scale(l)", "not a node"),
    "text after the program": ("def load(p):\n    pass\n", "print(1)\n", "not a declaration"),
    "late declaration": ("def load(p):\n    pass\n", 'program.slot("W1", bytes=1)\n', "slot after a section"),
    "unknown declaration": ("program.slot(", "program.buffer(", "unknown declaration buffer"),
    "slot twice": ('program.slot("W0", bytes=4096)', 'program.slot("W0", bytes=1)\n' * 2, "slot W0 is declared twice"),
    "section twice": ("def load", "def forward", "section forward is defined twice"),
    "section with arguments": ("def load(p)", "def load(p, q=1)", "another signature"),
    "decorated section": ("def load(p)", "@print\ndef load(p)", "not a declaration"),
    "async section": ("def load(p)", "async def load(p)", "not a declaration"),
    "no program": ("program = Program(", "program = Schedule(", "not the beginning of a program"),
    "open parenthesis": ("p.scale(l)", "p.scale(l", "scale( is not closed; expected `,` or `)`"),
    "null byte": ("p.scale(l)", "p.scale(\0)", "value has another kind of value"),
    "absurd nesting": ("inputs=(h,))", f"inputs={'(' * 300}h{')' * 300})", "inputs has another kind of value"),
    "one name in parentheses": ("inputs=(h,))", "inputs=(h))", "expected a tuple of names"),
    "string in single quotes": ('p.result("loss"', "p.result('loss'", "key has another kind of value"),
    "open string": ('p.result("loss"', 'p.result("loss', "key has another kind of value"),
    "two nodes in a line": ("p.scale(l)", "p.scale(l); p.scale(l)", "not a node"),
    "deeper line": ("    p.scale(l)", "        p.scale(l)", "8 spaces before it; expected 4"),
    "line after pass": ("    pass\n", "    pass\n    pass\n", "a line after `pass`"),
    "section without a line": ("    pass\n", "", "a section without a line"),
    "section with Python's own name": ("def load", "def import", "a section cannot have this name"),
    "endless name of a value": ("v_1 =", f"{'v' * 2000} =", "expected at most 1024"),
    "plan without a shape": ("program.slot(", "program.plan()\nprogram.slot(", "expected `program.shape(...)` above"),
    "plan that cannot be": ("program.slot(", "program.shape(batch=4, length=8, labels=True, training=True)\n"
                            "program.plan()\nprogram.slot(", "micro-batches of (2, 1) are not a split of 4 sequences"),
    "second shape": ("program.slot(", "program.shape(batch=3, length=8, labels=True, training=True)\n" * 2
                     + "program.slot(", "a second shape; expected one"),
    "second precision": ("program.slot(", "program.precision()\n" * 2 + "program.slot(", "a second precision; expected one"),
    "precision with another field": ("program.slot(", "program.precision(scales=1)\nprogram.slot(",
                                     "unexpected argument scales; expected `program.precision([scaling=...], [gradients=...]"),
    "precision by position": ("program.slot(", 'program.precision("row")\nprogram.slot(', "too many positional arguments"),
    "precision with another kind of value": ("program.slot(", 'program.precision(emulated="yes")\nprogram.slot(',
                                             "emulated has another kind of value; expected True or False"),
    "precision with another value": ("program.slot(", 'program.precision(scaling="column")\nprogram.slot(',
                                     "Float8 scaling must be one of tensor, row, not 'column'; expected a valid precision"),
    "precision that keeps nothing's name": ("program.slot(", 'program.precision(keep=("",))\nprogram.slot(',
                                            "Float8 keep must be names of modules, not ('',); expected a valid precision"),
    "late precision": ("def load(p):\n    pass\n", "program.precision()\n", "precision after a section"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_text_is_refused_with_its_line_and_column(case: str) -> None:
    old, new, message = MALFORMED[case]
    assert old in EVERY_OP
    with pytest.raises(ProgramError) as caught:
        parse(EVERY_OP.replace(old, new, 1))
    first = str(caught.value).splitlines()[0]
    assert message in first
    assert first.startswith("line ")
    assert "column " in first
    assert abs(int(first.split()[1].rstrip(",")) - 1 - line_of(old.splitlines()[0])) <= 2


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "pass"])
def test_text_without_a_program_is_refused(text: str) -> None:
    with pytest.raises(ProgramError, match="expected `program = Program"):
        parse(text)


def test_the_message_shows_the_line_and_a_mark_under_the_column() -> None:
    with pytest.raises(ProgramError) as caught:
        parse(EVERY_OP.replace("staging=k", "staging=kk"))
    message, shown, mark = str(caught.value).splitlines()
    assert "column 40" in message
    assert shown[mark.index("^"):].startswith("kk")


PIECES = st.sampled_from(["p", "p.", "(", ")", ",", "=", '"', "\\", "\n", "    ", "e", "0", "-", "*", "def ",
                          "lambda: ", "@", "None", "__import__('os')", "[", "{", "#", "\t", "\0", "é", "\ud800"])


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(EVERY_OP) - 1), st.integers(0, 12), PIECES), min_size=1, max_size=4))
def test_mutated_text_is_refused_or_prints_and_parses(edits: list[tuple[int, int, str]]) -> None:
    text = EVERY_OP
    for start, removed, piece in edits:
        text = text[:start] + piece + text[start + removed:]
    try:
        program = parse(text)
    except ProgramError:
        return
    assert parse(print_program(program)) == program


def test_nothing_in_the_text_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("text was executed")

    compile_source = builtins.compile

    def only_trees(source: Any, filename: Any, mode: str, flags: int = 0, *rest: Any, **more: Any) -> Any:
        import ast
        assert flags & ast.PyCF_ONLY_AST, "text was compiled to code"
        return compile_source(source, filename, mode, flags, *rest, **more)

    monkeypatch.setattr(builtins, "exec", refuse)
    monkeypatch.setattr(builtins, "eval", refuse)
    monkeypatch.setattr(builtins, "compile", only_trees)
    assert isinstance(parse(EVERY_OP), Program)


def test_a_node_that_others_need_has_a_name_in_text_though_it_has_no_value() -> None:
    section = parse(EVERY_OP).section("forward")
    update, accumulate = next(find(section, "update")), next(find(section, "accumulate"))
    assert print_node(update).startswith("update = p.update(")
    assert print_node(accumulate).startswith("p.accumulate(")


def test_optional_arguments_stand_in_brackets_in_the_form_of_an_op() -> None:
    assert form(OPS["prefetch"]) == "value = p.prefetch(tile, [staging=...], [into=...])"
    assert form(OPS["wait"]) == "p.wait(lane, event)"


# For reading

def test_a_deep_schedule_folds_to_a_screen_or_two(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule(layers=28).program
    folded = program.text("forward", fold=True).splitlines()
    assert len(folded) <= 110, "two screens"
    assert len(folded) < len(print_program(program, "forward").splitlines()) / 3
    assert any("alike: layers." in line for line in folded)


def test_folding_loses_no_line_but_those_it_counts(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule(layers=12, micro_batches=(1, 1, 1)).program
    for name, graph in program.sections.items():
        assert _unfolded(program.text(name, fold=True).splitlines()[1:]) == len(list(nodes(graph)))
    head, declared = ([line for line in text.partition("\n\ndef ")[0].splitlines() if line]
                      for text in (program.text(fold=True), print_program(program)))
    assert len(head) < len(declared) / 2
    assert _unfolded(head, 0) == len(declared)


def _unfolded(lines: list[str], indent: int = 4) -> int:
    """How many lines a folded text stands for."""
    total, i = 0, 0
    while i < len(lines):
        depth = len(lines[i]) - len(lines[i].lstrip())
        assert depth == indent
        if not lines[i].lstrip().startswith("# x "):
            total, i = total + 1, i + 1
            continue
        inner = []
        times = int(lines[i].split()[2])
        i += 1
        while i < len(lines) and len(lines[i]) - len(lines[i].lstrip()) > indent:
            inner.append(lines[i])
            i += 1
        total += times * _unfolded(inner, indent + 4)
    return total


def test_a_folded_program_begins_with_its_declarations(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule().program
    assert program.text(fold=True).startswith("# megacompile program, stage synchronize\nprogram = Program(")


def test_the_table_has_each_node_in_the_column_of_its_lane(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule().program
    lines = program.table("forward").splitlines()
    header, rows = lines[1], lines[3:]
    assert len(rows) == len(list(nodes(program.section("forward"))))
    prefetch = next(row for row in rows if "= prefetch layers.0" in row)
    assert prefetch.index("w") == header.index("h2d")
    assert prefetch.rstrip().endswith("W0")
    assert program.table().count("section ") == len(program.sections)


def test_the_summary_counts_bytes_over_the_link(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule().program
    row = next(line for line in summary(program).splitlines() if line.startswith("forward"))
    assert f"{sum(tile.weight_bytes for tile in program.tiles.values()):,}" in row
    assert summary(program.evolve(sections={})).startswith("section")


def test_an_excerpt_is_short_however_long_the_section() -> None:
    program = parse(EVERY_OP)
    graph = copy_section(program.section("forward"))
    build = Builder(graph)
    first = next(find(graph, "zeros"))
    for _ in range(500):
        last = build.add("zeros", "a", tile="layers.0")
    shown = excerpt(graph, {first: "conflicts with", last: "ERROR HERE"}).splitlines()
    assert len(shown) < 15
    assert sum("<-- ERROR HERE" in line for line in shown) == 1
    assert sum("<-- conflicts with" in line for line in shown) == 1


# The language's page

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "schedule-language.md").read_text(encoding="utf-8")


def test_the_page_lists_every_op_and_every_rule() -> None:
    """To fix: put what `op_table()`, `rule_table()` and `cost_table()` return between their marks."""
    assert f"-->\n{op_table()}\n<!-- end of ops -->" in PAGE
    assert f"-->\n{rule_table()}\n<!-- end of rules -->" in PAGE
    assert f"-->\n{cost_table()}\n<!-- end of costs -->" in PAGE


def test_the_ops_that_cost_something_are_those_that_do_work() -> None:
    """Others mark, order and hand over, or move a few bytes."""
    marks = {"result", "lease", "leased", "release", "record", "wait", "enter", "leave", "clip", "offload_norms",
             "output_gradient", "share_norms", "share_host_norms", "share_loss",
             "total_loss", "announce"}
    assert set(COSTS) == {op.name for op in OPS.values() if op.lane is not None} - marks


def test_the_program_of_the_page_parses_verifies_and_prints() -> None:
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    program = parse(text)
    verify(program)
    for rule in (placed, ordered, handed_on):
        assert not list(rule(program))
    assert [line.split("  #")[0].rstrip() for line in print_program(program).splitlines()] == [
        line.split("  #")[0].rstrip() for line in text.splitlines()]


def test_the_grammar_of_the_page_names_every_argument_of_a_declaration() -> None:
    grammar = PAGE.split("## Grammar\n")[1].split("\n## ")[0]
    for name in ("parameters", "weight_bytes", "gradient_bytes", "trainable", "role", "template", "tiles", "weightless",
                 "bytes", "state_bytes", "stage", "micro_batches", "batch", "length", "labels", "training", "lean", "update"):
        assert f"{name}='" in grammar
