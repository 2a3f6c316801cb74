"""Loads a checkpoint. Everything is checked before anything is changed."""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacompile import schema
from megacompile.checkpoint import manifest, random_state, schedulers
from megacompile.checkpoint.files import check_file, stored_entries
from megacompile.checkpoint.folders import checkpoint_before, latest_checkpoint
from megacompile.checkpoint.manifest import Manifest, Saved, decode
from megacompile.checkpoint.shares import share
from megacompile.checkpoint.subject import Subject
from megacompile.errors import CheckpointError, MegacompileError
from megacompile.runtime.memory.snapshot import state_bytes
from megacompile.streaming.optimizer.hyper_parameters import FLAG, Check, is_number
from megacompile.streaming.optimizer.optimizer import check_saved
from megacompile.streaming.shared_writes import loading
from megacompile.streaming.user_tensors.divided import own_values
from megacompile.weights.weight_files import StoredTensor, WeightReader

_THREADS = 4


def load_checkpoint(directory: str | Path, model: Any, optimizer: Any, *, scheduler: Any = None) -> Any:
    """Restores the state that `CheckpointWriter.save` or `save_checkpoint` has saved, bit-exactly and under any plan: weights,
    moments, remainders, steps, options of parameter groups, scheduler, buffers, and random number generators. Sets gradients to
    None. Returns the `extra` that was saved.

    `directory` is a checkpoint, or a folder of checkpoints, from which the newest complete one is loaded. Create the model, the
    optimizer and the scheduler first. The model must have the same parameters and buffers, and the optimizer the same
    parameters in each group. With several hosts, each reads the files, which must be there under the same path.

    Raises `CheckpointError`, with the file and the reason, before anything has changed: for a damaged or truncated file, a
    folder without a checkpoint, and a checkpoint of another model, optimizer or scheduler. If a drive fails while values are
    copied, it raises `CheckpointError` or `DiskError`, and the model is torn until a load succeeds."""
    with WeightReader() as reader:
        return _load_checkpoint(Path(directory), Subject(model, optimizer, scheduler), reader)


def _load_checkpoint(directory: Path, subject: Subject, reader: WeightReader) -> Any:
    optimizer, scheduler = subject.optimizer, subject.scheduler
    streamed = subject.streamed
    job = streamed.rank_group.ranks
    rank = 0 if job is None else job.rank
    share_of = (0, 1) if job is None else (job.hosts.local, job.hosts.ranks)  # each copy checks the files
    with streamed.rank_group.all_or_none("load_checkpoint", CheckpointError):
        folder = _find(directory)
        saved = Manifest.read(folder)
        path = folder / manifest.NAME
        _check_subject(saved, subject, path)
        decoded = _decoded(saved, subject, path, rank)
        _check_files(folder, saved, share({name: written.bytes for name, written in saved.files.items()}, *share_of))
        tensors = StoredTensors(saved, folder, reader)
        state = _optimizer_state(saved, tensors, subject, decoded.options)
        try:
            check_saved(optimizer, state)
        except MegacompileError as error:
            raise CheckpointError(f"{path} is from another optimizer: {error}") from error
    if job is not None:  # with checksums, so that all hosts load the same values
        job.agree_on("load_checkpoint", "checkpoint", {name: astuple(written) for name, written in saved.files.items()})
    if scheduler is not None:
        with streamed.rank_group.all_or_none("load_checkpoint", CheckpointError):
            schedulers.load(decoded.scheduler, scheduler)  # may fail; nothing below does
    tiles = share({name: state_bytes(tile) for name, tile in streamed.store.tiles.items()},
                  *((0, 1) if job is None else (job.hosts.seat, len(job.hosts.here))))
    with streamed.call_lock, loading(streamed, "load_checkpoint", tiles, parts=(), torn=("weights", "state")):
        _load(tensors, subject, state)
    random_state.restore(random_state.of_rank(decoded.random, rank), streamed.backend.device)
    return decoded.extra


def read_extra(directory: str | Path) -> Any:
    """The `extra` of the checkpoint that `load_checkpoint` would load. Raises `CheckpointError` for a bad manifest, as
    `load_checkpoint` does."""
    folder = _find(Path(directory))
    saved = Manifest.read(folder)
    try:
        return decode(saved.extra)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / manifest.NAME} contains an invalid value ({error}): use another "
                              "checkpoint") from error


