"""Trains a run of `megacompile train` with Trainer: every task's trainer, with the checkpoints, the log, the data order and the
stop of a run."""
from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
import yaml
from torch.utils.data import DataLoader
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from megacompile import trainer, training
from megacompile.corpus import PretrainedTokenizer
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.preparation import Preparation
from megacompile.finetuning.reports import Reports
from megacompile.finetuning.run_progress import ProgressDisplay, RunProgress
from megacompile.finetuning.saves import Saves, resume
from megacompile.finetuning.settings import Settings, Task
from megacompile.finetuning.training_sequences import Batch, Padding, Rows, collate, in_order
from megacompile.losses import IGNORED
from megacompile.planning.device import process_count, rank_in_job
from megacompile.streaming.optimizer.names import optimizer_named
from megacompile.system.host_memory import resident_bytes
from megacompile.tools.recipe import Recipe

#: Fields of a trainer's arguments that other options set, with these options.
_SET_ELSEWHERE = {
    "output_dir": "--output", "per_device_train_batch_size": "--batch", "gradient_accumulation_steps": "--batch",
    "max_steps": "--steps", "num_train_epochs": "--epochs", "learning_rate": "--lr", "max_length": "--length",
    "lr_scheduler_type": "--decay", "warmup_steps": "--warmup", "weight_decay": "--weight-decay",
    "max_grad_norm": "--max-grad-norm", "optim": "--optim", "seed": "--seed", "save_steps": "--save-interval",
    "eval_steps": "--eval-interval", "report_to": "--report-to", "push_to_hub": "--push-to-hub",
    "logging_steps": "--log-interval",
    "load_best_model_at_end": "--load-best-model-at-end", "save_total_limit": "--keep"}


@dataclass(frozen=True)
class RunParts:
    """What a trainer of a run needs beside the model and the data. `saves`: the checkpoints; `padding`: of batches of rows."""

    settings: Settings
    prepared: Preparation
    saves: Saves
    padding: Padding


class RunTrainer(trainer.Trainer):
    """A trainer with the optimizer, the schedule and the checkpoints of a run. Inherit from this class first, then from the
    trainer of the task. State: `run`, set before `train`."""

    run: RunParts
    optimizer: Any
    control: Any
    lr_scheduler: Any

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = optimizer_of(self.model, self.run.settings, self.run.prepared.recipe)
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        recipe, new = self.run.prepared.recipe, self.lr_scheduler is None
        if new and recipe.decay.is_ours:
            self.lr_scheduler = training.warmup_then_decay(
                self._streamed_optimizer, num_training_steps, recipe.warmup_steps(num_training_steps), recipe.decay,
                recipe.final_lr)
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if new:
            self._created_lr_scheduler = False  # Trainer would create it again, without what a checkpoint restored
            self.run.saves.begin(self.model, self._streamed_optimizer, schedule)
        return schedule

    def restore(self) -> None:
        """Loads the run's checkpoint, if it has one. Raises `CheckpointError`."""
        prepared = self.run.prepared
        self.create_optimizer_and_scheduler(self.args.max_steps)
        if prepared.start is not None:
            resume(prepared.start, prepared.fixed, self.model, self._streamed_optimizer, self.lr_scheduler)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves the state while training continues."""
        self.run.saves.save(self.state.global_step, state_of(self.state))

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `restore` has loaded the weights."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Does nothing: `restore` has loaded the state."""

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """True for the best evaluation so far, whose model is then saved if the user wants the best."""
        best = super()._determine_best_metric(metrics, trial)
        if best:
            self.state.best_global_step = self.state.global_step
        if best and self.run.settings.load_best_model_at_end and self.run.prepared.target is not None:
            self.run.prepared.save(self.model)
        return best


class RowsTrainer(RunTrainer):
    """`RunTrainer` for sequences that the command has read itself: `run.prepared` has the rows and their order, which does not
    depend on the number of ranks."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches of this rank of all steps, as one epoch of Trainer's."""
        prepared = self.run.prepared
        return DataLoader(range(len(prepared.rows)), batch_sampler=_OwnRows(prepared),  # type: ignore[arg-type]
                          collate_fn=lambda indices: _batch(prepared.rows, indices, self.run.padding))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The mean loss over the predicted labels of the rows held out, in nats per token. Each rank evaluates its share of the
        batches."""
        prepared = self.run.prepared
        batches = in_order(prepared.held_out, prepared.rows_per_rank, self.run.padding)
        own = itertools.islice(batches, rank_in_job(), None, process_count())
        group = self.model.megacompile.streamed.rank_group
        total, count = map(sum, zip(*group.values("evaluating", training.total_loss(self.model, own)), strict=True))
        metrics = {"eval_loss": total / max(1, count)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _OwnRows:
    """A batch sampler: the indices of this rank's rows of each step. A rank without rows gets none."""

    def __init__(self, prepared: Preparation) -> None:
        self._order, self._steps = prepared.order, prepared.steps

    batch_size, drop_last = 1, False  # Accelerate reads both

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        for _, indices in zip(range(self._steps), self._order.batches(), strict=False):
            yield indices[rank_in_job()::process_count()]


