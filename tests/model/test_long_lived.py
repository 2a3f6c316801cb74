"""Full garbage collections are short while a loop trains, and afterwards everything can be collected again."""
from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
import transformers

import megacompile
from megacompile.streaming.programs.executables import Executables
from megacompile.system.linux import _EXCLUDED_AT_START, LongLived


class Node:
    """Something that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(scope="module", autouse=True)
def _frozen_again() -> Iterator[None]:
    """Later tests do not look at everything that the process holds whenever they collect: it took most of their time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    assert gc.get_freeze_count() == 0


def test_what_stays_is_looked_at_once_and_garbage_of_later_steps_is_still_freed() -> None:
    made, kept = [1], [Node() for _ in range(50_000)]
    early, late = weakref.ref(Node()), None
    with LongLived(lambda: made[0]) as long_lived:
        long_lived.after_step()
        assert early() is None, "garbage does not stay"
        count = gc.get_freeze_count()
        long_lived.after_step()
        assert count >= gc.get_freeze_count() > len(kept), "nothing new has been made"
        late = weakref.ref(Node())
        begun = time.thread_time()
        gc.collect()
        inside = time.thread_time() - begun
        assert late() is None
        made[0] = 2
        kept += [Node() for _ in range(10_000)]
        long_lived.after_step()
        assert gc.get_freeze_count() > count + 9_000
    begun = time.thread_time()
    gc.collect()
    assert inside < 0.2 * (time.thread_time() - begun)


@pytest.mark.nightly(
    held_by="tests/model/test_long_lived.py::test_what_stays_is_looked_at_once_and_garbage_of_later_steps_is_still_freed")
def test_programs_that_a_step_adds_are_not_looked_at_again_and_no_step_waits_for_a_collection() -> None:
    added, kept = [1], [Node()]
    collected: list[int] = []
    with LongLived(lambda: 1, lambda: added[0]) as long_lived:
        long_lived.after_step()
        count = gc.get_freeze_count()
        gc.callbacks.append(lambda phase, which: collected.append(which["generation"]))
        try:
            kept += [Node() for _ in range(1000)]
            long_lived.after_step()
            assert gc.get_freeze_count() == count
            added[0] = 2
            long_lived.after_step()
        finally:
            gc.callbacks.pop()
        assert gc.get_freeze_count() > count + 900 and 2 not in collected
        dropped = weakref.ref(Node())
    gc.collect()
    assert dropped() is None


@pytest.mark.nightly(
    held_by="tests/model/test_long_lived.py::test_what_stays_is_looked_at_once_and_garbage_of_later_steps_is_still_freed")
def test_an_interpreter_excludes_few_objects_when_it_starts_and_then_what_stays_is_excluded(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts with 375 of them."""
    script = "import gc; count = gc.get_freeze_count(); gc.freeze(); print(count, gc.get_freeze_count())"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    at_start, excluded = map(int, ran.stdout.split())
    assert at_start <= _EXCLUDED_AT_START < excluded
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patched:
            patched.setattr(gc, "get_freeze_count", lambda: 375)
            long_lived = stack.enter_context(LongLived(lambda: 1))
        long_lived.after_step()
        assert gc.get_freeze_count() > 100_000


@pytest.mark.nightly(
    held_by="tests/model/test_long_lived.py::test_what_stays_is_looked_at_once_and_garbage_of_later_steps_is_still_freed")
def test_no_collection_runs_while_a_program_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when later steps of other sizes get theirs. A full one would take several times as long as the program."""
    collecting: list[bool] = []
    planned = Executables._planned

    def noted(*given: Any) -> Any:
        collecting.append(gc.isenabled())
        return planned(*given)

    monkeypatch.setattr(Executables, "_planned", noted)
    # With a budget of its own, the model plans ahead whatever models other tests keep.
    model = megacompile.stream(tiny_models.build(), device="cpu", repack=64, device_memory="1GiB")
    optimizer = megacompile.AdamW(model.parameters())
    for rows in (3, 4):
        batch = tiny_models.batch(rows=rows, length=60)
        batch["labels"][0, 40:] = -100
        model.megacompile.train_step(batch, optimizer)
        assert gc.isenabled()
    assert len(collecting) > 2 and not any(collecting)
    model.megacompile.close()


@pytest.mark.nightly(
    held_by="tests/model/test_long_lived.py::test_what_stays_is_looked_at_once_and_garbage_of_later_steps_is_still_freed")
def test_objects_that_others_have_excluded_stay_excluded() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with LongLived(lambda: 1) as long_lived:
            long_lived.after_step()
        assert gc.get_freeze_count() >= count - 100
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with LongLived(lambda: 1) as long_lived:
            long_lived.after_step()
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def is_once(counts: list[int]) -> bool:
    """Whether objects were excluded in the first step alone. Those that die are counted no longer."""
    return counts == sorted(counts, reverse=True)


class Frozen(transformers.TrainerCallback):
    """How many objects are excluded at the end of each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.counts.append(gc.get_freeze_count())


def rows(count: int) -> list[dict[str, Any]]:
    return [{name: tensor[0].tolist() for name, tensor in tiny_models.batch(seed, rows=1).items()} for seed in range(count)]


@pytest.mark.nightly(
    held_by="tests/model/test_long_lived.py::test_what_stays_is_looked_at_once_and_garbage_of_later_steps_is_still_freed")
@pytest.mark.parametrize("fails", [False, True])
def test_trainer_excludes_what_stays_and_a_model_that_is_dropped_afterwards_is_freed(fails: bool, tmp_path: Path) -> None:
    from megacompile.trainer import Trainer

    model = megacompile.stream(tiny_models.build(), device="cpu")
    noted = Frozen()

    def collate(given: Any) -> dict[str, torch.Tensor]:
        if fails and len(noted.counts) == 2:
            raise RuntimeError("the data ended")
        return {name: torch.tensor([row[name] for row in given]) for name in given[0]}

    said = transformers.TrainingArguments(str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[],
                                          save_strategy="no", use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model=model, args=said, train_dataset=rows(8), data_collator=collate, callbacks=[noted])
    if fails:
        with pytest.raises(RuntimeError, match="the data ended"):
            trainer.train()
    else:
        trainer.train()
    assert noted.counts[0] > 100_000 and is_once(noted.counts)
    assert gc.get_freeze_count() == 0
    forgotten = weakref.ref(engine.of(model))
    del trainer, model
    gc.collect()
    assert forgotten() is None
