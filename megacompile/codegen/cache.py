"""The user's cache folder: files and folders that are sealed, so that what others have added or changed is not used."""
from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import json
import os
import platform
import secrets
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from megacompile.errors import MegacompileError
from megacompile.system.files import open_regular
from megacompile.system.linux import fcntl


# --------------------
# The user's cache folder: built kernels, compiled templates, measured rates. Its contents can be deleted at any time.
class CacheError(MegacompileError):
    """No folder exists that only this user can write to."""


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder, made if absent: `$MEGACOMPILE_CACHE`, else `megacompile` in the user's cache directory.

    It belongs to this user and has mode 0700, since anyone who can write there runs code in this process. Raises `CacheError`
    if that is impossible.
    """
    user_cache = Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    directory = Path(environment.get("MEGACOMPILE_CACHE") or user_cache / "megacompile")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.getuid():
            raise CacheError(f"the cache directory {directory} belongs to another user; set MEGACOMPILE_CACHE")
        if stat.S_IMODE(status.st_mode) != 0o700:
            directory.chmod(0o700)
    except OSError as error:
        raise CacheError(f"no private cache directory ({error}); set MEGACOMPILE_CACHE to a writable one") from error
    return directory


def processor_name() -> str:
    """The system's name of the host's processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


# -------------------- Seals files in the cache, so that files that others have added or changed are not used
#
# A seal is a keyed digest (HMAC-SHA256) of a file's name and contents. The key belongs to the user and is not in the cache:
# code in a cache that comes with a project, a container or a shared disk is not run. `docs/security.md` says what this protects
# from.
#
#     a library      its last 32 bytes are the seal of the rest, so that file and seal are written together; a plan likewise
#     a folder       `seals.json` has a seal for each file; a process that uses the folder holds a lock on it
_SIZE = 32
_TABLE, _LOCK = "seals.json", "seals.lock"
#: Ends of the names of files that inductor writes again at a kernel's first launch. A process that is killed before it ends
#: leaves them changed. They hold no code, and a kernel without one is tuned again.
_TUNED = ".best_config"


# -------------------------------------------------------------------- the key
@functools.cache
def _key() -> bytes:
    """The user's key, made if there is none. Stored in the cache folder if the configuration folder cannot be used. Raises
    `OSError`."""
    try:
        return key_in(_configuration(os.environ))
    except OSError:
        return key_in(cache_directory())


