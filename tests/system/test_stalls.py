"""A lane that hangs is reported with the instruction of each lane; nothing waits for it afterwards, not even exit."""
from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import engine
import pytest
from other_lanes import waits
from tiny_models import batch

from megacompile.errors import MegacompileError, StallError
from megacompile.ir.program import Lane, lane_of, nodes, op_of
from megacompile.planning.config import StreamConfig
from megacompile.runtime.executor import _POLL_S, Executor, Watchdog

SOON_S = 5.0


@pytest.fixture
def hanging(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    """The model's lanes, of which h2d hangs at its first instruction until the test is over."""
    released = threading.Event()
    model(**batch())  # planned, and bound
    executor = Executor(engine.backend(model), stall_timeout_s=0.5)
    executor.probe = lambda node: released.wait(60.0) if op_of(node).name == "prefetch" else None
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner(model), "executor", executor)
        yield executor
    released.set()  # it stops at once, whatever its section has left
    deadline = time.monotonic() + SOON_S
    while executor.watchdog.begun and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not executor.watchdog.begun


def all_stand(executor: Executor) -> bool:
    """Whether h2d hangs, and every other lane waits for an event that has not fired."""
    for lane in executor._queues:
        begun = executor.watchdog.begun.get(lane)
        if begun is None or not (op_of(begun[1]).name == "prefetch" if lane == Lane.H2D else waits(*begun)):
            return False
    return True


def test_a_lane_that_hangs_is_raised_with_the_line_of_each_lane(
        model: Any, hanging: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    look, looks = hanging.watchdog.look, list[float]()

    def once_all_stand(passed_s: float) -> bool:
        """On a busy machine compute may come late to where it waits, and then the message is another."""
        if not all_stand(hanging):
            return False
        looks.append(passed_s)
        return look(passed_s)

    monkeypatch.setattr(hanging.watchdog, "look", once_all_stand)
    with pytest.raises(StallError, match=r"no lane has begun an instruction for 0.5 s.*start a new process") as caught:
        model(**batch())
    assert 0.5 < sum(looks[1:]) < 0.5 + 2 * looks[0], "the first look sees that lanes have moved"
    lines = str(caught.value).splitlines()
    assert any(line.startswith("h2d") and 'p.prefetch("' in line and "of forward" in line for line in lines), lines
    assert any(line.startswith("compute") and "p.wait(" in line for line in lines), lines
    assert any("waits for" in line and "p.record(" in line and "in h2d" in line for line in lines), lines
    for use in (lambda: model(**batch()), model.state_dict, model.megacompile.synchronize):
        with pytest.raises(StallError, match="the model cannot be used any more"):
            use()
    freed: list[str] = []
    hanging.close(then=lambda: freed.append("memory that a lane may yet write to"))
    assert Lane.H2D in hanging.watchdog.begun and not freed, "something has waited until the lane went on"
    assert all(thread.daemon for thread in hanging._threads.values()), "the interpreter's end would wait for it"


def test_a_slow_lane_does_not_count_as_hanging(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is how long nothing begins, not how long a step takes. Here lanes look, once at each of their instructions,
    and never more often than there are lanes before one of them begins the next."""
    executor = engine.executor(model)
    look, looking, looks = executor._look, threading.Lock(), list[Lane]()

    def delay(lane: Lane) -> None:
        with looking:
            look()
            looks.append(lane)

    monkeypatch.setattr(executor, "_look", lambda: None)  # the caller's looks depend on how fast the machine is
    monkeypatch.setattr(executor, "delay", delay)
    monkeypatch.setattr(executor.watchdog, "timeout_s", len(Lane) * _POLL_S)
    model(**batch()).loss.backward()
    assert len(looks) > 5 * len(Lane) and executor.lost is None


def begun(snapshot: object = None) -> dict[Lane, Any]:
    return {Lane.CPU: (SimpleNamespace(number=1, frame=SimpleNamespace(store=SimpleNamespace(snapshot=snapshot))), object())}


def test_time_without_a_waiting_thread_does_not_count() -> None:
    """A process that was stopped, or stood in a debugger, was not looked at."""
    watchdog = Watchdog(1.0)
    watchdog.begun = begun()
    assert not watchdog.look(0.5)  # it has moved since the look before
    assert not watchdog.look(0.5) and not watchdog.look(0.5) and watchdog.look(0.5)


def test_an_update_may_wait_for_a_checkpoint_s_disk_and_for_ever_if_asked() -> None:
    writing, patient = Watchdog(1.0), Watchdog(None)
    writing.begun, patient.begun = begun(snapshot=object()), begun()
    assert not any(watchdog.look(0.5) for _ in range(10) for watchdog in (writing, patient))


@pytest.mark.parametrize("value", [0, -1, "soon", True])
def test_a_timeout_out_of_range_is_refused(value: Any) -> None:
    with pytest.raises(MegacompileError, match="stall_timeout must be a number of seconds above 0, or None"):
        StreamConfig(stall_timeout=value)


def test_every_lane_that_a_program_has_can_be_told(model: Any) -> None:
    watchdog = Watchdog(1.0)
    program = model.megacompile.program(batch())
    for name, section in program.sections.items():
        for node in nodes(section):
            if (lane := lane_of(node)) is not None:
                watchdog.begun = {lane: (SimpleNamespace(section=name), node)}
                assert str(lane) in str(watchdog.error([lane, Lane.PACK]))


def test_a_finished_section_is_freed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the activations that its backward needs: kept until the next look, they are there beside the backward's own."""
    executor = engine.executor(model)
    model(**batch())  # planned, and bound
    runs: list[weakref.ref[Any]] = []
    submit = executor.submit

    def noted(*arguments: Any) -> Any:
        run = submit(*arguments)
        runs.append(weakref.ref(run))
        return run

    look, looked = executor.watchdog.look, threading.Event()

    def once_begun(passed_s: float) -> bool:
        if looked.is_set() or not executor.watchdog.begun:
            return False
        found = look(passed_s)
        looked.set()
        return bool(found)

    monkeypatch.setattr(executor, "submit", noted)
    monkeypatch.setattr(executor.watchdog, "look", once_begun)
    monkeypatch.setattr(executor, "delay", lambda lane: looked.wait(60.0))  # else all may be over before the first look
    loss = model(**batch()).loss
    deadline = time.monotonic() + SOON_S
    while executor.watchdog.begun and time.monotonic() < deadline:
        time.sleep(0.01)
    assert executor.watchdog._seen and [run() for run in runs] == [None]
    loss.backward()
