"""Finds the decoder layers of a model, the stack whose weights stream, and marks them for Dynamo.

A stack is the items of one list or of several. The user names them, a model class registers them, or they are found: the
`nn.ModuleList` (or `nn.Sequential` of one class) with the most parameters, and similar lists next to it. When each layer runs,
and that calls form a chain, is read from the captured graph in `layer_calls.py` and `split.py`.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

from megacompile.compat import dynamo
from megacompile.compat.dynamo import get_metrics_context
from megacompile.errors import CaptureError, shortened

M = TypeVar("M", bound=nn.Module)

# transformers adds `warning_once` and `info_once`.
_LOGGING = ("debug", "info", "warning", "error", "warning_once", "info_once")
# Where a model class keeps its layers, for the classes whose stack is not the list with the most parameters. It is
# the one piece of module state in the frontend: registration is a declaration about a class, made at import time.
_REGISTERED: dict[type[nn.Module], tuple[str, ...]] = {}
#: Qualified names of lists of layers: one, or several.
Layers = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """The decoder layers of a model, list by list, with their qualified names ("model.layers.0", ...). `paths`: the names of
    the lists. `largest`: if the lists were found, the one of them with the most parameters; None if they were named."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    largest: str | None = None

    def __str__(self) -> str:
        return " and ".join(self.paths)


def register_layers(model_class: type[nn.Module], layers: Layers) -> None:
    """Declares that instances of `model_class` (and of its subclasses) keep their decoder layers at `layers`.

    `layers` is the qualified name of an `nn.ModuleList` or `nn.Sequential`, e.g. "decoder.blocks", or a sequence of several
    such names. An explicit `layers=` of `capture` or `stream` overrides it. Raises `CaptureError` if `model_class` is not a
    module class."""
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise CaptureError(f"cannot register layers for {model_class!r}: give a subclass of torch.nn.Module")
    _REGISTERED[model_class] = _paths(layers)


def layer_stack(*layers: str) -> Callable[[type[M]], type[M]]:
    """`register_layers` as a decorator of the class: `@megacompile.layer_stack("decoder.blocks")`, or several names."""

    def declare(model_class: type[M]) -> type[M]:
        register_layers(model_class, layers)
        return model_class

    return declare


def find_layers(model: nn.Module, layers: Layers | None = None) -> LayerStack:
    """The lists named by `layers`; else those registered for the model's class; else the list with the most parameters, and
    similar lists next to it. If the model names its decoder, only lists in it count, since an encoder may be larger. Raises
    `CaptureError`, naming the candidates, if the list is missing or empty."""
    registered = (_REGISTERED[cls] for cls in type(model).__mro__ if cls in _REGISTERED)
    named = next(registered, ()) if layers is None else _paths(layers)
    candidates = stack_candidates(model)
    if not candidates and not named:
        raise CaptureError(
            f"no repeated layer stack found in {type(model).__name__}: keep the decoder layers in an "
            'nn.ModuleList, or name the stack with layers="path.to.layers"'
        )
    paths = named or _sibling_stacks(model, _of_decoder(model, candidates) or candidates)
    paths = tuple(inner for path in paths for inner in _lists_in(path, _list_at(model, path, candidates)))
    for path, other in itertools.permutations(paths, 2):
        if path.startswith(f"{other}."):
            raise CaptureError(f'layers=: "{path}" is inside "{other}", whose items are whole layers: name only one of the two')
    items: dict[int, tuple[str, nn.Module]] = {}  # a module that is several items is one layer with several calls
    for path in paths:
        for name, layer in model.get_submodule(path)._modules.items():
            if layer is not None:
                items.setdefault(id(layer), (f"{path}.{name}", layer))
    names, modules = zip(*items.values(), strict=True)
    return LayerStack(paths, names, modules, None if named else max(paths, key=lambda path: candidates.get(path, 0)))


def _paths(layers: Layers) -> tuple[str, ...]:
    names = (layers,) if isinstance(layers, str) else layers
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        raise CaptureError("layers must be the name of an nn.ModuleList, such as 'model.layers', or several names, not "
                           f"{shortened(repr(layers))}")
    return tuple(dict.fromkeys(names))


def _list_at(model: nn.Module, path: str, candidates: Collection[str]) -> nn.Module:
    try:
        stack = model.get_submodule(path)
    except AttributeError:
        stack = None
    if not isinstance(stack, (nn.ModuleList, nn.Sequential)) or len(stack) == 0:
        found = ", ".join(candidates) or "none"
        held = 0 if stack is None else len(list(stack.children()))
        what = "does not exist" if stack is None else f"is a {type(stack).__name__} of {held} modules"
        raise CaptureError(
            f'layers="{path}" {what} in {type(model).__name__}: name a non-empty nn.ModuleList or nn.Sequential of '
            f"layers (found: {found})"
        )
    return stack


