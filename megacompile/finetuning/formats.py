"""A row of a data set -> the messages of a conversation, or a text. What does not fit is refused with the reason."""
from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.finetuning.tools import call_of, with_arguments

Row = Mapping[str, Any]
#: `{"role", "content"}`, and whatever else a chat template may read.
Message = dict[str, Any]

#: Who speaks, in the words of ShareGPT and in those of chat templates.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
         "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool"}
#: ShareGPT's speaker whose words are JSON of calls.
_CALLS = "function_call"
#: Columns of what a conversation is about, which text alone cannot say: a row that has something there is refused.
_UNHEARD = ("history", "images", "image", "videos", "audios", "documents")


class Format(enum.StrEnum):
    """How a data set is written down. The first whose columns are all there is taken, unless it is told."""

    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    TEXT = "text"

    @property
    def columns(self) -> tuple[str, ...]:
        """Those that it cannot do without."""
        return _COLUMNS[self]


_COLUMNS = {Format.MESSAGES: ("messages",), Format.SHAREGPT: ("conversations",), Format.ALPACA: ("instruction", "output"),
            Format.TEXT: ("text",)}


def detect(columns: Iterable[str]) -> Format:
    """The format that these columns are of; other columns are not read. Conversations go before texts: some data sets have
    both, where the text is the conversation again. Raises `MegacompileError` where none fits, or two kinds of conversation."""
    there = set(columns)
    fitting = [each for each in Format if there.issuperset(each.columns)]
    chats = [each for each in fitting if each is not Format.TEXT]
    if len(chats) > 1:
        raise MegacompileError(f"the columns fit {' and '.join(chats)}: say which with --format")
    if not fitting:
        known = "; ".join(f"{each} ({', '.join(each.columns)})" for each in Format)
        raise MegacompileError(f"the columns {', '.join(sorted(there)) or '(none)'} fit no format: rename them to those of "
                               f"{known}")
    return fitting[0]


def text_of(row: Row) -> str:
    return _string(row, "text")


def messages_of(row: Row, format: Format) -> list[Message]:
    """The messages of a conversation, at least one of them by the assistant; a column `system` goes before them. Raises
    `MegacompileError` with the reason."""
    if lost := next((column for column in _UNHEARD if row.get(column) not in (None, "", [], {})), None):
        raise MegacompileError(f"{lost} is not empty, and would be lost: write it into messages, or leave the column out")
    messages = _READERS[format](row)
    if row.get("system"):
        if messages[0]["role"] == "system":
            raise MegacompileError("both the column system and the first message are the system's: leave one out")
        messages.insert(0, {"role": "system", "content": _string(row, "system")})
    if not any(message["role"] == "assistant" for message in messages):
        raise MegacompileError("no message is the assistant's, so that there is nothing to learn")
    return messages


def _alpaca(row: Row) -> list[Message]:
    instruction, answer = _string(row, "instruction"), _string(row, "output")
    given = _string(row, "input") if row.get("input") is not None else ""
    asked = f"{instruction}\n\n{given}" if given.strip() else instruction
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _sharegpt(row: Row) -> list[Message]:
    messages = []
    for number, each in enumerate(_list(row, "conversations"), start=1):
        try:
            speaker = _string(each, "from")
            if speaker == _CALLS:
                messages.append(call_of(_string(each, "value")))
                continue
            if speaker not in ROLES:
                raise MegacompileError(f"from is {speaker!r}, which is none of {', '.join((*ROLES, _CALLS))}")
            messages.append({"role": ROLES[speaker], "content": _string(each, "value")})
        except MegacompileError as error:
            raise MegacompileError(f"message {number}: {error}") from error
    return messages


def _messages(row: Row) -> list[Message]:
    messages = []
    for number, each in enumerate(_list(row, "messages"), start=1):
        try:
            named: Message = {"role": _string(each, "role")}
            calls = each.get("tool_calls")
            if calls:  # then there may be nothing said
                named["tool_calls"] = [with_arguments(call) for call in _list(each, "tool_calls")]
            named["content"] = "" if calls and each.get("content") is None else _string(each, "content")
        except MegacompileError as error:
            raise MegacompileError(f"message {number}: {error}") from error
        # Parquet has every key in every message. What else there is, the chat template may read.
        messages.append({key: value for key, value in each.items() if value not in (None, [])} | named)
    return messages


_READERS: dict[Format, Callable[[Row], list[Message]]] = {
    Format.ALPACA: _alpaca, Format.SHAREGPT: _sharegpt, Format.MESSAGES: _messages}


def _string(row: Any, column: str) -> str:
    if not isinstance(row, Mapping):
        raise MegacompileError(f"is a {type(row).__name__}, not an object with {column}")
    value = row.get(column)
    if value is None:
        raise MegacompileError(f"{column} is missing")
    if not isinstance(value, str):
        raise MegacompileError(f"{column} is a {type(value).__name__}, not text")
    return value


def _list(row: Row, column: str) -> list[Any]:
    value = row.get(column)
    if not isinstance(value, list) or not value:
        what = "missing" if value is None else "empty" if value == [] else f"a {type(value).__name__}, not a list of messages"
        raise MegacompileError(f"{column} is {what}")
    return value
