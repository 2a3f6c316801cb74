"""Random weights of a new model, drawn by all cores. They depend on the seed, not on the number of threads."""
from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import TorchDispatchMode
from megacompile.weights.empty_models import replace_parameters

#: Elements of a block, which has its own generator.
BLOCK = 1 << 20
_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def fill_randomly(model: Any, threads: int | None = None) -> None:
    """Allocates parameters on the meta device on the CPU and initializes them as transformers initializes a new model. Other
    parameters and buffers keep their values. The seed comes from the global random number generator."""
    made = {id(p): nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad) for p in model.parameters() if p.is_meta}
    for module in model.modules():
        if any(id(held) in made for held in module._parameters.values()):
            module._is_hf_initialized = False
    replace_parameters(model, made)
    with torch.no_grad(), _drawn_in_blocks(threads or os.cpu_count() or 1):
        model.initialize_weights()


@contextmanager
def _drawn_in_blocks(threads: int) -> Iterator[None]:
    with ThreadPoolExecutor(threads, "megacompile-draw") as pool, _Blocks(pool):
        yield


class _Blocks(TorchDispatchMode):
    """While it is active, tensors on the CPU are drawn block by block. State: how many tensors have been drawn."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._pool, self._drawn = pool, 0
        self._seed = int(torch.randint(2**62, ()))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _DRAWS or not _is_divisible(args[0]) or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        target, *limits = args
        self._drawn += 1
        seeds = torch.Generator().manual_seed(self._seed + self._drawn)
        blocks = target.view(-1).split(BLOCK)
        drawn = torch.randint(2**62, (len(blocks),), generator=seeds).tolist()

        def draw(block: Tensor, seed: int) -> None:
            function(block, *limits, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})

        for done in [self._pool.submit(draw, block, seed) for block, seed in zip(blocks, drawn, strict=True)]:
            done.result()
        return target


def _is_divisible(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel() > 0
