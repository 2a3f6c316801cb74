"""The ways to keep optimizer state side by side: their bytes, what fits a host, and what a refusal proposes."""
from __future__ import annotations

import functools
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import engine
import pytest
import tiny_models
import torch
from typer.testing import CliRunner

import megacompile
from megacompile import SGD, AdamW, Lion, Muon, cli
from megacompile.errors import InsufficientMemoryError, UnsupportedError
from megacompile.planning.explain import StateRow
from megacompile.planning.host_needs import EXACT, StateChoice, by_accuracy, bytes_each, check_state, combinations, with_choice
from megacompile.planning.memory import slab_bytes
from megacompile.predict.hardware import Hardware
from megacompile.runtime.optimizer.state_format import BFLOAT16, BLOCK, EIGHT_BITS, FLOAT32, FORMATS, StateFormat
from megacompile.scheduling import Schedule
from megacompile.weights.tiling import HOST_MARGIN_BYTES, Tiling

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS: dict[str, Any] = {"adamw": AdamW, "lion": Lion, "sgd": SGD, "muon": Muon}
BF16 = {torch.bfloat16}


def planned(bf16: bool = True, **options: Any) -> Schedule:
    with torch.device("meta"):
        model = tiny_models.build(bf16, **SIZES)
    return megacompile.schedule(model, **{"batch": 8, "length": 16, "hardware": "h200", "resident_state": (), **options})


@pytest.fixture(scope="module", ids=lambda param: f"{param[0]}, {param[1]} GPUs", params=[
    ("adamw", 1), *(pytest.param(other, marks=pytest.mark.nightly) for other in (("adamw", 2), ("lion", 1), ("muon", 1)))])
def schedule(request: pytest.FixtureRequest) -> Schedule:
    optim, gpus = request.param
    return planned(optim=optim, gpus=gpus, device_memory="3GiB")


@pytest.fixture(scope="module")
def rows(schedule: Schedule) -> tuple[StateRow, ...]:
    return schedule.outlook().states


def arguments(choice: StateChoice) -> dict[str, Any]:
    """The choice in arguments of an optimizer."""
    return {"state_dtype": choice.format.name, "master": "float32" if choice.exact else "bfloat16",
            "overlap": "backward" if choice.on_arrival else None}


def written(options: str) -> dict[str, Any]:
    """Arguments of an optimizer, as messages write them."""
    return dict(re.findall(r"(\w+)='(\w+)'", options))


# ---------------------------------------------------------------- bytes

@pytest.mark.parametrize(("stored", "exact", "on_arrival", "bytes_each"), [
    (FLOAT32, True, False, 14), (FLOAT32, True, True, 12), (BFLOAT16, True, False, 10), (BFLOAT16, True, True, 8),
    (EIGHT_BITS, True, False, 8 + 8 / BLOCK), (EIGHT_BITS, True, True, 6 + 8 / BLOCK), (FLOAT32, False, False, 12),
    (BFLOAT16, False, True, 6), (EIGHT_BITS, False, False, 6 + 8 / BLOCK), (EIGHT_BITS, False, True, 4 + 8 / BLOCK)])
def test_bytes_of_a_bf16_parameter_are_those_of_its_parts(stored: StateFormat, exact: bool, on_arrival: bool,
                                                          bytes_each: float) -> None:
    assert StateChoice(stored, exact, on_arrival).bytes(torch.bfloat16) == bytes_each


def test_all_combinations_have_a_row(schedule: Schedule, rows: tuple[StateRow, ...]) -> None:
    """Whole matrices are not updated on arrival."""
    whole = any(layout.matrices for layout in schedule.tiling.layouts.values())
    assert [row.choice for row in rows] == combinations(BF16, clipped=whole)
    assert len(set(rows)) == len(rows) == len(FORMATS) * 2 * (1 if whole else 2)


