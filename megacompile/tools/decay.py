"""Learning rate decay of `megacompile train`. Does not import torch, since the command line needs it for --help."""
from __future__ import annotations

import enum
import math


class Decay(enum.StrEnum):
    """How the learning rate falls after the warmup."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"

    def height(self, progress: float) -> float:
        """A factor that falls from 1 at `progress` 0 to 0 at `progress` 1, or stays 1 if constant."""
        match self:
            case Decay.COSINE:
                return 0.5 * (1.0 + math.cos(math.pi * progress))
            case Decay.LINEAR:
                return 1.0 - progress
            case Decay.CONSTANT:
                return 1.0
