"""Slow work reports progress on one line; fast work prints nothing."""
from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from rich.console import Console

import megacompile
from megacompile import scheduling
from megacompile.finetuning.run_progress import ProgressDisplay
from megacompile.predict.hardware import Hardware
from megacompile.runtime.memory.arena import pin_all
from megacompile.sizes import format_bytes
from megacompile.streaming.programs import executables
from megacompile.streaming.programs.captures import Binder
from megacompile.system import progress as module
from megacompile.system.progress import at, shown_by, under_way, work_done


class Terminal(io.StringIO):
    """Tells when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    return Terminal()


def test_a_terminal_shows_one_line_that_goes_when_the_work_is_done(terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal), under_way("tracing Model"):
        at("layer 3 of 6")
        assert terminal.written.wait(10)
        assert threading.active_count() > 1
    assert terminal.getvalue().startswith("\rtracing Model: ")
    assert terminal.getvalue().endswith("\r\033[K") and "\n" not in terminal.getvalue()


def test_work_that_is_done_is_listed_with_its_seconds() -> None:
    with work_done() as done:
        with under_way("planning"), under_way("a part of it"):
            assert not done
        assert [task for task, seconds in done if 0 <= seconds < 10] == ["planning"]
    with under_way("compiling"):
        pass
    assert len(done) == 1


def test_a_line_says_the_step_and_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    work = module._Work("tracing Model")
    assert work.line() == "tracing Model: 0 s"
    work.step, now = "layer 3 of 6", 112.0
    assert work.line() == "tracing Model: layer 3 of 6, 12 s"


def test_elsewhere_the_logger_gets_it_at_info(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    said = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: said.set()  # type: ignore[method-assign]
    monkeypatch.setattr(module._LOG, "handlers", [handler])
    with caplog.at_level(logging.INFO, logger="megacompile"), under_way("tracing Model"):
        assert said.wait(10)
    assert caplog.records[0].levelno == logging.INFO and caplog.messages[0].startswith("tracing Model: ")


def test_short_work_and_work_inside_of_other_work_are_not_said(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with under_way("tracing Model"):
        before = threading.active_count()
        with under_way("tracing its part"):
            assert threading.active_count() == before
    assert capsys.readouterr().err == ""


def test_it_can_be_turned_off(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACOMPILE_PROGRESS", "0")
    before = threading.active_count()
    with contextlib.redirect_stderr(terminal), under_way("tracing Model"):
        at("layer 1 of 2")
        assert threading.active_count() == before
    assert terminal.getvalue() == ""


def test_the_line_goes_where_the_work_fails(terminal: Terminal) -> None:
    def work() -> None:
        assert terminal.written.wait(10)
        raise ValueError("broken")

    with contextlib.redirect_stderr(terminal), pytest.raises(ValueError, match="broken"), under_way("tracing Model"):
        work()
    assert terminal.getvalue().endswith("\r\033[K")


# ---------------------------------------------------------------- displays, and what takes long

class Display:
    """Keeps the lines; `waiting(for_a)` returns when one begins so."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def waiting(self, start: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(line.startswith(start) for line in self.lines), 20), self.lines


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Iterator[Display]:
    """Shows what is under way at once."""
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    monkeypatch.setattr(module, "_REFRESH_S", 0.1)
    made = Display()
    with shown_by(made):
        yield made


def test_a_display_shows_the_line_in_the_place_of_stderr(display: Display, terminal: Terminal) -> None:
    with contextlib.redirect_stderr(terminal), under_way("tracing Model"):
        display.waiting("tracing Model: 0 s")
    assert display.lines[-1] == "" and terminal.getvalue() == ""


def test_the_display_that_came_last_shows_lines_until_it_goes(display: Display) -> None:
    other = Display()
    with shown_by(other), under_way("tracing"):
        other.waiting("tracing")
    assert not display.lines
    with under_way("compiling"):
        display.waiting("compiling")


def waits(display: Display, start: str, function: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    """The function, once the display shows a line that begins with `start`. Each call adds `start` to `called`."""
    def waiting(*args: Any, **options: Any) -> Any:
        display.waiting(start)
        called.append(start)
        return function(*args, **options)
    return waiting


def test_making_a_schedule_is_said(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    planning, simulating = "planning 8 x 64: ", "simulating this plan and its alternatives: "
    monkeypatch.setattr(scheduling, "compile_program", waits(display, planning, scheduling.compile_program, called))
    monkeypatch.setattr(scheduling, "outlook", waits(display, simulating, lambda *plans, **options: None, called))
    scheduling.schedule(tiny_models.build(), batch=8, length=64, hardware=replace(Hardware.find("h200"), device_type="cpu")
                        ).outlook()
    assert set(called) == {planning, simulating}


def test_planning_and_compiling_are_said_in_a_step(display: Display, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    planning, compiling = "planning 5 x 13: ", "compiling kernels for 5 x 13: prologue, forward, "
    monkeypatch.setattr(executables, "compile_program", waits(display, planning, executables.compile_program, called))
    monkeypatch.setattr(Binder, "_kernel", waits(display, compiling, Binder._kernel, called))
    model(**tiny_models.batch(rows=5, length=13)).loss.backward()
    assert set(called) == {planning, compiling}


def test_pinning_is_said_with_how_much_is_done(display: Display) -> None:
    pinned: list[int] = []

    def pin(memory: torch.Tensor) -> None:
        display.waiting(f"pinning host memory: {format_bytes(1024 * len(pinned))} of {format_bytes(3072)}, ")
        pinned.append(memory.nbytes)

    backend: Any = SimpleNamespace(pin=pin)
    pin_all(backend, (torch.empty(1024, dtype=torch.uint8) for _ in range(3)))
    assert pinned == [1024] * 3 and display.lines[-1] == ""


def test_moving_weights_is_said(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    moving = "moving the weights of "
    monkeypatch.setattr(megacompile.api, "build_store", waits(display, moving, megacompile.api.build_store, called))
    megacompile.stream(tiny_models.build(), device="cpu").megacompile.close()
    assert called == [moving]


def test_the_bar_of_a_run_shows_what_its_step_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with ProgressDisplay(console, steps=3, interval=1) as bar:
        bar._latest = "loss 1.0"
        described, shown = [], threading.Event()
        update = bar._progress.update

        def noted(task: Any, **changes: Any) -> None:
            described.append(changes["description"])
            shown.set()
            update(task, **changes)

        monkeypatch.setattr(bar._progress, "update", noted)
        with under_way("compiling"):
            assert shown.wait(20)
    assert described[0] == "compiling: 0 s" and described[-1] == "loss 1.0"
    assert not module._displays


def test_a_run_without_a_terminal_leaves_lines_to_the_logger() -> None:
    with ProgressDisplay(Console(file=io.StringIO()), steps=3, interval=1):
        assert not module._displays
