"""Measures a row: training on sequences of uneven length, through one of the usual training APIs.

    python benchmarks/uneven.py --data instructions --through trainer                    # megacompile's Trainer
    python benchmarks/uneven.py --data instructions --through native --arrangement grouped
    python benchmarks/uneven.py --data full --through trainer                            # full rows, for comparison

A step has `--batch` rows, padded to the longest one as default collators do. Tokens per second do not count padding. Native is
`transformers.Trainer` with weights, gradients and a fused bf16 AdamW on the device; it accumulates over micro-batches. Prints
one JSON line. One process measures rows that `--then` separates. Rows of megacompile use one model if only their data, training
API and device memory budget differ.

Under torchrun, each GPU trains on `--batch` rows of its own, and the row counts the tokens of all of them:

    torchrun --standalone --nproc-per-node 2 benchmarks/uneven.py --data instructions
"""
from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import clocks
import native
import rows
import torch
import torch.distributed as dist
import transformers
from clocks import Clock, collections, step_fields
from rich.console import Console
from rows import KeptModel, significant
from shapes import config, parameters, random_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

import megacompile
from megacompile.errors import MegacompileError
from megacompile.finetuning.data import best_fit
from megacompile.finetuning.reports import LOG, read_log
from megacompile.finetuning.settings import Settings
from megacompile.finetuning.train_command import run
from megacompile.inputs.packed_layout import LENGTH
from megacompile.losses import IGNORED
from megacompile.planning.device import process_count
from megacompile.system.progress import work_done
from megacompile.tools.options import DType, Knobs, Lora


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of lengths in tokens, with this `median` and standard deviation `sigma` of the logarithm,
    clamped to the range from `shortest` to `longest`."""

    median: float
    sigma: float
    shortest: int
    longest: int

    def draw(self, count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(count).log_normal_(math.log(self.median), self.sigma, generator=generator)
        return [int(length) for length in drawn.clamp(self.shortest, self.longest).round().tolist()]


@dataclass(frozen=True)
class Mixture:
    """Lengths of two kinds: each is from `long` with the probability `share`, else from `short`."""

    short: Lengths
    long: Lengths
    share: float

    @property
    def longest(self) -> int:
        return self.long.longest

    def draw(self, count: int, seed: int) -> list[int]:
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed + 2)).tolist()
        lengths = zip(self.short.draw(count, seed), self.long.draw(count, seed + 1), drawn, strict=True)
        return [long if each < self.share else short for short, long, each in lengths]


#: Typical data. Instructions are short, chats have a long tail, documents are truncated. "bimodal" has short questions and
#: pages.
DATA: dict[str, Lengths | Mixture] = {
    "instructions": Lengths(180, 0.8, 16, 2048),
    "chat": Lengths(500, 1.1, 32, 8192),
    "documents": Lengths(1200, 1.2, 64, 4096),
    "bimodal": Mixture(Lengths(90, 0.5, 16, 4096), Lengths(1340, 0.5, 16, 4096), 0.25),
}
#: Rows of one length, with as many tokens per step as instructions have.
FULL = "full"


class RandomRows(Dataset[dict[str, Any]]):
    """Rows of random tokens with these lengths. All tokens are targets. The same seed gives the same rows."""

    def __init__(self, lengths: Sequence[int], vocabulary: int, seed: int = 0) -> None:
        self.lengths, self.vocabulary, self.seed = lengths, vocabulary, seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed * 2**32 + index)
        ids = torch.randint(0, self.vocabulary, (self.lengths[index],), generator=generator).tolist()
        return dict(input_ids=ids, labels=ids, tokens=len(ids))


def collate(found: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows padded on the right to the longest one: ids, mask and labels, int64 [rows, length]."""
    shape = len(found), max(len(row["input_ids"]) for row in found)
    batch = dict(input_ids=torch.zeros(shape, dtype=torch.int64), attention_mask=torch.zeros(shape, dtype=torch.int64),
                 labels=torch.full(shape, IGNORED))
    for number, row in enumerate(found):
        count = len(row["input_ids"])
        batch["input_ids"][number, :count] = torch.tensor(row["input_ids"])
        batch["labels"][number, :count] = torch.tensor(row["labels"])
        batch["attention_mask"][number, :count] = 1
    return batch


