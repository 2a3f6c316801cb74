"""TRL's `SFTTrainer` for streamed models (needs trl)."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
import trl
from torch import Tensor

from megacompile import trainer
from megacompile.adapters import add_adapter
from megacompile.errors import UnsupportedError
from megacompile.trainer_arguments import check_model


class SFTTrainer(trainer.Trainer, trl.SFTTrainer):
    """`trl.SFTTrainer` for a model that is streamed. The loss is the model's own, the mean negative log-likelihood of a step's
    tokens, which is what TRL computes from log-probabilities. `num_tokens` is logged; `entropy` and `mean_token_accuracy`, for
    which every token's logits would be needed, are not.

    With a `peft_config` the streamed model is closed, gets the adapter, and is streamed again as it was: `trainer.model` is
    that.

    Raises `UnsupportedError` for other losses and router losses."""

    def __init__(self, model: Any, *args: Any, peft_config: Any = None, **kwargs: Any) -> None:
        if peft_config is not None:
            check_model(model)
            model = add_adapter(model, peft_config)
        super().__init__(model, *args, **kwargs)
        # TRL has put a forward of its own on the model, which runs the backbone without its head.
        self.model.__dict__.pop("forward", None)
        if self.args.loss_type != "nll":
            raise UnsupportedError(f"loss_type={self.args.loss_type!r} needs gradients through log-probabilities, which a "
                                   "streamed model does not give yet: give loss_type='nll'")
        if self.aux_loss_enabled:
            raise UnsupportedError("the router's auxiliary loss was not captured with the model: give router_aux_loss_coef=0")

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return transformers.Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    own_losses = (compute_loss,)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._count_tokens(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _count_tokens(self, inputs: Mapping[str, Any]) -> None:
        mask = inputs.get("attention_mask")
        self._total_train_tokens += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
