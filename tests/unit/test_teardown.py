"""What a closed or forgotten model leaves in the process."""
from __future__ import annotations

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

from left_behind import objects_left


def test_objects_in_the_process_do_not_grow_with_the_number_of_models() -> None:
    """PyTorch keeps records of its last 64 compilations, a dozen objects for each model.

    The median is judged: a module that some library imports late adds objects once.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        closed, forgotten = fresh.submit(objects_left, 3).result()
    for left in (closed, forgotten):
        assert not [each for each in left if "ShapeEnv" in each or "GraphModule" in each], left
        assert statistics.median(sum(each.values()) for each in left) < 50, left
