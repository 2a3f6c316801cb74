"""Sends a streamed policy's weights to vLLM: one at a time, from host memory over the device, with adapters merged."""
from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.hugging_face import replaced
from megacompile.errors import UnsupportedError
from megacompile.streaming.streamed_module import StreamedModule

_BASE = ".base_layer."


@torch.no_grad()
def sent_weights(model: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The weights of a streamed model on a device, one at a time, by their names in the model without an adapter. Tied weights
    come once. A layer with an adapter comes merged, as PEFT merges it. The merge is made on a copy of the layer, so the model's
    own weights do not change. On the meta device they have only shapes and dtypes. Waits for the update in flight. Raises
    `TornError` if the weights are not all of one step."""
    model.megacompile.whole()
    adapted = _adapted_layers(model)
    layer, merged = "", dict[str, Tensor]()
    for name, weight in model.named_parameters():
        if adapted is None:
            yield name, weight.detach().to(device)
            continue
        if adapted.prefix in name or "original_module" in name:
            continue
        owner, is_base, own_name = name.rpartition(_BASE)
        if not is_base or device.type == "meta":
            yield adapted.plain_name(name.replace(_BASE, ".")), weight.detach().to(device)
            continue
        if owner != layer:
            layer, merged = owner, dict(_merged(adapted.layers[owner], device).named_parameters())
        yield adapted.plain_name(f"{owner}.{own_name}"), merged[own_name].detach()


def refuse_codes(model: nn.Module) -> None:
    """Raises `UnsupportedError` for a model with weights in codes of 4 or 8 bits."""
    for name, weight in nn.Module.named_parameters(model):
        if not weight.is_floating_point():
            raise UnsupportedError(f"vLLM takes weights in the model's dtype, and {name} is stored in codes: stream the policy "
                                   "without quantize=, or leave use_vllm out")


class _AdaptedLayers:
    """The layers of a PEFT model that have an adapter, by name, and what its names add to those of the model without one."""

    def __init__(self, model: Any) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.prefix: str = model.base_model.prefix
        self.layers: Mapping[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}

    def plain_name(self, name: str) -> str:
        return name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")


def _adapted_layers(model: Any) -> _AdaptedLayers | None:
    """The layers of a model that have an adapter. None for a model without an adapter."""
    return _AdaptedLayers(model) if hasattr(model, "get_base_model") else None


def _merged(layer: Any, device: torch.device) -> nn.Module:
    """The layer without its adapter, with merged weights, on the device. The layer itself is not changed."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(device, copy=True), requires_grad=False)
                            for p in layer.parameters()}
    memo |= {id(b): b.to(device, copy=True) for b in layer.buffers()}
    made = copy.deepcopy(layer, memo)
    made.merge()
    base: nn.Module = made.get_base_layer()
    return base


@contextlib.contextmanager
def sends_weights(trainer: ModuleType) -> Iterator[None]:
    """A context in which one of TRL's trainer modules makes a `VLLMGeneration` that sends the `sent_weights` of streamed
    policies. TRL's own would send host memory, which NCCL cannot, and would merge an adapter into the weights in place. A
    server that is lost and comes back gets the weights again."""
    theirs = trainer.VLLMGeneration

    class Generation(theirs):  # type: ignore[misc, valid-type]
        def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(model, StreamedModule):
                refuse_codes(model)
            with lasting_clients(sys.modules[theirs.__module__]):
                super().__init__(model, *args, **kwargs)
            if self.mode == "server" and self.accelerator.is_main_process:
                self.vllm_client.restore = functools.partial(theirs.sync_weights, self)

        def sync_weights(self) -> None:
            if isinstance(self.model, StreamedModule):
                self.model.megacompile.whole()  # before the server waits
            if self.mode == "server" and self.accelerator.is_main_process:
                self.vllm_client.renewed(self.vllm_client.restore)
            else:
                super().sync_weights()

        def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
            model: Any = self.model
            if not isinstance(model, StreamedModule):
                yield from super()._iter_named_params()
            elif self.mode == "colocate" or self.accelerator.is_main_process:  # the other ranks send nothing
                # A server is told names and shapes first.
                names_only = self.mode == "server" and self._weight_metadata is None
                device = torch.device("meta") if names_only else model.megacompile.streamed.backend.device
                for name, weight in sent_weights(model, device):
                    yield self._fix_param_name_to_vllm(name), weight

    with replaced(trainer, VLLMGeneration=Generation):
        yield


def lasting_clients(module: ModuleType) -> contextlib.AbstractContextManager[None]:
    """A context in which one of TRL's modules makes clients of servers that notice when the server is lost."""
    from megacompile.trainers.vllm_server import LastingClient  # needs requests, which only vLLM brings along

    return replaced(module, VLLMClient=LastingClient)


def send(client: Any, model: Any) -> None:
    """Sends a server the `sent_weights` of a streamed model."""
    described = [(name, str(weight.dtype).removeprefix("torch."), list(weight.shape))
                 for name, weight in sent_weights(model, torch.device("meta"))]
    client.update_named_params(described, sent_weights(model, model.megacompile.streamed.backend.device))
    client.reset_prefix_cache()
