"""`megacompile train`: reads the data, streams the model, trains it, and writes checkpoints and reports."""
from __future__ import annotations

import enum
import itertools
import os
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
from megacompile.checkpoint import latest_checkpoint
from megacompile.checkpoint.loading import read_extra
from megacompile.corpus import PretrainedTokenizer, load_tokenizer
from megacompile.errors import ArgumentError, CheckpointError, MegacompileError
from megacompile.finetuning.data import check_sources, read
from megacompile.finetuning.folder import check_writable, created, locked
from megacompile.finetuning.progress import WINDOW, Entry, OneStepLate, ProgressDisplay, RunProgress
from megacompile.finetuning.reports import LOG, Reports, draw_curve, read_log
from megacompile.finetuning.rows import Batch, Order, Padding, Rows, collate, in_order, padded_length, split
from megacompile.finetuning.saves import CHECKPOINTS, Saves
from megacompile.finetuning.settings import Settings
from megacompile.finetuning.trackers import started
from megacompile.inputs import packed_layout
from megacompile.losses import IGNORED
from megacompile.planning.process_group import process_count, rank_in_job
from megacompile.streaming.optimizer.names import optimizer_named
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.streaming.together import Together
from megacompile.system.atomic_files import replace_file
from megacompile.tools.lora import Lora
from megacompile.tools.options import Knobs
from megacompile.tools.recipe import Kind, Recipe, block
from megacompile.weights.empty_models import put_adapter
from megacompile.weights.saving import recover, replacing

#: Names in the folder of a run, next to checkpoints and reports.
MODEL, SETTINGS = "model", "settings.yaml"
#: Settings that must not change when a run is resumed: they determine the order of the data, or are restored from a checkpoint.
FIXED = ("batch", "length", "lr", "beta1", "beta2", "eps", "weight_decay")
_PROGRESS = schema.record({"done": schema.whole(0, 2**53), "fixed": schema.table(schema.text(), schema.anything)})


