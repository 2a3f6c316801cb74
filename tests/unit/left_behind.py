"""What models leave behind in a process that streams one after the other: for a process of its own, without shared captures."""
from __future__ import annotations

import gc
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


def objects_left(close: bool, models: int) -> list[dict[str, int]]:
    """How many objects of each type each of `models` models leaves, after two that fill PyTorch's caches."""
    left = []
    before: Counter[str] = Counter()
    for number in range(2 + models):
        train_once(close)
        after = live_objects()
        if number >= 2:
            left.append(dict(after - before))
        before = after
    return left


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())
