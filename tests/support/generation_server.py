"""A server that speaks the protocol of `vllm serve`, as far as TRL's client uses it, and generates with a plain model.

Weights come over a socket in place of NCCL: `connect` and `send_weights` stand for vLLM's two functions on the trainer's side.
"""
from __future__ import annotations

import contextlib
import functools
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class GenerationServer:
    """State: the `model`, which received weights replace; the `requests` so far, by path; and how many completions were drawn,
    which seeds the next draw: two runs that ask for the same get the same."""

    def __init__(self, model: Any, end: int) -> None:
        self.model, self.end = model.eval(), end
        self.requests: list[str] = []
        self.received: list[str] = []
        self.version = "default"
        self._drawn = 0
        self._weights: socket.socket | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        if self._weights is not None:
            self._weights.close()

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(path)
        return {
            "/health": dict, "/version": lambda: {"version": "0.32.0"},
            "/weight_info": lambda: {"weight_version": self.version}, "/v1/models": lambda: {"data": [{"id": "policy"}]},
            "/server_info": lambda: {"vllm_config": {"weight_transfer_config": {"backend": "nccl"},
                                                     "model_config": {"logprobs_mode": "processed_logprobs"}}},
            "/get_world_size": lambda: {"world_size": 1}, "/init_weight_transfer_engine": lambda: self._accept(asked),
            "/start_weight_update": dict, "/finish_weight_update": lambda: self._finish(asked),
            "/update_weights": lambda: self._receive(asked["update_info"]),
            "/reset_prefix_cache": lambda: {"success": True}, "/v1/completions": lambda: self._complete(asked),
        }[path]()

    # ---------------------------------------------------------------- weights
    def _accept(self, asked: dict[str, Any]) -> dict[str, Any]:
        with socket.create_server(("127.0.0.1", asked["init_info"]["master_port"])) as listening:
            listening.settimeout(30)
            self._weights = listening.accept()[0]
        return {}

    def _finish(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.version = asked.get("weight_version", self.version)
        return {}

    @torch.no_grad()
    def _receive(self, info: dict[str, Any]) -> dict[str, Any]:
        assert self._weights is not None
        known = dict(self.model.named_parameters())
        self.received = info["names"]
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            size = math.prod(shape) * getattr(torch, dtype).itemsize
            data = bytearray()
            while len(data) < size:
                data += self._weights.recv(size - len(data))
            known[name].copy_(torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape))
        return {}

    # ---------------------------------------------------------------- completions
    def _complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [self._completion(prompt, asked) for prompt in asked["prompt"] for _ in range(asked["n"])]}

    def _completion(self, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        self._drawn += 1
        tokens, logs = sampled(self.model, prompt, asked["max_tokens"], asked["temperature"], self.end, self._drawn)
        names = [f"token_id:{token}" for token in tokens]
        top = [{name: log} for name, log in zip(names, logs, strict=True)]
        return {"prompt_token_ids": prompt, "token_ids": tokens,
                "logprobs": {"tokens": names, "token_logprobs": logs, "top_logprobs": top}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = json.dumps(server.answer(self.path.split("?")[0], json.loads(data or b"{}"))).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                """Prints nothing."""

        return Handler


class EngineInProcess:
    """In place of vLLM's `LLM`, for completions in the trainer's own process. State: the `model`, which loaded weights replace,
    and how many completions were drawn."""

    def __init__(self, model: Any, end: int) -> None:
        self.model, self.end, self._drawn = model.eval(), end, 0
        self.loaded: list[str] = []
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self._load)))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker),
                                          model_config=SimpleNamespace(max_model_len=64))

    @torch.no_grad()
    def _load(self, weights: list[tuple[str, Tensor]]) -> None:
        known = dict(self.model.named_parameters())
        for name, weight in weights:
            known[name].copy_(weight)
            self.loaded.append(name)

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm and sampling_params.n == 1
        found = []
        for prompt in prompts:
            self._drawn += 1
            tokens, logs = sampled(self.model, prompt["prompt_token_ids"], sampling_params.max_tokens,
                                   sampling_params.temperature, self.end, self._drawn)
            known = [{token: SimpleNamespace(logprob=log, rank=1)} for token, log in zip(tokens, logs, strict=True)]
            found.append(SimpleNamespace(**prompt, outputs=[SimpleNamespace(token_ids=tokens, logprobs=known)]))
        return found


@torch.no_grad()
def sampled(model: Any, prompt: list[int], most: int, temperature: float, end: int,
            seed: int) -> tuple[list[int], list[float]]:
    """The tokens of a completion, and their log-probabilities at this temperature."""
    generator, tokens, logs = torch.Generator().manual_seed(seed), list[int](), list[float]()
    while len(tokens) < most and end not in tokens:
        known = (model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float() / temperature).log_softmax(-1)
        tokens.append(int(torch.multinomial(known.exp(), 1, generator=generator)))
        logs.append(float(known[tokens[-1]]))
    return tokens, logs


@contextlib.contextmanager
def over_sockets() -> Iterator[None]:
    """A context in which TRL finds vLLM, whose transport of weights is a socket in place of NCCL."""
    from trl.experimental.online_dpo import online_dpo_trainer
    from trl.generation import vllm_client, vllm_generation

    join = vllm_client.VLLMClient.init_communicator
    with contextlib.ExitStack() as stack:
        for module in (vllm_client, vllm_generation, online_dpo_trainer):
            stack.enter_context(patched(module, is_vllm_available=lambda *_, **__: True))
        stack.enter_context(patched(
            vllm_client, get_ip=lambda: "127.0.0.1", _HAS_STATEFUL_TRAINER_ENGINE=True, _HAS_RESET_PREFIX_CACHE_SUCCESS=True,
            open_trainer_endpoint=connect, packed_nccl_broadcast_producer=send_weights))
        stack.enter_context(patched(vllm_client.VLLMClient, init_communicator=lambda self, device: join(self, "cuda")))
        stack.enter_context(patched(online_dpo_trainer, SamplingParams=SimpleNamespace))
        # It asks PyTorch for an accelerator, which a CPU is not, or for the CUDA device if PyTorch is old.
        stack.enter_context(patched(online_dpo_trainer, Version=lambda text: text != torch.__version__))
        stack.enter_context(patched(torch.cuda, current_device=lambda: 0))
        yield


@contextlib.contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which an object has these attributes, whether it had them before or not."""
    missing = object()
    before = {name: vars(owner).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(owner, name) if value is missing else setattr(owner, name, value)


def connect(init_info: dict[str, Any]) -> Any:
    """In place of vLLM's `trainer_init`."""
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            made = socket.create_connection((init_info["master_address"], init_info["master_port"]))
            return SimpleNamespace(group=SimpleNamespace(store=None, socket=made), destroy=functools.partial(_end, made))
        assert time.monotonic() < deadline, "the server does not listen"
        time.sleep(0.02)


def _end(connection: socket.socket) -> None:
    """Ends a connection, also under a thread that writes to it."""
    with contextlib.suppress(OSError):  # the other end may have gone before
        connection.shutdown(socket.SHUT_RDWR)


def send_weights(iterator: Iterator[Any], group: Any, src: int, post_iter_func: Callable[[Any], Tensor]) -> None:
    """In place of vLLM's `packed_nccl_broadcast_producer`."""
    assert src == 0
    for each in iterator:
        weight = post_iter_func(each)
        group.group.socket.sendall(weight.contiguous().view(torch.uint8).numpy().tobytes())
