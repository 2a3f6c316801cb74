"""PEFT's adapters: hiding from Dynamo what it cannot follow, and reading through PEFT's wrapper."""
from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from megacompile.compat.hugging_face import replaced
from megacompile.errors import MegacompileError, UnsupportedError


@contextlib.contextmanager
def traceable_adapters() -> Iterator[None]:
    """A context in which PEFT reads a layer's weight directly, or its values if it is quantized. Before DoRA reads a weight, it
    imports the module of the layer's class to find quantized layers, which Dynamo cannot follow."""
    with contextlib.ExitStack() as patches:
        for key, module in list(sys.modules.items()):
            if key.startswith("peft.") and "dequantize_module_weight" in vars(module):
                patches.enter_context(replaced(module, dequantize_module_weight=_weight))
        yield


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
