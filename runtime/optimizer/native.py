"""Builds the host's kernels on first use, keeps them in the user's cache and loads them with ctypes.

    library()                      csrc/host.cpp
    update_library(definitions)    csrc/update.cpp for one rule and one way to store state

ctypes releases the interpreter lock during a call, so an update in one thread does not delay launches in another. Where a
library cannot be built, both warn once and return None, and callers use their PyTorch path.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megacompile.codegen.cache import CacheError, cache_directory, is_sealed_library, seal_library
from megacompile.system.host_memory import cores, share_of_cores

SOURCES = Path(__file__).parent / "csrc"
SOURCE = SOURCES / "host.cpp"
# Never -march=native (the cache may be on a disk that several machines share) nor -ffast-math (see the source).
FLAGS = (
    "-std=c++17", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions",
    "-fno-rtti", "-fPIC", "-shared",
)  # fmt: skip
COMPILE_TIMEOUT_S = 300
FLOAT32, BFLOAT16 = 0, 1
MOST_MOMENTS, MOST_SCALARS = 2, 12
INSTRUCTION_SETS = ("portable", "avx2", "avx512")  # the index is the library's number; each set includes those before it


class BuildError(Exception):
    """The library could not be built or loaded. The message says why. Callers get a warning."""


class NativeSegment(ctypes.Structure):
    """`Segment` of update.cpp: elements of a tile, where their moments are, and the numbers of their update."""

    _fields_ = (
        ("start", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("moments", ctypes.c_void_p * MOST_MOMENTS),
        ("scales", ctypes.c_void_p * MOST_MOMENTS),
        ("key", ctypes.c_uint32),
        ("scalars", ctypes.c_float * MOST_SCALARS),
    )


_pointer, _int, _int64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "megacompile_best_instruction_set": (_int, []),
    "megacompile_chunk_elements": (_int64, []),
    "megacompile_squared_norm": (ctypes.c_double, [_pointer, _int, _int64, _pointer, _int, _int]),
    "megacompile_accumulate": (None, [_pointer, _int, _pointer, _int, _int64, _int, _int, _int]),
    "megacompile_split": (None, [_pointer, _pointer, _pointer, _int64, _int, _int]),
    "megacompile_join": (None, [_pointer, _pointer, _pointer, _int64, _int, _int]),
    "megacompile_copy": (None, [_pointer, _pointer, _int64, _int]),
    "megacompile_touch": (None, [_pointer, _int64, _int64]),
}
_UPDATE_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "megacompile_update": (
        None, [_pointer, _pointer, _pointer, _int, _pointer, _int64, ctypes.c_float, _int, _int, _int]),
}

_lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The loaded library, built if necessary. If that fails: None, with one RuntimeWarning per process. Thread-safe."""
    with _lock:  # two lanes may call this first at the same time
        return _library()


def update_library(definitions: str) -> ctypes.CDLL | None:
    """Like `library`, for `update.cpp` with these C++ definitions before it."""
    if library() is None:
        return None
    with _lock:
        return _update_library(definitions)


def update_source(definitions: str) -> str:
    """The C++ text of the update that these definitions describe."""
    return ('#include "execution.h"\nnamespace {\n#include "values.h"\n' + definitions
            + '#include "element.h"\n}\n#include "update.cpp"\n')


@functools.cache
def _update_library(definitions: str) -> ctypes.CDLL | None:
    return _loaded(update_source(definitions).encode(), "update", _UPDATE_SIGNATURES)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return _loaded(None, "host", _SIGNATURES)


