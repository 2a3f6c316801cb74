"""Reads tools that a model may call (the column `tools`), and tool calls in messages, as objects for chat templates.

Data sets often write both as JSON within JSON. Templates need objects, since they would quote a string again.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.finetuning import strict_json


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
    decoded = {**function, "arguments": _decoded(function.get("arguments"), "arguments")}
    return {**call, "function": decoded} if "function" in call else decoded


def _decoded(value: Any, what: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return strict_json.parse(value)
    except ValueError as error:
        raise MegacompileError(f"{what} is text that is not JSON ({error})") from error
