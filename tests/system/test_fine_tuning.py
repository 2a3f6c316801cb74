"""`megacompile train` on rows: what is trained, what is written, and how a stopped run continues."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
import torch
import yaml
from killed import killed_at
from killed_runs import kill_runs_at_random_moments
from processes import Process
from safetensors.torch import load_file, save_file
from tiny_models import build
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config
from typer.testing import CliRunner, Result

import megacompile
from megacompile import cli, training
from megacompile.corpus import load_tokenizer
from megacompile.errors import CheckpointError, MegacompileError
from megacompile.finetuning import driver, preparation, saves
from megacompile.finetuning import train_command as runs
from megacompile.finetuning.data import read
from megacompile.finetuning.reports import Reports, draw_curve, read_log
from megacompile.finetuning.run_progress import Entry
from megacompile.finetuning.settings import Settings, TooLong
from megacompile.finetuning.trackers import Tracker, started
from megacompile.finetuning.training_sequences import Order, Rows, collate, in_order, split
from megacompile.inputs import repacking
from megacompile.tools.options import Knobs, Lora
from megacompile.tools.recipe import DEFAULTS, Kind, Recipe

LENGTH, BATCH, STEPS = 64, 4, 6
DRIVE = "drive"  # a folder for optimizer state
FLAGS = ("--length", LENGTH, "--batch", BATCH, "--device", "cpu", "--lr", "1e-2", "--log-interval", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer.build()
    build(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps({"instruction": f"{a} + {b}", "output": str(a + b)}) + "\n"
                            for a in range(5) for b in range(4)))
    return path


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def losses(output: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_log(output / "log.jsonl") if "loss" in entry}


def native(model: Path, rows: Rows, held_out: Rows) -> tuple[list[float], float]:
    """The same training by PyTorch alone: the losses, and that of the held-out rows after it, over each of their labels."""
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").train()
    groups = [{"params": [p for p in plain.parameters() if p.dim() > 1]},
              {"params": [p for p in plain.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    schedule = training.warmup_then_decay(optimizer, STEPS, 2, training.Decay.COSINE)
    found = []
    for _, indices in zip(range(STEPS), Order(len(rows), BATCH, seed=5).batches(), strict=False):
        loss = plain(**collate(rows, indices)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(float(loss.detach()))
    with torch.no_grad():
        return found, float(plain.eval()(**collate(held_out, range(len(held_out)))).loss)


def test_a_run_has_the_losses_of_native_pytorch_and_leaves_all_it_says(
        model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Rows, Rows]] = []

    def kept_split(*arguments: Any) -> tuple[Rows, Rows]:
        kept.append(split(*arguments))
        return kept[0]

    monkeypatch.setattr(preparation, "split", kept_split)
    output = tmp_path / "run"
    result = command("train", model, "--data", data, *FLAGS, "--steps", STEPS, "--warmup", 2, "--weight-decay", 0.1, "--seed",
                     5, "--eval-share", 0.25, "--eval-interval", 4, "--eval-on-start", "--save-interval", 4, "--output", output)
    assert result.exit_code == 0, result.output
    expected, evaluated = native(model, *kept[0])
    assert list(losses(output).values()) == pytest.approx(expected, rel=1e-4)
    evaluations = [(e["step"], e["eval_loss"]) for e in read_log(output / "log.jsonl") if "eval_loss" in e]
    assert [step for step, _ in evaluations] == [0, 4, 6] and evaluations[-1][1] == pytest.approx(evaluated, rel=1e-3)
    assert {path.name for path in output.iterdir()} == {"checkpoints", "log.jsonl", "loss.svg", "model", "settings.yaml"}
    assert [path.name for path in sorted((output / "checkpoints").iterdir())] == ["000001-step-4", "000002-step-6"]
    assert "</svg>" in (output / "loss.svg").read_text()
    for weights, (_, evaluated) in ((model, evaluations[0]), (output / "model", evaluations[-1])):
        with torch.no_grad():
            loss = AutoModelForCausalLM.from_pretrained(weights)(**collate(kept[0][1], range(5))).loss
        assert float(loss) == pytest.approx(evaluated, rel=1e-3)
    assert AutoTokenizer.from_pretrained(output / "model").chat_template == tiny_tokenizer.CHATML


def test_packed_conversations_are_learnt_as_if_they_were_alone(model: Path, data: Path, tmp_path: Path) -> None:
    """Two to a sequence have the loss that they have one by one."""
    result = command("train", model, "--data", data, *FLAGS, "--pack", "--steps", 1, "--batch", 10, "--output", tmp_path)
    assert result.exit_code == 0 and "10 sequences" in result.output, result.output
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    rows = read([str(data)], load_tokenizer(model), None, LENGTH, False, plain.config.vocab_size, print)
    assert losses(tmp_path)[1] == pytest.approx(training.evaluate(plain, in_order(rows, 20)), rel=1e-5)


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Rows of 20 to 60 tokens; of 16, in epochs of four steps."""
    path = tmp_path / "uneven.jsonl"
    path.write_text("".join(json.dumps({"instruction": "7" * (a * 7 % 40), "output": "+1" * (a % 3 + 1)}) + "\n"
                            for a in range(16)))
    return path


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Those of runs, as they are made."""
    found: list[dict[str, torch.Tensor]] = []

    def recorded(*arguments: Any) -> dict[str, torch.Tensor]:
        found.append(collate(*arguments))
        return found[-1]

    monkeypatch.setattr(driver, "collate", recorded)
    return found


@pytest.mark.parametrize("pack", [(), pytest.param(("--pack",), marks=pytest.mark.nightly)], ids=["rows", "packed data"])
def test_uneven_rows_are_packed_and_go_on_to_the_bit_within_an_epoch(
        pack: tuple[str, ...], model: Path, uneven: Path, tmp_path: Path, batches: list[dict[str, torch.Tensor]],
        monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, lay_out = [], repacking.lay_out

    def noted(*arguments: Any) -> Any:
        layout = lay_out(*arguments)
        shapes.append(tuple(layout.source.shape))
        return layout

    monkeypatch.setattr(repacking, "lay_out", noted)
    arguments = ("train", model, "--data", uneven, *FLAGS, *pack, "--decay", "constant", "--eval-share", 0.2)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for output, steps in ((stopped, 2), (stopped, 6), (whole, 6)):
        before = len(shapes)
        result = command(*arguments, "--steps", steps, "--output", output, "--resume", "latest")
        assert result.exit_code == 0, result.output
        assert len(shapes) - before >= steps - (2 if output is stopped and steps == 6 else 0) + 1, "evaluations are packed, too"
    entries = [[{key: entry.get(key) for key in ("step", "loss", "grad_norm", "epoch", "padding_share")}
                for entry in read_log(output / "log.jsonl") if "loss" in entry] for output in (stopped, whole)]
    assert entries[0] == entries[1] and len(entries[0]) == 6 and entries[0][1]["epoch"] % 1
    assert (stopped / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    assert all(length & (length - 1) == 0 for _, length in shapes) and len({*shapes}) <= 4
    assert len({batch["input_ids"].shape[1] for batch in batches}) > 1, "rows are padded to the longest of their step"
    assert all(("position_ids" if pack else "attention_mask") in batch for batch in batches)


@pytest.mark.nightly(held_by=(
    "tests/model/test_repacking.py::test_what_cannot_be_packed_is_computed_with_its_padding",
    "tests/system/test_fine_tuning.py::test_uneven_rows_are_packed_and_go_on_to_the_bit_within_an_epoch"))
def test_rows_that_cannot_be_packed_have_few_widths_which_is_said(
        model: Path, uneven: Path, tmp_path: Path, batches: list[dict[str, torch.Tensor]]) -> None:
    """LongRoPE's frequencies depend on the largest position of a batch."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    config = Phi3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=128, original_max_position_embeddings=16,
        rope_parameters=rope)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    result = command("train", tmp_path / "model", "--data", uneven, *FLAGS, "--steps", 4, "--batch", 3)
    assert result.exit_code == 0, result.output
    assert "rows are padded instead of packed: the model uses a number computed from all positions of a batch" in (
        " ".join(result.output.split()))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    found = re.search(r"step 1/4 .*?loss (\d+\.\d+)", result.output)
    assert found is not None and float(found[1]) == pytest.approx(float(plain(**batches[0]).loss.detach()), abs=1e-4)
    assert {batch["input_ids"].shape[0] for batch in batches} == {3}
    assert all(batch["input_ids"].shape[1] % 8 == 0 for batch in batches)


