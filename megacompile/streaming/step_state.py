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
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from megacompile.errors import MegacompileError, NonFiniteError, TornError
from megacompile.inputs.token_counts import TokenCounts
from megacompile.runtime.kernels import Batch
from megacompile.runtime.update import Norms, Update
from megacompile.streaming.programs.executables import Executable

# --------------------
# Policies for a step whose gradients are not finite: skip it, raise an error that names the tiles, or also dump the batch to a
# folder.
#
#     AdamW(parameters, non_finite="raise")      the default; nothing is updated
#     AdamW(parameters, non_finite="skip")       nothing is updated, and training goes on
#     AdamW(parameters, non_finite="dump", dump_folder="non-finite")
#
# The host knows the norm before the first tile is updated. This needs no extra read from the device, and no lane waits for it.
# Updates on arrival run before the global norm is known, so each tile is checked by itself: a tile whose gradients are not
# finite keeps its weights and moments, the other tiles are updated, and the step is reported after the last tile. Tiles that
# are updated on the device are checked there, and reported when the host next waits for the device.
POLICIES = ("raise", "skip", "dump")
_NAMED = 8  # tiles in a message


@dataclass(frozen=True)
class NonFinite:
    """A checked policy for gradients that are not finite. `folder`: where dumps are written. Raises `MegacompileError`."""

    policy: str
    folder: Path

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise MegacompileError(f"non_finite={self.policy!r} must be one of {', '.join(map(repr, POLICIES))}")

    def report(self, skipped: SkippedUpdates, update: Update, norms: Norms) -> None:
        """Reports the step, or on arrival its tiles, to `skipped`, or raises `NonFiniteError`. Called in a lane."""
        if update.on_arrival:
            skipped.tiles_kept(norms)
        elif self.policy == "skip":
            skipped.step_skipped(update.step)
        if self.policy == "skip":
            return
        tiles = tuple(tile for tile, of_tile in norms.items() if not all(map(math.isfinite, of_tile.values())))
        loss = sum(map(_loss, update.batches))
        norm = math.nan if update.norm is None else update.norm
        found = f"loss {loss:.4g}" if update.on_arrival else f"loss {loss:.4g}, norm {norm:.4g}"
        lines = [f"the gradients of step {update.step} are not finite ({found}) and {_changed(update, len(tiles))}: leave the "
                 "batch out (zero_grad() and go on), lower the learning rate, or skip what is not finite (non_finite='skip')",
                 f"not finite: {', '.join(tiles[:_NAMED])}{f' and {len(tiles) - _NAMED} more' if len(tiles) > _NAMED else ''}"]
        folder = None
        if self.policy == "dump":
            folder = self.folder / f"step-{update.step}"
            try:
                _dump(folder, update, loss, norm, norms)
                lines.append(f"dumped: {folder}")
            except OSError as error:
                lines.append(f"not dumped: {folder} cannot be written ({error.strerror})")
                folder = None
        raise NonFiniteError("\n".join(lines), update.step, loss, norm, tiles, folder)


def report_late(found: Mapping[str, Update], skipped: SkippedUpdates) -> None:
    """Reports tiles that updates on the device did not change, each step once. `found`: the update of each such tile, from
    `Arena.take_verdicts`. Reports the tiles to `skipped`, or raises `NonFiniteError`."""
    for update in dict.fromkeys(found.values()):
        tiles = [tile for tile, of in found.items() if of is update]
        if update.kept:  # the host kept some too, and has reported the step
            skipped.tiles_kept(tiles)
        else:
            update.report(update, {tile: {"some": math.nan} for tile in tiles})


def _changed(update: Update, kept: int) -> str:
    """Describes what the update changed. `kept`: number of tiles whose gradients are not finite."""
    if not update.on_arrival or kept == len(update.segments):
        return "nothing was updated"
    return (f"{kept} of {len(update.segments)} tiles kept weights and moments; the others were updated, but for those that the "
            "device may have kept")


def _loss(batch: Batch) -> float:
    """The loss of a batch. Reads the device, which is acceptable since the step is abandoned."""
    return sum(float(value.loss) for value in batch.results.get("loss", []) if value.loss is not None)


