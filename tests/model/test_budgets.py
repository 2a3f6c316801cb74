"""Memory budgets of plans: `stream`, `schedule` and `megacompile plan` use the same ones."""
from __future__ import annotations

import re
import sys
import weakref
from typing import Any

import engine
import pytest
import tiny_models
import torch
from counted import python_calls

import megacompile
from megacompile import api
from megacompile.errors import InsufficientMemoryError
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import device_budget
from megacompile.planning.host_needs import EXACT, host_bytes, with_choice
from megacompile.predict.hardware import Hardware
from megacompile.runtime.backends.cuda import CudaBackend
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.scheduling import Schedule
from megacompile.sizes import format_bytes, parse_bytes
from megacompile.streaming.optimizer.names import optimizer_named
from megacompile.streaming.programs import executables
from megacompile.weights.tiling import CUDA_HOST_MARGIN_BYTES, HOST_MARGIN_BYTES

GIB = 2**30


def pretend_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices with 16 and 40 GiB free, the second the current one; PyTorch keeps 3 GiB of each, 1 of it in use."""

    def index(device: Any) -> int:
        found = torch.device(device).index if device is not None else None
        return 1 if found is None else found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: ((16 * GIB, 40 * GIB)[index(device)], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: GIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"card {index(device)}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


def planned(**options: Any) -> Schedule:
    return megacompile.schedule(tiny_models.build(), batch=2, length=8, **options)


@pytest.fixture(scope="module")
def for_a_gpu() -> Schedule:
    return planned(hardware="rtx3090")


@pytest.mark.sample(2)
@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", "cuda:1"])
def test_a_schedule_is_made_for_the_device_and_the_memory_that_stream_would_take(
        device: str | None, for_a_gpu: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    analysed = for_a_gpu.captured, for_a_gpu.tiling
    monkeypatch.setattr(sys.modules["megacompile.scheduling"], "analyse", lambda *_, **__: analysed)
    pretend_two_gpus(monkeypatch)
    backend = CudaBackend.__new__(CudaBackend)  # without CuPy
    backend.device = torch.device("cuda", torch.device(device or "cuda").index or 0)
    found = planned(**{"device": device} if device else {})
    assert found.device == backend.device
    assert found.planner.device_bytes == device_budget(StreamConfig(), backend.free_bytes())


def test_a_schedule_leaves_other_models_on_the_device_what_they_have_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadBackend, "free_bytes", lambda self: 3 * 2**20)
    monkeypatch.setattr(executables, "_live", weakref.WeakSet())  # models of other tests
    first = megacompile.stream(tiny_models.build(), device="cpu")
    first(**tiny_models.batch())
    second = megacompile.stream(tiny_models.build(), device="cpu")
    found, given = (planned(device="cpu", **more) for more in ({}, {"device_memory": "2MiB"}))
    assert found.planner.taken_bytes == engine.planner(second).taken_bytes > 0
    assert found.plan == second.megacompile.compiled(tiny_models.batch(rows=2, length=8)).plan
    assert (given.planner.taken_bytes, given.planner.device_bytes) == (0, 2 * 2**20)
    assert planned(hardware="rtx3090").planner.taken_bytes == 0, "another machine"
    for model in (first, second):
        model.megacompile.close()


# ---- the host comes first --------------------------------------------------------------------------------------------


def test_a_model_that_the_host_cannot_hold_is_refused_before_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(*_: Any, **__: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(megacompile.api, "capture", traced)
    for entry, state in ((lambda **more: planned(hardware="rtx3090", **more), "16 bytes each"),
                         (lambda **more: megacompile.stream(tiny_models.build(), **more),  # the smallest state there is
                          "6.03 bytes each with state_dtype='8bit', update='arrival'")):
        with pytest.raises(InsufficientMemoryError, match=rf"training Qwen2ForCausalLM takes .*, {state}\) and 1.00 GiB are"):
            entry(host_memory="1GiB")
        with pytest.raises(AssertionError, match="traced"):
            entry(host_memory="4GiB", device="cpu")


def test_a_model_whose_layers_alone_fit_the_host_is_refused_before_anything_is_moved(for_a_gpu: Schedule) -> None:
    """What its other parameters take is known once it is traced."""
    model = tiny_models.build()
    least = optimizer_named("adamw_8bit").choice(None, on_arrival=True)  # an FP32 weight is its own master
    layers = host_bytes(model.model.layers, StreamConfig(), least)
    tiles = with_choice(for_a_gpu.tiling, least).host_bytes(gradients=False)
    assert layers < tiles
    with pytest.raises(InsufficientMemoryError, match=r"training with the smallest optimizer state takes .*: keep moments"):
        megacompile.stream(model, device="cpu", host_memory=HOST_MARGIN_BYTES + tiles - 1)
    with pytest.raises(InsufficientMemoryError, match=r"training with the smallest optimizer state takes .*: freeze some"):
        megacompile.stream(model, device="cpu", host_memory=HOST_MARGIN_BYTES + layers + 64)
    assert type(model) is type(tiny_models.build()), "it is not streamed"
    megacompile.stream(model, device="cpu", host_memory=HOST_MARGIN_BYTES + tiles).megacompile.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("on_arrival", [False, True])
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "lion_bf16", "sgd"])
def test_what_is_said_to_be_needed_is_what_the_tiles_take(optim: str, on_arrival: bool, for_a_gpu: Schedule) -> None:
    named, model = optimizer_named(optim), tiny_models.build()
    needed = host_bytes([model], StreamConfig(), named.choice(None, on_arrival))
    tiles = for_a_gpu.tiling.with_states(named.states(None, model, for_a_gpu.tiling)).host_bytes(gradients=not on_arrival)
    assert needed <= tiles <= 1.3 * needed  # each parameter is padded

    def schedule(host_memory: int) -> Schedule:
        return megacompile.schedule(
            model, batch=2, length=8, hardware="rtx3090", host_memory=CUDA_HOST_MARGIN_BYTES + host_memory, optim=optim,
            update="arrival" if on_arrival else "step")

    with pytest.raises(InsufficientMemoryError, match=format_bytes(tiles + CUDA_HOST_MARGIN_BYTES)):
        schedule(tiles - 1)
    assert schedule(tiles)


@pytest.fixture
def large() -> Any:
    """80 layers of Llama-70B's shape, without weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
             "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("memory", "said"), [
    ("128GiB", ": use a model of up to 9.51 G parameters in bfloat16 (even its frozen weights take 135.42 GiB)\nor use"),
    ("192GiB", ": train adapters (LoRA) over frozen weights: then it takes 135.42 GiB, plus the adapters\nor train only the "),
    ("300GiB", ": give the optimizer state_dtype='8bit', master='bfloat16', update='arrival': then it takes 268.89 GiB"),
    ("420GiB", ": give the optimizer state_dtype='8bit', update='arrival': then it takes 400.30 GiB (6.03 bytes "
               "each), and the host's update takes 0."),
    ("600GiB", ": give the optimizer state_dtype='8bit': then it takes 531.72 GiB (8.03 bytes each), "
               "and the host's update takes 0."),
    ("700GiB", ": give the optimizer state_dtype='bfloat16': then it takes 661.08 GiB (10 bytes each), "
               "and the host's update takes 0.")])
