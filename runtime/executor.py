"""Runs programs: each lane is a thread with a queue and executes its instructions in program order.

Sections are submitted in the order of the user's loop; `submit` returns at once, and `Run.wait` waits for some lanes. Events
that one section passes on (`leave`) are looked up by place when a later section is submitted (`enter`), in the caller's thread.

State: the lanes' queues, the table of carried events, and the first failure. Once a lane has failed, no lane executes anything
until `recover`; once the device is lost, none ever does.
"""
from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx

from megacompile.errors import LaneError, RankError, StallError
from megacompile.ir.printing import excerpt
from megacompile.ir.program import Access, Lane, argument, lane_of, nodes, op_of, operands
from megacompile.ir.text import print_node
from megacompile.runtime.backends.lanes import Backend, Timestamps
from megacompile.runtime.frame import CarriedEvents, Event, Frame, Run
from megacompile.runtime.operations import OPERATIONS
from megacompile.system.linux import yield_to_others

_POLL_S = 0.05  # how soon a waiting lane notices that another has failed
#: Seconds that `close` waits for lanes to stop after another rank has failed. A device may wait for that rank forever.
_STOPPING_S = 5.0
_LOWERED = "_megacompile_instructions"  # attribute of a section


class AbortedError(Exception):
    """Raised in a lane if its run, or an earlier one, has failed in another lane."""


@dataclass
class Failure:
    """The first failure. Earlier runs finish, so that a failing forward does not tear an update in flight. The failed run and
    all later ones stop. `recover` frees the failed run's values, since tracebacks may keep the run alive."""

    run: int
    error: BaseException
    node: fx.Node | None
    lane: Lane | None
    frame: Frame | None = None

    @property
    def is_own(self) -> bool:
        """True if an instruction has failed in a lane of this process, and no other rank caused it."""
        return self.node is not None and not isinstance(self.error, StallError)

    def raised(self) -> LaneError:
        """The error for the caller."""
        if isinstance(self.error, LaneError):  # its message is complete
            return self.error
        if self.node is None:
            found = LaneError(f"the step was stopped by {type(self.error).__name__}")
        else:
            found = LaneError(
                f"{op_of(self.node).name} failed in lane {self.lane}: {type(self.error).__name__}: {self.error}\n"
                f"{excerpt(self.node.graph, {self.node: 'FAILED HERE'})}")
        found.__cause__ = self.error
        return found