def test_rows_of_one_length_ask_for_no_packing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take a capture of its own."""
    (tmp_path / "text.txt").write_text("one two three " * 50)
    monkeypatch.setattr(repacking.Repacking, "refusal", None)
    result = command("train", model, "--data", tmp_path / "text.txt", *FLAGS, "--steps", 1)
    assert result.exit_code == 0, result.output


def test_a_run_that_sigterm_stops_goes_on_to_the_bit(model: Path, data: Path, tmp_path: Path) -> None:
    """It is stopped from outside, wherever it is then."""
    arguments = [str(each) for each in ("train", model, "--data", data, *FLAGS, "--decay", "constant", "--warmup", 5)]
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    (tmp_path / "script.py").write_text("from megacompile.cli import app\napp()\n")
    process = Process(tmp_path / "script.py", [*arguments, "--steps", "100000", "--output", str(stopped)], os.environ,
                      tmp_path / "printed")
    while not (stopped / "log.jsonl").exists() or (stopped / "log.jsonl").read_text().count("\n") < 2:
        assert process.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, printed = process.wait(120), (tmp_path / "printed").read_text()
    assert code == 143, printed
    done = max(losses(stopped))
    assert f"stopped by SIGTERM after {done} of 100000 steps; continue with --resume latest" in printed
    assert not (stopped / "model" / "model.safetensors").exists()
    assert megacompile.latest_checkpoint(stopped / "checkpoints") == stopped / "checkpoints" / f"000001-step-{done}"

    refused = command(*arguments, "--steps", done + 4, "--output", stopped)
    assert refused.exit_code == 2 and "has checkpoints of an earlier run: give --resume latest to continue" in refused.stderr
    for changed, reason in ((("--lr", "1e-3"), r"lr \(was 0.01, now 0.001\)"), (("--eval-share", "0.5"), r"data \(was \w+")):
        other = command(*arguments, *changed, "--steps", done + 4, "--output", stopped, "--resume", "latest")
        assert other.exit_code == 1 and re.search(f"is from a run with other settings: {reason}", other.stderr), other.output
    assert command(*arguments, "--steps", done + 4, "--output", stopped, "--resume", "latest").exit_code == 0
    assert command(*arguments, "--steps", done + 4, "--output", whole).exit_code == 0
    assert losses(stopped) == losses(whole) and list(losses(whole)) == list(range(1, done + 5))
    assert (stopped / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()

    again = command(*arguments, "--steps", done + 4, "--output", tmp_path / "again", "--resume", whole)
    assert again.exit_code == 0 and f"resuming after step {done + 4}" in again.output
    assert f"saved in {tmp_path / 'again' / 'model'} after {done + 4} steps" in again.output


@pytest.mark.nightly(held_by="tests/system/test_fine_tuning.py::test_a_run_that_sigterm_stops_goes_on_to_the_bit")
@pytest.mark.parametrize("more", [
    (), ("--optim", "adamw_bf16"), ("--optim", "adamw_8bit"), ("--bf16", "--optim-args", "master=bfloat16"),
    ("--bf16", "--optim", "adamw_8bit", "--optim-args", "master=bfloat16"), ("--bf16", "--optim", "lion_8bit"),
    ("--bf16", "--optim", "muon"), ("--bf16", "--optim", "muon_bf16"), ("--bf16", "--optim", "muon_8bit"),
    ("--bf16", "--optim", "sgd", "--optim-args", "momentum=0.9"),
    ("--bf16", "--optim", "adamw_8bit", "--overlap", "--max-grad-norm", "0"), ("--disk", DRIVE, "--disk-state", "all")],
    ids=" ".join)
def test_runs_killed_at_random_moments_end_like_an_undisturbed_run(
        more: tuple[str, ...], model: Path, data: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Log, settings, checkpoints and model: pytest -k random_moments_end --nightly --kill-moments 100"""
    (tmp_path / DRIVE).mkdir()
    more = tuple(str(tmp_path / each) if each == DRIVE else each for each in more)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        moments = int(pytestconfig.getoption("--kill-moments"))
        print(fresh.submit(kill_runs_at_random_moments, tmp_path, model, data, moments, more).result())


