"""Engines for verl: its workers train and evaluate a streamed model. Importing this module registers them.

    actor_rollout_ref.model.external_lib=megacompile.trainers.verl_engine actor_rollout_ref.actor.strategy=megacompile

verl calls a loss on each of its micro-batches, with values of each token. The micro-batches of a batch share one forward and
one backward here, so that weights stream once for all of them; the program divides their rows into micro-batches of its own.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import verl
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id, get_device_name
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine.spec import ShardSpec
from verl.workers.engine.utils import (
    _hf_entry_identity,
    detach_tree,
    hf_delta_export,
    postprocess_batch_func,
    prepare_micro_batches,
)

import megacompile
from megacompile.errors import UnsupportedError
from megacompile.inputs.repacking import Wanted
from megacompile.losses import IGNORED, log_probabilities_and_entropies, zero_where_ignored
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.trainers.sent_weights import refuse_codes, sent_weights

#: Releases of verl that the engines were tested with. Its interface of engines "is subject to change".
VERSIONS = ("0.9",)
#: The name of these engines in verl's registry (`strategy`).
BACKEND = "megacompile"
_DEVICES = ["cuda", "cpu"]
#: In a checkpoint's folder: the state of a run, and files for other programs.
_RUN, _HUGGING_FACE = "megacompile", "huggingface"
#: Parts of a checkpoint that are written and loaded together.
_PARTS = ("model", "optimizer", "extra")

if not verl.__version__.startswith(tuple(f"{each}." for each in VERSIONS)):
    raise UnsupportedError(f"verl {verl.__version__} was not tested with megacompile's engine: install verl "
                           f"{' or '.join(VERSIONS)}, or choose another strategy")


# -------------------- Settings
@dataclass
class MegacompileEngineConfig(FSDPEngineConfig):
    """verl's settings of an FSDP engine, with more fields. The engines take verl's own class too.

    Args:
        stream: options of `megacompile.stream`, such as {"device_memory": "40GiB"}.
        tokens_per_forward: the most tokens of this rank whose micro-batches share a forward. None: all of a batch."""

    strategy: str = BACKEND
    stream: dict[str, Any] = field(default_factory=dict)
    tokens_per_forward: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", BACKEND)  # a frozen field; verl's defaults name FSDP, and its class refuses ours


def _asked(config: Any, name: str) -> Any:
    """The value of a setting with this dotted name; None if a part of it is missing."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config


#: (whose setting, its name, the values that are supported, the reason and the remedy).
_REFUSED: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("engine", "ulysses_sequence_parallel_size", (None, 1), "each GPU has whole rows: leave it at 1"),
    ("engine", "router_replay.mode", (None, "disabled"), "routers choose experts in every forward: set it to disabled"),
    ("engine", "qat.enable", (None, False), "weights are not quantized in training: leave it out"),
    ("engine", "full_determinism", (None, False), "it changes kernels that are compiled already: leave it out"),
    ("engine", "mixed_precision.param_dtype", (None, "bf16", "bfloat16", "fp32", "float32"), "compute in bf16 or fp32"),
    ("model", "trust_remote_code", (None, False), "code that comes with a model is not run: leave it out"),
    ("model", "use_liger", (None, False), "layers are compiled: leave it out"),
    ("model", "enable_activation_offload", (None, False), "the plan decides that: leave it out"),
    ("model", "tiled_mlp.enabled", (None, False), "layers are compiled: leave it out"),
    ("model", "mtp.enable", (None, False), "heads for several tokens are not trained: leave it out"),
    ("model", "lora_adapter_path", (None,), "start from a new adapter (lora_rank), or merge this one into the model's files"),
    ("checkpoint", "async_save", (None, False), "verl would go on before a checkpoint is complete: leave it out"),
    ("checkpoint", "save_lora_only", (None, False), "a checkpoint has all weights: leave it out"),
    ("optimizer", "optimizer", ("AdamW", "Lion", "Muon", "SGD"), "choose AdamW, Lion, Muon or SGD"),
    ("optimizer", "optimizer_impl", ("torch.optim", "megacompile"), "choose megacompile"),
)


