"""TRL's `RLOOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

from typing import ClassVar

import trl

from megacompile.trainers.online import OnlineTrainer


class RLOOTrainer(OnlineTrainer, trl.RLOOTrainer):
    """`trl.RLOOTrainer` for a streamed policy. It generates, and makes its reference model, as `megacompile.grpo.GRPOTrainer`
    does, and raises what that raises."""

    theirs: ClassVar[type] = trl.RLOOTrainer
    name, settings = "RLOO", "RLOOConfig"