def _lists_in(path: str, stack: nn.Module) -> list[str]:
    """The list itself if its items are layers; the inner lists if it is a list of lists (stages)."""
    items = {name: item for name, item in stack._modules.items() if item is not None}
    if not all(isinstance(item, nn.ModuleList) for item in items.values()):
        return [path]
    filled = {name: item for name, item in items.items() if len(item)}  # type: ignore[arg-type]
    return [inner for name, item in filled.items() for inner in _lists_in(f"{path}.{name}", item)] or [path]


def _sibling_stacks(model: nn.Module, candidates: Mapping[str, int]) -> tuple[str, ...]:
    """The list with the most parameters, and similar lists that are also worth streaming: in the same module, or in a sibling
    module of the same class, and no smaller than one layer of the largest list. Encoders of images or sounds are modules of
    other classes."""
    # Nested lists (experts inside a layer) hold fewer parameters than the list around them; ties go to the outer.
    largest = max(candidates, key=candidates.__getitem__)
    held = candidates[largest] / max(1, len(model.get_submodule(largest)._modules))

    def beside(path: str) -> bool:
        own, other = (each.rpartition(".")[0] for each in (largest, path))
        if own == other:
            return True
        alike = type(model.get_submodule(own)) is type(model.get_submodule(other))
        return alike and own.rpartition(".")[0] == other.rpartition(".")[0] and "" not in (own, other)

    return tuple(path for path, count in candidates.items() if path == largest or (
        beside(path) and count >= held and isinstance(model.get_submodule(path), nn.ModuleList)))


def _of_decoder(model: nn.Module, candidates: Mapping[str, int]) -> dict[str, int]:
    """The candidates inside the decoder, if the model names its decoder in transformers' way."""
    if not hasattr(model, "get_decoder"):
        return {}
    inside = {id(module) for module in model.get_decoder().modules()}  # type: ignore[operator]
    return {path: count for path, count in candidates.items() if id(model.get_submodule(path)) in inside}


def encoders(model: nn.Module, stack: LayerStack) -> list[Any]:
    """The transformers models inside a model but outside of its stack, such as image encoders."""
    layers = {id(layer) for layer in stack.layers}
    within = {id(module) for layer in stack.layers for module in layer.modules()}
    return [m for m in model.modules() if hasattr(m, "set_attn_implementation") and id(m) not in within
            and not any(id(inner) in layers for inner in m.modules())]


def stack_candidates(model: nn.Module) -> dict[str, int]:
    """Maps the qualified name of every list that could be the stack to its number of parameters, outermost first."""
    found = {}
    for name, module in model.named_modules():
        classes = {type(child) for child in module.children()}
        alike = isinstance(module, nn.Sequential) and len(classes) == 1 and len(module) > 1
        if name and (isinstance(module, nn.ModuleList) or alike):
            parameters = sum(p.numel() for p in module.parameters())
            if parameters:
                found[name] = parameters
    return found


def share_weights(stack: LayerStack) -> bool:
    """True if a parameter is part of several layers."""
    parameters = [id(parameter) for layer in stack.layers for parameter in layer.parameters()]
    return len(parameters) > len(set(parameters))


@contextlib.contextmanager
def layers_as_regions(stack: LayerStack, each_call: bool = False) -> Iterator[None]:
    """A context in which Dynamo turns each call of a decoder layer into an `invoke_subgraph` node. `each_call`: it traces every
    call separately. When a layer runs again or shares another's weights, Dynamo has cached much about it, and its check before
    reusing the region does not cover everything that the region depends on."""
    # Dynamo refuses calls of loggers, which models make (gpt2 logs that it has no loss type).
    settings: dict[str, object] = {"ignore_logging_functions": {
        getattr(logging.Logger, name) for name in _LOGGING if hasattr(logging.Logger, name)}}
    # torch 2.13 inlines regions that are called once (2.11 has no such setting): a layer unlike all others, and any
    # one-layer stack, would dissolve into the outer graph.
    if hasattr(dynamo.config, "inline_single_use_invoke_subgraph"):
        settings["inline_single_use_invoke_subgraph"] = False
    classes = {type(layer) for layer in stack.layers}
    # An inherited forward is patched on the subclass, so that the base class keeps its own.
    inherited = {cls for cls in classes if "forward" not in cls.__dict__}
    originals = {cls: cls.forward for cls in classes}
    numbers = itertools.count()
    own = {**_parts_as_they_are(stack), **_built_differently(stack, numbers)}
    with _of_classes(own), _without_reuse() if each_call else contextlib.nullcontext():
        for cls, forward in originals.items():
            cls.forward = _region(forward, next(numbers))  # type: ignore[method-assign]
        try:
            # Restored before Dynamo logs its settings: torch 2.11 cannot write a set of functions as JSON.
            with get_metrics_context(), dynamo.config.patch(settings):  # type: ignore[arg-type]
                yield
        finally:
            for cls, forward in originals.items():
                if cls in inherited:
                    del cls.forward
                else:
                    cls.forward = forward  # type: ignore[method-assign]


