"""Updates on arrival in the plain loop: which optimizer a backward updates with, and what such a loop may not do.

    optimizer = AdamW(model.parameters(), overlap="backward")
    loss = model(**batch).loss
    loss.backward()          # reads the hyper-parameters, and updates each tile as its gradients arrive; `.grad` stays None
    optimizer.step()         # the step is over; without a backward before it nothing happens

The optimizer that was made last decides, so that making another one leads to other programs from the next forward on.
"""
from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from megacompile.errors import LeaseError, MegacompileError

if TYPE_CHECKING:
    from megacompile.runtime.update import Update
    from megacompile.streaming.lease import Lease
    from megacompile.streaming.streamed import Streamed


class Updater(Protocol):
    """An optimizer, as far as a backward knows it."""

    param_groups: list[dict[str, Any]]

    def request(self) -> Update:
        """An update of every parameter, with the hyper-parameters of the moment."""

    def prepare(self) -> None:
        """Before a backward that updates, and before tiles are sent to the device. Raises `MegacompileError` for options that
        no update can have."""


class Arrival:
    """State: the `optimizer` made last for this model, if it updates on arrival, and the update that a backward has made, as
    long as no step() has followed."""

    def __init__(self, streamed: Streamed) -> None:
        self.streamed = streamed
        self._optimizer: weakref.ref[Updater] | None = None
        self._update: Update | None = None

    def attach(self, optimizer: Updater | None) -> None:
        """From the next forward on: updates on arrival by this one, or none."""
        self._optimizer, self._update = weakref.ref(optimizer) if optimizer is not None else None, None

    def detach(self, optimizer: Updater) -> None:
        """From the next forward on this one does not update on arrival."""
        if self.optimizer is optimizer:
            self.attach(None)

    @property
    def optimizer(self) -> Updater | None:
        return self._optimizer() if self._optimizer is not None else None

    @property
    def update_at(self) -> str:
        """`Plan.update` of a loop now."""
        return "step" if self.optimizer is None else "arrival"

    @property
    def updated(self) -> bool:
        """Whether a backward has updated, or is about to, and a step() is to follow."""
        return self._update is not None and self._update.begun

    def check(self, lease: Lease) -> None:
        """Raises `LeaseError` or `MegacompileError` if a backward now would lose gradients. No weight has changed then, and the
        forwards that were open are given up: whoever catches the error may keep its traceback, and with it their losses."""
        reason = self._reason(lease)
        if reason is not None:
            for each in (lease, *self.streamed.open_leases()):
                each.closed = True
                each.end()
            raise reason

    def _reason(self, lease: Lease) -> MegacompileError | None:
        """Why a backward is refused."""
        if self.updated:
            return LeaseError(
                "a second backward before step() cannot add to gradients that overlap='backward' has consumed: call "
                "optimizer.step() first, give the whole batch to one forward, or make the optimizer without overlap")
        if lease.shape.shape.update != "arrival":
            return None
        if self.optimizer is None:
            return LeaseError("this loss was computed to update with an optimizer with overlap='backward' that is no longer "
                              "there: run the forward again")
        if any(other is not lease and other.version == lease.version for other in self.streamed.open_leases()):
            return LeaseError(
                "another forward waits for its backward, and this one would change its weights (overlap='backward'): run one "
                "forward at a time (others under torch.no_grad()), give both batches to one forward, or leave overlap out")
        if self.streamed.gradients.waiting:
            return MegacompileError("gradients of an earlier backward wait for a step: call step() or zero_grad() first")
        given = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        left_out = [name for name in self.streamed.gradients if id(self.streamed.parameters[name]) not in given]
        if left_out:
            return MegacompileError(f"the gradient of {left_out[0]} would be lost, since overlap='backward' keeps none and the "
                                    "optimizer has no such parameter: add it to a group, freeze it before stream(), or leave "
                                    "overlap out")
        try:
            self.optimizer.prepare()
        except MegacompileError as error:
            return error
        return None

    def check_step(self, optimizer: Updater) -> None:
        """Raises `MegacompileError` if step() is another optimizer's than that which consumes the gradients."""
        if self.optimizer is not None and self.optimizer is not optimizer:
            raise MegacompileError("another optimizer, made later with overlap='backward', consumes this model's gradients as "
                                   "they arrive: make one optimizer, with parameter groups")

    def begin(self, lease: Lease) -> Update | None:
        """Begins the update that a backward, which has been checked, is to make; None if it is to store gradients."""
        if lease.shape.shape.update != "arrival":
            return None
        assert self.optimizer is not None, "an update without an optimizer"
        self._update = self.optimizer.request()
        self.streamed.begin_update(lease.shape, self._update)
        return self._update

    def end(self) -> bool:
        """The step is over, or of no interest any more. Whether a backward has updated in it."""
        updated, self._update = self.updated, None
        return updated

    def fail(self) -> None:
        """A backward was stopped, and its step with it."""
        self._update = None
