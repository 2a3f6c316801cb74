"""GRPO, RLOO and online DPO whose completions are those of a real vLLM server, which gets the weights of each step.

Skipped unless `MEGACOMPILE_VLLM_PYTHON` names the interpreter of an environment with vLLM (`tests/support/real_vllm.py`)."""
from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
pytest.importorskip("trl")
pytest.importorskip("peft")

import peft
import real_vllm
import test_preference
import tiny_models
import torch
from generation_server import over_sockets
from real_vllm import RealServer
from test_online_dpo import online_dpo
from test_preference import grpo
from trl.generation import vllm_client

import megacompile
from megacompile.errors import ServerError
from megacompile.grpo import GRPOTrainer
from megacompile.online_dpo import OnlineDPOTrainer
from megacompile.rloo import RLOOTrainer
from megacompile.trainers import vllm_server

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not real_vllm.PYTHON, reason="MEGACOMPILE_VLLM_PYTHON is not set")]
_offline, tokenizer = test_preference._offline, test_preference.tokenizer  # fixtures
#: vLLM's attention on a CPU wants heads of 32.
SIZES = dict(hidden_size=64, num_attention_heads=2, num_hidden_layers=2, initializer_range=0.2)
#: The largest difference of log-probabilities. A bf16 logit has 8 bits: those here, of up to 8, are rounded to 1/32, and hidden
#: values before them as coarsely.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
ADAPTER = functools.partial(peft.LoraConfig, r=4, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM",
                            init_lora_weights=False)


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    with over_sockets():
        yield


@pytest.fixture(scope="module")
def serving(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RealServer]]:
    """The server of a model. It starts with other weights than a policy, so that policies which are not sent are seen."""
    servers: dict[tuple[str, bool], RealServer] = {}

    def of(dtype: str, tied: bool = False) -> RealServer:
        if (dtype, tied) not in servers:
            for each in servers.values():
                each.kill()
            servers.clear()
            folder = tmp_path_factory.mktemp("served")
            model = built(dtype, tied)
            with torch.no_grad():
                model.lm_head.weight.mul_(-1)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            servers[dtype, tied] = RealServer(folder, dtype)
        servers[dtype, tied].wait()
        return servers[dtype, tied]

    yield of
    for each in servers.values():
        each.kill()


def built(dtype: str, tied: bool = False) -> Any:
    return tiny_models.build(bf16=dtype == "bfloat16", tie_word_embeddings=tied, **SIZES)


def settings(server: RealServer, **changes: Any) -> dict[str, Any]:
    """Seeds make two runs sample the same."""
    return dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url, vllm_group_port=real_vllm.free_port(),
                generation_kwargs={"seed": 5}, temperature=1.0, **changes)


@pytest.mark.parametrize(("trainer", "kind", "dtype"), [
    (GRPOTrainer, "plain", "float32"), (GRPOTrainer, "adapter", "float32"), (RLOOTrainer, "plain", "float32"),
    (OnlineDPOTrainer, "plain", "float32"), (OnlineDPOTrainer, "adapter", "float32"), (GRPOTrainer, "tied", "float32"),
    (GRPOTrainer, "plain", "bfloat16"), (GRPOTrainer, "adapter", "bfloat16"), (OnlineDPOTrainer, "plain", "bfloat16")])