class Executor:
    """Runs sections on the lanes of a backend. `delay` is called before every instruction (tests delay lanes with it).
    `check_others` is called while a caller waits. It raises `RankError` if lanes wait for a rank that has failed."""

    def __init__(self, backend: Backend, delay: Callable[[Lane], None] | None = None,
                 stall_timeout_s: float | None = None, check_others: Callable[[], None] | None = None) -> None:
        self.backend, self.delay, self.check_others = backend, delay, check_others
        self.watchdog = Watchdog(stall_timeout_s)
        self.carried: CarriedEvents[Event] = CarriedEvents()
        self.failure: Failure | None = None
        self._failing = threading.Lock()
        self.lost: LaneError | None = None  # set once the device is lost or a lane hangs: no lane can work any more
        self.probe: Callable[[fx.Node], None] | None = None  # called before each instruction; tests raise from it
        self.recorder: Recorder | None = None
        self._queues: dict[Lane, queue.SimpleQueue[tuple[Run, list[fx.Node]] | None]] = {}
        self._threads: dict[Lane, threading.Thread] = {}
        self._runs = 0
        self._process = os.getpid()

    # ---------------------------------------------------------------- submission, in the caller's thread
    def submit(self, section: fx.Graph, frame: Frame, name: str = "", by_caller: Lane | None = None) -> Run:
        """Hands a section to the lanes. `name`: for messages. `by_caller`: the lane whose instructions the caller issues in its
        own thread (`issue`). Raises the failure of an earlier section."""
        self.check()
        instructions = {lane: each for lane, each in self._lower(section).items() if lane != by_caller}
        events: dict[fx.Node, Event | None] = {}
        left = []
        for node in nodes(section):
            match op_of(node).name:
                case "enter":
                    events[node] = self.carried.enter(argument(node, "place"), Access(argument(node, "access")),
                                                      Lane(argument(node, "lane")))
                case "record":
                    events[node] = Event()
                case "leave":
                    (recorded,) = operands(node, "event")
                    event, lane = events[recorded], lane_of(recorded)
                    assert event is not None and lane is not None
                    left.append((argument(node, "place"), Access(argument(node, "access")), lane, event))
                case op if lane_of(node) is None and op_of(node).result is not None:  # resident values belong to no lane
                    frame.values[node] = OPERATIONS[op](frame, node)
        self.carried.leave(left)
        self._runs += 1
        run = Run(frame, events, {lane: threading.Event() for lane in instructions}, self.wait, self._runs, name)
        try:
            for lane, program in instructions.items():
                self._queue(lane).put((run, program))
        except BaseException as error:  # Ctrl-C: lanes that have the section would wait for lanes that never get it
            self.fail(Failure(run.number, error, None, None))
            raise
        return run

    def _lower(self, section: fx.Graph) -> dict[Lane, list[fx.Node]]:
        """The instructions of each lane. They are stored on the section. Nodes point to their section, so a table here would
        keep every section alive."""
        lanes: dict[Lane, list[fx.Node]] | None = getattr(section, _LOWERED, None)
        if lanes is None:
            lanes = {}
            for node in nodes(section):
                lane = lane_of(node)
                if lane is not None:
                    lanes.setdefault(lane, []).append(node)
            setattr(section, _LOWERED, lanes)
        return lanes

    def wait(self, events: Iterable[threading.Event]) -> None:
        """Waits in the caller's thread. On Ctrl-C, stops the lanes before it raises."""
        try:
            for event in events:
                while not event.wait(_POLL_S):
                    self._look()
                    self.check()
        except BaseException as error:
            self.fail(Failure(self._runs, error, None, None))  # Ctrl-C: stop the section that the caller waits for
            raise
        self.check()

    def idle(self, sooner: threading.Event | None = None) -> None:
        """Waits until every lane has executed everything submitted so far (failed or not), or lanes hang, or the event `sooner`
        is set. Never raises."""
        if os.getpid() != self._process:
            return  # a forked process has the queues but not the threads that empty them
        marks = []
        for lane in self._queues:
            run = Run.__new__(Run)
            run.pending = {lane: threading.Event()}
            self._queues[lane].put((run, []))
            marks.append(run.pending[lane])
        for mark in marks:
            while not (self.hangs or mark.is_set() or (sooner or mark).wait(_POLL_S)):
                self._look()
        if sooner is None:
            self.watchdog.forget()

    @property
    def hangs(self) -> bool:
        return isinstance(self.lost, StallError)

    def _look(self) -> None:
        """Called by a waiting thread: marks the lanes as hanging if none has moved for too long, or if they wait for a rank
        that has failed."""
        if self.hangs:
            return
        if self.watchdog.look(_POLL_S):
            self.lost = self.watchdog.error(self._queues)
        elif self.check_others is not None:
            try:
                self.check_others()
            except StallError as error:
                self.lost = error
        if self.lost is not None:  # a lane that wakes up later stops there
            first = self.failure
            self.fail(replace(first, run=0) if first is not None and first.is_own else Failure(0, self.lost, None, None))

    def check(self) -> None:
        """Raises the failure of the earliest run that failed, or the error that the device is lost."""
        if os.getpid() != self._process:
            raise LaneError("this process was forked from the one that trains the model, and the model's lanes do not run "
                            "here: use the model in the process that streamed it, not in workers of a DataLoader")
        self.check_own()
        if self.lost is not None:
            raise type(self.lost)(str(self.lost)) from self.lost.__cause__
        if self.failure is not None:
            self.idle()  # runs before the failed one go on, and may still fail
            raise self.failure.raised()

    def check_own(self) -> None:
        """Raises the failure of a lane, unless another rank caused it. That rank may have ended only because of this one."""
        if self.failure is not None and self.failure.is_own:
            self.idle()  # as in `check`
            if (failure := self.failure).is_own:
                raise failure.raised()

    def stopped(self, run: Run) -> bool:
        return self.failure is not None and run.number >= self.failure.run

    def abandon(self, run: Run) -> None:
        """Skips the rest of a run, and waits for the instructions that have begun. Forgets an earlier failure."""
        self.fail(Failure(run.number, AbortedError(), None, None))
        self.recover()

    def recover(self) -> None:
        """Recovers from a failure: waits for all lanes and the device, and forgets carried events, since everything is done. If
        the device cannot be synchronized it is lost. From then on `check` raises the reason."""
        self.idle()
        if self.hangs:
            return
        if self.failure is not None and self.failure.frame is not None:
            self.failure.frame.values.clear()
        try:
            self.backend.synchronize()
        except LaneError as error:
            self.lost = error
        self.carried = CarriedEvents()
        self.failure = None

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Ends the lanes once they have executed everything, then calls `then`, which may free the memory that they used.
        Returns when that is done. In one of its own lanes (where garbage collection may find a forgotten model) it returns at
        once, and another thread does the work, since a lane cannot wait for itself. Does nothing in a forked process, which has
        neither the lanes nor their memory, and nothing if lanes hang. If another rank has failed, it only waits a few seconds
        for lanes to stop after their instruction."""
        if os.getpid() != self._process:
            return
        if self.hangs:
            if isinstance(self.lost, RankError):
                self._stop()
            return
        if threading.current_thread() in self._threads.values():
            threading.Thread(target=self.close, args=(then,), daemon=True, name="megacompile close").start()
            return
        for lane in self._queues:
            self._queues[lane].put(None)
        for thread in self._threads.values():
            thread.join()
        self._queues.clear()
        self._threads.clear()
        if then is not None:
            then()

    def _stop(self) -> None:
        """Ends the lanes that stop in time. A thread that returns from PyTorch at interpreter exit is unwound, which aborts the
        process."""
        limit = time.monotonic() + _STOPPING_S
        for lane, thread in self._threads.items():
            self._queues[lane].put(None)
            if thread is not threading.current_thread():
                thread.join(max(0.0, limit - time.monotonic()))

    # ---------------------------------------------------------------- execution, in the lanes' threads
    def _queue(self, lane: Lane) -> queue.SimpleQueue[tuple[Run, list[fx.Node]] | None]:
        if lane not in self._queues:
            self._queues[lane] = queue.SimpleQueue()
            self._threads[lane] = threading.Thread(
                target=_work, args=(weakref.ref(self), self.backend, lane, self._queues[lane]), daemon=True,
                name=f"megacompile {lane}")
            self._threads[lane].start()
        return self._queues[lane]

    def execute(self, run: Run, lane: Lane, instructions: list[fx.Node]) -> None:
        """The execution loop of a lane."""
        for node in instructions:
            if self.stopped(run):
                return
            self.watchdog.begun[lane] = run, node
            try:
                if self.probe is not None:
                    self.probe(node)
                if self.delay is not None:
                    self.delay(lane)
                recorder = self.recorder
                begun = recorder.begin(lane, node) if recorder is not None else None
                self.issue(run, lane, node)
                if recorder is not None:
                    recorder.end(run, lane, node, begun)
            except AbortedError:
                return
            except BaseException as error:  # every error is raised in the caller's thread, not in this one
                self.fail(Failure(run.number, error, node, lane, run.frame))
                return

    def issue(self, run: Run, lane: Lane, node: fx.Node) -> None:
        """Executes one instruction. Raises `AbortedError` if it waits for a lane that has failed."""
        match op_of(node).name:
            case "wait":
                self._wait(run, lane, run.events[operands(node, "event")[0]])
            case "record":
                event = run.events[node]
                assert event is not None
                event.fire(self.backend.record(lane))
            case op:
                run.frame.values[node] = OPERATIONS[op](run.frame, node)

    def fail(self, failure: Failure) -> None:
        """Records a failure. Lanes may fail at the same time in several runs. The failure of the earliest run counts."""
        with self._failing:
            if self.failure is None or failure.run < self.failure.run:
                self.failure = failure

    def _wait(self, run: Run, lane: Lane, event: Event | None) -> None:
        if event is None:
            return
        while not event.issued.wait(_POLL_S):
            if self.stopped(run):
                raise AbortedError
        self.backend.wait(lane, event.device)


def _work(executor: weakref.ref[Executor], backend: Backend, lane: Lane,
          jobs: queue.SimpleQueue[tuple[Run, list[fx.Node]] | None]) -> None:
    """A lane's thread. While idle it holds no strong reference to the executor, so a forgotten model can be freed."""
    with contextlib.ExitStack() as stack:
        entered = False
        while (job := jobs.get()) is not None:
            run, instructions = job
            alive = executor()
            try:
                if alive is not None and instructions:
                    if not entered:
                        if lane == Lane.CPU:
                            yield_to_others()
                        stack.enter_context(backend.lane(lane))
                        entered = True
                    alive.execute(run, lane, instructions)
            except BaseException as error:  # from entering the lane: if this thread ended here, callers would wait forever
                assert alive is not None
                alive.fail(Failure(run.number, error, instructions[0], lane, run.frame))
            finally:
                if alive is not None:
                    alive.watchdog.begun.pop(lane, None)
                run.pending[lane].set()
            del job, run, instructions, alive


