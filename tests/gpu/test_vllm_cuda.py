"""GRPO with vLLM's own server and NCCL: the server on the second GPU, the policy on the first. Needs vLLM beside TRL."""
from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
pytest.importorskip("trl")
pytest.importorskip("peft")

import real_vllm
import test_preference
import torch
from test_real_vllm import built, settings
from trl.generation import vllm_client

import megacompile
from megacompile.grpo import GRPOTrainer
from megacompile.trainers import vllm_server

pytestmark = [pytest.mark.gpu, pytest.mark.nightly, pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or torch.cuda.device_count() < 2, reason="needs vLLM and two GPUs")]
_offline, tokenizer = test_preference._offline, test_preference.tokenizer  # fixtures


@pytest.fixture(scope="module")
def server(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("served")
    model = built("bfloat16")
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with real_vllm.serving(folder, "bfloat16", python=sys.executable, transport="nccl", device="1") as started:
        yield started


def trained(server: Any, tokenizer: Any, folder: Path) -> dict[str, torch.Tensor]:
    model = megacompile.stream(built("bfloat16"), device="cuda")
    made = test_preference.grpo(GRPOTrainer, folder, model, tokenizer, num_iterations=1, use_cpu=False, bf16=True,
                                **settings(server, vllm_server_timeout=real_vllm.UP_S))
    made.vllm_generation.sync_weights()
    model.megacompile.close()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_a_server_has_the_policys_weights_over_nccl(server: Any, tokenizer: Any, tmp_path: Path) -> None:
    weights = trained(server, tokenizer, tmp_path)
    assert real_vllm.differing(server.weights(), weights) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_lost_while_nccl_sends_weights_comes_back(
        number: int, server: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broadcast has nobody at its other end, and is ended from another thread."""
    monkeypatch.setattr(vllm_server, "LOST_S", 10.0)
    theirs, calls = vllm_client.packed_nccl_broadcast_producer, 0

    def restart() -> None:
        server.kill()
        server.start()

    def lost(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            server.signal(number)
            threading.Timer(20.0, restart).start()
        theirs(*args, **kwargs)

    monkeypatch.setattr(vllm_client, "packed_nccl_broadcast_producer", lost)
    weights = trained(server, tokenizer, tmp_path)
    assert calls == 5, "three steps, one attempt more, and the last weights"
    assert real_vllm.differing(server.weights(), weights) == []
