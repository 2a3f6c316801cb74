"""What takes long is said on one line; what does not, is not."""
from __future__ import annotations

import contextlib
import io
import logging
import threading
from typing import Any

import pytest

from megacompile import under_way as module
from megacompile.under_way import at, under_way


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


def test_a_line_says_the_step_and_the_seconds() -> None:
    work = module._Work("tracing Model")
    assert work.line() == "tracing Model: 0 s"
    work.step = "layer 3 of 6"
    assert work.line() == "tracing Model: layer 3 of 6, 0 s"


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
