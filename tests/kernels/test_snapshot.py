"""A snapshot's room for copies is given back when a copy fails."""
from __future__ import annotations

import pytest
import torch

from megacompile.errors import DiskError
from megacompile.runtime.memory import snapshot
from megacompile.runtime.memory.snapshot import Snapshot, state_bytes
from megacompile.runtime.memory.tiles import HostTile, TileLayout


@pytest.mark.parametrize("error", [DiskError("the drive has failed"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_a_copy_that_fails_takes_no_room_from_later_ones(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {name: HostTile.allocate(TileLayout.of(name, torch.float32, [("w", (256,), True)])) for name in ("a", "b")}
    kept = Snapshot(tiles, copy_bytes=state_bytes(tiles["a"]), stamp=lambda name: 0)

    def fails(tile: HostTile) -> HostTile:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_copy", fails)
        with pytest.raises(type(error)):
            kept.preserve("a")
    kept.preserve("b")  # would wait for the writer without room