#: Rows that are packed together. Few, so that packed rows come in about the order of the rows in them.
_WINDOW = 512


class PackedRows(Dataset[dict[str, Any]]):
    """Rows of one length. Each holds several rows of `source`, packed by best fit, with position IDs that restart at 0."""

    def __init__(self, source: RandomRows, length: int) -> None:
        self.source, self.length = source, length
        self.groups: list[list[int]] = []
        for begin in range(0, len(source.lengths), _WINDOW):
            found = best_fit(source.lengths[begin:begin + _WINDOW], length)
            self.groups += sorted(sorted(begin + index for index in group) for group in found)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = dict(input_ids=[], labels=[], position_ids=[])
        for each in self.groups[index]:
            ids = self.source[each]["input_ids"]
            row["input_ids"] += ids
            row["labels"] += [IGNORED, *ids[1:]]
            row["position_ids"] += range(len(ids))
        left = self.length - len(row["input_ids"])
        return dict(input_ids=row["input_ids"] + left * [0], labels=row["labels"] + left * [IGNORED],
                    position_ids=row["position_ids"] + list(range(left)), tokens=self.length - left)


def stack(found: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows of one length: tensors int64 [rows, length]."""
    return {name: torch.tensor([row[name] for row in found]) for name in ("input_ids", "labels", "position_ids")}


#: Rows in a micro-batch of native training. The logits of a whole step would not fit.
NATIVE_ROWS = 8
THROUGH = ("trainer", "sft", "loop", "train", "native")
ARRANGEMENTS = ("padded", "grouped", "packed")


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    parser.set_defaults(steps=20, warm_up=4)
    parser.add_argument("--data", choices=(*DATA, FULL), default="instructions",
                        help="distribution of lengths (default: instructions)")
    parser.add_argument("--through", choices=THROUGH, default="trainer",
                        help="training API: megacompile's Trainer, SFTTrainer, a plain loop or `megacompile train`; or native "
                             "Trainer (default: trainer)")
    parser.add_argument("--arrangement", choices=ARRANGEMENTS, default="padded",
                        help="grouped: batches of rows with similar length, as Trainer can make them; packed: several "
                             "sequences in rows of one length (default: padded)")
    parser.add_argument("--device-memory", help='device memory budget, such as "24GiB" (default: the free memory)')
    parser.add_argument("--cache", type=Path, help="folder of compiled code and plans (default: the user's cache folder)")
    parser.add_argument("--cold", action="store_true",
                        help="start with an empty cache: a new --cache folder, or a temporary one")
    parser.add_argument("--dynamic", action=argparse.BooleanOptionalAction,
                        help="megacompile: compile kernels of packed rows once for rows of any number and length, or for each "
                             "of a few sizes (default: once if kernels are compiled)")
    parser.add_argument("--logging-steps", type=int, default=5,
                        help="Trainers: how often the loss is logged, which waits for the device (default: every 5 steps)")
    parser.add_argument("--attention", default="sdpa", help="native: attn_implementation (default: sdpa)")
    parser.add_argument("--checkpointing", action="store_true",
                        help="native: keep only the inputs of layers and recompute the rest")
    parser.add_argument("--compile", action="store_true", help="native: compile each layer with torch.compile")
    parser.set_defaults(keep=None, checkpoint_layers=None)
    return parser


class Feed:
    """The data of a run: `rows` rows per step, in batches of `each` rows made by `collate`. With several processes, each has
    its own rows.

    State: for each batch so far, the number of `tokens` without padding, and of `computed` tokens including padding."""

    def __init__(self, data: RandomRows | PackedRows, collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]],
                 count: int, each: int | None) -> None:
        self.data, self.collator = data, collator
        self.accumulated = 1 if each is None else math.ceil(count / each)
        self.each = math.ceil(count / self.accumulated)
        self.rows = self.each * self.accumulated
        self.tokens: list[int] = []
        self.computed: list[int] = []

    def collate(self, found: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = self.collator(found)
        self.tokens.append(sum(row["tokens"] for row in found))
        self.computed.append(batch["input_ids"].numel())
        return batch

    def of_steps(self, counts: Sequence[int]) -> list[int]:
        """The sum of `counts` for each step, over all processes. `counts` has a number for each batch of this process."""
        own = torch.tensor([sum(counts[at:at + self.accumulated]) for at in range(0, len(counts), self.accumulated)])
        if process_count() > 1:
            dist.all_reduce(own)
        return [int(count) for count in own]


def feed(given: argparse.Namespace, vocabulary: int) -> Feed:
    """The data of a row. Raises `MegacompileError` for an arrangement that the data does not support, and for a training API
    that this benchmark does not run with several processes."""
    if process_count() > 1 and given.through != "trainer":
        raise MegacompileError(f"several processes measure megacompile's Trainer alone: leave --through {given.through} out, "
                               "or start one process")
    steps = process_count() * (given.steps + given.warm_up + 1)  # Trainer reads ahead
    each = (given.micro_batch_size or NATIVE_ROWS) if given.through == "native" else None
    if given.data == FULL:
        if given.arrangement != "padded":
            raise MegacompileError("full rows cannot be arranged in another way: leave --arrangement out")
        mean = statistics.mean(DATA["instructions"].draw(given.batch * 100, seed=0))
        count = max(1, round(given.batch * mean / LENGTH))
        return Feed(RandomRows([LENGTH] * 2 * count * steps, vocabulary), collate, count, each)
    source = RandomRows(DATA[given.data].draw(2 * given.batch * steps, seed=0), vocabulary)  # twice as many as needed
    if given.arrangement == "packed":
        packed = PackedRows(source, max(LENGTH, DATA[given.data].longest))
        return Feed(packed, stack, max(1, len(packed) // (2 * steps)), each)
    return Feed(source, collate, given.batch, each)


# ---------------------------------------------------------------- ways to train

def arguments(given: argparse.Namespace, fed: Feed, folder: str) -> dict[str, Any]:
    """Arguments for the `TrainingArguments` of all Trainers."""
    grouped = dict(train_sampling_strategy="group_by_length", length_column_name="tokens")
    return dict(
        output_dir=folder, max_steps=given.steps + given.warm_up, per_device_train_batch_size=fed.each,
        gradient_accumulation_steps=fed.accumulated, learning_rate=1e-5,
        max_grad_norm=rows.clip(given) or 0.0,
        save_strategy="no", report_to=[], logging_steps=given.logging_steps, logging_first_step=True, disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=given.device == "cpu", **(grouped if given.arrangement == "grouped" else {}))


def losses_of(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def through_trainer(given: argparse.Namespace, model: Any, fed: Feed, folder: str, clock: Clock) -> list[float]:
    from megacompile.trainer import Trainer
    said = transformers.TrainingArguments(**arguments(given, fed, folder))
    trainer = Trainer(model=model, args=said, train_dataset=fed.data, data_collator=fed.collate, callbacks=[clock])
    trainer.train()
    return losses_of(trainer)


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer for texts such as "17 4", with a token for each number. The last three tokens of the vocabulary are
    special."""
    special = dict(zip(("<unk>", "<eos>", "<pad>"), range(vocabulary - 3, vocabulary), strict=True))
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(vocabulary - 3)} | special, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>",
        chat_template="{% for message in messages %}{{ message.content }} {% endfor %}")


