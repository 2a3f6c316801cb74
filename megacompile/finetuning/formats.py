"""Converts a row of a data set into the messages of a conversation, or a text. Invalid rows are refused with the reason."""
from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from megacompile.errors import MegacompileError, listed
from megacompile.finetuning.tools import call_of, with_arguments

Row = Mapping[str, Any]
#: A message: `role`, `content`, and other keys that a chat template may read.
Message = dict[str, Any]

#: Maps the speakers of ShareGPT to the roles of chat templates.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
         "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool"}
#: ShareGPT's speaker for function calls, whose text is JSON.
_CALLS = "function_call"
#: In a message that is not learned: False. Chat templates do not see it.
TRAINED = "train"
#: Keys by which data sets of other trainers say whether a message is learned: 1 or true, 0 or false.
_LEARNED = (TRAINED, "training", "trainable", "loss", "loss_mask", "step_loss_mask", "loss_scale", "loss_weight", "weight")
#: Columns that cannot be expressed as text. A row in which one of them is not empty is refused.
_UNHEARD = ("history", "images", "image", "videos", "audios", "documents")
#: Columns of rows with two answers, and the column of rows that says whether their answer is good (KTO).
_PREFERENCES, _VERDICT = ("chosen", "rejected"), "label"


class Format(enum.StrEnum):
    """The format of a data set. By default the first format whose columns all exist."""

    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    TEXT = "text"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the format requires."""
        return _COLUMNS[self]


_COLUMNS = {Format.MESSAGES: ("messages",), Format.SHAREGPT: ("conversations",), Format.ALPACA: ("instruction", "output"),
            Format.TEXT: ("text",)}


def detect(row: Row) -> Format:
    """The format of a row with these columns; additional columns are ignored. Conversations take precedence over texts, since
    some data sets repeat the conversation as a text.

    Raises `MegacompileError` if no format fits, or two formats of conversations, and for rows that another trainer learns
    from."""
    there = set(row)
    if there.issuperset(_PREFERENCES):
        raise MegacompileError(f"the columns {' and '.join(_PREFERENCES)} hold preferences: add --task dpo")
    if isinstance(row.get(_VERDICT), bool):
        raise MegacompileError(f"the column {_VERDICT} says of each answer whether it is good, and all of them would be "
                               f"learned: add --task kto, or keep only the good rows, without the column {_VERDICT}")
    fitting = [each for each in Format if there.issuperset(each.columns)]
    chats = [each for each in fitting if each is not Format.TEXT]
    if len(chats) > 1:
        raise MegacompileError(f"the columns fit {' and '.join(chats)}: choose one with --format")
    if not fitting:
        known = "; ".join(f"{each} ({', '.join(each.columns)})" for each in Format)
        raise MegacompileError(f"the columns {', '.join(sorted(there)) or '(none)'} fit no format: rename them to match one of "
                               f"{known}{inner_rows(row)}")
    return fitting[0]


def inner_rows(row: Row) -> str:
    """The remedy if an object is not a row, but holds the rows under a key. Empty if it does not look like that."""
    key = next((key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)), None)
    return "" if key is None else f"; if the rows are those under the key {key}, keep only that array"


def text_of(row: Row) -> str:
    return _string(row, "text")


def messages_of(row: Row, format: Format) -> list[Message]:
    """The messages of a conversation, at least one of them by the assistant. A column `system` becomes the first message.
    Raises `MegacompileError` with the reason if the row is invalid."""
    _refuse_unwanted(row)
    messages = _read(row, _READERS[format])
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = listed(sorted({str(message["role"]) for message in messages}))
        raise MegacompileError(f"no message is by the assistant (roles: {roles}), so there is nothing to learn: add one, or "
                               "remove the row")
    if not any(message.get(TRAINED, True) for message in answers):
        raise MegacompileError("the row says of every message by the assistant that it is not to be learned, so there is "
                               "nothing to learn: remove the row")
    return messages


def _refuse_unwanted(row: Row) -> None:
    """Raises `MegacompileError` for a row that is marked as not to be learned."""
    if str(row.get(_VERDICT)).lower() == "false":
        raise MegacompileError(f"{_VERDICT} is false, so the answer is one to avoid: add --task kto, or keep only the good "
                               "rows")
    unwanted = next((key for key in _LEARNED if str(row.get(key)).lower() in ("0", "0.0", "false")), None)
    if unwanted is not None:
        raise MegacompileError(f"{unwanted} is {row[unwanted]}, so the row is not to be learned: remove it, or rename the "
                               "column if it means something else")


def prompt_of(row: Row) -> list[Message]:
    """The messages of a row that an answer follows: a `prompt` (text, or messages), a conversation without the answers at its
    end, or an instruction, whose `output` is not read. A column `system` becomes the first message. Raises `MegacompileError`
    with the reason if the row has none, or is invalid."""
    asked = row.get("prompt")
    if isinstance(asked, list):
        row = {**row, "messages": asked}
        asked = None
    elif asked is None:
        asked = row.get("question")
    if isinstance(asked, str):
        return _read(row, lambda _: [{"role": "user", "content": asked}])
    reader = next((_PROMPT_READERS[column] for column in _PROMPT_READERS if row.get(column) is not None), None)
    messages = [] if reader is None else _read(row, reader)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise MegacompileError("the row has no prompt: give it a column prompt (text), messages (a list of objects with role "
                               "and content) or instruction")
    return messages


def said_by(row: Row, column: str) -> list[Message]:
    """The messages in a column: a list of them in either spelling, one message, or a text, which is the assistant's. Raises
    `MegacompileError` with the reason if it is missing or invalid."""
    value = row.get(column)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    messages = [value] if isinstance(value, Mapping) else _list(row, column)
    try:
        sharegpt = isinstance(messages[0], Mapping) and "from" in messages[0]
        return _sharegpt({"conversations": messages}) if sharegpt else _messages({"messages": messages})
    except MegacompileError as error:
        raise MegacompileError(f"{column}: {error}") from error


def _read(row: Row, reader: Callable[[Row], list[Message]]) -> list[Message]:
    """The messages that a reader finds, after that of a column `system`."""
    if lost := next((column for column in _UNHEARD if row.get(column) not in (None, "", [], {})), None):
        raise MegacompileError(f"{lost} is not empty, but would be ignored: put it into messages, or leave the column out")
    messages = reader(row)
    if row.get("system"):
        if messages[0]["role"] == "system":
            raise MegacompileError("there is both a column system and a first message by the system: leave one out")
        messages.insert(0, {"role": "system", "content": _string(row, "system")})
    return messages


def _alpaca(row: Row) -> list[Message]:
    return [*_instruction(row), {"role": "assistant", "content": _string(row, "output")}]


def _instruction(row: Row) -> list[Message]:
    instruction = _string(row, "instruction")
    given = _string(row, "input") if row.get("input") is not None else ""
    return [{"role": "user", "content": f"{instruction}\n\n{given}" if given.strip() else instruction}]


def _sharegpt(row: Row) -> list[Message]:
    messages = []
    for number, each in enumerate(_list(row, "conversations"), start=1):
        try:
            speaker = _string(each, "from")
            if speaker not in (*ROLES, _CALLS):
                raise MegacompileError(f"from is {speaker!r}, but must be one of {', '.join((*ROLES, _CALLS))}")
            text = _text(each, "value")
            message = call_of(text) if speaker == _CALLS else {"role": ROLES[speaker], "content": text}
            messages.append(message | _trained(message["role"], each))
        except MegacompileError as error:
            raise MegacompileError(f"message {number}: {error}") from error
    return messages


def _messages(row: Row) -> list[Message]:
    messages = []
    for number, each in enumerate(_list(row, "messages"), start=1):
        try:
            named: Message = {"role": _string(each, "role")}
            calls = each.get("tool_calls")
            if calls:  # then content may be missing
                named["tool_calls"] = [with_arguments(call) for call in _list(each, "tool_calls")]
            named["content"] = "" if calls and each.get("content") in (None, []) else _text(each, "content")
            named |= _trained(named["role"], each)
        except MegacompileError as error:
            raise MegacompileError(f"message {number}: {error}") from error
        # Some data sets give every message every key, so empty ones are left out. The chat template may read the others.
        heard = {key: value for key, value in each.items() if value not in (None, []) and key not in _LEARNED}
        messages.append(heard | named)
    return messages


def _trained(role: str, each: Row) -> Message:
    """`TRAINED`, if an answer is not to be learned. Raises `MegacompileError` if only a part of it is, or if it has a weight
    between."""
    if role != "assistant":  # never learned
        return {}
    if each.get("train_detail"):
        raise MegacompileError("train_detail is not empty, but parts of a message cannot be left out: leave it out, or write "
                               "train: false to leave out the whole message")
    learned = [_is_learned(each, key) for key in _LEARNED if each.get(key) is not None]
    return {} if all(learned) else {TRAINED: False}


def _is_learned(each: Row, key: str) -> bool:
    """True if the value of the key means yes. Raises `MegacompileError` unless it means yes or no."""
    value = each[key]
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        raise MegacompileError(f"{key} is {value!r}, but must be 1 or true (learned), or 0 or false (not learned)")
    return bool(value)


_READERS: dict[Format, Callable[[Row], list[Message]]] = {
    Format.ALPACA: _alpaca, Format.SHAREGPT: _sharegpt, Format.MESSAGES: _messages}
#: By the column that a prompt is read from.
_PROMPT_READERS: dict[str, Callable[[Row], list[Message]]] = {
    "messages": _messages, "conversations": _sharegpt, "instruction": _instruction}
#: Columns that may hold a prompt.
PROMPT_COLUMNS = ("prompt", "question", *_PROMPT_READERS)


def _string(row: Any, column: str) -> str:
    if not isinstance(row, Mapping):
        raise MegacompileError(f"is of type {type(row).__name__}, not an object with {column}")
    value = row.get(column)
    if value is None:
        raise MegacompileError(f"{column} is missing")
    if not isinstance(value, str):
        raise MegacompileError(f"{column} is of type {type(value).__name__}, not text")
    return value


def _text(row: Any, column: str) -> str:
    """A text, or the parts of one: [{"type": "text", "text": ...}, ...]."""
    parts = row.get(column) if isinstance(row, Mapping) else None
    if not isinstance(parts, list) or not parts:
        return _string(row, column)
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = f"of type {part.get('type')!r}" if isinstance(part, Mapping) else f"a {type(part).__name__}"
            raise MegacompileError(f"{column} has a part that is {kind}, but only parts of type 'text' can be read: "
                                   "leave it out")
    return "".join(_string(part, "text") for part in parts)


def _list(row: Row, column: str) -> list[Any]:
    value = row.get(column)
    if not isinstance(value, list) or not value:
        what = "missing" if value is None else "empty" if value == [] else f"a {type(value).__name__}, not a list of messages"
        raise MegacompileError(f"{column} is {what}")
    return value
