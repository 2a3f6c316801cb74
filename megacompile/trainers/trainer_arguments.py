"""Refuses trainer arguments that a streamed model does not support, before the first step, with the reason and the remedy."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megacompile.errors import ArgumentError, MegacompileError, UnsupportedError
from megacompile.streaming.optimizer.names import named_in_text, optimizer_named
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.streaming.streamed import Streamed
from megacompile.streaming.streamed_module import StreamedModule


def _asks(name: str) -> Callable[[Any, Streamed], bool]:
    return lambda args, streamed: bool(getattr(args, name, None))


def _stays_fp32(args: Any, streamed: Streamed) -> bool:
    return bool(args.bf16) and streamed.dtypes != {torch.bfloat16}


def _elsewhere(args: Any, streamed: Streamed) -> bool:
    return torch.device(args.device).type != streamed.backend.device.type


def _other_processes(args: Any, streamed: Streamed) -> bool:
    return bool(args.world_size != streamed.rank_group.size)


def _divided(args: Any, streamed: Streamed) -> bool:
    return streamed.store.division is not None


def _uneven_steps(args: Any, streamed: Streamed) -> bool:
    even = getattr(args.accelerator_config, "even_batches", True)
    return args.world_size > 1 and not even and not args.dataloader_drop_last


#: (predicate, reason and remedy). The first one that is true is reported.
_REFUSED: tuple[tuple[Callable[[Any, Streamed], bool], str], ...] = (
    (_other_processes, "TrainingArguments has another number of processes than the streamed model: start all of them with "
                       "torchrun or accelerate launch, and leave distributed=False out of stream()"),
    (_divided, "a copy of the model that hosts divide is saved by all ranks together, and trainers save it on one: write the "
               "loop, or give stream() a mesh with a row for each host"),
    (_uneven_steps, "even_batches=False gives some processes fewer batches, for which the others would wait: leave it out, or "
                    "pass dataloader_drop_last=True"),
    (_asks("deepspeed"), "deepspeed places weights by itself, as streaming does: leave one of them out"),
    (_asks("fsdp"), "fsdp places weights by itself, as streaming does: leave one of them out"),
    (_elsewhere, "the model is streamed on another device than the one in TrainingArguments: pass use_cpu=True for a model "
                 "streamed with device='cpu', or call stream(model) without device= for CUDA"),
    (_asks("fp16"), "fp16 is not supported: call stream(model, dtype=torch.bfloat16) and pass bf16=True"),
    (_stays_fp32, "bf16=True requests bf16, but the model is streamed in fp32: call stream(model, dtype=torch.bfloat16), which "
                  "keeps FP32 masters, or pass bf16=False"),
    (_asks("fp16_full_eval"), "fp16_full_eval would cast the weights: leave it out"),
    (_asks("torch_compile"), "torch_compile would wrap the model, whose layers are compiled already: leave it out"),
    (_asks("use_liger_kernel"), "use_liger_kernel would replace modules that are captured already: leave it out"),
    (_asks("neftune_noise_alpha"), "neftune_noise_alpha needs a hook on the embedding, which a streamed model does not call: "
                                   "leave it out"),
    (_asks("activation_offloading"), "activation_offloading is decided by the plan (host_checkpoints of "
                                     "stream()): leave it out"),
)


def check_arguments(args: Any, streamed: Streamed) -> None:
    """Raises `UnsupportedError` if TrainingArguments request something that a streamed model does not support, and
    `ArgumentError` for an unknown optimizer."""
    for asked, reason in _REFUSED:
        if asked(args, streamed):
            raise UnsupportedError(reason)
    optimizer_asked(args)


#: The values that Trainer logs for each evaluation, without `compute_metrics`.
_EVALUATED = ("loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
#: Methods that may log more, and the modules whose methods are known not to, or say what they log.
_LOGGING = ("evaluate", "evaluation_loop", "prediction_step", "compute_loss", "log")
_KNOWN = ("transformers.trainer", "trl.trainer.base_trainer", "trl.trainer.sft_trainer", "megacompile.trainer",
          "megacompile.sft")


def check_metric(trainer: Any, logged: Sequence[str]) -> None:
    """Raises `ArgumentError` if no evaluation logs `metric_for_best_model`, where that can be known. transformers would fail at
    the first evaluation. `logged`: what the trainer logs of each evaluation beside the loss, for all data sets together."""
    args = trainer.args
    if args.metric_for_best_model is None or args.eval_strategy == "no" or not args.skip_memory_metrics:
        return
    owners = [kind for kind in type(trainer).__mro__ if any(name in vars(kind) for name in _LOGGING)]
    callbacks = {type(each).__module__.partition(".")[0] for each in trainer.callback_handler.callbacks}
    if trainer.compute_metrics is not None or any(kind.__module__ not in _KNOWN for kind in owners) or (
            callbacks - {"transformers", "trl"}):
        return
    data = trainer.eval_dataset
    prefixes = [f"eval_{name}_" for name in data] if isinstance(data, Mapping) else ["eval_"]
    names = [prefix + metric for prefix in prefixes for metric in _EVALUATED] + [f"eval_{metric}" for metric in logged]
    if f"eval_{args.metric_for_best_model.removeprefix('eval_')}" not in names:
        raise ArgumentError(f"metric_for_best_model={args.metric_for_best_model!r} is not among what evaluations log: choose "
                            f"one of {', '.join(names)}, or pass compute_metrics")


def optimizer_asked(args: Any) -> tuple[type[StreamedOptimizer], dict[str, Any]]:
    """The class and the options of the optimizer in TrainingArguments: the one named by `optim_args`, else by `optim`. Raises
    `ArgumentError`."""
    optim = _word(args.optim)
    name, options = named_in_text(args.optim_args)
    if name not in (None, optim) and optim != _word(type(args).optim):
        raise ArgumentError(f"optim={optim!r} and optimizer={name} in optim_args name two optimizers: leave one of them out")
    named = optimizer_named(optim if name is None else name)
    known = dict(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
    return named.kind, named.arguments(known, options)


def _word(name: Any) -> str:
    return str(getattr(name, "value", name))  # transformers' names are an enum


def check_model(model: Any) -> Streamed:
    """The streaming state of a trainer's model. Raises `MegacompileError` if the model is not streamed, or is wrapped."""
    if isinstance(model, StreamedModule):
        return model.megacompile.streamed
    if hasattr(model, "get_base_model") and isinstance(model.get_base_model(), StreamedModule):
        raise UnsupportedError("an adapter was added to a model that is streamed already: call peft.get_peft_model before "
                               "megacompile.stream, on the plain model (or close() the streamed model first)")
    what = "wrapped" if isinstance(model, nn.Module) and hasattr(model, "megacompile") else "not streamed"
    raise MegacompileError(f"the {type(model).__name__} to be trained is {what}: call model = megacompile.stream(model) and "
                           "pass the result to the trainer")


def refuse_other_forwards(model: nn.Module, trainer: str) -> None:
    """Raises `UnsupportedError` if the model's forward was replaced since it was streamed by one that does not stream."""
    forward = vars(model).get("forward")
    if forward is not None and not hasattr(forward, "streams"):
        raise UnsupportedError(f"{trainer} replaces the model's forward with one that does not stream: train with a "
                               "trainer of megacompile (in megacompile.trainer, sft, dpo, grpo, rloo or online_dpo), or "
                               "compute the loss outside of the model")
