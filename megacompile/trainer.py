"""Hugging Face's `Trainer` for streamed models: the same class, arguments and callbacks (needs `megacompile[trainer]`).

    model = megacompile.stream(model)
    trainer = megacompile.trainer.Trainer(model=model, args=TrainingArguments(...), train_dataset=...)

Three things differ. The optimizer is megacompile's of the name in `TrainingArguments(optim=...)`; names that transformers
does not have are given as `optim_args="optimizer=muon"`. It clips in its update, so that Trainer's own clipping (a pass over
all gradients on the host) is skipped. The batches of a gradient accumulation step are joined into one batch, for which weights
are streamed once. If the loss is the model's own, forward, backward and update run as one program (`train_step`).

Several processes (`torchrun`, `accelerate launch`) train one copy of the model. The data are divided among them as in Trainer.
The model adds up gradients over them, so that it is not wrapped in DistributedDataParallel.
"""
from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from megacompile.checkpoint import load_checkpoint, save_checkpoint
from megacompile.errors import MegacompileError
from megacompile.frontend.batches.pair_masks import pairs_of, tokens_of
from megacompile.frontend.capture import CapturedModel
from megacompile.inputs.padding_arguments import without_bounds
from megacompile.inputs.token_counts import TokenRate
from megacompile.losses import IGNORED
from megacompile.streaming.expert_loads import imbalance
from megacompile.streaming.handle import compiled_variants
from megacompile.streaming.optimizer.hyper_parameters import checked_norm
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.streaming.streamed_module import StreamedModule
from megacompile.system.linux import LongLived
from megacompile.trainers.trainer_arguments import (
    check_arguments,
    check_metric,
    check_model,
    optimizer_asked,
    refuse_other_forwards,
)
from megacompile.weights.codes import weights_of_codes


# -------------------- Reads batches before they are needed, while the device still computes
class ReadAhead(Iterator[Any]):
    """The batches of an iterator, some of which may have been read ahead.

    State: the iterator (`source`), and the batches that were read and not taken yet, or the error that reading one raised."""

    def __init__(self) -> None:
        self._source: Iterator[Any] = iter(())
        self._read: deque[Any] = deque()

    def of(self, source: Iterator[Any]) -> ReadAhead:
        """Iterates over `source` from now on. If that is another iterator than before, drops what was read."""
        if source is not self._source:
            self._source = source
            self._read.clear()
        return self

    def read(self, count: int) -> None:
        """Reads until `count` batches wait, or there are no more. An error of the data is raised when its batch is due, so that
        a step that is complete can still be logged and saved."""
        while len(self._read) < count:
            try:
                self._read.append(next(self._source))
            except StopIteration:
                return
            except Exception as error:  # a dataset or a collator may raise anything
                self._read.append(error)
                return

    def __next__(self) -> Any:
        if not self._read:
            return next(self._source)
        if isinstance(self._read[0], Exception):
            raise self._read.popleft()
        return self._read.popleft()


# --------------------
# Joins the batches of one optimizer step into one batch, so that weights are streamed once for all of them.
def join(batches: Sequence[Mapping[str, Any]], labels: Collection[str], causal: bool) -> dict[str, Any] | None:
    """The rows of all batches in order: tensors [sum of rows, longest length, ...]. Shorter rows are padded on the right,
    `labels` with -100, other arguments with 0. This changes no loss if no token sees later tokens (`causal`), or if an
    attention mask marks the padding.

    None if the batches have different arguments, if an argument is not an integer tensor [rows, length, ...], or if the model
    would see the padding. Masks of pairs of tokens are joined only if all have the same length, since only the model knows
    what such a mask must hold for padding."""
    if len(batches) == 1:
        return dict(batches[0])
    keys = batches[0].keys()
    if any(batch.keys() != keys for batch in batches):
        return None
    joined: dict[str, Any] = {}
    tensors = [{key: value for key, value in batch.items() if isinstance(value, Tensor)} for batch in batches]
    masks = set().union(*map(pairs_of, tensors))
    for key in keys:
        parts = [batch[key] for batch in batches]
        if key in masks:
            of_all_rows = [len(part) for part in parts] == [tokens_of(batch)[0] for batch in tensors]
            if not of_all_rows or len({(part.shape[1:], part.dtype) for part in parts}) > 1:
                return None
            joined[key] = torch.cat(parts)
            continue
        if not all(_is_tokens(part) for part in parts) or len({(part.shape[2:], part.dtype) for part in parts}) > 1:
            return None
        longest = max(part.shape[1] for part in parts)
        if not causal and "attention_mask" not in keys and any(part.shape[1] < longest for part in parts):
            return None
        filling = IGNORED if key in labels else 0
        joined[key] = torch.cat([_padded(part, longest, filling) for part in parts])
    return joined


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and not value.is_floating_point()


