"""One graph of the whole model, loss included, whose weights are placeholders and whose layers are regions (Dynamo)."""
from __future__ import annotations

import builtins
import contextlib
import dataclasses
import gc
import inspect
import itertools
import linecache
import operator
import os
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.backends import mkldnn, nnpack
from torch.distributions import Distribution

from megacompile.compat import dynamo
from megacompile.compat.core import (
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    generated_code,
    get_signature_for_torch_op,
    torch_check,
)
from megacompile.compat.dynamo import LazySymNodeFormatString, dynamo_graph_capture_for_export
from megacompile.compat.symbols import PythonReferenceAnalysis, ShapeEnv, sympy_interp
from megacompile.errors import CaptureError, MegacompileError
from megacompile.frontend.batches.pair_masks import pairs_of
from megacompile.frontend.ops.experts import traced_experts
from megacompile.frontend.templates.symbolic_sizes import rounded_sizes
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.explained import TRACING_ERRORS, explained, raise_foreign
from megacompile.frontend.tracing.layers import LayerStack, layers_as_regions
from megacompile.frontend.tracing.native_branches import native_branches
from megacompile.frontend.tracing.peft_tracing import traceable_adapters


# -------------------- Removes what PyTorch keeps of a trace for the rest of the process, though nothing can use it any more
def forget_symbols() -> None:
    """Empties the caches of `ShapeEnv`'s methods. They are unbounded, and their keys hold every `ShapeEnv` ever made, with its
    graph. Values still in use are computed again on demand."""
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def release_tracked_fakes(environment: ShapeEnv) -> None:
    """Lets a `ShapeEnv` be collected. Its list of traced inputs holds fake tensors, whose sizes hold the `ShapeEnv` through
    C++, so the garbage collector does not see the cycle. Only Dynamo's guards read the list, at the end of a trace."""
    environment.tracked_fakes = None


def forget_generated_code() -> None:
    """Drops the source lines of every graph module that no longer exists. torch.fx keeps one text for each `recompile()`, to
    show it in stack traces, and never drops one."""
    alive = {function.__code__.co_filename for function in gc.get_objects() if type(function) is FunctionType}
    kept = generated_code()
    for name in [name for name in kept if name not in alive]:
        kept.pop(name, None)
        linecache.cache.pop(name, None)


# --------------------
# Buffers that a forward writes before it reads them (the frequencies of LongRoPE) are values of the forward, not its state.
_COPIES = ("copy_", torch.Tensor.copy_, torch.ops.aten.copy_.default)


