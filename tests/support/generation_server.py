"""A server that speaks the protocol of `vllm serve`, as far as TRL's client uses it, and generates with a plain model.

Weights come over a socket in place of NCCL: `connect` and `send_weights` stand for vLLM's two functions on the trainer's side.
"""
from __future__ import annotations

import contextlib
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
            "/health": dict, "/v1/models": lambda: {"data": [{"id": "policy"}]},
            "/server_info": lambda: {"vllm_config": {"weight_transfer_config": {"backend": "nccl"},
                                                     "model_config": {"logprobs_mode": "processed_logprobs"}}},
            "/get_world_size": lambda: {"world_size": 1}, "/init_weight_transfer_engine": lambda: self._accept(asked),
            "/start_weight_update": dict, "/finish_weight_update": dict,
            "/update_weights": lambda: self._receive(asked["update_info"]),
            "/reset_prefix_cache": lambda: {"success": True}, "/v1/completions": lambda: self._complete(asked),
        }[path]()

    # ---------------------------------------------------------------- weights
    def _accept(self, asked: dict[str, Any]) -> dict[str, Any]:
        with socket.create_server(("127.0.0.1", asked["init_info"]["master_port"])) as listening:
            listening.settimeout(30)
            self._weights = listening.accept()[0]
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


def connect(init_info: dict[str, Any]) -> Any:
    """In place of vLLM's `trainer_init`."""
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            made = socket.create_connection((init_info["master_address"], init_info["master_port"]))
            return SimpleNamespace(group=SimpleNamespace(store=None, socket=made))
        assert time.monotonic() < deadline, "the server does not listen"
        time.sleep(0.02)


def send_weights(iterator: Iterator[Any], group: Any, src: int, post_iter_func: Callable[[Any], Tensor]) -> None:
    """In place of vLLM's `packed_nccl_broadcast_producer`."""
    assert src == 0
    for each in iterator:
        weight = post_iter_func(each)
        group.group.socket.sendall(weight.contiguous().view(torch.uint8).numpy().tobytes())
