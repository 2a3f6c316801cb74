"""What models leave behind in a process that streams one after the other: for a process of its own, without shared captures."""
from __future__ import annotations

import gc
import threading
from collections import Counter

import torch
from tiny_models import build

import megacompile


def train_once(close: bool) -> None:
    """One model's life: streamed, trained for a step, and closed or merely forgotten."""
    model = megacompile.stream(build(), device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 50, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    if close:
        model.megacompile.close()


def objects_left(models: int) -> list[list[dict[str, int]]]:
    """How many objects of each type each of `models` closed models leaves, and each of as many forgotten ones. Two models come
    first, which fill PyTorch's caches. What the first has left is frozen: to count half a million objects after each model, and
    to let the collector read them again and again, took a fifth of the time."""
    train_once(close=True)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    train_once(close=False)  # what it puts in the place of something frozen counts as new
    left: list[list[dict[str, int]]] = []
    before = live_objects()
    for close in (True, False):
        left.append([])
        for _ in range(models):
            train_once(close)
            after = live_objects()
            left[-1].append(dict(after - before))
            before = after
    return left


def live_objects() -> Counter[str]:
    """Counted once the threads of models that were closed or forgotten have ended: on busy cores that takes a moment."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("megacompile"):
            thread.join(30)
            assert not thread.is_alive(), thread.name
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())