def _dump(folder: Path, update: Update, loss: float, norm: float, norms: Norms) -> None:
    """Writes `report.json`, and the arguments of each batch to `batch-0.safetensors`, `batch-1.safetensors`, ... Raises
    `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(update.batches):
        tensors = {f"{name}.{mb}": tensor.cpu().contiguous() for mb, inputs in enumerate(batch.micro_batches)
                   for name, tensor in inputs.items()}
        save_file(tensors, folder / f"batch-{number}.safetensors")
    report = dict(step=update.step, loss=loss, norm=norm, max_grad_norm=update.max_grad_norm, tiles={
        tile: dict(norm=math.hypot(*of_tile.values()), parameters=dict(of_tile)) for tile, of_tile in norms.items()})
    (folder / "report.json").write_text(json.dumps(_finite(report), indent=1) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON cannot represent with strings."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class SkippedUpdates:
    """Counts updates that were skipped because gradients were not finite. An update holds this object after its model is
    closed, so it refers to nothing else."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._tiles: list[str] = []

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of steps that were skipped."""
        return tuple(self._steps)

    @property
    def tiles(self) -> tuple[str, ...]:
        """The tiles that updates on arrival did not change, once for each time."""
        return tuple(self._tiles)

    def step_skipped(self, number: int) -> None:
        self._steps.append(number)

    def tiles_kept(self, names: Iterable[str]) -> None:
        self._tiles.extend(names)


class StepState:
    """State: see the properties."""

    def __init__(self) -> None:
        self._version = self._count = 0
        self._trained: Executable | None = None
        self._batches: tuple[Batch, ...] = ()
        self._gradients_on_device = False
        self._updating: Update | None = None
        self._unfinished: Update | None = None
        self._in_backward: Update | None = None
        self._half_loaded: set[str] = set()
        self._tokens, self._skipped = TokenCounts(), SkippedUpdates()
        self._loads: tuple[Mapping[tuple[str, int], Tensor], ...] = ()

    # ---------------------------------------------------------------- what is known
    @property
    def version(self) -> int:
        """A number that changes whenever weights do."""
        return self._version

    @property
    def count(self) -> int:
        """The number of steps that have begun."""
        return self._count

    @property
    def tokens(self) -> TokenCounts:
        """Useful and computed tokens."""
        return self._tokens

    @property
    def loads(self) -> tuple[Mapping[tuple[str, int], Tensor], ...]:
        """`Batch.ends_of_experts` of each batch of the last step."""
        return self._loads

    @property
    def skipped(self) -> SkippedUpdates:
        """Steps and tiles that were not updated."""
        return self._skipped

    @property
    def trained(self) -> Executable | None:
        """The program of the last backward, which also updates."""
        return self._trained

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The batches that the stored gradients belong to."""
        return self._batches

    @property
    def gradients_on_device(self) -> bool:
        """True if the device has the same gradients as the host."""
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
        """The update that a backward has begun and `optimizer.step()` has not ended."""
        return self._in_backward

    @property
    def torn(self) -> bool:
        """True if an update, or a load, has changed some tiles and not others."""
        return bool(self._half_loaded) or (self._unfinished is not None and self._unfinished.has_updated)

    @property
    def stored(self) -> bool:
        """True if the last backward stored its gradients. A backward that updates on arrival consumes them."""
        return self._trained is not None and "update" in self._trained.program.sections

    @property
    def updated_in_backward(self) -> bool:
        """True if a backward has updated weights, or is about to. Then `optimizer.step()` must follow."""
        return self._in_backward is not None and self._in_backward.begun

    def check_stored(self) -> None:
        """Raises `MegacompileError` unless a backward of the user's loop stored the last gradients. Only the program of such a
        backward has an update that reads gradients set by hand. The update of a whole step reads the step's own gradients,
        which its plan may keep on the device."""
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
    def backward_began(self, executable: Executable, batch: Batch, adds: bool = False) -> None:
        """Records that a backward begins. `adds`: to the gradients of earlier backwards."""
        self._trained, self._unfinished = executable, None
        self._batches = (*(self._batches if adds else ()), batch)

    def gradients_stored(self) -> None:
        self._gradients_on_device = True

    def gradients_changed(self) -> None:
        """Records that the host's gradients differ from those on the device."""
        self._gradients_on_device = False

    def update_began(self, update: Update) -> None:
        self._version += 1
        self._count += 1
        self._tokens.end_step(self._batches)
        self._loads = tuple(batch.ends_of_experts for batch in self._batches)
        update.batches = self._batches
        self._updating, self._unfinished = update, None
        update.begin()

    def backward_updates(self, update: Update | None) -> None:
        """Records that the current backward updates on arrival. None: it was stopped, and so was its step."""
        self._in_backward = update

    def ended(self) -> bool:
        """Ends a step whose backward has updated. Returns whether there was one."""
        updated, self._in_backward = self.updated_in_backward, None
        return updated

    def failed(self) -> bool:
        """Handles a failed lane. Before the first tile of an update nothing has changed. Between the first and the last tile
        the weights are torn until the update is completed. Returns whether the update in flight has updated any tile."""
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
        """Records that the user has written all weights. This repairs an unfinished update."""
        self._unfinished = None
        self._half_loaded.discard("weights")
        self.ended()

    @contextlib.contextmanager
    def loading(self, parts: Collection[str]) -> Iterator[None]:
        """A context around a load of these parts ("weights", "state") of all tiles. If it stops half-way, for any reason, the
        model is torn until loads of these parts succeed."""
        self._half_loaded.update(parts)
        yield
        self._half_loaded.difference_update(parts)

    def release(self) -> None:
        """Drops the batches, when the model is closed. No update reads them any more."""
        for batch in self._batches:
            batch.release()

    def programs_dropped(self) -> None:
        """Records that all programs were discarded while no gradients were waiting."""
        self._trained = None
