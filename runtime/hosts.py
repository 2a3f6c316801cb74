"""The ranks of a job that share a copy of the model, those that share a host's memory, and those with the same shard.

                 shard 0   shard 1
    copy 0       rank 0    rank 1       the ranks of a copy have a shard of it each
    copy 1       rank 2    rank 3       ranks 0 and 2 have the same shard, each of its copy

A copy is on one host, or divided among several: then each of them has memory for the shards of its own ranks. A device mesh
says which ranks share a copy, or else the machines that the processes are on.
"""
from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacompile.errors import UnsupportedError, shortened

#: Environment variable: processes of one machine with other values count as being on different hosts.
HOST_VARIABLE = "MEGACOMPILE_HOST"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: (what identifies the machine, the value of `HOST_VARIABLE`, a name for messages).
Identity = tuple[str, str, str]
#: The name of the dimension of a device mesh whose ranks have the tokens of each sequence together.
SEQUENCE = "sequence"
#: The ranks of each row of a device mesh.
Rows = tuple[tuple[int, ...], ...]


def identity() -> Identity:
    """Identifies the host of this process."""
    declared = os.environ.get(HOST_VARIABLE, "")
    return _BOOT_ID.read_text(encoding="ascii").strip(), declared, declared or socket.gethostname()


def rows_of(mesh: Any) -> Rows:
    """The ranks of a device mesh, by rows. A mesh of one dimension is one row. A last dimension "sequence" belongs to the row.
    Raises `UnsupportedError` for more dimensions."""
    ranks = mesh.mesh.flatten(-2) if sequence_ranks_of(mesh) > 1 and mesh.mesh.dim() > 1 else mesh.mesh
    if ranks.dim() > 2:
        raise UnsupportedError(f"the mesh has {mesh.mesh.dim()} dimensions, and a model is replicated and sharded over two at "
                               "most: give a mesh of the shape (hosts, ranks of each host), or name a last dimension "
                               f"{SEQUENCE!r}")
    return tuple(map(tuple, ranks.reshape(-1, ranks.shape[-1]).tolist()))


def sequence_ranks_of(mesh: Any) -> int:
    """The number of ranks that have the tokens of a sequence together: the size of a mesh's dimension "sequence", 1 without
    one. Raises `UnsupportedError` unless that is the last dimension, and of ranks that follow each other."""
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    if SEQUENCE not in names:
        return 1
    groups = mesh.mesh.reshape(-1, mesh.mesh.shape[-1])
    if names[-1] != SEQUENCE or bool((groups.diff() != 1).any()):
        raise UnsupportedError(f"the mesh's dimension {SEQUENCE!r} must be the last, and have ranks that follow each other: "
                               "make the mesh with init_device_mesh, and name that dimension last")
    return int(mesh.mesh.shape[-1])


