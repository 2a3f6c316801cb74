"""Functional graphs of sections, kept in the user's cache folder, so that a second start of the same model does not
differentiate its layers again.

    graphs/KEY      the graph that AOT made, pickled as inductor's cache does, then its seal (`cache.py`)

AOT gives the same result for the same graph, inputs and settings. KEY is a digest of these, and of the versions of torch,
transformers, this library's frontend and the processor. A graph is not kept if the digest cannot say what it computes: if it
calls functions or ops of other libraries, or holds constant tensors; or if AOT assumed more of its sizes.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.codegen.cache import CacheError, cache_directory, keep, read_kept
from megacompile.codegen.inductor import version_digest
from megacompile.compat import aot
from megacompile.compat.aot import aot_export_joint_simple, read_graph, written_graph
from megacompile.compat.core import FakeTensorMode, HigherOrderOperator, LazyGraphModule, OpOverload, OpOverloadPacket
from megacompile.compat.symbols import known_of
from megacompile.errors import MegacompileError

#: The largest number of stored graphs; the least recently used are dropped. A model has about ten for each kind of batch.
MOST_GRAPHS = 1024
#: The most bytes of a file. A longer one is not kept.
_LONGEST = 1 << 26
#: Libraries whose ops do not change between two starts with the same versions.
_LIBRARIES = frozenset({"aten", "prims", "prim", "megacompile", "transformers"})
#: Packages and modules whose functions do not change either.
_MODULES = frozenset({"torch", "operator", "_operator", "builtins", "math"})
#: Operators whose code is in the graph.
_HIGHER_ORDER = frozenset({"autograd_function_apply", "tag_activation_checkpoint", "wrap"})
#: The entries of AOT's metadata that nodes keep, whether or not the graph comes from the disk.
_META = ("val", "partitioner_tag", "seq_nr", "stack_trace", "recompute", "ac_graph_id", "has_backward_hook", "is_gradient_acc",
         "autograd_backward")


def functional_graph(graph: fx.GraphModule, examples: Sequence[Any], fakes: FakeTensorMode, trace_joint: bool,
                     decompositions: dict[Any, Any] | None = None) -> fx.GraphModule:
    """The functional graph of `graph` for `examples`, fakes of the mode `fakes`: its forward, or with `trace_joint` forward and
    backward. Call it within this mode. Raises what AOT raises."""
    environment = fakes.shape_env
    assert environment is not None, "a trace without symbols"
    known = known_of(environment)
    asked = _question(graph, examples, known, trace_joint, decompositions or {})
    path = _path_of(asked) if asked is not None else None
    if path is not None and (found := _find(path, fakes)) is not None:
        return found
    made = _without_aot_objects(aot_export_joint_simple(graph, tuple(examples), trace_joint=trace_joint,
                                                        decompositions=decompositions))
    # Constants that AOT found in the code would be read back without their values.
    if path is not None and known_of(environment) == known and not made.graph.find_nodes(op="get_attr"):
        _keep(path, made)
    return made


def _without_aot_objects(made: Any) -> fx.GraphModule:
    """The same graph without AOT's attachments: environments, tracebacks and functions, some of which are the user's. Reading
    them back would import the user's modules."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(made.graph, copies))
    for old, new in copies.items():
        new.meta = {name: old.meta[name] for name in _META if name in old.meta}
    return LazyGraphModule(made, graph)


def _find(path: Path, fakes: FakeTensorMode) -> fx.GraphModule | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own classes, when they are unpickled
            return read_graph(read_kept(path, _LONGEST), fakes)
    except FileNotFoundError:
        return None
    except Exception as error:  # anything that unpickling raises for a file of another installation
        warnings.warn(f"a graph in the cache is not used and is made again: {error}", RuntimeWarning, stacklevel=2)
        return None


def _keep(path: Path, made: fx.GraphModule) -> None:
    try:
        contents = written_graph(made)
    except Exception:  # anything that a value in the graph raises; the graph is then made at every start
        return
    if len(contents) < _LONGEST:
        with contextlib.suppress(OSError):
            keep(path, contents, MOST_GRAPHS)