def test_each_completion_is_of_the_policys_weights_and_has_its_log_probabilities(
        trainer: type, kind: str, dtype: str, serving: Any, tokenizer: Any, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights bit for bit, those of an adapter as PEFT merges them; log-probabilities within rounding."""
    adapted, tied = kind == "adapter", kind == "tied"
    server, states, differences = serving(dtype, tied), list[dict[str, torch.Tensor]](), list[float]()
    policy: Any = None

    class Watched(trainer):  # type: ignore[misc, valid-type]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal policy
            policy = self.model
            return super().train(*args, **kwargs)

    def plain() -> Any:
        made = peft.get_peft_model(built(dtype), ADAPTER()) if adapted else built(dtype, tied)
        made.load_state_dict(policy.state_dict())
        return (made.merge_and_unload() if adapted else made).eval()

    def generate(client: Any, *args: Any, **kwargs: Any) -> Any:
        model = plain()
        states.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        assert real_vllm.differing(server.weights(), states[-1]) == []
        found = theirs(client, *args, **{**kwargs, "logprobs": 0})  # RLOO asks for none
        each = len(found["completion_ids"]) // len(found["prompt_ids"])
        for row, (tokens, logs) in enumerate(zip(found["completion_ids"], found["logprobs"], strict=True)):
            ids = torch.tensor([found["prompt_ids"][row // each] + tokens])
            with torch.no_grad():
                ours = model(input_ids=ids).logits[0, -len(tokens) - 1:-1].float().log_softmax(-1)
            differences.extend(abs(float(ours[at, token]) - logs[at][0]) for at, token in enumerate(tokens))
        return found

    theirs = vllm_client.VLLMClient.generate
    monkeypatch.setattr(vllm_client.VLLMClient, "generate", generate)
    run = online_dpo if trainer is OnlineDPOTrainer else functools.partial(grpo, num_iterations=1, beta=0.0)
    made = run(Watched, tmp_path, megacompile.stream(built(dtype, tied), device="cpu"), tokenizer, learning_rate=1e-2,
               adapter=ADAPTER() if adapted else None, **settings(server))
    made.model.megacompile.close()
    if getattr(made, "ref_model", None) is not None:
        made.ref_model.megacompile.close()
    print(f"{trainer.__name__} {dtype} {kind}: {len(differences)} tokens, largest difference {max(differences):.2g}")
    assert len(states) == (6 if trainer is OnlineDPOTrainer else 3) and len(differences) >= 24
    assert not tiny_models.same_bits(states[0], states[-1]), "nothing was trained"
    assert max(differences) <= TOLERANCE[dtype]


def steady(server: RealServer, **changes: Any) -> dict[str, Any]:
    """Settings of GRPO whose loss does not read the server's log-probabilities: their last bits depend on which requests the
    server happens to compute together. Tokens do not."""
    return settings(server, num_iterations=1, vllm_importance_sampling_correction=False, **changes)


def trained(server: RealServer, tokenizer: Any, folder: Path, **changes: Any) -> Any:
    """A trainer after three steps of GRPO."""
    model = megacompile.stream(built("float32"), device="cpu")
    return grpo(GRPOTrainer, folder, model, tokenizer, **steady(server, **changes))


@pytest.fixture
def undisturbed(serving: Any, tokenizer: Any, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights after three steps in which the server was well."""
    made = trained(serving("float32"), tokenizer, tmp_path / "undisturbed")
    made.model.megacompile.close()
    return tiny_models.weights(made.model)


def kill_and_start(server: RealServer) -> None:
    server.kill()
    server.start()


def while_it_generates(server: RealServer) -> None:
    """The request arrives at a server that does not answer, and is then ended."""
    server.signal(signal.SIGSTOP)
    threading.Timer(1.0, kill_and_start, [server]).start()


def unnoticed(server: RealServer) -> None:
    """It is up again before it is asked, and has the weights that it started with."""
    kill_and_start(server)
    server.wait()


@pytest.mark.parametrize(("owner", "function", "disturb", "attempts"), [
    (vllm_client.VLLMClient, "generate", kill_and_start, 4), (vllm_client.VLLMClient, "generate", while_it_generates, 4),
    (vllm_server.LastingClient, "generate", unnoticed, 3), (vllm_client.VLLMClient, "update_named_params", unnoticed, 4),
    (vllm_client, "packed_nccl_broadcast_producer", kill_and_start, 4)],
    ids=["before a request", "in a request", "unnoticed", "before weights", "in weights"])
def test_a_server_that_is_killed_and_comes_back_costs_nothing_but_time(
        owner: Any, function: str, disturb: Callable[[RealServer], None], attempts: int, undisturbed: Any, serving: Any,
        tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, calls, theirs = serving("float32"), 0, getattr(owner, function)

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            disturb(server)
        return theirs(*args, **kwargs)

    monkeypatch.setattr(owner, function, disturbed)
    made = trained(server, tokenizer, tmp_path, vllm_server_timeout=real_vllm.UP_S)
    made.model.megacompile.close()
    assert calls == attempts
    assert tiny_models.same_bits(tiny_models.weights(made.model), undisturbed)


@pytest.mark.parametrize("title", ["", "VLLM::Worker"], ids=["whole", "worker"])
@pytest.mark.parametrize("function", ["generate", "_start_weight_update"])
def test_a_server_that_hangs_is_an_error_in_time_and_training_resumes_as_if_it_had_not(
        function: str, title: str, undisturbed: Any, serving: Any, tokenizer: Any, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: in the same process, and from the last checkpoint in another one."""
    monkeypatch.setattr(vllm_server, "LOST_S", 6.0)
    monkeypatch.setattr(vllm_server, "PROBE_S", 1.0)
    server, stopped = serving("float32"), list[float]()
    theirs = getattr(vllm_client.VLLMClient, function)
    made: Any = None

    class Kept(GRPOTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made = self
            return super().train(*args, **kwargs)

    def hanging(client: Any, *args: Any, **kwargs: Any) -> Any:
        if made.state.global_step == 2 and not stopped:
            stopped.append(time.monotonic())
            server.signal(signal.SIGSTOP, title)
        return theirs(client, *args, **kwargs)

    monkeypatch.setattr(vllm_client.VLLMClient, function, hanging)
    run = functools.partial(grpo, Kept, tmp_path, tokenizer=tokenizer, save_strategy="steps", save_steps=1,
                            **steady(server, vllm_server_timeout=2.0))
    try:
        with pytest.raises(ServerError, match=r"server at .* did not answer for 2 s: start it again, and train on or"):
            run(model=megacompile.stream(built("float32"), device="cpu"))
        assert time.monotonic() - stopped[0] < 6 + 2 + 4 * 2, "LOST_S, vllm_server_timeout, and probes"
    finally:
        server.signal(signal.SIGCONT)
    server.wait()
    assert made.state.global_step == 2 and (tmp_path / "checkpoint-2").is_dir()
    made.args.vllm_server_timeout = real_vllm.UP_S
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    made.model.megacompile.close()
    assert tiny_models.same_bits(tiny_models.weights(made.model), undisturbed)
