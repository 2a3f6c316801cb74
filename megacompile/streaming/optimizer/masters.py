"""The FP32 master of a parameter: a bf16 weight holds its upper half, and a remainder in the tile the lower half."""
from __future__ import annotations

import torch
from torch import Tensor

from megacompile.runtime.optimizer.host_kernels import join_fp32, split_fp32
from megacompile.streaming.optimizer.state import StateMemory
from megacompile.streaming.shared_writes import loading
from megacompile.streaming.streamed import Streamed


def read(streamed: Streamed, parameter: Tensor, remainder: Tensor | None) -> Tensor:
    """A copy of a parameter's master, fp32, of its shape. `remainder`: int16, of the same shape; None for an fp32 parameter."""
    streamed.copy_back()
    streamed.adopt_writes()
    if remainder is None:
        return parameter.detach().float().clone()
    return join_fp32(parameter.detach().flatten(), remainder.flatten()).view(parameter.shape)


@torch.no_grad()
def write(streamed: Streamed, parameter: Tensor, memory: StateMemory | None, remainder: Tensor | None, master: Tensor) -> None:
    """Sets a parameter's master, including the remainder; with several ranks, on all of them to rank 0's."""
    streamed.adopt_writes()
    with loading(streamed, "set_master", tiles=None if memory is None else (memory.tile,)):
        if memory is None or remainder is None or not memory.writable:
            parameter.copy_(master if memory is None or memory.writable else parameter)
            streamed.adopt_writes()
            return
        high, low = split_fp32(master.detach().float().contiguous().flatten())
        parameter.copy_(high.view(parameter.shape))
        streamed.adopt_writes()
        remainder.copy_(low.view(parameter.shape))
