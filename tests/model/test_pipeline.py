"""Pipelines as values: user passes run at their place, are checked before they run, and are named in errors."""
from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine
import pytest
import tiny_models
import torch
from torch import fx

import megacompile
from megacompile.errors import HazardError, MegacompileError
from megacompile.ir.plan import Plan
from megacompile.ir.program import Program, argument, copy_section, find, uses
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE, insert_after, insert_before, replace_pass
from megacompile.passes.pipeline import check_pipeline, check_template_pipeline, compile_program
from megacompile.passes.template import Target, copy_graph
from megacompile.planning.config import StreamConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_pass.py"


def schedule_pass(name: str = "mine", requires: str = "prefetch", provides: str = "prefetch",
                  run: Callable[[Program, Plan], Any] = lambda program, plan: program) -> Any:
    return SimpleNamespace(name=name, requires=requires, provides=provides, run=run)


def names(pipeline: Any) -> list[str]:
    return [each.name for each in pipeline]


def test_a_pipeline_is_changed_by_making_another() -> None:
    before = names(PIPELINE)
    at = before.index("prefetch")
    mine = schedule_pass()
    assert names(insert_after(PIPELINE, "prefetch", mine)) == [*before[:at + 1], "mine", *before[at + 1:]]
    assert names(insert_before(PIPELINE, "prefetch", mine)) == [*before[:at], "mine", *before[at:]]
    assert names(replace_pass(PIPELINE, "prefetch", mine)) == [*before[:at], "mine", *before[at + 1:]]
    assert names(replace_pass(TEMPLATE_PIPELINE, "chunk_tokens")) == [
        "attention", "recurrence", "fuse_loss", "float8", "accumulate_in_gemm"]
    assert names(PIPELINE) == before


@pytest.mark.parametrize("change", [insert_after, insert_before, replace_pass])
def test_a_pass_that_is_not_there_is_named_beside_those_that_are(change: Callable[..., Any]) -> None:
    with pytest.raises(MegacompileError, match="the pipeline has no pass 'prefetsch': choose one of micro_batch, partition"):
        change(PIPELINE, "prefetsch", schedule_pass())


@pytest.mark.parametrize(("pipeline", "message"), [
    (insert_before(PIPELINE, "prefetch", schedule_pass()), "mine requires stage prefetch, which no pass before it provides"),
    (insert_after(PIPELINE, "place", schedule_pass()), "pass mine provides stage prefetch, but the program is already at "
                                                       "stage place there"),
    (insert_after(PIPELINE, "place", schedule_pass(provides="placed")), "mine provides stage 'placed', which does not exist"),
    (replace_pass(PIPELINE, "prefetch"), "pass offload requires stage prefetch, which no pass before it provides"),
    (replace_pass(PIPELINE, "synchronize"), "the pipeline ends at stage place"),
    (insert_after(PIPELINE, "prefetch", schedule_pass("place")), "two passes called place"),
    (insert_after(PIPELINE, "prefetch", SimpleNamespace(name="mine")), "lacks requires, provides, run"),
    ("prefetch", "passes must be a tuple of passes"),
])
def test_a_pipeline_that_cannot_run_is_refused_with_the_reason(pipeline: Any, message: str) -> None:
    with pytest.raises(MegacompileError, match=message):
        check_pipeline(pipeline)
    with pytest.raises(MegacompileError, match=message):
        StreamConfig.of(passes=pipeline)


@pytest.mark.parametrize(("each", "message"), [
    (SimpleNamespace(name="mine", level="graph", run=print), "has level 'graph': name one of model, variant"),
    (SimpleNamespace(name="mine", run=print), "is not a pass of template_passes: it lacks level"),
])
def test_a_template_pass_that_cannot_run_is_refused_with_the_reason(each: Any, message: str) -> None:
    with pytest.raises(MegacompileError, match=message):
        check_template_pipeline((*TEMPLATE_PIPELINE, each))


def test_a_pass_that_replaces_another_serves_the_passes_after_it(make_schedule: Callable[..., Any]) -> None:
    """What counts is the stage that it provides, not its name."""
    (prefetch,) = (each for each in PIPELINE if each.name == "prefetch")
    pipeline = replace_pass(PIPELINE, "prefetch", schedule_pass("mine", "differentiate", "prefetch", prefetch.run))
    check_pipeline(pipeline)
    usual = make_schedule()
    compiled = compile_program(usual.stages["model"], Plan(1, 8, (1,)), pipeline)
    assert list(compiled.stages)[list(usual.stages).index("prefetch")] == "mine"
    assert compiled.program == usual.program


def without_releases(program: Program, plan: Plan) -> Program:
    graph = copy_section(program.section("forward"))
    for node in list(find(graph, "release")):
        graph.erase_node(node)
    return program.evolve(sections={**program.sections, "forward": graph})


