"""Tools: what a model may call (the column `tools`), and calls in messages, in the form that chat templates read.

Data sets write both as JSON within JSON, templates want objects: a string would be quoted once more.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megacompile.errors import MegacompileError
from megacompile.finetuning import strict_json


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The column `tools`, as `apply_chat_template` takes it: a list of objects, or that as JSON, or a list of JSON texts. None
    where there are none. Raises `MegacompileError` for anything else."""
    found = _decoded(row.get("tools"), "tools")
    if found in (None, "", []):
        return None
    tools = [_decoded(each, "a tool") for each in found] if isinstance(found, list) else [found]
    if not all(isinstance(each, Mapping) for each in tools):
        raise MegacompileError("tools must be a list of objects, or JSON of that")
    return tools


def call_of(text: str) -> dict[str, Any]:
    """ShareGPT's `function_call`, JSON of a call or of several -> the assistant's message. Raises `MegacompileError`."""
    found = _decoded(text, "the function call")
    calls = found if isinstance(found, list) else [found]
    return {"role": "assistant", "content": "", "tool_calls": [with_arguments({"type": "function", "function": call})
                                                              for call in calls]}


def with_arguments(call: Any) -> Any:
    """A call whose arguments are an object. Raises `MegacompileError` for what is no call."""
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
        raise MegacompileError(f"{what} is a text and no JSON ({error})") from error
