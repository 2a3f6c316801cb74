"""TRL's `DPOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import inspect
from typing import Any

import trl
from trl.trainer import dpo_trainer

from megacompile import trainer
from megacompile.trainers.fused_head import refuse_copied_adapter, refuse_dropout, refuse_moving_reference, streamed_heads
from megacompile.trainers.named_models import loader
from megacompile.trainers.reference_model import loaded_as


class DPOTrainer(trainer.Trainer, trl.DPOTrainer):
    """`trl.DPOTrainer` for a streamed policy. The reference model is streamed too.

    The reference is the given `ref_model`, or a frozen copy of the policy at this moment. With `precompute_ref_log_probs=True`
    the policy itself runs once over the data before training, which needs no second copy of the weights. With a
    `peft_config`, the streamed model is closed, wrapped with the adapter, and streamed again with the same options
    (`trainer.model`); the reference is then the same model without the adapter.

    Raises `UnsupportedError` for router losses, for `sync_ref_model`, and if TRL would copy an adapter; also what
    `reference_of` raises."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(trl.DPOTrainer.__init__).bind(self, *args, **kwargs).arguments
        del given["self"]
        if isinstance(given["model"], str) and given.get("args") is None:
            given["args"] = trl.DPOConfig(f"{given['model'].split('/')[-1]}-DPO")
        settings, reference, adapter = given.get("args"), given.get("ref_model"), given.get("peft_config")
        without_dropout = getattr(settings, "disable_dropout", True)
        refuse_copied_adapter(given["model"], reference is None)  # before TRL changes the model
        refuse_moving_reference(settings)
        for model in (given["model"], reference) if without_dropout else ():
            refuse_dropout(model, adapter)
        load = loader(settings, adapter, without_dropout)
        with streamed_heads(dpo_trainer, given["model"]), loaded_as(dpo_trainer, given["model"], load):
            super().__init__(**given)
