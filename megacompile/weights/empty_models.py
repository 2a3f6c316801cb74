"""Models whose weights may not be loaded yet (on the meta device): replacing their parameters, and putting adapters on them."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megacompile.errors import ArgumentError, UnsupportedError
from megacompile.runtime.ranks import Ranks


def put_adapter(model: Any, adapter: Any) -> Any:
    """The model in PEFT's wrapper, with an adapter of this configuration. The model's weights may be on the meta device. The
    adapter has its initial values, on the CPU, in the dtype of the layers that it is put on.

    Raises `UnsupportedError` for an adapter whose initial values depend on the weights, and `ArgumentError` for one that PEFT
    cannot put on this model, such as one for layers that the model does not have."""
    from peft import get_peft_model

    _refuse_values_from_weights(adapter)
    empty = {id(p): p for p in model.parameters() if p.is_meta}
    made = stand_ins(model)  # PEFT puts an adapter on the device of the weights
    replace_parameters(model, made)
    try:
        adapted = get_peft_model(model, copy.deepcopy(adapter), autocast_adapter_dtype=False)  # PEFT writes into it
    except ValueError as error:
        raise ArgumentError(f"PEFT cannot put this adapter on a {type(model).__name__}: name layers that it has\n"
                            f"{error}") from error
    finally:
        back = {id(stand_in): empty[key].requires_grad_(stand_in.requires_grad) for key, stand_in in made.items()}
        replace_parameters(model, back)
    return adapted


def stand_ins(model: nn.Module) -> dict[int, nn.Parameter]:
    """For the `id` of each parameter on the meta device, a parameter of its shape and dtype on the CPU, which takes no memory
    and has no values of use."""
    return {id(p): nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad)
            for p in model.parameters() if p.is_meta}


def replace_parameters(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Replaces parameters of a model, given by their `id`. Tied parameters stay tied."""
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


def fill_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Gives buffers on the meta device the values that they have on rank 0. All ranks call this. Raises `RankError`."""
    empty = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta}
    asked = {name for names in ranks.agree("stream", list(empty)) for name in names}
    if not asked:
        return
    named = model.named_buffers(remove_duplicate=False) if ranks.rank == 0 else ()
    values = ranks.agree("stream", {name: buffer.cpu() for name, buffer in named if name in asked})[0]
    for name in empty:
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = values.get(name)
