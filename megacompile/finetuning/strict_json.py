"""A strict JSON parser: refuses repeated names in an object, unpaired surrogates, and nesting too deep for Python."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

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
