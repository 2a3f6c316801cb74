"""Exchanges by copies between GPUs, whose memory is played by tensors and whose streams by threads."""
from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacompile.errors import UnsupportedError
from megacompile.runtime import exchanges
from megacompile.runtime.exchanges import Exchanges, PeerCopies, StreamSignals

HALF = 4096


class Host:
    """Memory of all ranks, and signals between them."""

    def __init__(self, size: int) -> None:
        self.memory = [torch.full((4 * HALF,), 255, dtype=torch.uint8) for _ in range(size)]
        self.signals: set[tuple[int, int, int]] = set()  # (source, destination, channel)
        self.changed = threading.Condition()
        self.broken = False

    def change(self, signal: tuple[int, int, int], given: bool) -> None:
        """Gives or takes a signal once that is possible."""
        with self.changed:
            self.broken |= not self.changed.wait_for(lambda: self.broken or (signal in self.signals) != given, 30)
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
    return in_threads(size, lambda rank: work(rank, PeerCopies(Peers(host, rank), rank, size, HALF)))


def in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))


def values(rank: int, step: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(97 * step + rank))


@settings(max_examples=25, phases=(Phase.generate,))  # a failure waits: do not repeat it
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


class Driver:
    """The stream memory operations of CUDA on host memory, executed at once."""

    def cuDeviceGetAttribute(self, *_: Any) -> int:  # noqa: N802
        return 1

    def cuStreamWriteValue32_v2(self, _: Any, address: ctypes.c_uint64, number: ctypes.c_uint32, __: Any) -> int:  # noqa: N802
        ctypes.c_uint32.from_address(address.value).value = number.value
        return 0

    def cuStreamWaitValue32_v2(self, _: Any, address: ctypes.c_uint64, number: ctypes.c_uint32, __: Any) -> int:  # noqa: N802
        limit = time.monotonic() + 30
        while ctypes.c_uint32.from_address(address.value).value - number.value & 0x80000000:
            assert time.monotonic() < limit, "a wait never ends"
            time.sleep(0)
        return 0


class Handle:
    """Memory of all ranks as PyTorch's symmetric memory shows it."""

    def __init__(self, memory: list[Tensor]) -> None:
        self.memory, self.buffer_ptrs = memory, [each.data_ptr() for each in memory]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor:
        return self.memory[rank].view(dtype)[storage_offset:storage_offset + sizes[0]]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_signals_of_streams_order_exchanges_as_signals_do(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    handle = Handle([torch.zeros(4 * HALF + (1 << 12), dtype=torch.uint8) for _ in range(size)])

    def run(rank: int) -> list[Tensor]:
        signals = StreamSignals(handle.memory[rank], handle, rank, size)
        signals._put.update({(other, channel): 2**32 - 3 for other in range(size) for channel in range(8)})  # soon wrapped
        signals._taken.update(signals._put)
        copies, found = PeerCopies(signals, rank, size, HALF), []
        for step in range(6):
            flat = values(rank, step, size * 900)
            copies.reduce_scatter(flat)
            copies.gather(flat.view(torch.uint8), flat.view(size, -1)[rank].view(torch.uint8))
            found.append(flat)
        return found

    for each in handle.memory:
        each[:256].view(torch.int32).fill_(-3)
    found = in_threads(size, run)
    for step in range(6):
        expected = torch.stack([values(rank, step, size * 900).double() for rank in range(size)]).sum(dim=0)
        assert all(torch.equal(each[step], found[0][step]) for each in found)
        torch.testing.assert_close(found[0][step].double(), expected, rtol=1e-5, atol=1e-5)


def test_copies_that_were_asked_for_and_are_not_possible_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> None:
        raise RuntimeError("no access between the devices\nmore")

    monkeypatch.setattr(exchanges, "memory_of_peers", unreachable)
    hosts: Any = SimpleNamespace(local=0, ranks=2, count=1, copies=1, spread=1)
    one = Exchanges(hosts, torch.device("cuda:0"), cast(Any, object()), None, None, lambda work: None)
    with pytest.raises(UnsupportedError, match=r"each other's memory: leave peer_copies out.*no access between"):
        one.connect(True, lambda value: value)