@pytest.mark.usefixtures("ctrl_c_after_two_steps")
def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(model: Path, data: Path, tmp_path: Path) -> None:
    result = command("train", model, "--data", data, *FLAGS, "--output", tmp_path, "--resume", "latest")
    assert result.exit_code == cli.EXIT_INTERRUPTED, result.output
    assert "has no checkpoint yet" in result.output
    assert "stopped by Ctrl-C after 2 of 5 steps; continue with --resume latest" in result.output
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001-step-2"]


def test_ctrl_c_before_the_training_loop_ends_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", interrupted)
    result = command("train", "m", "--data", "d.jsonl")
    assert result.exit_code == cli.EXIT_INTERRUPTED and result.stderr == "megacompile: stopped by Ctrl-C\n"


# ---------------------------------------------------------------- what is asked for
@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command line would run."""
    found: list[Any] = []

    def record(*arguments: Any) -> int:
        found.append(arguments[:5])
        return 0

    monkeypatch.setattr(runs, "run", record)
    return found


def test_flags_win_over_the_file_and_the_file_over_defaults(asked: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: m\ndata: d.jsonl\nlr: 1e-3\nsave-interval: 7\noverlap: true\nmax_grad_norm: 0\n"
                                     "resident_state: [a, b]\nsteps: null\ndecay: linear\n")
    result = command("train", "--config", tmp_path / "a.yaml", "--lr", 2, "--resident-state", "c")
    assert result.exit_code == 0, result.output
    expected = Settings(lr=2.0, save_interval=7, overlap=True, max_grad_norm=0.0, decay=training.Decay.LINEAR)
    assert asked == [("m", ["d.jsonl"], expected, Lora(), Knobs(resident_state=["c"]))]


def test_the_file_of_the_page_is_one_that_runs(asked: list[Any], tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    assert command("train", "--config", tmp_path / "run.yaml").exit_code == 0
    assert asked[0][2].warmup == 100 and asked[0][4] == Knobs(device_memory="24GiB")


def test_the_settings_that_are_written_ask_for_the_same_again(asked: list[Any], tmp_path: Path) -> None:
    settings = Settings(lr=1e-5, output=tmp_path / "run", overlap=True, max_grad_norm=0.0, resume="latest", tokenizer="t")
    knobs = Knobs(resident_state=["none"], device="cpu")
    recipe, lora = Recipe.of(settings, Kind.LORA, 512)[0], Lora(True, lora_targets=["a,b"]).resolved()
    runs._write_settings(tmp_path / "settings.yaml", "m", ["a", "b"], settings, recipe, lora, knobs)
    assert command("train", "--config", tmp_path / "settings.yaml").exit_code == 0
    assert asked[0][:2] == ("m", ["a", "b"]) and asked[0][3:] == (lora, knobs) and asked[0][2].output == settings.output
    assert Recipe.of(asked[0][2], Kind.FULL, None)[0] == recipe, "defaults of another kind"


@pytest.mark.parametrize(("text", "reason"), [
    ("warm_up: 3", "has the unknown key warm_up: did you mean warmup?"), ("x_y: 3", "has the unknown key x_y: remove it"),
    ("steps: [1, 2]", "steps is a list, but takes one value"), ("data: [{a: 1}]", "data must be a number, a word"),
    ("- steps", "does not contain keys and values"), ("a: [", "as YAML: fix its syntax"),
    ("[" * 10_000, "is nested too deeply"), ("{a: " * 10_000, "is nested too deeply"),
    ("steps: 1\nlr: 1\nsteps: 2", "has the key steps twice: remove one"),
    ("save-interval: 1\nsave_interval: 2", "has the key save_interval twice"),
    ("steps: 1.5", "Invalid value for '--steps'"), ("lr: -1", "Invalid value for '--lr'"), ("overlap: 3", "'--overlap'")])
def test_a_file_that_is_not_supported_is_refused(asked: list[Any], tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    result = command("train", "m", "--data", "d", "--config", tmp_path / "a.yaml")
    assert result.exit_code == 2 and reason in result.stderr and not asked, result.output


@pytest.mark.parametrize(("settings", "reason"), [
    ({"resume": "latest"}, "--resume latest needs --output"),
    ({"report_to": [Tracker.TENSORBOARD]}, "--report-to tensorboard needs --output"),
    ({"overlap": True}, "add --max-grad-norm 0"), ({"epochs": 0.0}, "--epochs 0 trains nothing"),
    ({"per_device_train_batch_size": 4096, "gradient_accumulation_steps": 4096}, "sequences that a step may have"),
    ({"beta2": 1.0}, "must be below 1")])
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(MegacompileError, match=reason):
        Settings(**settings).check()


# ---------------------------------------------------------------- reports and saves
def test_a_log_that_goes_on_has_each_step_once_and_tensorboard_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    step = training.Step(1, 2.0, 1e-3, 100.0, 0.25, 0.5, 10, 20, 0.75, disk_bytes_written=30, process_bytes=40)
    with started([Tracker.TENSORBOARD], tmp_path, 0, {}, print) as trackers, Reports(tmp_path, 0, trackers) as reports:
        for number in (1, 2, 3):
            reports.step(Entry(dataclasses.replace(step, number=number), 0.5, 2.5, 9.0, 0.75))
        reports.evaluation(3, eval_loss=1.5)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # cut off by a kill
    with Reports(tmp_path, 2) as reports:
        reports.step(Entry(dataclasses.replace(step, number=3, loss=1.0), 0.5, 2.5, None))
    entries = read_log(tmp_path / "log.jsonl")
    assert [(entry["step"], entry["loss"]) for entry in entries] == [(1, 2.0), (2, 2.0), (3, 1.0)]
    assert entries[0].items() >= {"epoch": 0.5, "mean_loss": 2.5, "grad_norm": 0.75, "seconds_left": 9.0}.items()
    assert entries[0].items() >= {"lr": 1e-3, "tokens_per_second": 100.0, "padding_share": 0.25, "seconds": 0.75}.items()
    assert entries[0].items() >= {"device_bytes": 10, "host_bytes": 20, "process_bytes": 40, "disk_bytes_written": 30}.items()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert [event.value for event in board.Scalars("eval_loss")] == [1.5]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_kill_at_any_file_operation_of_a_start_leaves_the_log_and_the_settings_whole(tmp_path: Path) -> None:
    """The log has what it had, or what the run goes on with; nothing but complete lines, and a note of the user's."""
    log, settings = tmp_path / "log.jsonl", tmp_path / "settings.yaml"
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 10)]
    lines.insert(3, "# learning rate halved here\n")
    first = Settings(output=tmp_path, seed=1)
    rest = Recipe.of(first, Kind.FULL, 512)[0], Lora().resolved(), Knobs()
    runs._write_settings(settings, "m", ["d"], first, *rest)
    before = settings.read_bytes()

    def start() -> None:
        with Reports(tmp_path, 5):
            runs._write_settings(settings, "m", ["d"], dataclasses.replace(first, seed=2), *rest)

    number, found = 0, set()
    while True:
        log.write_text("".join(lines) + '{"step": 10, "lo')
        settings.write_bytes(before)
        if not killed_at(number, start):
            break
        left = log.read_text().splitlines(keepends=True)
        assert left in ([*lines, '{"step": 10, "lo'], lines[:6])
        found.add((len(left), yaml.safe_load(settings.read_text())["seed"]))
        number += 1
    assert found == {(11, 1), (6, 1), (6, 2)} and log.read_text() == "".join(lines[:6])
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "settings.yaml"}, "a start leaves nothing beside"


