"""`megacompile train` with TRL's tasks, and what it has from Trainer: evaluation data, early stopping, callbacks, schedules."""
from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
import torch
from safetensors.torch import load_file
from tiny_models import build
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from typer.testing import CliRunner, Result

from megacompile import cli
from megacompile.corpus import load_tokenizer
from megacompile.errors import ArgumentError
from megacompile.finetuning import driver
from megacompile.finetuning.answers import read_answers
from megacompile.finetuning.reports import read_log
from megacompile.finetuning.settings import Settings, Task

trl = pytest.importorskip("trl")

FLAGS = ("--length", 64, "--batch", 4, "--device", "cpu", "--lr", "1e-2", "--decay", "constant", "--warmup", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer.build()
    tokenizer.pad_token = tokenizer.eos_token
    build(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, [{"instruction": f"{a} + {b}", "chosen": str(a + b), "rejected": str(a - b)}
                                      for a in range(4) for b in range(1, 5)])


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, [{"instruction": f"{a} + {b}", "output": str(a + b * good), "label": good}
                                      for a in range(4) for b in range(1, 3) for good in (True, False)])


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, [{"instruction": f"{a} + {b}", "output": str(a + b)} for a in range(5) for b in range(4)])


def written(folders: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> Path:
    path = folders.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def losses(output: Path, name: str = "loss") -> list[float]:
    return [entry[name] for entry in read_log(output / "log.jsonl") if name in entry]


@pytest.mark.parametrize("task", [Task.DPO, Task.KTO, Task.REWARD])
def test_a_task_has_the_losses_of_trl_on_a_plain_model(
        task: Task, model: Path, pairs: Path, verdicts: Path, tmp_path: Path) -> None:
    data = verdicts if task is Task.KTO else pairs
    result = command("train", model, "--task", task, "--data", data, *FLAGS, "--steps", 3, "--seed", 7, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    tokenizer = load_tokenizer(model)
    rows = read_answers(task, [str(data)], tokenizer)
    name = "Reward" if task is Task.REWARD else task.upper()
    settings = getattr(trl, f"{name}Config")(
        str(tmp_path / "native"), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2, warmup_steps=0,
        lr_scheduler_type="constant", max_length=64, seed=7, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        save_strategy="no", disable_tqdm=True)
    torch.manual_seed(7)  # for the head of a reward model, as in the command
    plain = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, pad_token_id=tokenizer.pretrained.pad_token_id) if task is Task.REWARD else (
        AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"))
    native = getattr(trl, f"{name}Trainer")(
        model=plain, args=settings, train_dataset=rows, processing_class=tokenizer.pretrained)
    native.train()
    expected = [entry["loss"] for entry in native.state.log_history if "loss" in entry]
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-3, abs=1e-4) and len(set(expected)) == 3
    kind = AutoModelForSequenceClassification if task is Task.REWARD else AutoModelForCausalLM
    trained = kind.from_pretrained(tmp_path / "model").state_dict()
    for key, value in native.model.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=2e-2, atol=2e-3)


@pytest.mark.usefixtures("ctrl_c_after_two_steps")
def test_a_task_that_is_stopped_goes_on_to_the_bit(model: Path, pairs: Path, tmp_path: Path) -> None:
    arguments = ("train", model, "--task", "dpo", "--data", pairs, *FLAGS, "--lora", "--set", "beta=0.3", "--eval-share", 0.25,
                 "--eval-interval", 1)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert command(*arguments, "--output", stopped).exit_code == cli.EXIT_INTERRUPTED
    assert len(losses(stopped)) == 2
    assert command(*arguments, "--output", whole).exit_code == cli.EXIT_INTERRUPTED
    again = command(*arguments, "--output", stopped, "--resume", "latest")
    assert again.exit_code == 0 and "resuming after step 2" in again.output, again.output
    assert command(*arguments, "--output", whole, "--resume", "latest").exit_code == 0
    assert losses(stopped) == losses(whole) and len(losses(whole)) == 3
    assert losses(stopped, "eval_rewards/accuracies") and (stopped / "model" / "adapter_config.json").exists()
    other = command("train", model, "--data", pairs, *FLAGS, "--output", stopped, "--resume", "latest")
    assert other.exit_code == 1 and "add --task dpo" in other.stderr


def test_rows_that_do_not_fit_are_said_and_none_is_an_error(model: Path, pairs: Path, tmp_path: Path) -> None:
    arguments = ("train", model, "--task", "reward", "--data", pairs, *FLAGS, "--steps", 1)
    refused = command(*arguments, "--length", 8, "--output", tmp_path)
    assert refused.exit_code == 1 and "no row for training fits into --length 8" in refused.stderr


