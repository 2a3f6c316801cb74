"""Converts a conversation into token ids and determines which of them are learned: the assistant's."""
from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megacompile.corpus import SpecialTokens
from megacompile.errors import MegacompileError
from megacompile.finetuning.formats import TRAINED, Message
from megacompile.finetuning.tools import arguments_of, as_text

#: For tokenizers without a template, after the special tokens that the tokenizer puts before texts. It is saved with the
#: tokenizer, so that generation uses the prompts of training.
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ '### Assistant:\\n' + message.content + eos_token + '\\n\\n' }}
{%- elif message.role == 'system' -%}{{ message.content + '\\n\\n' }}
{%- else -%}{{ '### ' + message.role | capitalize + ':\\n' + message.content + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '### Assistant:\\n' }}{%- endif -%}"""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Stands for what was said before a message, where only the rendering of what follows is needed.
_BEFORE: Message = {"role": "user", "content": "."}


@dataclass(frozen=True)
class Encoded:
    """`tokens`: token ids; `learned`: for each token, whether it counts for the loss."""

    tokens: list[int]
    learned: list[bool]


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def readable(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
        """The messages in the form for the template: without `TRAINED`, and with the arguments of calls as text if the template
        needs that. Raises `MegacompileError` if the template refuses or ignores tools or calls that are given."""
        found = [{key: value for key, value in message.items() if key != TRAINED} for message in messages]
        calls = [call for message in found for call in message.get("tool_calls", ())]
        if not tools and not calls:
            return found
        if calls and self._needs_text(found, calls, tools):
            found = [{**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
                     if "tool_calls" in message else message for message in found]
        said = self.text(found, tools)
        silent = [{key: value for key, value in message.items() if key != "tool_calls"} for message in found]
        for what, others, tools_told in (("tools", found, None), ("tool calls", silent, tools)):
            if (others, tools_told) != (found, tools) and said == self._accepted(others, tools_told):
                raise MegacompileError(f"the chat template ignores {what}: use a tokenizer whose template supports them")
        return found

    def _needs_text(self, messages: Sequence[Message], calls: Sequence[Any], tools: Sequence[Any] | None) -> bool:
        """True if the template renders arguments of calls correctly only as text: it refuses objects, or writes them as Python
        does."""
        said = self._accepted(messages, tools)
        if said is None:
            return True
        objects = {str(found) for call in calls if isinstance(found := arguments_of(call), dict) and found}
        quoted = [str(message["content"]) for message in messages]
        return any(said.count(each) > sum(text.count(each) for text in quoted) for each in objects)

    def _accepted(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        """The text, or None if the template refuses the messages."""
        try:
            return self.text(messages, tools)
        except MegacompileError:
            return None

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, **options: Any) -> str:
        """The rendered messages. Raises `MegacompileError` if the template refuses them."""
        with _refusals():
            return str(self._tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, **options))

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text that the template has rendered, with its special tokens."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class ChatEncoder:
    """Encodes conversations with a tokenizer's chat template. Gives the tokenizer `PLAIN_TEMPLATE` if it has none. `unasked`:
    how many answers were not learned because they come before any message of a user, and the template has no such prompt.

    Raises `MegacompileError` if the tokenizer has neither a template nor an end-of-sequence token."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            if tokenizer.eos_token is None:
                raise MegacompileError("the tokenizer has neither a chat template nor an end-of-sequence token: set its "
                                       "chat_template or its eos_token, and save it again")
            before = "".join(tokenizer.convert_ids_to_tokens(SpecialTokens.of(tokenizer).before))
            begin = f"{{{{- {json.dumps(before, ensure_ascii=False)} -}}}}" if before else ""
            tokenizer.chat_template = begin + PLAIN_TEMPLATE
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        # Marks are character positions, which only fast tokenizers can map to tokens.
        self._marked = tokenizer.is_fast and bool(_MARKER.search(tokenizer.get_chat_template()))
        self.unasked = 0

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[Encoded]:
        """One sequence in which all answers are learned, except those with a false `TRAINED`. Some templates render an answer
        differently once another message follows, for example without its reasoning; then there are several sequences, and each
        answer is learned after the prompt that the model would get for it.

        `tools`: the tools that the template may describe to the model. Raises `MegacompileError` if the template refuses the
        conversation or leaves out a part of it, or if answers cannot be separated from prompts."""
        heard = self._template.readable(messages, tools)
        if self._marked:
            return [self._by_marks(heard, tools, [message.get(TRAINED, True) for message in messages
                                                  if message["role"] == "assistant"])]
        learned = [number for number, message in enumerate(messages)
                   if message["role"] == "assistant" and message.get(TRAINED, True)]
        if 0 in learned:
            raise MegacompileError("the first message is the assistant's: put a message of the user before it")
        joined = self._joined(heard, tools, learned)
        return [joined] if joined is not None else self._apart(heard, tools, learned)

    def _by_marks(self, messages: Sequence[Message], tools: Sequence[Any] | None, wanted: Sequence[bool]) -> Encoded:
        """One sequence, learned where the template marks answers. `wanted`: for each answer, whether it is learned."""
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = self._tokenizer
        with _refusals():
            (text,), (marks,) = render_jinja_template(
                conversations=[list(messages)], tools=tools, chat_template=tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True, **tokenizer.special_tokens_map)
        if not all(wanted):
            if len(marks) != len(wanted):
                raise MegacompileError(f"the chat template marks {len(marks)} texts in a conversation with {len(wanted)} "
                                       "answers, so those that are not to be learned cannot be found: put one {% generation %} "
                                       "block around each answer")
            marks = [mark for mark, learned in zip(marks, wanted, strict=True) if learned]
        found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        # The tokenizer's own mask is wrong if a mark ends in a space that offsets leave out: it then extends to the end of the
        # text.
        marks = [(start, end) for start, end in marks if start < end]
        ends = [end for _, end in marks]
        learned = []
        for first, last in found["offset_mapping"]:
            index = bisect_right(ends, first)  # the first mark that ends after the token's beginning
            learned.append(index < len(marks) and marks[index][0] < max(last, first + 1))
        if not any(learned):
            raise MegacompileError("the chat template marks no text as generated: fix its {% generation %} blocks")
        return Encoded(list(found["input_ids"]), learned)

    def _joined(self, messages: Sequence[Message], tools: Sequence[Any] | None, answers: Sequence[int]) -> Encoded | None:
        """One sequence up to the last of these answers, in time linear in its length; None if the template renders an answer
        differently once others follow.

        Only the first prompt and the last are rendered whole. Every other answer is located in a short conversation, after the
        answer before it. That the parts add up to the whole is checked."""
        whole = self._answer(messages[:answers[-1] + 1], tools)
        if len(answers) == 1:
            return whole
        first, asked = answers[0], True
        try:
            parts = [self._answer(messages[:first + 1], tools)]
        except MegacompileError:  # the template has no prompt there
            parts, asked = [], False
        if parts and whole.tokens[:len(parts[0].tokens)] != parts[0].tokens:
            return None
        try:
            if not parts:
                parts = [self._after([*messages[:first], _BEFORE], [messages[first]], tools)]
            parts += [self._after([_BEFORE, messages[before]], messages[before + 1:number + 1])
                      for before, number in pairwise(answers)]
        except MegacompileError:
            return None
        tokens = [token for part in parts for token in part.tokens]
        unread = len(whole.tokens) - len(tokens)  # what comes before the first answer, if it has no prompt
        if unread < 0 or (asked and unread) or whole.tokens[unread:] != tokens:
            return None
        return Encoded(whole.tokens, [False] * unread + [learned for part in parts for learned in part.learned])

    def _after(self, start: Sequence[Message], more: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """The text that the last message of a conversation and the messages `more` before it add to its `start`."""
        before, found = self._template.tokens(self._template.text(start, tools)), self._answer([*start, *more], tools)
        if found.tokens[:len(before)] != before:
            raise MegacompileError("the chat template renders messages differently once others follow")
        return Encoded(found.tokens[len(before):], found.learned[len(before):])

    def _apart(self, messages: Sequence[Message], tools: Sequence[Any] | None, answers: Sequence[int]) -> list[Encoded]:
        """A sequence for each of these answers, without those that the next one begins with."""
        found: list[Encoded] = []
        for number in answers:
            try:
                answer = self._answer(messages[:number + 1], tools)
            except MegacompileError:
                if number == answers[-1] or any(message["role"] == "user" for message in messages[:number]):
                    raise
                self.unasked += 1
                continue
            if found and answer.tokens[:len(found[-1].tokens)] == found[-1].tokens:
                before = found.pop().learned
                answer.learned[:len(before)] = before
            found.append(answer)
        return found

    def _answer(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Encoded:
        """Encodes messages of which the last one is learned. The prompt has exactly the tokens that it has in generation."""
        template = self._template
        prompt, text = template.text(messages[:-1], tools, add_generation_prompt=True), template.text(messages, tools)
        if not text.startswith(prompt):
            raise MegacompileError("the chat template does not begin an answered conversation with its prompt, so answers "
                                   "cannot be located: mark them in the template with {% generation %}")
        start, tokens = template.tokens(prompt), template.tokens(text)
        if tokens[:len(start)] != start:  # a token spans the boundary
            apart = start + template.tokens(text[len(prompt):])
            if self._tokenizer.decode(apart) != self._tokenizer.decode(tokens):
                raise MegacompileError("the tokenizer merges the prompt with the answer, so answers cannot be located: mark "
                                       "them in the chat template with {% generation %}")
            tokens = apart
        end = self._tokenizer.eos_token_id
        ends = [index for index in range(len(start), len(tokens)) if tokens[index] == end]
        learned_until = ends[-1] + 1 if ends else len(tokens)  # nothing is generated after the end token
        return Encoded(tokens, [len(start) <= index < learned_until for index in range(len(tokens))])


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # templates, and operations on unsuitable values, may raise anything
        raise MegacompileError(f"the chat template refuses the conversation ({error}): correct it, or use another "
                               "template") from error
