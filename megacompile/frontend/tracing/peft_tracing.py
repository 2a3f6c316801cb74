"""PEFT's adapters: hiding from Dynamo what it cannot follow, and reading through PEFT's wrapper.

An adapter of a fused parameter (`target_parameters`: the experts of a mixture) adds a low-rank product to all experts' weights,
which PEFT does by a parametrization of the module. Dynamo cannot follow that. So while a model is traced, such experts get a
weight with factors (`AdaptedWeight`), and other parameters get the sum.
"""
from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.hugging_face import replaced
from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.frontend.ops.experts import AdaptedWeight, experts_forward


@contextlib.contextmanager
def traceable_adapters() -> Iterator[None]:
    """A context in which PEFT reads a layer's weight directly, or its values if it is quantized, and in which adapters of fused
    parameters multiply by their factors. Before DoRA reads a weight, it imports the module of the layer's class to find
    quantized layers, which Dynamo cannot follow."""
    with contextlib.ExitStack() as patches:
        for key, module in list(sys.modules.items()):
            if key.startswith("peft.") and "dequantize_module_weight" in vars(module):
                patches.enter_context(replaced(module, dequantize_module_weight=_weight))
        if "peft.tuners.lora.layer" in sys.modules:
            from peft.tuners.lora.layer import ParamWrapper

            patches.enter_context(replaced(ParamWrapper, forward=_with_adapted_parameters))
        yield


#: Parameters of experts that tokens are multiplied by.
_MULTIPLIED = ("gate_up_proj", "up_proj", "down_proj")


class _Experts:
    """A module of experts whose parameters have other values. Has what `experts_forward` reads of the module."""

    def __init__(self, experts: Any, values: Mapping[str, Any]) -> None:
        for name in ("num_experts", "has_gate", "has_bias", "is_transposed", "_is_expert_parallel", "has_post_expert_norm",
                     "act_fn", "_apply_gate", "post_expert_norm", *_MULTIPLIED, *(f"{each}_bias" for each in _MULTIPLIED)):
            value = values[name] if name in values else getattr(experts, name, None)
            if value is not None:
                setattr(self, name, value)


def _with_adapted_parameters(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """In place of `ParamWrapper.forward`. A wrapper adapts one parameter, and wrappers of several parameters of a module wrap
    each other."""
    from peft.tuners.lora.layer import ParamWrapper

    module: Any = self
    factors: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    while isinstance(module, ParamWrapper):
        if not module.disable_adapters and not module.merged:
            found = [_factors(module, name) for name in module.active_adapters if name in module.lora_A]
            factors.setdefault(module.parameter_name, []).extend(found)
        module = module.base_layer
    adapted = {name: AdaptedWeight(getattr(module, name), tuple(each)) for name, each in factors.items() if each}
    if not adapted:
        return module(x, *args, **kwargs)
    if hasattr(module, "is_transposed") and module.config._experts_implementation == "grouped_mm":
        values = {name: each if name in _MULTIPLIED else each.sum() for name, each in adapted.items()}
        return experts_forward(_Experts(module, values), x, *args, **kwargs)
    return torch.func.functional_call(module, {name: each.sum() for name, each in adapted.items()}, (x, *args), kwargs)


def _factors(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    """`AdaptedWeight.factors` of a wrapper's adapter. PEFT's own are transposed for a parameter of two dimensions."""
    weight = wrapper.get_param()
    if weight.dim() == 3:
        left, right, scale = wrapper.get_delta_factors(adapter)
        return left, right, scale
    left, right = wrapper.lora_B[adapter].weight, wrapper.lora_A[adapter].weight
    return left.to(weight.dtype), right.to(weight.dtype), wrapper.scaling[adapter]


def forward_signature(model: nn.Module) -> inspect.Signature:
    """The signature of a model's `forward`. PEFT's wrappers pass arguments that they do not name on to the model inside, so
    those of its `forward` follow, as keyword arguments."""
    signature = inspect.signature(model.forward)
    own = {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if len(own) == len(signature.parameters) or not hasattr(model, "get_base_model"):
        return signature
    inside = inspect.signature(model.get_base_model().forward)  # type: ignore[operator]
    if not own:
        return inside
    further = [p if p.kind == p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY)
               for name, p in inside.parameters.items() if name not in own and p.kind != p.VAR_POSITIONAL]
    return signature.replace(parameters=[*own.values(), *further])


def adapter_types(model: nn.Module) -> list[str]:
    """PEFT's names of the kinds of adapters that a model has, such as "LORA"."""
    configs = getattr(model, "peft_config", None)
    found = configs.values() if isinstance(configs, dict) else ()
    return sorted({str(getattr(each.peft_type, "value", each.peft_type)) for each in found})


def refuse_virtual_tokens(model: nn.Module) -> None:
    """Raises `UnsupportedError` for prompt tuning and related methods."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise UnsupportedError(f"{kind} puts virtual tokens before each row, which a streamed model does not support: "
                                   "train other adapters, such as LoRA (LoraConfig)")


@contextlib.contextmanager
def blaming_adapters(model: nn.Module, error: type[MegacompileError]) -> Iterator[None]:
    """A context in which an `error` about a model with adapters other than LoRA says that these may be its cause: users cannot
    change the lines of PEFT that it names."""
    try:
        yield
    except error as reason:
        others = [each for each in adapter_types(model) if each != "LORA"]
        if not others:
            raise
        raise type(reason)(f"{type(model).__name__} cannot be streamed with its {', '.join(others)} adapters: train LoRA "
                           f"adapters (LoraConfig), if the model streams without adapters\n{reason}") from reason


def switch_off_adapters(model: nn.Module) -> None:
    """Switches adapters off, as PEFT's `disable_adapter` does."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            module.enable_adapters(enabled=False)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.dequantized_weight() if hasattr(module, "dequantized_weight") else module.weight
    return weight