def through_sft(given: argparse.Namespace, model: Any, fed: Feed, folder: str, clock: Clock) -> list[float]:
    import datasets
    from trl import SFTConfig

    from megacompile.sft import SFTTrainer
    said = SFTConfig(**arguments(given, fed, folder), dataset_kwargs=dict(skip_prepare_dataset=True))
    data = datasets.Dataset.from_list([fed.data[index] for index in range(len(fed.data))])
    trainer = SFTTrainer(model=model, args=said, train_dataset=data, data_collator=fed.collate, callbacks=[clock],
                         processing_class=number_tokenizer(model.config.vocab_size))
    trainer.train()
    return losses_of(trainer)


def through_loop(given: argparse.Namespace, model: Any, fed: Feed, folder: str, clock: Clock) -> list[float]:
    del folder  # nothing is written
    clip = rows.clip(given)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-5, max_grad_norm=clip)
    losses = []
    clock.begin()
    for number in range(given.steps + given.warm_up):
        batch = fed.collate([fed.data[index] for index in range(number * fed.rows, (number + 1) * fed.rows)])
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.tick()
    return losses


def through_native(given: argparse.Namespace, model: Any, fed: Feed, folder: str, clock: Clock) -> list[float]:
    said = transformers.TrainingArguments(**arguments(given, fed, folder), optim="adamw_torch_fused",
                                          bf16=given.device != "cpu")
    trainer = transformers.Trainer(model=model, args=said, train_dataset=fed.data, data_collator=fed.collate, callbacks=[clock])
    trainer.train()
    return losses_of(trainer)


