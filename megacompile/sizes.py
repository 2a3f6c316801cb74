"""Parses and formats amounts of memory, such as "24GiB"."""
from __future__ import annotations

import re

from megacompile.errors import MegacompileError, shortened
from megacompile.limits import LARGEST_NUMBER

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


def parse_bytes(size: int | float | str | None) -> int | None:
    """Bytes from a number or from text with a unit, such as "24GiB"; None for None. Raises `MegacompileError` for other values,
    and for amounts below 1 byte or above `LARGEST_NUMBER`."""
    if size is None:
        return None
    written = str(min(size, LARGEST_NUMBER + 1) if isinstance(size, int) else size)  # Python refuses to print 5,000 digits
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", written)
    count = float(match[1]) * _UNITS.get(match[2].upper(), 0) if match is not None else 0
    if not 1 <= count <= LARGEST_NUMBER:
        raise MegacompileError(f"{shortened(written, 80)!r} is not an amount of memory: write bytes, or a number and a unit "
                               "like '24GiB'")
    return int(count)


def format_bytes(count: int) -> str:
    """A readable amount: 1536 -> "1.50 KiB"."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.2f} {units[0]}" if units[0] != "B" else f"{count} B"
