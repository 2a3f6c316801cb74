"""Updates on arrival in the plain loop: which optimizer a backward updates with, and what such a loop must not do.

    optimizer = AdamW(model.parameters(), update="arrival")
    loss = model(**batch).loss
    loss.backward()          # reads the hyper-parameters, and updates each tile as its gradients arrive; `.grad` stays None
    optimizer.step()         # ends the step; does nothing without a backward before it

The optimizer that was made last decides. Making another one changes the programs from the next forward on.
"""
from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from megacompile.errors import LeaseError, MegacompileError
from megacompile.runtime.update import Update
from megacompile.streaming.open_forward import OpenForward
from megacompile.streaming.step_state import StepState
from megacompile.streaming.user_tensors.gradients import Gradients


class Updater(Protocol):
    """The interface of an optimizer to a backward that updates."""

    param_groups: list[dict[str, Any]]

    def request(self, names: Collection[str]) -> Update:
        """An update of the parameters with these names, with the current hyper-parameters."""

    def prepare(self) -> None:
        """Called before a backward that updates, before tiles are sent to the device. Raises `MegacompileError` for options
        that no update can have."""


class OptimizerInBackward:
    """State: the `optimizer` that was made last for this model, if it updates on arrival."""

    def __init__(self, step: StepState, gradients: Gradients) -> None:
        self.step, self.gradients = step, gradients
        self._optimizer: weakref.ref[Updater] | None = None

    def attach(self, optimizer: Updater | None) -> None:
        """Makes backwards update with this optimizer, from the next forward on. None: they store gradients."""
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self.step.backward_updates(None)

    def detach(self, optimizer: Updater) -> None:
        """Stops updates on arrival by this optimizer, from the next forward on."""
        if self.optimizer is optimizer:
            self.attach(None)

    @property
    def optimizer(self) -> Updater | None:
        return self._optimizer() if self._optimizer is not None else None

    @property
    def update_at(self) -> str:
        """The `Plan.update` of the current training loop."""
        return "step" if self.optimizer is None else "arrival"

    def check(self, forward: OpenForward, others: Sequence[OpenForward], reached: Collection[str]) -> None:
        """Raises `LeaseError` or `MegacompileError` if a backward now would lose gradients. No weight has changed then. All
        open forwards are ended: the caller may keep the error's traceback, which keeps their losses alive. `others`: the other
        open forwards. `reached`: the parameters that get a gradient."""
        reason = self._reason(forward, others, reached)
        if reason is not None:
            for each in (forward, *others):
                each.close()
                each.end()
            raise reason

    def _reason(self, forward: OpenForward, others: Sequence[OpenForward],
                reached: Collection[str]) -> MegacompileError | None:
        """The reason why a backward is refused."""
        if self.step.updated_in_backward:
            return LeaseError(
                "a second backward before step() cannot add to gradients that update='arrival' has consumed: call "
                "optimizer.step() first, give the whole batch to one forward, or make the optimizer without it")
        if forward.executable.spec.update != "arrival":
            return None
        if self.optimizer is None:
            return LeaseError("the optimizer that this loss was computed for, with update='arrival', no longer exists: run the "
                              "forward again")
        if any(other.version == forward.version for other in others):
            return LeaseError(
                "another forward waits for its backward, and this one would change its weights (update='arrival'): run one "
                "forward at a time (others under torch.no_grad()), give both batches to one forward, or leave update out")
        if self.gradients.waiting:
            return MegacompileError("gradients of an earlier backward wait for a step: call step() or zero_grad() first")
        given = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        left_out = [name for name in self.gradients if name in reached and id(self.gradients.parameters[name]) not in given]
        if left_out:
            return MegacompileError(f"the gradient of {left_out[0]} would be lost, since update='arrival' keeps none and the "
                                    "optimizer has no such parameter: add it to a group, freeze it before stream(), or leave "
                                    "update out")
        try:
            self.optimizer.prepare()
        except MegacompileError as error:
            return error
        return None

    def check_step(self, optimizer: Updater) -> None:
        """Raises `MegacompileError` if `optimizer.step()` is called on an optimizer other than the one that consumes the
        gradients."""
        if self.optimizer is not None and self.optimizer is not optimizer:
            raise MegacompileError("another optimizer, made later with update='arrival', consumes this model's gradients as "
                                   "they arrive: make one optimizer, with parameter groups")

    def request(self, forward: OpenForward, reached: Collection[str]) -> Update | None:
        """The update that a checked backward makes of the parameters that it reaches; None if it stores gradients instead."""
        if forward.executable.spec.update != "arrival":
            return None
        assert self.optimizer is not None, "an update without an optimizer"
        update = self.optimizer.request(reached)
        self.step.backward_updates(update)
        return update
