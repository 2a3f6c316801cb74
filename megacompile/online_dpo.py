"""TRL's `OnlineDPOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from typing import Any

import torch
import trl.experimental.online_dpo as theirs
from torch import Tensor
from trl.experimental.online_dpo import online_dpo_trainer

from megacompile import trainer
from megacompile.compat.hugging_face import replaced
from megacompile.errors import UnsupportedError
from megacompile.inputs.repacking import Wanted
from megacompile.losses import IGNORED
from megacompile.trainers.fused_head import function_of, refuse_dropout
from megacompile.trainers.named_models import load_named
from megacompile.trainers.reference_model import add_adapter, reference_of
from megacompile.trainers.sent_weights import lasting_clients, refuse_codes, send
from megacompile.trainers.trainer_arguments import check_model


class OnlineDPOTrainer(trainer.Trainer, theirs.OnlineDPOTrainer):
    """`trl.experimental.online_dpo.OnlineDPOTrainer` for a streamed policy (Guo et al., "Direct language model alignment from
    online AI feedback", 2024).

    Completions are generated as by `megacompile.grpo.GRPOTrainer`, and log-probabilities are computed for a chunk of tokens at
    a time. The reference is the given streamed `ref_model`, or a frozen copy of the policy at this moment. With a `peft_config`
    the streamed model is closed, wrapped with the adapter, and streamed again with the same options (`trainer.model`); the
    reference is then the same model without the adapter.

    What TRL logs of all log-probabilities (`objective/kl`, `entropy`, `non_score_reward` and `rlhf_reward`) leaves out tokens
    after the end of a completion, which TRL adds. The loss and all else is the same.

    Raises `UnsupportedError` for a vLLM engine in this process, and for dropout that TRL would switch off after the model was
    captured; also what `reference_of` raises."""

    whole_steps = False  # TRL's step samples, and has a loss of its own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(theirs.OnlineDPOTrainer).bind(*args, **kwargs).arguments
        if given.get("args") is None:
            raise UnsupportedError("args is missing: pass an OnlineDPOConfig")
        # The plan decides what is recomputed. TRL would generate without a cache, and switch it off in the model's config.
        settings = given["args"] = copy.copy(given["args"])
        settings.gradient_checkpointing = False
        adapter = given.get("peft_config")
        if settings.use_vllm and settings.vllm_mode != "server":
            raise UnsupportedError("online DPO sends weights to a vLLM server: give vllm_mode='server', or leave use_vllm out")
        if isinstance(given["model"], str):
            options, settings.model_init_kwargs = settings.model_init_kwargs or {}, None
            given["model"] = load_named(given["model"], settings, options, adapted_later=adapter is not None)
        for model in (given["model"], given.get("ref_model")):
            if model is not None:
                check_model(model)
                if settings.disable_dropout:
                    refuse_dropout(model, adapter)
        clients: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if settings.use_vllm:
            refuse_codes(given["model"])
            clients = lasting_clients(online_dpo_trainer)
        with _streamed_models(), clients:
            super().__init__(**given)
        if settings.use_vllm and self.accelerator.is_main_process:
            self.vllm_client.restore = functools.partial(send, self.vllm_client, self.model)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's tensors of prompts and completions, on the compute device: it puts them where the parameters are, on the
        CPU."""
        *tokens, images = super()._generate(*args, **kwargs)
        return (*(each.to(self.accelerator.device) for each in tokens), images)

    def _move_model_to_vllm(self) -> None:
        self.model.megacompile.whole()  # before the server waits
        if self.accelerator.is_main_process:
            self.vllm_client.renewed(self.vllm_client.restore)

    def _forward(self, model: Any, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor,
                 vision_inputs: Any = None) -> Tensor:
        """Log-probabilities, fp32 [sequences, tokens of completions], 0 after the end of a completion. Prompts are cut on the
        left to `max_length`."""
        cut = max(prompt_ids.shape[1] + completion_ids.shape[1] - self.max_length, 0)
        if vision_inputs is not None or prompt_ids.shape[1] <= cut:
            theirs_of: Tensor = super()._forward(model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs)
            return theirs_of * completion_mask
        prompt_ids, prompt_mask = prompt_ids[:, cut:], prompt_mask[:, cut:]
        batch = dict(input_ids=torch.cat([prompt_ids, completion_ids], 1),
                     attention_mask=torch.cat([prompt_mask, completion_mask], 1))
        first = prompt_ids.shape[1] - 1  # a token predicts the next one
        targets = torch.full_like(batch["input_ids"], IGNORED)
        targets[:, first:-1] = completion_ids.masked_fill(completion_mask == 0, IGNORED)
        function = function_of(1.0, ("log_probs",))
        values, _ = model.megacompile.values_of_tokens(function, batch, {"targets": targets}, Wanted.TOKENS)
        found: Tensor = values["log_probs"]
        return found[:, first:-1]


def _streamed_models() -> contextlib.AbstractContextManager[None]:
    """A context in which TRL's module streams the reference model that it makes, and a model again after adding an adapter."""
    def adapted(model: Any, adapter: Any, *_: Any) -> Any:
        return model if adapter is None else add_adapter(model, adapter)

    return replaced(online_dpo_trainer, create_reference_model=reference_of, prepare_peft_model=adapted)
