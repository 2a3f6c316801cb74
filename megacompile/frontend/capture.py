"""`capture`: a decoder model -> calls of templates. The frontend from end to end."""
from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import FakeTensorMode, TorchDispatchMode, lazy_graph_modules, pytree, unset_fake_temporarily
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.batches.images import Patches, model_arguments
from megacompile.frontend.batches.pair_masks import argument
from megacompile.frontend.captured import CapturedModel
from megacompile.frontend.pipeline import CaptureState, Watch, run_steps
from megacompile.frontend.steps import STEPS
from megacompile.frontend.templates.symbolic_sizes import sizes_stay_symbols
from megacompile.frontend.templates.template import TargetLike, TemplatePass
from megacompile.frontend.tracing.explained import TRACING_ERRORS
from megacompile.frontend.tracing.fake_model import capture_shape
from megacompile.frontend.tracing.layers import Layers, LayerStack, find_layers
from megacompile.frontend.tracing.model_options import refuse_options
from megacompile.frontend.tracing.native_branches import as_traced
from megacompile.frontend.tracing.trace import Validity, our_attention, recording, subject
from megacompile.ir.plan import PLAIN, CaptureKey
from megacompile.ir.precision import Float8
from megacompile.system.linux import collections_paused
from megacompile.system.progress import under_way


