"""What `inspect` shows of programs: layers, forms, differences, the pass log."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from megacompile import inspection
from megacompile.errors import ArgumentError
from megacompile.inspection import difference, layer_range, pass_log, render, select, stage_range
from megacompile.ir.program import STAGES, argument, nodes, op_of
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import Compiled


@pytest.fixture(scope="module")
def compiled(make_schedule: Callable[..., Any]) -> Compiled:
    return make_schedule(layers=8, micro_batches=(2, 2))


def test_a_range_of_layers_is_a_slice(compiled: Compiled) -> None:
    names = [f"layers.{i}" for i in range(8)]
    found = {written: layer_range(written, compiled.program) for written in ("0:3", "2:", ":2", "5", ":")}
    assert found == {"0:3": names[:3], "2:": names[2:], ":2": names[:2], "5": names[5:6], ":": names}


@pytest.mark.parametrize("written", ["", "a", "3:1", "2:2", "0:9", "8", "-1", "0:1:2", "0..2"])
def test_an_invalid_range_of_layers_is_refused_with_the_valid_layers(written: str, compiled: Compiled) -> None:
    with pytest.raises(ArgumentError, match=r"is not a range of layers: write first:end, from 0 to 8, such as 0:3$"):
        layer_range(written, compiled.program)


def test_everything_is_shown_as_the_program_prints_itself(compiled: Compiled) -> None:
    program = compiled.program
    for fold in (False, True):
        assert render(program, select(program), "python", fold) == program.text(fold=fold)
    assert render(program, select(program, "forward"), "python", False) == program.text("forward")
    assert render(program, select(program), "table") == program.table()


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_shown_of_a_layer_names_it_and_no_other(stage: str, compiled: Compiled) -> None:
    program = compiled.stages[stage]
    for section, shown in select(program, layers=["layers.3"]).items():
        own = [node for node in shown if op_of(node).name != "leased"]  # which names the layer that made the value
        named = {argument(node, name) for node in own for name in ("call", "tile")} - {None}
        assert named <= {"layers.3"}, section
        work = [node for node in nodes(program.section(section)) if "layers.3" in map(str, node.kwargs.values())]
        assert {node for node in work if op_of(node).name not in ("enter", "leave", "leased")} <= set(shown)


def test_waits_and_events_are_shown_with_the_layer_that_they_are_for(compiled: Compiled) -> None:
    shown = select(compiled.program, "forward", ["layers.3"])["forward"]
    ops = [op_of(node).name for node in shown]
    assert {"wait", "record", "enter", "leave", "release", "prefetch", "forward"} <= set(ops)
    (prefetch,) = [node for node in shown if op_of(node).name == "prefetch"]
    before = [node for node in shown[:shown.index(prefetch)] if op_of(node).name == "wait" and argument(node, "lane") == "h2d"]
    assert before, "a slot is waited for before it is overwritten"


def test_all_layers_and_boundaries_together_are_the_program(compiled: Compiled) -> None:
    program = compiled.program
    names = [call.name for call in program.calls]
    shown = [set(select(program, "forward", [name])["forward"]) for name in names]
    missing = set(nodes(program.section("forward"))) - set().union(*shown)
    assert {op_of(node).name for node in missing} <= {"result"}


def test_json_says_of_each_node_what_the_program_does(compiled: Compiled) -> None:
    program = compiled.program
    found = json.loads(render(program, select(program), "json"))
    assert found["stage"] == "synchronize" and [tile["name"] for tile in found["tiles"]] == list(program.tiles)
    for name, graph in program.sections.items():
        listed = list(nodes(graph))
        assert [(n["name"], n["op"]) for n in found["sections"][name]] == [(n.name, op_of(n).name) for n in listed]
    prefetch = next(n for n in found["sections"]["forward"] if n["op"] == "prefetch")
    assert prefetch["lane"] == "h2d" and prefetch["reads"] == ["weights/prologue"]
    assert prefetch["writes"] == [prefetch["arguments"]["into"]]


def lines_of(text: str, mark: str) -> list[str]:
    return [line[1:].strip() for line in text.splitlines() if line.startswith(f"{mark}    ")]


def test_a_difference_is_what_came_and_what_went(compiled: Compiled) -> None:
    before, after = compiled.stages["offload"], compiled.stages["place"]
    text = difference(before, after, fold=False)
    assert text.startswith("--- offload\n+++ place\n")

    def printed(program: Any) -> list[str]:
        return [inspection.text.print_node(node) for graph in program.sections.values() for node in nodes(graph)]

    gone, come = lines_of(text, "-"), lines_of(text, "+")
    left = printed(before)
    for line in gone:
        left.remove(line)
    assert sorted([*left, *come]) == sorted(printed(after))
    assert any(line.startswith("p.release(") for line in come) and '+program.slot("W0"' in text


def test_a_difference_folds_what_repeats_from_layer_to_layer(make_schedule: Callable[..., Any]) -> None:
    before, after = stage_range("prefetch..optimizer", make_schedule(layers=28, micro_batches=(2, 2)).stages)
    folded = difference(before, after)
    assert re.search(r"^ +# x \d+ alike: ", folded, re.MULTILINE)
    assert len(folded.splitlines()) < 0.5 * len(difference(before, after, fold=False).splitlines())


def test_a_difference_of_some_layers_names_no_other(compiled: Compiled) -> None:
    text = difference(*stage_range("prefetch..synchronize", compiled.stages), "backward", ["layers.2"], context=0)
    tiles = {match for line in (*lines_of(text, "+"), *lines_of(text, "-")) for match in re.findall(r'"(layers\.\d)"', line)}
    assert tiles == {"layers.2"}


def test_a_stage_does_not_differ_from_itself(compiled: Compiled) -> None:
    assert difference(*stage_range("place..place", compiled.stages)) == "--- place\n+++ place"


@pytest.mark.parametrize(("written", "message"), [
    ("prefetch", "does not name two stages: write two of model, "),
    ("prefetch..absent", "unknown stage 'absent': choose one of model, ")])
def test_stages_that_there_are_not_are_refused(written: str, message: str, compiled: Compiled) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        stage_range(written, compiled.stages)


def test_the_log_counts_ops_before_and_after_each_pass(compiled: Compiled) -> None:
    text = pass_log(compiled.log, compiled.stages)
    counts = [sum(1 for graph in program.sections.values() for _ in nodes(graph)) for program in compiled.stages.values()]
    for number, (each, before, after) in enumerate(zip(PIPELINE, counts, counts[1:], strict=False), 1):
        assert f"{number}/{len(PIPELINE)} {each.name}: {before} -> {after} nodes" in text
    assert text.splitlines()[-1].split() == ["all", *map(str, counts)]
