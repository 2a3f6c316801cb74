"""Adapters (PEFT) on a streamed model: what a capture has taken as constant, and calls that pass by the wrapper."""
from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megacompile.errors import ArgumentError, UnsupportedError


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that PEFT has put into a model, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


class AdapterStates:
    """Which adapters are active and merged, how they are scaled, and whether they are switched off: Python values, which are
    constants of the captured graphs. There are graphs without adapters, made when they are first switched off. State: the
    layers of a model that have any, and their values at its capture."""

    def __init__(self, model: nn.Module) -> None:
        self.captured = [(name, layer, _values(layer)) for name, layer in adapter_layers(model).items()]

    def disabled(self) -> bool:
        """Whether all adapters are switched off that were on when the model was streamed (PEFT's `disable_adapter`)."""
        return bool(self.captured) and all(layer.disable_adapters and not before["disable_adapters"]
                                           for _, layer, before in self.captured)

    def check(self, differentiating: bool) -> None:
        """Raises `UnsupportedError` if any has changed; all may be switched off for an evaluation."""
        disabled = self.disabled()
        if disabled and differentiating:
            raise UnsupportedError("adapters are switched off (disable_adapter), and a loss without them has no gradient here: "
                                   "call the model under torch.no_grad(), or leave disable_adapter first")
        for name, layer, before in self.captured:
            now = _values(layer) | ({"disable_adapters": False} if disabled else {})
            if now != before:
                what = next(key for key in before if now[key] != before[key])
                raise UnsupportedError(
                    f"{what} of {name} is {now[what]!r} and was {before[what]!r} when the model was streamed: put it back, or "
                    "close() the model, change it, and stream() it again")


def _values(layer: Any) -> dict[str, Any]:
    return {"active_adapters": list(layer.active_adapters), "disable_adapters": bool(layer.disable_adapters),
            "merged_adapters": list(layer.merged_adapters), "scaling": dict(getattr(layer, "scaling", {}))}


@contextlib.contextmanager
def base_calls_streamed(model: nn.Module, prepare: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Within, a call of the model inside of PEFT's wrapper is one of the wrapper, which streams, with what `prepare` makes of
    its keywords: PEFT lets the inner one generate."""
    if not hasattr(model, "get_base_model"):
        yield
        return
    inner: Any = model.get_base_model()  # type: ignore[operator]

    @functools.wraps(inner.forward)  # generation reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **prepare(kwargs))

    inner.forward = forward
    try:
        yield
    finally:
        del inner.forward


def add_adapter(model: Any, adapter: Any, **options: Any) -> Any:
    """PEFT's wrapper, with an adapter of this configuration, around the model of a streamed one, and streamed as that was.
    `options`: those of `peft.get_peft_model`."""
    from peft import get_peft_model

    from megacompile.api import attach
    from megacompile.tiling import build_store

    captured, config = model.megacompile.streamed.captured, model.megacompile.streamed.config
    stacks = tuple(f"base_model.model.{path}" for path in captured.stacks)
    if set(captured.batch_inputs) != {"input_ids", "labels"}:
        raise UnsupportedError("an adapter is put on a model that takes input_ids and labels: call peft.get_peft_model before "
                               "megacompile.stream(model, example=...)")
    model.megacompile.close()
    gc.collect()  # gradients and optimizer state as they were
    return attach(get_peft_model(model, adapter, **options), build_store, config, stacks, None)


def put_adapter(model: Any, adapter: Any) -> Any:
    """PEFT's wrapper, with an adapter of this configuration, around a model whose weights may still be nowhere (on the meta
    device). The adapter has its first values, on the CPU, in the dtype of the layers that it is put on.

    Raises `UnsupportedError` for an adapter whose first values are made from the weights; `ArgumentError` for one that PEFT
    cannot put on this model, such as one for layers that it does not have."""
    from peft import get_peft_model

    _refuse_values_from_weights(adapter)
    empty = {id(p): p for p in model.parameters() if p.is_meta}
    # PEFT puts an adapter where the weights are. These have shape, dtype and device of weights, and no memory.
    stand_ins = {key: nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad) for key, p in empty.items()}
    replace_parameters(model, stand_ins)
    try:
        adapted = get_peft_model(model, copy.deepcopy(adapter), autocast_adapter_dtype=False)  # PEFT writes into it
    except ValueError as error:
        raise ArgumentError(f"PEFT cannot put this adapter on a {type(model).__name__}: name layers that it has\n"
                            f"{error}") from error
    finally:
        back = {id(stand_in): empty[key].requires_grad_(stand_in.requires_grad) for key, stand_in in stand_ins.items()}
        replace_parameters(model, back)
    return adapted


def replace_parameters(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Puts other parameters in the place of some of a model's, which are given by their `id`. Tied ones stay tied."""
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None and id(held) in made:
                module._parameters[name] = made[id(held)]


def _refuse_values_from_weights(adapter: Any) -> None:
    first = getattr(adapter, "init_lora_weights", None)
    asked = {"init_lora_weights": first if first not in (True, False, "gaussian") else None,
             **{name: getattr(adapter, name, None) for name in ("use_dora", "modules_to_save", "trainable_token_indices")}}
    if adapter.peft_type != "LORA":
        asked = {"peft_type": str(getattr(adapter.peft_type, "value", adapter.peft_type))}
    if given := [f"{name}={value!r}" for name, value in asked.items() if value]:
        raise UnsupportedError(f"{given[0]} takes the adapter's first values from weights that are not read yet: load the "
                               "model, call peft.get_peft_model on it, and then megacompile.stream")
