"""A model -> its graph, traced on fakes: with our attention if its layers call it, and with each call traced separately if
layers run again."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megacompile.compat.core import FakeTensorMode, TorchDispatchMode
from megacompile.compat.symbols import ShapeEnv
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.batches.images import model_arguments
from megacompile.frontend.batches.pair_masks import masks_of
from megacompile.frontend.batches.split_rows import images_of, join_rows, traced_apart
from megacompile.frontend.graph.attention_calls import all_layers_call_mixers
from megacompile.frontend.ops.attention import FORMS, implementation_for
from megacompile.frontend.ops.mixer_ops import mixer_of
from megacompile.frontend.tracing.alike_layers import Shortened, shorten
from megacompile.frontend.tracing.explained import TRACING_ERRORS
from megacompile.frontend.tracing.fake_model import (
    capture_shape,
    fake_batch,
    install_recorders,
    is_transformers_model,
    make_fake_model,
)
from megacompile.frontend.tracing.layer_calls import LayerCall, layer_calls
from megacompile.frontend.tracing.layers import LayerStack, find_layers, share_weights
from megacompile.frontend.tracing.model_graph import ModelGraph, capture_model_graph
from megacompile.frontend.tracing.modes import RecordedCall, alike, operations, torch_calls
from megacompile.frontend.tracing.native_branches import as_traced
from megacompile.frontend.tracing.peft_tracing import forward_signature, switch_off_adapters
from megacompile.ir.plan import CaptureKey
from megacompile.system.progress import under_way


# --------------------
# A plain run of a model on fakes before it is traced. It takes a small part of a trace's time, and shows which traces would
# be useless.
#
# A model whose layers do not all call our attention is traced with its own. If layers run more than once, each call is traced
# separately (see `trace.py`). Without this run, both would only be known at the end of a first trace.
@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """Observations from a run. `without_attention`: a layer ran attention of its own, or our attention refused its
    arguments. `again`: a layer ran more than once. Both are False if the run cannot tell."""

    without_attention: bool = False
    again: bool = False


class _MixerCalls(TorchDispatchMode):
    """State: how many calls of our mixers there were, and of ops of a mixer that is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = self.own = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        name = function.overloadpacket.__name__
        self.ours += mixer_of(function) is not None
        self.own += name in ("bmm", "baddbmm", "convolution") or "scaled_dot_product" in name
        return function(*args, **(kwargs or {}))


def rehearse(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], stack: LayerStack) -> Rehearsal:
    """Runs `model(**batch, **options)`, all fakes; `stack` is the model's."""
    calls, before, visits = _MixerCalls(), dict[nn.Module, tuple[int, int]](), Counter[nn.Module]()
    idle: set[nn.Module] = set()

    def enter(layer: nn.Module, args: Any) -> None:
        before[layer] = calls.ours, calls.own

    def leave(layer: nn.Module, args: Any, result: Any) -> None:
        visits[layer] += 1
        ours, own = before[layer]
        if calls.ours == ours and calls.own > own:
            idle.add(layer)

    handles = [handle for layer in stack.layers
               for handle in (layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave))]
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(), as_traced(model), calls:
            warnings.simplefilter("ignore")
            model(**batch, **options)
    except (UnsupportedError, CaptureError):
        return Rehearsal(without_attention=True)
    except TRACING_ERRORS:  # such as a branch on values: the trace shows whether the model can be traced
        return Rehearsal()
    finally:
        for handle in handles:
            handle.remove()
    return Rehearsal(bool(idle), any(count > 1 for count in visits.values()))


class Traced(NamedTuple):
    """A model's graph, its fake model, the fake batch, and its attention: the name of ours, or None for the model's own.
    `shortened`: the layers that are missing from the fake model and the graph, if any."""

    graph: ModelGraph
    fake_model: nn.Module
    batch: dict[str, Tensor]
    attention: str | None
    shortened: Shortened | None

    @property
    def repeats(self) -> Mapping[str, str]:
        """The layers that were not traced, by name, each with the layer whose calls are copied for it."""
        return {} if self.shortened is None else self.shortened.repeats