def test_a_log_that_is_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(MegacompileError, match=r"log.jsonl cannot be written \(it is a FIFO, not a regular file"):
        Reports(tmp_path, 3)
    if importlib.util.find_spec("matplotlib"):
        assert draw_curve(tmp_path) == f"{tmp_path / 'log.jsonl'} cannot be read (it is a FIFO, not a regular file)"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_log_on_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    heard: list[str] = []
    with Reports(tmp_path, 0, say=heard.append) as reports:
        reports._log = open("/dev/full", "w", buffering=1)  # noqa: SIM115
        reports.evaluation(1, eval_loss=1.5)
        reports.evaluation(2, eval_loss=1.5)
    assert heard == ["/dev/full cannot be written after step 1 (No space left on device): training continues without it"]


class Disk:
    """A checkpoint writer whose saves fail when they are waited for, as often as it is told."""

    def __init__(self, failures: int) -> None:
        self.failures, self.begun, self.saved = failures, None, []

    def save(self, extra: Any) -> None:
        self.wait()
        self.begun = extra["done"]

    def wait(self) -> None:
        begun, self.begun = self.begun, None
        if begun is not None and self.failures:
            self.failures -= 1
            raise CheckpointError("the disk is full")
        if begun is not None:
            self.saved.append(begun)

    close = wait


