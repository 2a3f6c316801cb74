"""Answers to prompts: read, batched, sampled, and a chat."""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TextStreamer

from megacompile.corpus import SpecialTokens
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.chat import ChatTemplate
from megacompile.finetuning.data import files_of, is_text, placed, read_lines, read_rows
from megacompile.finetuning.formats import Message, prompt_of
from megacompile.finetuning.tools import tools_of
from megacompile.inference.sampling import Sampling, end_tokens, filler


# -------------------- Prompts from files: rows with a `prompt`, a conversation or an instruction; or the lines of a text file
@dataclass(frozen=True)
class Prompt:
    """`row`: as in the file. `tokens`: token ids."""

    row: Mapping[str, Any]
    tokens: list[int]


class PromptEncoder:
    """Encodes rows. `raw`: a `prompt` is continued as it is, and not sent as a user's message through the chat template.
    `check` gets the number of tokens of each row, and may raise `MegacompileError`."""

    def __init__(self, tokenizer: Any, raw: bool, check: Callable[[int], None] = lambda tokens: None) -> None:
        self._tokenizer, self._raw, self._check = tokenizer, raw or tokenizer.chat_template is None, check
        self._template, self._special = ChatTemplate(tokenizer), SpecialTokens.of(tokenizer)

    def read(self, source: str) -> Iterator[Prompt]:
        """The prompts of a file. Raises `MegacompileError` for a row without one, with its number."""
        for number, row in enumerate(self._rows(source), start=1):
            with placed(source, number):
                prompt = Prompt(row, self.encode(row))
                self._check(len(prompt.tokens))
            yield prompt

    def _rows(self, source: str) -> Iterator[Mapping[str, Any]]:
        if not is_text(source):
            yield from read_rows(source)
            return
        lines = [line for file in files_of(source) for line in read_lines(file)]
        if not lines:
            raise ArgumentError(f"{source} has no prompts: write one in each line")
        yield from ({"prompt": line} for line in lines)

    def encode(self, row: Mapping[str, Any]) -> list[int]:
        """The tokens that an answer follows."""
        text = row.get("prompt")
        if isinstance(text, str) and self._raw:
            return self._checked(self._special.begin(self._template.tokens(text)))
        return self.of_messages(prompt_of(row), tools_of(row))

    def of_messages(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """The tokens of a conversation to answer. Raises `MegacompileError` if the template refuses it or omits a part."""
        if self._tokenizer.chat_template is None:
            raise MegacompileError("the tokenizer has no chat template: give prompts as text (a column prompt), or a tokenizer "
                                   "that has one (--tokenizer)")
        heard = self._template.readable(messages, tools)
        return self._checked(self._template.tokens(self._template.text(heard, tools, add_generation_prompt=True)))

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise MegacompileError("the prompt is empty: write some text, or remove the row")
        return list(tokens)


# -------------------- `megacompile generate`: answers to the prompts of a file, in batches, as JSON lines
#: Batches that are sorted by length together. Answers come in the order of the file, so these wait for each other.
_WINDOW = 8


def check_output(output: Path | None) -> None:
    """Raises `ArgumentError` if the file exists."""
    if output is not None and output.exists():
        raise ArgumentError(f"{output} exists: give another --output, or remove it")


def generate(model: Any, tokenizer: Any, prompts: Sequence[Prompt], output: Path | None, sampling: Sampling, batch: int,
             console: Console) -> None:
    """Writes the row of each prompt with its `completion` to `output`, or to stdout. An answer is written once it and those
    before it are complete, so a stopped run leaves whole lines. Raises `ArgumentError` if `output` cannot be written."""
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
    memory is too small, that shows at once."""
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
    """The text up to the first end, and the number of tokens that were generated for it."""
    stop = next((index for index, token in enumerate(tokens) if token in ends), None)
    if stop is not None:
        tokens = tokens[:stop + 1]  # what follows fills the batch
    return sampling.cut(tokenizer.decode(tokens, skip_special_tokens=True)), len(tokens)


def _write(file: IO[str], prompts: Sequence[Prompt], answers: Sequence[tuple[str, int]]) -> None:
    for prompt, (text, count) in zip(prompts, answers, strict=True):
        file.write(json.dumps({**prompt.row, "completion": text, "tokens": count}, ensure_ascii=False) + "\n")
    file.flush()


# -------------------- `megacompile chat`: a conversation in the terminal
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def chat(model: Any, tokenizer: Any, sampling: Sampling, system: str | None, ask: Callable[[], str],
         say: Callable[[str], object]) -> None:
    """Reads messages with `ask`, which raises `EOFError` at the end, and says the answers piece by piece with `say`."""
    encoder = PromptEncoder(tokenizer, raw=False)
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    encoder.of_messages([*first, {"role": "user", "content": "Hello"}])  # refused now, and not after the first message
    messages = list(first)
    torch.manual_seed(sampling.seed)
    say(f"{HELP}\n")
    while True:
        try:
            text = ask().strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(first)
        elif text:
            asked: list[Message] = [*messages, {"role": "user", "content": text}]
            prompt = encoder.of_messages(asked)
            try:
                how = sampling.arguments(model, tokenizer, len(prompt))
            except MegacompileError as error:
                say(f"{error}{', or forget the conversation with /reset' if messages != first else ''}\n")
                continue
            messages = [*asked, {"role": "assistant", "content": _answer(model, tokenizer, prompt, how, sampling, say)}]
            say("\n")


def _answer(model: Any, tokenizer: Any, prompt: list[int], how: Mapping[str, Any], sampling: Sampling,
            say: Callable[[str], object]) -> str:
    """The answer to a prompt of these tokens, shown while it is generated with the arguments `how`. Ctrl-C ends it early."""
    streamer = _Streamer(tokenizer, sampling, say)
    ids = torch.tensor([prompt], device=model.megacompile.streamed.backend.device)
    try:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, **how)
    except KeyboardInterrupt:
        streamer.end()
    return sampling.cut(streamer.text)


class _Streamer(TextStreamer):
    """Shows text as soon as it is known to belong to the answer. State: the `text` so far, and how much of it was shown."""

    def __init__(self, tokenizer: Any, sampling: Sampling, say: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text, self._said = "", 0
        self._sampling, self._say = sampling, say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        answer = self._sampling.cut(self.text) if stream_end else self._sampling.known(self.text)
        self._say(answer[self._said:])
        self._said = len(answer)
