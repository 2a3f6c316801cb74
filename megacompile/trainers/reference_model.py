"""The default reference model of preference training: a second streamed model with a frozen copy of the policy's weights.

Tiles of frozen parameters hold only weights: 2 bytes per parameter in bf16, without gradients and optimizer state.
"""
from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn

from megacompile.api import attach
from megacompile.compat.hugging_face import replaced
from megacompile.errors import InsufficientMemoryError, UnsupportedError
from megacompile.frontend.tracing.peft_tracing import traceable_adapters
from megacompile.sizes import format_bytes
from megacompile.streaming.streamed_module import StreamedModule
from megacompile.system.host_memory import available_host_bytes
from megacompile.trainers.trainer_arguments import check_model
from megacompile.weights.empty_models import build_store


# -------------------- Adds a PEFT adapter to a model that is already streamed
def add_adapter(model: Any, adapter: Any, **options: Any) -> Any:
    """Closes a streamed model, wraps it with an adapter of this configuration, and streams the PEFT model with the same
    options. `options`: those of `peft.get_peft_model`.

    Raises `MegacompileError` if the model is not streamed, and `UnsupportedError` if it takes other batch arguments than
    input_ids and labels."""
    from peft import get_peft_model

    def adapted(plain: nn.Module) -> nn.Module:
        with traceable_adapters():  # DoRA starts from the values of weights
            wrapped: nn.Module = get_peft_model(plain, adapter, **options)
        return wrapped

    return streamed_again(model, adapted, "base_model.model.",
                          "peft.get_peft_model before megacompile.stream(model, example=...)")


def streamed_again(model: Any, change: Callable[[nn.Module], nn.Module], prefix: str, instead: str) -> Any:
    """Closes a streamed model, and streams what `change` makes of it with the same options. `prefix`: of the names of layers
    there. Optimizers of the model end with it.

    Raises `UnsupportedError`, with what to call `instead`, if the model takes other batch arguments than input_ids and
    labels."""
    streamed = check_model(model)
    stacks, config = tuple(f"{prefix}{path}" for path in streamed.captured.stacks), streamed.config
    if set(streamed.captured.batch_inputs) != {"input_ids", "labels"}:
        raise UnsupportedError("a trainer can stream a model again only if it takes input_ids and labels: call " + instead)
    model.megacompile.close()
    del streamed
    gc.collect()  # frees the old gradients and optimizer state
    return attach(change(model), build_store, config, stacks, None)


# -------------------- Adds the router loss that TRL's trainers add to mixtures
def router_coefficient(model: Any) -> float:
    """The weight of the router auxiliary loss that a streamed model was captured with; 0 without one."""
    config = model.config.get_text_config()
    return float(config.router_aux_loss_coef) if check_model(model).captured.output.records_routers else 0.0


def with_router_loss(model: Any, args: Any, optimizers: Any = None) -> Any:
    """The model, streamed again if TRL would add another router loss than the one that it was streamed with, and no optimizer
    is given, which would end with the model. A name, or a model that is not streamed, is returned unchanged."""
    if not isinstance(model, StreamedModule):
        return model
    config: Any = model.config
    text = config.get_text_config()
    asked = getattr(args, "router_aux_loss_coef", None)
    wanted = getattr(text, "router_aux_loss_coef", 0.0) if asked is None else asked
    if not hasattr(text, "output_router_logits") or any(optimizers or ()) or wanted == router_coefficient(model):
        return model

    def change(plain: Any) -> Any:
        text.output_router_logits, text.router_aux_loss_coef = wanted != 0, wanted
        return plain

    return streamed_again(model, change, "", "megacompile.stream after setting config.output_router_logits")


def reference_of(policy: nn.Module) -> nn.Module:
    """A streamed copy of a streamed model in its current state, frozen and in evaluation mode. It runs on the same device, with
    the memory that the policy leaves.

    Raises `MegacompileError` if the policy is not streamed; `UnsupportedError` if it has a budget for device or pinned memory,
    which only the user can divide; `InsufficientMemoryError` if the host has no room for a second copy of the weights."""
    streamed = check_model(policy)
    config = streamed.config
    for name in ("device_memory", "pinned_memory"):
        if getattr(config, name) is not None:
            raise UnsupportedError(f"the reference model needs a share of {name}, which was given to the policy: pass "
                                   f"ref_model=megacompile.stream(model, {name}=...), after model.requires_grad_(False), or "
                                   f"leave {name} out")
    needed, there = sum(p.numel() * p.element_size() for p in policy.parameters()), available_host_bytes()
    if needed > there:
        raise InsufficientMemoryError(f"the reference model's weights take {format_bytes(needed)} of host memory, but only "
                                      f"{format_bytes(there)} are left: pass precompute_ref_log_probs=True (DPO), or "
                                      "beta=0.0 (GRPO)")
    plain = copy.deepcopy(policy).requires_grad_(False).eval()
    return attach(plain, build_store, replace(config, loss=None, resident=(), resident_state=None), streamed.captured.stacks,
                  None)


@contextlib.contextmanager
def loaded_as(trainer: ModuleType, policy: Any, load: Callable[[str, Mapping[str, Any]], Any]) -> Iterator[None]:
    """A context in which one of TRL's trainer modules loads a policy that is given by name with `load`. The next model that it
    loads is the reference model of this policy."""
    policies = [] if isinstance(policy, str) else [policy]

    def create(name: str, *_: Any, **options: Any) -> Any:
        if policies:
            return reference_of(policies[0])
        policies.append(load(name, options))
        return policies[0]

    with replaced(trainer, create_model_from_path=create):
        yield
