"""The copies of a model that several hosts have: made equal to that of the first host."""
from __future__ import annotations

from collections.abc import Collection

import torch

from megacompile.runtime.memory.store import Store
from megacompile.runtime.ranks import Ranks

#: Parts of tiles: the master weights, and all that training changes.
WEIGHTS = ("weights", "remainder")
STATE = (*WEIGHTS, "moments")


def copy_from_first_host(store: Store, ranks: Ranks, parts: Collection[str], tiles: Collection[str] | None = None) -> None:
    """Copies parts of tiles (None: of all tiles) from the first host to all others, where there are others. All ranks call this
    while no rank uses the tiles. Each sends or receives its shard. Raises `RankError`."""
    if ranks.hosts.count == 1:
        return
    for name, tile in store.tiles.items():
        if tiles is not None and name not in tiles:
            continue
        for memory in tile.memories(parts):
            ranks.send_to_all_hosts(memory.view(torch.uint8).tensor_split(ranks.hosts.ranks)[ranks.hosts.local])
