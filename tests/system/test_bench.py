"""Benchmarks: what a row contains, which rows are measured, what happens to failed rows, and how tables print."""
from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import clocks
import engine
import generation
import measure
import native
import pytest
import rows
import shapes
import step
import table as result_table
import tables
import torch
from table import markdown, measured, plain
from tables import TABLES, Spec, Table
from tiny_models import Shared, same_bits, train_step, weights
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import megacompile
from megacompile.errors import MegacompileError
from megacompile.ir.program import OPS
from megacompile.loading import parameters_on_meta
from megacompile.predict.hardware import Hardware
from megacompile.runtime.operations import OPERATIONS
from megacompile.training import parameter_count
from megacompile.weights.codes import QuantizedLinear

TINY = ["--shape", "tiny", "--batch", "2", "--length", "32", "--steps", "2", "--warm-up", "1", "--device", "cpu"]


def row_of(module: Any, *arguments: str) -> dict[str, Any]:
    given = module.options().parse_args([*TINY, *arguments])
    if module is native:
        return dict(rows.finished(native.measure(given)))
    with step.Models() as models:
        return dict(rows.finished(step.measure(given, models)))


# ---------------------------------------------------------------- rows

@pytest.fixture(scope="module")
def streamed_row() -> dict[str, Any]:
    """Through slabs, with the rates of some machine to predict from."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Hardware, "here", lambda device=None: Hardware.find("h200"))
    found = row_of(step, "--pinned-memory", "384KiB", "--checkpoint-interval", "2", "--layers", "3")
    patch.undo()
    return found


def test_a_row_says_what_ran_how_fast_and_how_busy_its_lanes_were(streamed_row: dict[str, Any]) -> None:
    row = streamed_row
    assert (row["layers"], row["checkpoint_interval"], row["max_grad_norm"]) == (3, 2, 1.0)
    assert row["parameters"] == shapes.parameters("tiny", 3)
    assert len(row["times_s"]) == len(row["losses"]) == len(row["phases_s"]) == 3
    assert row["step_s"] == pytest.approx(sum(row["times_s"][1:]) / 2, abs=1e-4)
    assert row["tflops"] == pytest.approx(6 * row["parameters"] * 64 / row["step_s"] / 1e12, rel=0.01)
    assert row["tflops_with_attention"] > row["tflops"]
    assert set(row["occupancy"]) == {"compute", "h2d", "d2h", "cpu", "pack"}
    assert all(0 < share < 1 for share in row["occupancy"].values())
    assert 0 < row["predicted_step_s"] < 0.1 and row["grad_norm"] > 0
    assert "sm_clock_mhz" not in row, "a CPU has none"
    json.dumps(row)


@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", [
    ["--micro-batch-size", "1"], ["--checkpointing", "--keep", "products"], ["--checkpointing", "--checkpoint-layers", "1"]])
def test_native_rows_train_the_same_model_on_the_same_batches(streamed_row: dict[str, Any], arguments: list[str]) -> None:
    row = row_of(native, "--layers", "3", *arguments)
    assert row["losses"] == pytest.approx(streamed_row["losses"], rel=1e-3)
    assert row["parameters"] == streamed_row["parameters"]
    assert row["step_s"] > 0 and row["tflops"] > 0


@pytest.mark.parametrize("arguments", [
    ["--through", "turns"], *(pytest.param(each, marks=pytest.mark.nightly)
                              for each in ([], ["--through", "streamed"], ["--through", "native"]))], ids=str)
def test_a_row_of_generation_says_how_fast_and_what_the_link_allows(arguments: list[str]) -> None:
    given = generation.options().parse_args([*TINY, "--new-tokens", "4", *arguments])
    row = rows.finished(generation.measure(given))
    assert row["tokens_per_s"] == pytest.approx(2 * 4 / statistics.median(row["times_s"][1:]), rel=0.05)
    assert ("of_link_bound" in row) == ("turns" in arguments) == (row.get("turns") == 4)
    assert 0 < row.get("of_link_bound", 0.5) < 1
    assert row.get("parts") == (None if "native" in arguments else 1)


@pytest.mark.nightly(held_by="tests/system/test_bench.py::test_a_row_of_generation_says_how_fast_and_what_the_link_allows")
def test_a_row_of_generation_beside_natives_is_of_the_same_prompts_and_may_switch_to_training(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "TRAINED_ROWS", 2)  # a step of 64 x 1,024 tokens takes seconds here
    monkeypatch.setattr(generation, "TRAINED_LENGTH", 32)
    given = generation.options().parse_args([*TINY, "--new-tokens", "4", "--beside-native", "--switches", "2", "--overlap"])
    row = rows.finished(generation.measure(given))
    assert len(row["native_times_s"]) == len(row["times_s"]) and len(row["first_tokens_s"]) == 2
    assert row["of_native"] == pytest.approx(row["tokens_per_s"] / row["native_tokens_per_s"], rel=0.05)
    assert row["of_native"] == pytest.approx(statistics.median(row["native_times_s"][1:]) / row["step_s"], rel=0.01)
    with pytest.raises(MegacompileError, match="leave out --through native"):
        generation.measure(generation.options().parse_args([*TINY, "--through", "native", "--beside-native"]))


@pytest.mark.nightly(held_by="tests/system/test_bench.py::test_predicted_bytes_of_the_host_are_those_that_are_allocated")
def test_a_row_names_its_optimizer() -> None:
    row = row_of(step, "--optim", "adamw_8bit", "--optim-args", "weight_decay=0.0", "--layers", "2")
    assert row["host_bytes_per_parameter"] < row_of(step, "--layers", "2")["host_bytes_per_parameter"]


@pytest.mark.nightly(held_by="tests/system/test_bench.py::test_predicted_bytes_of_the_host_are_those_that_are_allocated")
def test_a_loop_may_update_on_arrival() -> None:
    row = row_of(step, "--overlap", "--layers", "2")
    assert (row["overlap"], row["train_step"], row["max_grad_norm"], row["grad_norm"]) == (True, False, None, None)
    assert row["losses"][-1] == pytest.approx(row_of(step, "--no-clipping", "--layers", "2")["losses"][-1], rel=1e-6)
    waiting = row_of(step, "--synchronous-optimizer", "--layers", "2")
    assert waiting["predicted_step_s"] is None and len(waiting["times_s"]) == 3


def test_checkpoints_of_native_rows_are_those_asked_for() -> None:
    model = shapes.random_model("tiny", None, "cpu")
    native.prepare(model, native.options().parse_args([*TINY, "--checkpointing", "--checkpoint-layers", "1", "--compile"]))
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, False, False]
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    with pytest.raises(MegacompileError, match="add --checkpointing"):
        row_of(native, "--keep", "attention")


def test_native_float8_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MegacompileError, match="--float8 needs torchao"):
        row_of(native, "--float8", "tensorwise")


def test_compute_alone_changes_no_weights_and_leaves_the_operations_as_they_were(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer)
    before, operations = weights(model), dict(OPERATIONS)
    with step.compute_alone(engine.of(model)):
        train_step(model, optimizer)
        assert same_bits(weights(model), before)
    assert operations == OPERATIONS
    train_step(model, optimizer)
    assert not same_bits(weights(model), before)
    left_out = {name for name, op in OPS.items() if step.left_out(op)}
    assert left_out >= {"prefetch", "offload", "pack", "accumulate", "clip", "update"}
    assert not left_out & {"forward", "loss", "backward", "reduce", "release"}


def test_compute_alone_makes_no_update_wherever_it_is() -> None:
    shared = Shared(resident="model.layers.0", resident_state="model.layers.0", visiting_state="model.layers.1")
    model = shared.fresh()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer)
    backend = engine.backend(model)
    engine.settle(model)
    with step.compute_alone(engine.of(model)), mock.patch.object(backend, "update") as update:
        train_step(model, optimizer)
        engine.settle(model)
    update.assert_not_called()
    shared.close()


def test_compute_alone_goes_on_from_checkpoints_that_wait_on_the_host() -> None:
    shared = Shared(micro_batch_size=2, host_checkpoints=True)
    model = shared.fresh()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer)
    before = weights(model)
    with step.compute_alone(engine.of(model)):
        train_step(model, optimizer)
        engine.settle(model)  # the update that is left out comes after the step
    assert same_bits(weights(model), before)
    shared.close()


@pytest.mark.nightly(held_by="tests/system/test_bench.py::test_rows_of_one_model_share_a_process_and_no_other_does")
def test_rows_that_differ_in_their_plans_alone_share_a_model() -> None:
    def given(*arguments: str) -> argparse.Namespace:
        return step.options().parse_args([*TINY, "--steps", "1", "--recorded-steps", "0", *arguments])

    call, seen = step.Step.__call__, list[torch.Tensor]()

    def noted(self: step.Step, ids: torch.Tensor) -> float:
        seen.append(ids)
        return call(self, ids)

    with step.Models() as models, mock.patch.object(step.Step, "__call__", noted):
        first = step.measure(given("--layers", "2"), models)
        model = models.model
        second = step.measure(given("--layers", "2", "--batch", "4", "--checkpoint-interval", "2"), models)
        assert models.model is model and (first["checkpoint_interval"], second["checkpoint_interval"]) == (1, 2)
        step.measure(given("--layers", "2"), models)
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2)), "a batch that the model knows"
        with pytest.raises(MegacompileError, match="not tiles"):
            step.measure(given("--layers", "2", "--resident", "nothing"), models)
        assert models.model is None, "a model that a row has failed with serves no other row"
        step.measure(given("--layers", "1"), models)
        assert models.model is not model and len(models.model.model.layers) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("arguments", [
    [], ["--train-step", "--waves", "2"], ["--overlap"], ["--pinned-memory", "1MiB", "--checkpoint-interval", "2"],
    ["--optim", "adamw_8bit", "--optim-args", "master=bfloat16"], ["--optim", "muon_bf16", "--train-step"]], ids=" ".join)
def test_predicted_bytes_of_the_host_are_those_that_are_allocated(arguments: list[str]) -> None:
    given = step.options().parse_args([*TINY, "--batch", "4", "--layers", "3", "--recorded-steps", "0", *arguments])
    with step.Models() as models:
        row = step.measure(given, models)
        needed, predicted = models.model.megacompile.stats["host_bytes"], step.predicted_host_bytes(models.model)
    assert predicted == pytest.approx(needed, rel=0.01)
    assert row["predicted_host_gib"] == round(predicted / 2**30, 2)


def test_options_after_then_start_another_row() -> None:
    assert rows.command_lines(["--batch", "8", "--then", "--overlap"]) == [["--batch", "8"], ["--overlap"]]


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    assert "error" not in rows.finished(dict(losses=[1.0, 2.0]))
    assert rows.finished(dict(losses=[1.0, math.nan]))["error"] == "the loss of step 2 is nan"
    assert rows.finished(dict(losses=[1.0, 2.0], curve=[1.0, 1.0, math.inf, 2.0]))["error"] == "the loss of step 3 is inf"


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_rows_of_other_systems_are_left_out_of_the_plain_table() -> None:
    (own, *_) = [row for row in rows.read(RESULTS / "step.jsonl") if row["system"] == "megacompile" and "error" not in row]
    assert plain([own, dict(system="native"), dict(system="grpo", losses=[])]).splitlines()[2:] == plain([own]).splitlines()[2:]
    assert len(plain([own]).splitlines()) == 3


def test_a_file_without_rows_for_the_plain_table_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                                           ) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py", str(RESULTS / "grpo.jsonl")])
    with pytest.raises(SystemExit):
        result_table.main()
    assert "has no rows of benchmarks/step.py" in capsys.readouterr().err


def test_options_that_only_say_how_to_measure_do_not_make_another_row() -> None:
    def identity(*arguments: str) -> str:
        options = step.options()
        return rows.identity("megacompile", rows.identifying(options, options.parse_args(arguments)), "d")

    assert identity("--steps", "9", "--warm-up", "1", "--append", "f", "--batch", "64") == identity()
    assert len({identity(), identity("--batch", "8"), identity("--train-step"), identity("--layers", "fit")}) == 4


#: Options, and bytes of a parameter in a layer and outside, with 2 for the original.
STATES: dict[str, tuple[list[str], float, float]] = {
    "adamw": ([], 16, 16), "8bit alone on arrival": (
        ["--optim", "adamw_8bit", "--optim-args", "master=bfloat16", "--overlap"], 6 + 2 / 64, 6 + 2 / 64),
    "lion": (["--optim", "lion"], 12, 12), "muon": (["--optim", "muon"], 12, 16)}


@pytest.mark.parametrize("state", STATES)
def test_as_many_layers_are_made_as_the_host_holds_with_the_row_s_optimizer(
        state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, each, outside = STATES[state]
    given = step.options().parse_args(["--shape", "qwen2-14b", "--layers", "fit", *arguments])
    room = 60 * 2**30
    monkeypatch.setattr(shapes, "available_host_bytes", lambda: room)
    fitting, others = rows.layer_count(given), 2 * 152064 * 5120 + 5120
    slabs = 2 * shapes.parameters("qwen2-14b", 1) if given.overlap else 0
    needs = [each * (shapes.parameters("qwen2-14b", n) - others) + outside * others + slabs for n in (fitting, fitting + 1)]
    assert needs[0] <= room - shapes.CUDA_HOST_MARGIN_BYTES < needs[1]
    for size, layers in ((2**40, 48), (2**30, 1)):
        monkeypatch.setattr(shapes, "available_host_bytes", functools.partial(int, size))
        assert rows.layer_count(given) == layers


@pytest.mark.parametrize("stored", [None, "nf4", "int8"])
def test_frozen_weights_count_as_weights_however_they_are_stored(stored: str | None) -> None:
    plain, model = shapes.random_model("tiny", 2, "cpu"), shapes.random_model("tiny", 2, "cpu", lora=4, stored=stored)
    frozen, trained = parameter_count(plain), sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert parameter_count(model) == shapes.active_parameters(model) == frozen + trained
    assert all(torch.isfinite(module.dequantized_weight()).all() for module in model.modules()
               if isinstance(module, QuantizedLinear))
    assert any(isinstance(module, QuantizedLinear) for module in model.modules()) == (stored is not None)


@pytest.mark.nightly(held_by="tests/system/test_bench.py::test_frozen_weights_count_as_weights_however_they_are_stored")
def test_a_row_may_train_adapters_over_weights_in_codes() -> None:
    rows_of = {stored: row_of(step, "--lora", "4", "--layers", "2", *more)
               for stored, more in ((None, ()), ("nf4", ("--quantize", "nf4")))}
    assert rows_of[None]["parameters"] == rows_of["nf4"]["parameters"]
    flops = [row["tflops"] * row["step_s"] for row in rows_of.values()]
    whole = row_of(step, "--layers", "2")
    assert flops[0] == pytest.approx(flops[1], rel=0.02) and 0.5 < flops[0] / (whole["tflops"] * whole["step_s"]) < 0.75
    assert rows_of["nf4"]["host_bytes_per_parameter"] < rows_of[None]["host_bytes_per_parameter"] < 4
    with pytest.raises(MegacompileError, match="--quantize is for frozen weights: add --lora"):
        row_of(step, "--quantize", "nf4")


def test_only_the_experts_that_a_token_is_sent_to_count() -> None:
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(shapes.config("qwen3-moe-30b", 2))
    experts = 2 * 128 * 3 * 2048 * 768
    assert sum(p.numel() for p in model.parameters()) - shapes.active_parameters(model) == experts * 120 // 128


def test_a_window_bounds_what_attention_costs() -> None:
    with parameters_on_meta():
        whole, window = (AutoModelForCausalLM.from_config(shapes.config(shape, 2)) for shape in ("qwen2-7b", "mistral-7b"))
    assert shapes.attention_flops(whole, 1024) == 6 * 2 * 3584 * 1024
    assert shapes.attention_flops(window, 4096) == 6 * 2 * 4096 * 4096
    assert shapes.attention_flops(window, 1 << 20) == pytest.approx(12 * 2 * 4096 * 4096, rel=0.01)


# ---------------------------------------------------------------- clock and power

def test_medians_of_clock_and_power_skip_values_that_are_not_numbers() -> None:
    printed = "1480, 690.5\n1500, [N/A]\n[N/A], 680.5\n1980, 700.5\n15"
    assert clocks.medians(printed) == {"sm_clock_mhz": 1500.0, "power_w": 690.5}
    assert clocks.medians("no devices were found\n") == {}


def test_clock_and_power_are_sampled_while_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho 1480, 690.31\n: > {tmp_path}/sampled\n"
                    "while :; do sleep 0.05; echo 1480, 690.31; done\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    with clocks.sampled("cuda") as found:
        while not (tmp_path / "sampled").exists():
            time.sleep(0.01)
    assert found == {"sm_clock_mhz": 1480.0, "power_w": 690.31}
    asked = (tmp_path / "asked").read_text()
    assert "--query-gpu=clocks.sm,power.draw" in asked and "-i GPU-abc" in asked
    with clocks.sampled("cpu") as found:
        pass
    assert found == {}


# ---------------------------------------------------------------- running a table

FAKE = """
import argparse, json, os, sys, time
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="good")
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--model", default="")
    return parser