@pytest.mark.parametrize(("failures", "saved", "said"), [(0, [2, 4], 0), (1, [4], 1), (2, None, 1)])
def test_a_save_that_fails_is_said_and_only_the_last_ends_the_run(
        failures: int, saved: list[int] | None, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, heard = Disk(failures), []
    monkeypatch.setattr(saves, "CheckpointWriter", lambda *arguments, **options: disk)
    found = saves.Saves(Settings(output=tmp_path), {}, 0, heard.append)
    found.begin(None, None, None)
    for step in (2, 4):
        found.save(step, {})
    if saved is None:
        with pytest.raises(CheckpointError, match="the disk is full"):
            found.last(4, {})
    else:
        found.last(4, {})
        assert disk.saved == saved
    assert heard == ["the disk is full"] * said


def test_the_model_is_saved_though_its_last_checkpoint_cannot_be(
        model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "CheckpointWriter", lambda *arguments, **options: Disk(2))
    result = command("train", model, "--data", data, *FLAGS, "--steps", 2, "--save-interval", 1, "--output", tmp_path / "run",
                     "--save", tmp_path / "elsewhere")
    assert result.exit_code == 1 and "the disk is full" in result.stderr
    assert (tmp_path / "elsewhere" / "model.safetensors").exists()


def test_a_folder_belongs_to_one_run_at_a_time(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("train", model, "--data", data, *FLAGS, "--steps", 1, "--output", tmp_path)
    with saves.locked(tmp_path):
        result = command(*arguments)
    assert result.exit_code == 2 and "another run is writing to" in result.stderr
    assert list(tmp_path.iterdir()) == [], "the other run's files were touched"
    assert command(*arguments).exit_code == 0


@pytest.mark.parametrize("wrong", [("nothere",), ("--tokenizer", "/nope")], ids=["model", "tokenizer"])
def test_what_is_refused_leaves_no_folder_of_a_model(model: Path, data: Path, tmp_path: Path, wrong: tuple[str, ...]) -> None:
    given = wrong if len(wrong) == 1 else (model, *wrong)
    result = command("train", *given, "--data", data, "--steps", 1, "--length", 16, "--output", tmp_path / "run")
    assert result.exit_code == 2 and "was not found" in result.stderr and not (tmp_path / "run/model").exists(), result.output


@pytest.mark.parametrize(("more", "said"), [
    (("--device", "tpu"), "device must be 'cpu' or 'cuda'"), (("--precision", "fp8"), "precision must be"),
    (("--device", "cpu", "--precision", "float8"), "a CPU cannot multiply in float8"),
    (("--device", "cuda"), "torch finds no CUDA device")])
def test_options_that_this_machine_cannot_train_with_are_refused_before_anything_is_read(
        more: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command("train", "absent", "--data", "absent", "--output", tmp_path / "run", *more)
    assert result.exit_code and said in result.stderr and "absent" not in result.stderr and not (tmp_path / "run").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_resume_that_is_refused_changes_no_file(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("train", model, "--data", data, *FLAGS, "--steps", 4)
    output, other = tmp_path / "run", tmp_path / "new" / "run"
    assert command(*arguments, "--output", output).exit_code == 0
    before = contents(output)
    for where, resume in ((output, "latest"), (other, output), (other, output / "nowhere")):
        refused = command(*arguments, "--lr", "1e-3", "--output", where, "--resume", resume)
        assert refused.exit_code in (1, 2) and "step 5" not in refused.output
    (shard,) = (output / "checkpoints").glob("*/tensors-00001.safetensors")
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    refused = command(*arguments, "--steps", 5, "--epochs", 9, "--output", output, "--resume", "latest")
    assert refused.exit_code == 1 and "is damaged: its checksum" in refused.stderr
    shard.write_bytes(before[shard.relative_to(output).as_posix()])
    assert contents(output) == before and not other.parent.exists()


def test_a_run_whose_chat_template_prints_the_time_goes_on_at_another_time_to_the_bit(
        model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, today = tmp_path / "model", [5]
    shutil.copytree(model, timed)
    told = ("{{ '<|im_start|>system\n' + strftime_now('%d ') + strftime_now( \"%H:%M\" ) + '<|im_end|>\n' }}"
            + tiny_tokenizer.CHATML)
    tokenizer = AutoTokenizer.from_pretrained(timed)
    tokenizer.chat_template = told
    tokenizer.save_pretrained(timed)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Clock:
            return cls(2025, 1, today[0], 3, 4, 5)

    for module in ("megacompile.finetuning.saves", "transformers.utils.chat_template_utils"):
        monkeypatch.setattr(f"{module}.datetime", Clock, raising=False)
    arguments = ("train", timed, "--data", data, *FLAGS, "--decay", "constant", "--warmup", 0)
    for output, steps, day in (("stopped", 1, 5), ("stopped", 2, 6), ("whole", 2, 5)):
        today[0] = day
        result = command(*arguments, "--steps", steps, "--output", tmp_path / output, "--resume", "latest")
        assert result.exit_code == 0, result.output
    assert len(losses(tmp_path / "stopped")) == 2 and losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert AutoTokenizer.from_pretrained(tmp_path / "stopped" / "model").chat_template == told


@pytest.mark.nightly(held_by=("tests/model/test_loading.py::test_everything_that_does_not_match_is_listed",
                              "tests/model/test_loading.py::test_without_strict_what_is_missing_starts_as_in_a_new_model"))
def test_a_checkpoint_with_more_tensors_is_refused_with_an_option_that_trains_and_evaluates_it_as_if_without(
        model: Path, data: Path, tmp_path: Path) -> None:
    """Older versions of transformers stored buffers that newer ones do not have."""
    more = tmp_path / "more"
    shutil.copytree(model, more)
    tensors = load_file(more / "model.safetensors") | {"model.layers.0.self_attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, more / "model.safetensors", {"format": "pt"})
    told = {"train": ("--steps", 2, *FLAGS), "evaluate": ("--length", LENGTH, "--device", "cpu")}
    for name, options in told.items():
        refused = command(name, more, "--data", data, *options)
        assert refused.exit_code == 1, refused.output
        assert "(1 are not used): give the checkpoint that belongs to it, or --no-strict to leave those out" in refused.stderr
    with pytest.warns(UserWarning, match=r"masked_bias is stored, and the model does not have it"):
        assert command("train", more, "--data", data, *told["train"], "--no-strict", "--output", tmp_path / "a").exit_code == 0
    assert command("train", model, "--data", data, *told["train"], "--output", tmp_path / "b").exit_code == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    with pytest.warns(UserWarning, match="masked_bias"):
        found = command("evaluate", more, "--data", data, *told["evaluate"], "--no-strict").stdout
    assert found.split(" (")[0] == command("evaluate", model, "--data", data, *told["evaluate"]).stdout.split(" (")[0] != ""


def test_a_run_goes_on_from_another_working_directory(
        model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the settings that it has written, with what it was given by relative paths."""
    here, other = tmp_path / "here", tmp_path / "other"
    other.mkdir()
    shutil.copytree(model, here / "base")
    shutil.copy(data, here / "rows.jsonl")
    monkeypatch.chdir(here)
    given = ("base", "--data", "rows.jsonl", "--tokenizer", "base", "--output", "runs/one", "--save", "saved")
    assert command("train", *given, *FLAGS, "--steps", 2).exit_code == 0
    monkeypatch.chdir(other)
    result = command("train", "--config", here / "runs" / "one" / "settings.yaml", "--steps", 4, "--resume", "latest")
    assert result.exit_code == 0 and "resuming after step 2" in result.output, result.output
    assert list(losses(here / "runs" / "one")) == [1, 2, 3, 4] and not list(other.iterdir())


@pytest.mark.nightly(held_by="tests/system/test_cli.py::test_where_nothing_can_be_saved_nothing_is_trained")
def test_a_run_that_saves_nothing_says_so_before_it_trains(model: Path, data: Path) -> None:
    result = command("train", model, "--data", data, *FLAGS, "--steps", 1)
    said, trained = (result.output.index(words) for words in ("nothing will be saved: give --output", "step 1/1"))
    assert result.exit_code == 0 and said < trained


def test_a_trained_model_is_uploaded_to_the_repository_that_the_user_names(
        model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[tuple[Path, str]] = []
    monkeypatch.setattr(runs, "upload", lambda folder, name: uploaded.append((folder, name)) or f"https://hub/{name}")
    words = ("--steps", 1, "--output", tmp_path / "run", "--push-to-hub", "me/it")
    result = command("train", model, "--data", data, *FLAGS, *words)
    assert result.exit_code == 0 and "uploaded to https://hub/me/it" in result.output
    assert uploaded == [(tmp_path / "run/model", "me/it")] and (tmp_path / "run/model/config.json").exists()
    for words, remedy in ((("--push-to-hub", "true", "--output", tmp_path / "b"), "--push-to-hub true is not a repository"),
                          (("--hub-model-id", "me/it"), "uploads the saved model: give --output, or --save")):
        refused = command("train", model, "--data", data, *FLAGS, *words)
        assert refused.exit_code == 2 and remedy in refused.stderr and len(uploaded) == 1


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for extra in ({"batch": 3}, {"done": -5, "fixed": {}}, {"done": 2.5, "fixed": {}}, {"done": 3, "fixed": None}, None):
        monkeypatch.setattr(megacompile, "load_checkpoint", lambda *arguments, found=extra, **options: found)
        with pytest.raises(CheckpointError, match="was not saved by megacompile train"):
            saves.resume(tmp_path, {}, None, None, None)


def test_the_settings_of_a_run_are_yaml_that_people_can_read(tmp_path: Path) -> None:
    runs._write_settings(tmp_path / "a.yaml", "m", ["d"], Settings(output=tmp_path), Recipe(), Lora(), Knobs())
    assert yaml.safe_load((tmp_path / "a.yaml").read_text()).items() >= {"model": "m", "data": ["d"], "decay": "cosine"}.items()


# ---------------------------------------------------------------- defaults, names and adapters
def test_defaults_differ_by_kind_of_run_and_stay_within_the_model_s_positions() -> None:
    found = {kind: Recipe.of(Settings(batch=3), kind, 1024) for kind in Kind}
    assert 1e-5 <= found[Kind.FULL][0].lr <= 2e-5 and 1e-4 <= found[Kind.LORA][0].lr <= 2e-4 < found[Kind.SCRATCH][0].lr
    for recipe, asked in found.values():
        assert recipe.warmup_steps(1000) == 30 and recipe.length == 1024 and recipe.batch == 3 and asked == {"batch"}
    assert all(recipe.length >= 2048 for recipe in DEFAULTS.values())


def test_names_from_elsewhere_mean_what_they_mean_there(asked: list[Any], tmp_path: Path) -> None:
    words = ("--learning_rate", 2e-5, "--max-seq-length", 128, "--output_dir", tmp_path, "--num-train-epochs", 2, "--packing",
             "--bf16", "--per-device-train-batch-size", 2, "--gradient-accumulation-steps", 8, "--warmup-ratio", 0.1, "--lora",
             "--lora-r", 4, "--lora-target-modules", "q_proj,v_proj")
    assert command("train", "m", "--data", "d", *words).exit_code == 0
    (tmp_path / "a.yaml").write_text("model: m\ndata: d\nlearning_rate: 2e-5\nmax_seq_length: 128\noutput_dir: " f"{tmp_path}\n"
                                     "num_train_epochs: 2\npacking: true\nbf16: true\nper_device_train_batch_size: 2\n"
                                     "gradient_accumulation_steps: 8\nwarmup_ratio: 0.1\nlora_r: 4\nlora: true\n"
                                     "lora_target_modules: 'q_proj,v_proj'\n")
    assert command("train", "--config", tmp_path / "a.yaml").exit_code == 0
    assert asked[0] == asked[1]
    settings, lora = asked[0][2:4]
    recipe, _ = Recipe.of(settings, Kind.LORA, None)
    assert (recipe.lr, recipe.length, recipe.epochs, recipe.batch, recipe.warmup_ratio) == (2e-5, 128, 2, 16, 0.1)
    assert settings.pack and settings.weights_dtype == "bfloat16" and (lora.rank, lora.targets) == (4, ("q_proj", "v_proj"))


@pytest.mark.parametrize(("option", "remedy"), [
    ("load_in_4bit", "give --lora"), ("fp16", "give --bf16"), ("deepspeed", "leave it out"), ("fsdp", "leave it out"),
    ("gradient_checkpointing", "--checkpoint-interval"), ("num_gpus", "give --gpus N"),
    ("model_name_or_path", "megacompile train MODEL")])
def test_an_option_of_other_trainers_is_refused_with_what_to_use(
        asked: list[Any], tmp_path: Path, option: str, remedy: str) -> None:
    (tmp_path / "a.yaml").write_text(f"model: m\ndata: d\n{option}: true\n")
    for words in ((f"--{option}",), ("--" + option.replace("_", "-") + "=1",), ("--config", tmp_path / "a.yaml")):
        result = command("train", "m", "--data", "d", *words)
        assert result.exit_code == 2 and remedy in result.stderr and len(result.stderr.splitlines()) == 1 and not asked


def test_another_command_does_not_advise_options_of_train() -> None:
    result = command("chat", "m", "--load-in-4bit")
    assert result.exit_code == 2 and "No such option: --load-in-4bit" in result.stderr and "--lora" not in result.stderr


@pytest.mark.parametrize(("settings", "reason"), [
    (Settings(batch=4, gradient_accumulation_steps=2), "give either --batch or these two"),
    (Settings(gradient_accumulation_steps=2), "give both, or their product"),
    (Settings(warmup=3, warmup_ratio=0.1), "give one of them"), (Lora(lora_rank=3), "--lora-rank needs --lora")])
def test_options_that_say_two_things_are_refused(settings: Settings | Lora, reason: str) -> None:
    with pytest.raises(MegacompileError, match=reason):
        settings.check()


def test_a_tracker_that_is_not_installed_is_one_sentence_before_training(
        model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megacompile.finetuning import trackers
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    result = command("train", model, "--data", data, *FLAGS, "--report-to", "wandb")
    assert result.exit_code == 1 and result.stderr == (
        "megacompile: --report-to wandb needs wandb, which is not installed: pip install wandb\n")


@pytest.mark.parametrize(("too_long", "lengths", "said"), [
    (TooLong.TRUNCATE, 2, "TRUNCATED"), (TooLong.DROP, 1, "DROPPED")])
def test_conversations_that_are_too_long_are_counted_and_said(
        model: Path, tmp_path: Path, too_long: TooLong, lengths: int, said: str) -> None:
    rows = [("a", "b"), ("a", "b" * 50), ("a" * 90, "b")]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"instruction": a, "output": b}) + "\n" for a, b in rows))
    heard: list[str] = []
    found = read([str(tmp_path / "d.jsonl")], load_tokenizer(model), None, LENGTH, False, 1000, heard.append, too_long)
    assert len(found) == lengths and int(found.lengths.max()) <= LENGTH and bool(found.learning().all())
    assert len(heard) == 1 and heard[0].startswith("warning: 2 of 3 conversations (66.7%)") and said in heard[0]


@pytest.mark.usefixtures("ctrl_c_after_two_steps")
def test_an_adapter_that_is_stopped_goes_on_to_the_bit_and_is_saved_as_peft_s(
        model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    tokenizer = AutoTokenizer.from_pretrained(model)
    model = tmp_path / "small"
    build(num_hidden_layers=1, vocab_size=len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    arguments = ("train", model, "--data", data, *FLAGS, "--lora", "--lora-rank", 2, "--steps", 4)
    stopped = command(*arguments, "--output", tmp_path / "stopped")
    assert stopped.exit_code == cli.EXIT_INTERRUPTED, stopped.output
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = command(*arguments, "--output", tmp_path / "stopped", "--resume", "latest")
    whole = command(*arguments, "--output", tmp_path / "whole")
    assert again.exit_code == whole.exit_code == 0, again.output + whole.output
    assert "LoRA of" in whole.output and "rank 2, alpha 4, on all-linear" in whole.output
    entries = [[{key: entry.get(key) for key in ("step", "loss", "mean_loss", "grad_norm", "epoch", "lr")}
                for entry in read_log(tmp_path / name / "log.jsonl")] for name in ("stopped", "whole")]
    assert entries[0] == entries[1] and len(entries[0]) == 4 and all(entry["grad_norm"] for entry in entries[0])
    saved = [(tmp_path / name / "model" / "adapter_model.safetensors").read_bytes() for name in ("stopped", "whole")]
    assert saved[0] == saved[1]
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "whole" / "model")
    assert any(float(p.detach().abs().max()) > 0 for name, p in adapted.named_parameters() if "lora_B" in name)


def test_an_adapter_of_experts_is_trained_by_the_command_and_merged_has_the_same_texts(
        model: Path, data: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import Qwen3MoeConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    mixture = tmp_path / "mixture"
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(mixture)
    tokenizer.save_pretrained(mixture)
    parameters = "experts.gate_up_proj,experts.down_proj"
    done = command("train", mixture, "--data", data, *FLAGS, "--lora", "--lora-rank", 2, "--lora-targets", "q_proj",
                   "--lora-parameters", parameters, "--steps", 3, "--output", tmp_path / "run")
    assert done.exit_code == 0 and f"rank 2, alpha 4, on q_proj {parameters.replace(',', ' ')}" in done.output, done.output
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(mixture), tmp_path / "run" / "model")
    trained = {name for name, p in adapted.named_parameters() if "lora_B" in name and float(p.detach().abs().max()) > 0}
    assert len([name for name in trained if "experts" in name]) == 2 and len(trained) == 3
    prompt = tokenizer("1 + 2", return_tensors="pt")
    how = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = adapted.generate(**prompt, **how)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").generate(**prompt, **how), expected)


@pytest.mark.nightly(
    held_by="tests/system/test_fine_tuning.py::test_an_adapter_that_is_stopped_goes_on_to_the_bit_and_is_saved_as_peft_s")
def test_an_adapter_over_quantized_weights_resumes_to_the_bit(model: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("train", model, "--data", data, *FLAGS, "--lora", "--lora-rank", 2, "--decay", "constant",
                 "--save-interval", 2)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    done = command(*arguments, "--output", stopped, "--quantize", "nf4", "--steps", 2)
    assert done.exit_code == 0 and "rank 2, alpha 4, on all-linear, frozen weights in nf4" in done.output, done.output
    other = command(*arguments, "--output", stopped, "--quantize", "int8", "--steps", 4, "--resume", "latest")
    assert other.exit_code != 0 and "is from a run with other settings: lora (was rank 2" in other.output, other.output
    again = command(*arguments, "--output", stopped, "--quantize", "nf4", "--steps", 4, "--resume", "latest")
    assert again.exit_code == 0 and "resuming after step 2" in again.output, again.output
    assert command(*arguments, "--output", whole, "--quantize", "nf4", "--steps", 4).exit_code == 0
    assert losses(stopped) == losses(whole) and list(losses(whole)) == [1, 2, 3, 4]
    first, second = ((output / "model" / "adapter_model.safetensors").read_bytes() for output in (stopped, whole))
    assert first == second
    refused = command("train", model, "--data", data, *FLAGS, "--quantize", "nf4")
    assert "--quantize needs --lora: give both, or neither" in refused.output
