"""Prepares a run of `megacompile train` before its weights are loaded: the data, the recipe, where it begins."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megacompile import training
from megacompile.corpus import PretrainedTokenizer, Tokenizer, load_tokenizer
from megacompile.errors import ArgumentError
from megacompile.finetuning import saves
from megacompile.finetuning.answers import fingerprint, read_answers
from megacompile.finetuning.data import check_sources, read
from megacompile.finetuning.saves import check_writable
from megacompile.finetuning.settings import Settings, Task
from megacompile.finetuning.training_sequences import Order, split
from megacompile.planning.device import process_count, rank_in_job
from megacompile.streaming.optimizer.names import optimizer_named
from megacompile.tools.options import Lora
from megacompile.tools.recipe import Kind, Recipe, block
from megacompile.weights.empty_models import put_adapter
from megacompile.weights.saving import replacing

#: The name of the model's folder in the folder of a run.
MODEL = "model"


@dataclass(frozen=True)
class Preparation:
    """A run before its weights are loaded.

    `target`: the folder of the trained model, or None. `start`: the checkpoint to resume from, or None; `done`: its number of
    steps; `state`: Trainer's state there. `rows`: the sequences for training, in the `order` of steps, or a data set of TRL's;
    `held_out`: those for evaluation. `steps`: the last step of the run. `fixed`: the settings that must not change when it is
    resumed."""

    target: Path | None
    start: Path | None
    recipe: Recipe
    tokenizer: Tokenizer
    rows: Any
    held_out: Any
    order: Order
    steps: int
    fixed: Mapping[str, Any]
    done: int
    state: Mapping[str, Any]

    @property
    def rows_per_rank(self) -> int:
        """The number of rows of a step that a rank gets, at most."""
        return -(-self.recipe.batch // process_count())

    def save(self, model: Any) -> None:
        """Saves the model and its tokenizer in the run's folder for it."""
        assert self.target is not None
        model.save_pretrained(self.target)
        if isinstance(self.tokenizer, PretrainedTokenizer) and rank_in_job() == 0:
            with replacing(self.target) as folder:  # all of its files at once
                self.tokenizer.pretrained.save_pretrained(folder)


def prepare(source: str, data: Sequence[str], settings: Settings, lora: Lora, console: Console) -> Preparation:
    """Reads the data and checks as much as possible without weights. Prints an overview. Raises `MegacompileError` and its
    subclasses."""
    target = settings.save or (settings.output / MODEL if settings.output else None)
    if target is None:
        console.print("nothing will be saved: give --output, or --save to save only the model")
    start = saves.start_of(settings, console)
    done, then, state = (0, {}, {}) if start is None else saves.progress_of(start)  # before the data, which takes long
    check_sources([*data, *(settings.eval_data or ())], settings.format)
    outline = training.load_model(source, meta=True)
    kind = _kind(source, lora)
    recipe, asked = Recipe.of(settings, kind, getattr(outline.config, "max_position_embeddings", None))
    training.check_length(outline.config, recipe.length)
    _check_rate(settings, asked)
    tokenizer = PretrainedTokenizer(settings.tokenizer) if settings.tokenizer else load_tokenizer(source)

    def read_all(sources: Sequence[str]) -> Any:
        if settings.task is not Task.SFT:
            return read_answers(settings.task, sources, tokenizer)
        return read(sources, tokenizer, settings.format, recipe.length, settings.pack, outline.config.vocab_size,
                    lambda text: console.print(text, style="bold yellow"), settings.too_long)

    with console.status("reading the data"), saves.template_time(tokenizer, then) as time:
        rows, held_out = split(read_all(data), settings.eval_share, settings.seed)
        if settings.eval_data:
            held_out = read_all(settings.eval_data)
    if recipe.batch < (ranks := process_count()):
        raise ArgumentError(f"--batch {recipe.batch} has fewer sequences than GPUs ({ranks}): give --batch {ranks} or "
                            "more")
    order = Order(len(rows), recipe.batch, settings.seed, None if settings.steps else recipe.epochs)
    steps = settings.steps or order.steps
    console.print(_overview(source, kind, outline, rows, held_out, recipe, asked, settings, lora, steps))
    if target is not None:
        check_writable(target)  # before training, which would be lost otherwise
    fixed = {name: getattr(recipe, name) for name in saves.FIXED} | {
        "seed": settings.seed, "data": rows.fingerprint() if settings.task is Task.SFT else fingerprint(rows),
        "optim": words_of_optimizer(settings), **time}
    if settings.task is not Task.SFT:
        fixed["task"] = settings.task.value
    if lora.lora:
        fixed["lora"] = _words_of(lora)
    if start is not None:
        saves.check_same_run(start, then, fixed)
    if kind is Kind.SCRATCH:
        console.print("initializing random weights ...")
    return Preparation(target, start, recipe, tokenizer, rows, held_out, order, steps, fixed, done, state)


