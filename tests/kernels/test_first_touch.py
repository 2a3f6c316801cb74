"""The pages of optimizer state are taken before the first update, and what is written meanwhile stays."""
from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import engine
import pytest
import torch
from tiny_models import batch, build, state_of

import megacompile
from megacompile.runtime.memory import store
from megacompile.runtime.memory.store import FirstTouch, Store
from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.system.host_memory import SharedMemory, host_memory

SIZE = 1 << 26


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def finish(touch: FirstTouch) -> None:
    for thread in touch._threads:
        thread.join()


def test_pages_are_taken_and_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LEAST_BYTES", SIZE)
    monkeypatch.setattr(store, "_CHUNK", SIZE // 8)
    memory = host_memory(SIZE)
    memory[100], memory[-1] = 1, 2
    before = resident_bytes()
    touch = FirstTouch()
    touch.begin([memory])
    finish(touch)
    assert resident_bytes() - before > 0.9 * SIZE
    assert memory[100] == 1 and memory[-1] == 2 and int(memory.sum(dtype=torch.int64)) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_byte_of_the_state_is_one_rank_s_to_touch(dtype: torch.dtype, ranks: int) -> None:
    layout = replace(TileLayout.of("t", dtype, [("w", (1 << 12,), True)]), ranks=ranks)
    shared = None if ranks == 1 else SharedMemory(layout.shared_pieces())
    tile, touched = HostTile.allocate(layout, shared), list[int]()
    for rank in range(ranks):
        store = Store({"t": tile}, first_touch=mock.Mock(begin=lambda parts: touched.extend(part.nbytes for part in parts)))
        if ranks > 1:
            store.divide(["t"], rank, ranks)
        store.touch_state({"t"})
    assert sum(touched) == sum(layout.moment_bytes) + (2 << 12) * (dtype == torch.bfloat16)


def test_little_state_starts_no_thread() -> None:
    touch = FirstTouch()
    touch.begin([host_memory(SIZE)])
    assert not touch._threads


def test_an_optimizer_s_state_is_touched_and_its_first_step_is_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(least: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(store, "LEAST_BYTES", least)
        model = megacompile.stream(build(bf16=True), device="cpu", compile=False)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        touch = engine.store(model).first_touch
        assert bool(touch._threads) is (least == 0)
        for step in range(2):
            model.megacompile.train_step(batch(step), optimizer)
        found = {name: tensor.clone() for name, tensor in state_of(model, optimizer).items()}
        model.megacompile.close()
        assert not touch._threads
        return found

    plain, touched = trained(1 << 40), trained(0)
    assert plain.keys() == touched.keys() and all(torch.equal(plain[key], touched[key]) for key in plain)