def _batch(rows: Rows, indices: Sequence[int], padding: Padding) -> Batch:
    """A batch of these rows. Without any, one of a row that counts for nothing."""
    batch = collate(rows, indices or [0], padding)
    if not indices:
        batch["labels"].fill_(IGNORED)
    return batch


class RunCallback(transformers.TrainerCallback):
    """Logs and shows each step, evaluates the last one, and stops when asked. State: when the step began, its learning rate."""

    def __init__(self, model: Any, progress: RunProgress, reports: Reports, display: ProgressDisplay,
                 asked: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._model, self._progress, self._reports, self._display, self._say = model, progress, reports, display, say
        self._asked, self._parameters = asked, training.parameter_count(model)
        self._begin, self._lr = 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._begin, self._lr = time.perf_counter(), float(given["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if args.eval_strategy != "no" and state.global_step == state.max_steps:
            control.should_evaluate = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **given: Any) -> None:
        values = dict(logs or {})
        if "loss" not in values:
            return
        loss, norm = values.pop("loss"), values.pop("grad_norm", None)
        if not math.isfinite(loss):
            raise MegacompileError(f"the loss of step {state.global_step} is {loss}: lower the learning rate or clip the "
                                   "gradients")
        rate, padding = values.pop("tokens_per_second", 0.0), values.pop("padding_share", 0.0)
        device_bytes, host_bytes = training.memory(self._model)
        step = training.Step(
            state.global_step, loss, self._lr, rate, padding, 6e-12 * self._parameters * rate, device_bytes, host_bytes,
            time.perf_counter() - self._begin, self._model.megacompile.streamed.store.disk_bytes_written, resident_bytes())
        more = {name: value for name, value in values.items() if name not in ("learning_rate", "epoch", "total_flos")}
        entry = dataclasses.replace(self._progress(step), grad_norm=norm, more=more)
        self._reports.step(entry)
        self._display(entry)
        self._display.line(entry)
        group = self._model.megacompile.streamed.rank_group
        if not group.all_agree("continuing", not self._asked()):
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, float] | None = None,
                    **given: Any) -> None:
        values = {name: value for name, value in (metrics or {}).items() if name != "epoch"}
        self._reports.evaluation(state.global_step, **values)
        self._say(f"step {state.global_step}/{state.max_steps}  evaluation loss {values['eval_loss']:.4f}")


def made_trainer(run: RunParts, model: Any, adapter: Any, say: Callable[[str], None]) -> Any:
    """The trainer of a run. `adapter`: a `peft.LoraConfig` or None, which the trainer adds unless the model has it already. A
    trainer that leaves out rows has fewer steps."""
    settings, prepared = run.settings, run.prepared
    kind, config = _classes(settings.task)
    given: dict[str, Any] = {
        "train_dataset": prepared.rows, "eval_dataset": prepared.held_out if len(prepared.held_out) else None}
    if settings.task is not Task.SFT:
        assert isinstance(prepared.tokenizer, PretrainedTokenizer), "answers need one"
        if adapter is not None and settings.task is Task.REWARD:
            adapter.task_type = "SEQ_CLS"  # the random head is trained too, and saved with the adapter
        given |= {"processing_class": prepared.tokenizer.pretrained, "peft_config": adapter}
    arguments = _arguments(config, model, adapter is not None, settings, prepared)
    made: Any = kind(model=model, args=arguments, callbacks=list(_callbacks(settings)), **given)
    made.run = run
    left = _left(prepared.rows, made.train_dataset, "training", prepared.recipe.length, say)
    if len(prepared.held_out):
        _left(prepared.held_out, made.eval_dataset, "evaluation", prepared.recipe.length, say)
    if left < len(prepared.rows) and not settings.steps:
        made.args.max_steps = dataclasses.replace(prepared.order, rows=left).steps
        say(f"{made.args.max_steps:,} steps are left")
    for each in (PrinterCallback, ProgressCallback):
        made.remove_callback(each)
    return made


def _left(given: Any, used: Any, what: str, length: int, say: Callable[[str], None]) -> int:
    """The number of rows that a trainer uses of those that it was given. Warns if they are fewer. Raises `MegacompileError` if
    none is left."""
    if not len(used):
        raise MegacompileError(f"no row for {what} fits into --length {length}: give a larger --length, or other rows")
    if len(used) < len(given):
        say(f"warning: {len(given) - len(used):,} of {len(given):,} rows for {what} do not fit into --length {length}, and are "
            "DROPPED")
    return len(used)


def train(made: Any) -> int:
    """Trains, from the run's checkpoint if it has one, and returns the number of steps done in all."""
    start, state = made.run.prepared.start, made.run.prepared.state
    with tempfile.TemporaryDirectory() as folder:
        if start is not None:  # Trainer reads its state from a folder
            Path(folder, "trainer_state.json").write_text(json.dumps(state))
        made.train(resume_from_checkpoint=None if start is None else folder)
    return int(made.state.global_step)


