"""Plans and programs of rows that are grouped by length: derived without a search, and shared."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import engine
import pytest
import uneven_models
from tiny_models import right_padded
from uneven_models import LONGEST, UNEVEN, lower_the_cost, stream, uneven, widths_of

import megacompile
from megacompile.errors import MegacompileError, ProgramError
from megacompile.inputs.packed_layout import Grouping, grouped
from megacompile.ir.plan import FULL_TOKENS, BatchSpec, Plan
from megacompile.passes.pipeline import compile_program
from megacompile.planning.packed_plans import PackedPlans, derived
from megacompile.planning.step_time import simulator_of
from megacompile.predict.hardware import Hardware

short_rows = pytest.fixture(autouse=True)(lower_the_cost)
twins = pytest.fixture(scope="module")(uneven_models.twins)


def test_a_plan_has_a_length_for_each_micro_batch() -> None:
    plan = Plan(6, 64, (2, 4), lengths=(64, 16))
    assert plan.sizes == ((2, 64), (4, 16)) and plan.tokens == 192 and Plan(6, 64, (2, 4)).tokens == 384
    for lengths in ((64,), (32, 16), (64, 0)):
        with pytest.raises(MegacompileError, match=r"lengths of .* do not belong"):
            Plan(6, 64, (2, 4), lengths=lengths)


def planner_of(model: Any, device_bytes: int) -> Any:
    """The planner that the model would have on an H200 with `device_bytes` of memory."""
    simulator = simulator_of(engine.captured(model), engine.tiling(model), Hardware.find("h200"), True)
    return replace(engine.executables(model).planner, simulator=simulator, budget_bytes=device_bytes, margin_bytes=0,
                   keep_residuals=True, cached=False, taken_bytes=0, stateful=None)  # whatever other tests made


def test_memory_and_time_of_a_plan_are_those_of_its_micro_batches(twins: tuple[Any, Any]) -> None:
    planner = planner_of(twins[0], 1 << 24)
    for waves, host in ((1, 0), (2, 0), (1, 1), (2, 1)):
        plan = replace(planner.plan(6, 64), micro_batches=(2, 2, 2), waves=waves, host_checkpoints=host)
        same, shorter = replace(plan, lengths=(64, 64, 64)), replace(plan, lengths=(64, 16, 8))
        for each in (planner.estimate, lambda plan: planner.estimate(plan, False), planner.host_parts,
                     lambda plan: planner.simulator.times(plan, True).step_s):
            assert each(plan) == each(same)
        assert planner.estimate(shorter).total < planner.estimate(plan).total
        assert planner.estimate(shorter, False).total < planner.estimate(plan, False).total
        assert planner.simulator.times(shorter, True).step_s <= planner.simulator.times(plan, True).step_s
        assert planner.host_parts(shorter)["checkpoints"] <= planner.host_parts(plan)["checkpoints"]


@pytest.mark.nightly(held_by=(
    "tests/model/test_grouped_plans.py::test_memory_and_time_of_a_plan_are_those_of_its_micro_batches",
    "tests/model/test_grouped_plans.py::test_micro_batches_of_groups_have_no_more_tokens_than_graphs_are_known_to_hold_of"))
@pytest.mark.parametrize("device_bytes", [3 << 19, 1 << 23, 1 << 26],
                         ids=lambda count: f"{count / 2**20:.3g} MiB")
def test_plans_of_groups_fit_take_few_searches_and_depend_on_the_batch_alone(twins: tuple[Any, Any], device_bytes: int) -> None:
    planner = planner_of(twins[0], device_bytes)

    def specs(steps: list[int]) -> list[BatchSpec]:
        found = []
        for step in steps:
            lengths = uneven(step, rows=40)
            layout = grouped((40, LONGEST), lengths, widths_of(lengths, LONGEST), Grouping.ANY_NUMBER)
            found.append(BatchSpec(40, layout.length, True, True, whole_step=True,
                                   group_rows=tuple(rows for rows, _ in layout.groups),
                                   group_lengths=tuple(length for _, length in layout.groups)))
        return found

    known, searches, chosen = PackedPlans(LONGEST, balanced=True), 0, []
    for spec in specs([*range(12)]):
        choice = known.choose(planner, spec)
        planner = planner.after(choice)
        searches += choice.answers["searched"]
        assert planner.fits(choice.plan) and choice.plan.tokens == spec.tokens
        chosen.append(choice.plan)
    assert searches <= 3
    again = PackedPlans(LONGEST, balanced=True)
    assert [again.choose(planner, spec).plan for spec in reversed(specs([*range(12)]))] == chosen[::-1]


@pytest.mark.parametrize("balanced", [False, True])
def test_micro_batches_of_groups_have_no_more_tokens_than_graphs_are_known_to_hold_of(balanced: bool) -> None:
    """A plan for float8 may have larger ones."""
    spec = BatchSpec(192, 1024, True, True, whole_step=True, group_rows=(128, 64), group_lengths=(512, 1024))
    larger = Plan(64, 1024, (32, 32))
    plans, chosen_by_user = derived(larger, spec, balanced), derived(larger, spec, balanced, most=32)
    assert plans and all(rows * length <= FULL_TOKENS for plan in plans for rows, length in plan.sizes)
    assert max(rows * length for rows, length in chosen_by_user[0].sizes) == 32 * 1024
    longer = derived(Plan(2, 32768, (1, 1)), replace(spec, batch=2, length=32768, group_rows=(2,), group_lengths=(32768,)))
    assert longer[0].sizes == ((1, 32768), (1, 32768))


@pytest.mark.nightly(held_by="tests/model/test_grouped_plans.py::test_a_program_that_is_shared_is_what_the_passes_make")
def test_thirty_steps_of_other_groups_search_seldom_and_share_programs(twins: tuple[Any, Any]) -> None:
    model = stream(twins[1])
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    specs, programs, counts = set(), set(), set()
    for step in range(30):
        model.megacompile.train_step(right_padded(uneven(step), seed=step), optimizer)
        compiled = model.megacompile.compiled()
        specs.add(compiled.spec)
        programs.add(id(compiled.program.section("train_step")))
        counts.add(len(compiled.plan.micro_batches))
    stats = model.megacompile.stats
    assert len(specs) > 20 and len(programs) == len(counts)
    assert stats["plan_searches"] + stats["plans_from_cache"] <= 2
    assert stats["micro_batch_shapes"] <= 24 and stats["packing_efficiency"] > 0.5
    model.megacompile.close()


def test_a_program_that_is_shared_is_what_the_passes_make(twins: tuple[Any, Any]) -> None:
    model = stream(twins[1])
    handle = model.megacompile
    first, second = (handle.compiled(right_padded(lengths)) for lengths in (UNEVEN, [*UNEVEN[:-1], 20]))
    assert first.plan.sizes != second.plan.sizes
    assert first.program.section("forward") is second.program.section("forward")
    executables = engine.executables(model)
    made = compile_program(executables.model_program(second.spec, second.plan), second.plan, executables.planner.config.passes)
    assert {stage: program.text() for stage, program in made.stages.items()} == {
        stage: program.text() for stage, program in second.compiled.stages.items()}
    handle.close()


def test_an_edited_program_runs_for_its_groups_and_may_not_cut_off_tokens(twins: tuple[Any, Any]) -> None:
    model = stream(twins[1])
    batch = right_padded(UNEVEN)
    expected = model(**batch).loss.item()
    text = model.megacompile.text(batch)
    lengths = model.megacompile.plan.lengths
    assert model.megacompile.load_program(text) == model.megacompile.compiled(batch).spec
    assert model(**batch).loss.item() == expected
    shorter = (*lengths[:-1], lengths[-1] - 1)
    with pytest.raises(ProgramError, match="cut off tokens"):
        model.megacompile.load_program(text.replace(f" lengths={lengths}", f" lengths={shorter}"))
    rows = ", ".join(map(str, model.megacompile.compiled(batch).spec.group_rows))
    with pytest.raises(ProgramError, match="are not those of a batch"):
        model.megacompile.load_program(text.replace(f"group_rows=({rows})", f"group_rows=({rows}, 1)"))
    model.megacompile.close()
