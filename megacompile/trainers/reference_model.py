"""The default reference model of preference training: a second streamed model with a frozen copy of the policy's weights.

Tiles of frozen parameters hold only weights: 2 bytes per parameter in bf16, without gradients and optimizer state.
"""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import nn

from megacompile.api import attach
from megacompile.compat.hugging_face import replaced
from megacompile.errors import InsufficientMemoryError, UnsupportedError
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import available_host_bytes
from megacompile.trainers.trainer_arguments import check_model
from megacompile.weights.moving import build_store


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