def _classes(task: Task) -> tuple[type[Any], type[Any]]:
    """The trainer of a task, with what runs add, and the class of its arguments. Raises `MegacompileError` without TRL."""
    if task is Task.SFT:
        return RowsTrainer, transformers.TrainingArguments
    try:
        module = importlib.import_module(f"megacompile.{task}")
        trl = importlib.import_module("trl")
    except ImportError as error:
        raise MegacompileError(f"--task {task} needs trl, which is not installed: pip install trl") from error
    name = "Reward" if task is Task.REWARD else task.upper()
    theirs = getattr(module, f"{name}Trainer")
    return type(f"Run{theirs.__name__}", (RunTrainer, theirs), {}), getattr(trl, f"{name}Config")


def _arguments(kind: type[Any], model: Any, adapted: bool, settings: Settings, prepared: Preparation) -> Any:
    """The arguments of a trainer of this kind. Raises `ArgumentError` for an unknown field in `settings.extra`."""
    recipe, streamed = prepared.recipe, model.megacompile.streamed
    evaluates, ours = len(prepared.held_out) > 0, recipe.decay.is_ours
    known = {each.name for each in dataclasses.fields(kind)}
    values: dict[str, Any] = dict(
        output_dir=str(settings.output or tempfile.gettempdir()), per_device_train_batch_size=prepared.rows_per_rank,
        per_device_eval_batch_size=prepared.rows_per_rank, max_steps=prepared.steps, learning_rate=recipe.lr,
        lr_scheduler_type="constant" if ours else recipe.decay.value,
        warmup_steps=0 if ours else recipe.warmup_steps(prepared.steps), weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm, seed=settings.seed % 2**32, logging_steps=1, logging_nan_inf_filter=False,
        save_strategy="no" if settings.output is None else "steps", save_steps=settings.save_interval,
        eval_strategy="steps" if evaluates else "no", eval_steps=settings.eval_interval,
        eval_on_start=evaluates and settings.eval_on_start and prepared.done == 0,
        metric_for_best_model="loss" if evaluates else None, greater_is_better=False if evaluates else None,
        report_to="none", disable_tqdm=True, use_cpu=streamed.backend.device.type == "cpu",
        bf16=False, dataloader_pin_memory=False, remove_unused_columns=settings.task is not Task.SFT)
    if settings.task is not Task.SFT:  # TRL's default is True
        values["activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"] = False
    if "max_length" in known:
        values["max_length"] = recipe.length
    if "precompute_ref_log_probs" in known:  # needs no second copy of the weights
        values["precompute_ref_log_probs"] = not adapted
    values |= _extra(settings.extra or (), known, kind)
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"--set is refused by {kind.__name__}: correct it\n{error}") from error


def _extra(given: Sequence[str], known: set[str], kind: type[Any]) -> dict[str, Any]:
    """The fields of `--set NAME=VALUE`. Raises `ArgumentError`."""
    values: dict[str, Any] = {}
    for each in given:
        name, sign, text = each.partition("=")
        if not sign:
            raise ArgumentError(f"--set {each} has no value: write --set NAME=VALUE")
        if name in _SET_ELSEWHERE:
            raise ArgumentError(f"--set {name} is an option of its own: give {_SET_ELSEWHERE[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ArgumentError(f"--set {name} is not a field of {kind.__name__}: " + (
                f"did you mean {near[0]}?" if near else "leave it out"))
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ArgumentError(f"--set {each} is not a value: write it as in YAML") from error
    return values


def _callbacks(settings: Settings) -> Iterator[transformers.TrainerCallback]:
    if settings.early_stopping_patience is not None:
        yield _EarlyStopping(settings.early_stopping_patience)
    for name in settings.callback or ():
        module, _, attribute = name.partition(":")
        with _importing_here():
            try:
                found = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError, ValueError) as error:
                raise ArgumentError(f"--callback {name} cannot be imported: give MODULE:CLASS, for a module on Python's path "
                                    f"or in this folder\n{type(error).__name__}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, transformers.TrainerCallback)):
            raise ArgumentError(f"--callback {name} is not a subclass of transformers.TrainerCallback: give one")
        yield found()


class _EarlyStopping(transformers.EarlyStoppingCallback):
    def on_train_begin(self, *_: Any, **given: Any) -> None:
        """Does not warn that the best model is not loaded: it is saved."""


@contextlib.contextmanager
def _importing_here() -> Iterator[None]:
    """A context in which modules of the working directory can be imported."""
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path.remove(os.getcwd())


def state_of(state: Any) -> dict[str, Any]:
    """Trainer's state without its history, which is in the run's log."""
    return {**dataclasses.asdict(state), "log_history": []}


def optimizer_of(model: Any, settings: Settings, recipe: Recipe) -> Any:
    """The optimizer of a run: norms and biases are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for p in trained if p.dim() > 1]},
                                    {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]
    named = optimizer_named(settings.optim)
    known = dict(lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, weight_decay=recipe.weight_decay)
    return named.kind([group for group in groups if group["params"]], **named.arguments(known, settings.optim_args),
                      max_grad_norm=recipe.max_grad_norm or None, update="arrival" if settings.on_arrival else "step")
