"""Compiles graphs with inductor and keeps the result on disk: the second start of the same model compiles nothing.

Inductor's own cache does this. Its keys are the graph, the inputs, the device and inductor's settings. We give it a folder that
is not temporary, that only this user can write to, and that no other version of our ops uses: the shapes that an op returns
are part of the compiled code, but not of any key.
"""
from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.codegen.cache import CacheError, cache_directory, discard, processor_name, sealed
from megacompile.compat import inductor
from megacompile.compat.core import FakeTensor, TracingContext, tracing
from megacompile.compat.dynamo import counters
from megacompile.compat.inductor import inductor_prims

#: The cache folders of inductor and Triton. Inductor sets both variables itself, for the rest of the process.
_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
#: Folders whose code decides what a compiled template computes: our ops and their shapes, passes over templates, what they use.
_HASHED = ("codegen", "compat", "frontend", "ir", "passes/template")
_lock = threading.RLock()  # lanes compile too, and all threads share the environment


@dataclass
class Inductor:
    """Compiles graphs. State: how many were `compiled`, how many came `from_cache`, and the `seconds` that both took."""

    compiled: int = 0
    from_cache: int = 0
    seconds: float = 0.0

    def compile(self, graph: fx.GraphModule, examples: Sequence[Tensor | torch.SymInt]) -> Callable[..., Any]:
        """`graph` as a function of tensors that have the shapes, strides, dtypes and device of `examples`, which are fakes of
        one mode with a `ShapeEnv`. A symbol stands for every number that satisfies the `ShapeEnv`'s guards at this call. The
        function may be called from any thread.

        If compiling fails with files of an earlier process in the cache, it is tried again in a new folder, which is used from
        then on. Raises what inductor raises without a cache."""
        begin, folder = time.perf_counter(), newest_folder()
        try:
            function, found = _compile(graph, examples, folder)
        except (MemoryError, TimeoutError, torch.OutOfMemoryError):  # not caused by the cache
            raise
        except Exception as error:
            if folder is None or not any(folder.iterdir()):
                raise
            fresh = _next(folder)
            try:
                function, found = _compile(graph, examples, fresh)
            except Exception:  # not caused by the cache
                discard(fresh)
                raise error from None
            warnings.warn(f"compiled code in {folder} could not be used ({type(error).__name__}) and was compiled again: the "
                          "folder can be deleted", RuntimeWarning, stacklevel=2)
        self.compiled += not found
        self.from_cache += found
        self.seconds += time.perf_counter() - begin
        return function


def _compile(graph: fx.GraphModule, examples: Sequence[Tensor | torch.SymInt],
             folder: Path | None) -> tuple[Callable[..., Any], bool]:
    """The function, and whether it came from the cache."""
    fakes = next(example.fake_mode for example in examples if isinstance(example, FakeTensor))
    with caching_in(folder), warnings.catch_warnings(), tracing(TracingContext(fakes)):
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # the user's choice; few products are float32
        hits, others = _lookups()
        graph = copy.deepcopy(graph)  # inductor changes the graph that it gets
        keep_operands(graph.graph)
        function: Any = inductor.compile(graph, [*examples])
        hits_now, others_now = _lookups()
        found = hits_now > hits and others_now == others
        if folder is not None and not found:  # what a found graph adds is sealed when the process ends
            sealed(folder).seal()
    return function, found


def _lookups() -> tuple[int, int]:
    """The number of graphs that inductor has found in its cache so far, and the number not found or not looked up."""
    seen = counters["inductor"]
    return seen["fxgraph_cache_hit"], seen["fxgraph_cache_miss"] + seen["fxgraph_cache_bypass"]


@contextlib.contextmanager
def caching_in(folder: Path | None) -> Iterator[None]:
    """A context in which inductor's cache is in `folder`; None leaves it where it is. A user's own `TRITON_CACHE_DIR` is
    kept."""
    with _lock:
        before = {name: os.environ.get(name) for name in _VARIABLES}
        try:
            if folder is not None:
                os.environ[_VARIABLES[0]] = str(folder)
            yield
        finally:
            for name, value in before.items():
                if value is not None:
                    os.environ[name] = value
                else:
                    os.environ.pop(name, None)


@contextlib.contextmanager
def sharing_caches(device: torch.device) -> Iterator[None]:
    """A context in which other threads may compile Triton kernels while this one compiles graphs. All kernels are kept in the
    newest folder: the variables of the environment do not change while one is written."""
    folder = newest_folder()
    with caching_in(folder):
        if folder is not None:
            os.environ.setdefault(_VARIABLES[1], inductor.triton_cache_dir(device.index or 0))
        yield


def newest_folder() -> Path | None:
    """The folder of compiled code, made if absent: the newest one for these versions, this processor and our ops' code. It
    holds only files that we wrote, since inductor unpickles what it finds. None if the user has no cache folder. Each rank of a
    host has a separate folder: compiled code names its device, and a rank cannot use a folder that another one is filling."""
    digest = version_digest()  # a file of ours that cannot be read must not turn the cache off silently
    try:
        versions = cache_directory() / "compiled" / (digest + _of_rank())
        versions.mkdir(parents=True, exist_ok=True)
        numbers = [int(each.name) for each in versions.iterdir() if each.name.isascii() and each.name.isdecimal()]
        newest = versions / str(max(numbers, default=0))
        newest.mkdir(exist_ok=True)
        try:
            sealed(newest)
        except OSError:  # another process is using it
            newest = _next(newest)
            sealed(newest)
    except (CacheError, OSError):
        return None
    return newest


def _next(folder: Path) -> Path:
    """A new folder beside this one, with the next number."""
    new = folder.with_name(str(int(folder.name) + 1))
    new.mkdir(exist_ok=True)
    return new


def _of_rank() -> str:
    """The suffix of the folder's name for this process, empty for the first rank of a host."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return f"-{rank}" if rank.isdecimal() and int(rank) else ""


@functools.cache
def version_digest() -> str:
    """A digest of torch's version, of the processor, and of our code that decides what a compiled template computes. Raises
    `OSError` if that code cannot be read."""
    digest = hashlib.sha256(f"{torch.__version__} {processor_name()}".encode())
    package = Path(__file__).parents[1]
    for name in _HASHED:
        # In a checkout, `passes` is beside the package. In an installed wheel it is inside.
        folder = package / name if (package / name).is_dir() else package.parent / name
        files = sorted(folder.rglob("*.py"))
        if not files:
            raise FileNotFoundError(f"{folder} has no Python files: install megacompile again")
        for path in files:
            digest.update(f"{name}/{path.relative_to(folder).as_posix()}".encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


# --------------------
# Grouped products (all experts of a layer in one call) under inductor: operands keep the memory layout that was traced.
#
# In a row-major operand, a group of rows may begin at any row. In a transposed operand, groups would have to begin at multiples
# of 16 bytes, which the device checks, as it checks the strides of experts' weights. Inductor may choose any layout for a value
# that it computes.
def keep_operands(graph: fx.Graph) -> None:
    """Makes inductor keep the traced strides of the operands of grouped products. Changes `graph`."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default):
        with graph.inserting_before(node):
            for position, operand in enumerate(node.args[:2]):
                kept = graph.call_function(inductor_prims.force_stride_order, (operand, operand.meta["val"].stride()))
                kept.meta = dict(operand.meta)
                node.update_arg(position, kept)
