"""Reads tools that a model may call (the column `tools`), and tool calls in messages, as objects for chat templates.

Data sets often write both as JSON within JSON. Most templates need objects, since they would quote a string again. Some add a
call's arguments to other text, and need its JSON.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.finetuning import strict_json


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
        return strict_json.parse(value)
    except ValueError as error:
        raise MegacompileError(f"{what} is text that is not JSON ({error})") from error
