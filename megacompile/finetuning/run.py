"""`megacompile train`: data, model, loop, checkpoints and reports, put together."""
from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

import megacompile
from megacompile import schema, training
from megacompile.atomic_files import replace_file
from megacompile.checkpoint import latest_checkpoint
from megacompile.checkpoint.loading import read_extra
from megacompile.corpus import PretrainedTokenizer, load_tokenizer
from megacompile.errors import ArgumentError, CheckpointError, MegacompileError
from megacompile.finetuning.data import check_sources, read
from megacompile.finetuning.folder import check_writable, held, made
from megacompile.finetuning.reports import Reports, draw_curve
from megacompile.finetuning.rows import Order, collate, in_turn, split
from megacompile.finetuning.saves import CHECKPOINTS, Saves
from megacompile.finetuning.settings import Settings
from megacompile.options import Knobs
from megacompile.saving import recover, replacing

#: In the folder of a run, beside checkpoints and reports.
MODEL, SETTINGS = "model", "settings.yaml"
#: What decides the order of the data, and what a checkpoint puts back: a run goes on with what it began with.
FIXED = ("batch", "length", "seed", "lr", "beta1", "beta2", "eps", "weight_decay")
_PROGRESS = schema.record({"done": schema.whole(0, 2**53), "fixed": schema.table(schema.text(), schema.anything)})


def run(source: str, data: Sequence[str], settings: Settings, knobs: Knobs, console: Console) -> int:
    """Trains, and returns the exit code: 0, or 128 and the number of the signal that has stopped it.

    What can be refused is refused before weights are loaded. Raises `MegacompileError` and its children."""
    settings.check()
    with ExitStack() as stack:
        if settings.output is not None:
            stack.enter_context(made(settings.output))
            stack.enter_context(held(settings.output))
            recover(settings.output)
        return _run(source, data, settings, knobs, console)


def _run(source: str, data: Sequence[str], settings: Settings, knobs: Knobs, console: Console) -> int:
    torch.manual_seed(settings.seed)
    target = settings.save or (settings.output / MODEL if settings.output else None)
    if target is None:
        console.print("nothing will be saved: give --output, or --save for the model alone")
    start = _start(settings, console)
    began = None if start is None else _progress(start, read_extra(start))
    check_sources(data, settings.format)
    outline = training.load_model(source, meta=True)
    training.check_length(outline.config, settings.length)
    tokenizer = PretrainedTokenizer(settings.tokenizer) if settings.tokenizer else load_tokenizer(source)
    with console.status("reading the data"):
        found = read(data, tokenizer, settings.format, settings.length, settings.pack, outline.config.vocab_size, console.print)
    rows, held_out = split(found, settings.eval_share, settings.seed)
    order = Order(len(rows), settings.batch, settings.seed, None if settings.steps else settings.epochs)
    steps = settings.steps or order.steps
    console.print(f"{training.parameter_count(outline):,} parameters; {len(rows):,} sequences, {int(rows.lengths.sum()):,} "
                  f"tokens, to train on, and {len(held_out):,} to evaluate on; {steps:,} steps of {settings.batch}")
    if target is not None:
        check_writable(target)  # now: what cannot be saved should not be trained first
    fixed = {name: getattr(settings, name) for name in FIXED} | {"data": rows.fingerprint()}
    if start is not None and began is not None:
        _check_same_run(start, began["fixed"], fixed)
    model = _open(source, settings, knobs).train()
    optimizer = _optimizer(model, settings)
    schedule = training.warmup_then_decay(optimizer, steps, settings.warmup, settings.decay, settings.final_lr)
    done = 0 if start is None else _go_on(start, fixed, model, optimizer, schedule)
    if start is not None:
        console.print(f"goes on after step {done}, from {start}")
    with ExitStack() as stack:
        stop = stack.enter_context(training.Interruption())
        saves = stack.enter_context(Saves(settings, model, optimizer, schedule, fixed, done, console.print))
        reports = stack.enter_context(Reports(settings.output, done, settings.tensorboard, console.print))
        if settings.output is not None:  # what is refused has changed no file
            _write_settings(settings.output / SETTINGS, source, data, settings, knobs)
        display = stack.enter_context(training.ProgressDisplay(console, steps, settings.log_interval, done))

        def on_step(step: training.Step) -> None:
            reports.step(step)
            display(step)
            if len(held_out) and (step.number % settings.eval_interval == 0 or step.number == steps):
                loss = training.evaluate(model, in_turn(held_out, settings.batch, settings.length))
                reports.evaluation(step.number, loss)
                console.print(f"step {step.number}/{steps}  evaluation loss {loss:.4f}")
            saves.after(step.number)

        batches = (collate(rows, each, settings.batch, settings.length) for each in order.batches(done))
        trained = done + len(training.train(model, optimizer, batches, steps, done=done, schedule=schedule, on_step=on_step,
                                            stop=lambda: stop.asked))
        stopped = stop.asked and trained < steps
        failed: CheckpointError | None = None
        try:
            saves.last(trained)
        except CheckpointError as error:  # for want of room, say; the model may go elsewhere
            failed = error
        if target is not None and (settings.save or not stopped):  # what goes on later has its checkpoint
            model.save_pretrained(target)
            if isinstance(tokenizer, PretrainedTokenizer):
                with replacing(target) as folder:  # all of its files at once
                    tokenizer.pretrained.save_pretrained(folder)
            console.print(f"saved in {target} after {trained} steps")
        if failed is not None:
            raise failed
    model.megacompile.close()
    if settings.output is not None and (reason := draw_curve(settings.output)):
        console.print(f"no loss curve was drawn, {reason}")
    if not stopped:
        return 0
    console.print(f"stopped by {stop.name} after {trained} of {steps} steps" + (
        "; --resume latest goes on from there" if settings.output else "" if settings.save else
        "; nothing saved, for want of --output"))
    assert stop.signal is not None, "stopped by nothing"
    return 128 + stop.signal