def _path_of(asked: str) -> Path | None:
    """Returns the file that stores the answer to a question, or None if there is no cache folder."""
    try:
        return cache_directory() / "graphs" / hashlib.sha256(f"{_versions()}\n{asked}".encode()).hexdigest()[:32]
    except CacheError:
        return None


# ---------------------------------------------------------------- what a graph depends on

class _UnknownError(MegacompileError):
    """Something cannot be described as text. Never leaves this file."""


def _question(graph: fx.GraphModule, examples: Sequence[Any], known: str, trace_joint: bool,
              decompositions: Mapping[Any, Any]) -> str | None:
    """Everything that AOT's result depends on, as text. `known`: the known facts about the symbols. Returns None if something
    cannot be described as text."""
    try:
        return "\n".join([
            str(trace_joint), *sorted(map(str, decompositions)), *_settings(), known, *_described(examples), *_lines(graph)])
    except _UnknownError:
        return None


@functools.cache
def _versions() -> str:
    return f"{version_digest()} {importlib.metadata.version('transformers')}"


def _settings() -> Iterator[str]:
    """PyTorch's settings that decide which ops a composite op becomes, and how AOT traces."""
    yield str(sorted((name, repr(value)) for name, value in aot.config.save_config_portable().items()))
    kernels = torch.backends.cuda
    yield str((kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled(),
               kernels.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
               torch.is_grad_enabled(), *((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                                          for device in ("cpu", "cuda"))))


def _described(examples: Sequence[Any]) -> Iterator[str]:
    """Each input, with the earlier input that it equals or shares memory with."""
    first: dict[tuple[str, int], int] = {}
    for position, value in enumerate(examples):
        if isinstance(value, Tensor):
            same = first.setdefault(("tensor", id(value)), position)
            memory = first.setdefault(("memory", value.untyped_storage()._cdata), position)
            yield str((type(value).__name__, same, memory, tuple(value.shape), value.stride(), value.storage_offset(),
                       value.dtype, value.device, value.layout, value.requires_grad, value.is_leaf, value.is_conj(),
                       value.is_neg()))
        else:
            yield _text(value)


def _lines(graph: fx.GraphModule) -> Iterator[str]:
    """Each node, with its line of the model, which errors name."""
    for node in graph.graph.nodes:
        if node.op == "get_attr":  # the forward and backward of an autograd.Function
            nested = getattr(graph, node.target)
            if not isinstance(nested, fx.GraphModule):
                raise _UnknownError
            yield from (f"{node.name}: {line}" for line in _lines(nested))
            continue
        if node.op == "call_module":
            raise _UnknownError
        target = _name_of(node.target) if node.op == "call_function" else node.target
        yield f"{node.op} {node.name} {target} {_text(node.args)} {_text(node.kwargs)} {node.meta.get('stack_trace')}"


def _name_of(function: Any) -> str:
    if isinstance(function, OpOverload | OpOverloadPacket):
        if str(function).partition(".")[0].partition("::")[0] not in _LIBRARIES:
            raise _UnknownError
        return str(function)
    if isinstance(function, HigherOrderOperator):
        if str(function) not in _HIGHER_ORDER:  # a user's Triton kernel is a number in a table of this process
            raise _UnknownError
        return f"higher order {function}"
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    known = module.partition(".")[0] in _MODULES
    if not name or not known and function not in (getattr(torch.Tensor, name, None), getattr(torch, name, None)):
        raise _UnknownError
    return f"{module} {name}"


def _text(value: Any) -> str:
    """An argument of a node, or a number among a graph's inputs."""
    match value:
        case fx.Node():
            return value.name
        case None | EllipsisType() | bool() | int() | float() | complex() | str():
            return repr(value)
        case (torch.SymInt() | torch.SymFloat() | torch.SymBool() | torch.dtype() | torch.device() | torch.layout() |
              torch.memory_format()):
            return str(value)
        case slice():
            return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
        case tuple() | list():
            return f"{type(value).__name__}({', '.join(map(_text, value))})"
        case dict():
            return ", ".join(f"{_text(key)}: {_text(each)}" for key, each in value.items())
    raise _UnknownError
