"""The reference model of preference training where none is given: a second streamed model, frozen, with the policy's weights.

Of frozen parameters a tile has weights alone: 2 bytes a parameter in bf16, and no gradients, optimizer state or checkpoints.
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
from megacompile.errors import InsufficientMemoryError, UnsupportedError
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import available_host_bytes
from megacompile.trainers.trainer_arguments import check_model
from megacompile.weights.tiling import build_store


def reference_of(policy: nn.Module) -> nn.Module:
    """A streamed copy of a streamed model as it is now, in evaluation mode, of which nothing trains; on the same device, with
    what the policy leaves of its memory.

    Raises `MegacompileError` for a policy that is not streamed; `UnsupportedError` where it has a budget of device or
    pinned memory, which only its user can divide; `InsufficientMemoryError` where the host has no room for the weights
    once more."""
    streamed = check_model(policy)
    config = streamed.config
    for name in ("device_memory", "pinned_memory"):
        if getattr(config, name) is not None:
            raise UnsupportedError(f"the reference model needs a share of {name}, which is yours to divide: give "
                                   f"ref_model=megacompile.stream(model, {name}=...), with requires_grad_(False) before, or "
                                   f"leave {name} out")
    needed, there = sum(p.numel() * p.element_size() for p in policy.parameters()), available_host_bytes()
    if needed > there:
        raise InsufficientMemoryError(f"the reference model's weights take {format_bytes(needed)} of host memory and "
                                      f"{format_bytes(there)} are left: give precompute_ref_log_probs=True (DPO), or "
                                      "beta=0.0 (GRPO)")
    plain = copy.deepcopy(policy).requires_grad_(False).eval()
    return attach(plain, build_store, replace(config, loss=None, resident=(), resident_state=None), streamed.captured.stacks,
                  None)


@contextlib.contextmanager
def loaded_as(trainer: ModuleType, policy: Any, load: Callable[[str, Mapping[str, Any]], Any]) -> Iterator[None]:
    """Within, a policy that one of TRL's trainer modules is given by name is what `load` makes of it; and what the module
    would load then is the reference model of this policy."""
    theirs = trainer.create_model_from_path
    policies = [] if isinstance(policy, str) else [policy]

    def create(name: str, *_: Any, **options: Any) -> Any:
        if policies:
            return reference_of(policies[0])
        policies.append(load(name, options))
        return policies[0]

    trainer.create_model_from_path = create  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer.create_model_from_path = theirs  # type: ignore[attr-defined]