# --------------------
# Finds how a model uses a batch argument. A plain run on fakes answers this in a small part of a capture's time.
class _Uses(TorchDispatchMode):
    """State: `counted`, whether any op computes other than bool tensors from the mask itself."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask
        self.counted = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(value is self.mask for value in pytree.tree_leaves((args, kwargs))):
            self.counted |= any(isinstance(made, Tensor) and made.dtype != torch.bool for made in pytree.tree_leaves(result))
        return result


class _Meetings(TorchDispatchMode):
    """Computes every value that depends only on the `known` values and on sizes. Weights and the batch's other arguments are
    fakes. State: `known`, such values by the id of their fakes; `met`, each op that reads such values together with unknown
    ones, in order, with the values."""

    def __init__(self, known: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.known = {id(fake): (fake, value) for fake, value in known}  # holds the fakes, so that no other has their id
        self.met: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        given = (args, kwargs or {})
        read = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        known = [leaf for leaf in read if id(leaf) in self.known]
        if len(known) < len(read) or torch.Tag.nondeterministic_seeded in function.tags:
            result = function(*args, **given[1])
            if known:
                with unset_fake_temporarily():
                    self.met.append((str(function), [self.known[id(leaf)][1].clone() for leaf in known]))
            if any(result is leaf for leaf in known):  # it has become unknown, and so have its views
                raise UnsupportedError(f"{function} changes a value in place")
            return result
        with unset_fake_temporarily():
            known_args, known_kwargs = pytree.tree_map(lambda leaf: self.known[id(leaf)][1] if isinstance(leaf, Tensor) else
                                                       leaf, given)
            value = function(*known_args, **known_kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            return value  # a number that the model reads from a tensor
        result = function(*args, **given[1])
        for fake, each in zip(pytree.tree_leaves(result), pytree.tree_leaves(value), strict=True):
            if isinstance(fake, Tensor):
                self.known[id(fake)] = fake, each
        return result


def only_hides(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], name: str) -> bool:
    """True if `model(**batch, **options)`, all fakes, turns the batch argument `name` only into bool tensors. False if this
    cannot be known: an op has no effect on fakes, or the model does not run on them."""
    uses = _Uses(batch[name])
    return _runs(model, {**batch, **options}, uses) and not uses.counted


def is_implied(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], name: str, value: Tensor) -> bool:
    """True if `model(**batch, **options)`, all fakes, computes the same with `value` as the batch argument `name` as without
    this argument. `value` is real. False if this cannot be known, as in `only_hides`."""
    without = {key: argument for key, argument in {**batch, **options}.items() if key != name}
    with next(model.parameters()).fake_mode:  # type: ignore[attr-defined]
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    given, left_out = _Meetings([(fake, value)]), _Meetings([])
    return (_runs(model, {**without, name: fake}, given) and _runs(model, without, left_out)
            and len(given.met) == len(left_out.met) and all(map(_equal, given.met, left_out.met)))


def _equal(a: tuple[str, list[Tensor]], b: tuple[str, list[Tensor]]) -> bool:
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(map(torch.equal, a[1], b[1]))


def _runs(model: nn.Module, arguments: Mapping[str, Any], seen_by: TorchDispatchMode) -> bool:
    """True if the model, all fakes, runs on these arguments in a mode."""
    fakes: FakeTensorMode = next(model.parameters()).fake_mode  # type: ignore[attr-defined]
    try:
        with fakes, torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(), as_traced(model), seen_by:
            warnings.simplefilter("ignore")
            model(**arguments)
    except (UnsupportedError, CaptureError, *TRACING_ERRORS):
        return False
    return True


__all__ = ["CapturedModel", "CpuTarget", "capture"]


@dataclass(frozen=True)
class CpuTarget:
    """The target of templates if none is given."""

    device_type: str = "cpu"
    dtype: torch.dtype = torch.float32
    precision: Float8 | None = None


def capture(
    model: nn.Module, *, layers: Layers | LayerStack | None = None, example: Mapping[str, Tensor] | None = None,
    pipeline: Sequence[TemplatePass] = (), target: TargetLike | None = None, key: CaptureKey = PLAIN,
    loss: Callable[..., Any] | None = None, expert_pieces: int = 1, dtype: torch.dtype | None = None,
    watch: Watch | None = None,
) -> CapturedModel:
    """Captures `model` for batches of one `key`, once, on fakes: no weight is read or copied, and `meta` models work too.

    `layers`: the names of the lists of layers, or the result of `find_layers`. `example`: the batch arguments if they are not
    `input_ids` and `labels`. `pipeline` and `target`: the template passes and the device and dtype of templates. `loss`: a
    function of tokens that replaces the model's loss. `expert_pieces`: the number of calls among which a layer's experts are
    divided. `dtype`: of all parameters (None: each has its own). `watch` is called after each step of `STEPS`. If several lists
    were found, not named, and their layers form no chain, the largest one is the stack: the steps then run twice. Raises
    `CaptureError` or `UnsupportedError`, naming the module, for what cannot be streamed faithfully."""
    def attempt(paths: tuple[str, ...], chained: bool = False) -> CapturedModel:
        state = CaptureState(model, paths, example, pipeline, target or CpuTarget(), key, loss, expert_pieces, dtype, chained)
        return _captured(state, watch)

    stack = layers if isinstance(layers, LayerStack) else find_layers(model, layers)
    refuse_options(model, stack)
    with under_way(f"tracing {type(model).__name__}"):
        if stack.largest is not None and len(stack.paths) > 1:
            with contextlib.suppress(CaptureError, UnsupportedError):
                return attempt(stack.paths, chained=True)
            return attempt((stack.largest,))
        return attempt(stack.paths)


def _captured(state: CaptureState, watch: Watch | None = None) -> CapturedModel:
    """The result of all steps."""
    started = time.perf_counter()
    one_length = sizes_stay_symbols() if state.key.traced_length else contextlib.nullcontext()
    with collections_paused(), lazy_graph_modules(), one_length:
        run_steps(STEPS, state, watch)
    others = Recapture(state.plain, state.layers, state.example, state.traced_example, state.template_passes, state.target,
                       state.loss, state.patches, state.validity)
    return CapturedModel(
        **vars(state.layer_facts), **vars(state.batch_facts), **vars(state.attention_facts), **vars(state.loss_facts),
        calls=state.calls, templates=state.templates, key=state.key,
        evaluating=frozenset(name for name, module in state.fake_model.named_modules() if not module.training),
        output=state.output, heads=state.heads, conditions=state.conditions, others=others,
        seconds=time.perf_counter() - started)


@dataclass(eq=False)
class Recapture:
    """Captures the same model for other keys (see `OtherBatches`). Uses the copy that the first capture traced, since the model
    itself may be streamed by then. The copy's experts are already divided. State: captures by key; known facts about constant
    arguments."""

    plain: nn.Module
    layers: tuple[str, ...]
    example: Mapping[str, Tensor] | None
    traced_example: Mapping[str, Tensor] | None
    template_passes: Sequence[TemplatePass]
    target: TargetLike
    loss: Callable[..., Any] | None
    patches: tuple[Patches, ...]
    validity: Validity
    known: dict[CaptureKey, CapturedModel] = field(default_factory=dict)
    implied: dict[tuple[CaptureKey, str], bool] = field(default_factory=dict)

    def holds(self, training: bool, size: tuple[int, int]) -> bool:
        return self.validity.holds(training, size)

    def for_key(self, key: CaptureKey) -> CapturedModel:
        if key not in self.known:
            kind = f"{key.traced_length} tokens" if key.traced_length else "another kind of batch"
            with recording(), under_way(f"tracing {type(self.plain).__name__} for {kind}"):
                self.known[key] = _captured(CaptureState(
                    self.plain, self.layers, self.example, self.template_passes, self.target, key, self.loss,
                    known_patches=self.patches, known_trace=self.validity.unlike.pop(key, None)))
        return self.known[key]

    def only_hides(self, key: CaptureKey, name: str) -> bool:
        attention = our_attention(self.plain, self.traced_example, key)
        _, fake_model, given, options = subject(self.plain, self.layers, self.traced_example, key, attention)
        return only_hides(fake_model, model_arguments(given, key.images), options, name)

    def is_implied(self, key: CaptureKey, name: str, values: Callable[[int], Tensor]) -> bool:
        if (key, name) not in self.implied:
            without = replace(key, further=tuple(each for each in key.further if argument(each) != name))
            length = capture_shape(key)[1]

            def holds(attention: str | None) -> bool:
                _, fake_model, given, options = subject(
                    self.plain, self.layers, self.traced_example, key, attention, (1, length))
                return is_implied(fake_model, model_arguments(given, key.images), options, name, values(length)[None])

            self.implied[key, name] = any(map(holds, {our_attention(self.plain, self.traced_example, without): 0, None: 0}))
        return self.implied[key, name]
