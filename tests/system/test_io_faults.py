"""I/O failures at each system call in turn: one of our errors or none, and nothing is lost."""
from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resumable import Run, Streamed, load
from small_checkpoints import USERS, names, read, shards, write
from tiny_models import same_bits

from megacompile import latest_checkpoint, save_checkpoint
from megacompile.errors import MegacompileError
from megacompile.finetuning import train_command as runs
from megacompile.finetuning.reports import Reports
from megacompile.finetuning.settings import Settings
from megacompile.tools.options import Knobs, Lora
from megacompile.tools.recipe import Kind, Recipe
from megacompile.weights.saving import recover, replacing

CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "link", "symlink", "unlink", "rmdir", "stat", "fstat",
         "listdir", "scandir", "readlink")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE)


class Fault:
    """While entered, one of the calls to the system fails. State: how many were made, and whether one has failed."""

    def __init__(self, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.made, self.failed, self._monkeypatch = at, 0, False, monkeypatch

    def __enter__(self) -> Fault:
        for name in CALLS:
            self._monkeypatch.setattr(os, name, self._counting(getattr(os, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._monkeypatch.undo()

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.made += 1
            if self.made == self.at + 1:
                self.failed = True
                code = ERRORS[self.at % len(ERRORS)]
                raise OSError(code, os.strerror(code))
            return call(*arguments, **options)
        return counted


def each_fault(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """After each fault: what was raised, or None. Until the work needs fewer calls."""
    for number in range(1000):
        said = None
        with Fault(number, monkeypatch) as fault:
            try:
                work()
            except MegacompileError as error:
                said = str(error)
        if not fault.failed:
            assert number > 10 and said is None
            return
        yield said
    raise AssertionError("there is no end")


def test_a_checkpoint_is_saved_or_not_and_those_before_it_stay(
        resumable: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(resumable.fresh())
    run.steps(1)
    newest = save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    expected, refused = run.masters(), 0
    for said in each_fault(
            lambda: save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, keep=1), monkeypatch):
        latest = latest_checkpoint(tmp_path)
        assert latest is not None and (latest > newest or said is not None)
        refused, newest = refused + (said is not None), latest
        assert load(tmp_path, run) is None and same_bits(run.masters(), expected)
        for older in tmp_path.iterdir():  # what is left to remove would grow with each fault in removing it
            if older != latest:
                shutil.rmtree(older)
    assert refused > 20
    save_checkpoint(tmp_path, run.model, run.optimizer, keep=1)
    assert len(list(tmp_path.iterdir())) == 1, "something was left"


def test_a_checkpoint_that_cannot_be_read_changes_nothing(
        resumable: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(resumable.fresh())
    run.steps(1)
    save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    then = run.masters()
    with torch.no_grad():
        run.model.head.weight.add_(1)
    now, refused = run.masters(), 0
    for said in each_fault(lambda: load(tmp_path, run), monkeypatch):
        assert same_bits(run.masters(), now) if said is not None else same_bits(run.masters(), then)
        refused += said is not None
        if said is None:
            with torch.no_grad():
                run.model.head.weight.add_(1)
    assert refused > 10


def test_a_model_is_saved_or_not_and_the_user_s_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    (target / "runs").mkdir(parents=True)
    (target / "runs/log").write_text("1")
    (target / "tokenizer.json").write_text("{}")
    (target / "link").symlink_to("tokenizer.json")
    write(target, "old", 3)

    def save() -> None:
        with replacing(target) as folder:
            write(folder, "new", 3)

    refused = 0
    for said in each_fault(save, monkeypatch):
        assert read(target) == ("new" if said is None else "old") or said is not None
        assert (target / "runs/log").read_text() == "1"
        recover(target)
        assert names(target) == shards(3) | USERS and not (target / "runs").is_symlink()
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        refused += said is not None
        write(target, "old", 3)
    assert refused > 20


def test_a_run_goes_on_or_not_and_its_log_and_settings_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, settings = tmp_path / "log.jsonl", tmp_path / "settings.yaml"
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 10)]
    log.write_text("".join(lines))
    asked = Settings(output=tmp_path)
    written = settings, "m", ["d"], asked, Recipe.of(asked, Kind.FULL, 512)[0], Lora().resolved(), Knobs()
    runs._write_settings(*written)
    before, refused = settings.read_text(), 0

    def start() -> None:
        with Reports(tmp_path, 5):
            runs._write_settings(*written)

    for said in each_fault(start, monkeypatch):
        assert log.read_text() in ("".join(lines), "".join(lines[:5])) and settings.read_text() == before
        refused += said is not None
        log.write_text("".join(lines))
    assert refused > 5 and {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "settings.yaml"}
