"""Prompts from files: rows with a `prompt`, a conversation or an instruction; or the lines of a text file."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megacompile.corpus import SpecialTokens
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.chat import ChatTemplate
from megacompile.finetuning.data_files import files_of, is_text, placed, read_lines, read_rows
from megacompile.finetuning.formats import Message, prompt_of
from megacompile.finetuning.tools import tools_of


@dataclass(frozen=True)
class Prompt:
    """`row`: as it is in the file. `tokens`: token ids."""

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
        """The tokens of a conversation that the assistant answers. Raises `MegacompileError` if the template refuses it or
        leaves out a part of it."""
        if self._tokenizer.chat_template is None:
            raise MegacompileError("the tokenizer has no chat template: give prompts as text (a column prompt), or a tokenizer "
                                   "that has one (--tokenizer)")
        heard = self._template.readable(messages, tools)
        return self._checked(self._template.tokens(self._template.text(heard, tools, add_generation_prompt=True)))

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise MegacompileError("the prompt is empty: write some text, or remove the row")
        return list(tokens)
