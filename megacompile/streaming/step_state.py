"""The state of a training step: which step the weights belong to, whose gradients are stored, and which update is running.

One object owns this state. Every other object may read it; it changes only through methods, and each method is one event of a
step:

    backward_began      gradients of a batch are about to be stored, or consumed as they arrive
    gradients_stored    the backward is over, and the device has the same gradients as the host
    update_began        the optimizer step is numbered and handed to the lanes
    failed              a lane failed; an update that stopped between two tiles leaves the weights torn
    ended               `optimizer.step()` after a backward that has updated
    weights_written     the user wrote to parameters; weights_replaced: to all of them

Lanes tell `SkippedUpdates` which steps and tiles an update has left alone. `Residency` owns which copy of a resident tile is
newer, the host's or the device's.
"""
from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

from megacompile.errors import MegacompileError, TornError
from megacompile.inputs.token_counts import TokenCounts
from megacompile.runtime.kernels import Batch
from megacompile.runtime.update import Update
from megacompile.streaming.programs.shapes import CompiledShape


class SkippedUpdates:
    """What updates have left alone because gradients were not finite. An update holds this object after its model is closed, so
    it refers to nothing else."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._tiles: list[str] = []

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of steps that were skipped."""
        return tuple(self._steps)

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that updates on arrival have left alone, once for each time."""
        return tuple(self._tiles)

    def step_skipped(self, number: int) -> None:
        self._steps.append(number)

    def tiles_kept(self, names: Iterable[str]) -> None:
        self._tiles.extend(names)


class StepState:
    """State: see the properties."""

    def __init__(self) -> None:
        self._version = self._count = 0
        self._trained: CompiledShape | None = None
        self._batches: tuple[Batch, ...] = ()
        self._gradients_on_device = False
        self._updating: Update | None = None
        self._unfinished: Update | None = None
        self._in_backward: Update | None = None
        self._half_loaded: set[str] = set()
        self._tokens, self._skipped = TokenCounts(), SkippedUpdates()

    # ---------------------------------------------------------------- what is known
    @property
    def version(self) -> int:
        """A number that changes whenever weights do."""
        return self._version

    @property
    def count(self) -> int:
        """How many steps have begun."""
        return self._count

    @property
    def tokens(self) -> TokenCounts:
        """Useful and computed tokens."""
        return self._tokens

    @property
    def skipped(self) -> SkippedUpdates:
        """Steps and tiles that were not updated."""
        return self._skipped

    @property
    def trained(self) -> CompiledShape | None:
        """The shape of the last backward, whose program also updates."""
        return self._trained

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The batches that the stored gradients belong to."""
        return self._batches

    @property
    def gradients_on_device(self) -> bool:
        """Whether the device has the same gradients as the host."""
        return self._gradients_on_device

    @property
    def updating(self) -> Update | None:
        """The update in flight."""
        return self._updating

    @property
    def unfinished(self) -> Update | None:
        """An update that failed before its last tile."""
        return self._unfinished

    @property
    def in_backward(self) -> Update | None:
        """The update that a backward has begun, until `optimizer.step()`."""
        return self._in_backward

    @property
    def torn(self) -> bool:
        """Whether an update, or a load, has changed some tiles and not others."""
        return bool(self._half_loaded) or (self._unfinished is not None and self._unfinished.has_updated)

    @property
    def stored(self) -> bool:
        """Whether the last backward stored its gradients. A backward that updates on arrival consumes them."""
        return self._trained is not None and "update" in self._trained.program.sections

    @property
    def updated_in_backward(self) -> bool:
        """Whether a backward has updated weights, or is about to, and `optimizer.step()` must follow."""
        return self._in_backward is not None and self._in_backward.begun

    def check_stored(self) -> None:
        """Raises `MegacompileError` unless a backward of the user's loop stored the last gradients. Only its program has an
        update that reads gradients which were set by hand: that of a whole step reads its own, where its plan keeps them."""
        if self._trained is None or not {"backward", "update"} <= self._trained.program.sections.keys():
            raise MegacompileError("gradients were set by hand, but the last training step stored none (it was a train_step "
                                   "or updated on arrival), or there was none: run a forward and a backward first, or call "
                                   "zero_grad()")

    def check_whole(self) -> None:
        """Raises `TornError` if an update, or a load, stopped between its first and its last tile."""
        if self._half_loaded:
            raise TornError("a load stopped half-way: load a checkpoint (megacompile.load_checkpoint, or load_state_dict of "
                            "the model, then of the optimizer)")
        if self.torn:
            complete = "call optimizer.step() again to complete it, or " if self.stored else ""
            raise TornError(f"an update stopped half-way: {complete}load a checkpoint (megacompile.load_checkpoint, or "
                            "load_state_dict of the model, then of the optimizer)")

    # ---------------------------------------------------------------- events of a step
    def backward_began(self, shape: CompiledShape, batch: Batch, adds: bool = False) -> None:
        """`adds`: to the gradients of earlier backwards."""
        self._trained, self._unfinished = shape, None
        self._batches = (*(self._batches if adds else ()), batch)

    def gradients_stored(self) -> None:
        self._gradients_on_device = True

    def gradients_changed(self) -> None:
        """The host's gradients are not those on the device."""
        self._gradients_on_device = False

    def update_began(self, update: Update) -> None:
        self._version += 1
        self._count += 1
        self._tokens.end_step(self._batches)
        update.batches = self._batches
        self._updating, self._unfinished = update, None
        update.begin()

    def backward_updates(self, update: Update | None) -> None:
        """The backward that runs now updates on arrival; None: it was stopped, and its step with it."""
        self._in_backward = update

    def ended(self) -> bool:
        """Ends a step that a backward has updated in. Returns whether one has."""
        updated, self._in_backward = self.updated_in_backward, None
        return updated

    def failed(self) -> bool:
        """A lane failed. Before the first tile of an update nothing has changed. After it, and before the last, the weights are
        torn until the update is completed. Returns whether the update in flight has updated any tile."""
        update, self._updating = self._updating, None
        if update is None:
            return False
        done = bool(update.done)
        if not update.refused and update.done != set(update.segments):
            update.withdraw()
            self._unfinished = update
        return done

    def weights_written(self) -> None:
        self._version += 1

    def weights_replaced(self) -> None:
        """The user has written all weights, so nothing of an unfinished update is missing any more."""
        self._unfinished = None
        self._half_loaded.discard("weights")
        self.ended()

    @contextlib.contextmanager
    def loading(self, parts: Collection[str]) -> Iterator[None]:
        """A context around a load of these parts ("weights", "state") of all tiles. If it stops half-way, for whatever reason,
        the model is torn until loads of these parts succeed."""
        self._half_loaded.update(parts)
        yield
        self._half_loaded.difference_update(parts)

    def release(self) -> None:
        """The model is closed: no update reads its batches any more."""
        for batch in self._batches:
            batch.release()

    def programs_dropped(self) -> None:
        """All programs were discarded while no gradients were waiting."""
        self._trained = None
