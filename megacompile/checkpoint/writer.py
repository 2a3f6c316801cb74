"""Writes checkpoints while training continues.

    writer = CheckpointWriter("runs/one", model, optimizer)
    writer.save(extra={"batch": number})     # between two steps; returns when the state is fixed, before it is written
    ...                                      # training continues; an update of unwritten state copies it first, or waits
    writer.close()
"""
from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from megacompile.checkpoint.files import Entry, Written, header, write_file
from megacompile.checkpoint.folders import Incomplete
from megacompile.checkpoint.manifest import Manifest, Run, Saved, encode, moments
from megacompile.checkpoint.random_state import capture, of_ranks
from megacompile.checkpoint.shares import share
from megacompile.checkpoint.subject import Subject
from megacompile.errors import CheckpointError, MegacompileError, RankError
from megacompile.runtime.memory.snapshot import Piece, ReadTiles, Snapshot, TouchedError, pieces, state_bytes
from megacompile.sizes import parse_bytes
from megacompile.streaming.rank_group import RankGroup
from megacompile.system.host_memory import available_host_bytes
from megacompile.version import __version__

#: Bytes that are read and written at a time.
_CHUNK_BYTES = 16 << 20
#: Number of files that are written at a time. The checksum and the copy to the page cache in one thread are slower than a good
#: disk.
_THREADS = 2


class CheckpointWriter:
    """Saves a streamed model's training state into numbered folders in `directory`, and keeps the last `keep` of them.

    Args:
        model, optimizer: a streamed model and its `megacompile.AdamW`.
        scheduler: an object with `state_dict()` and `load_state_dict()`.
        bandwidth: maximum bytes per second ("500MiB"), as long as no update waits for the writer. None: no limit.
        copy_memory: host memory for copies of state that updates change before it is written ("8GiB"). With 0, updates wait for
            the writer instead. None: half of the memory that is available when a save begins.

    If a save fails (because the disk is full, for example), earlier checkpoints stay as they are and training continues. The
    next `save`, `wait` or `close` raises `CheckpointError`, once. Only one save is written at a time; the next one waits for
    it.
    """

    def __init__(self, directory: str | Path, model: Any, optimizer: Any, *, scheduler: Any = None, keep: int = 3,
                 bandwidth: int | str | None = None, copy_memory: int | str | None = None) -> None:
        if type(keep) is not int or keep < 1:
            raise MegacompileError(f"keep must be a whole number of at least 1, not {keep!r}")
        self.directory, self.keep = Path(directory), keep
        self.subject = Subject(model, optimizer, scheduler)
        self.bandwidth = parse_bytes(bandwidth)
        self.copy_memory = 0 if copy_memory == 0 else parse_bytes(copy_memory)
        self._save: _Save | None = None
        self._last: Path | None = None

    def save(self, extra: Any = None) -> None:
        """Saves the current state, between two steps. Waits for the update in flight and for the previous save, and returns
        before the state is written. `extra`: a value made of numbers, strings, bytes, lists, tuples, dicts and tensors, such as
        the position in the data; `load_checkpoint` returns it.

        Gradients that wait for a step are not saved. Until `wait()` returns, parameters must not be written from outside
        (`p.add_`, optimizers from torch.optim); methods of the model and of its optimizer are safe.

        Raises `CheckpointError` (also if the previous save failed), `LaneError`, `TornError`."""
        self.wait()
        with self.subject.streamed.call_lock:
            self._save = _Save(self.subject, self.directory, self.keep, extra, self.bandwidth, self.copy_memory)

    @property
    def saving(self) -> bool:
        """True if a save is being written."""
        return self._save is not None and any(thread.is_alive() for thread in self._save.threads)

    def wait(self) -> Path | None:
        """Waits until the save in flight is complete and on disk. Returns the folder of the last complete save of this writer.
        Raises `CheckpointError` if the save failed."""
        save = self._save
        if save is not None:
            for thread in save.threads:
                thread.join()
            self._save = None
            if isinstance(save.error, RankError):
                raise save.error
            if save.error is not None:
                raise CheckpointError(f"no checkpoint was saved in {self.directory} ({_reason(save.error)}): earlier ones are "
                                      f"intact, and training can continue{_remedy(save.error)}") from save.error
            self._last = save.result
        return self._last

    def close(self) -> None:
        """Like `wait`. A writer that is not closed still finishes its save, but its failure is not reported."""
        self.wait()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def save_checkpoint(directory: str | Path, model: Any, optimizer: Any, *, scheduler: Any = None, extra: Any = None,
                    keep: int = 3) -> Path:
    """Saves a streamed model's training state to a new folder in `directory`, and returns this folder when it is on disk. Keeps
    the last `keep` checkpoints. Arguments and exceptions as for `CheckpointWriter` and its `save`."""
    with CheckpointWriter(directory, model, optimizer, scheduler=scheduler, keep=keep) as writer:
        writer.save(extra)
        path = writer.wait()
    assert path is not None, "a save that neither failed nor succeeded"
    return path