WAYS = dict(trainer=through_trainer, sft=through_sft, loop=through_loop, native=through_native)


# ---------------------------------------------------------------- a row

class Models(KeptModel):
    """State, in addition to `KeptModel`'s: `stream_s`, the seconds that the last `stream` took."""

    COMMON = ("shape", "layers", "device", "micro_batch_size", "dynamic")

    def planned(self, given: argparse.Namespace) -> dict[str, Any]:
        return dict(device_memory=given.device_memory)

    def streamed(self, given: argparse.Namespace, planned: dict[str, Any]) -> Any:
        model = random_model(given.shape, rows.layer_count(given), given.device)
        began = time.perf_counter()
        model = megacompile.stream(model, device=given.device, micro_batch_size=given.micro_batch_size, dynamic=given.dynamic,
                                   **planned)
        self.stream_s = round(time.perf_counter() - began, 2)
        return model


def native_model(given: argparse.Namespace) -> Any:
    model = random_model(given.shape, rows.layer_count(given), given.device)
    model.set_attn_implementation(given.attention)
    model = model.to(given.device)
    native.prepare(model, given)
    return model


def measure(given: argparse.Namespace, models: Models) -> rows.Row:
    if given.cold or given.through in ("train", "native"):
        models.close()  # before anything else needs its memory, and its kernels would not be cold
    with tempfile.TemporaryDirectory() as folder:
        if given.cold and given.cache is not None and given.cache.exists():
            raise MegacompileError(f"{given.cache} exists, but --cold needs an empty cache: give another --cache")
        cache = {"MEGACOMPILE_CACHE": str(given.cache or f"{folder}/cache")} if given.cold or given.cache is not None else {}
        with mock.patch.dict(os.environ, cache), models.closed_if_failed():
            return _of_command(given, Path(folder)) if given.through == "train" else _measure(given, folder, models)