def own_rewritten_buffers(graph: fx.Graph, sources: Mapping[fx.Node, Source]) -> None:
    """Replaces, in `graph`, every read of a buffer that the forward rewrites by the written value, since a call of a template
    changes none of its inputs. The first use of the buffer must overwrite all of it. Then no earlier value can matter to this
    forward or the next, and the model's own buffer stays unchanged. Buffers that are read first (running means) stay as they
    are, and are refused later."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    for buffer in [node for node, source in sources.items() if source.kind == "buffer" and node.users]:
        first = min(buffer.users, key=order.__getitem__)
        if first.target not in _COPIES or first.args[0] is not buffer or buffer in first.args[1:]:
            continue
        with graph.inserting_before(first):
            written = graph.call_function(torch.ops.aten.copy.default, first.args[:2])
        written.meta = dict(first.meta)
        first.replace_all_uses_with(written)
        graph.erase_node(first)
        for reader in [user for user in buffer.users if user is not written]:
            reader.replace_input_with(buffer, written)


# -------------------- Convolutions are traced for any batch size
#
# On a CPU, PyTorch chooses between kernels of a convolution by comparing the batch size with 16, also while it traces. The
# trace would then hold on one side of that number alone, although all of these kernels compute the same.
@contextlib.contextmanager
def convolutions_of_any_batch() -> Iterator[None]:
    """A context in which convolutions on a CPU have only one kernel to choose."""
    of_mkldnn, *_ = mkldnn.set_flags(False, _fp32_precision=None)  # None: leave it as it is
    (of_nnpack,) = nnpack.set_flags(False)
    try:
        yield
    finally:
        mkldnn.set_flags(of_mkldnn, _fp32_precision=None)
        nnpack.set_flags(of_nnpack)


INVOKE = torch.ops.higher_order.invoke_subgraph


@dataclasses.dataclass
class ModelGraph:
    """Dynamo's trace of a model. `graph`: calls of torch functions and `invoke_subgraph`s; placeholders hold fakes in
    `meta["example_value"]`. `sources`: the origin of each placeholder, and of each node that reads a batch input's size.
    `returned`: the model's return value, rebuilt around the fakes of the graph's results. `changes_state`: the forward changed
    Python objects that outlive it. `fakes`: the fake mode of the `example_value`s. Dynamo traces in its own modes, and AOT
    refuses to trace under any other."""

    graph: fx.GraphModule
    sources: dict[fx.Node, Source]
    returned: Any
    fakes: FakeTensorMode
    changes_state: bool = False

    @property
    def results(self) -> list[fx.Node]:
        return list(self.graph.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def shape_env(self) -> ShapeEnv:
        assert self.fakes.shape_env is not None
        return self.fakes.shape_env


def called_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls; "" if it has none."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def capture_model_graph(
    model: nn.Module, batch: Mapping[str, Tensor], stack: LayerStack, fakes: FakeTensorMode, options: dict[str, Any],
    taken: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict, each_call: bool = False,
) -> ModelGraph:
    """Traces `model(**taken(batch), **options)`.

    The batch size is dynamic and equal among inputs, and so is the length, for the inputs that have it. `each_call`: no call of
    a layer reuses the trace of another (see `layers_as_regions`). Raises `CaptureError` with Dynamo's reason and the line of
    the model that caused it."""
    names, tensors = tuple(batch), tuple(batch.values())
    pairs = pairs_of(batch)
    # For each input: its dimensions that are the batch size or the length, and which dimension of the first input they equal.
    dimensions = [((0, 0), (tensor.dim() - 2, 1), (tensor.dim() - 1, 1)) if name in pairs else
                  ((0, 0), (1, 1)) if tensor.shape[:2] == tensors[0].shape[:2] else ((0, 0),) for name, tensor in batch.items()]
    tied = [tensor.shape[0] == tensors[0].shape[0] for tensor in tensors]  # images may be traced apart
    for tensor, dynamic in zip(tensors, dimensions, strict=True):
        for dimension, _ in dynamic:
            if tensor.shape[dimension] > 1:  # Dynamo makes a size of 1 constant, even if it is marked dynamic
                dynamo.mark_dynamic(tensor, dimension)

    def step(*inputs: Tensor) -> Any:
        for other, dynamic in itertools.compress(zip(inputs, dimensions, strict=True), tied):
            for dimension, of_first in dynamic:  # each marked dimension gets its own symbol: assert that they are equal
                torch_check(other.shape[dimension] == inputs[0].shape[of_first])
        return model(**taken(dict(zip(names, inputs, strict=True))), **options)

    dynamo.reset()
    with (fakes, warnings.catch_warnings(record=True) as warned, traceable_adapters(), traced_experts(),
          unchecked_distributions(), unchecked_values(), sizes_unread_by_messages(), rounded_sizes(),
          convolutions_of_any_batch(), native_branches(model),
          dynamo.config.patch(fake_tensor_cache_enabled=False), layers_as_regions(stack, each_call)):
        warnings.simplefilter("always")
        try:
            graph = dynamo_graph_capture_for_export(_with_own_globals(step))(*tensors)
        except MegacompileError:
            raise
        except TRACING_ERRORS as reason:
            raise_foreign(reason)
            raise explained(model, reason) from reason
        for replay in (graph._dynamo_bytecode_flatten, graph._dynamo_bytecode_unflatten):
            # torch 2.11 looks for builtins (`type`) among the module's globals, and refuses without.
            replay.f_globals = {**vars(builtins), **replay.f_globals}  # type: ignore[union-attr]
        # The graph's own prelude fetches its flat inputs; identity tells which parameter each one is.
        flat = graph._dynamo_bytecode_flatten(*tensors)  # type: ignore[operator]
        results = graph.graph.output_node().args[0]
        returned = graph._dynamo_bytecode_unflatten(  # type: ignore[operator]
            tuple(n.meta["example_value"] if isinstance(n, fx.Node) else n for n in results), tensors)  # type: ignore[union-attr]
    for module in (graph, *(m for m in graph.modules() if isinstance(m, fx.GraphModule))):
        order_arguments(module)
        _name_squeezed(module)
        _read_sizes(module)
    sources = _sources(model, graph, flat, dict(batch))
    _count_outside(graph, sources)
    own_rewritten_buffers(graph.graph, sources)
    traced: Any = next(n.meta["example_value"] for n in sources if isinstance(n.meta["example_value"], Tensor))
    release_tracked_fakes(traced.fake_mode.shape_env)
    return ModelGraph(graph, sources, returned, traced.fake_mode,
                      any("side effects happened" in str(each.message) for each in warned))


def _with_own_globals(function: Any) -> Any:
    """The same function with its own dictionary of globals. Dynamo adds the graph and other objects to a function's globals,
    and they would stay in this module forever."""
    return types.FunctionType(function.__code__, dict(function.__globals__), function.__name__, function.__defaults__,
                              function.__closure__)


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """A context in which `torch.distributions` do not check their parameters' values, since fakes have none."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


