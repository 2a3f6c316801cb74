"""Replaces a model's linear layers by quantized ones, and quantized ones by ordinary ones."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from megacompile.errors import ArgumentError, UnsupportedError
from megacompile.frontend.tracing.layers import Layers, find_layers
from megacompile.weights.bitsandbytes import compute_dtype_of, forget_bitsandbytes
from megacompile.weights.codes import FORMATS, EightBits, Format, FourBits, is_finite
from megacompile.weights.quantized_linear import QuantizedLinear, shape_of

M = TypeVar("M", bound=nn.Module)
#: Weights that are looked at a time.
_AT_ONCE = 1 << 22


def quantize(model: M, stored: Any = "nf4", *, layers: Layers | None = None) -> M:
    """Stores the frozen linear layers of a decoder's layers in four or eight bits. Returns the same model.

    Args:
        model: a model whose weights are loaded, or on the meta device. Layers inside PEFT's adapters count.
        stored: "nf4", 0.52 bytes per weight; "int8", 1 byte; or a `transformers.BitsAndBytesConfig`.
        layers: as for `stream`.

    Embeddings, heads, norms and adapters keep their dtype, and so do weights that are not an `nn.Linear` (experts of some
    models). Raises `ArgumentError` for another format or a streamed model, and `UnsupportedError`, before the model has
    changed, if no layer has a frozen `nn.Linear`, and for a weight that is not finite.
    """
    _check_not_streamed(model)
    form, compute_dtype = format_of(stored), compute_dtype_of(stored)
    found = [(parent, name, linear) for parent, name, linear in frozen_linears(model, layers) if form.fits(shape_of(linear))]
    if not found:
        raise UnsupportedError(f"no layer of {type(model).__name__} has a frozen nn.Linear to quantize: freeze the weights "
                               "first (peft.get_peft_model does), and train an adapter")
    names = {id(module): name for name, module in model.named_modules()}
    for _, _, linear in found:
        if not linear.weight.is_meta and not all(map(is_finite, linear.weight.detach().flatten().split(_AT_ONCE))):
            raise UnsupportedError(f"{names[id(linear)]}.weight has values that are not finite, which codes would spread to "
                                   "other weights: load the model again, or repair the weight")
    for parent, name, linear in found:
        parent._modules[name] = QuantizedLinear.of(linear, form, compute_dtype)
    return model


def dequantize(model: M, dtype: torch.dtype | None = None) -> M:
    """Replaces quantized layers by ordinary ones with the same values in `dtype` (None: that of the model's other weights):
    before an adapter is merged, or the model is saved. The model's config no longer says that bitsandbytes has quantized it.
    Returns the same model. Raises `ArgumentError` for a streamed model."""
    _check_not_streamed(model)
    replaced, dtype = False, dtype or _dtype_of(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedLinear):
                replaced = True
                made = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                made.weight = nn.Parameter(child.dequantized_weight().to(dtype), requires_grad=False)
                made.bias = child.bias if child.bias is None or child.bias.dtype == dtype else nn.Parameter(
                    child.bias.detach().to(dtype), child.bias.requires_grad)
                parent._modules[name] = made.train(child.training)
    if replaced:
        forget_bitsandbytes(model)
    return model


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of most weights that are in no adapter and not in codes; bfloat16 if there are none."""
    adapters = {id(p) for part in _adapters(model) for p in part.parameters()}
    counts: Counter[torch.dtype] = Counter()
    for p in model.parameters():
        if p.is_floating_point() and id(p) not in adapters:
            counts[p.dtype] += p.numel()
    return counts.most_common(1)[0][0] if counts else torch.bfloat16


def _check_not_streamed(model: nn.Module) -> None:
    if getattr(model, "megacompile", None) is not None:
        raise ArgumentError("the layers of a streamed model cannot be replaced: call model.megacompile.close() first")


def format_of(given: Any) -> Format:
    """The format of this name, or that of a `BitsAndBytesConfig`. Raises `ArgumentError` for any other, and `UnsupportedError`
    for a config with options that have no effect here."""
    if isinstance(given, str) and given in FORMATS:
        return FORMATS[given]
    if not hasattr(given, "load_in_4bit"):
        raise ArgumentError(f"weights cannot be stored as {given!r}: give one of {', '.join(FORMATS)}, or a BitsAndBytesConfig")
    if getattr(given, "llm_int8_skip_modules", None):
        raise UnsupportedError("llm_int8_skip_modules is not supported: leave it out, heads and embeddings are not quantized")
    if given.load_in_8bit:
        return EightBits()
    if not given.load_in_4bit or given.bnb_4bit_quant_type != "nf4":
        raise UnsupportedError(f"bnb_4bit_quant_type={given.bnb_4bit_quant_type!r} is not supported: give 'nf4'")
    return FourBits(nested=bool(given.bnb_4bit_use_double_quant))


def frozen_linears(model: nn.Module, layers: Layers | None = None) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """(module that holds it, its name there, layer) of each frozen `nn.Linear` in the model's layers, except in adapters."""
    for layer in find_layers(model, layers).layers:
        adapters = {id(module) for part in _adapters(layer) for module in part.modules()}
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and id(child) not in adapters and not child.weight.requires_grad:
                    yield parent, name, child


def _adapters(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that PEFT has added to layers."""
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            if isinstance(part := getattr(module, name), nn.Module):
                yield part