def _padded(part: Tensor, length: int, filling: int) -> Tensor:
    return F.pad(part, (0, 0) * (part.dim() - 2) + (0, length - part.shape[1]), value=filling)


#: The folder of the training state in one of Trainer's checkpoints.
STATE = "megacompile"


class Trainer(transformers.Trainer):
    """`transformers.Trainer` for a streamed model. To adapt another trainer, inherit from this class first:
    `class Mine(megacompile.trainer.Trainer, TheirTrainer): pass`.

    `whole_steps`: whether a step may run as one program, which never exposes gradients. Set it to False if a callback reads
    `.grad`, or if the batches of a step must not be joined.

    Raises `UnsupportedError` for arguments that are not supported, `MegacompileError` for a model that is not streamed."""

    whole_steps: bool = True
    #: Implementations of `compute_loss` that return the model's own loss, the one that a whole step computes.
    own_losses: tuple[Any, ...] = (transformers.Trainer.compute_loss,)
    #: True if the router loss counts once for each process, as with `transformers.Trainer.compute_loss`, which multiplies the
    #: whole loss by the number of processes.
    router_loss_of_each_process: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gathered: list[Mapping[str, Any]] = []  # batches of the current step that have not run yet
        self._parameters = 0  # number of parameters without embeddings, counted once
        self._token_rate = TokenRate()
        self._read_ahead = ReadAhead()
        self._long_lived = LongLived(lambda: compiled_variants(check_model(self.model)),
                                     lambda: len(check_model(self.model).executables))
        super().__init__(*args, **kwargs)
        streamed = check_model(self.model)
        # A loss that is not a sum over tokens is a mean over each batch, and takes no such argument.
        self.model_accepts_loss_kwargs &= streamed.captured.has_loss_denominator
        check_metric(self, self.metrics_of_evaluations())

    def create_accelerator_and_postprocess(self) -> None:
        if self.model is not None:  # otherwise `model_init` creates it later
            check_arguments(self.args, check_model(self.model))
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # a streamed model uses one GPU; Trainer would put replicas on the others
        super().create_accelerator_and_postprocess()
        # Accelerate would move optimizer state to the device, and wrap forward in an autocast to the model's own dtype.
        self.accelerator.device_placement = self.accelerator.native_amp = False
        if self.accelerator.dispatch_batches:  # batches that one process reads are sent from device to device
            prepare = self.accelerator.prepare_data_loader
            self.accelerator.prepare_data_loader = lambda loader, **_: prepare(loader, device_placement=True)
        # All versions of Trainer clip through this function. AdamW clips in its update by the same rule.
        self.accelerator.clip_grad_norm_ = lambda *args, **kwargs: math.nan
        # With several processes, Accelerate would wrap a model that is prepared for training in DistributedDataParallel.
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    # ---------------------------------------------------------------- optimizer
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """The optimizer that `args.optim_args` or `args.optim` names, with the settings in `args`."""
        return optimizer_asked(args)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Creates the optimizer as Trainer does, or takes the one that was passed. Raises `MegacompileError` if that is not a
        `megacompile.AdamW`, or if it contradicts `max_grad_norm`."""
        check_arguments(self.args, check_model(self.model))
        refuse_other_forwards(self.model, type(self).__name__)
        optimizer = super().create_optimizer(*args, **kwargs)
        self._count_parameters()  # before the first update
        self._streamed_optimizer.max_grad_norm = _max_grad_norm(self._streamed_optimizer, self.args.max_grad_norm)
        self._streamed_optimizer.norm_of_model = True  # Trainer clips all parameters of the model together
        return optimizer

    @property
    def _streamed_optimizer(self) -> StreamedOptimizer:
        """The optimizer, without Accelerate's wrapper."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, StreamedOptimizer):
            raise MegacompileError(f"a streamed model is trained with an optimizer of megacompile, not "
                                   f"{type(optimizer).__name__}: leave the optimizer out, or pass optimizers=(megacompile."
                                   "AdamW(model.parameters(), ...), None)")
        return optimizer

    # ---------------------------------------------------------------- steps
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains, as the base class does."""
        try:
            with self._long_lived:
                return super().train(*args, **kwargs)
        finally:
            self._read_ahead = ReadAhead()  # the loader's iterator holds its workers

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of the next step, and the number of their targets. The batches may have been read before a log."""
        return super().get_batch_samples(self._read_ahead.of(epoch_iterator), num_batches, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss of one batch, 0-d, detached. In a whole step, the last batch returns the loss of all batches, and the others
        return 0."""
        loss = self._training_step(model, inputs, num_items_in_batch)
        self._long_lived.after_step()
        return loss

    def _training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        streamed = check_model(self.model)
        self._token_rate.begin(streamed.step.tokens)
        if num_items_in_batch is None or not self.steps_are_whole():
            return self._separate_step(model, inputs, num_items_in_batch)
        self._gathered.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._gathered = self._gathered, []
        captured = streamed.captured
        if len(batches) > 1:
            batches = [without_bounds(type(self.model).__name__, captured, batch) for batch in batches]
        apart = len(batches) > 1 and _joining_changes_results(captured, batches)
        batch = None if apart else join(batches, captured.labels, captured.causal)
        if not streamed.rank_group.all_agree("training_step", batch is not None) or batch is None:
            return torch.stack([self._separate_step(model, each, num_items_in_batch) for each in batches]).sum()
        model.train()
        denominator = self._loss_denominator(num_items_in_batch)
        return model.megacompile.train_step({**batch, "num_items_in_batch": denominator}, self._streamed_optimizer)

    def _separate_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Trainer's own step: forward and backward of one batch. Whatever computes the loss, the mean of the losses of all
        processes is trained, as with DistributedDataParallel."""
        with check_model(self.model).rank_group.averaging_losses():
            return super().training_step(model, inputs, num_items_in_batch)

    def _loss_denominator(self, num_items_in_batch: Any) -> Any:
        """The divisor of a whole step's loss, which is a sum over all processes. With `average_tokens_across_devices=False`,
        Trainer counts only the items of this process, and the mean of the losses of all processes is trained."""
        return num_items_in_batch * (1 if self.args.average_tokens_across_devices else self.args.world_size)

    def steps_are_whole(self) -> bool:
        """True if steps run as one program. The loss must be the model's own, and nothing may change it."""
        multiplied = (self.router_loss_of_each_process and self.args.average_tokens_across_devices and self.args.world_size > 1
                      and check_model(self.model).captured.is_averaged)
        return (self.whole_steps and type(self).compute_loss in self.own_losses and self.compute_loss_func is None
                and self.label_smoother is None and isinstance(self.model_wrapped, StreamedModule) and not multiplied)

    def metrics_of_evaluations(self) -> Sequence[str]:
        """The names of the values that each evaluation logs beside the loss and times, as far as this class knows."""
        return ()

    # ---------------------------------------------------------------- checkpoints
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Calls `save_checkpoint` instead of writing two pickles. The state is written tile by tile, and is on disk when this
        returns."""
        save_checkpoint(Path(output_dir, STATE), self.model, self._streamed_optimizer, scheduler=self.lr_scheduler, keep=1)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Reads the state tile by tile and restores masters, moments and scheduler bit-exactly. A checkpoint that
        `transformers.Trainer` has written is read by its own code."""
        if checkpoint is None or not Path(checkpoint, STATE).exists():
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load_checkpoint(Path(checkpoint, STATE), self.model, self._streamed_optimizer, scheduler=self.lr_scheduler)

    # ---------------------------------------------------------------- logs
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, and adds to each loss `tokens_per_second` (without padding) and `padding_share` (of the computed tokens) since
        the last one, and of a mixture `expert_load_max` and `expert_idle` of the last step (`Handle.stats`). Waits for
        `grad_norm`, which is known once the update has begun; with `update="arrival"` there is none. Before it waits, it
        reads the batches of the next step, which the device would otherwise wait for."""
        if "loss" in logs:
            logs.update(self._token_rate.since(check_model(self.model).step.tokens))
            logs.update(imbalance(self.model.megacompile.expert_loads()))
        if "train_runtime" in logs:
            self._token_rate.end()
        if "grad_norm" in logs:
            if self._reads_ahead():
                self._read_ahead.read(self.args.gradient_accumulation_steps)
            norm = self._streamed_optimizer.grad_norm
            if norm is not None:
                logs["grad_norm"] = norm
            else:
                del logs["grad_norm"]
        super().log(logs, *args, **kwargs)

    def _reads_ahead(self) -> bool:
        """True if a step follows in this epoch, and its batches come as the loader gives them. A subclass may take them from
        another iterator."""
        control = self.control
        return (self.state.global_step < self.state.max_steps and not control.should_epoch_stop
                and not control.should_training_stop and type(self).get_batch_samples is Trainer.get_batch_samples)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """transformers' estimate."""
        name = getattr(self.model, "main_input_name", "input_ids")
        return 6 * inputs[name].numel() * self._count_parameters() if name in inputs else 0

    def _count_parameters(self) -> int:
        """The number of weights without embeddings; 0 for a model that cannot tell. Counted once, since counting waits for the
        update in flight."""
        if not self._parameters and hasattr(self.model, "num_parameters"):
            of_codes = weights_of_codes(self.model)
            self._parameters = self.model.num_parameters(exclude_embeddings=True) + sum(
                of_codes[id(p)] - p.numel() for p in self.model.parameters() if id(p) in of_codes)
        return self._parameters


def _joining_changes_results(captured: CapturedModel, batches: Sequence[Mapping[str, Any]]) -> bool:
    """True if joining the batches would change what the model computes. It would for an auxiliary loss, which Trainer adds up
    batch by batch; if rows of a batch affect each other; and if padding would show: a value is computed from all positions of a
    batch, or tokens are selected by their values."""
    if captured.is_averaged or captured.across_rows or captured.totals:
        return True
    lengths = {each.shape[1:2] for batch in batches for each in batch.values() if isinstance(each, Tensor)}
    if len(lengths) > 1 and (captured.counts_positions or captured.chooses_tokens):
        return True
    return captured.counts_positions and "position_ids" in batches[0]


def _max_grad_norm(optimizer: StreamedOptimizer, argument: float) -> float | None:
    """The maximum norm that the optimizer and TrainingArguments agree on."""
    wanted = checked_norm(argument, False)
    if optimizer.on_arrival and wanted is not None:
        raise MegacompileError(f"max_grad_norm={argument} cannot be applied with update='arrival', which updates before "
                               "the global norm is known: pass TrainingArguments(max_grad_norm=0), or leave update out")
    if optimizer.max_grad_norm not in (None, wanted):
        raise MegacompileError(f"the optimizer clips at max_grad_norm={optimizer.max_grad_norm}, but TrainingArguments at "
                               f"{argument}: pass the same value to both")
    return wanted
