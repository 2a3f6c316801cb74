"""Timelines for people: traces that Perfetto reads, and pictures."""
from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import train_step

import megacompile
from megacompile import picture
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.ir.printing import describe
from megacompile.ir.program import OPS, Lane, op_of
from megacompile.predict.simulate import Timeline, simulate
from megacompile.timeline import KINDS, LANES, MARKS, arrows, kind_of, save_trace, trace


@pytest.fixture(scope="module")
def simulated(make_schedule: Callable[..., Any]) -> Timeline:
    program = make_schedule(layers=5, micro_batches=(1, 1)).program
    return simulate(program, lambda node: 0.5 if op_of(node).name in KINDS else 0.0)


@pytest.fixture
def both(model: Any) -> dict[str, Timeline]:
    """The timelines of one program, simulated and measured."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    with model.megacompile.record() as recording:
        for seed in range(3):
            train_step(model, optimizer, seed)
    return {"simulated": model.megacompile.simulate(hardware="h200"), "measured": recording.timeline()}


def slices(found: dict[str, Any], process: int = 1) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == "X" and event["pid"] == process]


def test_every_op_is_work_of_some_kind_or_a_mark() -> None:
    assert not set(KINDS) & MARKS
    assert set(KINDS) | MARKS == set(OPS)
    assert all(OPS[name].lane is not None for name in KINDS)
    assert set(LANES) == set(Lane)


def test_a_trace_has_each_instruction_once_with_its_times_and_lane(simulated: Timeline) -> None:
    found = json.loads(json.dumps(trace({"simulated": simulated})))
    shown = [item for item in simulated.items if kind_of(item) is not None]
    assert [(e["name"], e["cat"], e["ts"], e["dur"]) for e in slices(found)] == [
        (describe(i.node), kind_of(i), i.start_s * 1e6, pytest.approx((i.end_s - i.start_s) * 1e6)) for i in shown]
    lanes = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert [lanes[e["tid"]] for e in slices(found)] == [str(i.lane) for i in shown]
    assert sum(e["dur"] for e in slices(found) if lanes[e["tid"]] == "compute") == pytest.approx(
        1e6 * sum(i.end_s - i.start_s for i in shown if i.lane == Lane.COMPUTE))


def test_an_arrow_leads_from_an_instruction_to_a_later_one_of_another_lane(simulated: Timeline) -> None:
    found = list(arrows(simulated))
    assert len(found) > 20 and len({(arrow.source, arrow.target) for arrow in found}) == len(found)
    for arrow in found:
        assert arrow.source.lane != arrow.target.lane
        assert arrow.source.end_s <= arrow.target.start_s
    pairs = {(op_of(a.source.node).name, op_of(a.target.node).name) for a in found}
    assert {("prefetch", "forward"), ("reduce", "offload"), ("update", "prefetch")} <= pairs


@pytest.mark.parametrize("name", ["simulated", "measured"])
def test_arrows_of_a_trace_come_in_pairs_that_begin_and_end_inside_of_instructions(
        both: dict[str, Timeline], name: str) -> None:
    found = trace({name: both[name]})
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
    assert len(flows) > 10
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["tid"] != end["tid"] and begin["ts"] <= end["ts"]
        for event in (begin, end):
            lane = [(s["ts"], s["ts"] + s["dur"]) for s in slices(found) if s["tid"] == event["tid"]]
            assert any(from_us <= event["ts"] <= to_us + 1 for from_us, to_us in lane), event


def test_simulated_and_measured_steps_have_the_same_names_and_lanes(both: dict[str, Timeline]) -> None:
    found = trace(both)
    first, second = ([(e["tid"], e["name"], e["args"]["section"]) for e in slices(found, process) if e["args"]["step"] == 1]
                     for process in (1, 2))
    assert sorted(first) == sorted(second) and len(first) > 20
    names = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert names == {"simulated", "measured"}


def test_the_last_steps_of_a_trace_begin_at_the_same_moment(both: dict[str, Timeline]) -> None:
    found = trace(both)
    begins = []
    for process, timeline in enumerate(both.values(), 1):
        first = min(i.start_s for i in timeline.items if kind_of(i) is not None)
        begins.append(min(e["ts"] for e in slices(found, process)) / 1e6 - first + timeline.window[0])
    assert begins[0] == pytest.approx(begins[1]) and all(e["ts"] >= 0 for e in slices(found, 1) + slices(found, 2))


def test_a_trace_that_cannot_be_written_is_refused(simulated: Timeline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written"):
        save_trace({"simulated": simulated}, tmp_path / "file" / "trace.json")
    with pytest.raises(ArgumentError, match="cannot be written"):
        picture.save({"simulated": simulated}, tmp_path / "file" / "step.png")


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_one_picture_shows_both_steps(both: dict[str, Timeline], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"made/step{suffix}"
    picture.save(both, path, title="a step")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml") and 5_000 < len(content) < 300_000


def test_a_picture_has_a_row_for_each_lane_and_a_legend_of_what_is_there(both: dict[str, Timeline]) -> None:
    figure = picture.draw(both)
    assert len(figure.axes) == 2 and len({axes.get_xlim() for axes in figure.axes}) == 1
    for axes, (name, timeline) in zip(figure.axes, both.items(), strict=True):
        assert [label.get_text() for label in axes.get_yticklabels()] == ["h2d", "compute", "d2h", "cpu"]
        assert name in axes.get_title(loc="left") and f"{timeline.binds} binds" in axes.get_title(loc="left")
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        *(KINDS[op_of(i.node).name] for t in both.values() for i in t.items if kind_of(i)), "what the step waits for"}


def test_bars_cover_the_step_as_far_as_a_lane_is_busy(simulated: Timeline) -> None:
    for lane in Lane:
        bars = list(picture._bars(simulated, lane, too_short_s=0.0))
        assert sum(bar.end - bar.begin for bar in bars) == pytest.approx(simulated.busy_s[lane])
        assert all(0 <= bar.begin < bar.end <= simulated.step_s + 1e-9 for bar in bars)


def test_a_picture_of_many_layers_stays_small(make_schedule: Callable[..., Any], tmp_path: Path) -> None:
    program = make_schedule(layers=80, micro_batches=(1,) * 4).program
    picture.save({"simulated": simulate(program, lambda node: 0.1 if op_of(node).lane else 0.0)}, tmp_path / "step.svg")
    assert (tmp_path / "step.svg").stat().st_size < 300_000


def test_the_same_step_is_drawn_with_the_same_bytes(simulated: Timeline, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        picture.save({"simulated": simulated}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib_a_picture_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MegacompileError, match=r"drawing needs matplotlib: pip install matplotlib"):
        picture.check(Path("step.svg"))