@pytest.mark.nightly(held_by="tests/model/test_state_table.py::test_all_combinations_have_a_row")
def test_fp32_weights_are_their_own_masters() -> None:
    found = planned(bf16=False).outlook().states
    assert len(found) == 2 * len(FORMATS) and all(row.choice.exact for row in found)
    assert [row.bytes_each for row in found[::3]] == pytest.approx([16, 12], rel=0.01)


def test_a_row_has_the_bytes_of_its_tiles_and_only_rows_that_clip_hold_gradients(
        schedule: Schedule, rows: tuple[StateRow, ...]) -> None:
    ranks = schedule.plan.ranks
    for row in rows:
        tiling = with_choice(schedule.tiling, row.choice)
        each = tiling.host_bytes(gradients=not row.choice.on_arrival) / sum(x.parameters for x in tiling.host.values())
        assert row.bytes_each == each
        beside = row.host_bytes - schedule.tiling.margin_bytes
        if not row.choice.on_arrival:
            assert beside == tiling.host_bytes()
            continue
        slabs = beside - tiling.host_bytes(gradients=False)
        assert tiling.host_parts(gradients=False)["gradients"] == 0 < tiling.host_parts()["gradients"]
        assert ranks * slab_bytes(tiling, 1, ()) <= slabs <= ranks * slab_bytes(tiling, 12, ())


def test_a_row_for_what_was_planned_says_what_the_plan_says(schedule: Schedule, rows: tuple[StateRow, ...]) -> None:
    outlook = schedule.outlook()
    assert rows[0].choice == EXACT and with_choice(schedule.tiling, EXACT) == schedule.tiling
    assert rows[0].host_bytes == outlook.host_needed and outlook.chosen.times is not None
    assert rows[0].step_s == pytest.approx(outlook.chosen.times.step_s)


@pytest.mark.nightly(held_by=(
    "tests/model/test_state_table.py::test_a_row_for_what_was_planned_says_what_the_plan_says",
    "tests/model/test_state_table.py::test_a_row_has_the_bytes_of_its_tiles_and_only_rows_that_clip_hold_gradients"))
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_row_for_a_plan_with_updates_on_arrival_says_what_the_plan_says(gpus: int) -> None:
    outlook = planned(update="arrival", optim="adamw_8bit", gpus=gpus, device_memory="3GiB").outlook()
    (same,) = (row for row in outlook.states if row.choice == StateChoice(EIGHT_BITS, on_arrival=True))
    assert same.host_bytes == outlook.host_needed and not outlook.host_parts["gradients"] and outlook.chosen.times is not None
    assert same.step_s == pytest.approx(outlook.chosen.times.step_s)


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(6))
def test_a_row_s_bytes_are_what_is_allocated(kind: str, number: int, shared: tiny_models.Shared) -> None:
    """Weights, gradients, remainders and moments; moments restart with each choice."""
    model = shared.fresh()
    choice = [each for each in combinations(BF16) if each.on_arrival == shared.arriving][number]
    if shared.arriving and KINDS[kind].matrix_rule is not None:
        with pytest.raises(UnsupportedError, match="Muon updates whole matrices on the device at the end of a step"):
            KINDS[kind](model.parameters(), lr=1e-3, **arguments(choice))
        return
    optimizer = KINDS[kind](model.parameters(), lr=1e-3, **arguments(choice))
    tiny_models.train_step(model, optimizer)
    model.megacompile.synchronize()
    parts = {name: size for name, size in model.megacompile.stats["host_parts"].items() if size}
    tiling = engine.tiling(model)
    assert with_choice(tiling, choice) == tiling
    expected = tiling.host_parts(gradients=not choice.on_arrival)
    assert parts == {name: size for name, size in expected.items() if size}


@pytest.fixture(scope="module", params=[True, False], ids=["on arrival", "clipped"])
def shared(request: pytest.FixtureRequest) -> Any:
    shared: Any = tiny_models.Shared(bf16=True)
    shared.arriving = request.param  # memory that gradients took once stays
    yield shared
    shared.close()