def trace(
    model: nn.Module, layers: tuple[str, ...], example: Mapping[str, Tensor] | None, key: CaptureKey,
    size: tuple[int, int] | None = None, images_apart: bool = False, whole: bool = False,
) -> Traced:
    """A trace of the model, with our attention if its layers call it; with all of its layers if `whole`. `size`: of the batch,
    [batch, length]; None: that of the key's captures.

    A transformers model that asks for a mask but has its own attention code would get no mask, and silently see the future. So
    it is captured again with the attention implementation it came with. `images_apart`: the number of images is a size of its
    own (see `rows.py`).
    """
    ours = our_attention(model, example, key)
    shown = _rehearsed(model, layers, example, key, size, ours)
    for attention in dict.fromkeys((None if shown.without_attention else ours, None)):
        try:
            found = _traced(model, layers, example, key, size, attention, images_apart, shown.again, whole)
        except (UnsupportedError, CaptureError):
            if attention is not None:  # such as biases, or a mask that layers index: the model's own attention supports them
                continue
            raise
        graph, batch = found.graph, found.batch
        if images_apart and not join_rows(graph, images_of(batch), key.images):
            raise CaptureError(f"{type(model).__name__} does more than join the list of its images' features, so a graph "
                               "would only hold for one number of images: compute with "
                               f"{', '.join(sorted(images_of(batch)))} as one tensor [batch, ...], without a list")
        if attention is None or all_layers_call_mixers(graph):
            return found
    raise AssertionError("the last trace is always returned")


def our_attention(model: nn.Module, example: Mapping[str, Tensor] | None, key: CaptureKey) -> str | None:
    """The name of our attention for batches of a key; None if the model uses its own."""
    if not is_transformers_model(model):
        return None
    if key.sequence_ranks > 1:  # exchanges around attention say where documents begin
        return FORMS["causal"]
    asked = (*key.further, *masks_of(example))
    return implementation_for(asked, model.config._attn_implementation)  # type: ignore[union-attr, arg-type]


def _rehearsed(
    model: nn.Module, layers: tuple[str, ...], example: Mapping[str, Tensor] | None, key: CaptureKey,
    size: tuple[int, int] | None, attention: str | None,
) -> Rehearsal:
    fakes, fake_model, batch, options = subject(model, layers, example, key, attention, size)
    with fakes:
        return rehearse(fake_model, model_arguments(batch, key.images), options, find_layers(fake_model, layers))


def _traced(
    model: nn.Module, layers: tuple[str, ...], example: Mapping[str, Tensor] | None, key: CaptureKey,
    size: tuple[int, int] | None, attention: str | None, images_apart: bool, each_call: bool = False, whole: bool = False,
) -> Traced:
    """A trace with this attention. If layers run more than once, or share weights, each call is traced separately."""
    fakes, fake_model, batch, options = subject(model, layers, example, key, attention, size)
    if images_apart:
        batch |= traced_apart(batch, fakes)
    stack = find_layers(fake_model, layers)
    install_recorders(fake_model, stack)
    each_call = each_call or share_weights(stack)
    shortened = None
    if not (each_call or images_apart or whole):
        with fakes:
            shortened = shorten(fake_model, model_arguments(batch, key.images), options, stack)
        stack = find_layers(fake_model, layers)
    graph = capture_model_graph(fake_model, batch, stack, fakes, options, functools.partial(model_arguments, each=key.images),
                                each_call)
    if not each_call and _need_own_traces(graph, layer_calls(graph, fake_model, stack)):
        return _traced(model, layers, example, key, size, attention, images_apart, each_call=True)
    return Traced(graph, fake_model, batch, attention, shortened)