def check_settings(**configs: Any) -> None:
    """Raises `UnsupportedError` if verl's configs ask for something that a streamed model does not support. `configs`: those of
    `engine`, `model`, `checkpoint` and, if it trains, `optimizer`."""
    for owner, name, supported, reason in _REFUSED:
        if owner in configs and (value := _asked(configs[owner], name)) not in supported:
            raise UnsupportedError(f"{name}={value!r} is not supported by the engine {BACKEND}: {reason}")
    model, loaded = configs["model"], configs["checkpoint"].load_contents
    if model.lora_rank > 0 and not model.lora.get("merge", False):
        raise UnsupportedError("lora_rank > 0 needs lora.merge=True: the rollout gets merged weights, not an adapter")
    if missing := [part for part in _PARTS if part not in loaded]:
        raise UnsupportedError(f"load_contents leaves out {missing[0]!r}, and a checkpoint is loaded whole: add it")
    optimizer = configs.get("optimizer")
    if optimizer is not None and optimizer.optimizer_impl == "torch.optim" and optimizer.optimizer not in ("AdamW", "SGD"):
        raise UnsupportedError(f"optimizer={optimizer.optimizer} is not torch.optim's: set optimizer_impl=megacompile")


def compute_dtype(engine_config: Any) -> torch.dtype:
    """The dtype that the model is streamed in: that of verl's mixed precision, which is bfloat16 unless it is given. Masters
    are FP32."""
    return PrecisionType.to_dtype(_asked(engine_config, "mixed_precision.param_dtype") or "bf16")


# -------------------- Values of tokens
@zero_where_ignored
def _policy_values(logits: Tensor, targets: Tensor, temperatures: Tensor, fields: tuple[str, ...]) -> dict[str, Tensor]:
    """Each token's values of a policy, [N], in verl's names. `temperatures`: float32 [N]."""
    scores = logits.float() / temperatures.clamp(min=1e-8)[:, None]
    log_probs, entropy = log_probabilities_and_entropies(scores, targets)  # what no field reads is not computed
    made: dict[str, Callable[[], Tensor]] = {
        "log_probs": lambda: log_probs, "entropy": lambda: entropy,
        "sum_pi_squared": lambda: (2 * scores.log_softmax(-1)).logsumexp(-1).exp().detach()}
    return {name: made[name]().masked_fill(targets == IGNORED, 0) for name in fields}


def _critic_values(logits: Tensor) -> dict[str, Tensor]:
    """Each token's value, [N]."""
    return {"values": logits[:, 0].float()}


@functools.cache
def _policy_function(fields: tuple[str, ...]) -> Callable[..., dict[str, Tensor]]:
    """One function object for the same fields, since every new object is traced again."""
    return functools.partial(_policy_values, fields=fields)


class _Rows(NamedTuple):
    """The rows of several micro-batches, padded on the right. `places`: of their tokens, in order, in a flat [rows, length]."""

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    temperatures: Tensor
    places: Tensor

    @classmethod
    def of(cls, micro_batches: Sequence[Any]) -> _Rows:
        """Raises `UnsupportedError` for batches with more than tokens."""
        for each in micro_batches:
            _refuse_others(each)
        tokens = torch.cat([each["input_ids"].values() for each in micro_batches]).cpu()
        lengths = torch.cat([each["input_ids"].offsets().diff() for each in micro_batches]).cpu()
        length = int(lengths.max())
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        column = torch.arange(len(tokens)) - (lengths.cumsum(0) - lengths)[row]
        positions = torch.cat([each["position_ids"].values() for each in micro_batches]).cpu()
        if not torch.equal(positions, column.to(positions.dtype)):
            raise UnsupportedError("position_ids do not count the tokens of each row from 0: leave packing of rows to the "
                                   "engine")
        places = row * length + column

        def padded(values: Tensor, padding: int) -> Tensor:
            made = values.new_full((len(lengths) * length,), padding)
            made[places] = values
            return made.view(len(lengths), length)

        input_ids, mask = padded(tokens, 0), padded(torch.ones_like(tokens), 0)
        # A row's last token has no target. verl's FSDP engine takes the next row's first token, which losses leave out.
        targets = torch.nn.functional.pad(input_ids.masked_fill(mask == 0, IGNORED)[:, 1:], (0, 1), value=IGNORED)
        each_row = torch.cat([_temperatures(each) for each in micro_batches])
        return cls(input_ids, mask, targets, each_row[:, None].expand(-1, length).contiguous(), places)


def _setting(batch: Any, name: str, default: Any = None) -> Any:
    return tensordict_utils.get_non_tensor_data(data=batch, key=name, default=default)