def _start(settings: Settings, console: Console) -> Path | None:
    """The checkpoint to go on from. Raises `ArgumentError` if there is none, or one that nobody asked for."""
    folder = settings.output / CHECKPOINTS if settings.output else None
    if settings.resume == "latest":
        assert folder is not None, "settings were not checked"
        latest = latest_checkpoint(folder)
        if latest is None:
            console.print(f"there is no checkpoint in {folder} yet: starts from the beginning")
        return latest
    if settings.resume is not None:
        given = Path(settings.resume)
        if not given.is_dir():
            raise ArgumentError(f"there is no folder {given} to go on from: give a checkpoint, a folder of such, or latest")
        return given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given
    if folder is not None and latest_checkpoint(folder) is not None:
        raise ArgumentError(f"{settings.output} has checkpoints of an earlier run: give --resume latest to go on with it, or "
                            "another --output")
    return None


def _open(source: str, settings: Settings, knobs: Knobs) -> Any:
    """The streamed model: from safetensors if there are any, else from a config (random weights) or pickles."""
    path, dtype = Path(source), settings.dtype.resolve()
    if path.is_file() or (path.is_dir() and not any(path.glob("*.safetensors"))):
        return megacompile.stream(training.load_model(source, dtype=dtype), **knobs.given())
    return megacompile.from_pretrained(source, dtype=dtype, **knobs.given())


def _optimizer(model: Any, settings: Settings) -> megacompile.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    return megacompile.AdamW([group for group in groups if group["params"]], lr=settings.lr,
                             betas=(settings.beta1, settings.beta2), eps=settings.eps, weight_decay=settings.weight_decay,
                             max_grad_norm=settings.max_grad_norm or None, overlap="backward" if settings.overlap else None)


def _go_on(start: Path, fixed: Mapping[str, Any], model: Any, optimizer: Any, schedule: Any) -> int:
    """Loads a checkpoint; the steps that were done. Raises `CheckpointError` for one of another run."""
    then = _progress(start, megacompile.load_checkpoint(start, model, optimizer, scheduler=schedule))
    _check_same_run(start, then["fixed"], fixed)
    return int(then["done"])


def _progress(start: Path, extra: Any) -> dict[str, Any]:
    """`done`, the steps that were done; `fixed`, what they were done with. Raises `CheckpointError`."""
    try:
        _PROGRESS(extra, "extra")
    except schema.SchemaError as error:
        raise CheckpointError(f"{start} was not saved by megacompile train, since it does not say how far the data was read "
                              f"({error}): give a checkpoint of a run") from error
    return dict(extra)


def _check_same_run(start: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `CheckpointError`."""
    if changed := [f"{name} ({then.get(name)} then, {value} now)" for name, value in now.items() if then.get(name) != value]:
        raise CheckpointError(f"{start} is of a run that began otherwise: {', '.join(changed)}; go on with what it began with, "
                              "or begin anew with the model that it has saved")


def _write_settings(path: Path, source: str, data: Sequence[str], settings: Settings, knobs: Knobs) -> None:
    """What was asked for, all of it, so that `--config` repeats it."""
    given = {"model": source, "data": list(data), **asdict(settings), **asdict(knobs)}
    del given["resume"]
    words = {name: str(value) if isinstance(value, Path | enum.Enum) else value for name, value in given.items()}
    text = yaml.safe_dump({k: v for k, v in words.items() if v is not None}, sort_keys=False)
    try:
        replace_file(path, [text.encode()])
    except OSError as error:
        raise MegacompileError(f"{path} cannot be written ({error.strerror}): give an --output that can") from error
