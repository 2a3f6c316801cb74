"""`megacompile generate`: answers to the prompts of a file, in batches, as JSON lines."""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megacompile.errors import ArgumentError
from megacompile.inference.prompts import Prompt
from megacompile.inference.sampling import Sampling, end_tokens, filler

#: Batches that are sorted by length together. Answers come in the order of the file, so these wait for each other.
_WINDOW = 8


def check_output(output: Path | None) -> None:
    """Raises `ArgumentError` if the file exists."""
    if output is not None and output.exists():
        raise ArgumentError(f"{output} exists: give another --output, or remove it")


def generate(model: Any, tokenizer: Any, prompts: Sequence[Prompt], output: Path | None, sampling: Sampling, batch: int,
             console: Console) -> None:
    """Writes the row of each prompt with its `completion` to `output`, or to stdout. Answers are written as soon as they and
    those before them are there, so that a run that is stopped leaves whole lines. Raises `ArgumentError` if `output` cannot be
    written."""
    torch.manual_seed(sampling.seed)
    with ExitStack() as stack:
        file = stack.enter_context(_opened(output)) if output is not None else sys.stdout
        progress = stack.enter_context(Progress(
            TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[rate]}"), console=console, disable=not console.is_terminal, transient=True))
        task = progress.add_task("generating", total=len(prompts), rate="")
        tokens, began = 0, time.perf_counter()
        for start in range(0, len(prompts), batch * _WINDOW):
            window = prompts[start:start + batch * _WINDOW]
            answers: dict[int, tuple[str, int]] = {}
            for indexes in _by_length(window, batch):
                answers |= zip(indexes, answered(model, tokenizer, [window[index] for index in indexes], sampling), strict=True)
                tokens += sum(answers[index][1] for index in indexes)
                progress.update(task, advance=len(indexes), rate=f"{tokens / (time.perf_counter() - began):,.0f} tokens/s")
            _write(file, window, [answers[index] for index in range(len(window))])
    seconds = time.perf_counter() - began
    console.print(f"{len(prompts):,} answers, {tokens:,} tokens in {seconds:,.1f} s ({tokens / seconds:,.0f} tokens/s)")


def _opened(output: Path) -> IO[str]:
    try:
        return output.open("x", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{output} cannot be written ({error.strerror}): give another --output") from error


def _by_length(prompts: Sequence[Prompt], batch: int) -> Iterator[list[int]]:
    """The indexes of prompts in batches of similar length, so that little of a batch is padding. The longest come first: if
    memory does not suffice, that is seen at once."""
    indexes = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].tokens))
    for start in range(0, len(indexes), batch):
        yield indexes[start:start + batch]


def answered(model: Any, tokenizer: Any, prompts: Sequence[Prompt], sampling: Sampling) -> list[tuple[str, int]]:
    """For each prompt, the text of its answer and the number of its tokens."""
    length = max(len(prompt.tokens) for prompt in prompts)
    ids = torch.full((len(prompts), length), filler(model))
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # on the right, next to the answer
        ids[row, length - len(prompt.tokens):] = torch.tensor(prompt.tokens)
        mask[row, length - len(prompt.tokens):] = 1
    device = model.megacompile.streamed.backend.device
    how = sampling.arguments(model, tokenizer, length)
    found = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), **how)
    ends = end_tokens(model)
    return [_text(tokenizer, row, sampling, ends) for row in found[:, length:].tolist()]


def _text(tokenizer: Any, tokens: list[int], sampling: Sampling, ends: set[int]) -> tuple[str, int]:
    """The text up to the first end, and how many tokens were generated for it."""
    stop = next((index for index, token in enumerate(tokens) if token in ends), None)
    if stop is not None:
        tokens = tokens[:stop + 1]  # what follows fills the batch
    return sampling.cut(tokenizer.decode(tokens, skip_special_tokens=True)), len(tokens)


def _write(file: IO[str], prompts: Sequence[Prompt], answers: Sequence[tuple[str, int]]) -> None:
    for prompt, (text, count) in zip(prompts, answers, strict=True):
        file.write(json.dumps({**prompt.row, "completion": text, "tokens": count}, ensure_ascii=False) + "\n")
    file.flush()
