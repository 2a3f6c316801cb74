"""Writes of values that all ranks have, into tiles that the ranks of a host share: checkpoints and `load_state_dict`."""
from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from megacompile.runtime.memory.store import WEIGHTS, copy_from_first_host
from megacompile.streaming.streamed import Streamed


@contextlib.contextmanager
def loading(streamed: Streamed, doing: str, own: Collection[str] | None = None, parts: Collection[str] = WEIGHTS,
            tiles: Collection[str] | None = None, torn: Collection[str] = ()) -> Iterator[None]:
    """A context around a call on every rank that loads the same values into tiles. This rank writes only its `own` tiles; None:
    the first rank of each host writes all. Entering waits until no rank uses the tiles. Leaving waits until all ranks have
    written. Then other copies take these `parts` of `tiles` (None: of all) from the first. `torn`: the parts of the model
    that are torn if the load stops half-way on any rank ("weights", "state"). Raises what `RankGroup.all_or_none` raises, and
    `RankError`."""
    ranks = streamed.rank_group.ranks
    streamed.evict()
    streamed.store.preserve()
    if ranks is None:
        with streamed.step.loading(torn):
            yield
        return
    if own is None:
        own = streamed.store.tiles if ranks.hosts.leads else ()
    streamed.rank_group.agree(doing)
    with streamed.step.loading(torn):
        with streamed.rank_group.all_or_none(doing), streamed.store.load(own):
            yield
        if ranks.hosts.copies > 1 and parts:
            with streamed.rank_group.failing():
                copy_from_first_host(streamed.store, ranks, parts, tiles)
                ranks.agree(doing)
