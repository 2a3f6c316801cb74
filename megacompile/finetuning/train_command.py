"""`megacompile train`: reads the data, streams the model, trains it, and writes checkpoints and reports."""
from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

import megacompile
from megacompile import training
from megacompile.corpus import PretrainedTokenizer
from megacompile.errors import CheckpointError, MegacompileError
from megacompile.exporting import upload
from megacompile.finetuning.after_step import AfterStep
from megacompile.finetuning.preparation import Preparation, prepare
from megacompile.finetuning.reports import LOG, Reports, draw_curve, read_log
from megacompile.finetuning.run_progress import WINDOW, ProgressDisplay, RunProgress
from megacompile.finetuning.saves import Saves, created, locked, resume
from megacompile.finetuning.settings import Settings
from megacompile.finetuning.trackers import started
from megacompile.finetuning.training_sequences import Batch, Padding, Rows, collate, in_order, padded_length
from megacompile.inputs import packed_layout
from megacompile.losses import IGNORED
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import device_of_rank, process_count, rank_in_job
from megacompile.planning.precision import check_float8
from megacompile.runtime.backends.cuda import cupy_for_cuda
from megacompile.streaming.optimizer.names import optimizer_named
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.system.files import replace_file
from megacompile.tools.options import Knobs, Lora
from megacompile.tools.recipe import Recipe
from megacompile.weights.empty_models import put_adapter
from megacompile.weights.saving import recover, replacing

#: The name of the settings' file in the folder of a run.
SETTINGS = "settings.yaml"


def run(source: str, data: Sequence[str], settings: Settings, lora: Lora, knobs: Knobs, console: Console) -> int:
    """Trains and returns the exit code: 0, or 128 plus the number of the signal that stopped the run. With several ranks, each
    takes its share of the rows of every step, and the first alone prints, and writes what is not a checkpoint.

    Checks as much as possible before it loads weights. Raises `MegacompileError` and its subclasses."""
    settings.check()
    lora.check()
    _check_knobs(knobs)
    with ExitStack() as stack:
        if rank_in_job() > 0:
            console = Console(file=stack.enter_context(open(os.devnull, "w", encoding="utf-8")))
        elif settings.output is not None:
            stack.enter_context(created(settings.output))
            stack.enter_context(locked(settings.output))
            recover(settings.output)
        return _run(source, data, settings, lora.resolved(), knobs, console)