def without_waits(program: Program, plan: Plan) -> Program:
    graph = copy_section(program.section("forward"))
    for node in list(find(graph, "wait")):
        if argument(node, "lane") == "compute":
            graph.erase_node(node)
    return program.evolve(sections={**program.sections, "forward": graph})


@pytest.mark.parametrize(("stage", "run", "error", "message"), [
    ("place", without_releases, HazardError, "pass mine breaks the program: slot W0 is overwritten"),
    ("synchronize", without_waits, HazardError, "pass mine breaks the program: slot WB0 is read by forward prologue"),
    ("place", lambda program, plan: None, MegacompileError, "pass mine returns NoneType, not a program"),
    ("place", lambda program, plan: program.evolve(stage="offload"), MegacompileError,
     "pass mine provides stage place, but its program says offload"),
])
def test_a_pass_that_breaks_the_program_is_named(stage: str, run: Any, error: type[Exception], message: str,
                                                 make_schedule: Callable[..., Any]) -> None:
    mine = schedule_pass("mine", stage, stage, run)
    with pytest.raises(error, match=message):
        compile_program(make_schedule().stages["model"], Plan(1, 8, (1,)), insert_after(PIPELINE, stage, mine))


def test_an_exception_inside_a_pass_keeps_its_class_and_names_the_pass(make_schedule: Callable[..., Any]) -> None:
    def fail(program: Program, plan: Plan) -> Program:
        raise KeyError("w7")

    with pytest.raises(KeyError) as caught:
        compile_program(make_schedule().stages["model"], Plan(1, 8, (1,)),
                        insert_after(PIPELINE, "place", schedule_pass("mine", "place", "place", fail)))
    assert caught.value.__notes__ == ["in pass mine"]


def train(**options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model = megacompile.stream(tiny_models.build(), device="cpu", micro_batch_size=2, **options)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        tiny_models.train_step(model, optimizer, seed)
    return model, tiny_models.weights(model)


def test_a_schedule_and_a_template_pass_run_where_they_were_put_and_change_no_bit() -> None:
    example = runpy.run_path(str(EXAMPLE))
    _, usual = train()
    model, changed = train(
        passes=insert_after(PIPELINE, "prefetch", example["LatePrefetch"]()),
        template_passes=insert_after(TEMPLATE_PIPELINE, "chunk_tokens", example["SquareByProduct"]()))
    assert tiny_models.same_bits(usual, changed)
    handle = model.megacompile
    stages = list(handle.stages)
    assert stages[stages.index("prefetch") + 1] == "late_prefetch"
    program = handle.program(stage="late_prefetch")
    for section in ("forward", "backward"):
        graph = program.section(section)
        assert all(uses(graph, node)[0] is node.next for node in find(graph, "prefetch"))
    stages = engine.templates(model)["decoder"].stages
    assert "aten.pow" in stages["forward.chunk_tokens"]
    assert "aten.pow" not in stages["forward.square_by_product"]
    assert "aten.pow" not in stages["forward"]


@pytest.mark.nightly(
    held_by="tests/model/test_pipeline.py::test_a_schedule_and_a_template_pass_run_where_they_were_put_and_change_no_bit")
def test_a_schedule_without_a_model_takes_passes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    example = runpy.run_path(str(EXAMPLE))
    compiled = megacompile.schedule(tiny_models.build(), batch=2, length=8, device="cpu",
                                    passes=insert_after(PIPELINE, "synchronize", schedule_pass("last", "synchronize",
                                                                                               "synchronize")),
                                    template_passes=(*TEMPLATE_PIPELINE, example["SquareByProduct"]()))
    assert list(compiled.stages)[-1] == "last"
    assert compiled.program() is compiled.stages["last"]
    assert compiled.planner.config.passes[-1].name == "last"


class Broken:
    name, level = "broken", "variant"

    def __init__(self, how: str) -> None:
        self.how = how

    def run(self, graph: fx.GraphModule, target: Target) -> fx.GraphModule:
        if self.how == "returns nothing":
            return None  # type: ignore[return-value]
        result = copy_graph(graph)
        output = result.graph.output_node()
        output.args = (tuple(output.args[0])[:-1],)  # type: ignore[arg-type]
        result.recompile()
        return result


@pytest.mark.nightly(
    held_by="tests/model/test_pipeline.py::test_a_schedule_and_a_template_pass_run_where_they_were_put_and_change_no_bit")
@pytest.mark.parametrize(("how", "message"), [
    ("returns nothing", "template pass broken returns NoneType, not a GraphModule"),
    ("drops a result",
     r"template pass broken changes the number of results from \d+ to \d+: return a graph with the same inputs"),
])
def test_a_template_pass_that_breaks_a_graph_is_named(how: str, message: str) -> None:
    with pytest.raises(MegacompileError, match=message):
        megacompile.schedule(tiny_models.build(), batch=2, length=8, device="cpu",
                             template_passes=(*TEMPLATE_PIPELINE, Broken(how)))
