"""Going on from a checkpoint: everything is checked before anything is changed."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacompile.checkpoint import manifest
from megacompile.checkpoint.files import check_file, read_tensors
from megacompile.checkpoint.folders import latest_checkpoint
from megacompile.checkpoint.manifest import Manifest, Saved
from megacompile.checkpoint.random_state import restore
from megacompile.checkpoint.subject import Subject
from megacompile.checkpoint.values import decode
from megacompile.errors import CheckpointError

_THREADS = 4


def load_checkpoint(directory: str | Path, model: Any, optimizer: Any, *, scheduler: Any = None) -> Any:
    """Puts back what `CheckpointWriter.save` or `save_checkpoint` has saved, to the bit, under whatever plan: weights, moments,
    remainders, steps, the options of parameter groups, the scheduler, buffers, and the random number generators. Gradients are
    set to None. Returns the `extra` that was saved.

    `directory` is one checkpoint, or a folder of checkpoints, of which the newest complete one is taken. The model must have
    the same parameters and buffers, and the optimizer the same parameters in each group; make both, and the scheduler, first.

    Raises `CheckpointError`, with the file and the reason, before anything has changed: for a damaged or truncated file, a
    folder that holds no checkpoint, and a checkpoint of another model, optimizer or scheduler."""
    subject = Subject(model, optimizer, scheduler)
    folder = _find(Path(directory))
    saved = Manifest.read(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda item: check_file(folder / item[0], item[1]), saved.files.items()):
            pass
    _check_subject(saved, subject, folder / manifest.NAME)
    tensors = dict(_tensors(saved, folder))
    try:
        options, state, random, extra = map(decode, (saved.options, (saved.scheduler or {}).get("state"), saved.random,
                                                     saved.extra))
    except (CheckpointError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / manifest.NAME} holds a value that no checkpoint holds ({error}): take another "
                              "checkpoint") from error
    _load_tensors(saved, tensors, subject, options)
    if scheduler is not None:
        scheduler.load_state_dict(state)
    restore(random, subject.streamed.backend.device)
    return extra


def _find(directory: Path) -> Path:
    if (directory / manifest.NAME).exists():
        return directory
    latest = latest_checkpoint(directory)
    if latest is None:
        raise CheckpointError(f"there is no complete checkpoint in {directory}: give a folder that megacompile has saved "
                              "checkpoints in, or one of them")
    return latest


def _check_subject(saved: Manifest, subject: Subject, path: Path) -> None:
    """Raises `CheckpointError` if the checkpoint is of another model, optimizer or scheduler."""
    def refuse(what: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{path} is of another training: {what}; {remedy}")

    here = {s.name: Saved(layout.dtype, s.shape, s.trainable, "") for layout in subject.streamed.tiling.host.values()
            for s in layout.slices}
    here.update((name, Saved(t.dtype, tuple(t.shape), False, "")) for name, t in subject.rest().items())
    for name in sorted(here.keys() | saved.tensors.keys()):
        ours, theirs = (each[name].description() if name in each else "absent" for each in (here, saved.tensors))
        if ours != theirs:
            raise refuse(f"{name} is {theirs} in the checkpoint of a {saved.model}, and {ours} in this "
                         f"{type(subject.streamed.model).__name__}", "stream the model that was saved")
    groups, then = [sorted(names) for _, names in subject.groups()], [sorted(names) for names in saved.groups]
    if groups != then:
        raise refuse(f"its parameter groups have {list(map(len, then))} parameters, and the optimizer's "
                     f"{list(map(len, groups))}, or others", "make the optimizer as it was made then")
    ours, theirs = (type(subject.scheduler).__name__ if subject.scheduler is not None else "no scheduler",
                    saved.scheduler["class"] if saved.scheduler else "no scheduler")
    if ours != theirs:
        raise refuse(f"it was saved with {theirs}, and {ours} is given", "pass the scheduler that was saved, or none")


def _tensors(saved: Manifest, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors by key, mapped. A file's pages are read when they are copied, and the system may drop them at any time."""
    inside: dict[str, list[Any]] = {name: [] for name in saved.files}
    for name, each in saved.tensors.items():
        if each.file not in inside:
            raise CheckpointError(f"{folder / manifest.NAME} does not list {each.file}, which holds {name}: take another "
                                  "checkpoint")
        inside[each.file] += each.entries(name)
    for file, entries in inside.items():
        yield from read_tensors(folder / file, entries).items()


@torch.no_grad()
def _load_tensors(saved: Manifest, tensors: Mapping[str, Tensor], subject: Subject, options: list[dict[str, Any]]) -> None:
    streamed, optimizer = subject.streamed, subject.optimizer
    streamed.residency.leave()
    streamed.store.preserve()
    for name, tensor in [*streamed.parameters.items(), *subject.rest().items()]:
        tensor.copy_(tensors[f"weight:{name}"])
    streamed.adopt_writes()
    streamed.mend()
    optimizer.zero_grad()
    numbers: dict[str, int] = {name: i for i, name in enumerate(n for _, names in subject.groups() for n in names)}
    optimizer.load_state_dict(dict(
        param_groups=[{**each, "params": [numbers[n] for n in names]}
                      for each, (_, names) in zip(options, subject.groups(), strict=True)],
        state={number: _state(saved, tensors, name) for name, number in numbers.items()}))
    for name, (tile_name, position) in streamed.tiling.position.items():
        tile = streamed.store.tiles[tile_name]
        part = tile.layout.slices[position]
        if tile.remainder is not None and part.trainable:  # of those too that the optimizer does not have
            tile.remainder[part.start:part.stop].view(part.shape).copy_(tensors[f"remainder:{name}"])


def _state(saved: Manifest, tensors: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """As an optimizer's `state_dict` has it, of one parameter."""
    each = saved.tensors[name]
    if each.step is None:
        return {}
    return {"step": each.step, **{part: tensors[f"{part}:{name}"] for part in each.parts if part != "weight"}}