@contextlib.contextmanager
def unchecked_values() -> Iterator[None]:
    """A context in which transformers models skip their checks of values. A template does not contain these checks in any case,
    and positions and images are checked on the host. Torch 2.11 turns such a check into a number that stops its trace."""
    with mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"):
        yield


@contextlib.contextmanager
def sizes_unread_by_messages() -> Iterator[None]:
    """A context in which a message about sizes contains their symbols. Otherwise Dynamo formats the traced numbers, and so
    turns the number of images into a constant: models format a message with the number of features even without an error."""
    written = LazySymNodeFormatString.__repr__

    def with_symbols(self: Any) -> str:
        return str.format(self.fmt_var.as_python_constant(), str(self.sym_node_var.sym_num))

    LazySymNodeFormatString.__repr__ = with_symbols  # type: ignore[method-assign]
    try:
        yield
    finally:
        LazySymNodeFormatString.__repr__ = written  # type: ignore[method-assign]


def order_arguments(module: fx.GraphModule) -> None:
    """Makes keyword arguments of calls positional, as far as no earlier argument is missing. Code that reads a node then finds
    `F.embedding(input=x, weight=w)` as `F.embedding(x, w)`."""
    for node in module.graph.nodes:
        if node.kwargs and node.op in ("call_function", "call_method"):
            args, named = list(node.args), dict(node.kwargs)
            for name in _places(node)[len(args):]:
                if name not in named:
                    break
                args.append(named.pop(name))
            node.args, node.kwargs = tuple(args), named
    module.recompile()


def _places(node: fx.Node) -> list[str]:
    """The names of the parameters that a call may give by position, in order. Empty if they are not known."""
    target: Any = getattr(torch.ops.aten, node.target, None) if isinstance(node.target, str) else node.target
    if isinstance(target, types.FunctionType):
        return [name for name, parameter in inspect.signature(target).parameters.items()
                if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)]
    if isinstance(target, OpOverload | OpOverloadPacket):
        overloads = [target] if isinstance(target, OpOverload) else [getattr(target, name) for name in target.overloads()]
        schemas, first = [each._schema for each in overloads], "self"
    else:  # the functions of torch name a schema's first parameter otherwise
        schemas, first = get_signature_for_torch_op(target, return_schemas=True)[1] or [] if callable(target) else [], "input"
    named = [{first if each.name == "self" else each.name: each.kwarg_only for each in schema.arguments} for schema in schemas]
    fitting = [names for names in named if node.kwargs.keys() <= names.keys() and len(node.args) <= len(names)]
    return [name for name in (fitting[0] if fitting else ()) if not any(names.get(name) for names in fitting)]