def _need_own_traces(graph: ModelGraph, calls: Sequence[LayerCall]) -> bool:
    """True if a layer runs more than once, or reads a weight or a buffer that another layer or the model reads too. Then Dynamo
    may give each later layer the tensor of the first one: when it reuses a region, it does not check which tensors it was
    traced with."""
    layers = {call.node for call in calls}
    return any(call.visit > 1 for call in calls) or any(
        len(node.users) > 1 and not layers.isdisjoint(node.users)
        for node, source in graph.sources.items() if source.kind in ("parameter", "buffer"))


def subject(
    model: nn.Module, layers: tuple[str, ...], example: Mapping[str, Tensor] | None, key: CaptureKey, attention: str | None,
    size: tuple[int, int] | None = None,
) -> tuple[FakeTensorMode, nn.Module, dict[str, Tensor], dict[str, Any]]:
    """The inputs of a trace: the fakes' mode, the fake model, its batch and its other arguments. `size`: as for `trace`."""
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    fake_model = make_fake_model(model, fakes, attention, training=not key.evaluating, layers=layers)
    if key.without_adapters:
        switch_off_adapters(fake_model)
    given = dict(example) if example is not None else None
    batch = fake_batch(model, given, fakes, size or capture_shape(key), key.further, key.images)
    return fakes, fake_model, batch, {"use_cache": False} if "use_cache" in forward_signature(model).parameters else {}


# --------------------
# In which other modes, and at which other sizes, a capture holds: those where the model computes the same (`modes.py`).
class Validity:
    """The batches and modes for which a capture holds. `found`: its trace of `model`, with `layers`, for an `example` and a
    `key`. `images_apart`: the number of images is a separate size. State: `unlike`, traces that differ, by their key."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...], example: Mapping[str, Tensor] | None, key: CaptureKey,
                 found: Traced, images_apart: bool) -> None:
        self.model, self.layers, self.example, self.key = model, layers, example, key
        self.images_apart, self.attention, self.size = images_apart, found.attention, capture_shape(key)
        self.performed, self.repeats = operations(found.graph), found.repeats
        self.calls = found.shortened.calls if found.shortened is not None else None
        self.unlike: dict[CaptureKey, Traced] = {}
        self.called = functools.cache(self._called)
        self.holds = functools.cache(self._holds)

    def _called(self, key: CaptureKey, size: tuple[int, int]) -> tuple[RecordedCall, ...] | None:
        fakes, fake_model, batch, options = subject(self.model, self.layers, self.example, key, self.attention, size)
        with fakes:
            return torch_calls(fake_model, model_arguments(batch, key.images), options)

    def _holds(self, training: bool, size: tuple[int, int]) -> bool:
        """True if the model computes the same in a mode and for a batch of [batch, length] `size`."""
        key = dataclasses.replace(self.key, evaluating=not training)
        exact = size == self.size  # else some whole numbers are sizes
        expected = self.calls if self.calls is not None else self.called(self.key, self.size)
        called = None if expected is None else self.called(key, size)
        if expected is not None and called is not None and alike(called, expected, exact):
            return True
        with recording(), under_way(f"tracing {type(self.model).__name__} in another mode or size"):
            made = trace(self.model, self.layers, self.example, key, size, self.images_apart)
            if made.repeats == self.repeats:
                same = alike(operations(made.graph), self.performed, exact)
            else:  # other layers were traced
                same = alike(self._operations(key, size), self._operations(self.key, self.size), exact)
        if not same and exact and not self.images_apart:
            self.unlike[key] = made
        return same

    def _operations(self, key: CaptureKey, size: tuple[int, int]) -> tuple[RecordedCall, ...]:
        """The operations of a trace with all layers."""
        return operations(trace(self.model, self.layers, self.example, key, size, self.images_apart, whole=True).graph)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """A context in which gradients are recorded, whatever the caller's mode: a batch may need another trace in the middle of
    evaluation."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
