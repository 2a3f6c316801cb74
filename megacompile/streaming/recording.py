"""Records what the lanes of a streamed model did, in the simulator's format.

    with model.megacompile.record() as recorded:
        for batch in three_batches:
            ...a step...
    print(recorded.timeline().table())

As in a simulation, the first step has no earlier update to wait for, so `Timeline` describes the last step. Compute counts as
busy from the moment its stream reaches a template until the template is done, so gaps between a template's kernels count as
busy. On the critical chain, time in which a lane had no instruction is assigned to no lane; the chain's seconds may therefore
be less than the step's.
"""
from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from megacompile.errors import MegacompileError
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.program import Lane, op_of
from megacompile.predict.simulate import Item, Timeline
from megacompile.runtime.executor import Executor
from megacompile.runtime.recorder import Executed, Recorder
from megacompile.streaming.streamed import Streamed


class Recording:
    """Records everything submitted inside `with`. Entering and leaving wait for all lanes. State: the recorded items, after the
    end."""

    def __init__(self, streamed: Streamed) -> None:
        self._streamed = streamed
        self._items: list[Item] | None = None

    def __enter__(self) -> Recording:
        executor = self._streamed.executor
        if not isinstance(executor, Executor):
            raise MegacompileError("reference=True runs everything in one thread, so no lanes exist to record: leave "
                                   "reference out")
        if executor.recorder is not None:
            raise MegacompileError("the model is being recorded already: end that recording first")
        self._streamed.settle()
        executor.recorder = Recorder(self._streamed.backend.timestamps())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        executor = self._streamed.executor
        assert isinstance(executor, Executor) and executor.recorder is not None, "a recording ended twice"
        try:
            if error is None:
                self._streamed.settle()
                self._items = _items(executor.recorder)
        finally:
            executor.recorder = None

    def timeline(self) -> Timeline:
        """Every instruction once, by start time. Raises `MegacompileError` before the recording ends, or if nothing ran."""
        if not self._items:
            raise MegacompileError("nothing was recorded: " + (
                "the recording has not ended, or an error ended it" if self._items is None else "no section ran meanwhile"))
        steps = range(max(item.step for item in self._items) + 1)
        return Timeline.of(sorted(self._items, key=lambda item: item.start_s),
                           [_end([item for item in self._items if item.step == step]) for step in steps])


def _end(items: list[Item]) -> float:
    return max(item.end_s for item in [i for i in items if i.lane == Lane.COMPUTE] or items)


def _items(recorder: Recorder) -> list[Item]:
    step_of = _steps(x for lane in recorder.lanes.values() for x in lane)
    items: dict[Executed, Item] = {}
    for lane, done in recorder.lanes.items():
        for x in done:
            begin, end = recorder.timestamps.seconds(x.begun), recorder.timestamps.seconds(x.ended)
            items[x] = Item(step_of[x.run], x.section, x.node, lane, end - begin, [], begin, end, done=True)
    for done in recorder.lanes.values():
        before: Item | None = None
        for x in done:
            awaited = items.get(recorder.recorded[x.waits_for]) if x.waits_for in recorder.recorded else None
            item = items[x]
            item.waits_for = awaited
            item.cause = max((i for i in (before, awaited) if i is not None), key=lambda i: i.end_s, default=None)
            before = item
    return list(items.values())


def _steps(executed: Iterable[Executed]) -> dict[int, int]:
    """The step of each run. A step begins with the first forward after an update, since several backwards may accumulate."""
    found: dict[int, int] = {}
    step, updated = 0, False
    executed = list(executed)
    updates = {x.run for x in executed if op_of(x.node).name in UPDATE_OPS}
    for run, section in sorted({(x.run, x.section) for x in executed}):
        if updated and section in ("forward", "train_step"):
            step, updated = step + 1, False
        updated |= run in updates
        found[run] = step
    return found
