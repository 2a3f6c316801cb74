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

from megacompile.errors import DiskError, RankError
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


def read(file: DirectFile, start: int = 0, size: int = SIZE) -> Tensor:
    """Bytes of the file, in memory that is not aligned."""
    into = torch.full((size + 1,), 7, dtype=torch.uint8)
    file.read_bytes(into[1:], start)
    assert into[0] == 7
    return into[1:]


def test_the_file_is_zeros_of_whole_blocks_and_has_no_name(file: DirectFile, folder: Path) -> None:
    assert file.size == in_blocks(SIZE - 5) == SIZE and not read(file).any()
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
    assert torch.equal(back, values) and torch.equal(read(file)[there], values)
    file.write_bytes(drawn(blocks, seed=1), start * BLOCK)
    file.read(back, start * BLOCK)
    assert torch.equal(back, drawn(blocks, seed=1))
    assert not read(file)[:there.start].any() and not read(file)[there.stop:].any()
    assert (file.bytes_read, file.bytes_written) == (2 * values.numel(), values.numel())


@pytest.mark.parametrize(("start", "size"), [
    (0, 1), (5, 3), (BLOCK - 1, 2), (17, 9 * BLOCK), (17, 36 * BLOCK), (4 * BLOCK, BLOCK), (3 * BLOCK + 8, 21 * BLOCK - 8),
    (SIZE - 3, 3)])
def test_any_bytes_are_written_and_read_and_those_beside_them_stay(start: int, size: int, file: DirectFile) -> None:
    before, values = drawn(40), drawn(40, seed=2)[:size]
    file.write(before, 0)
    file.write_bytes(values, start)
    expected = before.clone()
    expected[start:start + size] = values
    assert torch.equal(read(file), expected) and torch.equal(read(file, start, size), values)


def test_a_file_of_another_process_is_opened_and_has_the_same_bytes(file: DirectFile) -> None:
    other = DirectFile.of(file.folder, file.address)
    assert (other.size, other.direct) == (file.size, file.direct)
    file.write(drawn(40), 0)
    assert torch.equal(read(other), drawn(40))
    other.write_bytes(drawn(1, seed=3), 5)
    file.close()
    expected = drawn(40).index_copy(0, torch.arange(5, 5 + BLOCK), drawn(1, seed=3))
    assert file.closed and torch.equal(read(other), expected), "its space is taken while anybody has it open"
    process, number, size, direct = other.address
    other.close()
    with pytest.raises(RankError, match=r"the optimizer state of process \d+ cannot be opened \(No such file or directory\): "
                                        "run all ranks of a host as the same user"):
        DirectFile.of(file.folder, (2**22 + process, number, size, direct))


def test_a_file_that_is_forgotten_is_closed(folder: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    file = DirectFile(folder, SIZE)
    file.write(drawn(40), 0)
    file.stop_threads()
    assert torch.equal(read(file), drawn(40)), "a file at rest is read as before"
    del file
    assert set(os.listdir("/proc/self/fd")) == before


def test_two_files_in_one_folder_are_apart_and_leave_what_is_there_alone(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "megacompile-state-1-00").write_bytes(b"of another run")
    one, other = DirectFile(folder, SIZE), DirectFile(folder, SIZE)
    one.write(drawn(40), 0)
    assert not read(other).any()
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


def test_direct_access_that_the_file_system_refuses_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(file: int, views: list[Any], at: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuses)
        file = DirectFile(tmp_path, SIZE)
    file.write(drawn(40), 0)
    assert not file.direct and torch.equal(read(file), drawn(40))
    file.close()


def test_an_error_of_bytes_is_raised_as_one_of_blocks(file: DirectFile, monkeypatch: pytest.MonkeyPatch) -> None:
    for call, bytes_of in (("preadv", file.read_bytes), ("pwritev", file.write_bytes)):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, lambda *given: (_ for _ in ()).throw(OSError(errno.EIO, "the drive is gone")))
            with pytest.raises(OSError, match="the drive is gone"):
                bytes_of(torch.zeros(9 * BLOCK, dtype=torch.uint8), 3)
