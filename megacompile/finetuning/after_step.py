"""The work of `megacompile train` after each step: it logs, shows its progress, evaluates and saves."""
from __future__ import annotations

from collections.abc import Callable

from megacompile import training
from megacompile.finetuning.reports import Reports
from megacompile.finetuning.run_progress import Entry, OneStepLate, ProgressDisplay, RunProgress
from megacompile.finetuning.saves import Saves
from megacompile.finetuning.settings import Settings
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer


class AfterStep:
    """`evaluated` returns the loss over the rows held out, in nats per token; None if there are none. State: the entry of a
    step, which waits one step for its gradient norm."""

    def __init__(self, settings: Settings, steps: int, optimizer: StreamedOptimizer, progress: RunProgress, reports: Reports,
                 display: ProgressDisplay, saves: Saves, evaluated: Callable[[], float] | None,
                 say: Callable[[str], None]) -> None:
        self._settings, self._steps, self._optimizer, self._evaluated, self._say = settings, steps, optimizer, evaluated, say
        self._progress, self._reports, self._display, self._saves = progress, reports, display, saves
        self._late = OneStepLate(self._report)

    def __call__(self, step: training.Step) -> None:
        entry = self._progress(step)
        self._late(entry)
        self._display(entry)
        due = step.number % self._settings.eval_interval == 0 or step.number == self._steps
        due &= self._evaluated is not None
        if due or step.number % self._settings.save_interval == 0:  # both wait for the update anyway
            self.wait()
        if due:
            self.evaluate(step.number)
        self._saves.after(step.number)

    def evaluate(self, number: int) -> None:
        """Evaluates the rows held out, if there are any, and reports the loss after this number of steps."""
        if self._evaluated is not None:
            loss = self._evaluated()
            self._reports.evaluation(number, loss)
            self._say(f"step {number}/{self._steps}  evaluation loss {loss:.4f}")

    def wait(self) -> None:
        """Waits for the gradient norm of the last step, and reports the step."""
        _ = self._optimizer.grad_norm
        self._late.flush()

    def __enter__(self) -> AfterStep:
        return self

    def __exit__(self, *_: object) -> None:
        self._late.flush()

    def _report(self, entry: Entry) -> None:
        self._reports.step(entry)
        self._display.line(entry)
