"""What memory plans are made for: one answer for `stream`, `schedule` and `megacompile plan`."""
from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import tiny_models
import torch

import megacompile
from megacompile import shapes
from megacompile.config import StreamConfig
from megacompile.device import device_budget
from megacompile.runtime.cuda import CudaBackend
from megacompile.runtime.threads import ThreadBackend
from megacompile.schedule import Schedule

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


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", "cuda:1"])
def test_a_schedule_is_made_for_the_device_and_the_memory_that_stream_would_take(
        device: str | None, for_a_gpu: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["megacompile.schedule"], "analyse", lambda *_: (for_a_gpu.captured, for_a_gpu.tiling))
    pretend_two_gpus(monkeypatch)
    backend = CudaBackend.__new__(CudaBackend)  # without CuPy
    backend.device = torch.device("cuda", torch.device(device or "cuda").index or 0)
    found = planned(**{"device": device} if device else {})
    assert found.device == backend.device
    assert found.planner.device_bytes == device_budget(StreamConfig(), backend.free_bytes())


def test_a_schedule_leaves_other_models_on_the_device_what_they_have_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadBackend, "free_bytes", lambda self: 3 * 2**20)
    monkeypatch.setattr(shapes, "_live", weakref.WeakSet())  # models of other tests
    first = megacompile.stream(tiny_models.build(), device="cpu")
    first(**tiny_models.batch())
    second = megacompile.stream(tiny_models.build(), device="cpu")
    found, given = (planned(device="cpu", **more) for more in ({}, {"device_memory": "2MiB"}))
    assert found.planner.taken_bytes() == second.megacompile.streamed.planner.taken_bytes() > 0
    assert found.plan == second.megacompile.compiled(tiny_models.batch(rows=2, length=8)).plan
    assert (given.planner.taken_bytes(), given.planner.device_bytes) == (0, 2 * 2**20)
    assert planned(hardware="rtx3090").planner.taken_bytes() == 0, "another machine"
    for model in (first, second):
        model.megacompile.close()
