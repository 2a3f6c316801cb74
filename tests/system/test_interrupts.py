"""Ctrl-C at any line of ours in the caller's thread: the step has happened or not, and the next one runs."""
from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch, same_bits, weights

import megacompile
from megacompile import frontend, inputs, planning, runtime, streaming
from megacompile.errors import TornError


def folder(package: Any) -> str:
    return str(pathlib.Path(package.__file__).parent) + "/"


#: The code that a step runs in the caller's thread: all of ours but the capture, which runs once.
OURS, CAPTURE = (folder(megacompile), folder(runtime)), folder(frontend)
SOON_S = 5.0
#: A step runs code in at least so many files. Fewer mean that files have moved, and are not interrupted any more.
FEWEST_FILES = 40


def is_ours(file: str) -> bool:
    return file.startswith(OURS) and not file.startswith(CAPTURE)


class Interrupter:
    """Raises KeyboardInterrupt at the `moment`-th line of ours; counts the lines otherwise. `files`: where lines were seen."""

    def __init__(self, moment: int | None) -> None:
        self.moment, self.lines, self.where = moment, 0, ""
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not is_ours(frame.f_code.co_filename):
            return None
        if event == "line":
            self.lines += 1
            self.files.add(frame.f_code.co_filename)
            if self.lines - 1 == self.moment:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(step: Callable[[], object], moment: int | None) -> Interrupter:
    """Runs a step, and swallows the interrupt if it comes. It may come between the last line of a `with torch.no_grad()` and
    its exit, which is then left out: nobody but PyTorch could prevent that, and the next test would have no gradients."""
    interrupter = Interrupter(moment)
    sys.settrace(interrupter)
    try:
        step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)
    return interrupter


def loop(model: Any, optimizer: Any) -> None:
    model(**batch(0)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: Any, optimizer: Any) -> None:
    model.megacompile.train_step(batch(0), optimizer)


@pytest.fixture(scope="module")
def shared(_shared_fp32: tiny_models.Shared) -> tiny_models.Shared:
    return _shared_fp32


@pytest.mark.parametrize(("step", "overlap"), [(loop, None), (loop, "backward"), (whole, None), (whole, "backward")],
                         ids=["loop", "loop on arrival", "whole step", "whole step on arrival"])
def test_an_interrupt_at_any_line_leaves_a_step_done_or_undone_or_says_torn(
        step: Callable[[Any, Any], None], overlap: str | None, shared: tiny_models.Shared, pytestconfig: pytest.Config) -> None:
    def fresh() -> tuple[Any, Any]:
        model = shared.fresh()
        return model, megacompile.AdamW(model.parameters(), lr=1e-2, overlap=overlap)

    model, optimizer = fresh()
    step(model, optimizer)
    once = weights(model)
    step(model, optimizer)
    twice = weights(model)
    model, optimizer = fresh()
    uninterrupted = interrupted(lambda: step(model, optimizer), None)
    lines, files = uninterrupted.lines, uninterrupted.files
    assert len(files) >= FEWEST_FILES
    assert all(any(file.startswith(folder(package)) for file in files) for package in (inputs, planning, runtime, streaming))
    outcomes = set()
    for moment in (*range(0, lines, max(1, lines // pytestconfig.getoption("interrupts"))), lines - 1):
        model, optimizer = fresh()
        begin = time.monotonic()
        where = interrupted(lambda: step(model, optimizer), moment).where  # noqa: B023  (called at once)
        assert len({parameter.grad is None for parameter in model.parameters()}) == 1, f"some gradients stay: {where}"
        model.zero_grad()
        if engine.step(model).updated_in_backward:  # the backward is over: what is left of the step is its end
            optimizer.step()
        try:
            step(model, optimizer)
            after = weights(model)
        except TornError:
            outcomes.add("torn")
            continue
        assert time.monotonic() - begin < SOON_S, where
        outcomes.add("undone" if same_bits(after, once) else "done")
        assert same_bits(after, once) or same_bits(after, twice), f"neither one step nor two after an interrupt at {where}"
    assert "undone" in outcomes  # how many lines a wait takes depends on the moment: the last is not always the last


def test_an_interrupt_while_gradients_are_handed_out_leaves_none(
        shared: tiny_models.Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared.fresh()
    gradients, third = engine.gradients(model), list(model.parameters())[2]
    lend = gradients._lend

    def interrupted_at_the_third(name: str) -> Any:
        if gradients.parameters[name] is third:
            raise KeyboardInterrupt
        return lend(name)

    monkeypatch.setattr(gradients, "_lend", interrupted_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        model(**batch(0)).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    monkeypatch.undo()
    model(**batch(0)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
