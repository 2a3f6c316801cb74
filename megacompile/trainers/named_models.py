"""Loads and streams a model that a trainer is given by name (a folder or an id on the Hub), as TRL would load it."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from megacompile.errors import UnsupportedError
from megacompile.loading import from_pretrained
from megacompile.planning.config import StreamConfig, dtype_named
from megacompile.trainers.fused_head import refuse_dropout

#: Keywords of a model's `from_pretrained` that are refused: the values that are allowed, the reason and the remedy.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((None, False), "code that comes with a model is not run: leave it out"),
    "device_map": ((None, "auto"), "streaming decides where weights are: leave it out, or pass use_cpu=True"),
    "attn_implementation": ((None, "eager", "sdpa"), "the attention kernel is chosen for the device: leave it out"),
    "use_kernels": ((None, False), "layers are compiled: leave it out"),
}
_STREAMING = {field.name for field in fields(StreamConfig)} - {"dtype", "device"}


def load_named(name: str, args: Any, options: Mapping[str, Any], adapter: Any = None, adapted_later: bool = False) -> Any:
    """Loads and streams the model with this name, on the device of the trainer's arguments.

    `options`: `model_init_kwargs`, which may also contain options of `stream` (device_memory, ...). TRL's default dtype is
    float32, and with bf16=True it computes in bfloat16; this corresponds to a model streamed in bfloat16, which has FP32
    masters. `adapter`: a `peft.LoraConfig`, or None. `adapted_later`: the caller adds one, so the weights may be quantized
    (`quantization_config`).

    Raises `UnsupportedError` for options that are not supported, and what `from_pretrained` raises."""
    given = dict(options)
    for key, (allowed, reason) in _REFUSED.items():
        if key in given and given.pop(key) not in allowed:
            raise UnsupportedError(f"{key}={options[key]!r} is not supported: {reason}")
    dtypes = [given.pop(key) for key in ("dtype", "torch_dtype") if key in given]
    dtype = torch.bfloat16 if args.bf16 else dtype_named(dtypes[0] if dtypes else "float32")
    streaming = {key: given.pop(key) for key in list(given) if key in _STREAMING}
    revision = given.pop("revision", None)
    quantize = given.pop("quantization_config", None)
    config = _config(name, revision, given) if given else None
    device = "cpu" if torch.device(args.device).type == "cpu" else None
    return from_pretrained(name, dtype=dtype, config=config, revision=revision, adapter=adapter, device=device,
                           quantize=quantize, trainable=not (adapted_later and quantize), **streaming)


def loader(args: Any, adapter: Any, without_dropout: bool) -> Callable[[str, Mapping[str, Any]], Any]:
    """`load_named` for a trainer that adds the `adapter` itself. With `without_dropout`, the function raises `UnsupportedError`
    for a model or adapter with dropout."""
    def load(name: str, options: Mapping[str, Any]) -> Any:
        loaded = load_named(name, args, options, adapted_later=adapter is not None)
        if without_dropout:
            refuse_dropout(loaded, adapter)
        return loaded
    return load


def _config(name: str, revision: str | None, changes: Mapping[str, Any]) -> Any:
    """The model's config with these changes. Raises `UnsupportedError` for a name that the config does not have."""
    from transformers import AutoConfig

    config, unused = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False, return_unused_kwargs=True,
                                                **changes)
    if unused:
        raise UnsupportedError(f"model_init_kwargs has {next(iter(unused))}, which is an option of neither the config of "
                               f"{name} nor megacompile.stream: leave it out")
    return config
