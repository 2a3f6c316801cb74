"""TRL's `RLOOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import trl

from megacompile.trainers.policy import PolicyTrainer


class RLOOTrainer(PolicyTrainer, trl.RLOOTrainer):
    """`trl.RLOOTrainer` for a streamed policy. It generates, and makes its reference model, as `megacompile.grpo.GRPOTrainer`
    does, and raises what that raises."""

    generates = True
