"""Exchanges by copies between GPUs, whose memory is played by tensors and whose streams by threads."""
from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacompile.runtime.peer_copies import PeerCopies

HALF = 4096


class Host:
    """Memory of all ranks, and signals between them."""

    def __init__(self, size: int) -> None:
        self.memory = [torch.full((PeerCopies.memory_bytes(HALF),), 255, dtype=torch.uint8) for _ in range(size)]
        self.signals: set[tuple[int, int, int]] = set()  # (source, destination, channel)
        self.changed = threading.Condition()
        self.broken = False

    def change(self, signal: tuple[int, int, int], given: bool) -> None:
        """Gives or takes a signal once that is possible."""
        with self.changed:
            self.broken |= not self.changed.wait_for(lambda: self.broken or (signal in self.signals) != given, 2)
            self.changed.notify_all()
            assert not self.broken, f"a wait for {signal} never ends"
            (self.signals.add if given else self.signals.remove)(signal)
            self.changed.notify_all()


class Peers:
    """What one rank sees of the host, with the meaning that PyTorch's symmetric memory gives to signals."""

    def __init__(self, host: Host, rank: int) -> None:
        self.host, self.rank = host, rank

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor:
        count = sizes[0]
        return self.host.memory[rank].view(dtype)[storage_offset:storage_offset + count]

    def put_signal(self, dst_rank: int, channel: int) -> None:
        self.host.change((self.rank, dst_rank, channel), True)

    def wait_signal(self, src_rank: int, channel: int) -> None:
        self.host.change((src_rank, self.rank, channel), False)


def together(size: int, work: Callable[[int, PeerCopies], Any]) -> list[Any]:
    """What each rank's thread returns."""
    host = Host(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(rank, PeerCopies(Peers(host, rank), rank, size, HALF)), range(size)))


def values(rank: int, step: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(97 * step + rank))


@settings(deadline=None, max_examples=25, phases=(Phase.generate,))  # a failure waits: do not repeat it
@given(st.integers(2, 5), st.lists(st.tuples(st.booleans(), st.integers(1, 3000), st.booleans()), min_size=1, max_size=6))
def test_ranks_gather_all_shards_and_add_up_all_parts(size: int, steps: list[tuple[bool, int, bool]]) -> None:
    """Any sequence of exchanges: fewer and more elements than a chunk, a gather in place or not."""
    def work(rank: int, copies: PeerCopies) -> list[Tensor]:
        found = []
        for step, (gathers, count, in_place) in enumerate(steps):
            if gathers:
                shard = values(rank, step, count).view(torch.uint8)
                whole = torch.zeros(size * len(shard), dtype=torch.uint8)
                if in_place:
                    own = whole[rank * len(shard):(rank + 1) * len(shard)]
                    own.copy_(shard)
                    shard = own
                copies.gather(whole, shard)
                found.append(whole)
            else:
                flat = values(rank, step, size * count)
                copies.reduce_scatter(flat)
                found.append(flat[rank * count:(rank + 1) * count].clone())
        return found

    found = together(size, work)
    for step, (gathers, count, _) in enumerate(steps):
        if gathers:
            expected = torch.cat([values(rank, step, count).view(torch.uint8) for rank in range(size)])
            assert all(torch.equal(each[step], expected) for each in found)
            continue
        parts = [values(rank, step, size * count).view(size, count) for rank in range(size)]
        for rank in range(size):
            expected = parts[rank][rank].clone()
            for other in range(size):
                if other != rank:
                    expected += parts[other][rank]
            assert torch.equal(found[rank][step], expected)


@pytest.mark.parametrize("late", range(3))
def test_a_late_rank_delays_the_others_and_spoils_nothing(late: int) -> None:
    def work(rank: int, copies: PeerCopies) -> Tensor:
        flat = values(rank, 0, 3 * 5000)
        for _ in range(3):
            if rank == late:
                threading.Event().wait(0.02)
            copies.reduce_scatter(flat)
            copies.gather(flat.view(torch.uint8), flat.view(3, -1)[rank].view(torch.uint8))
        return flat

    found = together(3, work)
    expected = torch.stack([values(rank, 0, 3 * 5000).double() for rank in range(3)]).sum(dim=0) * 9
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-4)
