"""TRL's `GRPOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import inspect
from typing import Any

import trl
from trl.trainer import grpo_trainer

from megacompile import trainer
from megacompile.trainers.fused_head import refuse_copied_adapter, refuse_dropout, refuse_moving_reference, streamed_heads
from megacompile.trainers.named_models import loader
from megacompile.trainers.reference_model import loaded_as


class GRPOTrainer(trainer.Trainer, trl.GRPOTrainer):
    """`trl.GRPOTrainer` for a streamed policy.

    Completions are generated with all weights on the device where they fit. Elsewhere the streamed model generates them layer
    by layer for each token, which is correct but slow; vLLM (`use_vllm`) is faster then. If `beta` is not 0, the reference
    model is a frozen copy of the policy at this moment, streamed as well.

    With a `peft_config`, the streamed model is closed, wrapped with the adapter, and streamed again with the same options
    (`trainer.model`); the reference is then the same model without the adapter.

    Raises `UnsupportedError` for router losses, for `sync_ref_model`, and if TRL would copy an adapter; also what
    `reference_of` raises."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(trl.GRPOTrainer.__init__).bind(self, *args, **kwargs).arguments
        del given["self"]
        if isinstance(given["model"], str) and given.get("args") is None:
            given["args"] = trl.GRPOConfig(f"{given['model'].split('/')[-1]}-GRPO")
        settings, adapter = given.get("args"), given.get("peft_config")
        without_dropout = getattr(settings, "disable_dropout", False)
        refuse_copied_adapter(given["model"], bool(getattr(settings, "beta", 0.0)))  # before TRL changes the model
        refuse_moving_reference(settings)
        if without_dropout:
            refuse_dropout(given["model"], adapter)
        load = loader(settings, adapter, without_dropout)
        with streamed_heads(grpo_trainer, given["model"]), loaded_as(grpo_trainer, given["model"], load):
            super().__init__(**given)
