"""TRL's `DPOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import inspect
from typing import Any

import trl
from trl.trainer import dpo_trainer

from megacompile import trainer
from megacompile.fused_head import refuse_adapters, refuse_dropout, refuse_moving_reference, streamed_heads
from megacompile.reference_model import loaded_as, reference_of


class DPOTrainer(trainer.Trainer, trl.DPOTrainer):
    """`trl.DPOTrainer` for a policy that is streamed. The reference model is streamed too: that which is given
    (`ref_model`), or a frozen copy of the policy as it is now. With `precompute_ref_log_probs=True` it is the policy before
    training, run once over the data, which takes no second copy of the weights.

    Raises `UnsupportedError` for adapters, router losses, and `sync_ref_model`; and what `reference_of` raises."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(trl.DPOTrainer.__init__).bind(self, *args, **kwargs).arguments
        refuse_adapters(given["model"], given.get("peft_config"))  # before TRL changes the model
        settings, reference = given.get("args"), given.get("ref_model")
        refuse_moving_reference(settings)
        for model in (given["model"], reference) if getattr(settings, "disable_dropout", True) else ():
            refuse_dropout(model)
        with streamed_heads(dpo_trainer), loaded_as(dpo_trainer, lambda: reference_of(given["model"])):
            super().__init__(*args, **kwargs)
