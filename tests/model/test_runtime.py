"""The runtime in unusual conditions: huge tensors, forked processes, lanes and devices that fail."""
from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch
from torch import fx

import megacompile
from megacompile.errors import LaneError
from megacompile.ir.program import Lane, op_of
from megacompile.runtime.backends import cuda
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.runtime.memory.tiles import HostTile, TileLayout

SOON_S = 5.0


@pytest.fixture
def tiny() -> Iterator[Any]:
    """A streamed model of one layer whose lanes have not run yet. Closed at the end, alive or not."""
    model = megacompile.stream(tiny_models.build(num_hidden_layers=1), device="cpu")
    yield model
    with contextlib.suppress(LaneError):
        model.megacompile.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_gradient_is_exact(dtype: torch.dtype) -> None:
    large = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(dtype).view(4096, 4096)
    out = torch.empty(2)
    ThreadBackend().norms([large[:1], large], out)
    expected = torch.stack([large[:1].double().norm(), large.double().norm()])
    assert torch.allclose(out.double(), expected, rtol=1e-6, atol=0)


# ---------------------------------------------------------------- forked processes

def mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as lines:
        bounds = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in bounds)


def test_a_forked_process_has_the_weights_and_nothing_else_of_a_tile() -> None:
    """Each page that the process has is copied when training next writes it."""
    tile = HostTile.allocate(TileLayout.of("tile", torch.bfloat16, [("weight", (64, 1024), True)]))
    tile.allocate_gradients()
    tile.allocate_moments()
    tile.weights.fill_(7)
    parts = [tile.gradients, tile.remainder, *tile.moments, ThreadBackend().memory(1 << 20)]
    addresses = [part.data_ptr() for part in parts if part is not None]
    child = os.fork()
    if child == 0:  # no exception may leave this process
        os._exit(8 * bool(tile.weights[-1] != 7) + sum(map(mapped, addresses)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(addresses) == 5 and all(map(mapped, addresses))


def test_a_model_used_in_a_forked_process_raises_and_the_training_one_goes_on(model: Any) -> None:
    """A loader's workers are forked; lanes are threads, which a fork leaves behind: what waits for one would wait forever."""
    model(**batch()).loss.backward()
    child = os.fork()
    if child == 0:  # no exception may leave this process
        raised = 0
        for use in (model.state_dict, lambda: model(**batch()), lambda: list(model.parameters())):
            try:
                use()
            except LaneError as error:
                raised += "forked" in str(error)
        os._exit(raised)
    deadline = time.monotonic() + SOON_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 3
    assert torch.isfinite(model(**batch()).loss)


# ---------------------------------------------------------------- lanes

def test_a_model_forgotten_during_an_update_and_collected_in_its_own_lane_ends_its_lanes() -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", resident="all")
    optimizer = megacompile.AdamW(model.parameters())
    model(**batch()).loss.backward()
    executor = engine.executor(model)
    forgotten, collected_in = threading.Event(), []

    def collect(lane: Lane) -> None:
        if lane == Lane.CPU and forgotten.wait(SOON_S) and not collected_in:
            gc.collect()
            collected_in.append(lane)

    engine.delay(model, collect)
    gc.disable()  # it may start in any thread: here it must start in the lane
    try:
        optimizer.step()
        threads = list(executor._threads.values())
        del model, optimizer, executor
        forgotten.set()
        for thread in threads:
            thread.join(SOON_S)
    finally:
        gc.enable()
    assert collected_in and not [thread.name for thread in threads if thread.is_alive()]


def test_a_lane_that_cannot_begin_fails_the_step_and_may_begin_at_the_next(
        tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, failed = engine.backend(tiny), []
    enter = backend.lane

    def lane(name: Lane) -> Any:
        if name == Lane.H2D and not failed:
            failed.append(name)
            raise RuntimeError("no memory for a context")
        return enter(name)

    monkeypatch.setattr(backend, "lane", lane)
    begin = time.monotonic()
    with pytest.raises(LaneError, match="failed in lane h2d: RuntimeError: no memory for a context"):
        tiny(**batch())
    assert time.monotonic() - begin < SOON_S
    tiny(**batch()).loss.backward()


# ---------------------------------------------------------------- a device that is lost

def test_a_lost_device_ends_the_model_with_one_error_and_marks_the_update_torn(
        tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = megacompile.AdamW(tiny.parameters(), lr=1e-2)
    tiny(**batch()).loss.backward()
    updates: list[fx.Node] = []

    def synchronize() -> None:
        if len(updates) > 1:
            raise LaneError("the device is lost: start a new process")

    def lose(node: fx.Node) -> None:
        if op_of(node).name == "update":
            updates.append(node)
        if len(updates) > 1:
            raise RuntimeError("illegal memory access")

    engine.probe(tiny, lose)
    monkeypatch.setattr(engine.backend(tiny), "synchronize", synchronize)
    optimizer.step()
    with pytest.raises(LaneError, match="update failed in lane cpu: RuntimeError: illegal memory access"):
        tiny(**batch())
    assert engine.torn(tiny)
    for use in (lambda: tiny(**batch()), tiny.state_dict, optimizer.step):
        with pytest.raises(LaneError, match="the device is lost: start a new process"):
            use()


def test_what_cuda_raises_when_it_is_lost_says_to_start_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore\nlines")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    backend = cuda.CudaBackend.__new__(cuda.CudaBackend)
    backend.device = torch.device("cuda", 0)
    with pytest.raises(LaneError, match=r"^cuda:0 has failed .* start a new one .*illegal memory access was encountered\)$"):
        backend.synchronize()