# ---------------------------------------------------------------- what fits

def test_rows_fit_a_budget_or_not_and_smaller_ones_fit_smaller_budgets(
        schedule: Schedule, rows: tuple[StateRow, ...], pytestconfig: pytest.Config) -> None:
    """Budgets between all sizes on demand."""
    sizes = sorted({row.host_bytes for row in rows})
    some = sizes[0] - 1, sizes[len(sizes) // 2]
    for budget in (sizes[0] - 1, *sizes) if pytestconfig.getoption("--nightly") else some:
        text = schedule.outlook(host_memory=budget).text()
        found = re.findall(r"^(?:float32|bfloat16|8bit) .* (fits|does not fit) ", text, re.MULTILINE)
        assert found == ["fits" if row.host_bytes <= budget else "does not fit" for row in rows]
        assert found.count("fits") == sum(row.host_bytes <= budget for row in rows)


@pytest.mark.nightly(
    held_by="tests/model/test_state_table.py::test_rows_fit_a_budget_or_not_and_smaller_ones_fit_smaller_budgets")
def test_a_host_without_room_for_gradients_holds_batches_that_are_updated_on_arrival() -> None:
    """What is said of other batches is of steps with the same updates."""
    tight = least(planned().tiling, EXACT) - 1
    found = planned(update="arrival", host_memory=tight)
    assert found.outlook().largest_batch == planned(update="arrival").outlook().largest_batch > 8
    with pytest.raises(InsufficientMemoryError, match=r"use fewer or shorter sequences \(\d+ x 16 would fit\), or a larger"):
        planned(update="arrival", host_memory=tight, device_memory="560MiB", host_checkpoints=0, batch=4096)


def test_a_table_has_a_line_for_each_row_with_its_options_bytes_and_rate(
        schedule: Schedule, rows: tuple[StateRow, ...]) -> None:
    text = schedule.outlook().text()
    assert re.search(r"^state_dtype +master +update +bytes/parameter +host GiB +tokens/s$", text, re.MULTILINE)
    tokens = schedule.plan.ranks * schedule.plan.batch * schedule.plan.length
    for row in rows:
        name, master = row.choice.format.name, "float32" if row.choice.exact else "bfloat16"
        update = "on arrival" if row.choice.on_arrival else "clipped"
        cells = [name, master, update, f"{row.bytes_each:.3g}", f"{row.host_bytes / 2**30:.1f}", "fits",
                 f"{tokens / row.step_s:,.0f}"]
        assert re.search(rf"^{' +'.join(cells)}$", text, re.MULTILINE), cells


@pytest.mark.nightly(
    held_by="tests/model/test_state_table.py::test_a_table_has_a_line_for_each_row_with_its_options_bytes_and_rate")
@pytest.mark.parametrize("visits", [(), "all"], ids=["on the host", "visiting"])
def test_steps_that_wait_for_updates_are_shorter_with_smaller_state(visits: Any) -> None:
    """For each master and time of update, formats in order of size, on a machine whose host memory limits all of them."""
    slow = replace(Hardware.find("h200"), adam=2e7, adam_formats={"bfloat16": 1.25, "8bit": 1.5}, link={"h2d": 1e9, "d2h": 1e9})
    found = planned(hardware=slow, visiting_state=visits).outlook().states
    steps = [row.step_s for row in found]
    for first in range(0, len(found), len(FORMATS)):
        assert all(b < a for a, b in pairwise(steps[first:first + len(FORMATS)]))
    assert all(exact > alone for exact, alone in zip(steps[:3], steps[3:6], strict=True))


@pytest.mark.nightly(held_by="tests/model/test_state_table.py::test_all_combinations_have_a_row")
def test_a_model_with_parameters_of_several_dtypes_has_rows_with_masters_in_float32() -> None:
    with torch.device("meta"):
        model = tiny_models.build(True, **SIZES)
    model.model.norm.float()
    found = megacompile.schedule(model, batch=8, length=16, hardware="h200").outlook().states
    assert [row.choice for row in found] == [choice for choice in combinations(BF16) if choice.exact]


@pytest.mark.nightly(
    held_by="tests/model/test_state_table.py::test_a_table_has_a_line_for_each_row_with_its_options_bytes_and_rate")
@pytest.mark.parametrize(("arguments", "bytes_each", "smallest"), [
    ((), {"gradients": 2, "remainder": 2, "moments": 8}, 4.03),
    (("--optim", "adamw_8bit", "--optim-args", "master=bfloat16"), {"gradients": 2, "remainder": 0, "moments": 2.03}, 4.03),
    (("--optim", "lion_bf16", "--update", "arrival"), {"gradients": 0, "remainder": 2, "moments": 2}, 3.02)])
def test_the_command_plans_for_a_named_optimizer(arguments: tuple[str, ...], bytes_each: dict[str, float], smallest: float,
                                                 tmp_path: Any) -> None:
    tiny_models.build(True, **SIZES).config.save_pretrained(tmp_path)
    result = CliRunner().invoke(cli.app, ["plan", str(tmp_path), "--dtype", "bfloat16", "--batch", "8", "--length", "16",
                                          "--hardware", "h200", *arguments])
    assert result.exit_code == 0, result.output
    parts = dict(re.findall(r"^(\w+) +[\d.]+ +([\d.]+)$", result.output, re.MULTILINE))
    assert {part: float(parts[part]) for part in bytes_each} == pytest.approx(bytes_each, rel=0.01)  # tiles are padded
    row = re.search(r"^8bit +bfloat16 +on arrival +([\d.]+) ", result.output, re.MULTILINE)
    assert row is not None and float(row[1]) == pytest.approx(smallest, rel=0.01)


# ---------------------------------------------------------------- what a refusal proposes

def least(tiling: Tiling, choice: StateChoice) -> int:
    """Bytes that training with this choice takes at the least."""
    found = with_choice(tiling, choice).host_bytes(gradients=not choice.on_arrival)
    return found + tiling.margin_bytes + tiling.ranks * (choice.on_arrival * slab_bytes(tiling, 1, ()))


@pytest.mark.parametrize("optim", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("bf16", [pytest.param(True, id="bf16"), pytest.param(False, id="fp32", marks=pytest.mark.nightly)])
def test_the_first_choice_that_fits_is_proposed_at_every_size_of_the_host(optim: str, bf16: bool) -> None:
    kept = tiling = planned(bf16, optim=optim).tiling
    choices = by_accuracy(BF16 if bf16 else {torch.float32}, clipped=optim == "muon")
    sizes = [least(tiling, choice) for choice in choices]
    proposed = set()
    for room in sorted({max(0, size + more) for size in sizes for more in (-1, 0)}):
        if room >= sizes[0]:
            check_state(kept, room, on_arrival=False)
            continue
        with pytest.raises(InsufficientMemoryError, match="training with this optimizer takes") as caught:
            check_state(kept, room, on_arrival=False)
        fitting = [choice for choice, size in zip(choices, sizes, strict=True) if size <= room]
        options = re.search(r": with (.*?) it takes .*, and the host's update takes \d\.\d\d times as long; docs/fine-"
                            r"tuning\.md says what that costs in accuracy$", str(caught.value))
        assert (options is None) == (not fitting)
        if options is None:
            assert str(caught.value).endswith(": freeze some layers, train adapters, or use a machine with more memory")
        else:
            each = bytes_each(with_choice(tiling, fitting[0]), fitting[0].on_arrival)
            assert options[1] == fitting[0].options and f" ({each:.3g} bytes each), " in str(caught.value)
            proposed.add(options[1])
    assert len(proposed) >= len(choices) - 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [0.2, 0.5, 0.8])
def test_what_a_refusal_proposes_trains_where_it_was_refused(kind: str, left: float) -> None:
    """Plain steps, whole steps and evaluations, within `left` of what lies between the smallest state and the largest."""
    make, plain, kept = KINDS[kind], tiny_models.build(True), with_state_of(KINDS[kind])
    sizes = [least(kept, choice) for choice in by_accuracy(BF16, clipped=kept.has_matrices)]
    room = int(sizes[-1] + left * (sizes[0] - sizes[-1]))
    model = megacompile.stream(plain, device="cpu", host_memory=room)
    before = tiny_models.weights(model)
    with pytest.raises(InsufficientMemoryError) as caught:
        make(model.parameters(), lr=1e-2)
    assert tiny_models.same_bits(tiny_models.weights(model), before)
    options = re.search(": with (.*?) it takes", str(caught.value))
    assert options is not None
    optimizer = make(model.parameters(), lr=1e-2, **written(options[1]))
    losses = [tiny_models.train_step(model, optimizer, 0) for _ in range(4)]
    model.megacompile.train_step(tiny_models.batch(0), optimizer)
    with torch.no_grad():
        losses.append(float(model.eval()(**tiny_models.batch(0)).loss))
    assert losses[-1] < losses[0]
    stats = model.megacompile.stats
    assert sum(stats["host_parts"].values()) + stats["slab_bytes"] + HOST_MARGIN_BYTES <= room
    model.megacompile.close()


@functools.cache
def with_state_of(make: Any) -> Tiling:
    model = megacompile.stream(tiny_models.build(True), device="cpu")
    make(model.parameters(), lr=1e-2)
    tiling: Tiling = engine.tiling(model)
    model.megacompile.close()
    return tiling


def test_muon_is_not_told_to_update_on_arrival() -> None:
    kept = with_state_of(Muon)
    smallest = least(kept, by_accuracy(BF16, clipped=True)[-1])
    model = megacompile.stream(tiny_models.build(True), device="cpu", host_memory=smallest)
    with pytest.raises(InsufficientMemoryError, match="training with this optimizer takes") as caught:
        Muon(model.parameters(), lr=1e-2)
    options = re.search(": with (.*?) it takes", str(caught.value))
    assert options is not None and written(options[1]) == {"state_dtype": "8bit", "master": "bfloat16"}
    optimizer = Muon(model.parameters(), lr=1e-2, **written(options[1]))
    model.megacompile.train_step(tiny_models.batch(0), optimizer)
    model.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/model/test_state_table.py::test_what_a_refusal_proposes_trains_where_it_was_refused",
    "tests/model/test_state_table.py::test_the_first_choice_that_fits_is_proposed_at_every_size_of_the_host"))
@pytest.mark.parametrize("gib", [22, 40, 95, *(pytest.param(gib, marks=pytest.mark.nightly) for gib in (60, 80))])
def test_what_a_refusal_of_a_schedule_proposes_can_be_planned(gib: int) -> None:
    """A model of the size of Qwen2-7B, whose largest tile is a gigabyte."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                         num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def schedule(**options: Any) -> Schedule:
        return megacompile.schedule(model, batch=8, length=512, hardware="rtx4090", host_memory=f"{gib}GiB",
                                    micro_batch_size=8, checkpoint_interval=1, saved_layers=0, **options)

    with pytest.raises(InsufficientMemoryError, match=r"training Qwen2ForCausalLM takes 100\.30 GiB") as caught:
        schedule()
    options = re.search(": give the optimizer (.*?): then it takes", str(caught.value))
    if gib == 22:
        assert options is None and "train adapters (LoRA) over frozen weights: then it takes" in str(caught.value)
        return
    assert options is not None
    asked = written(options[1])
    overlap = asked.pop("overlap", None)
    found = schedule(optim_args=", ".join(f"{name}={value}" for name, value in asked.items()),
                     update="step" if overlap is None else "arrival")
    assert found.outlook().host_needed <= gib * 2**30