def _find(directory: Path) -> Path:
    if os.path.lexists(directory / manifest.NAME):
        return directory
    latest = latest_checkpoint(directory)
    if latest is None:
        raise CheckpointError(f"{directory} has no complete checkpoint: give a checkpoint, or a folder in which "
                              "megacompile has saved checkpoints")
    return latest


def _check_files(folder: Path, saved: Manifest, names: Iterable[str]) -> None:
    """Raises `CheckpointError` for a file that differs from what was written, with the checkpoint before this one."""
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda name: check_file(folder / name, saved.files[name]), names):
                pass
    except CheckpointError as error:
        before = checkpoint_before(folder)
        raise CheckpointError(f"{error}, such as the one before it: {before}" if before else str(error)) from error


def _check_subject(saved: Manifest, subject: Subject, path: Path) -> None:
    """Raises `CheckpointError` if the checkpoint is from another model, optimizer or scheduler."""
    def refuse(what: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{path} is from another training run: {what}; {remedy}")

    here = {s.name: Saved(layout.dtype, s.shape, s.trainable, "") for layout in subject.streamed.tiling.host.values()
            for s in layout.slices}
    here.update((name, Saved(t.dtype, tuple(t.shape), False, "")) for name, t in subject.rest().items())
    for name in sorted(here.keys() | saved.tensors.keys()):
        ours, theirs = (each[name].description() if name in each else "absent" for each in (here, saved.tensors))
        if ours != theirs:
            raise refuse(f"{name} is {theirs} in the checkpoint of a {saved.model}, but {ours} in this "
                         f"{type(subject.streamed.model).__name__}", "stream the model that was saved")
    groups, then = [sorted(names) for _, names in subject.groups()], [sorted(names) for names in saved.groups]
    if groups != then:
        raise refuse(f"its parameter groups have {list(map(len, then))} parameters, but the optimizer's have "
                     f"{list(map(len, groups))}, or different ones", "create the optimizer with the same groups")
    if lacking := [name for name in subject.remainders() if "remainder" not in saved.tensors[name].parts]:
        raise refuse(f"it has no remainder of {lacking[0]}", "use another checkpoint")
    ours, theirs = (type(subject.scheduler).__name__ if subject.scheduler is not None else "no scheduler",
                    saved.scheduler["class"] if saved.scheduler else "no scheduler")
    if ours != theirs:
        raise refuse(f"it was saved with {theirs}, but {ours} was passed", "pass a scheduler as when it was saved")


@dataclass(frozen=True)
class _Decoded:
    """The checked values of a manifest. `options`: those of each parameter group; `scheduler`: its state."""

    options: list[dict[str, Any]]
    scheduler: Any
    random: dict[str, Any]
    extra: Any


def _decoded(saved: Manifest, subject: Subject, path: Path, rank: int) -> _Decoded:
    """Decodes and checks the values of a manifest. Raises `CheckpointError` for values that could not be restored."""
    same_torch = saved.made_with.get("torch") == torch.__version__
    try:
        found = _Decoded(*map(decode, (saved.options, (saved.scheduler or {}).get("state"), saved.random, saved.extra)))
        for number, (options, (now, _)) in enumerate(zip(found.options, subject.groups(), strict=True)):
            checks = subject.optimizer.checks
            known = {name: _option(check) for name, check in checks.items()}
            schema.record(known, others=schema.anything)(options, f"options[{number}]")
            # Schedulers and the user may add others, and older versions may have fewer.
            schema.like(now, known, complete=False)(options, f"options[{number}]")
            if subject.scheduler is not None and "initial_lr" in now:
                _SCHEDULED(options, f"options[{number}]")
        schedulers.check(found.scheduler, subject.scheduler, same_torch)
        random_state.check(found.random, subject.streamed.backend.device, rank)
        return found
    except (CheckpointError, schema.SchemaError) as error:
        raise CheckpointError(f"{path} contains an invalid value ({error}): use another checkpoint") from error


def _number(value: Any, name: str) -> None:
    """A rule: a finite number of at least 0, which may be a tensor."""
    is_one = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    schema.finite(least=0)(value.item() if is_one else value, name)


def _option(check: Check) -> schema.Rule:
    """The rule for an option of a parameter group."""
    def rule(value: Any, name: str) -> None:
        if check is not FLAG and (isinstance(value, bool) or is_number(value)):
            _number(value, name)
        schema.must(check.good, check.what)(value, name)

    return rule


_SCHEDULED = schema.record({"initial_lr": _number}, others=schema.anything)


class StoredTensors:
    """All tensors of a checkpoint by key, read on demand. Raises `CheckpointError` if a file has other tensors than its
    manifest says, or cannot be opened."""

    def __init__(self, saved: Manifest, folder: Path, reader: WeightReader) -> None:
        inside: dict[str, list[Any]] = {name: [] for name in saved.files}
        for name, each in saved.tensors.items():
            for file, entry in each.entries(name):
                inside[file].append(entry)
        self._saved = saved.tensors
        self._stored: dict[str, StoredTensor] = {}
        self._reader = reader
        for name, entries in inside.items():
            self._stored.update(stored_entries(folder / name, entries))
        try:
            reader.open([folder / name for name in inside])
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read ({error.strerror}): use another checkpoint") from error

    def parts(self, name: str) -> tuple[str, ...]:
        return self._saved[name].parts

    def empty(self, part: str, name: str) -> Tensor:
        """A tensor of the same dtype and shape as a part of a parameter, without values."""
        entry = self._saved[name].entry(name, part)
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def read(self, part: str, name: str) -> Tensor:
        """A part of a parameter. Raises `CheckpointError` if the drive fails, or if the file was changed since it was
        checked."""
        entry = self._saved[name].entry(name, part)
        values = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_run(part, name, 0, values.view(-1))
        return values

    def read_run(self, part: str, name: str, start: int, into: Tensor) -> None:
        """Fills `into`, 1-D, with the elements of a part of a parameter from `start` on. Otherwise as `read`."""
        saved = self._saved[name]
        if not saved.runs:
            self._reader.read(self._stored[saved.entry(name, part).key], start, into)
        for run in saved.runs:
            first, last = saved.span(part, run)
            begin, end = max(first, start), min(last, start + into.numel())
            if begin < end:
                stored = self._stored[saved.entry(name, part, run).key]
                self._reader.read(stored, begin - first, into[begin - start:end - start])


class _State(Mapping[str, Any]):
    """A parameter's state, in the form for `check_saved`, whose tensors are read on demand."""

    def __init__(self, name: str, state: Mapping[str, Any], tensors: StoredTensors) -> None:
        self._name, self._state, self._tensors = name, state, tensors

    def __getitem__(self, key: str) -> Any:
        value = self._state[key]
        return self._tensors.read(key, self._name) if isinstance(value, Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _optimizer_state(saved: Manifest, tensors: StoredTensors, subject: Subject,
                     options: list[dict[str, Any]]) -> dict[str, Any]:
    """The state in the format of an optimizer's `state_dict`, without values."""
    numbers = {name: i for i, name in enumerate(n for _, names in subject.groups() for n in names)}

    def state(name: str) -> dict[str, Any]:
        each = saved.tensors[name]
        if each.step is None:
            return {}
        return {"step": each.step, **{part: tensors.empty(part, name) for part in each.parts if part != "weight"}}

    return dict(param_groups=[{**each, "params": [numbers[n] for n in names]}
                              for each, (_, names) in zip(options, subject.groups(), strict=True)],
                state={number: state(name) for name, number in numbers.items()})


@torch.no_grad()
def _load(tensors: StoredTensors, subject: Subject, optimizer_state: dict[str, Any]) -> None:
    """Copies checked weights and optimizer state into the model and the optimizer, in the tiles that this rank writes."""
    streamed = subject.streamed
    place, store = streamed.tiling.position, streamed.store
    own = {name: parameter for name, parameter in streamed.parameters.items() if store.writes(place[name][0])}
    divided = store.division is not None
    for name, tensor in [*(own.items() if not divided else ()), *subject.rest().items()]:
        tensor.copy_(tensors.read("weight", name))
    streamed.adopt_writes()
    streamed.step.weights_replaced()
    subject.model.zero_grad()
    groups, states = check_saved(subject.optimizer, optimizer_state)
    subject.optimizer.put_state(groups, [  # what other ranks write stays without values
        (parameter, memory, _State(memory.name, state, tensors) if memory.writable and not divided else state)
        for parameter, memory, state in states])
    for name in own:  # includes parameters that the optimizer does not have
        tile_name, position = place[name]
        for part in tensors.parts(name) if divided else ("remainder",):
            for chosen, memory in own_values(store.tiles[tile_name], position, part):
                tensors.read_run(part, name, chosen.start, memory)
