"""The largest numbers that a user, or a program's text, may give. What is larger is a mistake, and would take all memory or
all day before it fails."""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megacompile.errors import ArgumentError, MegacompileError, shortened

#: A name has fewer characters.
LONGEST_NAME = 1024
#: Any other number: bytes, parameters.
LARGEST_NUMBER = 2**63 - 1
#: Characters of a program: one of a thousand layers and a hundred micro-batches has a tenth as many.
LONGEST_TEXT = 1 << 29

_SEQUENCES, _TOKENS, _LAYERS = 1 << 20, 1 << 24, 1 << 16
#: A program has some nodes for each call and each micro-batch: as many as these take minutes to compile.
MOST_MICRO_BATCHES = 1 << 14
_BUFFERS = 1 << 12
LARGEST: Mapping[str, int] = {
    "batch": _SEQUENCES, "micro_batch_size": _SEQUENCES, "micro_batches": _SEQUENCES, "images": _SEQUENCES,
    "length": _TOKENS, "token_chunk": _TOKENS, "repack": _TOKENS,
    "checkpoint_interval": _LAYERS, "saved_layers": _LAYERS, "host_checkpoints": _LAYERS, "expert_pieces": _LAYERS,
    "waves": MOST_MICRO_BATCHES,
    **dict.fromkeys(("weight_slots", "gradient_slots", "checkpoint_slots", "staging_slabs", "gradient_slabs"), _BUFFERS)}


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raises `MegacompileError` unless the value of a name in `LARGEST` is a whole number from `least` to what is there."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST[name]:
        most = f" and at most {LARGEST[name]:,}" if isinstance(value, int) and value > least else ""
        raise MegacompileError(f"{name} must be a whole number of at least {least}{most}, "
                               f"not {_shown(value)}")


def check_number(option: str, value: Any) -> None:
    """Raises `ArgumentError` for a value of a command's option that is a number without a meaning: not finite, or larger than
    any that is counted."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(f"{option} cannot be {value}: give a finite number")
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise ArgumentError(f"{option} cannot be {_shown(value)}: give a number of at most {LARGEST_NUMBER}")


def _shown(value: Any) -> str:
    """Python does not print numbers of 5,000 digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length():,} bits"
    return shortened(repr(value), 80)


def check_micro_batches(count: int) -> None:
    """Raises `MegacompileError` for more micro-batches than a program takes."""
    if count > MOST_MICRO_BATCHES:
        raise MegacompileError(f"{count:,} micro-batches are more than the {MOST_MICRO_BATCHES:,} that a program takes: use "
                               "larger micro-batches, or smaller batches whose gradients add up")
