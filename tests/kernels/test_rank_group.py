"""What a rank tells the others when something fails that all ranks do together."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from megacompile.errors import DiskError, LaneError, NonFiniteError, RankError
from megacompile.streaming.rank_group import RankGroup


class Told:
    """Ranks that note what they are told."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)


@pytest.mark.parametrize(("error", "told"), [
    (DiskError("the drive"), True), (KeyboardInterrupt(), True),
    (NonFiniteError("the norm is nan", 1, 1.0, float("nan"), ()), False)], ids=["disk", "Ctrl-C", "norm"])
def test_the_other_ranks_hear_of_a_failure_that_is_not_theirs_too(error: BaseException, told: bool) -> None:
    ranks = Told()
    with pytest.raises(type(error)), group(ranks).failing():
        raise error
    assert ranks.failures == [error] * told


def test_a_failure_of_the_own_lanes_says_more_than_that_another_rank_has_ended() -> None:
    ranks, own = Told(), LaneError("update failed")

    def check_lanes() -> None:
        raise own

    with pytest.raises(LaneError, match="update failed"), group(ranks, check_lanes).failing():
        raise RankError("rank 0 has ended")
    assert ranks.failures == [own]


def group(ranks: Told, check_lanes: Callable[[], None] = lambda: None) -> RankGroup:
    return RankGroup(cast(Any, ranks), cast(Any, None), (), check_lanes)