def run(source: str, data: Sequence[str], settings: Settings, lora: Lora, knobs: Knobs, console: Console) -> int:
    """Trains and returns the exit code: 0, or 128 plus the number of the signal that stopped the run. With several ranks, each
    takes its share of the rows of every step, and the first alone prints, and writes what is not a checkpoint.

    Checks as much as possible before it loads weights. Raises `MegacompileError` and its subclasses."""
    settings.check()
    lora.check()
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
    target = settings.save or (settings.output / MODEL if settings.output else None)
    if target is None:
        console.print("nothing will be saved: give --output, or --save to save only the model")
    start = _start(settings, console)
    began = None if start is None else _progress(start, read_extra(start))
    check_sources(data, settings.format)
    outline = training.load_model(source, meta=True)
    kind = _kind(source, lora)
    recipe, asked = Recipe.of(settings, kind, getattr(outline.config, "max_position_embeddings", None))
    training.check_length(outline.config, recipe.length)
    _check_rate(settings, asked)
    tokenizer = PretrainedTokenizer(settings.tokenizer) if settings.tokenizer else load_tokenizer(source)
    with console.status("reading the data"):
        found = read(data, tokenizer, settings.format, recipe.length, settings.pack, outline.config.vocab_size,
                     lambda text: console.print(text, style="bold yellow"), settings.too_long)
    rows, held_out = split(found, settings.eval_share, settings.seed)
    rank, ranks = rank_in_job(), process_count()
    if recipe.batch < ranks:
        raise ArgumentError(f"--batch {recipe.batch} has fewer sequences than GPUs ({ranks}): give --batch {ranks} or "
                            "more")
    order = Order(len(rows), recipe.batch, settings.seed, None if settings.steps else recipe.epochs)
    steps = settings.steps or order.steps
    console.print(_overview(source, kind, outline, rows, held_out, recipe, asked, settings, lora, steps))
    if target is not None:
        check_writable(target)  # before training, which would be lost otherwise
    fixed = {name: getattr(recipe, name) for name in FIXED} | {
        "seed": settings.seed, "data": rows.fingerprint(), "optim": _words_of_optimizer(settings)}
    if lora.lora:
        fixed["lora"] = _words_of(lora)
    if start is not None and began is not None:
        _check_same_run(start, began["fixed"], fixed)
    if kind is Kind.SCRATCH:
        console.print("initializing random weights ...")
    model = _open(source, settings, lora, knobs, longest := padded_length(recipe.length, rows, held_out)).train()
    together = model.megacompile.streamed.together
    padding = _padding(model, -(-recipe.batch // ranks), longest, rows, console)
    optimizer = _optimizer(model, settings, recipe)
    schedule = training.warmup_then_decay(optimizer, steps, recipe.warmup_steps(steps), recipe.decay, recipe.final_lr)
    done = 0 if start is None else _resume(start, fixed, model, optimizer, schedule)
    if start is not None:
        console.print(f"resuming after step {done} from {start}")
    with ExitStack() as stack:
        stop = stack.enter_context(training.Interruption())
        saves = stack.enter_context(Saves(settings, model, optimizer, schedule, fixed, done, console.print))
        folder = settings.output if rank == 0 else None  # of what the first rank alone writes
        trackers = stack.enter_context(started((rank == 0 and settings.report_to) or (), settings.output, done, _plain(
            {"model": source, **asdict(settings), **asdict(recipe), **asdict(lora)}), console.print))
        before = [] if folder is None else [
            entry["loss"] for entry in read_log(folder / LOG) if "loss" in entry and entry["step"] <= done][-WINDOW:]
        reports = stack.enter_context(Reports(folder, done, trackers, console.print))
        if folder is not None:  # only now, so that a run that is refused changes no file
            _write_settings(folder / SETTINGS, source, data, settings, recipe, lora, knobs)
        display = stack.enter_context(ProgressDisplay(console, steps, settings.log_interval, done))
        run_progress = RunProgress(steps, recipe.batch, len(rows), before)

        def report(entry: Entry) -> None:
            reports.step(entry)
            display.line(entry)

        late = OneStepLate(report)
        stack.callback(late.flush)

        def on_step(step: training.Step) -> None:
            entry = run_progress(step)
            late(entry)
            display(entry)
            evaluates = bool(len(held_out)) and (step.number % settings.eval_interval == 0 or step.number == steps)
            if evaluates or step.number % settings.save_interval == 0:  # both wait for the update anyway
                _ = optimizer.grad_norm
                late.flush()
            if evaluates:
                loss = _evaluated(model, together, held_out, -(-recipe.batch // ranks), padding)
                reports.evaluation(step.number, loss)
                console.print(f"step {step.number}/{steps}  evaluation loss {loss:.4f}")
            saves.after(step.number)

        batches = (_of_rank(rows, each, rank, ranks, padding) for each in order.batches(done))
        trained = done + len(training.train(model, optimizer, batches, steps, done=done, schedule=schedule, on_step=on_step,
                                            stop=lambda: not together.all_agree("continuing", not stop.asked)))
        _ = optimizer.grad_norm  # waits for the norm of the last step
        late.flush()
        stopped_by = max(together.values("stopping", int(stop.signal or 0))) if trained < steps else 0
        stopped = stopped_by > 0
        failed: CheckpointError | None = None
        try:
            saves.last(trained)
        except CheckpointError as error:  # for example a full disk; the model may be saved on another one
            failed = error
        if target is not None and (settings.save or not stopped):  # a stopped run is resumed from its checkpoint
            model.save_pretrained(target)
            if isinstance(tokenizer, PretrainedTokenizer) and rank == 0:
                with replacing(target) as folder:  # all of its files at once
                    tokenizer.pretrained.save_pretrained(folder)
            what = f" (an adapter for {source})" if lora.lora else ""
            console.print(f"saved in {target} after {trained} steps{what}")
        if failed is not None:
            raise failed
    model.megacompile.close()
    if settings.output is not None and rank == 0 and (reason := draw_curve(settings.output)):
        console.print(f"the loss curve was not drawn: {reason}")
    if not stopped:
        return 0
    console.print(f"stopped by {training.name_of(stopped_by)} after {trained} of {steps} steps" + (
        "; continue with --resume latest" if settings.output else "" if settings.save else
        "; nothing was saved, since --output was not given"))
    return 128 + stopped_by


def _of_rank(rows: Rows, indices: Sequence[int], rank: int, ranks: int, padding: Padding) -> Batch:
    """A rank's share of the rows of a step. A rank without any gets a row that counts for nothing."""
    own = indices[rank::ranks]
    batch = collate(rows, own or indices[:1], padding)
    if not own:
        batch["labels"].fill_(IGNORED)
    return batch


def _evaluated(model: Any, together: Together, rows: Rows, batch: int, padding: Padding) -> float:
    """The mean loss over the predicted labels of some rows in nats per token. Each rank evaluates its share of the batches."""
    batches = itertools.islice(in_order(rows, batch, padding), rank_in_job(), None, process_count())
    total, count = map(sum, zip(*together.values("evaluating", training.total_loss(model, batches)), strict=True))
    return total / max(1, count)


def _start(settings: Settings, console: Console) -> Path | None:
    """The checkpoint to resume from, or None. Raises `ArgumentError` if the given one does not exist, or if the output folder
    has checkpoints but --resume was not given."""
    folder = settings.output / CHECKPOINTS if settings.output else None
    if settings.resume == "latest":
        assert folder is not None, "settings were not checked"
        latest = latest_checkpoint(folder)
        if latest is None:
            console.print(f"{folder} has no checkpoint yet: starting a new run")
        return latest
    if settings.resume is not None:
        given = Path(settings.resume)
        if not given.is_dir():
            raise ArgumentError(f"cannot resume: folder {given} does not exist: give a checkpoint, a folder of checkpoints, or "
                                "latest")
        return given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given
    if folder is not None and latest_checkpoint(folder) is not None:
        raise ArgumentError(f"{settings.output} has checkpoints of an earlier run: give --resume latest to continue it, or "
                            "another --output")
    return None


def _kind(source: str, lora: Lora) -> Kind:
    """The kind of run. Raises `ArgumentError` for an adapter on random weights."""
    if training.has_weights(source):
        return Kind.LORA if lora.lora else Kind.FULL
    if lora.lora:
        raise ArgumentError(f"--lora adapts a pretrained model, but {source} is only a config: give a folder with weights, or "
                            "an id on the Hugging Face Hub")
    return Kind.SCRATCH


def _overview(source: str, kind: Kind, outline: Any, rows: Rows, held_out: Rows, recipe: Recipe, asked: frozenset[str],
            settings: Settings, lora: Lora, steps: int) -> str:
    """The text that a run prints before it begins. Raises `ArgumentError` for an adapter on layers that the model does not
    have."""
    total, words = training.parameter_count(outline), recipe.words(steps, endless=settings.steps is not None)
    title, more = f"{kind} of {source}: {total:,} parameters", []
    if _words_of_optimizer(settings) != _words_of_optimizer(Settings()):
        more = [("optimizer", _words_of_optimizer(settings))]
    if lora.lora:
        adapted = put_adapter(outline, lora.config())
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        title = f"{kind} of {source}: {trained:,} trained parameters, {total:,} frozen ones"
        more.append(("adapter", _words_of(lora)))
    data = (f"{len(rows):,} sequences ({int(rows.lengths.sum()):,} tokens) for training, {len(held_out):,} sequences for "
            f"evaluation; {steps:,} steps of {recipe.batch} sequences")
    return block(title, words, asked, *more, ("data", data))


def _check_rate(settings: Settings, asked: frozenset[str]) -> None:
    """Raises `ArgumentError` for an optimizer that has no default learning rate, if none was given."""
    if not optimizer_named(settings.optim).rates_of_adamw and "lr" not in asked:
        raise ArgumentError(f"--optim {settings.optim} needs another learning rate than AdamW, and there is no default: give "
                            "--lr (for Lion, its authors use a third to a tenth of AdamW's)")


def _words_of_optimizer(settings: Settings) -> str:
    """The optimizer, its state and its further options, for people."""
    named = optimizer_named(settings.optim)
    options = named.arguments({}, settings.optim_args)
    return ", ".join([named.kind.__name__, *(f"{name} {value}" for name, value in options.items())])


def _words_of(lora: Lora) -> str:
    dropout = f", dropout {lora.lora_dropout:g}" if lora.lora_dropout else ""
    frozen = f", frozen weights in {lora.quantize.value}" if lora.quantize else ""
    return f"rank {lora.rank}, alpha {lora.alpha}, on {' '.join(lora.targets)}{dropout}{frozen}"


def _open(source: str, settings: Settings, lora: Lora, knobs: Knobs, longest: int) -> Any:
    """The streamed model: from safetensors files if there are any, otherwise from a config (random weights) or pickles. Packed
    rows are made long enough for the `longest` sequence, so that all steps have the same length."""
    path, dtype, adapter = Path(source), settings.weights_dtype.resolve(), lora.config()
    stored = lora.quantize.value if lora.quantize else None
    options = {"repack": max(packed_layout.LENGTH, packed_layout.power_of_two(longest)), **knobs.given()}
    if path.is_file() or (path.is_dir() and not any(path.glob("*.safetensors"))):
        model = training.load_model(source, dtype=dtype)
        model = model if adapter is None else put_adapter(model, adapter)
        return megacompile.stream(megacompile.quantize(model, stored) if stored else model, **options)
    return megacompile.from_pretrained(source, dtype=dtype, adapter=adapter, quantize=stored, **options)


def _padding(model: Any, batch: int, length: int, rows: Rows, console: Console) -> Padding:
    """How to pad batches. Prints the reason if the model's batches cannot be packed."""
    if rows.begins is None and rows.lengths.unique().numel() == 1:
        return Padding()  # nothing to pack
    repacking = model.megacompile.streamed.captures.repacking
    reason = repacking.refusal(training=True)
    if not reason:
        return Padding()
    console.print(f"rows are padded instead of packed: {reason}")
    return Padding.to_few_shapes(batch, length, repacking.reads_padding(training=True))


def _optimizer(model: Any, settings: Settings, recipe: Recipe) -> StreamedOptimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for p in trained if p.dim() > 1]},
                                    {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]
    named = optimizer_named(settings.optim)
    known = dict(lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, weight_decay=recipe.weight_decay)
    return named.kind([group for group in groups if group["params"]], **named.arguments(known, settings.optim_args),
                      max_grad_norm=recipe.max_grad_norm or None, overlap="backward" if settings.overlap else None)


def _resume(start: Path, fixed: Mapping[str, Any], model: Any, optimizer: Any, schedule: Any) -> int:
    """Loads a checkpoint and returns the number of steps that were done. Raises `CheckpointError` if it is from another run."""
    then = _progress(start, megacompile.load_checkpoint(start, model, optimizer, scheduler=schedule))
    _check_same_run(start, then["fixed"], fixed)
    return int(then["done"])


def _progress(start: Path, extra: Any) -> dict[str, Any]:
    """The run's data in a checkpoint: `done`, the number of steps; `fixed`, the settings that must not change. Raises
    `CheckpointError` if the checkpoint has no such data."""
    try:
        _PROGRESS(extra, "extra")
    except schema.SchemaError as error:
        raise CheckpointError(f"{start} was not saved by megacompile train ({error}): give a checkpoint of a run") from error
    return dict(extra)


def _check_same_run(start: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if settings that must not change have changed."""
    then = {"optim": _words_of_optimizer(Settings()), **then}  # runs of versions with one optimizer do not name it
    if changed := [f"{name} (was {then.get(name)}, now {value})" for name, value in now.items() if then.get(name) != value]:
        raise CheckpointError(f"{start} is from a run with other settings: {', '.join(changed)}; use its settings, or start a "
                              "new run from the model that it saved")


def _write_settings(path: Path, source: str, data: Sequence[str], settings: Settings, recipe: Recipe, lora: Lora,
                    knobs: Knobs) -> None:
    """Writes all settings, including defaults, so that `--config` repeats the run even if defaults change later."""
    given = {"model": source, "data": list(data), **asdict(settings), **asdict(recipe), **asdict(lora), **asdict(knobs)}
    for name in ("resume", "per_device_train_batch_size", "gradient_accumulation_steps",  # the last two are in `batch`
                 *(["warmup_ratio"] if recipe.warmup is not None else [])):
        del given[name]
    try:
        replace_file(path, [yaml.safe_dump(_plain(given), sort_keys=False).encode()])
    except OSError as error:
        raise MegacompileError(f"{path} cannot be written ({error.strerror}): give a writable --output") from error


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in types that YAML and trackers accept, without those that are None."""
    def word(value: Any) -> Any:
        return [word(each) for each in value] if isinstance(value, list) else (
            str(value) if isinstance(value, Path | enum.Enum) else value)

    return {name: word(value) for name, value in values.items() if value is not None}