@pytest.mark.parametrize("more", [(), ("--quantize", "nf4")], ids=["weights", "codes"])
def test_an_adapter_of_a_reward_model_is_saved_with_the_head_that_it_was_trained_with(
        more: tuple[str, ...], model: Path, pairs: Path, tmp_path: Path) -> None:
    """The head begins at random: another one would make the adapter useless."""
    result = command("train", model, "--task", "reward", "--data", pairs, *FLAGS, "--lora", *more, "--steps", 2, "--output",
                     tmp_path)
    assert result.exit_code == 0, result.output
    assert any("score" in name for name in load_file(tmp_path / "model" / "adapter_model.safetensors"))


def test_the_best_model_is_saved_and_training_stops_early(model: Path, sums: Path, tmp_path: Path) -> None:
    """A learning rate that destroys the model: each evaluation is worse than the one before it."""
    result = command("train", model, "--data", sums, "--eval-data", sums, *FLAGS, "--lr", 0.3, "--steps", 9, "--eval-interval",
                     1, "--eval-on-start", "--early-stopping-patience", 2, "--load-best-model-at-end", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    evaluated = losses(tmp_path, "eval_loss")[1:]  # early stopping counts from the first step
    best = min(range(len(evaluated)), key=evaluated.__getitem__)
    assert len(evaluated) == best + 3 < 9 and f"stopped early after {best + 3} of 9 steps" in result.output
    assert f"saved in {tmp_path / 'model'} after {best + 1} steps" in result.output
    again = command("evaluate", tmp_path / "model", "--data", sums, "--length", 64, "--device", "cpu")
    assert f"loss {evaluated[best]:.4f}" in again.output, again.output


class Counting(TrainerCallback):  # type: ignore[misc]
    """Counts steps."""

    steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        type(self).steps += 1


def test_a_callback_of_the_user_is_called_and_a_schedule_of_transformers_is_followed(
        model: Path, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(f"from {__name__} import Counting")
    monkeypatch.chdir(tmp_path)
    before = Counting.steps
    result = command("train", model, "--data", sums, *FLAGS[:-4], "--decay", "polynomial", "--warmup", 1, "--steps", 4,
                     "--callback", "mine:Counting", "--set", "lr_scheduler_kwargs={power: 2.0, lr_end: 0.0}", "--output", "run")
    assert result.exit_code == 0 and Counting.steps - before == 4, result.output
    assert losses(tmp_path / "run", "lr") == pytest.approx([0, 1e-2, 1e-2 * (2 / 3) ** 2, 1e-2 * (1 / 3) ** 2])


def test_a_loss_that_is_not_finite_ends_the_run(model: Path, sums: Path, tmp_path: Path) -> None:
    broken = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    broken.save_pretrained(tmp_path / "broken")
    load_tokenizer(model).pretrained.save_pretrained(tmp_path / "broken")
    result = command("train", tmp_path / "broken", "--data", sums, *FLAGS)
    assert result.exit_code == 1 and "nan" in result.stderr, result.output


@pytest.mark.parametrize(("given", "reason"), [
    ("beta", "has no value: write --set NAME=VALUE"), ("learning_rate=1", "give --lr"),
    ("betta=1", "is not a field of DPOConfig: did you mean beta?"), ("beta={", "is not a value: write it as in YAML")])
def test_a_field_that_cannot_be_set_is_refused(given: str, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason.replace("?", r"\?")):
        driver._extra([given], {"beta", "learning_rate"}, trl.DPOConfig)


@pytest.mark.parametrize(("settings", "reason"), [
    (dict(eval_data=["a"], eval_share=0.5), "both say what to evaluate on"),
    (dict(early_stopping_patience=2), "needs evaluations"), (dict(load_best_model_at_end=True), "needs evaluations"),
    (dict(task=Task.DPO, pack=True), "pack=True is for --task sft")])
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        Settings(**settings).check()


@pytest.mark.parametrize("name", ["nowhere:Thing", "json:loads", "json"])
def test_a_callback_that_is_not_one_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"--callback {name} (cannot be imported|is not a subclass)"):
        list(driver._callbacks(Settings(callback=[name])))


def test_a_task_without_trl_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(driver.MegacompileError, match="--task dpo needs trl, which is not installed: pip install trl"):
        driver._classes(Task.DPO)


def test_text_is_not_for_answers(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ArgumentError, match=r"--task dpo learns from rows, but .*a\.txt is text"):
        read_answers(Task.DPO, [str(tmp_path / "a.txt")], load_tokenizer(model))
