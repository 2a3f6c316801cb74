"""Replaces a model's linear layers by quantized ones, and quantized ones by ordinary ones."""
from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megacompile.errors import ArgumentError, UnsupportedError
from megacompile.frontend.tracing.layers import Layers, find_layers
from megacompile.weights.codes import (
    FORMATS,
    SCALES_IN_GROUP,
    EightBits,
    Format,
    FourBits,
    QuantizedExperts,
    QuantizedLinear,
    Stack,
    as_bytes,
    is_finite,
    shape_of,
)

# --------------------
# Weights that bitsandbytes has quantized: which of our formats they have, how their products are computed, and layers of a
# model in memory.
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
    """Like `compute_dtype_of`, for the config of a checkpoint. Also None for float16, which the user has not asked for."""
    said = _quantization_config(config)
    bfloat16 = said.get("load_in_4bit") and str(said.get("bnb_4bit_compute_dtype")) in ("bfloat16", "torch.bfloat16")
    return torch.bfloat16 if bfloat16 else None


def _quantization_config(config: Any) -> dict[str, Any]:
    """The part of a model's config that says how bitsandbytes has quantized it; empty if there is none."""
    how = getattr(config, "quantization_config", None) or {}
    said = dict(how if isinstance(how, dict) else how.to_dict())
    return said if said.get("quant_method") == "bitsandbytes" else {}


def forget_bitsandbytes(model: nn.Module) -> None:
    """Removes the marks of bitsandbytes' quantization from a model and its config. With them, trainers would cast adapters to
    bfloat16 and refuse to move the model, and a saved model's config would describe other weights than its files have."""
    for module in model.modules():
        marked = vars(module)
        config: Any = marked.get("config")
        if _quantization_config(config):
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
    """Like `_four_bits`. After the first forward, codes and scales are in the layer's state."""
    def part(name: str) -> Tensor | None:
        return next((found for holder in (layer.weight, getattr(layer, "state", None))
                     if (found := getattr(holder, name, None)) is not None), None)

    codes, scales = part("CB"), part("SCB")
    codes = layer.weight if codes is None else codes
    return None if scales is None or codes.dtype != torch.int8 else (EightBits(), codes, as_bytes(scales.float() / 127))


M = TypeVar("M", bound=nn.Module)
#: Weights that are looked at a time.
_AT_ONCE = 1 << 22


def quantize(model: M, stored: Any = "nf4", *, layers: Layers | None = None) -> M:
    """Stores the frozen linear layers of a decoder's layers in four or eight bits. Returns the same model.

    Args:
        model: a model whose weights are loaded, or on the meta device. Layers inside PEFT's adapters count.
        stored: "nf4", 0.52 bytes per weight; "mxfp4", 0.53 bytes; "int8" or "fp8", 1 byte; or a
            `transformers.BitsAndBytesConfig`.
        layers: as for `stream`.

    Stacked experts that transformers multiplies by grouped products count too. Embeddings, heads, norms, adapters and other
    weights keep their dtype. Raises `ArgumentError` for another format or a streamed model. Raises `UnsupportedError`, before
    the model has changed, if no layer has a frozen `nn.Linear` or frozen experts, and for a weight that is not finite.
    """
    _check_not_streamed(model)
    form, compute_dtype = format_of(stored), compute_dtype_of(stored)
    found = [(parent, name, linear) for parent, name, linear in frozen_linears(model, layers) if form.fits(shape_of(linear))]
    stacks = [(parent, name, experts, {name: Stack.of(weight) for name, weight in weights.items()})
              for parent, name, experts, weights in frozen_experts(model, layers)
              if all(form.fits(Stack.of(weight).matrix) for weight in weights.values())]
    if not found and not stacks:
        raise UnsupportedError(f"no layer of {type(model).__name__} has a frozen nn.Linear to quantize: freeze the weights "
                               "first (peft.get_peft_model does), and train an adapter")
    names = {id(module): name for name, module in model.named_modules()}
    weights: list[tuple[nn.Module, str, Tensor]] = [(linear, "weight", linear.weight) for _, _, linear in found]
    weights += [(experts, name, getattr(experts, name)) for _, _, experts, held in stacks for name in held]
    for module, name, weight in weights:
        if not weight.is_meta and not all(map(is_finite, weight.detach().flatten().split(_AT_ONCE))):
            raise UnsupportedError(f"{names[id(module)]}.{name} has values that are not finite, which codes would spread to "
                                   "other weights: load the model again, or repair the weight")
    for parent, child, linear in found:
        parent._modules[child] = QuantizedLinear.of(linear, form, compute_dtype)
    for parent, child, experts, held in stacks:
        parent._modules[child] = QuantizedExperts.of(experts, held, form)
    read_through_codes(model)
    return model


