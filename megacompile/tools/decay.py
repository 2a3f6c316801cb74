"""How the learning rate of `megacompile train` falls. Without torch, since it is a choice of the command line too."""
from __future__ import annotations

import enum
import math


class Decay(enum.StrEnum):
    """How the learning rate falls after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"

    def height(self, progress: float) -> float:
        """1 at `progress` 0, 0 at 1, unless constant."""
        match self:
            case Decay.COSINE:
                return 0.5 * (1.0 + math.cos(math.pi * progress))
            case Decay.LINEAR:
                return 1.0 - progress
            case Decay.CONSTANT:
                return 1.0
