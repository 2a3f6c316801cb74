"""Reads tools that a model may call (the column `tools`), and tool calls in messages, as objects for chat templates.

Data sets often write both as JSON within JSON. Most templates need objects, since they would quote a string again. Some add a
call's arguments to other text, and need its JSON.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megacompile.errors import MegacompileError

# --------------------
# A strict JSON parser: refuses repeated names in an object, unpaired surrogates, and nesting too deep for Python.
_SPACE = re.compile(r"[ \t\n\r]*")
#: An escaped surrogate. Two in a row encode a character beyond U+FFFF.
_HALF = re.compile(r"\\u[dD][89abcdefABCDEF]")


def parse(text: str) -> Any:
    """Parses a JSON text. Raises `ValueError` if it is not valid in this strict sense."""
    found, end = _value(text, _after_space(text, 0))
    if _after_space(text, end) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return found


def first(text: str) -> Any:
    """The first value of a text that may have more. Raises `ValueError` as `parse` does."""
    return _value(text, _after_space(text, 0))[0]


def items(text: str) -> Iterator[Any]:
    """The items of an array, parsed one by one, so that an error is raised for the item that has it. Raises `ValueError` as
    `parse` does."""
    index = _after_space(text, _after_space(text, 0) + 1)  # after the bracket
    more = text[index:index + 1] != "]"
    while more:
        found, index = _value(text, index)
        yield found
        index = _after_space(text, index)
        more = text[index:index + 1] == ","
        if more:
            index = _after_space(text, index + 1)
        elif text[index:index + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, index)
    if _after_space(text, index + 1) < len(text):
        raise json.JSONDecodeError("Extra data", text, index + 1)


def utf8(text: str) -> str:
    """Returns a text that was read with `errors="surrogateescape"`. Raises `ValueError` for its first byte that was not
    UTF-8."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"byte 0x{ord(text[error.start]) - 0xdc00:02x} after {error.start} characters is not "
                             "UTF-8") from None
    return text


def _after_space(text: str, index: int) -> int:
    found = _SPACE.match(text, index)
    assert found is not None, "the pattern matches an empty string"
    return found.end()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two values are named {twice[:60]!r}")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _value(text: str, index: int) -> tuple[Any, int]:
    """The value that begins at `index`, and the index of its end."""
    try:
        found, end = _DECODER.raw_decode(text, index)
        utf8(text[index:end])
        if _HALF.search(text, index, end):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"\\u{ord(error.object[error.start]):04x} is an unpaired surrogate") from None
    return found, end


class Arguments(dict[str, Any]):
    """A call's arguments as an object. `text`: their JSON, as it was in the row."""

    def __init__(self, found: Mapping[str, Any], text: str) -> None:
        super().__init__(found)
        self.text = text


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The column `tools` as a list of objects for `apply_chat_template`, or None if it is empty. The column may be a list of
    objects, JSON of such a list, or a list of JSON texts. Raises `MegacompileError` for anything else."""
    found = _decoded(row.get("tools"), "tools")
    if found in (None, "", []):
        return None
    tools = [_decoded(each, "a tool") for each in found] if isinstance(found, list) else [found]
    if not all(isinstance(each, Mapping) for each in tools):
        raise MegacompileError("tools must be a list of objects, or JSON of that")
    return tools


def call_of(text: str) -> dict[str, Any]:
    """Converts ShareGPT's `function_call`, JSON of one call or several, to a message of the assistant. Raises
    `MegacompileError` if it is not a call."""
    found = _decoded(text, "the function call")
    calls = found if isinstance(found, list) else [found]
    return {"role": "assistant", "content": "", "tool_calls": [with_arguments({"type": "function", "function": call})
                                                              for call in calls]}


def with_arguments(call: Any) -> Any:
    """The call with its arguments as an object. Raises `MegacompileError` if it is not a call."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MegacompileError("a tool call must be an object with the function's name and arguments")
    text = function.get("arguments")
    found = _decoded(text, "arguments")
    if isinstance(text, str) and isinstance(found, dict):
        found = Arguments(found, text)
    return _changed(call, found)


def as_text(call: Any) -> Any:
    """The call with its arguments as JSON, for templates that add them to other text."""
    found = arguments_of(call)
    if found is None or isinstance(found, str):
        return call
    return _changed(call, found.text if isinstance(found, Arguments) else json.dumps(found, ensure_ascii=False))


def arguments_of(call: Any) -> Any:
    return call.get("function", call).get("arguments")


def _changed(call: Any, arguments: Any) -> Any:
    changed = {**call.get("function", call), "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _decoded(value: Any, what: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise MegacompileError(f"{what} is text that is not JSON ({error})") from error
