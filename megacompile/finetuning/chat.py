"""A conversation -> token ids, and which of them are learnt: the assistant's, as the chat template marks or shows them."""
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.finetuning.formats import Message

#: Of tokenizers without a template. It is saved with the tokenizer, so that whoever generates prompts as it was trained.
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
    """`tokens`: ids; `learnt`: of each, whether the model learns to say it."""

    tokens: list[int]
    learnt: list[bool]


class ChatEncoder:
    """Encodes conversations by a tokenizer's chat template; gives the tokenizer `PLAIN_TEMPLATE` if it has none.

    Raises `MegacompileError` if it has no end-of-sequence token either."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            if tokenizer.eos_token is None:
                raise MegacompileError("the tokenizer has neither a chat template nor an end-of-sequence token: set its "
                                       "chat_template or its eos_token, and save it again")
            tokenizer.chat_template = PLAIN_TEMPLATE
        self._tokenizer = tokenizer
        # Marks are characters, which only fast tokenizers can find again.
        self._marked = tokenizer.is_fast and bool(_MARKER.search(tokenizer.get_chat_template()))

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Encoded]:
        """One sequence in which all answers are learnt; or several, where what a template makes of an answer changes once more
        follows (where it leaves out earlier thoughts): then each answer is learnt behind what the model would be given for it.

        `tools` are what the template may tell the model of. Raises `MegacompileError` for a conversation that the template
        refuses, or of which it says only a part, or whose answers cannot be told from prompts."""
        self._check_heard(messages, tools)
        if self._marked:
            return [self._by_marks(messages, tools)]
        found: list[Encoded] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise MegacompileError("the first message is the assistant's: an answer needs something before it")
            last, answer = found[-1] if found else Encoded([], []), self._answer(messages[:number + 1], tools)
            if found and answer.tokens[:len(last.tokens)] == last.tokens:
                answer.learnt[:len(last.learnt)] = last.learnt
                found.pop()
            found.append(answer)
        return found

    def _check_heard(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Raises `MegacompileError` where the template says nothing of tools, or of calls of them."""
        if not tools and not any("tool_calls" in message for message in messages):
            return
        silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        said = self._text(messages, tools)
        if tools and said == self._text(messages, None):
            raise MegacompileError("the chat template says nothing of tools: take a tokenizer whose template does")
        if silent != list(messages) and said == self._text(silent, tools):
            raise MegacompileError("the chat template says nothing of tool calls: take a tokenizer whose template does")

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
        # Not the tokenizer's own mask: it runs on to the end of the text where a mark ends in a space that offsets leave out.
        learnt = [any(first < end and max(last, first + 1) > start for start, end in marks)
                  for first, last in found["offset_mapping"]]
        if not any(learnt):
            raise MegacompileError("the chat template marks nothing of it as generated: fix its {% generation %} blocks")
        return Encoded(list(found["input_ids"]), learnt)

    def _answer(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Encoded:
        """Messages of which the last is learnt. The prompt has the very tokens that it would have in generation."""
        prompt, text = self._text(messages[:-1], tools, add_generation_prompt=True), self._text(messages, tools)
        if not text.startswith(prompt):
            raise MegacompileError("the chat template does not begin an answered conversation with its prompt, so that answers "
                                   "cannot be told: mark them in it with {% generation %}")
        start, tokens = self._tokens(prompt), self._tokens(text)
        if tokens[:len(start)] != start:  # a token would reach over the border
            apart = start + self._tokens(text[len(prompt):])
            if self._tokenizer.decode(apart) != self._tokenizer.decode(tokens):
                raise MegacompileError("the tokenizer joins prompt and answer, so that answers cannot be told: mark them in "
                                       "the chat template with {% generation %}")
            tokens = apart
        end = self._tokenizer.eos_token_id
        ends = [place for place in range(len(start), len(tokens)) if tokens[place] == end]
        learnt_until = ends[-1] + 1 if ends else len(tokens)  # nothing is generated behind the end
        return Encoded(tokens, [len(start) <= place < learnt_until for place in range(len(tokens))])

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@contextmanager
def _refusals() -> Iterator[None]:
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, TypeError) as error:  # what a template raises, and what it cannot do with the values
        raise MegacompileError(f"the chat template refuses it ({error})") from error