def _name_squeezed(module: fx.GraphModule) -> None:
    """Makes every `squeeze()` name the dimensions that it removes, so that a micro-batch of one row keeps its row dimension."""
    for node in module.graph.nodes:
        if node.target in ("squeeze", torch.squeeze) and len(node.args) == 1 and not node.kwargs:
            shape = node.args[0].meta["example_value"].shape
            node.args = (node.args[0], tuple(dim for dim, size in enumerate(shape) if isinstance(size, int) and size == 1))
    module.recompile()


def _read_sizes(module: fx.GraphModule) -> None:
    """Reads a size instead of a stride of the same value, since an expanded mask has other strides once it is passed between
    calls."""
    known: dict[Any, tuple[fx.Node, int]] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        value: Any = node.meta.get("example_value")
        for dimension, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, torch.SymInt):
                known[size.node.expr] = node, dimension
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_stride.int):
        found = known.get(getattr(getattr(node.meta["example_value"], "node", None), "expr", None))
        if found is not None:
            node.target, node.args = torch.ops.aten.sym_size.int, found
    module.recompile()


def _sources(
    model: nn.Module, graph: fx.GraphModule, flat: list[Any], batch: dict[str, Tensor]
) -> dict[fx.Node, Source]:
    # `named_parameters` gives a tied parameter once, under its first name: the canonical one.
    origin = {id(t): Source("buffer", n) for n, t in model.named_buffers()}
    origin |= {id(t): Source("parameter", n) for n, t in model.named_parameters()}
    origin |= {id(t): Source("batch", n) for n, t in batch.items()}
    placeholders = graph.graph.find_nodes(op="placeholder")
    examples = [(n, n.meta["example_value"], value) for n, value in zip(placeholders, flat, strict=True)]
    # All batch inputs have the same sizes. They are read from the first, which is there even without labels.
    first = next(iter(batch))
    sizes = {
        str(size): Source("size", first if dimension < 2 else origin[id(value)].name, dimension)
        for _, example, value in examples if id(value) in origin and origin[id(value)].kind == "batch"
        for dimension, size in enumerate(example.shape)
    }
    sources: dict[fx.Node, Source] = {}
    for node, example, value in examples:  # torch 2.11 has sizes among the placeholders, 2.13 does not
        source = origin.get(id(value)) if isinstance(value, Tensor) else sizes.get(str(example))
        if source is None:
            # Such a tensor is a fake by now, and its data could not be supplied later.
            raise CaptureError(
                f"{_attribute_of(model, value, node)} is neither a parameter nor a buffer: register it with "
                "register_buffer, so that it can move to the device"
            )
        sources[node] = source
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        source = sources.get(node.args[0])  # type: ignore[arg-type]
        if source is not None and source.kind == "batch":  # read from the batch, not passed on from the prologue
            dimension: int = node.args[1]  # type: ignore[assignment]
            sources[node] = Source("size", first if dimension < 2 else source.name, dimension)
    return sources


def _count_outside(graph: fx.GraphModule, sources: dict[fx.Node, Source]) -> None:
    """Computes numbers that a layer returns (how many rows its router saw) from the sizes of the batch, since calls do not
    exchange numbers."""
    sizes = {n.meta["example_value"].node.expr: n for n, s in sources.items() if s.kind == "size"}
    for node in list(graph.graph.nodes):
        value = node.meta.get("example_value")
        if node.target is operator.getitem and node.args[0].target is INVOKE and isinstance(value, torch.SymInt):
            before = set(graph.graph.nodes)
            with graph.graph.inserting_before(node):
                known = {symbol: fx.Proxy(size) for symbol, size in sizes.items()}
                number = sympy_interp(PythonReferenceAnalysis, known, value.node.expr).node
            for made in graph.graph.nodes:
                if made not in before:
                    arguments = fx.map_arg(made.args, lambda n: n.meta["example_value"])
                    made.meta["example_value"] = made.target(*arguments)
            node.replace_all_uses_with(number)
            graph.graph.erase_node(node)
    graph.recompile()


def _attribute_of(model: nn.Module, value: Any, node: fx.Node) -> str:
    for name, module in model.named_modules():
        for attribute, held in vars(module).items():
            if held is value:
                return f"tensor attribute {name + '.' if name else ''}{attribute} of {type(model).__name__}"
    return f"the tensor or number {node.name} that {type(model).__name__} reads"