@dataclass(frozen=True)
class Hosts:
    """`rows`: the ranks of each copy of the model, in order; rank 0 is the first rank of the first copy. `names`: of the hosts.
    `rank`: this process. `beside`: the largest number of hosts on one machine. `memories`: the ranks of each host, which share
    its memory, if hosts divide copies; else empty, and each row is a host."""

    rows: Rows
    names: tuple[str, ...]
    rank: int
    beside: int = 1
    memories: Rows = ()

    @property
    def ranks_by_host(self) -> Rows:
        """The ranks of each host, in order."""
        return self.memories or self.rows

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.ranks_by_host)

    @property
    def copies(self) -> int:
        return len(self.rows)

    @property
    def ranks(self) -> int:
        """The number of ranks of each copy, which is also the number of its shards."""
        return len(self.rows[0])

    @property
    def spread(self) -> int:
        """The number of hosts that a copy is divided among."""
        return self.count // self.copies

    @property
    def host(self) -> int:
        """The number of this process's host."""
        return self.host_of(self.rank)

    @property
    def row(self) -> tuple[int, ...]:
        """The ranks of this process's copy."""
        return next(row for row in self.rows if self.rank in row)

    @property
    def copy(self) -> int:
        """The number of this process's copy."""
        return self.rows.index(self.row)

    @property
    def local(self) -> int:
        """The number of this process among the ranks of its copy, which is also the number of its shard."""
        return self.row.index(self.rank)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this process's host."""
        return self.ranks_by_host[self.host]

    @property
    def seat(self) -> int:
        """The number of this process among the ranks of its host."""
        return self.here.index(self.rank)

    @property
    def alike(self) -> tuple[int, ...]:
        """The ranks with this process's shard, one of each copy."""
        return tuple(row[self.local] for row in self.rows)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each host, which communicates for it."""
        return tuple(each[0] for each in self.ranks_by_host)

    @property
    def leads(self) -> bool:
        """True if this process is the first rank of its host."""
        return self.seat == 0

    def host_of(self, rank: int) -> int:
        return next(number for number, each in enumerate(self.ranks_by_host) if rank in each)

    def shards_of(self, host: int) -> tuple[int, ...]:
        """The numbers of the shards that a host has memory for."""
        ranks = self.ranks_by_host[host]
        row = next(row for row in self.rows if ranks[0] in row)
        return tuple(map(row.index, ranks))

    def where(self, rank: int) -> str:
        """The host of a rank, for a message; "" if there is one host."""
        return f" on host {self.names[self.host_of(rank)]}" if self.count > 1 else ""


def arranged(identities: Sequence[Identity], rank: int, meshes: Sequence[Rows | None]) -> Hosts:
    """The hosts of a job. `identities` and `meshes`: of all ranks, in rank order. If a mesh is None, the identities decide.
    Raises `UnsupportedError` for hosts that cannot train together."""
    given = meshes[0]
    if any(mesh != given for mesh in meshes):
        raise UnsupportedError("the ranks give different meshes: pass the same mesh on every rank, or leave mesh out on all")
    found: dict[tuple[str, str], list[int]] = {}
    for number, (machine, declared, _) in enumerate(identities):
        found.setdefault((machine, declared), []).append(number)
    memories: Rows = ()
    if given is None:
        rows = tuple(map(tuple, found.values()))
        _check_even(rows, identities)
    else:
        rows = tuple(sorted(tuple(sorted(row)) for row in given))
        memories = _memories(rows, identities)
    hosts = memories or rows
    names = [identities[each[0]][2] for each in hosts]
    machines = Counter(identities[each[0]][0] for each in hosts)
    several = {name for name, count in Counter(names).items() if count > 1}
    return Hosts(rows, tuple(f"{name} ({number})" if name in several else name for number, name in enumerate(names)), rank,
                 max(machines.values()), memories)


def _check_even(rows: Rows, identities: Sequence[Identity]) -> None:
    if len({len(row) for row in rows}) > 1:
        listed = ", ".join(f"{identities[row[0]][2]} has {len(row)}" for row in rows)
        raise UnsupportedError(f"the hosts have different numbers of ranks ({shortened(listed)}), and shards of different "
                               "sizes cannot be added up: start as many processes on every host (torchrun --nproc-per-node)")


def _memories(rows: Rows, identities: Sequence[Identity]) -> Rows:
    """The ranks of each host, for a mesh whose rows share a copy each; none if every row is on one host."""
    ranks = sorted(rank for row in rows for rank in row)
    if ranks != list(range(len(identities))):
        raise UnsupportedError(f"the mesh has ranks {shortened(str(ranks))} of a job with {len(identities)} ranks: give a mesh "
                               "of all ranks, or start the processes of this model as a job of their own")
    hosts: list[list[int]] = []
    for row in rows:
        there: dict[tuple[str, str], list[int]] = {}
        for rank in row:
            there.setdefault(identities[rank][:2], []).append(rank)
        hosts += there.values()
        if [rank for each in there.values() for rank in each] != list(row):
            raise UnsupportedError("a row of the mesh mixes the ranks of its hosts, and the shards of a host must follow each "
                                   "other: number the ranks host by host, as torchrun does")
    if len(hosts) == len(rows):
        return ()
    if len({len(each) for each in hosts}) > 1:
        listed = ", ".join(f"{identities[each[0]][2]} has {len(each)}" for each in hosts)
        raise UnsupportedError(f"the hosts of a copy have different numbers of ranks ({shortened(listed)}): give a mesh whose "
                               "rows have as many ranks on each host")
    return tuple(map(tuple, hosts))