# -------------------- Detects lanes that hang, and says where each lane is
#
# A lane only notes which instruction it begins. A thread that waits for lanes looks from time to time. Time is counted in
# looks, so that a process that was stopped, or paused in a debugger, does not count as hanging. While a checkpoint is being
# written no time counts: an update may wait for the disk for any time.
if TYPE_CHECKING:
    from megacompile.runtime.frame import Run


class Watchdog:
    """State: the instruction that each busy lane has begun, and the state at the last look. `timeout_s`: lanes hang if none
    begins an instruction for this many seconds; None: no limit."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.begun: dict[Lane, tuple[Run, fx.Node]] = {}
        self._seen: list[tuple[int, fx.Node]] = []  # runs by number: a finished run must not be kept alive, it holds gigabytes
        self._still_s = 0.0

    def look(self, passed_s: float) -> bool:
        """Called by a waiting thread, `passed_s` seconds after its last look. Returns whether the timeout has passed."""
        if self.timeout_s is None:
            return False
        begun = list(self.begun.values())
        stands = [(run.number, node) for run, node in begun]
        waiting_for_disk = any(run.frame.store.snapshot is not None for run, _ in begun)
        moved, self._seen = stands != self._seen, stands
        self._still_s = 0.0 if moved or waiting_for_disk else self._still_s + passed_s
        return self._still_s > self.timeout_s

    def error(self, lanes: Iterable[Lane]) -> StallError:
        """The error for the caller, which shows the position of each lane."""
        lines = [f"no lane has begun an instruction for {self.timeout_s:g} s, and the model cannot be used any more: start a "
                 "new process and load the last checkpoint (stall_timeout of stream() is how long to wait)"]
        begun = dict(self.begun)
        for lane in lanes:
            lines += _lane_position(lane, *begun[lane]) if lane in begun else [f"{lane:<8} is idle"]
        return StallError("\n".join(lines))

    def forget(self) -> None:
        self._seen, self._still_s = [], 0.0


def _lane_position(lane: Lane, run: Run, node: fx.Node) -> list[str]:
    """The line of a lane. If the lane waits for an event, also the line of the event."""
    lines = [f"{lane:<8} stands at  {print_node(node)}  of {run.section}"]
    if op_of(node).name == "wait":
        (event,) = operands(node, "event")
        lines.append(f"{'':<8} waits for  {print_node(event)}  in {lane_of(event) or 'an earlier section'}")
    return lines


# -------------------- Records what the lanes of an executor do: each instruction, with the times of its start and end
#
# State: lists that grow, one for each lane, written by that lane's thread alone.
if TYPE_CHECKING:
    from megacompile.runtime.frame import Event, Run


@dataclass(eq=False, frozen=True)
class Executed:
    """An instruction that ran. `run` counts sections in the order of submission. `begun` and `ended` are time stamps. For a
    `wait` both are its end, and `waits_for` is the event."""

    run: int
    section: str
    node: fx.Node
    lane: Lane
    begun: Any
    ended: Any
    waits_for: Event | None = None


class Recorder:
    def __init__(self, timestamps: Timestamps) -> None:
        self.timestamps = timestamps
        self.lanes: dict[Lane, list[Executed]] = {lane: [] for lane in Lane}
        self.recorded: dict[Event, Executed] = {}  # the last instruction that an event covers

    def begin(self, lane: Lane, node: fx.Node) -> Any:
        """Called before an instruction is issued. Returns the stamp of its start, for `end`."""
        return None if op_of(node).name in ("record", "wait") else self.timestamps.stamp(lane)

    def end(self, run: Run, lane: Lane, node: fx.Node, begun: Any) -> None:
        """Called after an instruction was issued."""
        done = self.lanes[lane]
        match op_of(node).name:
            case "record":
                event = run.events[node]
                if event is not None and done:
                    self.recorded[event] = done[-1]
            case "wait":
                stamp = self.timestamps.stamp(lane)
                done.append(Executed(run.number, run.section, node, lane, stamp, stamp, run.events[operands(node, "event")[0]]))
            case _ if lane_of(node) is not None:  # a node without a lane is not an instruction, though compute evaluates it
                done.append(Executed(run.number, run.section, node, lane, begun, self.timestamps.stamp(lane)))
