"""What a closed or forgotten model leaves in the process."""
from __future__ import annotations

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest
from left_behind import objects_left

from megacompile.errors import LaneError
from megacompile.streaming import teardown


def test_objects_in_the_process_do_not_grow_with_the_number_of_models() -> None:
    """PyTorch keeps records of its last 64 compilations, a dozen objects for each model.

    The median is judged: a module that some library imports late adds objects once.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        closed, forgotten = fresh.submit(objects_left, 3).result()
    for left in (closed, forgotten):
        assert not [each for each in left if "ShapeEnv" in each or "GraphModule" in each], left
        assert statistics.median(sum(each.values()) for each in left) < 50, left


def test_a_lost_device_does_not_keep_other_resources_from_being_released() -> None:
    executor, backend, arena, checkpoints, store, ranks = (mock.MagicMock() for _ in range(6))
    executor.close.side_effect = lambda then: then()
    backend.synchronize.side_effect = LaneError("the device has failed")
    arena.close.side_effect = LaneError("memory cannot be freed")
    store.files = [mock.Mock()]
    arguments: Any = executor, arena, checkpoints, store, backend, ranks
    with pytest.raises(LaneError, match="the device has failed"):
        teardown.give_back(*arguments)
    for released in (checkpoints.close, store.files[0].stop_threads, ranks.close):
        released.assert_called_once()
