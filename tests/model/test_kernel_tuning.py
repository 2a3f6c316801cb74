"""Kernels of recurrent mixers are tuned in a thread, beside the compilation of their templates."""
from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import verdicts
from tiny_configs import FIRST_PLAIN_TOKEN, VOCABULARY

import megacompile
from megacompile.codegen import inductor
from megacompile.compat import fla
from megacompile.frontend.ops import recurrence_kernels
from megacompile.frontend.templates import kernel_tuning

Ran = list[tuple[str, str, tuple[int, ...]]]


def streamed(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object] = lambda: None) -> tuple[Any, Ran]:
    """A hybrid whose reference kernels count as kernels that tune themselves, and what runs: (thread, kind, shape of the
    result). `act` runs in each call of the thread."""
    ran: Ran = []

    def noting(kind: str, kernel: Callable[..., Any], like: int) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            thread = threading.current_thread().name
            ran.append((thread, kind, tuple(args[like].shape)))
            if thread.startswith("megacompile tuning"):
                act()
            return kernel(*args)
        return noted

    monkeypatch.setattr(kernel_tuning, "TUNED_KERNELS", frozenset({"reference"}))
    for kind, table, like in (("recurrence", recurrence_kernels.RECURRENCE, 2), ("conv", recurrence_kernels.CONV, 0)):
        monkeypatch.setitem(table, "reference", noting(kind, table["reference"], like))
    return megacompile.stream(verdicts._build("qwen3_5_text"), device="cpu"), ran


def step(model: Any, rows: int, length: int) -> None:
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (rows, length))
    model(input_ids=ids, labels=ids).loss.backward()


def test_each_mixer_runs_once_before_a_step_with_the_rows_of_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = streamed(monkeypatch)
    step(model, 2, 5000)
    tuned = [(kind, shape[:2]) for thread, kind, shape in ran if thread.startswith("megacompile tuning")]
    micro_batch = model.megacompile.plan.micro_batches[0]
    assert set(tuned) == {(kind, (micro_batch, 4096 // micro_batch)) for kind in ("recurrence", "conv")}
    assert len(tuned) == 2 * 2  # the forward's and the backward's op; a backward runs the forward again
    ran.clear()
    step(model, 3, 5000)  # more rows
    assert ran and not any(thread.startswith("megacompile tuning") for thread, *_ in ran)
    model.megacompile.close()


def test_tuning_leaves_the_users_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = streamed(monkeypatch)
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (1, 9))
    torch.manual_seed(7)
    model(input_ids=ids, labels=ids).loss.backward()
    after = torch.rand(1)
    torch.manual_seed(7)
    assert ran and torch.equal(after, torch.rand(1))
    model.megacompile.close()


def fail(error: Exception) -> Callable[[], None]:
    def failing() -> None:
        raise error
    return failing


def test_a_kernel_that_fails_is_the_steps_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = streamed(monkeypatch, fail(RuntimeError("no such kernel")))
    with pytest.raises(RuntimeError, match="no such kernel"):
        step(model, 1, 9)
    model.megacompile.close()


def test_too_little_memory_for_tuning_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = streamed(monkeypatch, fail(torch.OutOfMemoryError("full")))
    step(model, 1, 9)
    model.megacompile.close()


def test_tuning_ends_when_compiling_fails() -> None:
    began, first, ran = threading.Event(), threading.Event(), []

    def op(number: int) -> None:
        began.wait()
        ran.append(number)
        first.set()

    def compile_after_the_first() -> None:
        with kernel_tuning.tuned_beside(calls, torch.device("cpu"), contextlib.nullcontext):
            began.set()
            first.wait()
            raise KeyboardInterrupt

    calls = [kernel_tuning.MixerCall(op, (number,)) for number in range(100_000)]
    with pytest.raises(KeyboardInterrupt):
        compile_after_the_first()
    assert len(ran) < len(calls)


def test_threads_that_compile_beside_inductor_see_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor sets the folders around each graph, and restores them."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    folder, compiled = inductor.newest_folder(), threading.Event()
    seen = []

    def op() -> None:
        compiled.wait()
        seen.append((os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]))

    with kernel_tuning.tuned_beside([kernel_tuning.MixerCall(op, ())], torch.device("cpu"), contextlib.nullcontext):
        with inductor.caching_in(folder):
            assert "TRITON_CACHE_DIR" in os.environ  # inductor sets it only where it is missing
        compiled.set()
    assert seen == [(str(folder), f"{folder}/triton/0")]
    assert "TRITON_CACHE_DIR" not in os.environ


def test_one_thread_at_a_time_runs_functions_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two threads would take out what the other one has put in, and a tuner keeps the arguments of one call."""
    there = types.SimpleNamespace(IS_NVIDIA_HOPPER=False, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=True)
    for name, module in (("fla", types.ModuleType("fla")), ("fla.utils", there)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla, "_tuning", lambda: (object, {}))
    inside, left = threading.Event(), []

    def other() -> None:
        with fla.running():
            left.append(inside.is_set())

    thread = threading.Thread(target=other)
    with fla.running():
        thread.start()
        thread.join(0.2)
        inside.set()
    thread.join()
    assert left == [True]
