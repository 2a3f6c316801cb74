"""Most of the time of a test that streams a tiny model is its capture, and most are captures of the same few models. What is
captured depends on no weight: one capture serves all models that are built alike."""
from __future__ import annotations

import inspect
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.codegen.cache import CacheError, cache_directory
from megacompile.frontend.capture import CapturedModel, capture
from megacompile.frontend.templates import graph_cache
from megacompile.frontend.tracing.layers import LayerStack

captured: dict[Hashable, CapturedModel] = {}
#: How many differentiated graphs tests keep. All of them together make about three thousand.
MOST_GRAPHS = 8192
#: What a config says of the file that a model was read from, and of its weights, whose dtypes count by themselves.
_OF_FILES = ("_name_or_path", "architectures", "dtype", "initializer_range", "torch_dtype", "transformers_version")
_OF_MODULES = vars(nn.Module()).keys() - {"training"}  # what every module has, and no setting
_signature = inspect.signature(capture)


def keep_graphs_of_all_tests(patch: pytest.MonkeyPatch) -> None:
    """Half of the time of a capture goes into graphs that are kept in the user's cache folder, for as long as the code that
    makes them stays as it is. It keeps fewer than all tests make, so that each would be forgotten before its test runs again.
    The tests' graphs have a folder beside the user's, except where a test has a cache of its own."""
    try:
        users = cache_directory() / "graphs"
    except CacheError:
        return
    path_of = graph_cache._path_of

    def found(asked: str) -> Path | None:
        path = path_of(asked)
        return users.with_name("graphs-of-tests") / path.name if path is not None and path.parent == users else path

    patch.setattr(graph_cache, "_path_of", found)
    patch.setattr(graph_cache, "MOST_GRAPHS", MOST_GRAPHS)


def capture_once(model: nn.Module, **options: Any) -> CapturedModel:
    """`capture`, whose result is kept for models that are built alike."""
    bound = _signature.bind(model, **options)
    bound.apply_defaults()
    alike, example, layers = _alike(model), bound.arguments.pop("example") or {}, bound.arguments.pop("layers")
    if alike is None:
        return capture(model, **options)
    lists = (layers.paths, layers.largest) if isinstance(layers, LayerStack) else layers
    key = (alike, lists, *((name, tensor.shape, tensor.dtype) for name, tensor in example.items()), *bound.kwargs.values())
    if key not in captured:
        captured[key] = capture(model, **options)
    return captured[key]


def _alike(model: nn.Module) -> Hashable | None:
    """A key that models have in common if they are built alike; None for a model that may hold anything. A model's mode and
    device do not count: a capture copies the model onto fakes, in a mode of its own."""
    modules = list(model.modules())
    if any("forward" in vars(each) for each in modules):
        return None
    known = all(type(each).__module__.startswith(("transformers.", "torch.", "peft.", "megacompile.")) for each in modules)
    if known and hasattr(model, "config"):
        config = {key: value for key, value in model.config.to_dict().items() if key not in _OF_FILES}
        adapters = [repr({key: value for key, value in vars(each).items() if key not in _OF_MODULES and not callable(value)})
                    for each in modules if type(each).__module__.startswith(("peft.", "megacompile."))]
        settings: Hashable = json.dumps(config, default=str, sort_keys=True), model.config._attn_implementation, *adapters
    else:
        held = [(name, value) for each in modules for name, value in vars(each).items() if not name.startswith("_")]
        if not all(_is_plain(value) for _, value in held):
            return None
        settings = repr(held)
    first: dict[int, str] = {}
    parameters = [(name, first.setdefault(id(p), name), tuple(p.shape), p.stride(), p.dtype, p.requires_grad)
                  for name, p in model.named_parameters(remove_duplicate=False)]
    buffers = [(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()]
    return settings, *parameters, *buffers, *((name, type(each)) for name, each in model.named_modules())


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | torch.dtype)