MODEL = ("model",)
def row(given):
    open(os.environ["FAKE_LOG"], "a").write(f"{given.mode} {given.size} {os.getpid()}\\n")
    if given.mode == "aborts":
        print("out of luck", file=sys.stderr); os.abort()
    if given.mode == "hangs":
        time.sleep(60)
    row = {"error": "LaneError: broken"} if given.mode in ("fails", "explains") else {"tflops": 1.0 + given.size}
    differing = {k: v for k, v in vars(given).items() if v != options().get_default(k)}
    print("something else"); print(json.dumps({"system": "fake", "options": differing, "device": "d", **row}), flush=True)
    if given.mode == "explains":
        time.sleep(0.5); sys.exit("what went wrong")
if __name__ == "__main__":
    for arguments in " ".join(sys.argv[1:]).split(" --then "):
        row(options().parse_args(arguments.split()))
"""


def fake(mode: str = "good", **options: Any) -> Spec:
    return Spec("fake", dict(options) if mode == "good" else dict(options, mode=mode))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A system whose rows take no time; what of it ran."""
    (tmp_path / "fake_row.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setitem(tables.MODULES, "fake", "fake_row")
    monkeypatch.setattr(measure, "described_machine", lambda: {"device": "d"})
    monkeypatch.delitem(sys.modules, "fake_row", raising=False)
    return lambda: [line.rsplit(" ", 1)[0] for line in processes(tmp_path)]


def processes(folder: Path) -> list[str]:
    """Each row that was measured, with its process."""
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


def test_rows_that_are_in_the_file_are_not_measured_again(tmp_path: Path, log: Callable[[], list[str]]) -> None:
    table, output = Table("t", (fake(size=1), fake(size=2))), tmp_path / "out/rows.jsonl"
    said: list[str] = []
    assert measure.run(table, output, report=said.append) == 0
    assert log() == ["good 1", "good 2"] and "0 of 2" in said[0] and said[1:] == ["fake --size 1: 2.0 TFLOPS",
                                                                                  "fake --size 2: 3.0 TFLOPS"]
    before = output.read_text()
    measure.run(replace(table, rows=(*table.rows, fake(size=3))), output)
    assert log() == ["good 1", "good 2", "good 3"]
    assert output.read_text().startswith(before) and len(rows.read(output)) == 3


def test_a_row_that_fails_is_kept_with_its_error_and_stops_no_other(
        tmp_path: Path, log: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    table, output = Table("t", (fake("fails"), fake("aborts"), fake(size=3))), tmp_path / "rows.jsonl"
    measure.run(table, output)
    failed, aborted, good = rows.read(output)
    assert failed["error"] == "LaneError: broken" and good["tflops"] == 4.0
    assert aborted["error"] == "the process ended with SIGABRT: out of luck"
    assert (aborted["system"], aborted["options"], aborted["device"]) == ("fake", {"mode": "aborts"}, "d")
    assert "out of luck" in capsys.readouterr().err
    measure.run(table, output)
    assert len(log()) == 3, "rows that failed are measured again only if asked"
    measure.run(table, output, retry=True)
    assert log()[3:] == ["fails 0", "aborts 0"]
    assert len(rows.read(output)) == 5 and len(rows.latest(rows.read(output))) == 3


def test_what_the_last_row_of_a_process_fails_of_is_printed(
        tmp_path: Path, log: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    measure.run(Table("t", (fake("explains"),)), tmp_path / "rows.jsonl")
    assert "what went wrong" in capsys.readouterr().err


def test_rows_of_one_model_share_a_process_and_no_other_does(tmp_path: Path, log: Callable[[], list[str]]) -> None:
    table = Table("t", (fake(size=1), fake(size=2, model="b"), fake(size=3), fake("aborts", size=4), fake(size=5)))
    assert measure.run(table, tmp_path / "rows.jsonl") == 0
    measured = [line.split() for line in processes(tmp_path)]
    assert [size for _, size, _ in measured] == ["1", "3", "4", "2", "5"]
    one, three, aborted, other, five = (process for *_, process in measured)
    assert one == three == aborted and len({one, five, other}) == 3
    assert ["error" in row for row in rows.read(tmp_path / "rows.jsonl")] == [False, False, True, False, False]


def test_rows_that_time_did_not_suffice_for_are_missing_yet(
        tmp_path: Path, log: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over while the second row hangs, however long a process takes to begin."""
    table, output = Table("t", (fake(size=1), fake("hangs", size=2), fake(size=3))), tmp_path / "rows.jsonl"
    now, limits = 64.0, list[float]()

    def over(kill: Callable[[], None]) -> None:
        nonlocal now
        end = time.monotonic() + 60
        while log()[-1:] != ["hangs 2"] and time.monotonic() < end:
            time.sleep(0.01)
        now += 100.0
        kill()

    def timer_of(limit_s: float, kill: Callable[[], None]) -> threading.Timer:
        limits.append(limit_s)
        return threading.Timer(0.0, over, (kill,)) if len(limits) == 2 else threading.Timer(60.0, kill)

    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(measure, "threading", SimpleNamespace(Timer=timer_of))
    assert measure.run(table, output, limit_s=0.0) == 3 and log() == [] == limits
    assert measure.run(table, output, limit_s=100.0) == 2 and limits == [100.0, 100.0]
    assert log() == ["good 1", "hangs 2"] and [row["tflops"] for row in rows.read(output)] == [2.0]


def test_a_row_that_hangs_is_given_up(
        tmp_path: Path, log: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROW_LIMIT_S", 0.3)
    assert measure.run(Table("t", (fake("hangs"), fake("hangs", size=1))), tmp_path / "rows.jsonl") == 0
    hung, another = rows.read(tmp_path / "rows.jsonl")
    assert hung["error"].startswith("took more than") and hung["options"] == {"mode": "hangs"}
    assert another["error"].startswith("took more than")


def test_ctrl_c_leaves_whole_rows(tmp_path: Path, log: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "some", Table("t", (fake(size=1), fake(size=2))))
    true = measure.measured

    def stopped(specs: Sequence[Spec], end: float) -> Iterator[rows.Row]:
        yield next(true(specs, end))
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measured", stopped)
    result = CliRunner().invoke(measure.app, ["some", "--output", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 130 and "the finished rows are in" in result.output
    assert [row["tflops"] for row in rows.read(tmp_path / "rows.jsonl")] == [2.0]


def test_a_line_that_is_not_a_row_is_named(tmp_path: Path) -> None:
    for line in ('{"tflops"', '{"instruction": "of something else"}'):
        (tmp_path / "rows.jsonl").write_text(f'{{"device": "d"}}\n{line}\n')
        with pytest.raises(MegacompileError, match=r"line 2 of .*rows\.jsonl is not a row"):
            rows.read(tmp_path / "rows.jsonl")


@pytest.mark.nightly(held_by=(
    "tests/system/test_bench.py::test_rows_that_are_in_the_file_are_not_measured_again",
    "tests/system/test_bench.py::test_native_rows_train_the_same_model_on_the_same_batches",
    "tests/system/test_bench.py::test_a_table_sets_each_row_beside_its_compute_alone_and_the_best_native_row"))
def test_the_command_measures_a_table_and_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, how = dict(batch=2, length=32), dict(steps=1, warm_up=1)
    monkeypatch.setitem(TABLES, "small", Table("Small", (
        Spec("native", dict(size, micro_batch_size=1), how), Spec("megacompile", dict(size, layers=1000)))))
    command = ["small", "--shape", "tiny", "--output", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(measure, "measured", lambda specs, end, true=measure.measured: (
        true(specs, end) if specs[0].system == "native" else iter([dict(error="too deep")])))
    result = CliRunner().invoke(measure.app, command)
    assert result.exit_code == 0, result.output
    row, failed = rows.read(tmp_path / "rows.jsonl")
    assert row["options"] == dict(size, shape="tiny", micro_batch_size=1) and len(row["times_s"]) == 2
    assert row["device"] == rows.machine("cpu")["device"] == failed["device"] and row["commit"] and row["tflops"] > 0
    assert "0 of 2 rows" in result.output and "| native " in result.output
    assert "megacompile --shape tiny --batch 2 --length 32 --layers 1000: too deep" in result.output
    monkeypatch.setattr(measure, "described_machine", lambda: rows.machine("cpu"))
    again = CliRunner().invoke(measure.app, command)
    assert "2 of 2 rows" in again.output and len(rows.read(tmp_path / "rows.jsonl")) == 2
    assert again.output.split("\n", 1)[1] in result.output


@pytest.mark.parametrize(("arguments", "message", "code"), [
    (["nothing"], "unknown table 'nothing': choose one of gates", 2),
    (["gates", "--shape", "huge"], "unknown shape 'huge'", 2)])
def test_what_there_is_not_is_refused_with_what_there_is(arguments: list[str], message: str, code: int) -> None:
    result = CliRunner().invoke(measure.app, arguments)
    assert result.exit_code == code and message in result.output


def test_help_names_every_table() -> None:
    words = set(re.findall(r"\w+", CliRunner().invoke(measure.app, ["--help"]).output))
    assert words >= {*TABLES}


# ---------------------------------------------------------------- tables

@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table_are_options_that_there_are_and_differ(name: str) -> None:
    identities = [spec.identity("d") for spec in TABLES[name].rows]
    assert len(set(identities)) == len(identities) >= 5
    assert TABLES[name].x is None or any(TABLES[name].x in spec.options for spec in TABLES[name].rows)


def test_every_gate_is_measured_clipped_and_not_each_beside_its_compute_alone_and_native() -> None:
    gates = TABLES["gates"].rows
    sizes = {(64, 1024, None): 4, (64, 1024, "24GiB"): 4, (16, 1024, None): 2, (16, 1024, "24GiB"): 2, (8, 1024, None): 2,
             (8, 8192, None): 2}
    ours = [s for s in gates if s.system == "megacompile" and "compute_only" not in s.options]
    for size, ways in sizes.items():
        mine = [s.options for s in ours if tuple(s.options.get(k) for k in ("batch", "length", "device_memory")) == size]
        assert len(mine) == ways and sum("overlap" in o or "no_clipping" in o for o in mine) == ways / 2, size
        assert any(s.system == "native" and (s.options["batch"], s.options["length"]) == size[:2] for s in gates)
    assert all(spec.alone() in gates for spec in ours)


def test_a_shape_given_to_a_table_leaves_rows_that_name_their_own() -> None:
    assert {s.options["shape"] for s in TABLES["batch"].of_shape("tiny").rows} == {"tiny"}
    assert TABLES["large"].of_shape("tiny") == TABLES["large"]


def result_of(spec: Spec, device: str = "d", **results: Any) -> dict[str, Any]:
    sizes = dict(shape="tiny", layers=4, batch=spec.options["batch"], length=1024)
    return dict(system=spec.system, options=spec.identifying(), device=device, **sizes, **results)


OURS, CLIPPED_NOT = (Spec("megacompile", dict(batch=8, **more)) for more in ({}, {"no_clipping": True}))
EAGER, BEST = (Spec("native", dict(batch=8, **more)) for more in ({"checkpointing": True}, {"compile": True}))
TABLE = Table("Some rows", (OURS, OURS.alone(), CLIPPED_NOT, EAGER, BEST))


def test_a_row_is_not_set_beside_other_templates() -> None:
    found = [result_of(OURS, tflops=90.0, saved_layers=4), result_of(OURS.alone(), tflops=100.0, saved_layers=2)]
    assert [m.alone_tflops for m in measured(TABLE, found, "d")] == [None]
    found[1]["saved_layers"] = 4
    assert [m.alone_tflops for m in measured(TABLE, found, "d")] == [100.0]


def test_updates_on_arrival_are_set_beside_their_own_compute_alone_or_that_of_a_plan_like_theirs() -> None:
    arrival = OURS.changed(overlap=True)
    table = Table("Some rows", (arrival, arrival.alone()))
    found = [result_of(arrival, tflops=90.0, saved_layers=4), result_of(OURS.alone(), tflops=100.0, saved_layers=4)]
    assert [m.alone_tflops for m in measured(table, found, "d")] == [100.0], "of clipped steps, under the same plan"
    found.append(result_of(arrival.alone(), tflops=95.0, saved_layers=4))
    assert [m.alone_tflops for m in measured(table, found, "d")] == [95.0], "its own"
    found[0]["saved_layers"] = found[2]["saved_layers"] = 3
    assert [m.alone_tflops for m in measured(table, found, "d")] == [95.0], "other plans do not count"


def test_a_table_sets_each_row_beside_its_compute_alone_and_the_best_native_row() -> None:
    found = [result_of(OURS, tflops=100.0), result_of(OURS, tflops=90.0, step_s=2.0, occupancy={"compute": 0.9, "cpu": 0.25}),
             result_of(OURS.alone(), tflops=100.0), result_of(CLIPPED_NOT, tflops=95.0), result_of(EAGER, tflops=80.0),
             result_of(BEST, tflops=120.0), result_of(OURS, "another", tflops=50.0), dict(device="d", tflops=1.0)]
    lines = measured(TABLE, found, "d")
    assert [(m.row["tflops"], m.alone_tflops, m.native_tflops) for m in lines] == [
        (90.0, 100.0, 120.0), (95.0, 100.0, 120.0), (80.0, None, 120.0), (120.0, None, 120.0)]
    text = markdown(TABLE, found)
    here, there = text.split("Some rows (another)")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in here.splitlines() if line.startswith("|")]
    assert table[0] == ["system", "no clipping", "checkpointing", "compile", "TFLOPS", "of compute alone", "of native",
                        "step, s", "lanes busy"]
    assert table[2:] == [["megacompile", "", "", "", "90", "0.900", "0.750", "2.00", "compute 90%, cpu 25%"],
                         ["megacompile", "yes", "", "", "95", "0.950", "0.792", "", ""],
                         ["native", "", "yes", "", "80", "", "", "", ""], ["native", "", "", "yes", "120", "", "", "", ""]]
    assert there.count("\n| megacompile") == 1


def test_the_last_row_counts_unless_an_earlier_one_has_its_compute_alone() -> None:
    alone, earlier = result_of(OURS.alone(), tflops=100.0, commit="a"), result_of(OURS, tflops=80.0, commit="a")
    found = [alone, earlier, result_of(OURS, tflops=90.0, commit="b")]
    assert [(m.row["tflops"], m.alone_tflops) for m in measured(TABLE, found, "d")] == [(80.0, 100.0)]
    assert [m.row["tflops"] for m in measured(Table("Without", (OURS,)), found, "d")] == [90.0]


def test_a_row_that_failed_is_shown_with_the_reason() -> None:
    text = markdown(TABLE, [result_of(OURS, error="OutOfMemoryError: no"), result_of(BEST, tflops=1.0)])
    assert "| failed" in text and text.endswith("megacompile --batch 8: OutOfMemoryError: no")
    assert markdown(TABLE, []) == "Some rows: no row has been measured"


# ---------------------------------------------------------------- pictures

@pytest.mark.parametrize("table", [TABLE, replace(TABLE, x="batch")], ids=["bars", "curves"])
def test_a_table_is_drawn(table: Table, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result_table.draw(table, [result_of(OURS, tflops=90.0), result_of(BEST, tflops=120.0)], tmp_path / "plots/some.svg")
    assert "<svg" in (tmp_path / "plots/some.svg").read_text()
    with pytest.raises(MegacompileError, match="has been measured: measure some before drawing"):
        result_table.draw(table, [result_of(OURS, error="broken")], tmp_path / "none.svg")


def test_an_option_that_is_zero_is_shown(tmp_path: Path) -> None:
    table = Table("Some rows", (replace(OURS, options=dict(batch=8, saved_layers=0)), OURS))
    found = [result_of(spec, tflops=90.0) for spec in table.rows]
    assert "| 0              | 90 " in markdown(table, found)
    pytest.importorskip("matplotlib")
    result_table.draw(table, found, tmp_path / "zero.svg")
    assert "saved layers 0" in (tmp_path / "zero.svg").read_text()


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
        tmp_path: Path, log: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(TABLES, "some", Table("t", (fake(size=1),)))
    result = CliRunner().invoke(measure.app, ["some", "--plot", str(tmp_path / "x.svg")])
    assert result.exit_code == 1 and "pip install matplotlib" in result.output and log() == []


def test_a_failed_row_is_printed_and_not_appended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(given: argparse.Namespace) -> rows.Row:
        raise RuntimeError("out of memory\nand so on")

    monkeypatch.setattr(sys, "argv", ["step.py", "--batch", "8", "--device", "cpu", "--append", str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit, match="1"):
        rows.main("megacompile", step.options(), measure)
    row = json.loads(capsys.readouterr().out)
    assert row["error"] == "RuntimeError: out of memory" and row["options"] == {"batch": 8}
    assert not (tmp_path / "rows.jsonl").exists()


# ---------------------------------------------------------------- timelines

@pytest.mark.nightly(held_by="tests/system/test_cli.py::test_inspect_writes_a_trace_and_draws_a_picture")
def test_a_row_writes_its_measured_and_simulated_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "here", lambda device=None: Hardware.find("h200"))
    row_of(step, "--timeline", str(tmp_path / "made/step"))
    events = json.loads((tmp_path / "made/step.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"simulated", "measured"}
    assert (tmp_path / "made/step.svg").stat().st_size > 5_000 and (tmp_path / "made/step.png").stat().st_size > 5_000


def test_a_timeline_without_recorded_steps_is_refused() -> None:
    given = step.options().parse_args([*TINY, "--timeline", "step", "--recorded-steps", "0"])
    with pytest.raises(MegacompileError, match="leave out --recorded-steps 0"):
        step.measure(given, step.Models())


@pytest.mark.nightly(held_by="tests/system/test_bench.py::test_a_row_says_what_ran_how_fast_and_how_busy_its_lanes_were")
def test_a_row_of_moments_on_disk_says_what_a_step_reads_and_writes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "here", lambda device=None: Hardware.find("h200"))
    for more, tiles, reads in ((["--train-step", "--disk-state", "all", "--deferred-moments", "no"], 6, 1),
                               (["--disk-state", "model.layers.0", "model.layers.2", "--deferred-moments", "yes"], 2, 2)):
        row = row_of(step, "--disk", str(tmp_path / "state"), *more)
        moved = row["disk_gb_per_step"]
        assert row["disk_tiles"] == tiles and moved == row["predicted_disk_gb_per_step"] and moved["write"] > 0
        assert moved["read"] == pytest.approx(reads * moved["write"], rel=0.02)
        assert row["disk_rates_gb_s"] == {"read": 27.0, "write": 11.0} and row["predicted_disk_s"]["write"] >= 0
    assert "disk_tiles" not in row_of(step)
