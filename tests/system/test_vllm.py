"""GRPO and RLOO with `use_vllm=True`: a streamed policy's weights go to a server that speaks the protocol of `vllm serve`.

TRL's client is real; the server stands for vLLM (`test_real_vllm.py` has the real one), and a socket for NCCL.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import re
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("datasets")
pytest.importorskip("trl")
pytest.importorskip("peft")

import peft
import tiny_models
import torch
import trl
from generation_server import EngineInProcess, GenerationServer, over_sockets
from test_preference import assert_alike, grpo, tokenizer  # noqa: F401  (a fixture)
from trl.generation import vllm_generation

import megacompile
from megacompile.errors import MegacompileError, ServerError, UnsupportedError
from megacompile.grpo import GRPOTrainer
from megacompile.rloo import RLOOTrainer
from megacompile.trainers import vllm_server
from megacompile.trainers.sent_weights import refuse_codes, sent_weights
from megacompile.trainers.vllm_server import LastingClient

ADAPTER = functools.partial(peft.LoraConfig, r=4, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM",
                            init_lora_weights=False)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with over_sockets():
        yield


@pytest.fixture
def serving() -> Iterator[Callable[[Any], GenerationServer]]:
    """Starts a server that generates with a copy of a model."""
    with contextlib.ExitStack() as stack:
        yield lambda model: stack.enter_context(contextlib.closing(GenerationServer(copy.deepcopy(model), end=1)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def served(server: GenerationServer) -> dict[str, Any]:
    return dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url, vllm_group_port=free_port())


@pytest.mark.parametrize(("trainers", "adapted"), [
    ((trl.GRPOTrainer, GRPOTrainer), False),
    pytest.param((trl.GRPOTrainer, GRPOTrainer), True, marks=pytest.mark.nightly),
    pytest.param((trl.RLOOTrainer, RLOOTrainer), False, marks=pytest.mark.nightly)], ids=["grpo", "adapter", "rloo"])
def test_a_policy_is_sampled_by_a_server_and_trained_as_it_is_unstreamed(
        trainers: tuple[type, type], adapted: bool, tokenizer: Any, serving: Any, tmp_path: Path) -> None:  # noqa: F811
    """The same completions, token by token. The server has the weights of each step, tied ones once."""
    runs, servers = [], []
    for trainer in trainers:
        model = tiny_models.build(num_hidden_layers=1) if adapted else tiny_models.build()  # whose captures tests share
        servers.append(serving(model))
        if trainer in (GRPOTrainer, RLOOTrainer):
            model = megacompile.stream(model, device="cpu")
        torch.manual_seed(3)
        runs.append(grpo(trainer, tmp_path, model, tokenizer, adapter=ADAPTER() if adapted else None,
                         num_iterations=1, beta=0.0, **served(servers[-1])))
    assert_alike(runs[1], runs[0])
    theirs, ours = servers
    asked = [path for path in ours.requests if path not in ("/version", "/weight_info")]  # looks at the server itself
    assert asked == theirs.requests and asked.count("/update_weights") == 3
    assert ours.received == theirs.received and len({*ours.received}) == len(ours.received)
    assert "/reset_prefix_cache" in ours.requests
    before = tiny_models.weights(ours.model)
    runs[1].vllm_generation.sync_weights()
    after = tiny_models.weights(ours.model)
    assert not tiny_models.same_bits(before, after), "the last step's weights had not been sent"
    trained = runs[1].model
    trained.megacompile.close()
    assert tiny_models.same_bits(after, tiny_models.weights(trained.merge_and_unload() if adapted else trained))


def test_a_policy_is_sampled_by_an_engine_in_its_process_and_trained_as_it_is_unstreamed(
        tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    engines = [EngineInProcess(tiny_models.build(), end=1) for _ in range(2)]
    making = iter(engines)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **_: next(making), raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    native = tiny_models.build()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    runs = []
    try:
        for trainer, each in ((trl.GRPOTrainer, native), (GRPOTrainer, model)):
            with monkeypatch.context() as patched:
                for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL sets them
                    patched.setenv(name, "")
                    patched.delenv(name)
                runs.append(grpo(trainer, tmp_path, each, tokenizer, num_iterations=1, use_vllm=True, vllm_mode="colocate"))
        theirs, ours = runs
        assert_alike(ours, theirs)
        assert engines[0].loaded == engines[1].loaded and len({*engines[1].loaded}) == len(engines[1].loaded) // 3
    finally:
        model.megacompile.close()


@pytest.mark.parametrize("options", [
    {}, pytest.param({"use_dora": True}, marks=pytest.mark.nightly),
    pytest.param({"modules_to_save": ["lm_head"]}, marks=pytest.mark.nightly)], ids=str)
def test_merged_weights_leave_the_policy_as_it_is(options: dict[str, Any]) -> None:
    """In bf16, merging and unmerging in place would change the base a little with every step. DoRA is merged as PEFT does."""
    plain = peft.get_peft_model(tiny_models.build(bf16=True, num_hidden_layers=1), ADAPTER(**options))
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    try:
        before = tiny_models.weights(model)
        sent = {name: weight.clone() for name, weight in sent_weights(model, torch.device("cpu"))}
        shapes = {name: weight.shape for name, weight in sent_weights(model, torch.device("meta"))}
        assert shapes == {name: weight.shape for name, weight in sent.items()}
        assert tiny_models.same_bits(tiny_models.weights(model), before)
    finally:
        model.megacompile.close()
    merged = dict(plain.merge_and_unload().named_parameters())
    assert sent.keys() == merged.keys()
    assert tiny_models.same_bits(sent, {name: weight.detach() for name, weight in merged.items()})


def test_a_server_that_forgot_its_weights_gets_them_again_before_it_generates(
        serving: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """As one does that was started again between two requests."""
    made, servers = [], []
    theirs, first = LastingClient.generate, tiny_models.build().state_dict()
    for forgets in (False, True):
        server, calls = serving(tiny_models.build()), []
        servers.append(server)

        def generate(client: Any, *args: Any, server: Any = server, calls: list[int] = calls, forgets: bool = forgets,
                     **kwargs: Any) -> Any:
            calls.append(1)
            if forgets and len(calls) == 2:
                server.version = "default"
                server.model.load_state_dict(first)
            return theirs(client, *args, **kwargs)

        monkeypatch.setattr(LastingClient, "generate", generate)
        made.append(grpo(GRPOTrainer, tmp_path, megacompile.stream(tiny_models.build(), device="cpu"), tokenizer,
                         num_iterations=1, **served(server)))
        made[-1].model.megacompile.close()
    assert [each.requests.count("/init_weight_transfer_engine") for each in servers] == [1, 2]
    assert tiny_models.same_bits(*(tiny_models.weights(each.model) for each in made))


@pytest.mark.parametrize("path", ["/v1/completions", "/update_weights", "/start_weight_update"])
def test_a_server_that_hangs_is_an_error_in_time_and_the_policy_stays_whole(
        path: str, serving: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(vllm_server, "LOST_S", 1.0)
    monkeypatch.setattr(vllm_server, "PROBE_S", 0.2)
    server, goes_on = serving(tiny_models.build()), threading.Event()
    answer = server.answer

    def hanging(asked: str, given: dict[str, Any]) -> dict[str, Any]:
        if server.requests.count(path) == 2:  # the second one hangs, and so does all that comes after it
            goes_on.wait(60)
        return answer(asked, given)

    monkeypatch.setattr(server, "answer", hanging)
    model, before = megacompile.stream(tiny_models.build(), device="cpu"), tiny_models.weights(tiny_models.build())
    began = time.monotonic()
    with pytest.raises(ServerError, match="did not answer for 0 s: start it again, and train on or resume"):
        grpo(GRPOTrainer, tmp_path, model, tokenizer, num_iterations=1, vllm_server_timeout=0.0, max_steps=5,
             learning_rate=1e-2, warmup_steps=0, **served(server))
    goes_on.set()
    assert time.monotonic() - began < 60
    model.megacompile.whole()
    trained = tiny_models.weights(model)
    assert not tiny_models.same_bits(trained, before) and all(bool(weight.isfinite().all()) for weight in trained.values())
    model.megacompile.close()


def test_a_refusal_is_the_users_and_a_failure_is_the_servers(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = LastingClient(serving(tiny_models.build()).url)
    for status, kind, told in ((400, MegacompileError, r"refused a request: 400, too long"),
                               (503, ServerError, r"answered 503, too long: start it again")):
        answer = SimpleNamespace(status_code=status, text="too long")
        monkeypatch.setattr(client.session, "post", lambda *_, answer=answer: answer)
        with pytest.raises(kind, match=told) as raised:
            client._post("/v1/completions")
        assert isinstance(raised.value, ServerError) is (status == 503)


def test_the_extra_installs_the_releases_that_are_accepted(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    low, high = re.findall(r"0\.(\d+)", project["optional-dependencies"]["vllm"][0])
    assert tuple(f"0.{minor}" for minor in range(int(low), int(high))) == vllm_server.VERSIONS
    server = serving(tiny_models.build())
    LastingClient(server.url)
    monkeypatch.setattr(vllm_server, "VERSIONS", ("0.3",))
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.32\.0 was not tested: serve with 0\.3, or leave use_vllm out"):
        LastingClient(server.url)


@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_weights_in_codes_are_not_sent(streamed: bool) -> None:
    model = megacompile.quantize(peft.get_peft_model(tiny_models.build(bf16=True, num_hidden_layers=1), ADAPTER()), "nf4")
    if streamed:
        megacompile.stream(model, device="cpu", compile=False)
    with pytest.raises(UnsupportedError, match=r"stored in codes: stream the policy without quantize="):
        refuse_codes(model)
    if streamed:
        model.megacompile.close()