def _configuration(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "megacompile"


def key_in(folder: Path) -> bytes:
    """The key in a folder. A key that others can read or write, or have made, is replaced. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "cache.key"
    for _ in range(8):  # another process may be first, or remove our key
        if (found := _private(path)) is not None:
            return found
        path.unlink(missing_ok=True)
        new = folder / f".{secrets.token_hex(6)}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_SIZE))
        finally:
            os.close(descriptor)
        try:
            os.link(new, path)
        except FileExistsError:
            continue
        finally:
            new.unlink()
    raise OSError(f"no key can be kept in {folder}")


def _private(path: Path) -> bytes | None:
    """The key in a file that only this user can read and write; None for any other file."""
    try:
        descriptor = open_regular(path, follow_links=False)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        mine = status.st_uid == os.getuid() and not status.st_mode & 0o077
        found = file.read(_SIZE + 1) if mine else b""
    return found if len(found) == _SIZE else None


def _digest(name: str, contents: Iterator[bytes]) -> bytes:
    digest = hmac.new(_key(), name.encode() + b"\0", "sha256")
    for chunk in contents:
        digest.update(chunk)
    return digest.digest()


def _chunks(path: Path, size: int | None = None) -> Iterator[bytes]:
    """A file's contents, or its first `size` bytes. Raises `OSError`, also for a link and a FIFO."""
    left = size
    with open(open_regular(path, follow_links=False), "rb") as file:
        while chunk := file.read(1 << 20 if left is None else min(left, 1 << 20)):
            left = None if left is None else left - len(chunk)
            yield chunk


# -------------------------------------------------------------------- a library
def seal_library(path: Path, name: str) -> None:
    """Appends the seal for a file of this name. Loaders of shared libraries ignore it. Raises `OSError`."""
    seal = _digest(name, _chunks(path))
    with path.open("ab") as file:
        file.write(seal)


def is_sealed_library(path: Path) -> bool:
    """True if the file is unchanged since it was sealed under its name."""
    try:
        size = path.lstat().st_size - _SIZE
        if size <= 0:
            return False
        expected = _digest(path.name, _chunks(path, size))
        with path.open("rb") as file:
            file.seek(size)
            return hmac.compare_digest(file.read(), expected)
    except OSError:
        return False


# -------------------------------------------------------------------- contents
def with_seal(name: str, contents: bytes) -> bytes:
    """The contents of a file of this name, followed by their seal. Raises `OSError`."""
    return contents + _digest(name, iter((contents,)))


def unsealed(name: str, found: bytes) -> bytes | None:
    """The contents that `with_seal` sealed under this name; None if the seal is wrong. Raises `OSError`."""
    contents, seal = found[:-_SIZE], found[-_SIZE:]
    return contents if hmac.compare_digest(seal, _digest(name, iter((contents,)))) else None


# -------------------------------------------------------------------- a folder
class SealedFolder:
    """A folder that this process uses. State: the lock, and the size and time of each file when it was last sealed."""

    def __init__(self, path: Path) -> None:
        """Removes files that are not sealed, and all files if a sealed one was changed. If the changed file is about tuning
        (`_TUNED`), removes only that file. If other processes use the folder, raises `OSError` instead, since they may be
        writing these files. Raises `OSError` for other reasons too."""
        self.path = path
        for name in (_TABLE, _LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.close(open_regular(path / name, follow_links=False))  # refuses a FIFO
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._sealed: dict[str, tuple[int, int]] = {}
        try:
            self._check()
        except BaseException:
            os.close(self._lock)
            raise
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        atexit.register(self.seal)  # for kernels that were tuned at their first launch

    def _check(self) -> None:
        seals = self._table()
        foreign: list[str] = []
        changed: list[str] = []
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        for name, state in self._files():
            if name not in seals and state is not None and state[0] == 0 and not alone:
                continue  # another process's lock file
            if name not in seals or state is None:
                foreign.append(name)
            elif self._seal(name) != seals[name]:
                (foreign if name.endswith(_TUNED) else changed).append(name)
            else:
                self._sealed[name] = state
        if not alone and (foreign or changed):
            raise OSError(f"{self.path} is in use, and not all of it is sealed")
        if changed:
            warnings.warn(f"compiled code in {self.path} ({changed[0]}) was changed since megacompile wrote it, and is "
                          "compiled again", RuntimeWarning, stacklevel=2)
            foreign += [*changed, *self._sealed]
            self._sealed.clear()
        for name in foreign:
            (self.path / name).unlink()

    def seal(self) -> None:
        """Seals files that are new or changed. A file that cannot be sealed will not be used."""
        try:
            new = {name: state for name, state in self._files()
                   if state is not None and state[0] and self._sealed.get(name) != state}
            if not new:
                return
            seals = {name: self._seal(name) for name in new}
            table = os.open(self.path / _TABLE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(table, fcntl.LOCK_EX)  # other processes seal too
                text = json.dumps({**self._table(), **seals}, indent=0).encode()
                os.ftruncate(table, 0)
                os.pwrite(table, text, 0)
            finally:
                os.close(table)
            self._sealed.update(new)
        except OSError:
            return

    def _table(self) -> dict[str, str]:
        try:
            table = json.loads(b"".join(_chunks(self.path / _TABLE)))
        except (OSError, RecursionError, ValueError):
            return {}
        return table if isinstance(table, dict) else {}

    def _seal(self, name: str) -> str:
        try:
            return _digest(name, _chunks(self.path / name)).hex()
        except FileNotFoundError:  # another process's temporary file
            return ""

    def _files(self) -> Iterator[tuple[str, tuple[int, int] | None]]:
        """(name below the folder, (size, time)) of each file. The second is None for links, FIFOs and similar, which are never
        sealed. Raises `OSError` if a folder cannot be read."""
        for root, folders, files in os.walk(self.path, onerror=_raise):
            for each in (Path(root, name) for name in (*files, *folders)):
                name = each.relative_to(self.path).as_posix()
                try:
                    status = each.lstat()
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode) and name not in (_TABLE, _LOCK):
                    yield name, (status.st_size, status.st_mtime_ns)
                elif not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                    yield name, None


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # another process may remove its files
        raise error


_open: dict[Path, SealedFolder] = {}


def sealed(path: Path) -> SealedFolder:
    """The folder, checked when this process first uses it. Raises `OSError`."""
    if path not in _open or not path.exists():
        _open[path] = SealedFolder(path)
    return _open[path]


def discard(path: Path) -> None:
    """Removes a folder and its contents."""
    _open.pop(path, None)
    shutil.rmtree(path, ignore_errors=True)


# -------------------- Files that we keep in the user's cache folder, each sealed (`cache.py`), with a limit for each folder
def read_kept(path: Path, longest: int) -> bytes:
    """The contents of a file that `keep` wrote. Raises `OSError`, and `MegacompileError` if the file was changed, or is longer
    than `longest` bytes."""
    with open(open_regular(path, follow_links=False), "rb") as file:
        contents = unsealed(path.name, file.read(longest))
    if contents is None:
        raise MegacompileError(f"{path} was changed since megacompile wrote it")
    with contextlib.suppress(OSError):
        os.utime(path)
    return contents


def keep(path: Path, contents: bytes, most: int) -> None:
    """Writes a file, and removes all files of its folder but the `most` last used. Several processes may do so at the same
    time; the last file stays. Raises `OSError`."""
    path.parent.mkdir(exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(with_seal(path.name, contents))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _forget(path.parent, most)


def _forget(folder: Path, most: int) -> None:
    """Removes all files but the `most` last used, including leftovers of killed processes."""
    if len(os.listdir(folder)) <= most:
        return
    used: dict[Path, int] = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            used[path] = path.lstat().st_mtime_ns
    for path in sorted(used, key=used.__getitem__)[:-most]:
        path.unlink(missing_ok=True)
