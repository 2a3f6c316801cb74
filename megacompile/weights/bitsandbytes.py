"""Weights that bitsandbytes has quantized: which of our formats they have, how their products are computed, and layers of a
model in memory."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.weights.codes import SCALES_IN_GROUP, EightBits, Format, FourBits, as_bytes
from megacompile.weights.quantized_linear import QuantizedLinear

#: Attributes by which transformers, PEFT and TRL recognize a model whose layers are those of bitsandbytes.
_LOADED = ("is_loaded_in_4bit", "is_loaded_in_8bit")
_MARKS = (*_LOADED, "is_quantized", "quantization_method", "hf_quantizer")


def four_bits(what: str, shape: Sequence[int], block: int, group: int | None) -> FourBits:
    """The format of a weight of this shape. `block`: the number of weights that share a scale. `group`: the number of scales
    that share one; None: scales are not nested. Raises `UnsupportedError` for a weight that is not in a format of ours."""
    if group not in (None, SCALES_IN_GROUP):
        raise UnsupportedError(f"{what} has nested blocks of {group} scales, not {SCALES_IN_GROUP}: quantize the model again")
    found = FourBits(block, group is not None)
    if len(shape) != 2 or not found.fits((shape[0], shape[1])):
        raise UnsupportedError(f"{what} of {list(shape)} is stored in blocks of {block}, which do not divide it: leave the "
                               "layer in bfloat16 (llm_int8_skip_modules)")
    return found


def compute_dtype_of(config: Any) -> torch.dtype | None:
    """The `compute_dtype` of a `QuantizedLinear` that a `BitsAndBytesConfig` asks for. None for float32, which is that config's
    default, and for anything that is not such a config. Raises `UnsupportedError` for float16."""
    return _supported(getattr(config, "bnb_4bit_compute_dtype", None) if getattr(config, "load_in_4bit", False) else None)


def _supported(dtype: torch.dtype | None) -> torch.dtype | None:
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise UnsupportedError(f"bnb_4bit_compute_dtype={dtype} is not supported: give torch.bfloat16")
    return dtype if dtype == torch.bfloat16 else None


def compute_dtype_of_checkpoint(config: Any) -> torch.dtype | None:
    """As `compute_dtype_of`, by the config of a checkpoint. None also for float16, which the user has not asked for."""
    said = _said(config)
    bfloat16 = said.get("load_in_4bit") and str(said.get("bnb_4bit_compute_dtype")) in ("bfloat16", "torch.bfloat16")
    return torch.bfloat16 if bfloat16 else None


def _said(config: Any) -> dict[str, Any]:
    """What a model's config says of how bitsandbytes has quantized it; empty if it does not."""
    how = getattr(config, "quantization_config", None) or {}
    said = dict(how if isinstance(how, dict) else how.to_dict())
    return said if said.get("quant_method") == "bitsandbytes" else {}


def forget_bitsandbytes(model: nn.Module) -> None:
    """Removes from a model and its config what says that bitsandbytes has quantized it. With that, trainers would cast adapters
    to bfloat16 and refuse to move the model, and a saved model's config would describe other weights than its files have."""
    for module in model.modules():
        marked = vars(module)
        config: Any = marked.get("config")
        if _said(config):
            del config.quantization_config
        if marked.get("quantization_method") == "bitsandbytes" or not marked.keys().isdisjoint(_LOADED):
            for mark in _MARKS:
                marked.pop(mark, None)


def adopt_bitsandbytes(model: nn.Module) -> None:
    """Replaces the linear layers of bitsandbytes in a model by ours, which have the same values. Nothing then marks the model
    as one of bitsandbytes. Raises `UnsupportedError`, before the model has changed, for other layers of bitsandbytes, for
    weights that are not quantized yet or not in a format of ours, and for products in float16."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()
             if any(base.__module__.startswith("bitsandbytes.nn") for base in type(child).__mro__)]
    made = [(parent, name, _adopted(f"{type(child).__name__} {name} of bitsandbytes", child)) for parent, name, child in found]
    for parent, name, layer in made:
        parent._modules[name] = layer
    if made:
        forget_bitsandbytes(model)


def _adopted(what: str, layer: Any) -> QuantizedLinear:
    if not isinstance(layer, nn.Linear):
        raise UnsupportedError(f"{what} cannot be streamed: only its linear layers can; leave it in bfloat16")
    values = _four_bits(what, layer) if hasattr(layer.weight, "quant_state") else _eight_bits(layer)
    if values is None:
        raise UnsupportedError(f"{what} is not quantized yet: load the model with a BitsAndBytesConfig, or move it to a device "
                               "once")
    stored, codes, scales = values
    made = QuantizedLinear(layer.in_features, layer.out_features, layer.bias, stored, "meta",
                           _supported(getattr(layer, "compute_dtype", None)))
    made.put(codes.detach().as_subclass(Tensor).cpu().contiguous().view(torch.uint8).flatten(), scales)
    return made.train(layer.training)


def _four_bits(what: str, layer: Any) -> tuple[Format, Tensor, Tensor] | None:
    """Format, codes and scales; None if there are none yet."""
    state = layer.weight.quant_state
    if state is None:
        return None
    group = int(state.state2.blocksize) if state.nested else None
    stored = four_bits(what, (layer.out_features, layer.in_features), int(state.blocksize), group)
    if not stored.nested:
        return stored, layer.weight, as_bytes(state.code, state.absmax)
    floats = as_bytes(state.code, state.state2.code, state.offset, state.state2.absmax)
    return stored, layer.weight, torch.cat([floats, state.absmax.cpu()])


def _eight_bits(layer: Any) -> tuple[Format, Tensor, Tensor] | None:
    """As `_four_bits`. After the first forward, codes and scales are in the layer's state."""
    def part(name: str) -> Tensor | None:
        return next((found for holder in (layer.weight, getattr(layer, "state", None))
                     if (found := getattr(holder, name, None)) is not None), None)

    codes, scales = part("CB"), part("SCB")
    codes = layer.weight if codes is None else codes
    return None if scales is None or codes.dtype != torch.int8 else (EightBits(), codes, as_bytes(scales.float() / 127))
