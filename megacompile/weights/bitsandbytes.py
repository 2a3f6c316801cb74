"""Weights that bitsandbytes has quantized: which of our formats they have, and layers of a model in memory."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.weights.codes import SCALES_IN_GROUP, EightBits, Format, FourBits, as_bytes
from megacompile.weights.quantized_linear import QuantizedLinear


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


def adopt_bitsandbytes(model: nn.Module) -> None:
    """Replaces the linear layers of bitsandbytes in a model by ours, which have the same values. Raises `UnsupportedError`,
    before the model has changed, for other layers of bitsandbytes, and for weights that are not quantized yet, or not in a
    format of ours."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()
             if any(base.__module__.startswith("bitsandbytes.nn") for base in type(child).__mro__)]
    made = [(parent, name, _adopted(f"{type(child).__name__} {name} of bitsandbytes", child)) for parent, name, child in found]
    for parent, name, layer in made:
        parent._modules[name] = layer


def _adopted(what: str, layer: Any) -> QuantizedLinear:
    if not isinstance(layer, nn.Linear):
        raise UnsupportedError(f"{what} cannot be streamed: only its linear layers can; leave it in bfloat16")
    values = _four_bits(what, layer) if hasattr(layer.weight, "quant_state") else _eight_bits(layer)
    if values is None:
        raise UnsupportedError(f"{what} is not quantized yet: load the model with a BitsAndBytesConfig, or move it to a device "
                               "once")
    stored, codes, scales = values
    made = QuantizedLinear(layer.in_features, layer.out_features, layer.bias, stored, "meta")
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
