"""Counts the tokens that training computes, and how many of them are not padding."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megacompile.runtime.kernels import Batch


class TokenCounts:
    """State: token counts of all training steps so far, and of the last step. Useful tokens are those that no mask hides
    (without a mask: those up to the last target of a row). Computed tokens are all positions of the rows that ran, packed or
    not."""

    def __init__(self) -> None:
        self.useful = self.computed = self.step_useful = self.step_computed = 0

    def end_step(self, batches: Sequence[Batch]) -> None:
        """Counts a step when its update begins. `batches`: the batches of its gradients."""
        self.step_useful = sum(batch.useful_tokens for batch in batches)
        self.step_computed = sum(batch.computed_tokens for batch in batches)
        self.useful += self.step_useful
        self.computed += self.step_computed

    def stats(self) -> dict[str, int | float]:
        """Counts, and efficiencies from 0 to 1 (1 before the first step)."""
        return dict(
            useful_tokens=self.useful, computed_tokens=self.computed, packing_efficiency=_share(self.useful, self.computed),
            step_useful_tokens=self.step_useful, step_computed_tokens=self.step_computed,
            step_packing_efficiency=_share(self.step_useful, self.step_computed))


class TokenRate:
    """Tokens per second, without padding. State: the counts and the time at the start of the current measurement."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: tuple[float, int, int] | None = None

    def begin(self, counts: TokenCounts) -> None:
        """Starts measuring, unless it has started already. `counts`: those of the streamed model."""
        self._last = self._last or self._now(counts)

    def end(self) -> None:
        self._last = None

    def since(self, counts: TokenCounts) -> dict[str, float]:
        """`tokens_per_second` and `padding_share` since the last call, or since `begin`; empty if no step ran."""
        last, self._last = self._last, self._now(counts)
        if last is None:
            return {}
        seconds, useful, computed = (now - then for now, then in zip(self._last, last, strict=True))
        return {"tokens_per_second": round(useful / seconds, 3), "padding_share": 1 - useful / computed} if computed else {}

    def _now(self, counts: TokenCounts) -> tuple[float, int, int]:
        return self._clock(), counts.useful, counts.computed


def _share(useful: int, computed: int) -> float:
    return useful / computed if computed else 1.0
