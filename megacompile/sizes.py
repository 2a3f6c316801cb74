"""Sizes as text, and the largest values that options and configs may have."""
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from megacompile.errors import ArgumentError, MegacompileError, shortened

# -------------------- Parses and formats amounts of memory, such as "24GiB"
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


# -------------------- Upper limits for numbers in options and in the text of programs
#
# A larger number is a mistake, which would otherwise use up all memory, or hours, before it fails.
#: A name must have fewer characters.
LONGEST_NAME = 1024
#: Limit for counts that `LARGEST` does not name.
LARGEST_COUNT = 1 << 24
#: Limit for all other numbers, such as bytes and parameters.
LARGEST_NUMBER = 2**63 - 1
#: Limit for the characters of a program. A program for 1,000 layers and 100 micro-batches has a tenth as many.
LONGEST_TEXT = 1 << 29

_SEQUENCES, _TOKENS, _LAYERS = 1 << 20, 1 << 24, 1 << 16
#: A program has several nodes for each call and micro-batch; this many take minutes to compile.
MOST_MICRO_BATCHES = 1 << 14
_BUFFERS = 1 << 12
LARGEST: Mapping[str, int] = {
    "batch": _SEQUENCES, "micro_batch_size": _SEQUENCES, "micro_batches": _SEQUENCES, "images": _SEQUENCES,
    "length": _TOKENS, "token_chunk": _TOKENS, "repack": _TOKENS, "min_features": _TOKENS,
    "checkpoint_interval": _LAYERS, "saved_layers": _LAYERS, "host_checkpoints": _LAYERS,
    "expert_pieces": _LAYERS,
    "waves": MOST_MICRO_BATCHES, **dict.fromkeys(("ranks", "gpus", "hosts", "spread", "copies"), 1 << 12),
    **dict.fromkeys(("weight_slots", "gradient_slots", "checkpoint_slots", "staging_slabs", "gradient_slabs", "state_slabs"),
                    _BUFFERS)}


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises `MegacompileError` unless `value` is a whole number from `least` to `LARGEST[name]`, or `LARGEST_COUNT`."""
    largest = LARGEST.get(name, LARGEST_COUNT)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
        most = f" and at most {largest:,}" if isinstance(value, int) and value > least else ""
        raise MegacompileError(f"{name} must be a whole number of at least {least}{most}, "
                               f"not {_shown(value)}")


def check_number(option: str, value: Any) -> None:
    """Raises `ArgumentError` if the value of a command-line option is not finite, or is larger than `LARGEST_NUMBER`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"{option} cannot be {value}: give a finite number")
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise ArgumentError(f"{option} cannot be {_shown(value)}: give a number of at most {LARGEST_NUMBER}")


def _shown(value: Any) -> str:
    """The value for a message. Very large integers are described, since Python refuses to print 5,000 digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length():,} bits"
    return shortened(repr(value), 80)


def check_micro_batches(count: int) -> None:
    """Raises `MegacompileError` if there are more micro-batches than a program may have."""
    if count > MOST_MICRO_BATCHES:
        raise MegacompileError(f"{count:,} micro-batches are more than the {MOST_MICRO_BATCHES:,} that a program may have: use "
                               "larger micro-batches, or accumulate the gradients of smaller batches")
