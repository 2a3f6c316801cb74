"""The share of a checkpoint that each rank writes and reads."""
from __future__ import annotations

from collections.abc import Mapping


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """The names that one of several ranks gets when they are divided so that each rank has about the same number of bytes.
    `sizes`: bytes by name, the same on every rank."""
    totals, found = [0] * ranks, []
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        least = totals.index(min(totals))
        totals[least] += size
        if least == rank:
            found.append(name)
    return found
