"""What a model leaves behind in the process when it is closed or forgotten."""
from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from left_behind import objects_left


@pytest.mark.parametrize("close", [True, False], ids=["closed", "forgotten"])
def test_objects_in_the_process_do_not_grow_with_the_number_of_models(close: bool) -> None:
    """PyTorch keeps records of its last 64 compilations, which are a dozen objects a model."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        left = fresh.submit(objects_left, close, 3).result()
    assert left.get("ShapeEnv", 0) == left.get("GraphModule", 0) == 0, left
    assert sum(left.values()) < 3 * 50, left