def _temperatures(batch: Any) -> Tensor:
    """The temperature of each row, float32 on the CPU."""
    found = _setting(batch, "temperature", 1.0)
    made = found if isinstance(found, Tensor) else torch.full((len(batch),), float(found))
    return made.detach().to("cpu", torch.float32)


def _refuse_others(batch: Any) -> None:
    for name in ("distillation_use_topk", "distillation_only"):
        if _setting(batch, name, False):
            raise UnsupportedError(f"{name} needs the logits of every token, which a streamed model never holds: distill with "
                                   "an FSDP engine")
    if any(_setting(batch, "multi_modal_inputs", None) or ()) or batch["position_ids"].dim() > 2:
        raise UnsupportedError("images do not reach a streamed model through verl: train on text, or with an FSDP engine")
    if not batch["input_ids"].is_nested:
        raise UnsupportedError("input_ids are padded: set pad_mode=no_padding")


# -------------------- Engines
class _Mode(BaseEngineCtx):  # verl's context; no state is moved, since weights are in host memory
    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


@EngineRegistry.register(model_type="language_model", backend=BACKEND, device=_DEVICES)
class MegacompileEngine(BaseEngine):
    """verl's engine of a streamed policy. Each process has one GPU and its own rows; processes of a host share the weights.

    Raises `UnsupportedError` for settings that a streamed model does not support (`check_settings`)."""

    is_param_offload_enabled = is_optimizer_offload_enabled = False  # always in host memory

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.trains = not engine_config.forward_only
        check_settings(engine=engine_config, model=model_config, checkpoint=checkpoint_config,
                       **({"optimizer": optimizer_config} if self.trains else {}))
        self.mode: str | None = None
        self.module: Any = None
        self.optimizer: StreamedOptimizer | None = None
        self.lr_scheduler: Any = None
        self._saved: list[Path] = []
        self._delta_shard_snap: dict[str, Tensor] = {}

    # ---------------------------------------------------------------- making
    def initialize(self) -> None:
        if self.module is not None:  # verl resets a worker so
            self.module.megacompile.close()
        options = dict(getattr(self.engine_config, "stream", {}))
        options.setdefault("device", "cpu" if get_device_name() == "cpu" else f"cuda:{get_device_id()}")
        config = copy.deepcopy(self.model_config.hf_config)
        config._attn_implementation = "sdpa"  # a kernel for the device replaces it
        self.module = self._load(config, options)
        if self.trains:
            self.optimizer = self._make_optimizer()
            self.lr_scheduler = self._make_scheduler()

    def _load(self, config: Any, options: dict[str, Any]) -> Any:
        return megacompile.from_pretrained(self.model_config.local_path, config=config, dtype=compute_dtype(self.engine_config),
                                           adapter=self._adapter(), trainable=self.trains, **options)

    def _adapter(self) -> Any:
        """The `peft.LoraConfig` that verl's settings describe, or None."""
        model = self.model_config
        if model.lora_rank <= 0:
            return None
        from peft import LoraConfig, TaskType
        from verl.utils.py_functional import convert_to_regular_types as plain

        return LoraConfig(task_type=TaskType.CAUSAL_LM, r=model.lora_rank, lora_alpha=model.lora_alpha, bias="none",
                          target_modules=plain(model.target_modules), target_parameters=plain(model.target_parameters),
                          exclude_modules=plain(model.exclude_modules))

    def _make_optimizer(self) -> StreamedOptimizer:
        settings = self.optimizer_config
        kind = getattr(megacompile, settings.optimizer)
        given = dict(lr=settings.lr, weight_decay=settings.weight_decay, betas=tuple(settings.betas))
        options = {name: value for name, value in given.items() if name in kind.checks}
        options |= dict(max_grad_norm=settings.clip_grad, non_finite="skip")  # as verl skips such steps
        made: StreamedOptimizer = kind(self.module.parameters(), **options | dict(settings.override_optimizer_config or {}))
        if made.on_arrival:
            raise UnsupportedError("override_optimizer_config has update='arrival', and verl clips: leave it out")
        return made

    def _make_scheduler(self) -> Any:
        settings = self.optimizer_config
        warmup = settings.lr_warmup_steps
        if warmup <= 0:
            warmup = int(settings.lr_warmup_steps_ratio * settings.total_training_steps)
        if settings.lr_scheduler_type == "constant":
            return get_constant_schedule_with_warmup(optimizer=self.optimizer, num_warmup_steps=warmup)
        return get_cosine_schedule_with_warmup(
            optimizer=self.optimizer, num_warmup_steps=warmup, num_training_steps=settings.total_training_steps,
            min_lr_ratio=settings.min_lr_ratio, num_cycles=settings.num_cycles, zero_indexed_step=settings.zero_indexed_step)

    # ---------------------------------------------------------------- ranks
    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def _over_ranks(self, value: int, op: Any) -> int:
        made = torch.tensor(value, device=get_device_name())
        dist.all_reduce(made, op=op, group=self.get_data_parallel_group())
        return int(made)

    # ---------------------------------------------------------------- steps
    def train_mode(self, **kwargs: Any) -> _Mode:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> _Mode:
        return _Mode(self, "eval", **kwargs)

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any] | None,
                               forward_only: bool = False) -> dict[str, Any]:
        """verl's values of each micro-batch: `model_output`, `loss` and `metrics`. Unless `forward_only`, gradients of the sum
        of the losses are added to those that are there."""
        tokens = self._over_ranks(int(data["loss_mask"].sum()), dist.ReduceOp.SUM)
        group = self.get_data_parallel_group()
        tensordict_utils.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens, dp_size=self.get_data_parallel_size())
        micro_batches, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        keeps_values = forward_only or _setting(data, "return_model_output", False)
        outputs: list[dict[str, Any]] = []
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            for together in self._sharing_forwards(micro_batches):
                losses = []
                for batch, values in zip(together, self._values(together), strict=True):
                    loss, metrics = torch.ones(()), {}
                    if loss_function is not None:
                        loss, metrics = loss_function(model_output=values, data=batch.to(get_device_id()), dp_group=group)
                    losses.append(loss)
                    kept = {"model_output": detach_tree(values)} if keeps_values else {}
                    outputs.append({**kept, "loss": loss.detach().item(), "metrics": metrics})
                if not forward_only:
                    torch.stack(losses).sum().backward()
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _sharing_forwards(self, micro_batches: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """The micro-batches that share a forward. All ranks have the same number of forwards."""
        most, count = getattr(self.engine_config, "tokens_per_forward", None), 1
        if most is not None:
            tokens = sum(len(each["input_ids"].values()) for each in micro_batches)
            count = min(len(micro_batches), self._over_ranks(-(-tokens // most), dist.ReduceOp.MAX))
        for index in range(count):
            yield micro_batches[len(micro_batches) * index // count:len(micro_batches) * (index + 1) // count]

    def _values(self, micro_batches: Sequence[Any]) -> Iterator[dict[str, Tensor]]:
        """The model's values of each micro-batch's tokens, as nested tensors like its `input_ids`. One forward makes all."""
        rows = _Rows.of(micro_batches)
        function, tensors = self._function(micro_batches[0], rows)
        batch = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}
        found, _ = self.module.megacompile.values_of_tokens(function, batch, tensors, Wanted.TOKENS)
        offsets = [each["input_ids"].offsets() for each in micro_batches]
        flat = {name: value.flatten()[rows.places.to(value.device)].split([int(each[-1]) for each in offsets])
                for name, value in found.items()}
        for index, each in enumerate(offsets):
            yield {name: torch.nested.nested_tensor_from_jagged(parts[index], each.to(parts[index].device))
                   for name, parts in flat.items()}

    def _function(self, batch: Any, rows: _Rows) -> tuple[Callable[..., dict[str, Tensor]], dict[str, Tensor]]:
        """The function of tokens that makes the values of a batch, and its tensors."""
        optional = {"entropy": "calculate_entropy", "sum_pi_squared": "calculate_sum_pi_squared"}
        fields = tuple(name for name, asked in optional.items() if _setting(batch, asked, False))
        return _policy_function(("log_probs", *fields)), {"targets": rows.targets, "temperatures": rows.temperatures}

    def optimizer_zero_grad(self) -> None:
        self._training().zero_grad()

    def optimizer_step(self) -> float | None:
        """The norm of the gradients before clipping. Returns while the update runs. Gradients that are not finite change
        nothing."""
        optimizer = self._training()
        optimizer.step()
        return optimizer.grad_norm

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def _training(self) -> StreamedOptimizer:
        if self.optimizer is None:
            raise UnsupportedError("the engine has no optimizer: call initialize(), and leave forward_only out to train or "
                                   "save")
        return self.optimizer

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves nothing: weights and state are in host memory, and `stream.device_memory` limits what is on the device."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)

    def disable_adapter(self) -> contextlib.AbstractContextManager[Any]:
        adapted = hasattr(self.module, "get_base_model")
        return self.module.disable_adapter() if adapted else contextlib.nullcontext()

    # ---------------------------------------------------------------- weights for the rollout
    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False,
                             **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """The names and tensors of the policy's weights, one at a time on the device, with an adapter merged. Tied weights come
        once."""
        return unfuse_moe_params(self._weights(), self.model_config.hf_config.model_type), None

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        refuse_codes(self.module)
        device = self.module.megacompile.streamed.backend.device
        yield from sent_weights(self.module, device)
        if not hasattr(self.module, "get_base_model"):
            kept = self.module.state_dict().keys()
            yield from ((name, buffer.to(device)) for name, buffer in self.module.named_buffers() if name in kept)

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor, Any]], None]:
        """This rank's part of each weight: an equal share of its elements, flat and in bfloat16, with its place."""
        return self._shards(), None

    def _shards(self) -> Iterator[tuple[str, Tensor, Any]]:
        rank, ranks = self.get_data_parallel_rank(), self.get_data_parallel_size()
        for name, weight in self.get_per_tensor_param()[0]:
            flat = weight.reshape(-1)
            start, end = (len(flat) * each // ranks for each in (rank, rank + 1))
            part = flat[start:end].to(torch.bfloat16, copy=True)  # one that outlives the next update
            placed = {} if ranks == 1 else dict(place=start, gather_group=self.get_data_parallel_group())
            yield name, part, ShardSpec(full_shape=tuple(weight.shape), **placed)

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> tuple[Iterator[Any], None]:
        """What changed in this rank's shards since the last call, or since `prime_delta_snapshots`."""
        return hf_delta_export(self._shards(), self._delta_shard_snap, _hf_entry_identity), None

    # ---------------------------------------------------------------- checkpoints
    def save_checkpoint(self, local_path: str, hdfs_path: str | None = None, global_step: int = 0,
                        max_ckpt_to_keep: int | None = None, **kwargs: Any) -> None:
        """Writes the state of the run, and a Hugging Face folder with the tokenizer, the config and, if `save_contents` has
        "hf_model", the weights. Then removes the oldest folders that this engine has saved. `hdfs_path` is not used, as in
        verl's own engines."""
        folder, contents = Path(local_path), self.checkpoint_config.save_contents
        if any(part in contents for part in _PARTS):
            megacompile.save_checkpoint(folder / _RUN, self.module, self._training(), scheduler=self.lr_scheduler,
                                        extra={"global_step": global_step}, keep=1)
        if "hf_model" in contents:
            self.module.save_pretrained(folder / _HUGGING_FACE)
        if dist.get_rank() == 0:
            self._save_descriptions(folder / _HUGGING_FACE)
            self._saved.append(folder)
            while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
                shutil.rmtree(self._saved.pop(0))
        dist.barrier()

    def _save_descriptions(self, folder: Path) -> None:
        """Writes the config, the generation config and the tokenizer."""
        processor, generation = self.model_config.get_processor(), self.model_config.generation_config
        for each in (self.model_config.hf_config, generation, processor):
            if each is not None:
                each.save_pretrained(folder)

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True,
                        **kwargs: Any) -> None:
        """Restores what `save_checkpoint` has written, on any number of ranks. The folder stays."""
        megacompile.load_checkpoint(Path(local_path) / _RUN, self.module, self._training(), scheduler=self.lr_scheduler)
        dist.barrier()


@EngineRegistry.register(model_type="value_model", backend=BACKEND, device=_DEVICES)
class MegacompileValueEngine(MegacompileEngine):
    """verl's engine of a streamed critic: a model for token classification with one label. A new head is random."""

    def _load(self, config: Any, options: dict[str, Any]) -> Any:
        from transformers import AutoModelForTokenClassification

        config.num_labels, config.classifier_dropout = 1, 0.0
        plain = AutoModelForTokenClassification.from_pretrained(
            self.model_config.local_path, config=config, dtype=compute_dtype(self.engine_config), trust_remote_code=False)
        return megacompile.stream(plain.requires_grad_(self.trains), **options)

    def _function(self, batch: Any, rows: _Rows) -> tuple[Callable[..., dict[str, Tensor]], dict[str, Tensor]]:
        return _critic_values, {}