class _OnRankError(Exception):
    """The first rank that could not save, with its reason and the remedy: the same on all ranks."""

    def __init__(self, reason: str, remedy: str, cause: BaseException | None) -> None:
        super().__init__(reason)
        self.reason, self.remedy, self.__cause__ = reason, remedy, cause


def _reason(error: BaseException) -> str:
    if isinstance(error, _OnRankError):
        return error.reason
    if isinstance(error, TouchedError):
        return f"the weights of {error} were written from outside before they were saved"
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _remedy(error: BaseException) -> str:
    if isinstance(error, _OnRankError):
        return error.remedy
    if isinstance(error, TouchedError):
        return "; call wait() before writing to parameters"
    if isinstance(error, FileNotFoundError):  # the first rank has made the folder
        return "; keep the folder until the save is complete, and give one that all hosts see"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "; free some disk space, or keep fewer checkpoints" if full else ""


class _Save:
    """One save. Each rank of the first copy writes some tiles, or, if hosts divide the copy, what its host has of some
    tiles. The first (or only) rank also writes the rest, and publishes the folder when all ranks are done. Other copies
    have the same values, and write nothing. State: its `threads`; when it is done, `result` or `error`, the same on all
    ranks."""

    def __init__(self, subject: Subject, directory: Path, keep: int, extra: Any, bandwidth: int | None,
                 copy_memory: int | None) -> None:
        streamed = subject.streamed
        self.keep, self.store, self.ranks = keep, streamed.store, streamed.rank_group.ranks
        self.rank = 0 if self.ranks is None else self.ranks.rank
        self.seat, self.size = (0, 1) if self.ranks is None else (self.ranks.hosts.seat, len(self.ranks.hosts.here))
        self.folder: Incomplete | None = None
        self.error: BaseException | None = None
        self.result: Path | None = None
        try:
            with streamed.rank_group.all_or_none("save", CheckpointError):
                self._prepare(subject, directory, extra)
            self._join(streamed.rank_group)
            if self.store.snapshot is not None:
                self.store.snapshot.wait()  # a snapshot of another writer
        except BaseException:
            self._discard()
            raise
        copies = available_host_bytes() // (2 * self.size) if copy_memory is None else copy_memory
        self.throttle = _Throttle(bandwidth)
        self.snapshot = self.store.snapshot = Snapshot(self.tiles, copies, subject.stamp(), self.of_ranks)
        self.order = iter([name for name in subject.update_order() if name in self.tiles])
        # All threads are started here, since the interpreter cannot start threads while it shuts down.
        workers = [threading.Thread(target=self._work, name="megacompile checkpoint") for _ in range(_THREADS)]
        last = threading.Thread(target=self._complete, args=(workers,), name="megacompile checkpoint")
        self.threads = [*workers, last]
        try:
            for thread in self.threads:
                thread.start()
        except BaseException as error:  # too many threads, or Ctrl-C: no update may wait for a writer that does not run
            self._fail(error)
            self.store.snapshot = None
            self._discard()
            if self.ranks is not None:
                self.ranks.failed(error)  # they would wait for this rank's share
            raise

    def _prepare(self, subject: Subject, directory: Path, extra: Any) -> None:
        """Fixes everything that is not in tiles, and makes the folder."""
        groups = subject.settled_groups()
        streamed = subject.streamed
        self.rest = {name: tensor.detach().cpu().clone() for name, tensor in subject.rest().items()}
        self.steps = subject.steps()
        self.without_state = {name for _, names in groups for name in names} - self.steps.keys()
        self.about: dict[str, Any] = dict(
            step=max(self.steps.values(), default=0), model=type(streamed.model).__name__,
            groups=[names for _, names in groups],
            options=[encode(options, "an option") for options, _ in groups], scheduler=subject.scheduler_state(),
            extra=encode(extra, "extra"), made_with=dict(megacompile=__version__, torch=torch.__version__))
        self.random = capture(streamed.backend.device)
        among, here = (1, 0) if (division := self.store.division) is None else (len(division.hosts), division.here)
        self.numbers = {name: number * among + here for number, name in enumerate(self.store.tiles)}
        self.files_of_tiles = among * len(self.numbers)
        self.tensors: dict[str, Saved] = {}
        self.files: dict[str, Written] = {}
        if self.rank == 0:
            try:
                self.folder = Incomplete(directory)
            except OSError as error:
                raise CheckpointError(f"nothing can be saved in {directory} ({_reason(error)}): give a writable "
                                      "folder") from error

    def _join(self, rank_group: RankGroup) -> None:
        """Agrees with the other ranks on what each of them writes, and where."""
        # As they are now: a model that is closed meanwhile empties its own.
        tiles, randoms = {name: replace(tile) for name, tile in self.store.tiles.items()}, [self.random]
        self.of_ranks: ReadTiles | None = None
        if self.ranks is None:
            assert self.folder is not None
            self.tiles, self.path = tiles, self.folder.path
        else:
            sizes = {name: state_bytes(tile) for name, tile in tiles.items()}
            mine = share(sizes, self.seat, self.size) if self.ranks.hosts.copy == 0 else []
            self.tiles = {name: tiles[name] for name in mine}
            folder = None if self.folder is None else str(self.folder.path.absolute())
            found = self.ranks.agree("save", (folder, self.random))
            self.path, randoms = Path(found[0][0]), [random for _, random in found]
            with rank_group.failing():
                memory = self.ranks.shared_memory({"read": len(tiles)}, "save")
                self.of_ranks = ReadTiles(memory.piece("read"), list(tiles), self.ranks.check)
                if self.ranks.hosts.copy > 0:
                    self.of_ranks.mark(*tiles)  # no rank of this host reads any
                memory.close()
                self.group = self.ranks.new_group()
        self.about["random"] = encode(of_ranks(randoms), "random")

    def _discard(self) -> None:
        if self.folder is not None:
            self.folder.discard()

    # ---------------------------------------------------------------- in the threads
    def _work(self) -> None:
        try:
            buffer = np.empty(_CHUNK_BYTES, np.uint8)
            while self.error is None and (tile := next(self.order, None)) is not None:
                self._write_tile(tile, buffer)
        except BaseException as error:  # reported to the caller; and no update may wait forever
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error  # keep the first error; later ones are its consequences
        self.snapshot.abandon()

    def _write_tile(self, name: str, buffer: np.ndarray[Any, Any]) -> None:
        file, tile = f"tensors-{self.numbers[name]:05d}.safetensors", self.tiles[name]
        parts = [piece for piece in sorted(pieces(tile), key=lambda piece: -piece.dtype.itemsize)
                 if not moments([piece.name]) or piece.parameter.name not in self.without_state]
        for position, s in enumerate(tile.layout.slices):
            own = [p for p in parts if p.parameter is s]
            if own:
                self.tensors[s.name] = Saved(tile.layout.dtype, s.shape, s.trainable, file,
                                             tuple(dict.fromkeys(p.name for p in own)), self.steps.get(s.name),
                                             tile.layout.state_of(position).format.name,
                                             tuple(Run(file, *run) for run in dict.fromkeys(p.run for p in own) if run))
        entries = [self.tensors[p.parameter.name].entry(p.parameter.name, p.name, Run(file, *p.run) if p.run else None)
                   for p in parts]
        self.files[file] = write_file(self.path / file, self._chunks(name, entries, parts, buffer))

    def _chunks(self, tile: str, entries: list[Entry], parts: list[Piece], buffer: np.ndarray[Any, Any]) -> Iterator[Any]:
        yield header(entries)
        for entry, piece in zip(entries, parts, strict=True):
            position = 0
            while position < entry.bytes:
                self.throttle.wait(self.snapshot)
                count = self.snapshot.read(tile, piece, position, buffer)
                if count == 0:
                    raise RuntimeError("the save was abandoned")  # another thread has the reason
                yield buffer[:count]
                position += count
                self.throttle.add(count)
        self.snapshot.finish(tile)  # before the data is on disk, since an update may be waiting

    def _complete(self, workers: list[threading.Thread]) -> None:
        for worker in workers:
            worker.join()
        try:
            self._publish()
        except BaseException as error:  # as above
            self.error = self.error or error
        finally:
            if self.store.snapshot is self.snapshot:
                self.store.snapshot = None
            if self.error is not None:
                self._discard()
                with contextlib.suppress(RankError):  # which `error` is already about
                    self._exchanged(None)  # no rank reports the failure before the folder is gone
            if self.ranks is not None:
                self.ranks.end_group(self.group)

    def _publish(self) -> None:
        """Makes the folder a checkpoint if all ranks have written their shares. Sets `result`, or `error`."""
        if self.rank == 0:
            self._unless_failed(self._write_rest)
        written = ({name: saved.values() for name, saved in self.tensors.items()},
                   {name: astuple(file) for name, file in self.files.items()})
        for tensors, files in self._exchanged(written):
            self.tensors |= {name: Saved.of(fields).joined(self.tensors.get(name)) for name, fields in tensors.items()}
            self.files |= {name: Written(*fields) for name, fields in files.items()}
        if self.ranks is not None:  # all have read their tiles
            self._unless_failed(self.snapshot.check_of_others)
            self._exchanged(None)
        if self.rank == 0:
            self._unless_failed(self._rename)
        folder, *_ = self._exchanged(None if self.result is None else str(self.result))
        self.result = None if folder is None else Path(folder)

    def _unless_failed(self, do: Callable[[], None]) -> None:
        try:
            if self.error is None:
                do()
        except BaseException as error:  # as above
            self.error = error

    def _exchanged(self, value: Any) -> list[Any]:
        """The values of all ranks. If one rank has failed, raises on all of them."""
        if self.ranks is None:
            return [value]
        failure = None if self.error is None else (_reason(self.error), _remedy(self.error))
        found = self.ranks.exchange((failure, value), self.group, patient=True)
        failed = next(((rank, failure) for rank, (failure, _) in enumerate(found) if failure is not None), None)
        if failed is not None and not isinstance(self.error, _OnRankError):
            rank, (reason, remedy) = failed
            self.error = _OnRankError(f"rank {rank}: {reason}", remedy, self.error if rank == self.rank else None)
        return [value for _, value in found]

    def _rename(self) -> None:
        assert self.folder is not None
        Manifest(tensors=dict(sorted(self.tensors.items())), files=dict(sorted(self.files.items())),
                 **self.about).write(self.folder.path)
        self.result = self.folder.publish(self.about["step"], self.keep)

    def _write_rest(self) -> None:
        """Writes buffers and parameters that no layer reads. They are small and were copied when the save began."""
        file = f"tensors-{self.files_of_tiles:05d}.safetensors"
        entries, chunks = [], []
        for name, tensor in sorted(self.rest.items(), key=lambda item: -item[1].dtype.itemsize):
            self.tensors[name] = Saved(tensor.dtype, tuple(tensor.shape), False, file)
            entries.append(self.tensors[name].entry(name, "weight"))
            chunks.append(tensor.contiguous().flatten().view(torch.uint8).numpy())
        self.files[file] = write_file(self.path / file, [header(entries), *chunks])


class _Throttle:
    """Limits the total rate of all writing threads."""

    def __init__(self, rate: int | None) -> None:
        self.rate, self.begun, self.bytes = rate, time.monotonic(), 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.bytes += count

    def wait(self, snapshot: Snapshot) -> None:
        """Sleeps until the average rate is below the limit. Does not sleep while an update waits."""
        if self.rate is not None and (ahead := self.bytes / self.rate - (time.monotonic() - self.begun)) > 0:
            snapshot.pause(ahead)