def _run(source: str, data: Sequence[str], settings: Settings, lora: Lora, knobs: Knobs, console: Console) -> int:
    torch.manual_seed(settings.seed)
    prepared = prepare(source, data, settings, lora, console)
    recipe, rows, steps = prepared.recipe, prepared.rows, prepared.steps
    longest = padded_length(recipe.length, rows, prepared.held_out)
    model = _open(source, settings, lora, knobs, longest).train()
    padding = _padding(model, prepared.rows_per_rank, longest, rows, console)
    optimizer = _optimizer(model, settings, recipe)
    schedule = training.warmup_then_decay(optimizer, steps, recipe.warmup_steps(steps), recipe.decay, recipe.final_lr)
    done = 0 if prepared.start is None else resume(prepared.start, prepared.fixed, model, optimizer, schedule)
    if prepared.start is not None:
        console.print(f"resuming after step {done} from {prepared.start}")
    rank_group = model.megacompile.streamed.rank_group
    with ExitStack() as stack:
        stop = stack.enter_context(training.Interruption())
        saves = stack.enter_context(Saves(settings, model, optimizer, schedule, prepared.fixed, done, console.print))
        words = {"model": source, **asdict(settings), **asdict(recipe), **asdict(lora)}
        reports = stack.enter_context(_reports(settings, words, done, console))
        if settings.output is not None and rank_in_job() == 0:  # only now, so that a run that is refused changes no file
            _write_settings(settings.output / SETTINGS, source, data, settings, recipe, lora, knobs)
        display = stack.enter_context(ProgressDisplay(console, steps, settings.log_interval, done))
        progress = RunProgress(steps, recipe.batch, len(rows), _losses(settings, done))
        evaluated = (lambda: _evaluated(model, prepared, padding)) if len(prepared.held_out) else None
        after_step = stack.enter_context(AfterStep(settings, steps, optimizer, progress, reports, display, saves, evaluated,
                                                   console.print))
        if settings.eval_on_start and done == 0:
            after_step.evaluate(0)
        batches = (_of_rank(rows, each, padding) for each in prepared.order.batches(done))
        trained = done + len(training.train(
            model, optimizer, batches, steps, done=done, schedule=schedule, on_step=after_step,
            stop=lambda: not rank_group.all_agree("continuing", not stop.asked)))
        after_step.wait()
        stopped_by = max(rank_group.values("stopping", int(stop.signal or 0))) if trained < steps else 0
        failed: CheckpointError | None = None
        try:
            saves.last(trained)
        except CheckpointError as error:  # for example a full disk; the model may be saved on another one
            failed = error
        if prepared.target is not None and (settings.save or not stopped_by):  # a stopped run is resumed from its checkpoint
            _save(model, prepared)
            what = f" (an adapter for {source})" if lora.lora else ""
            console.print(f"saved in {prepared.target} after {trained} steps{what}")
            if settings.push_to_hub is not None and rank_in_job() == 0:
                console.print(f"uploaded to {upload(prepared.target, settings.push_to_hub)}")
        if failed is not None:
            raise failed
    model.megacompile.close()
    if settings.output is not None and rank_in_job() == 0 and (reason := draw_curve(settings.output)):
        console.print(f"the loss curve was not drawn: {reason}")
    if not stopped_by:
        return 0
    console.print(f"stopped by {training.name_of(stopped_by)} after {trained} of {steps} steps" + (
        "; continue with --resume latest" if settings.output else "" if settings.save else
        "; nothing was saved, since --output was not given"))
    return 128 + stopped_by


def _check_knobs(knobs: Knobs) -> None:
    """Raises what `stream` would raise for these options and this machine's devices, before any data is read."""
    config = StreamConfig.of(**knobs.given())
    device = device_of_rank(config)
    if device.type == "cuda":
        cupy_for_cuda()
    check_float8(config.recipe, device)


@contextmanager
def _reports(settings: Settings, words: Mapping[str, Any], done: int, console: Console) -> Iterator[Reports]:
    """The log, and the trackers that the user chose, which show the run's settings in `words`. The first rank alone writes."""
    first = rank_in_job() == 0
    with started((first and settings.report_to) or (), settings.output, done, _plain(words), console.print) as trackers, \
            Reports(settings.output if first else None, done, trackers, console.print) as reports:
        yield reports


def _losses(settings: Settings, done: int) -> list[float]:
    """The losses of the last steps before a resumed run begins, oldest first, in nats per token."""
    if settings.output is None or rank_in_job() > 0:
        return []
    return [entry["loss"] for entry in read_log(settings.output / LOG) if "loss" in entry and entry["step"] <= done][-WINDOW:]


def _save(model: Any, prepared: Preparation) -> None:
    """Saves the model and its tokenizer in the run's folder for it."""
    assert prepared.target is not None
    model.save_pretrained(prepared.target)
    if isinstance(prepared.tokenizer, PretrainedTokenizer) and rank_in_job() == 0:
        with replacing(prepared.target) as folder:  # all of its files at once
            prepared.tokenizer.pretrained.save_pretrained(folder)


def _of_rank(rows: Rows, indices: Sequence[int], padding: Padding) -> Batch:
    """This rank's share of the rows of a step. A rank without rows gets one that counts for nothing."""
    own = indices[rank_in_job()::process_count()]
    batch = collate(rows, own or indices[:1], padding)
    if not own:
        batch["labels"].fill_(IGNORED)
    return batch


