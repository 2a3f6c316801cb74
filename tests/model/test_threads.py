"""One model used from several threads: as if one thread had made all calls, in some order."""
from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import engine
import pytest
import torch
from tiny_models import batch, weights

import megacompile


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*calls: Callable[[], None]) -> None:
    """Runs each in a thread of its own; raises the first error. Fails after a minute, and says where each thread is."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        try:
            begin.wait(30.0)
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + 60.0
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        names, frames = {each.ident: each.name for each in threading.enumerate()}, sys._current_frames()
        pytest.fail("\n".join(f"{names.get(ident)}:\n{''.join(traceback.format_stack(frame)[-4:])}"
                              for ident, frame in frames.items()))


@pytest.fixture
def impatient(model: Any) -> Iterator[Any]:
    """A model whose lanes may stand still for two seconds."""
    watchdog = engine.executor(model).watchdog
    before, watchdog.timeout_s = watchdog.timeout_s, 2.0
    yield model
    watchdog.timeout_s = before


def evaluated(model: Any, seed: int) -> float:
    with torch.no_grad():
        return float(model(**batch(seed)).loss)


def evaluate_and_read(model: Any, rounds: int) -> None:
    wanted = {seed: evaluated(model, seed) for seed in range(3)}

    def evaluate(seed: int) -> None:
        for _ in range(rounds):
            assert evaluated(model, seed) == wanted[seed]

    def read() -> None:
        for _ in range(rounds):
            model.megacompile.synchronize()
            weights(model)

    at_once(*(lambda seed=seed: evaluate(seed) for seed in wanted), read)  # type: ignore[misc]


def test_evaluations_in_several_threads_give_what_one_thread_gives(impatient: Any) -> None:
    evaluate_and_read(impatient, rounds=10)


@pytest.mark.nightly(held_by="tests/model/test_threads.py::test_evaluations_in_several_threads_give_what_one_thread_gives")
def test_many_evaluations_in_several_threads_give_what_one_thread_gives(impatient: Any) -> None:
    evaluate_and_read(impatient, rounds=1000)


def test_whole_steps_in_several_threads_are_all_counted(impatient: Any) -> None:
    """Beside evaluations, too."""
    model, optimizer = impatient, megacompile.AdamW(impatient.parameters(), lr=1e-3)

    def train(seed: int) -> None:
        for _ in range(6):
            model.megacompile.train_step(batch(seed), optimizer)

    at_once(lambda: train(0), lambda: train(1), lambda: [evaluated(model, 2) for _ in range(6)] and None)
    assert all(state["step"] == 12 for state in optimizer.state_dict()["state"].values())


def test_a_step_with_a_closure_leaves_the_model_to_other_threads_meanwhile(impatient: Any) -> None:
    """On CUDA autograd runs the closure's backward in another thread."""
    model, optimizer = impatient, megacompile.AdamW(impatient.parameters(), lr=1e-3)

    def closure() -> torch.Tensor:
        loss = model(**batch()).loss
        at_once(loss.backward)
        return loss

    optimizer.step(closure)
    assert all(state["step"] == 1 for state in optimizer.state_dict()["state"].values())
