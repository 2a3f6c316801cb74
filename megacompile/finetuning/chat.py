"""Converts a conversation into token ids and determines which of them are learned: the assistant's."""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.finetuning.formats import Message

#: For tokenizers without a template. It is saved with the tokenizer, so that generation uses the prompts of training.
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ '### Assistant:\\n' + message.content + eos_token + '\\n\\n' }}
{%- elif message.role == 'system' -%}{{ message.content + '\\n\\n' }}
{%- else -%}{{ '### ' + message.role | capitalize + ':\\n' + message.content + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### Assistant:\\n' }}{%- endif -%}"""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """`tokens`: token ids; `learned`: for each token, whether it counts for the loss."""

    tokens: list[int]
    learned: list[bool]


class ChatEncoder:
    """Encodes conversations with a tokenizer's chat template. Gives the tokenizer `PLAIN_TEMPLATE` if it has none.

    Raises `MegacompileError` if the tokenizer has neither a template nor an end-of-sequence token."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            if tokenizer.eos_token is None:
                raise MegacompileError("the tokenizer has neither a chat template nor an end-of-sequence token: set its "
                                       "chat_template or its eos_token, and save it again")
            tokenizer.chat_template = PLAIN_TEMPLATE
        self._tokenizer = tokenizer
        # Marks are character positions, which only fast tokenizers can map to tokens.
        self._marked = tokenizer.is_fast and bool(_MARKER.search(tokenizer.get_chat_template()))

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Encoded]:
        """One sequence in which all answers are learned. Some templates render an answer differently once another message
        follows, for example without its reasoning; then there are several sequences, and each answer is learned after the
        prompt that the model would get for it.

        `tools`: the tools that the template may describe to the model. Raises `MegacompileError` if the template refuses the
        conversation or leaves out a part of it, or if answers cannot be separated from prompts."""
        self._check_heard(messages, tools)
        if self._marked:
            return [self._by_marks(messages, tools)]
        found: list[Encoded] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise MegacompileError("the first message is the assistant's: put a message of the user before it")
            last, answer = found[-1] if found else Encoded([], []), self._answer(messages[:number + 1], tools)
            if found and answer.tokens[:len(last.tokens)] == last.tokens:
                answer.learned[:len(last.learned)] = last.learned
                found.pop()
            found.append(answer)
        return found

    def _check_heard(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Raises `MegacompileError` if the template ignores tools or tool calls that the conversation has."""
        if not tools and not any("tool_calls" in message for message in messages):
            return
        silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        said = self._text(messages, tools)
        if tools and said == self._text(messages, None):
            raise MegacompileError("the chat template ignores tools: use a tokenizer whose template supports them")
        if silent != list(messages) and said == self._text(silent, tools):
            raise MegacompileError("the chat template ignores tool calls: use a tokenizer whose template supports them")

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any) -> str:
        with _refusals():
            return str(self._tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, **options))

    def _by_marks(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Encoded:
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer
        with _refusals():
            (text,), (marks,) = render_jinja_template(
                conversations=[list(messages)], tools=tools, chat_template=tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True, **tokenizer.special_tokens_map)
        found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        # The tokenizer's own mask is wrong if a mark ends in a space that offsets leave out: it then extends to the end of the
        # text.
        learned = [any(first < end and max(last, first + 1) > start for start, end in marks)
                  for first, last in found["offset_mapping"]]
        if not any(learned):
            raise MegacompileError("the chat template marks no text as generated: fix its {% generation %} blocks")
        return Encoded(list(found["input_ids"]), learned)

    def _answer(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Encoded:
        """Encodes messages of which the last one is learned. The prompt has exactly the tokens that it has in generation."""
        prompt, text = self._text(messages[:-1], tools, add_generation_prompt=True), self._text(messages, tools)
        if not text.startswith(prompt):
            raise MegacompileError("the chat template does not begin an answered conversation with its prompt, so answers "
                                   "cannot be located: mark them in the template with {% generation %}")
        start, tokens = self._tokens(prompt), self._tokens(text)
        if tokens[:len(start)] != start:  # a token spans the boundary
            apart = start + self._tokens(text[len(prompt):])
            if self._tokenizer.decode(apart) != self._tokenizer.decode(tokens):
                raise MegacompileError("the tokenizer merges the prompt with the answer, so answers cannot be located: mark "
                                       "them in the chat template with {% generation %}")
            tokens = apart
        end = self._tokenizer.eos_token_id
        ends = [index for index in range(len(start), len(tokens)) if tokens[index] == end]
        learned_until = ends[-1] + 1 if ends else len(tokens)  # nothing is generated after the end token
        return Encoded(tokens, [len(start) <= index < learned_until for index in range(len(tokens))])

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@contextmanager
def _refusals() -> Iterator[None]:
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, TypeError) as error:  # raised by the template, or by an operation on unsuitable values
        raise MegacompileError(f"the chat template refuses the conversation ({error}): correct it, or use another "
                               "template") from error
