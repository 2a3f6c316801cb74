"""`megacompile train`: reads the data, streams the model, trains it, and writes checkpoints and reports."""
from __future__ import annotations

import enum
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
from megacompile.corpus import PretrainedTokenizer, Tokenizer
from megacompile.errors import CheckpointError, MegacompileError
from megacompile.exporting import upload
from megacompile.finetuning.driver import RunCallback, RunParts, made_trainer, state_of, train
from megacompile.finetuning.preparation import prepare
from megacompile.finetuning.reports import LOG, Reports, draw_curve, read_log
from megacompile.finetuning.run_progress import WINDOW, ProgressDisplay, RunProgress
from megacompile.finetuning.saves import Saves, created, locked
from megacompile.finetuning.settings import Settings, Task
from megacompile.finetuning.trackers import started
from megacompile.finetuning.training_sequences import Padding, Rows, padded_length
from megacompile.inputs import packed_layout
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import device_of_rank, rank_in_job
from megacompile.planning.precision import check_float8
from megacompile.runtime.backends.cuda import cupy_for_cuda
from megacompile.system.files import replace_file
from megacompile.tools.options import Knobs, Lora
from megacompile.tools.recipe import Recipe
from megacompile.weights.empty_models import put_adapter
from megacompile.weights.saving import recover

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
    longest = padded_length(recipe.length, rows, prepared.held_out) if settings.task is Task.SFT else recipe.length
    model = _open(source, settings, lora, knobs, longest, prepared.tokenizer).train()
    padding = _padding(model, prepared.rows_per_rank, longest, rows, console) if settings.task is Task.SFT else Padding()
    done = prepared.done
    if prepared.start is not None:
        console.print(f"resuming after step {done} from {prepared.start}")
    with ExitStack() as stack:
        stop = stack.enter_context(training.Interruption())
        saves = stack.enter_context(Saves(settings, prepared.fixed, done, console.print))
        trainer = made_trainer(RunParts(settings, prepared, saves, padding), model, lora.config(), console.print)
        trainer.restore()
        model, steps = trainer.model, trainer.args.max_steps
        words = {"model": source, **asdict(settings), **asdict(recipe), **asdict(lora)}
        reports = stack.enter_context(_reports(settings, words, done, console))
        if settings.output is not None and rank_in_job() == 0:  # only now, so that a run that is refused changes no file
            _write_settings(settings.output / SETTINGS, source, data, settings, recipe, lora, knobs)
        display = stack.enter_context(ProgressDisplay(console, steps, settings.log_interval, done))
        progress = RunProgress(steps, recipe.batch, len(rows), _losses(settings, done))
        trainer.add_callback(RunCallback(model, progress, reports, display, lambda: stop.asked, console.print))
        trained = train(trainer)
        rank_group = model.megacompile.streamed.rank_group
        stopped_by = max(rank_group.values("stopping", int(stop.signal or 0))) if trained < steps else 0
        if trained < steps and not stopped_by:
            console.print(f"stopped early after {trained} of {steps} steps")
        failed: CheckpointError | None = None
        try:
            saves.last(trained, state_of(trainer.state))
        except CheckpointError as error:  # for example a full disk; the model may be saved on another one
            failed = error
        if prepared.target is not None and (settings.save or not stopped_by):  # a stopped run is resumed from its checkpoint
            best = trainer.state.best_global_step if settings.load_best_model_at_end else None
            if best is None:
                prepared.save(model)
            what = f" (an adapter for {source})" if lora.lora else ""
            console.print(f"saved in {prepared.target} after {best or trained} steps{what}")
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


def _open(source: str, settings: Settings, lora: Lora, knobs: Knobs, longest: int, tokenizer: Tokenizer) -> Any:
    """The streamed model: from safetensors files if there are any, otherwise from a config (random weights) or pickles. Packed
    rows are made long enough for the `longest` sequence, so that all steps have the same length."""
    path, dtype = Path(source), settings.weights_dtype.resolve()
    adapter = lora.config() if settings.task is Task.SFT else None  # the other trainers add it
    stored = lora.quantize.value if lora.quantize else None
    options = {"repack": max(packed_layout.LENGTH, packed_layout.power_of_two(longest)), **knobs.given()}
    if settings.task is Task.REWARD:
        assert isinstance(tokenizer, PretrainedTokenizer), "answers need one"
        from megacompile.reward import pad_token_of, streamed_classifier  # needs trl
        return streamed_classifier(source, pad_token_of(tokenizer.pretrained), dtype=dtype, quantize=stored, **options)
    if not training.has_weights(path):
        return megacompile.from_config(path, dtype=dtype, **options)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        model = training.load_model(source, dtype=dtype)
        model = model if adapter is None else put_adapter(model, adapter)
        return megacompile.stream(megacompile.quantize(model, stored) if stored else model, **options)
    return megacompile.from_pretrained(source, dtype=dtype, adapter=adapter, quantize=stored, strict=settings.strict,
                                       trainable=adapter is not None or stored is None, **options)


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


def _write_settings(path: Path, source: str, data: Sequence[str], settings: Settings, recipe: Recipe, lora: Lora,
                    knobs: Knobs) -> None:
    """Writes all settings, including defaults, so that `--config` repeats the run even if defaults change later, from any
    working directory: paths are absolute."""
    given = {"model": source, "data": list(data), **asdict(settings), **asdict(recipe), **asdict(lora), **asdict(knobs)}
    for name in ("model", "data", "tokenizer", "output", "save", "disk", "eval_data"):
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