def _loaded(source: bytes | None, name: str, signatures: Mapping[str, tuple[type | None, list[type]]]) -> ctypes.CDLL | None:
    """The library of this source, as for `build`. None, with a warning, if it cannot be built or loaded."""
    try:
        return load(build(cache_directory(), compiler_command(), source, name), signatures)
    except (BuildError, CacheError) as error:
        warnings.warn(
            f"megacompile runs the optimizer in PyTorch, several times slower: {error}. Install g++ (or set CXX to a "
            "C++17 compiler with OpenMP) to have the fused kernels",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


def compiler_command(environment: Mapping[str, str] = os.environ) -> list[str]:
    """`$CXX`, else g++, else c++, as a list of words. Raises BuildError if none is installed."""
    for candidate in (environment.get("CXX", ""), "g++", "c++"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
        if words and candidate == environment.get("CXX"):
            raise BuildError(f"the C++ compiler CXX={candidate!r} was not found")
    raise BuildError("no C++ compiler was found")


def build(directory: Path, compiler: Sequence[str], source: bytes | None = None, name: str = "host") -> Path:
    """Path of the shared library in `directory`, compiled unless our own build of the same inputs is there, unchanged.
    `source`: C++ text; None: that of host.cpp.

    The file's name is a hash of source, headers, compiler, version and flags. A finished file is renamed into place: processes
    may build at the same time, and none sees a partial file. Raises BuildError with the compiler's messages.
    """
    try:
        source = SOURCE.read_bytes() if source is None else source
        included = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp"))
    except OSError as error:
        raise BuildError(f"the kernels' source cannot be read ({error}); reinstall megacompile") from error
    version = _run([*compiler, "--version"])
    inputs = (source, included, version.encode(), repr((*compiler, *FLAGS)).encode(), platform.machine().encode())
    key = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in inputs)).hexdigest()[:32]
    built = directory / f"{name}-{key}.so"
    if is_sealed_library(built):
        return built
    try:
        descriptor, temporary_name = tempfile.mkstemp(prefix=f"{name}-{key}.", suffix=".tmp", dir=directory)
        os.close(descriptor)
    except OSError as error:
        raise BuildError(f"the cache directory cannot be written ({error}); set MEGACOMPILE_CACHE") from error
    temporary = Path(temporary_name)
    try:
        _run([*compiler, *FLAGS, "-I", str(SOURCES), "-o", temporary_name, "-x", "c++", "-"], source)
        seal_library(temporary, built.name)
        temporary.replace(built)
    except OSError as error:
        raise BuildError(f"the library cannot be kept ({error}); set MEGACOMPILE_CACHE") from error
    finally:
        temporary.unlink(missing_ok=True)
    return built


def load(path: Path, signatures: Mapping[str, tuple[type | None, list[type]]] = MappingProxyType(_SIGNATURES)) -> ctypes.CDLL:
    """The library at `path` with its functions' types declared. Raises BuildError if it cannot be loaded."""
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in signatures.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} cannot be loaded ({error}); delete it to have it built again") from error
    return loaded


def instruction_sets(loaded: ctypes.CDLL) -> tuple[str, ...]:
    """The names in INSTRUCTION_SETS that this processor runs, best last."""
    return INSTRUCTION_SETS[: loaded.megacompile_best_instruction_set() + 1]


def default_threads() -> int:
    """`$OMP_NUM_THREADS` if it is a number (the first of a list). Otherwise the cores that this process may use, or its share
    of them if torchrun has started several processes on this machine. torchrun sets the variable to 1 if the user has not set
    it, so a 1 in its jobs is ignored."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    chosen = int(wanted) if wanted.isdecimal() else 0
    if chosen > 1 or (chosen == 1 and "TORCHELASTIC_RUN_ID" not in os.environ):
        return chosen
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return share_of_cores(max(1, int(processes))) if processes.isdecimal() else cores()


def _run(command: Sequence[str], source: bytes = b"") -> str:
    """The standard output of a compiler that reads `source`. Raises BuildError with the last lines of its errors."""
    try:
        finished = subprocess.run(command, input=source.decode(), capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S,
                                  check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the compiler could not be run ({error})") from error
    if finished.returncode != 0:
        said = " / ".join(finished.stderr.strip().splitlines()[-3:]) or "it said nothing"
        raise BuildError(f"`{shlex.join(command)}` failed with status {finished.returncode}: {said}")
    return finished.stdout
