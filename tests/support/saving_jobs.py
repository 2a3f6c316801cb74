"""What two ranks do while they save: `python saving_jobs.py FOLDER JOB...` in each rank, which writes what it has found."""
from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import torch
from rank_models import RANK, adamw, rows, steps, streamed
from torch import Tensor

import megacompile
from megacompile.checkpoint import writer as writing
from megacompile.errors import CheckpointError, MegacompileError, RankError, UnsupportedError
from megacompile.runtime.memory.snapshot import Snapshot


def everything(model: Any, optimizer: megacompile.AdamW) -> dict[str, Any]:
    """Copies of the weights and of the optimizer's state, with remainders."""
    return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]})


def alike(one: Any, other: Any) -> bool:
    """Whether two values have the same bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def message(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The first line of the error of this kind that a call must raise; "" if it raises none."""
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def until(path: Path) -> None:
    """Waits until a file is there, which another rank makes."""
    limit = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < limit, f"{path} never comes"
        time.sleep(0.001)


@contextlib.contextmanager
def reads_after(first: Callable[[], None]) -> Iterator[None]:
    """Rank 1's writer calls `first` before each of its reads."""
    read = Snapshot.read

    def later(self: Snapshot, *args: Any) -> int:
        first()
        return read(self, *args)

    with mock.patch.object(Snapshot, "read", later) if RANK == 1 else contextlib.nullcontext():
        yield


def slow_reads(seconds: float) -> contextlib.AbstractContextManager[None]:
    return reads_after(partial(time.sleep, seconds))


def beside(folder: Path) -> dict[str, Any]:
    """Trains while rank 1's writer is slow, with and without memory for copies, in the loop and by whole steps; loads what was
    saved."""
    found: dict[str, Any] = {}
    model = streamed(bf16=True)
    optimizer = adamw(model)
    steps(model, optimizer, range(2))
    for copies, whole in ((0, False), (None, True)):
        with slow_reads(0.03), megacompile.CheckpointWriter(folder / "beside", model, optimizer, copy_memory=copies) as writer:
            saved = everything(model, optimizer)
            writer.save()
            losses = steps(model, optimizer, range(2, 5), whole)
        trained = everything(model, optimizer)
        megacompile.load_checkpoint(folder / "beside", model, optimizer)
        found[f"copies {copies}: restored"] = alike(everything(model, optimizer), saved)
        found[f"copies {copies}: same bits"] = (steps(model, optimizer, range(2, 5), whole) == losses
                                                and alike(everything(model, optimizer), trained))
    return found | failures(folder, model, optimizer) | changes(folder, model, optimizer)


def failures(folder: Path, model: Any, optimizer: megacompile.AdamW) -> dict[str, Any]:
    """One rank cannot write or read."""
    found: dict[str, Any] = {}
    writer = megacompile.CheckpointWriter(folder / "failing", model, optimizer)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(writing, "write_file", full) if RANK == 1 else contextlib.nullcontext():
        writer.save()
        steps(model, optimizer, range(5, 7))
        found["full"] = message(CheckpointError, writer.wait)
    found["full: left"] = sorted(os.listdir(folder / "failing"))
    touched = folder / "touched"
    with reads_after(partial(until, touched)):
        writer.save()
        if RANK == 0:
            own = set(engine.store(model).snapshot)
            of_rank_1 = next(name for name, (tile, _) in engine.tiling(model).position.items() if tile not in own)
            with torch.no_grad():
                engine.of(model).parameters[of_rank_1].add_(1)
            touched.touch()
        found["touched"] = message(CheckpointError, writer.wait)
    megacompile.load_checkpoint(folder / "beside", model, optimizer)
    writer.save({"done": 7})
    path = writer.wait()
    assert path is not None
    before, damaged = everything(model, optimizer), folder / "damaged"
    if RANK == 0:
        damaged.mkdir()
        for file in path.iterdir():
            data = bytearray(file.read_bytes())
            if file.name == "tensors-00001.safetensors":
                data[-1] ^= 1
            (damaged / file.name).write_bytes(data)
    torch.distributed.barrier()
    found["damaged"] = message(CheckpointError, lambda: megacompile.load_checkpoint(damaged, model, optimizer))
    found["damaged: unchanged"] = alike(everything(model, optimizer), before)
    return found


def changes(folder: Path, model: Any, optimizer: megacompile.AdamW) -> dict[str, Any]:
    """What ranks change that they share, or in one another's absence."""
    found: dict[str, Any] = {}
    weight = model.layers[1][1].weight

    def halve() -> None:
        weight.grad.data.mul_(0.5)  # not tracked

    def replace() -> None:
        weight.grad = weight.grad.clone()

    for name, change in (("halved", halve), ("replaced", replace)):
        model(**rows(9)).backward()
        change()
        found[name] = message(UnsupportedError, optimizer.step)
        optimizer.zero_grad()
        torch.distributed.barrier()
    model(**rows(9)).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=False)
    model(**rows(9)).backward()
    found["zeros"] = alike({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)
    model.zero_grad()
    optimizer.param_groups[0]["lr"] *= 1 + RANK
    for how in ("loop", "whole step"):
        found[f"other options, {how}"] = message(RankError, partial(steps, model, optimizer, (9,), how == "whole step"))
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 1e-2
    model(**rows(9)).backward()
    if RANK == 1:
        weight.grad = None
    found["other parameters"] = message(RankError, optimizer.step)
    optimizer.zero_grad()
    steps(model, optimizer, (9,))
    writer = megacompile.CheckpointWriter(folder / "closed", model, optimizer)
    with slow_reads(0.05):
        writer.save()
        model.megacompile.close()
        found["closed"] = message(MegacompileError, writer.wait) or [path.name for path in (folder / "closed").iterdir()]
    return found


def interrupted(how: str, folder: Path) -> dict[str, Any]:
    """While both ranks write a checkpoint, rank 1 fails in a step, or ends."""
    found: dict[str, Any] = {}
    model = streamed()
    optimizer = adamw(model)
    steps(model, optimizer, range(2))
    looked, over = [folder / f"{how}: rank {rank} has looked" for rank in (0, 1)], folder / f"{how}: over"
    with reads_after(partial(until, over)):
        writer = megacompile.CheckpointWriter(folder / how, model, optimizer)
        writer.save()
        steps(model, optimizer, range(2, 3))
        found["saving"] = writer.saving
        looked[RANK].touch()
        until(looked[1 - RANK])
        if RANK == 1 and how == "ends":
            os._exit(0)
        if RANK == 1:
            def probe(_: Any) -> None:
                raise RuntimeError("power cut")

            engine.probe(model, probe)
        found["step"] = message(MegacompileError, lambda: steps(model, optimizer, range(3, 5)))
        if RANK == 1:
            over.touch()
        found["save"] = message(MegacompileError, writer.wait)
    found["left"] = sorted(os.listdir(folder / how))
    return found


JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "beside": beside, "fails": partial(interrupted, "fails"), "ends": partial(interrupted, "ends")}


def main() -> None:
    found = {name: JOBS[name](Path(sys.argv[1])) for name in sys.argv[2:]}
    (Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
