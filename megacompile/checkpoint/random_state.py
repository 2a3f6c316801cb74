"""The state of the random number generators that a training loop draws from: Python's, numpy's and torch's global ones.

Generators of one's own belong into `extra`.
"""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """`device`: where the model computes."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = dict(python=random.getstate(), torch=torch.get_rng_state())
    state["numpy"] = kind, torch.from_numpy(np.array(keys, np.uint32).view(np.int32)), *rest
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """A checkpoint from another kind of device leaves the device's own generator as it is."""
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().view(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
