"""Hugging Face's `Trainer` for streamed models: the same class, arguments and callbacks (needs `megacompile[trainer]`).

    model = megacompile.stream(model)
    trainer = megacompile.trainer.Trainer(model=model, args=TrainingArguments(...), train_dataset=...)

Three things are done otherwise. The optimizer is `megacompile.AdamW`, which clips by itself, so that Trainer's own clipping, a
pass over all gradients on the host, is left out. The batches that gradients accumulate over are one batch, for which weights
are streamed once. And forward, backward and update are one program (`train_step`) where the loss is the model's own.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from megacompile.checkpoint import load_checkpoint, save_checkpoint
from megacompile.errors import MegacompileError
from megacompile.frontend.capture import CapturedModel
from megacompile.inputs.batch_concat import join
from megacompile.inputs.token_counts import TokenRate
from megacompile.streaming.optim import AdamW
from megacompile.streaming.streamed_module import StreamedModule
from megacompile.trainers.trainer_arguments import check_arguments, check_model, refuse_other_forwards

#: The folder of the training state in one of Trainer's checkpoints.
STATE = "megacompile"


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for a model that is streamed. For another trainer, put this class before it:
    `class Mine(megacompile.trainer.Trainer, TheirTrainer): pass`.

    `whole_steps`: whether steps may be whole programs, in which no gradient is ever seen from outside. Set it to False where a
    callback reads `.grad`, or where the batches of a step shall not be joined.

    Raises `UnsupportedError` for arguments that cannot be honoured, `MegacompileError` for a model that is not streamed."""

    whole_steps: bool = True
    #: Implementations of `compute_loss` that return the model's own loss, which a whole step computes too.
    own_losses: tuple[Any, ...] = (transformers.Trainer.compute_loss,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gathered: list[Mapping[str, Any]] = []  # batches of the step that have not been trained on yet
        self._parameters = 0  # of the model, embeddings left out; counted once
        self._token_rate = TokenRate()
        super().__init__(*args, **kwargs)
        streamed = check_model(self.model)
        # A loss that is no sum over tokens is a mean over each batch, and has no such argument.
        self.model_accepts_loss_kwargs &= streamed.captured.has_loss_denominator

    def create_accelerator_and_postprocess(self) -> None:
        if self.model is not None:  # else `model_init` makes it
            check_arguments(self.args, check_model(self.model))
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # a streamed model uses one; the others would get replicas
        super().create_accelerator_and_postprocess()
        # Accelerate would send optimizer state to the device, and wrap forward in an autocast to the dtype that it has.
        self.accelerator.device_placement = self.accelerator.native_amp = False
        # All versions of Trainer clip through this function. AdamW clips in its update, by the same rule.
        self.accelerator.clip_grad_norm_ = lambda *args, **kwargs: math.nan

    # ---------------------------------------------------------------- optimizer
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """`megacompile.AdamW`, with what `args` say of AdamW."""
        return AdamW, dict(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer does it, or what was given to it. Raises `MegacompileError` for one that is no `megacompile.AdamW`, and
        where it and `max_grad_norm` do not go together."""
        check_arguments(self.args, check_model(self.model))
        refuse_other_forwards(self.model, type(self).__name__)
        optimizer = super().create_optimizer(*args, **kwargs)
        self._adamw.max_grad_norm = _max_grad_norm(self._adamw, self.args.max_grad_norm)
        return optimizer

    @property
    def _adamw(self) -> AdamW:
        """The optimizer, without Accelerate's wrapper."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, AdamW):
            raise MegacompileError(f"a streamed model is trained with megacompile.AdamW, not {type(optimizer).__name__}: leave "
                                   "the optimizer out, or give optimizers=(megacompile.AdamW(model.parameters(), ...), None)")
        return optimizer

    # ---------------------------------------------------------------- steps
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss of one batch, 0-d, detached. Of a whole step's batches, the last one's is that of all, and the others' 0."""
        self._token_rate.begin(check_model(self.model).step.tokens)
        if num_items_in_batch is None or not self.steps_are_whole():
            return super().training_step(model, inputs, num_items_in_batch)
        self._gathered.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._gathered = self._gathered, []
        captured = check_model(model).captured
        apart = len(batches) > 1 and _are_apart(captured, batches)
        batch = None if apart else join(batches, captured.labels, captured.causal)
        if batch is None:
            losses = [super(Trainer, self).training_step(model, each, num_items_in_batch) for each in batches]
            return torch.stack(losses).sum()
        model.train()
        return model.megacompile.train_step({**batch, "num_items_in_batch": num_items_in_batch}, self._adamw)

    def steps_are_whole(self) -> bool:
        """Whether a whole step is the same training: nothing but the model's own loss is asked for."""
        return (self.whole_steps and type(self).compute_loss in self.own_losses and self.compute_loss_func is None
                and self.label_smoother is None and isinstance(self.model_wrapped, StreamedModule))

    # ---------------------------------------------------------------- checkpoints
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """`save_checkpoint` in place of two pickles: written tile by tile, on the disk when this returns."""
        save_checkpoint(Path(output_dir, STATE), self.model, self._adamw, scheduler=self.lr_scheduler, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read tile by tile; masters, moments and the scheduler are those that were saved, to the bit. A checkpoint of
        `transformers.Trainer` is read as that reads it."""
        if checkpoint is None or not Path(checkpoint, STATE).exists():
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load_checkpoint(Path(checkpoint, STATE), self.model, self._adamw, scheduler=self.lr_scheduler)

    # ---------------------------------------------------------------- logs
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """`grad_norm` is known once the update has begun, which this waits for; with `overlap="backward"` it never is.
        Beside each loss: `tokens_per_second`, without padding, since the last one, and `padding_share` of what was computed."""
        if "loss" in logs:
            logs.update(self._token_rate.since(check_model(self.model).step.tokens))
        if "train_runtime" in logs:
            self._token_rate.end()
        if "grad_norm" in logs:
            norm = self._adamw.grad_norm
            if norm is not None:
                logs["grad_norm"] = norm
            else:
                del logs["grad_norm"]
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """As transformers estimates it. Counting parameters anew each time would wait for the update in flight."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        self._parameters = self._parameters or self.model.num_parameters(exclude_embeddings=True)
        return 6 * inputs[name].numel() * self._parameters


def _are_apart(captured: CapturedModel, batches: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a model computes something else of batches joined to one. An auxiliary loss is of one batch each, and Trainer
    adds them up; so is what rows of one batch make of each other, and what is made of all positions."""
    if captured.is_averaged or captured.across_rows or captured.totals:
        return True
    lengths = {each.shape[1:2] for batch in batches for each in batch.values() if isinstance(each, Tensor)}
    return captured.counts_places and (len(lengths) > 1 or "position_ids" in batches[0])


def _max_grad_norm(optimizer: AdamW, argument: float) -> float | None:
    """What both the optimizer and TrainingArguments want. `argument`: 0 and infinity are none."""
    wanted = argument if argument and argument < math.inf else None
    if optimizer.overlap is not None and wanted is not None:
        raise MegacompileError("AdamW(overlap='backward') updates before the global norm is known, and max_grad_norm="
                               f"{argument} asks to clip by it: give TrainingArguments(max_grad_norm=0), or leave overlap out")
    if optimizer.max_grad_norm not in (None, wanted):
        raise MegacompileError(f"AdamW clips at max_grad_norm={optimizer.max_grad_norm} and TrainingArguments at {argument}: "
                               "give the same to both")
    return wanted
