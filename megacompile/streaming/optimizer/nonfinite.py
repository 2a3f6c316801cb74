"""Policies for a step whose gradients are not finite: skip it, raise an error that names the tiles, or also dump the batch to a
folder.

    AdamW(parameters, non_finite="raise")      the default; nothing is updated
    AdamW(parameters, non_finite="skip")       nothing is updated, and training goes on
    AdamW(parameters, non_finite="dump", dump_folder="non-finite")

The host knows the norm before the first tile is updated. This needs no extra read from the device, and no lane waits for it.
Updates on arrival run before the global norm is known, so each tile is checked by itself: a tile whose gradients are not finite
keeps its weights and moments, the other tiles are updated, and the step is reported after the last tile. Tiles that are updated
on the device are checked there, and reported when the host next waits for the device.
"""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from megacompile.errors import MegacompileError, NonFiniteError
from megacompile.runtime.kernels import Batch
from megacompile.runtime.update import Norms, Update
from megacompile.streaming.step_state import SkippedUpdates

POLICIES = ("raise", "skip", "dump")
_NAMED = 8  # tiles in a message


@dataclass(frozen=True)
class NonFinite:
    """A checked policy. `folder`: where dumps are written. Raises `MegacompileError`."""

    policy: str
    folder: Path

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise MegacompileError(f"non_finite={self.policy!r} must be one of {', '.join(map(repr, POLICIES))}")

    def report(self, skipped: SkippedUpdates, update: Update, norms: Norms) -> None:
        """Called in a lane. Tells `skipped` of the step, or on arrival of the tiles; or raises `NonFiniteError`."""
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
    """Reports tiles that updates on the device have left alone, each step once. `found`: the update of each such tile, from
    `Arena.take_verdicts`. Tells `skipped` of the tiles, or raises `NonFiniteError`."""
    for update in dict.fromkeys(found.values()):
        tiles = [tile for tile, of in found.items() if of is update]
        if update.kept:  # the host kept some too, and has reported the step
            skipped.tiles_kept(tiles)
        else:
            update.report(update, {tile: {"some": math.nan} for tile in tiles})


def _changed(update: Update, kept: int) -> str:
    """What the update changed. `kept`: number of tiles whose gradients are not finite."""
    if not update.on_arrival or kept == len(update.segments):
        return "nothing was updated"
    return (f"{kept} of {len(update.segments)} tiles kept weights and moments; the others were updated, but for those that the "
            "device may have kept")


def _loss(batch: Batch) -> float:
    """The loss of a batch. Reads the device, which is fine for a step that is abandoned."""
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