def dequantize(model: M, dtype: torch.dtype | None = None) -> M:
    """Replaces quantized layers by ordinary ones with the same values in `dtype` (None: that of the model's other weights):
    before an adapter is merged, or the model is saved. The model's config no longer says that bitsandbytes has quantized it.
    Returns the same model. Raises `ArgumentError` for a streamed model."""
    _check_not_streamed(model)
    replaced, dtype = False, dtype or _dtype_of(model)
    for parent, name, child in _held(model):
        if isinstance(child, QuantizedLinear):
            replaced = True
            made = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
            made.weight = nn.Parameter(child.dequantized_weight(dtype), requires_grad=False)
            made.bias = child.bias if child.bias is None or child.bias.dtype == dtype else nn.Parameter(
                child.bias.detach().to(dtype), child.bias.requires_grad)
            parent._modules[name] = made.train(child.training)
        elif isinstance(child, QuantizedExperts):
            replaced = True
            parent._modules[name] = child.plain(dtype)
    read_through_codes(model)
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
    """(module that holds it, its name there, layer) of each frozen `nn.Linear` in the model's layers, except in adapters, and
    except `dt_proj` of Mamba's mixers, which read the weight themselves."""
    for layer in find_layers(model, layers).layers:
        adapters = {id(module) for part in _adapters(layer) for module in part.modules()}
        for parent, name, child in _held(layer):
            if type(child) is nn.Linear and name != "dt_proj" and id(child) not in adapters and not child.weight.requires_grad:
                yield parent, name, child


def _held(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(holder, name there, module) of each module inside. The caller may replace a module while it reads."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            yield parent, name, child


def read_through_codes(model: nn.Module) -> None:
    """Makes PEFT's wrappers of stacked weights add their adapters to the values of codes, where the weights are in codes."""
    if "peft.tuners.lora.layer" not in sys.modules:
        return
    from peft.tuners.lora.layer import ParamWrapper

    for module in model.modules():
        if isinstance(module, ParamWrapper):
            coded = isinstance(module.get_base_layer(), QuantizedExperts)
            module.__class__ = _wrapper_of_codes() if coded else ParamWrapper


@functools.cache
def _wrapper_of_codes() -> type[nn.Module]:
    from peft.tuners.lora.layer import ParamWrapper

    class WrapperOfCodes(ParamWrapper):  # type: ignore[misc, valid-type]
        """A `ParamWrapper` of `QuantizedExperts`: PEFT parametrizes the weight, which is not a parameter here."""

        @contextlib.contextmanager
        def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
            deltas, name = self.get_base_layer().deltas, self.parameter_name
            for adapter in active_adapters:
                if adapter in self.lora_A:
                    delta = self.get_delta_weight(adapter)
                    deltas[name] = deltas[name] + delta if name in deltas else delta
            try:
                yield
            finally:
                deltas.pop(name, None)

        def merge(self, *_: Any, **__: Any) -> None:
            raise UnsupportedError("an adapter cannot be merged into weights in codes: call megacompile.dequantize(model) "
                                   "first")

    return WrapperOfCodes


def frozen_experts(model: nn.Module,
                   layers: Layers | None = None) -> Iterator[tuple[nn.Module, str, nn.Module, dict[str, nn.Parameter]]]:
    """(module that holds it, its name there, module of experts, its stacked weights by name) of each module in the model's
    layers that transformers computes by grouped products, and whose weights are frozen."""
    for layer in find_layers(model, layers).layers:
        for parent, name, child in _held(layer):
            own = stacked_weights(child)
            if own and not any(p.requires_grad for p in own.values()):
                yield parent, name, child, own


def stacked_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights [experts, rows, columns] of a module of experts that transformers computes by grouped products, by name;
    none for other modules."""
    parameters = module._parameters.items() if hasattr(module, "is_transposed") else ()
    return {name: p for name, p in parameters if p is not None and p.dim() == 3}


def _adapters(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that PEFT has added to layers."""
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            if isinstance(part := getattr(module, name), nn.Module):
                yield part
