"""The state of a training step: which step the weights belong to, whose gradients are stored, and which update is running.

One object owns this state. Every other object may read it; it changes only through the methods of `StepState`, and each method
is one event of a step:

    backward_began      gradients of a batch are about to be stored, or consumed as they arrive
    gradients_stored    the backward is over, and the device has the same gradients as the host
    update_began        the optimizer step is numbered and handed to the lanes
    failed              a lane failed; an update that stopped between two tiles leaves the weights torn
    ended               `optimizer.step()` after a backward that has updated
    weights_written     the user wrote to parameters; weights_replaced: to all of them
"""
from __future__ import annotations

from megacompile.errors import MegacompileError, TornError
from megacompile.inputs.token_counts import TokenCounts
from megacompile.runtime.kernels import Batch
from megacompile.runtime.update import Update
from megacompile.streaming.programs.shapes import CompiledShape


class StepState:
    """`version` changes whenever weights do. `count`: steps begun. `tokens`: useful and computed tokens. `skipped`: numbers of
    steps whose gradients were not finite. `kept`: tiles that an update on arrival left alone for that reason. `trained`: the
    shape of the last backward, whose program also updates. `batches`: the batches that the stored gradients belong to.
    `gradients_on_device`: the device has the same gradients as the host. `updating`: the update in flight. `unfinished`: an
    update that failed before its last tile. `in_backward`: the update that a backward has begun, until `optimizer.step()`."""

    def __init__(self) -> None:
        self.version = self.count = 0
        self.tokens = TokenCounts()
        self.skipped: list[int] = []
        self.kept: list[str] = []
        self.trained: CompiledShape | None = None
        self.batches: list[Batch] = []
        self.gradients_on_device = False
        self.updating: Update | None = None
        self.unfinished: Update | None = None
        self.in_backward: Update | None = None

    # ---------------------------------------------------------------- what is known
    @property
    def torn(self) -> bool:
        """Whether an update has changed some tiles and not others."""
        return self.unfinished is not None and self.unfinished.has_updated

    @property
    def stored(self) -> bool:
        """Whether the last backward stored its gradients. A backward that updates on arrival consumes them."""
        return self.trained is not None and "update" in self.trained.program.sections

    @property
    def updated_in_backward(self) -> bool:
        """Whether a backward has updated weights, or is about to, and `optimizer.step()` must follow."""
        return self.in_backward is not None and self.in_backward.begun

    def check_stored(self) -> None:
        """Raises `MegacompileError` unless the last backward stored gradients: there is no program for their update."""
        if not self.stored:
            raise MegacompileError("gradients were set by hand before any backward of this model that stores its own: run a "
                                   "forward and a backward first, or call zero_grad()")

    def check_whole(self) -> None:
        """Raises `TornError` if an update stopped between its first and its last tile."""
        if self.torn:
            complete = "call optimizer.step() again to complete it, or " if self.stored else ""
            raise TornError(f"an update stopped half-way: {complete}load a checkpoint (megacompile.load_checkpoint, or "
                            "load_state_dict of the model, then of the optimizer)")

    # ---------------------------------------------------------------- events of a step
    def backward_began(self, shape: CompiledShape, batch: Batch, adds: bool = False) -> None:
        """`adds`: to the gradients of earlier backwards."""
        self.trained, self.unfinished = shape, None
        self.batches = [*(self.batches if adds else ()), batch]

    def gradients_stored(self) -> None:
        self.gradients_on_device = True

    def gradients_changed(self) -> None:
        """The host's gradients are not those on the device."""
        self.gradients_on_device = False

    def update_began(self, update: Update) -> None:
        self.version += 1
        self.count += 1
        self.tokens.end_step(self.batches)
        update.batches = self.batches
        self.updating, self.unfinished = update, None
        update.begin()

    def backward_updates(self, update: Update | None) -> None:
        """The backward that runs now updates on arrival; None: it was stopped, and its step with it."""
        self.in_backward = update

    def ended(self) -> bool:
        """Ends a step that a backward has updated in. Returns whether one has."""
        updated, self.in_backward = self.updated_in_backward, None
        return updated

    def failed(self) -> bool:
        """A lane failed. Before the first tile of an update nothing has changed. After it, and before the last, the weights are
        torn until the update is completed. Returns whether the update in flight has updated any tile."""
        update, self.updating = self.updating, None
        if update is None:
            return False
        done = bool(update.done)
        if not update.refused and update.done != set(update.segments):
            update.withdraw()
            self.unfinished = update
        return done

    def weights_written(self) -> None:
        self.version += 1

    def weights_replaced(self) -> None:
        """The user has written all weights, so nothing of an unfinished update is missing any more."""
        self.unfinished = None
        self.ended()

    def programs_dropped(self) -> None:
        """All programs were discarded while no gradients were waiting."""
        self.trained = None
