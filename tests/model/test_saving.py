"""Saving: the folder has a whole checkpoint at every moment, the old one or the new."""
from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from killed import killed_at
from safetensors.torch import load_file
from small_checkpoints import USERS, names, read, shards, write
from tiny_models import same_bits, weights

from megacompile.errors import CheckpointError
from megacompile.weights import saving
from megacompile.weights.saving import recover, replacing


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of three shards, beside files and a folder of the user's."""
    folder = tmp_path / "out"
    folder.mkdir()
    write(folder, "old", 3)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "link").symlink_to("tokenizer.json")
    (folder / "runs").mkdir()
    (folder / "runs/log").write_text("1")
    return folder


def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_change_places", lambda *_: False)


def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)


WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "folders change places": lambda _: None, "file by file": no_exchange, "from inside": inside}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_new_checkpoint_takes_the_place_of_the_old_and_what_is_the_users_stays(
        old: Path, way: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    old.chmod(0o750)
    with replacing(old) as folder:
        write(folder, "new", count)
    assert read(old) == "new" and names(old) == shards(count) | USERS
    assert (old / "link").is_symlink() and stat.S_IMODE(old.stat().st_mode) == 0o750
    assert [path.name for path in old.parent.iterdir()] == ["out"], "something was left"


def test_a_single_file_takes_the_place_of_shards_and_their_index(old: Path) -> None:
    with replacing(old) as folder:
        (folder / "model.safetensors").write_text("new")
    assert names(old) == {"model.safetensors", "config.json"} | USERS


def test_memory_in_a_file_is_on_the_file_system_of_the_folder_and_needs_its_blocks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = saving.memory_in_a_file(tmp_path / "new" / "model", 1 << 13)
    memory[-1] = 7
    assert memory.tolist() == [0] * 8191 + [7] and not any((tmp_path / "new").iterdir())
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"No space left on device.*: free space, or give another folder"):
        saving.memory_in_a_file(tmp_path / "model", 1 << 13)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk full", "Ctrl-C"])
def test_a_save_that_fails_leaves_the_old_checkpoint(
        old: Path, way: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)

    def save() -> None:
        with replacing(old) as folder:
            write(folder, "new", 3)
            raise error

    with pytest.raises((CheckpointError, KeyboardInterrupt)) as raised:
        save()
    if isinstance(error, OSError):
        assert re.search(r"could not be saved .*No space left.* and its earlier contents are unchanged", str(raised.value))
    assert read(old) == "old" and names(old) == shards(3) | USERS
    assert [path.name for path in old.parent.iterdir()] == ["out"]


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("way", ["killed", "interrupted"])
def test_a_process_stopped_at_any_file_operation_leaves_a_whole_checkpoint_and_the_user_s_folders(old: Path, way: str) -> None:
    """Each can be reached by its name at once, and is a folder again after the next save."""
    def save() -> None:
        with replacing(old) as folder:
            write(folder, "new", 3)

    (old / "runs 2").mkdir()
    (old / "runs 2/log").write_text("2")
    found, linked, number = [], 0, 0
    while killed_at(number, save, KeyboardInterrupt if way == "interrupted" else None):
        found.append(read(old))
        assert names(old) >= USERS - {"runs/log"}
        assert [(old / name / "log").read_text() for name in ("runs", "runs 2")] == ["1", "2"]
        inside = sum((old / name).is_symlink() for name in ("runs", "runs 2"))
        assert inside == 0 or way == "killed", "an interrupted save puts back what it has moved"
        linked += inside
        with replacing(old) as folder:
            write(folder, "old", 3)
        assert read(old) == "old" and names(old) == shards(3) | USERS | {"runs 2", "runs 2/log"}
        assert not any((old / name).is_symlink() for name in ("runs", "runs 2"))
        assert [path.name for path in old.parent.iterdir()] == ["out"], "something was left"
        number += 1
    assert number > 20 and set(found) == {"old", "new"} and (linked > 3 or way == "interrupted")


@pytest.mark.nightly(
    held_by="tests/model/test_saving.py::test_a_process_stopped_at_any_file_operation_leaves_a_whole_checkpoint_and_the_user_s_folders")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_what_a_killed_save_has_taken_along_is_put_back_by_the_next_start(old: Path) -> None:
    number, found = 0, 0
    while killed_at(number, lambda: save_all(old)):
        found += (old / "runs").is_symlink()
        recover(old)
        assert not (old / "runs").is_symlink() and (old / "runs/log").read_text() == "1"
        number += 1
    assert found
    recover(old.parent / "absent")


def save_all(target: Path) -> None:
    with replacing(target) as folder:
        write(folder, "new", 3)


def test_what_a_living_save_works_on_is_left_alone(old: Path) -> None:
    with replacing(old) as mine:
        write(mine, "mine", 2)
        save_all(old)
        assert mine.exists()
    assert read(old) == "mine" and names(old) == shards(2) | USERS


def test_a_folder_that_cannot_move_stays_and_the_files_are_replaced_one_by_one(
        old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another file system is mounted on it."""
    exchange = saving._exchange

    def busy(one: Path, other: Path) -> None:
        if other.name == "runs 2":
            raise OSError(errno.EBUSY, "Device or resource busy")
        exchange(one, other)

    (old / "runs 2").mkdir()
    monkeypatch.setattr(saving, "_exchange", busy)
    save_all(old)
    assert read(old) == "new" and names(old) == shards(3) | USERS | {"runs 2"}
    assert not any(path.is_symlink() for path in (old / "runs", old / "runs 2"))
    assert [path.name for path in old.parent.iterdir()] == ["out"]


def test_a_folder_with_a_file_s_name_is_refused_and_stays(old: Path) -> None:
    (old / "config.json").unlink()
    (old / "config.json").mkdir()
    (old / "config.json/mine").write_text("1")
    with pytest.raises(CheckpointError, match="it is a folder, and a file is to be saved there"):
        save_all(old)
    assert (old / "config.json/mine").read_text() == "1"


def test_a_file_in_the_way_and_a_folder_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file: give a folder"), replacing(tmp_path / "file"):
        pass
    with pytest.raises(CheckpointError, match="could not be saved"), replacing(tmp_path / "file" / "below"):
        pass


def test_the_working_directory_stays_where_it_is(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(old)
    with replacing(Path(".")) as folder:
        write(folder, "new", 2)
    assert read(Path(".")) == "new" == read(old)


# ---------------------------------------------------------------- a streamed model

def test_a_model_saved_in_shards_over_another_is_whole_and_plain(model: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model.save_pretrained(tmp_path / "out")
    (tmp_path / "out/tokenizer.json").write_text("{}")
    model.save_pretrained(tmp_path / "out", max_shard_size="10KB")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and not (tmp_path / "out/model.safetensors").exists()
    assert (tmp_path / "out/tokenizer.json").exists()
    expected = weights(model)
    assert same_bits({name: tensor for file in files for name, tensor in load_file(file).items()}, expected)
    assert same_bits(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected)


def test_a_model_whose_saving_fails_midway_keeps_its_checkpoint(
        model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.modeling_utils as theirs

    model.save_pretrained(tmp_path / "out", max_shard_size="10KB")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    written, save_file = [], theirs.safe_save_file

    def full(tensors: Any, filename: str, **options: Any) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(filename)
        save_file(tensors, filename, **options)

    with torch.no_grad():
        model.lm_head.weight.add_(1)
    monkeypatch.setattr(theirs, "safe_save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        model.save_pretrained(tmp_path / "out", max_shard_size="10KB")
    assert len(written) == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
