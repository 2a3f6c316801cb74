"""Which device a process of a job computes on."""
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megacompile.errors import DeviceUnavailableError
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import device_of_rank


@pytest.mark.parametrize(("processes", "config", "said"), [
    (4, {}, "4 processes or more were started on this host, but this one sees 2 GPUs: start 2"),
    (2, {}, None), (4, {"device": "cuda:0"}, None), (4, {"device": "cpu"}, None), (4, {"distributed": False}, None)])
def test_more_processes_than_gpus_are_refused_by_every_process(
        processes: int, config: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 2)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for rank in range(processes):
        for name, number in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", processes), ("LOCAL_WORLD_SIZE", processes)):
            monkeypatch.setenv(name, str(number))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(DeviceUnavailableError, match=said) if said else nullcontext():
            device = device_of_rank(StreamConfig(**config))
            assert device == torch.device(config.get("device", f"cuda:{0 if config else rank}"))
