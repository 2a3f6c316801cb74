"""Processes that are killed: at each of their file operations, or again and again at any moment while they train."""
from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine
import torch
from resumable import Run, Streamed, load

from megacompile import CheckpointWriter, latest_checkpoint, save_checkpoint
from megacompile.runtime.reference import ReferenceExecutor


def killed_at(number: int, save: Callable[[], Any], interrupt: type[BaseException] | None = None) -> bool:
    """Whether a process that saves was killed at its `number`th file operation, or `interrupt` was raised there; False: it has
    fewer."""
    child = os.fork()
    if child == 0:
        left = [number]

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" or event.startswith(("os.", "shutil.")):
                left[0] -= 1
                if left[0] == -1 and interrupt is not None:
                    raise interrupt
                if left[0] < 0 and interrupt is None:
                    os._exit(9)

        try:
            sys.addaudithook(count)
            save()
        except BaseException as error:
            os._exit(9 if interrupt is not None and isinstance(error, interrupt) else 1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), "the save itself failed"
    return status == 9


def kill_at_random_moments(directory: Path, moments: int, disk: Path | None = None) -> None:
    """`disk`: a folder for moments. Raises AssertionError if a kill has lost a complete checkpoint, or left something
    that the next save, or nobody, removes."""
    del mmap.MADV_DONTFORK  # a forked process has the model's tiles too
    model, complete, left = Streamed(**({} if disk is None else {"disk": disk, "disk_state": "all"})).fresh(), 0, 0
    Run(model).steps(1)  # programs are compiled
    model.megacompile.synchronize()
    assert disk is None or model.megacompile.stats["disk_bytes_written"] > 0
    for seed in range(moments):
        reader, progress = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                train_until_killed(model, directory, progress)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(progress)
        told = os.read(reader, 6)
        time.sleep(random.Random(seed).random() * 0.2)
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "it ended before it was killed"
        while more := os.read(reader, 6):
            told = more
        os.close(reader)
        latest = latest_checkpoint(directory)
        assert latest is not None and int(latest.name[:6]) >= int(told) > complete
        complete = int(told)
        left += len(list(directory.glob(".incomplete-*")))
        run = Run(model)
        steps = load(directory, run)
        assert latest.name == f"{latest.name[:6]}-step-{steps}" and run.scheduler.last_epoch == steps
    assert disk is None or list(disk.iterdir()) == [], "a killed process has left its file"
    assert moments < 50 or left > 0, "no kill came while a checkpoint was written"
    save_checkpoint(directory, model, run.optimizer, keep=1)
    assert len(list(directory.iterdir())) == 1, "dead writers have left something"


def train_until_killed(model: Any, directory: Path, progress: int) -> None:
    """In a forked process: goes on from the latest checkpoint, saves beside every step, and tells of each complete save. A
    forked process has no lanes: the reference executor has its own thread alone."""
    torch.set_num_threads(1)
    engine.runner(model).executor = ReferenceExecutor(engine.backend(model))
    run = Run(model)
    if latest_checkpoint(directory) is not None:
        load(directory, run)
    with CheckpointWriter(directory, model, run.optimizer, scheduler=run.scheduler, keep=2) as writer:
        while True:
            writer.save(extra=run.scheduler.last_epoch)
            run.steps(1)
            path = writer.wait()
            assert path is not None
            os.write(progress, path.name[:6].encode())
