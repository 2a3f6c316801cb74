"""Writes of values that all ranks have, into tiles that all ranks share: checkpoints and `load_state_dict`."""
from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from megacompile.streaming.streamed import Streamed


@contextlib.contextmanager
def loading(streamed: Streamed, doing: str, own: Collection[str] | None = None) -> Iterator[None]:
    """Around a call on every rank that loads the same values into tiles. This rank writes only its `own` tiles; None: rank 0
    writes all. It begins when no rank uses the tiles any more, and ends when all ranks have written. Raises what
    `Together.all_or_none` raises."""
    ranks = streamed.together.ranks
    streamed.evict()
    streamed.store.preserve()
    if ranks is None:
        yield
        return
    if own is None:
        own = streamed.store.tiles if ranks.rank == 0 else ()
    streamed.together.agree(doing)
    with streamed.together.all_or_none(doing), streamed.store.load(own):
        yield
