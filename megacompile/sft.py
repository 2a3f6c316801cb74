"""TRL's `SFTTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import transformers
import trl
from torch import Tensor
from trl.trainer import sft_trainer

from megacompile import trainer
from megacompile.errors import UnsupportedError
from megacompile.trainers.fused_head import streamed_heads
from megacompile.trainers.named_models import load_named
from megacompile.trainers.reference_model import add_adapter, loaded_as, router_coefficient, with_router_loss
from megacompile.trainers.trainer_arguments import check_model


class SFTTrainer(trainer.Trainer, trl.SFTTrainer):
    """`trl.SFTTrainer` for a streamed model.

    With `loss_type="nll"` the loss is computed by the model itself: the mean negative log-likelihood of a step's tokens, the
    same value that TRL computes from log-probabilities. A step then runs as one program. It logs `num_tokens`, but not
    `entropy` and `mean_token_accuracy`, which would need a second pass. Evaluations, and other losses, are computed by TRL's
    code, which logs all of these; with a router loss, evaluations log the loss alone.

    With a `peft_config`, the streamed model is closed, wrapped with the adapter, and streamed again with the same options
    (`trainer.model`).

    A mixture of experts is streamed again in the same way if it was streamed without the router loss that TRL adds
    (`router_aux_loss_coef`, by default that of the model's config).

    The model may be a name, as in TRL: it is then loaded with `model_init_kwargs` and streamed (`load_named`).

    Raises `UnsupportedError` for a router loss beside a loss other than "nll", or other than the one that the model was
    streamed with if `optimizers` are given."""

    def __init__(self, model: Any, args: Any = None, *more: Any, peft_config: Any = None, **kwargs: Any) -> None:
        coefficients: list[float] = []

        def load(name: str, options: Mapping[str, Any]) -> Any:
            loaded = load_named(name, args, options, peft_config)
            coefficients.append(router_coefficient(loaded))
            models.append(loaded)
            return loaded

        if isinstance(model, str):
            args = args or trl.SFTConfig(f"{model.split('/')[-1]}-SFT")
        else:
            if peft_config is not None:
                check_model(model)
                model = add_adapter(model, peft_config)
            if getattr(args, "loss_type", "nll") == "nll":
                model = with_router_loss(model, args, kwargs.get("optimizers"))
            coefficients.append(router_coefficient(model))
        with streamed_heads(sft_trainer, model) as models, loaded_as(sft_trainer, model, load):
            super().__init__(model, args, *more, **kwargs)
        streamed_with = coefficients[0]
        self._head = self.model.__dict__.pop("forward") if self.losses_are_models else None
        wanted = self.router_aux_loss_coef if self.aux_loss_enabled else 0.0
        if wanted != streamed_with or (wanted and not self.losses_are_models):
            raise UnsupportedError(
                f"the model was streamed with a router auxiliary loss of weight {streamed_with}, but {wanted} was requested: "
                "set config.output_router_logits and config.router_aux_loss_coef before stream(), or pass "
                f"router_aux_loss_coef={streamed_with}{'' if self.losses_are_models else ' (losses other than nll need 0)'}")

    @property
    def losses_are_models(self) -> bool:
        return bool(self.args.loss_type == "nll")

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        if not self.losses_are_models or (not self.model.training and self._evaluates_tokens()):
            with self._with_head():
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.aux_loss_enabled and num_items_in_batch is not None:
            # TRL divides the tokens' loss by all items, and the router loss by the number of batches in the step.
            batches = self.current_gradient_accumulation_steps
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch / (batches * processes))
            loss = outputs.loss / batches
            return (loss, outputs) if return_outputs else loss
        return transformers.Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    @contextlib.contextmanager
    def _with_head(self) -> Iterator[None]:
        """A context in which the model's forward takes `fused_lm_head`."""
        given = self.model.__dict__
        given |= {} if self._head is None else {"forward": self._head}
        try:
            yield
        finally:
            if self._head is not None:
                del given["forward"]

    def _evaluates_tokens(self) -> bool:
        """True if TRL can evaluate the model. It does so by values of each token, which excludes a loss of the user."""
        captured = check_model(self.model).captured
        return captured.heads is not None and not captured.token_loss and not captured.output.records_routers

    def metrics_of_evaluations(self) -> Sequence[str]:
        if self.losses_are_models and not self._evaluates_tokens():
            return ()
        return ("entropy", "mean_token_accuracy", "num_tokens")

    own_losses = (compute_loss,)
    router_loss_of_each_process = False

    def steps_are_whole(self) -> bool:
        return self.losses_are_models and super().steps_are_whole()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self.losses_are_models:
            self._count_tokens(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _count_tokens(self, inputs: Mapping[str, Any]) -> None:
        mask = inputs.get("attention_mask")
        count = int(mask.sum()) if mask is not None and mask.dim() == 2 else inputs["input_ids"].numel()
        self._total_train_tokens += sum(check_model(self.model).rank_group.values("counting tokens", count))
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