def _evaluated(model: Any, prepared: Preparation, padding: Padding) -> float:
    """The mean loss over the predicted labels of the rows held out, in nats per token. Each rank evaluates its share of the
    batches."""
    all_batches = in_order(prepared.held_out, prepared.rows_per_rank, padding)
    batches = itertools.islice(all_batches, rank_in_job(), None, process_count())
    sums = model.megacompile.streamed.rank_group.values("evaluating", training.total_loss(model, batches))
    total, count = map(sum, zip(*sums, strict=True))
    return total / max(1, count)


def _open(source: str, settings: Settings, lora: Lora, knobs: Knobs, longest: int) -> Any:
    """The streamed model: from safetensors files if there are any, otherwise from a config (random weights) or pickles. Packed
    rows are made long enough for the `longest` sequence, so that all steps have the same length."""
    path, dtype, adapter = Path(source), settings.weights_dtype.resolve(), lora.config()
    stored = lora.quantize.value if lora.quantize else None
    options = {"repack": max(packed_layout.LENGTH, packed_layout.power_of_two(longest)), **knobs.given()}
    if not training.has_weights(path):
        return megacompile.from_config(path, dtype=dtype, **options)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        model = training.load_model(source, dtype=dtype)
        model = model if adapter is None else put_adapter(model, adapter)
        return megacompile.stream(megacompile.quantize(model, stored) if stored else model, **options)
    return megacompile.from_pretrained(source, dtype=dtype, adapter=adapter, quantize=stored, strict=settings.strict, **options)


def _padding(model: Any, batch: int, length: int, rows: Rows, console: Console) -> Padding:
    """The padding of batches. Prints the reason if the model's batches cannot be packed."""
    if rows.begins is None and rows.lengths.unique().numel() == 1:
        return Padding()  # nothing to pack
    repacking = model.megacompile.streamed.captures.repacking
    reason = repacking.refusal(training=True)
    if not reason:
        return Padding()
    console.print(f"rows are padded instead of packed: {reason}")
    repacking.usual = length  # padded batches have these widths already
    return Padding(batch, length, repacking.reads_padding(training=True))


def _optimizer(model: Any, settings: Settings, recipe: Recipe) -> StreamedOptimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for p in trained if p.dim() > 1]},
                                    {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]
    named = optimizer_named(settings.optim)
    known = dict(lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, weight_decay=recipe.weight_decay)
    return named.kind([group for group in groups if group["params"]], **named.arguments(known, settings.optim_args),
                      max_grad_norm=recipe.max_grad_norm or None, overlap="backward" if settings.overlap else None)


def _write_settings(path: Path, source: str, data: Sequence[str], settings: Settings, recipe: Recipe, lora: Lora,
                    knobs: Knobs) -> None:
    """Writes all settings, including defaults, so that `--config` repeats the run even if defaults change later, from any
    working directory: paths are absolute."""
    given = {"model": source, "data": list(data), **asdict(settings), **asdict(recipe), **asdict(lora), **asdict(knobs)}
    for name in ("model", "data", "tokenizer", "output", "save", "disk"):
        value = given[name]
        given[name] = [_absolute(each) for each in value] if isinstance(value, list) else value and _absolute(value)
    for name in ("resume", "per_device_train_batch_size", "gradient_accumulation_steps",  # the last two are in `batch`
                 *(["warmup_ratio"] if recipe.warmup is not None else [])):
        del given[name]
    try:
        replace_file(path, [yaml.safe_dump(_plain(given), sort_keys=False).encode()])
    except OSError as error:
        raise MegacompileError(f"{path} cannot be written ({error.strerror}): give a writable --output") from error


def _absolute(name: str | Path) -> str:
    """The absolute path of what exists, or the name: that of something on the Hub."""
    return os.path.abspath(name) if os.path.exists(name) or isinstance(name, Path) else name


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in types that YAML and trackers accept, without those that are None."""
    def word(value: Any) -> Any:
        return [word(each) for each in value] if isinstance(value, list) else (
            str(value) if isinstance(value, Path | enum.Enum) else value)

    return {name: word(value) for name, value in values.items() if value is not None}
