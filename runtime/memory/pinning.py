"""Pins host memory that is already allocated, which takes a second for each few GiB."""
from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megacompile.runtime.backends.lanes import Backend
from megacompile.sizes import format_bytes
from megacompile.system.under_way import at, under_way


def pin_all(backend: Backend, memory: Iterable[Tensor]) -> None:
    """Pins each tensor and shows progress. Raises what `Backend.pin` raises."""
    parts = list(memory)
    done, total = 0, sum(part.nbytes for part in parts)
    with under_way("pinning host memory"):
        for part in parts:
            at(f"{format_bytes(done)} of {format_bytes(total)}")
            backend.pin(part)
            done += part.nbytes