def _kind(source: str, lora: Lora) -> Kind:
    """The kind of run. Raises `ArgumentError` for an adapter on random weights."""
    if training.has_weights(source):
        return Kind.LORA if lora.lora else Kind.FULL
    if lora.lora:
        raise ArgumentError(f"--lora adapts a pretrained model, but {source} is only a config: give a folder with weights, or "
                            "an id on the Hugging Face Hub")
    return Kind.SCRATCH


def _overview(source: str, kind: Kind, outline: Any, rows: Any, held_out: Any, recipe: Recipe, asked: frozenset[str],
            settings: Settings, lora: Lora, steps: int) -> str:
    """The text that a run prints before it begins. Raises `ArgumentError` for an adapter on layers that the model lacks."""
    total, words = training.parameter_count(outline), recipe.words(steps, endless=settings.steps is not None)
    title, more = f"{kind} of {source}: {total:,} parameters", []
    if words_of_optimizer(settings) != words_of_optimizer(Settings()):
        more = [("optimizer", words_of_optimizer(settings))]
    if lora.lora:
        adapted = put_adapter(outline, lora.config())
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        title = f"{kind} of {source}: {trained:,} trained parameters, {total:,} frozen ones"
        more.append(("adapter", _words_of(lora)))
    if settings.task is not Task.SFT:
        title, unit, tokens = f"{settings.task.upper()}, {title}", "rows", ""
    else:
        unit, tokens = "sequences", f" ({int(rows.lengths.sum()):,} tokens)"
    data = (f"{len(rows):,} {unit}{tokens} for training, {len(held_out):,} {unit} for evaluation; {steps:,} steps of "
            f"{recipe.batch} {unit}")
    return block(title, words, asked, *more, ("data", data))


def _check_rate(settings: Settings, asked: frozenset[str]) -> None:
    """Raises `ArgumentError` for an optimizer that has no default learning rate, if none was given."""
    if not optimizer_named(settings.optim).rates_of_adamw and "lr" not in asked:
        raise ArgumentError(f"--optim {settings.optim} has no default learning rate: give --lr (for Lion, its authors use a "
                            "third to a tenth of AdamW's)")


def words_of_optimizer(settings: Settings) -> str:
    """The optimizer, its state and its further options, for people."""
    named = optimizer_named(settings.optim)
    options = named.arguments({}, settings.optim_args)
    return ", ".join([named.kind.__name__, *(f"{name} {value}" for name, value in options.items())])


def _words_of(lora: Lora) -> str:
    dropout = f", dropout {lora.lora_dropout:g}" if lora.lora_dropout else ""
    frozen = f", frozen weights in {lora.quantize.value}" if lora.quantize else ""
    targets = " ".join([*lora.targets, *lora.parameters])
    return f"rank {lora.rank}, alpha {lora.alpha}, on {targets}{dropout}{frozen}"
