"""The user's cache folder: built kernels, compiled templates, measured rates. Its contents can be deleted at any time."""
from __future__ import annotations

import os
import platform
import stat
from collections.abc import Mapping
from pathlib import Path

from megacompile.errors import MegacompileError


class CacheError(MegacompileError):
    """There is no folder that only this user can write to."""


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
    """The host's processor, as the system calls it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
