"""The scratch file for optimizer state: what is written is read, either way; it is private, has no name, and goes away."""
from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacompile.errors import DiskError
from megacompile.system import direct_file
from megacompile.system.direct_file import BLOCK, DirectFile, in_blocks
from megacompile.system.host_memory import host_memory

SIZE = 40 * BLOCK


@pytest.fixture(params=["folder", "in memory", "through the page cache"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of file systems that are direct, and that are not."""
    monkeypatch.setattr(direct_file, "CHUNK", 4 * BLOCK)
    if request.param == "in memory":
        shared = Path("/dev/shm") / f"megacompile-test-{os.getpid()}"
        shared.mkdir()
        yield shared
        shared.rmdir()
        return
    if request.param == "through the page cache":
        monkeypatch.setattr(DirectFile, "_goes_around_the_cache", lambda self: False)
    yield tmp_path / "state"


@pytest.fixture
def file(folder: Path) -> Iterator[DirectFile]:
    made = DirectFile(folder, SIZE - 5)
    yield made
    made.close()


def drawn(blocks: int, seed: int = 0) -> Tensor:
    memory = host_memory(blocks * BLOCK)
    memory.copy_(torch.randint(256, (blocks * BLOCK,), generator=torch.Generator().manual_seed(seed)))
    return memory


def test_the_file_is_zeros_of_whole_blocks_and_has_no_name(file: DirectFile, folder: Path) -> None:
    assert file.size == in_blocks(SIZE - 5) == SIZE and not file.mapped.any()
    assert list(folder.iterdir()) == []
    status = os.fstat(file._file)
    assert (status.st_nlink, stat.S_IMODE(status.st_mode), status.st_size) == (0, 0o600, SIZE)
    assert status.st_blocks * 512 >= SIZE, "its space is taken beforehand"
    assert not os.get_inheritable(file._file)


@pytest.mark.parametrize(("start", "blocks"), [(0, 40), (3, 1), (1, 13), (36, 4)])
def test_what_is_written_is_read_both_ways(start: int, blocks: int, file: DirectFile) -> None:
    values, back = drawn(blocks), host_memory(blocks * BLOCK)
    file.write(values, start * BLOCK)
    there = slice(start * BLOCK, (start + blocks) * BLOCK)
    file.read(back, start * BLOCK)
    assert torch.equal(back, values) and torch.equal(file.mapped[there], values)
    file.mapped[there] = drawn(blocks, seed=1)
    file.read(back, start * BLOCK)
    assert torch.equal(back, drawn(blocks, seed=1))
    file.write(values, start * BLOCK)  # pages of the mapping are there
    assert torch.equal(file.mapped[there], values)
    assert not file.mapped[:there.start].any() and not file.mapped[there.stop:].any()
    assert (file.bytes_read, file.bytes_written) == (2 * values.numel(), 2 * values.numel())


def test_tensors_of_the_mapping_outlive_the_file(folder: Path) -> None:
    file = DirectFile(folder, SIZE)
    file.write(drawn(40), 0)
    kept = file.mapped[BLOCK:3 * BLOCK]
    file.close()
    del file
    assert torch.equal(kept, drawn(40)[BLOCK:3 * BLOCK])


def test_two_files_in_one_folder_are_apart_and_leave_what_is_there_alone(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "megacompile-state-1-00").write_bytes(b"of another run")
    one, other = DirectFile(folder, SIZE), DirectFile(folder, SIZE)
    one.write(drawn(40), 0)
    assert not other.mapped.any()
    one.close()
    other.close()
    assert [path.read_bytes() for path in folder.iterdir()] == [b"of another run"]
    (folder / "megacompile-state-1-00").unlink()


@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("at", range(10))
def test_an_error_of_any_call_is_raised_once_all_calls_have_ended(
        way: str, at: int, file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def failing(call: Callable[..., int]) -> Callable[..., int]:
        def called(number: int, buffers: list[memoryview], offset: int) -> int:
            made.append(offset)
            if offset == at * direct_file.CHUNK:
                raise OSError(errno.EIO, "the drive is gone")
            return call(number, buffers, offset)
        return called

    monkeypatch.setattr(os, "preadv", failing(os.preadv))
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev))
    with pytest.raises(OSError, match="the drive is gone"):
        getattr(file, way)(drawn(40), 0)
    assert sorted(made) == [chunk * direct_file.CHUNK for chunk in range(10)]
    assert file.bytes_read == file.bytes_written == 0


def test_transfers_go_on_while_the_interpreter_ends(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(self: ThreadPoolExecutor, *given: Any) -> Any:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    back = host_memory(SIZE)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", ended)
    file.write(drawn(40), 0)
    file.read(back, 0)
    assert torch.equal(back, drawn(40))
    monkeypatch.setattr(os, "preadv", lambda number, views, at: 0)
    with pytest.raises(OSError, match="the file ended"):
        file.read(back, 0)


def test_calls_that_transfer_less_are_continued(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda number, views, at: pwritev(number, [views[0][:BLOCK]], at))
    monkeypatch.setattr(os, "preadv", lambda number, views, at: preadv(number, [views[0][:BLOCK]], at))
    back = host_memory(SIZE)
    file.write(drawn(40), 0)
    file.read(back, 0)
    assert torch.equal(back, drawn(40))


def test_a_file_that_ends_early_is_an_error(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda number, views, at: 0)
    with pytest.raises(OSError, match="the file ended"):
        file.read(host_memory(BLOCK), 0)


def refused(folder: Path, size: int = SIZE) -> str:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(DiskError) as refusal:
        DirectFile(folder, size)
    assert set(os.listdir("/proc/self/fd")) == before, "nothing stays open"
    return str(refusal.value)


def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "file", "File exists"), (tmp_path / "none" / "state", "No such file or directory"),
                      (Path("/proc/self"), "No such file or directory")):
        message = refused(path)
        assert f"optimizer state cannot be kept in {path} ({why})" in message
        assert "name a folder on a local drive that this process may write to" in message


def test_too_little_space_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(tmp_path, 1 << 50)
    assert "optimizer state on disk takes 1024.00 TiB and" in message and f"are free in {tmp_path} (No space left" in message
    assert "name a folder with more space" in message
    for code, expected in ((errno.EDQUOT, "are free in"), (errno.EIO, "cannot be kept in")):
        def fails(file: int, start: int, size: int, code: int = code) -> Any:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "posix_fallocate", fails)
        message = refused(tmp_path)
        assert f"({os.strerror(code)})" in message and expected in message
    assert list(tmp_path.iterdir()) == []


def test_direct_access_that_does_not_see_the_mapping_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def stale(file: int, views: list[Any], at: int) -> int:
        count = preadv(file, views, at)
        views[0][:] = bytes(len(views[0]))
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", stale)
        file = DirectFile(tmp_path, SIZE)
    back = host_memory(SIZE)
    file.write(drawn(40), 0)
    file.read(back, 0)
    assert not file.direct
    assert torch.equal(back, drawn(40))
    file.close()
