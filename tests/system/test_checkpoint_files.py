"""Files of a checkpoint: complete or absent, whatever happens during the write; refused if they were changed.

    pytest tests/system/test_checkpoint_files.py --kill-moments 100
"""
from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import kill_at_random_moments
from processes import fresh_process
from resumable import Run, load
from safetensors import safe_open
from tiny_models import same_bits

from megacompile import CheckpointWriter, latest_checkpoint, save_checkpoint
from megacompile.checkpoint import files, folders, manifest
from megacompile.checkpoint.folders import Incomplete
from megacompile.errors import CheckpointError


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)


# ---------------------------------------------------------------- killed, and out of disk

def test_no_complete_checkpoint_is_lost_when_training_is_killed(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """In a process that has run nothing else, since it forks: threads and other models' memory do not survive that."""
    with fresh_process() as fresh:
        fresh.submit(kill_at_random_moments, tmp_path, int(pytestconfig.getoption("--kill-moments"))).result()


@pytest.fixture(params=["tmpfs", "patched"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path,
               monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Any, Any]]:
    """A folder, what fills its disk, and what makes room again."""
    if request.param == "patched":
        def write(descriptor: int, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        yield tmp_path, lambda: monkeypatch.setattr(files.os, "write", write), monkeypatch.undo
        return
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("may not mount a file system here")

    def fill() -> None:
        room = os.statvfs(tmp_path)
        (tmp_path / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - 16384))

    yield tmp_path, fill, (tmp_path / "filler").unlink
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_costs_one_save_and_nothing_else(small_disk: Any, run: Run) -> None:
    directory, fill, make_room = small_disk
    first = save_checkpoint(directory, run.model, run.optimizer, scheduler=run.scheduler)
    fill()
    writer = CheckpointWriter(directory, run.model, run.optimizer, scheduler=run.scheduler, keep=1)
    writer.save()
    run.steps(2)
    with pytest.raises(CheckpointError, match=r"no checkpoint was saved in .*No space left.*free some disk space"):
        writer.save()
    assert latest_checkpoint(directory) == first and not list(directory.glob(".incomplete-*"))
    writer.close()  # told once
    make_room()
    run.steps(1)
    expected = run.masters()
    writer.save()
    writer.close()
    load(directory, run)
    assert same_bits(run.masters(), expected)
    assert [p.name for p in directory.iterdir()] == ["000002-step-5"]


# ---------------------------------------------------------------- damaged, foreign, hostile
SHARD = "tensors-00001.safetensors"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a manifest's values and puts the right checksum there: a forger's work, not an accident."""
    body = json.loads((folder / manifest.NAME).read_text())
    del body["crc32"]
    change(body)
    (folder / manifest.NAME).write_text(json.dumps({"crc32": manifest._checksum(body), **body}))


def replace_file(folder: Path, data: bytes) -> None:
    path = folder / SHARD
    path.unlink()
    written = files.write_file(path, [data])
    rewrite(folder, lambda body: body["files"].update({path.name: {"bytes": written.bytes, "crc32": written.crc32}}))


def link_elsewhere(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):  # names of sockets are short
        made.bind(path.name)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


class Trap:
    """Fails the test if it is unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (lambda f: flip(f / "tensors-00002.safetensors"), "tensors-00002.safetensors is damaged: its checksum"),
    "truncated": (lambda f: os.truncate(f / "tensors-00000.safetensors", 99), r"tensors-00000.* it has 99 bytes, but \d+ were"),
    "missing": (lambda f: (f / "tensors-00003.safetensors").unlink(), "tensors-00003.safetensors cannot be read .No such"),
    "a link": (lambda f: link_elsewhere(f / SHARD), "tensors-00001.safetensors cannot be read .it is a link, which is not"),
    "a FIFO": (lambda f: fifo(f / SHARD), "tensors-00001.safetensors cannot be read .it is a FIFO, not a regular file"),
    "a socket": (lambda f: a_socket(f / SHARD), "tensors-00001.safetensors cannot be read .it is a socket, not a regular"),
    "a folder": (lambda f: a_folder(f / SHARD), "tensors-00001.safetensors cannot be read .it is a folder, not a regular"),
    "a link as manifest": (lambda f: link_elsewhere(f / manifest.NAME), "manifest.json cannot be read .it is a link, which is"),
    "a FIFO as manifest": (lambda f: fifo(f / manifest.NAME), "manifest.json cannot be read .it is a FIFO"),
    "a socket as manifest": (lambda f: a_socket(f / manifest.NAME), "manifest.json cannot be read .it is a socket"),
    "a folder as manifest": (lambda f: a_folder(f / manifest.NAME), "manifest.json cannot be read .it is a folder"),
    "a flipped bit of the manifest": (lambda f: rewrite_raw(f, '"step": 2', '"step": 3'), "is damaged: its check"),
    "half a manifest": (lambda f: os.truncate(f / manifest.NAME, 500), "manifest.json is damaged: it is not JSON"),
    "no manifest": (lambda f: (f / manifest.NAME).unlink(), "has no complete checkpoint"),
    "deep values": (lambda f: rewrite_raw(f, '"extra": null', f'"extra": {"[" * 400}{"]" * 400}', crc32=True),
                    "manifest.json (contains an invalid value|is not a valid manifest|is damaged)"),
    "nesting": (lambda f: (f / manifest.NAME).write_text("[" * 100000), "manifest.json is damaged: it is not JSON"),
    "another format": (lambda f: (f / manifest.NAME).write_text('{"weights": 1}'),
                       "not a manifest of a megacompile checkpoint"),
    "a later version": (lambda f: rewrite(f, lambda b: b.update(version=3)), "version 3 of the format, but .* reads 1 and 2"),
    "a missing field": (lambda f: rewrite(f, lambda b: b.pop("files")), "is not a valid manifest"),
    "a path upwards": (lambda f: rewrite(f, lambda b: b["files"].update({"../../x": b["files"].popitem()[1]})),
                       "is '../../x', but must be the name of a file in a checkpoint"),
    "a file not listed": (lambda f: rewrite(f, lambda b: b["files"].pop("tensors-00002.safetensors")), "does not list tens"),
    "a pickle": (lambda f: replace_file(f, pickle.dumps(Trap())), "tensors-00001.safetensors is damaged or truncated"),
    "other tensors": (lambda f: replace_file(f, (f / "tensors-00002.safetensors").read_bytes()), "but its manifest says"),
    "a value of no kind": (lambda f: rewrite(f, lambda b: b.update(extra={"$object": "os.system"})), "unknown kind of value"),
    "another model": (lambda f: rewrite(f, lambda b: b["tensors"].update(more=b["tensors"].pop("head.bias"))),
                      r"head.bias is absent in the checkpoint of a Decoder, but bfloat16 \[64\] in this Decoder"),
    "another shape": (lambda f: rewrite(f, lambda b: b["tensors"]["head.bias"].update(shape=[8, 8])), r"bfloat16 \[8, 8\]"),
    "another dtype": (lambda f: rewrite(f, lambda b: b["tensors"]["head.bias"].update(dtype="float32")), r"float32 \[64\]"),
    "a frozen parameter": (lambda f: rewrite(f, lambda b: b["tensors"]["head.bias"].update(trained=False)), "not trained"),
    "another buffer": (lambda f: rewrite(f, lambda b: b["tensors"].pop("scale")), "scale is absent in the checkpoint"),
    "other groups": (lambda f: rewrite(f, lambda b: b["groups"].reverse()), r"its parameter groups have \[5, 7\]|groups have"),
    "another scheduler": (lambda f: rewrite(f, lambda b: b["scheduler"].update({"class": "StepLR"})), "saved with StepLR"),
    "no scheduler": (lambda f: rewrite(f, lambda b: b.update(scheduler=None)), "no scheduler, but MultiStepLR was passed"),
}


