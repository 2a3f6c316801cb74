"""TRL's `KTOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import trl

from megacompile.trainers.policy import PolicyTrainer


class KTOTrainer(PolicyTrainer, trl.KTOTrainer):
    """`trl.KTOTrainer` for a streamed policy: answers with a verdict, good or bad. The reference model, adapters and refusals
    are as with `megacompile.dpo.DPOTrainer`."""
