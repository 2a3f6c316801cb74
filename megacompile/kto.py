"""TRL's `KTOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import trl
from trl.trainer import kto_trainer

from megacompile.trainers.preference import PreferenceTrainer


class KTOTrainer(PreferenceTrainer, trl.KTOTrainer):
    """`trl.KTOTrainer` for a streamed policy: answers with a verdict, good or bad. The reference model, adapters and refusals
    are as with `megacompile.dpo.DPOTrainer`."""

    module, settings, suffix = kto_trainer, trl.KTOConfig, "KTO"