def rewrite_raw(folder: Path, old: str, new: str, crc32: bool = False) -> None:
    path = folder / manifest.NAME
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    if crc32:
        body = json.loads(path.read_text())
        body.pop("crc32")
        path.write_text(json.dumps({"crc32": manifest._checksum(body), **body}))


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_or_foreign_checkpoint_is_refused_and_nothing_changes(kind: str, run: Run, saved: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(saved)
    run.steps(1)
    before = run.masters(), run.moments(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=message) as caught:
        load(saved, run)
    assert str(saved) in str(caught.value) or kind == "a value of no kind"
    assert same_bits(run.masters(), before[0]) and same_bits(run.moments(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("value", ["list", "tuple", "dict", "keys"])
def test_what_is_nested_too_deeply_to_be_read_back_is_refused_when_it_is_saved(value: str, run: Run, tmp_path: Path) -> None:
    wrap: dict[str, Callable[[Any], Any]] = {"list": lambda v: [v], "tuple": lambda v: (v,), "dict": lambda v: {"k": v},
                                             "keys": lambda v: {("k", 1): v}}
    deep: Any = ()
    for _ in range(40):
        deep = wrap[value](deep)
    saved = save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler, extra=deep)
    assert load(saved, run) == deep
    for _ in range(100_000):
        deep = wrap["list"](deep)
    with pytest.raises(CheckpointError, match=r"extra.* is nested deeper than 100 levels, which .*: flatten it"):
        save_checkpoint(tmp_path, run.model, run.optimizer, extra=deep)
    assert list(tmp_path.iterdir()) == [saved]


def test_the_latest_checkpoint_is_the_newest_with_a_whole_manifest(run: Run, saved: Path) -> None:
    directory = saved.parent
    newer = save_checkpoint(directory, run.model, run.optimizer)
    assert (latest_checkpoint(directory), newer.name) == (newer, "000002-step-2")
    flip(newer / manifest.NAME)
    (directory / "000009-step-9").mkdir()
    (directory / "notes").write_text("mine")
    os.mkfifo(directory / "000009-step-9" / manifest.NAME)
    assert latest_checkpoint(directory) == saved
    assert latest_checkpoint(directory / "nowhere") is None


def test_only_complete_checkpoints_are_counted_and_only_they_are_removed(run: Run, saved: Path) -> None:
    directory = saved.parent
    damaged = save_checkpoint(directory, run.model, run.optimizer)
    flip(damaged / manifest.NAME)
    (directory / "000001-step-1.mine").mkdir()
    for _ in range(3):
        save_checkpoint(directory, run.model, run.optimizer, keep=2)
    assert sorted(p.name for p in directory.iterdir()) == [
        "000001-step-1.mine", "000002-step-2", "000004-step-2", "000005-step-2"]


def test_a_damaged_newest_checkpoint_is_refused_with_the_one_before_it(run: Run, saved: Path) -> None:
    directory = saved.parent
    newest = save_checkpoint(directory, run.model, run.optimizer, scheduler=run.scheduler)
    flip(newest / "tensors-00001.safetensors")
    with pytest.raises(CheckpointError, match=f"use another checkpoint, such as the one before it: {re.escape(str(saved))}$"):
        load(directory, run)
    load(saved, run)
    flip(saved / "tensors-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"use another checkpoint$"):
        load(saved, run)


def test_what_a_living_writer_has_begun_is_left_alone(tmp_path: Path) -> None:
    mine = Incomplete(tmp_path)
    (tmp_path / ".incomplete-dead").mkdir()
    folders.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.discard()
    assert list(tmp_path.iterdir()) == []


def test_tensors_can_be_read_by_name_with_the_library(run: Run, saved: Path) -> None:
    body = manifest.Manifest.read(saved)
    for name, parameter in run.model.named_parameters():
        with safe_open(saved / body.tensors[name].file, framework="pt") as file:
            assert torch.equal(file.get_tensor(f"weight:{name}"), parameter)
            if not run.optimizer.state[parameter]:  # frozen, or not read
                continue
            assert torch.equal(file.get_tensor(f"exp_avg_sq:{name}"), run.optimizer.state[parameter]["exp_avg_sq"])
            assert file.get_tensor(f"remainder:{name}").dtype == torch.int16


@pytest.mark.parametrize("value", [
    None, True, -1, 0.1, float("inf"), "text", b"\x00\xff", [1, [2]], (1, (2.5,)), {"a": (1,)}, {1: "b", (2, 3): None},
    {"$tuple": 1}, Counter({3: 2}), 2**80], ids=repr)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = manifest.decode(json.loads(json.dumps(manifest.encode(value, "it"))))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("tensor", [
    torch.tensor(0.1), torch.full((2, 3), 0.3, dtype=torch.bfloat16), torch.arange(4), torch.empty(0, 3)], ids=str)
def test_tensors_among_values_come_back_as_they_were(tensor: torch.Tensor) -> None:
    back = manifest.decode(json.loads(json.dumps(manifest.encode([tensor], "it"))))[0]
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and torch.equal(back, tensor)
