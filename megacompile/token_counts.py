"""How many of the tokens that training computes are the user's, and how many are padding."""
from __future__ import annotations

from collections.abc import Sequence

from megacompile.runtime.kernels import Batch


class TokenCounts:
    """State: the tokens of all training steps so far, and of the last one. Useful are those that no mask hides (without a mask:
    up to the last target of a row); computed are all places of the rows that ran, packed or not."""

    def __init__(self) -> None:
        self.useful = self.computed = self.step_useful = self.step_computed = 0

    def end_step(self, batches: Sequence[Batch]) -> None:
        """A step has begun its update, with gradients of `batches`."""
        self.step_useful = sum(batch.useful_tokens for batch in batches)
        self.step_computed = sum(batch.computed_tokens for batch in batches)
        self.useful += self.step_useful
        self.computed += self.step_computed

    def stats(self) -> dict[str, int | float]:
        """Counts, and shares from 0 to 1 (1 before the first step)."""
        return dict(
            useful_tokens=self.useful, computed_tokens=self.computed, packing_efficiency=_share(self.useful, self.computed),
            step_useful_tokens=self.step_useful, step_computed_tokens=self.step_computed,
            step_packing_efficiency=_share(self.step_useful, self.step_computed))


def _share(useful: int, computed: int) -> float:
    return useful / computed if computed else 1.0
