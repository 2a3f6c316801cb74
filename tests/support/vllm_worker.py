"""What a real vLLM server on a CPU needs for tests: weights over a socket in place of NCCL, and files of what it computes with.

vLLM's own interpreter imports this, as `--worker-extension-cls vllm_worker.Worker`; `vllm_server.py` starts it.
"""
from __future__ import annotations

import math
import socket
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers import utils


class SocketEngine(NCCLWeightTransferEngine):
    """vLLM's engine of weights, whose broadcast is a socket: `generation_server.send_weights` is at the other end."""

    weights: socket.socket | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        self.shutdown()
        with socket.create_server((init_info.master_address, init_info.master_port)) as listening:
            listening.settimeout(30)
            self.weights = listening.accept()[0]

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # theirs waits for an accelerator, which is missing

    def receive_weights(self, update_info: Any) -> None:
        for name, dtype_name, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            data = self._received(math.prod(shape) * dtype.itemsize)
            self.model.load_weights([(name, torch.frombuffer(data, dtype=dtype).view(shape))])

    def _received(self, size: int) -> bytearray:
        assert self.weights is not None, "init_weight_transfer_engine comes first"
        data = bytearray(size)
        left = memoryview(data)
        while left:
            count = self.weights.recv_into(left)
            if not count:
                raise ConnectionError("the trainer has ended the connection")
            left = left[count:]
        return data

    def shutdown(self) -> None:
        if self.weights is not None:
            self.weights.close()
            self.weights = None


WeightTransferEngineFactory.register_engine("socket", SocketEngine)


def _compute_unpacked(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


# On a CPU, vLLM 0.32 computes with packed copies of weights. Nobody can compare those, and that of a head which is tied to the
# embedding stays as it was at the beginning, however often weights are sent. GPUs compute with the weights themselves.
utils.dispatch_cpu_unquantized_gemm = _compute_unpacked


class Worker:
    """Methods that `collective_rpc` finds in each worker."""

    model_runner: Any

    def write_weights(self, path: str) -> None:
        """Writes what the server computes with, by vLLM's names: q, k and v are one weight, as are gate and up."""
        save_file({name: weight.detach().contiguous().clone() for name, weight in
                   self.model_runner.get_model().named_parameters()}, path)