def test_a_refusal_for_the_host_says_what_is_needed_in_all_and_what_would_fit(
        memory: str, said: str, large: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "capture", lambda *_, **__: pytest.fail("the model is captured, which takes long"))
    monkeypatch.setattr(Hardware, "known", lambda: None)  # speeds are an H200's where this machine was not calibrated
    with python_calls() as calls, pytest.raises(
            InsufficientMemoryError, match=r"takes 923.92 GiB of host memory \(70.6 G para") as caught:
        megacompile.schedule(large, batch=4, length=2048, hardware="rtx4090", host_memory=memory)
    assert calls[0] < 4_000_000, "what would fit takes long to find"
    for part in ("14 bytes each", said, f"{(parse_bytes(memory) or 0) / GIB:.2f} GiB are available"):
        assert part in str(caught.value)


@pytest.mark.nightly(
    held_by="tests/model/test_budgets.py::test_a_refusal_for_the_host_says_what_is_needed_in_all_and_what_would_fit")
@pytest.mark.parametrize(("memory", "said"), [
    ("300GiB", None),
    ("480GiB", r"takes 47\d.\d\d GiB of host memory and 4[67]\d.\d\d GiB of the drive, and each step writes 4[67]\d"),
    ("700GiB", r"takes (69\d|700).\d\d GiB of host memory and 2[34]\d.\d\d GiB of the drive, and each step writes 2")], ids=str)
def test_a_refusal_for_the_host_says_what_a_disk_would_take(memory: str, said: str | None, large: Any) -> None:
    options: dict[str, Any] = {"batch": 4, "length": 2048, "hardware": "rtx4090", "host_memory": memory}
    with pytest.raises(InsufficientMemoryError) as caught:
        megacompile.schedule(large, **options)
    message = str(caught.value)
    if said is None:
        assert "keep moments on a local drive" not in message
        return
    assert re.search(rf"\nor keep moments on a local drive \(disk='/nvme/state'\): then it {said}", message), message
    with pytest.raises(InsufficientMemoryError) as caught:
        megacompile.schedule(large, **options, disk="/nvme/state", disk_state=())
    assert "keep moments on a local drive" not in str(caught.value)


def test_layers_that_a_refusal_lets_train_fit(large: Any) -> None:
    upper, room = 6, 192 * GIB - HOST_MARGIN_BYTES
    for count, fits in ((upper, True), (upper + 1, False)):
        large.requires_grad_(False)
        for layer in large.model.layers[-count:]:
            layer.requires_grad_(True)
        assert (host_bytes([large], StreamConfig(), EXACT) <= room) is fits


def test_float32_is_told_that_bfloat16_would_fit(large: Any) -> None:
    with pytest.raises(InsufficientMemoryError, match=r"(?s)16 bytes each.*\nor train in bfloat16: then it takes 923.92 GiB\n"):
        megacompile.schedule(large, batch=4, length=2048, hardware="rtx4090", host_memory="1000GiB", dtype=torch.float32)