@contextlib.contextmanager
def _without_reuse() -> Iterator[None]:
    """A context in which Dynamo never reuses a region for another call. (Torch 2.11 never does.)"""
    regions = dynamo.regions()
    with (mock.patch.object(regions, "is_reuse_eligible", return_value=False)
          if hasattr(regions, "is_reuse_eligible") else contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def _of_classes(classes: Mapping[nn.Module, type[nn.Module]]) -> Iterator[None]:
    """A context in which the modules have these classes."""
    before = {module: type(module) for module in classes}
    for module, cls in classes.items():
        module.__class__ = cls
    try:
        yield
    finally:
        for module, cls in before.items():
            module.__class__ = cls


def _parts_as_they_are(stack: LayerStack) -> dict[nn.Module, type[nn.Module]]:
    """Classes, with the current forward, for parts of layers that have the class of a layer. A part does not become a region
    (zamba2's shared block calls a Mamba layer), since that would hide its operations from everything that reads the layer's
    graph."""
    plain = {cls: _with_forward(cls, cls.forward) for cls in {type(layer) for layer in stack.layers}}
    return {part: plain[type(part)] for layer in stack.layers for part in layer.modules()
            if type(part) in plain and part not in stack.layers}


def _built_differently(stack: LayerStack, numbers: Iterator[int]) -> dict[nn.Module, type[nn.Module]]:
    """Classes with separate forwards for layers of one class that are built differently.

    Torch 2.13 traces a region once, and reuses it for each later call whose guards hold. But a module that computes nothing
    (`nn.Identity` in place of the first layer's norm) leaves no guard, and the norms of all other layers would be skipped.
    Dynamo looks regions up by code."""
    groups: dict[type[nn.Module], dict[Hashable, list[nn.Module]]] = {}
    for layer in stack.layers:
        groups.setdefault(type(layer), {}).setdefault(build_of(layer), []).append(layer)
    found: dict[nn.Module, type[nn.Module]] = {}
    for cls, builds in groups.items():
        for number, layers in enumerate(builds.values()):
            if number:
                found |= dict.fromkeys(layers, _with_forward(cls, _region(cls.forward, next(numbers))))
    return found


def _with_forward(cls: type[nn.Module], forward: Any) -> type[nn.Module]:
    """A class like `cls` with this forward."""
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def build_of(layer: nn.Module) -> Hashable:
    """A value that is equal for layers made of the same modules with the same parameters and buffers."""
    tensors = itertools.chain(layer.named_parameters(), layer.named_buffers())
    return (tuple((name, type(module)) for name, module in layer.named_modules()),
            tuple((name, tuple(tensor.shape), tensor.stride(), tensor.dtype) for name, tensor in tensors))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if type(value) is tuple else []


def _without_aliases(value: Any, given: list[Tensor]) -> Any:
    """Nested tuples in which the given tensors are replaced by copies."""
    if type(value) is tuple:
        return tuple([_without_aliases(each, given) for each in value])
    return value.clone() if isinstance(value, Tensor) and any([value is g for g in given]) else value  # noqa: C419


def _region(forward: Any, number: int) -> Any:
    """A region that computes `forward`, with separate code, and returns tensors that are not its arguments. Dynamo forbids a
    region to return an argument, but some layers pass arguments on (an earlier layer's choice of keys)."""

    def own(*args: Any, **kwargs: Any) -> Any:
        results = forward(*args, **kwargs)
        if type(results) is not tuple:
            return results
        return _without_aliases(results, _tensors((*args, *kwargs.values())))

    code = own.__code__.replace(co_name=f"{forward.__name__}_{number}")
    return torch.compiler.nested_compile_region(
        functools.wraps(forward)(types.FunctionType(code, own.__globals__, forward.__name__, None, own.__closure__)))
