"""The ranks of a job that share a host's memory, and the ranks of other hosts that have the same shard.

                 local 0   local 1
    host node0   rank 0    rank 1       the ranks of a host share one copy of the model, each with a shard of it
    host node1   rank 2    rank 3       ranks 0 and 2 have the same shard, each on its host

A device mesh says it, or else the machines that the processes are on.
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
    """`rows`: the ranks of each host, in order; rank 0 is the first rank of the first host. `names`: of the hosts. `rank`: this
    process. `beside`: the largest number of hosts on one machine."""

    rows: Rows
    names: tuple[str, ...]
    rank: int
    beside: int = 1

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def ranks(self) -> int:
        """The number of ranks of each host."""
        return len(self.rows[0])

    @property
    def host(self) -> int:
        """The number of this process's host."""
        return self.host_of(self.rank)

    @property
    def local(self) -> int:
        """The number of this process among the ranks of its host, which is also the number of its shard."""
        return self.here.index(self.rank)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this process's host."""
        return self.rows[self.host]

    @property
    def alike(self) -> tuple[int, ...]:
        """The ranks with this process's shard, one on each host."""
        return tuple(row[self.local] for row in self.rows)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each host, which communicates for it."""
        return tuple(row[0] for row in self.rows)

    @property
    def leads(self) -> bool:
        """True if this process is the first rank of its host."""
        return self.local == 0

    def host_of(self, rank: int) -> int:
        return next(number for number, row in enumerate(self.rows) if rank in row)

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
    if given is None:
        rows = tuple(map(tuple, found.values()))
        _check_even(rows, identities)
    else:
        rows = tuple(sorted(tuple(sorted(row)) for row in given))
        _check_mesh(rows, identities)
    names = [identities[row[0]][2] for row in rows]
    machines = Counter(identities[row[0]][0] for row in rows)
    several = {name for name, count in Counter(names).items() if count > 1}
    return Hosts(rows, tuple(f"{name} ({number})" if name in several else name for number, name in enumerate(names)), rank,
                 max(machines.values()))


def _check_even(rows: Rows, identities: Sequence[Identity]) -> None:
    if len({len(row) for row in rows}) > 1:
        listed = ", ".join(f"{identities[row[0]][2]} has {len(row)}" for row in rows)
        raise UnsupportedError(f"the hosts have different numbers of ranks ({shortened(listed)}), and shards of different "
                               "sizes cannot be added up: start as many processes on every host (torchrun --nproc-per-node)")


def _check_mesh(rows: Rows, identities: Sequence[Identity]) -> None:
    ranks = sorted(rank for row in rows for rank in row)
    if ranks != list(range(len(identities))):
        raise UnsupportedError(f"the mesh has ranks {shortened(str(ranks))} of a job with {len(identities)} ranks: give a mesh "
                               "of all ranks, or start the processes of this model as a job of their own")
    for row in rows:
        where = {identities[rank][:2]: identities[rank][2] for rank in row}
        if len(where) > 1:
            what = "the mesh shards the model over" if len(rows) == 1 else "a row of the mesh has ranks of"
            raise UnsupportedError(
                f"{what} the hosts {' and '.join(where.values())}, and only ranks that share a host's memory can have shards "
                "of one copy: give a mesh of two dimensions, (hosts, ranks of each host), or leave mesh out")