def _of_command(given: argparse.Namespace, folder: Path) -> rows.Row:
    """A row from the log of `megacompile train`, run on the same rows as conversations. A third of each is the prompt."""
    shape = config(given.shape, rows.layer_count(given))
    fed = feed(given, shape.vocab_size)
    if not isinstance(fed.data, RandomRows):
        raise MegacompileError("megacompile train packs rows itself: leave --arrangement out")
    tokenizer = number_tokenizer(shape.vocab_size)
    shape.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "tokenizer")  # next to the config it would be taken for the model's own tokenizer
    with (folder / "rows.jsonl").open("w") as file:
        for index in range(len(fed.data)):
            words = [str(token) for token in fed.data[index]["input_ids"]]
            prompt = max(1, len(words) // 3)
            file.write(json.dumps(dict(instruction=" ".join(words[:prompt]), output=" ".join(words[prompt:]))) + "\n")
    steps = given.steps + given.warm_up
    began = time.perf_counter()
    settings = Settings(
        output=folder / "run", tokenizer=str(folder / "tokenizer"), batch=fed.rows,
        length=max(fed.data.lengths), steps=steps, save_interval=steps, lr=1e-5,
        max_grad_norm=rows.clip(given) or 0.0, dtype=DType.BFLOAT16)
    knobs = Knobs(device=given.device, device_memory=given.device_memory, micro_batch_size=given.micro_batch_size,
                  dynamic=given.dynamic)
    run(str(folder / "model"), [str(folder / "rows.jsonl")], settings, Lora(), knobs, Console(file=sys.stderr))
    return row_of_log(given, folder / "run" / LOG, time.perf_counter() - began)


def row_of_log(given: argparse.Namespace, log: Path, whole: float) -> rows.Row:
    """A row from the log of a run of `megacompile train` that took `whole` seconds."""
    entries = [entry for entry in read_log(log) if "seconds" in entry]
    times = [entry["seconds"] for entry in entries]
    rate = statistics.median(entry["tokens_per_second"] for entry in entries[given.warm_up:])
    useful = [round(entry["tokens_per_second"] * entry["seconds"]) for entry in entries]
    computed = [round(tokens / (1 - entry["padding_share"])) for tokens, entry in zip(useful, entries, strict=True)]
    count = parameters(given.shape, rows.layer_count(given))
    return dict(
        layers=rows.layer_count(given), tokens_per_step=round(statistics.mean(useful)), tokens_per_s=round(rate),
        padding=round(statistics.mean(entry["padding_share"] for entry in entries), 4),
        tflops=significant(6e-12 * count * rate), parameters=count, setup_s=round(whole - sum(times), 1),
        losses=[entry["loss"] for entry in entries], **step_fields(given.warm_up, times, useful, computed))


def _measure(given: argparse.Namespace, folder: str, models: Models) -> rows.Row:
    native_run, cuda = given.through == "native", given.device == "cuda"
    began = time.perf_counter()
    with work_done() as preparing:
        model = native_model(given) if native_run else models.of(given)
    streamed = time.perf_counter()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    fed = feed(given, model.config.vocab_size)
    if native_run:
        clock = Clock(torch.cuda.synchronize if cuda else lambda: None)
    else:
        counted = model.megacompile.streamed.step.tokens
        before = counted.computed  # by other rows
        clock = Clock(computed=lambda: counted.computed - before)
    with clocks.sampled(given.device) as sampled, collections() as collected, work_done() as training:
        losses = WAYS[given.through](given, model, fed, folder, clock)
    times, warm = clock.times, clock.warm_up(given.warm_up)
    tokens, padded = (clock.averages(fed.of_steps(counts)) for counts in (fed.tokens, fed.computed))
    computed = padded if native_run else clock.tokens  # which the streamed model counts for all processes
    rate = statistics.median(count / seconds for count, seconds in list(zip(tokens, times, strict=True))[warm:])
    active = rows.active_parameters(model)
    stats = {} if native_run else model.megacompile.stats
    return dict(
        layers=model.config.num_hidden_layers, tokens_per_step=round(statistics.mean(tokens)), tokens_per_s=round(rate),
        padding=round(1 - sum(tokens) / sum(padded), 4), tflops=significant(6e-12 * active * rate),
        parameters=sum(p.numel() for p in model.parameters()), active_parameters=active,
        losses=losses, **step_fields(warm, times, tokens, computed), steps_timed=clock.steps,
        **({} if native_run else dict(stream_s=models.stream_s, rows_of_the_model=models.used)),
        setup_s=round(streamed - began, 1),
        preparing_s=_seconds(preparing), training_s=_seconds(training),
        collections_s=[(round(end - clock.began, 3), round(seconds, 3)) for end, seconds in collected],
        stats={name: value for name, value in stats.items() if isinstance(value, int | float)},
        peak_device_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else 0.0, **sampled)


def _seconds(done: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The operations that took long enough to be reported, with their durations in seconds."""
    return [(task, round(seconds, 2)) for task, seconds in done if seconds >= 0.05]


def main() -> None:
    with Models() as models:
        rows.main("uneven", options(), functools.partial(measure, models=models))


if __name__ == "__main__":
    main()
