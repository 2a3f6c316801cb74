"""Reads the text of a program from a string, a file or standard input."""
from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from megacompile.errors import MegacompileError
from megacompile.limits import LONGEST_TEXT


def source_text(source: str | Path | TextIO) -> str:
    """The text, or the contents of the file: a string of one line is a file name. Raises `MegacompileError`."""
    if isinstance(source, str) and ("\n" in source or not source):
        return source
    try:
        # Some editors put a byte order mark in front.
        with Path(source).open(encoding="utf-8-sig") if isinstance(source, str | Path) else nullcontext(source) as file:
            text = file.read(LONGEST_TEXT + 1)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise MegacompileError(f"the program cannot be read: {error}") from None
    if len(text) > LONGEST_TEXT:
        raise MegacompileError(f"the program cannot be read: it has more than {LONGEST_TEXT:,} characters")
    return text
