"""Which ranks share a host: by the machines that they are on, by what the user declares, or by a mesh."""
from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacompile.errors import InsufficientMemoryError, MegacompileError, UnsupportedError
from megacompile.planning.config import StreamConfig
from megacompile.runtime import hosts
from megacompile.runtime.hosts import Hosts, Identity, Rows, arranged, rows_of, sequence_ranks_of
from megacompile.runtime.memory import store
from megacompile.runtime.memory.divided import Division
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import HostTile, TileLayout


def on(*machines: str, declared: dict[int, str] | None = None) -> list[Identity]:
    """Ranks on these machines, some of which declare a host."""
    return [(machine, (declared or {}).get(rank, ""), (declared or {}).get(rank, machine))
            for rank, machine in enumerate(machines)]


def of(identities: list[Identity], rank: int = 0, mesh: Rows | None = None) -> Hosts:
    return arranged(identities, rank, [mesh] * len(identities))


def test_the_ranks_of_a_machine_are_a_host() -> None:
    found = of(on("a", "a", "b", "b", "c", "c"), rank=3)
    assert found.rows == ((0, 1), (2, 3), (4, 5)) and found.names == ("a", "b", "c")
    assert (found.count, found.ranks, found.host, found.local, found.leads) == (3, 2, 1, 1, False)
    assert found.here == (2, 3) and found.alike == (1, 3, 5) and found.leaders == (0, 2, 4)
    assert found.where(4) == " on host c" and found.beside == 1


def test_ranks_may_alternate_between_machines() -> None:
    found = of(on("a", "b", "a", "b"), rank=2)
    assert found.rows == ((0, 2), (1, 3)) and found.alike == (2, 3)


def test_one_host_is_not_named() -> None:
    found = of(on("a", "a"), rank=1)
    assert found.rows == ((0, 1),) and found.where(0) == "" and found.leaders == (0,)


def test_a_machine_can_be_declared_as_several_hosts() -> None:
    found = of(on("a", "a", "a", "a", declared={0: "left", 1: "left", 2: "right", 3: "right"}), rank=2)
    assert found.rows == ((0, 1), (2, 3)) and found.names == ("left", "right") and found.beside == 2


def test_what_is_declared_alike_on_two_machines_is_two_hosts() -> None:
    found = of(on("a", "b", declared={0: "node", 1: "node"}))
    assert found.rows == ((0,), (1,)) and found.names == ("node (0)", "node (1)")


def test_a_mesh_says_which_ranks_share_a_host_in_any_order() -> None:
    found = of(on("a", "a", "a", "a"), rank=1, mesh=((3, 1), (2, 0)))
    assert found.rows == ((0, 2), (1, 3)) and found.names == ("a (0)", "a (1)") and found.beside == 2
    assert found.alike == (0, 1)


def test_a_mesh_may_divide_a_copy_among_hosts() -> None:
    found = of(on("a", "a", "b", "b"), rank=2, mesh=((0, 1, 2, 3),))
    assert (found.copies, found.ranks, found.count, found.spread) == (1, 4, 2, 2) and found.names == ("a", "b")
    assert (found.local, found.seat, found.leads, found.host, found.copy) == (2, 0, True, 1, 0)
    assert found.here == (2, 3) and found.leaders == (0, 2) and found.alike == (2,) and found.shards_of(1) == (2, 3)
    assert found.where(1) == " on host a"


def test_several_copies_may_be_divided_among_hosts() -> None:
    found = of(on(*"aabbccdd"), rank=5, mesh=((0, 1, 2, 3), (4, 5, 6, 7)))
    assert (found.copies, found.count, found.spread, found.copy, found.local) == (2, 4, 2, 1, 1)
    assert found.here == (4, 5) and found.alike == (1, 5) and found.shards_of(3) == (2, 3)


@pytest.mark.parametrize(("machines", "mesh", "says"), [
    ("aab", None, r"different numbers of ranks \(a has 2, b has 1\), .*: start as many processes on every host"),
    ("abab", ((0, 1, 2, 3),), "a row of the mesh mixes the ranks of its hosts, .*: number the ranks host by host"),
    ("aaab", ((0, 1, 2, 3),), r"of a copy have different numbers of ranks \(a has 3, b has 1\): give a mesh whose rows"),
    ("aaaa", ((0, 1),), r"the mesh has ranks \[0, 1\] of a job with 4 ranks: give a mesh of all ranks"),
    ("aa", ((0, 0),), r"the mesh has ranks \[0, 0\] of a job with 2 ranks")])
def test_hosts_that_cannot_train_together_are_refused(machines: str, mesh: Rows | None, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        of(on(*machines), mesh=mesh)


def test_ranks_with_different_meshes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="the ranks give different meshes: pass the same mesh on every rank"):
        arranged(on("a", "a"), 0, [((0, 1),), None])


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    return SimpleNamespace(mesh=torch.arange(math.prod(shape)).view(shape), mesh_dim_names=names)


def test_a_mesh_of_one_dimension_is_one_host_and_of_three_none() -> None:
    assert rows_of(mesh_of(4)) == ((0, 1, 2, 3),)
    assert rows_of(mesh_of(2, 2)) == ((0, 1), (2, 3))
    with pytest.raises(UnsupportedError, match=r"the mesh has 3 dimensions, .*: give a mesh of the shape"):
        rows_of(mesh_of(2, 2, 2))


def test_ranks_along_a_last_dimension_sequence_belong_to_their_row() -> None:
    of_hosts = mesh_of(2, 1, 2, names=("replicate", "shard", "sequence"))
    assert rows_of(of_hosts) == ((0, 1), (2, 3)) and sequence_ranks_of(of_hosts) == 2
    assert rows_of(mesh_of(2, 2, names=("shard", "sequence"))) == ((0, 1, 2, 3),)
    assert sequence_ranks_of(mesh_of(4, names=("sequence",))) == 4 and sequence_ranks_of(mesh_of(2, 2)) == 1
    with pytest.raises(UnsupportedError, match="must be the last"):
        rows_of(mesh_of(2, 2, names=("sequence", "shard")))


def test_a_process_says_which_host_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hosts.HOST_VARIABLE, raising=False)
    machine, declared, name = hosts.identity()
    assert machine and name and declared == ""
    monkeypatch.setenv("MEGACOMPILE_HOST", "left")
    assert hosts.identity() == (machine, "left", "left")


def test_a_mesh_that_is_none_is_refused() -> None:
    with pytest.raises(MegacompileError, match="mesh must be a DeviceMesh, not a int"):
        StreamConfig.of(mesh=3)


def test_a_host_that_has_a_part_of_a_copy_counts_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = HostTile.allocate(TileLayout.of("t", torch.float32, [("w", (1 << 12,), True)]))
    whole = tile.layout.gradient_bytes
    monkeypatch.setattr(store, "available_host_bytes", lambda: whole // 2)
    with pytest.raises(InsufficientMemoryError):
        Store({"t": tile}).hold_gradients()
    divided = Store({"t": tile}, division=Division({"t": []}, ((0,), (1,)), here=0))
    divided.hold_gradients()
    assert divided.bytes()["gradients"] == whole // 2 and divided.bytes()["weights"] == tile.weights.nbytes // 2
    assert divided.available_bytes() == whole // 2 + sum(divided.bytes().values())
