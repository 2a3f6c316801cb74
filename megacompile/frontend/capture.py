"""`capture`: a decoder model -> calls of templates. The frontend from end to end."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.batches.image_positions import Places, places_of, take_aligned
from megacompile.frontend.batches.mask_uses import only_hides
from megacompile.frontend.batches.pairs import argument, masks_in, masks_of, of_pairs, pairs_of, refuse_added
from megacompile.frontend.batches.patches import Patches, install_encoders, model_arguments, refuse_adapters, with_places
from megacompile.frontend.batches.rows import fixes_rows, images_of
from megacompile.frontend.graph.attention_calls import (
    adopt_masked_attention,
    all_layers_call_attention,
    is_eager,
    masks_pairs,
    says_causal,
)
from megacompile.frontend.graph.batch_totals import counts_places, take_totals
from megacompile.frontend.graph.expert_pieces import Rows, rows_of, split_experts
from megacompile.frontend.graph.grad_modes import follow_gradients
from megacompile.frontend.graph.loss import TargetCount, is_averaged, normalise_loss
from megacompile.frontend.graph.output import OutputStructure, output_structure
from megacompile.frontend.graph.pieces import in_pieces
from megacompile.frontend.graph.randomness import draw_functionally, number_draws
from megacompile.frontend.graph.split import split_at_layers, structural_key
from megacompile.frontend.templates.across_rows import across_rows
from megacompile.frontend.templates.build import build_template, with_results
from megacompile.frontend.templates.heads import LOGITS, Head, Heads
from megacompile.frontend.templates.hidden_states import HiddenStates
from megacompile.frontend.templates.sizes import Condition, batch_symbols, conditions
from megacompile.frontend.templates.template import BATCH, LENGTH, Call, Source, TargetLike, Template, TemplatePass
from megacompile.frontend.templates.token_functions import CHUNK_TOKENS, Described, taken_by_loss, with_loss
from megacompile.frontend.tracing.adapters import forward_signature
from megacompile.frontend.tracing.alike_layers import with_repeats
from megacompile.frontend.tracing.fake_model import CAPTURE_SHAPE, fake_twin, is_transformers_model
from megacompile.frontend.tracing.foreign_errors import TRACING_ERRORS
from megacompile.frontend.tracing.layers import Layers, find_layers, largest_of
from megacompile.frontend.tracing.model_graph import ModelGraph
from megacompile.frontend.tracing.options import refuse_options
from megacompile.frontend.tracing.python_state import refuse_changing_state
from megacompile.frontend.tracing.trace import Traced, our_attention, subject, trace
from megacompile.frontend.tracing.validity import Validity, recording
from megacompile.ir.plan import PLAIN, CaptureKey
from megacompile.system.under_way import at, under_way


@dataclasses.dataclass(frozen=True)
class CpuTarget:
    """What templates are lowered to where no target is given."""

    device_type: str = "cpu"
    dtype: torch.dtype = torch.float32


@dataclasses.dataclass(frozen=True)
class CapturedModel:
    """A model as calls of templates.

    `calls`: the prologue, the layers in order, the epilogue. `templates`: by the name that calls use.
    `batch_inputs`: the batch arguments, in the positional order of the model's forward; `labels`: those that only the
    loss reads. `same_logits_without_labels`: a forward without them computes the logits that were captured with them.
    `stacks`: the qualified names of the lists that layers are in. `layer_names`: those of layers, in the order of their first
    runs. `rows`: by the names that calls use, the parameters that are shares of the model's own.
    `holds(training, size)`: whether the graphs hold in a mode and at a size where they were not captured. `for_key(key)`: the
    same model, captured for another key; the first time takes as long as the first capture. `only_hides(key, name)`:
    whether it is known, without that capture, that of the batch argument `name` of a key nothing but bool is made.
    `fused_attention`: every layer's attention is our op; else the model's own code, whose masks take B x T x T bytes.
    `causal`: no token sees a later one, by our op or by what the model's attention modules say of themselves (`is_causal`).
    `masks_hide`: an `attention_mask` does nothing but hide tokens from attention; a model of one's own may pool by it.
    `masks_added`: it is transformers' eager attention, which adds masks to scores.
    `evaluating`: modules in evaluation mode while the model is in the mode that was captured.
    `fused_loss`: the epilogue's `loss` never holds the micro-batch's logits.
    `has_loss_denominator`: the loss is a sum over the "loss_denominator" input, so that micro-batches add up; then
    `count_targets(batch on the host)` gives a batch's loss denominator, a 0-d float32 tensor. `is_averaged`: the loss
    has another part beside that sum, and is the mean over micro-batches of each one's loss, weighted by rows.
    `across_rows`: where it computes with several sequences at once, as a name and a line; batches are not split then. Else "".
    `totals`: how values made of all rows of a batch are computed, for each of its micro-batches; `counts_places`: it computes
    with such a value of the places in a row, which is another for longer rows.
    `places`: where features, of images say, are put among tokens; each checks a batch. `patches`: encoders of images of any
    size, whose batch arguments are aligned with tokens.
    `has_loss`: else the model has no head, its calls end with that of its output ("logits"), of which losses are made outside.
    `output.rebuild(loss, logits)`: the model's own return value, around these. `heads`: what stands in the epilogue's place
    where the caller differentiates; None of a model that returns no logits. `token_loss`: the loss is a function of tokens that
    the user gave.
    `conditions`: on B and T, under which the graphs hold; `guards`: the same as text.
    `seconds`: what capturing took.
    """

    calls: tuple[Call, ...]
    templates: dict[str, Template]
    batch_inputs: tuple[str, ...]
    labels: tuple[str, ...]
    same_logits_without_labels: bool
    stacks: tuple[str, ...]
    layer_names: tuple[str, ...]
    rows: Mapping[str, Rows]
    fused_attention: bool
    causal: bool
    masks_hide: bool
    masks_added: bool
    evaluating: frozenset[str]
    key: CaptureKey
    holds: Callable[[bool, tuple[int, int]], bool]
    for_key: Callable[[CaptureKey], CapturedModel]
    only_hides: Callable[[CaptureKey, str], bool]
    fused_loss: bool
    has_loss: bool
    has_loss_denominator: bool
    is_averaged: bool
    across_rows: str
    totals: tuple[TargetCount, ...]
    counts_places: bool
    count_targets: Callable[[Mapping[str, Tensor]], Tensor] | None
    places: tuple[Places, ...]
    patches: tuple[Patches, ...]
    output: OutputStructure
    heads: Heads | None
    token_loss: bool
    conditions: tuple[Condition, ...]
    seconds: float

    @property
    def guards(self) -> list[str]:
        return [str(condition.expression) for condition in self.conditions]

    @functools.cached_property
    def pair_bytes(self) -> int:
        """What the batch's masks of pairs take for each query and key of a sequence."""
        read = {source.name: given for call in self.calls
                for source, given in zip(call.sources, self.templates[call.template].inputs, strict=True)
                if source.kind == "batch" and of_pairs(given)}
        return sum(math.prod(map(int, x.shape[1:-2])) * x.dtype.itemsize for x in read.values() if x.dtype is not None)

    @property
    def main_output(self) -> str:
        """What a model is trained by: its "loss", or its output if it has none."""
        return "loss" if self.has_loss else LOGITS

    def calls_for(self, output: str) -> tuple[Call, ...]:
        """The calls of a program that gives the "loss", or a head's outputs. Raises `UnsupportedError` where there is none."""
        return self.calls if output == "loss" else (*self.calls[:-1], self.head(output).call)

    def left_out_of(self, output: str) -> set[str]:
        """Parameters that the model reads, and not for this output."""
        def read(calls: Sequence[Call]) -> set[str]:
            return {source.name for call in calls for source in call.sources if source.kind == "parameter"}
        return read(self.calls) - read(self.calls_for(output))

    def head(self, output: str) -> Head:
        return self.require_heads().head(output)

    def require_heads(self) -> Heads:
        """Raises `UnsupportedError` for a model that returns its loss alone."""
        if self.heads is None:
            raise UnsupportedError("the model returns its loss alone: let its forward return logits [batch, length, "
                                   "vocabulary] as well, and they can be differentiated")
        return self.heads

    def same_in_evaluation(self) -> bool:
        """Whether the model computes the same in evaluation mode. The first time runs the model on fakes."""
        return self.holds(False, CAPTURE_SHAPE)

    def check_shape(self, batch: int, length: int, output: str = "loss") -> None:
        """Raise `UnsupportedError` if the captured graphs do not hold at this batch size and length, those of an `output` among
        them. The first check of a size of 1 runs the model on fakes."""
        size = tuple(1 if n == 1 else captured for n, captured in zip((batch, length), CAPTURE_SHAPE, strict=True))
        if 1 in size and not self.holds(not self.key.evaluating, size):  # type: ignore[arg-type]
            raise UnsupportedError(f"at {batch} x {length} the model performs other operations than at larger sizes, which "
                                   "were captured: remove the branch on a size of 1 from the model's forward, or avoid it")
        for condition in (*self.conditions, *(() if output == "loss" or self.heads is None else self.heads.conditions)):
            if condition.expression.subs({BATCH: batch, LENGTH: length}) == sympy.false:
                raise UnsupportedError(
                    f"a batch of {batch} x {length} breaks {condition.expression}, which the captured graph assumes"
                    f"{condition.line}: keep batches within it, or remove the branch on sizes from the model's forward")


def capture(
    model: nn.Module, *, layers: Layers | None = None, example: Mapping[str, Tensor] | None = None,
    pipeline: Sequence[TemplatePass] = (), target: TargetLike | None = None, key: CaptureKey = PLAIN,
    loss: Callable[..., Any] | None = None, expert_pieces: int = 1,
) -> CapturedModel:
    """Capture `model` for batches of one `key`, once, on fakes: no weight is read or copied, and `meta` models work too.

    `layers` names the lists of layers (see `find_layers`); `example` gives the batch arguments where they are not
    `input_ids` and `labels`; `pipeline` and `target` are the template passes and what they lower to; `loss`, a function of
    tokens, stands in the place of the model's own loss; `expert_pieces`: calls that a layer's experts are divided among.
    Where several lists were found, not named, whose layers form no chain, the largest is the stack.
    Raises `CaptureError` or `UnsupportedError`, naming the module, for what cannot be streamed faithfully.
    """
    of = functools.partial(_capture, model, example=example, pipeline=pipeline, target=target, key=key, loss=loss,
                           expert_pieces=expert_pieces)
    stack = find_layers(model, layers)
    refuse_options(model, stack)
    with under_way(f"tracing {type(model).__name__}"):
        if stack.found and len(stack.paths) > 1:
            with contextlib.suppress(CaptureError, UnsupportedError):
                return of(stack.paths, chained=True)
            return of((largest_of(model, stack),))
        return of(stack.paths)


def _capture(
    model: nn.Module, layers: tuple[str, ...], *, example: Mapping[str, Tensor] | None, pipeline: Sequence[TemplatePass],
    target: TargetLike | None, key: CaptureKey, loss: Callable[..., Any] | None, expert_pieces: int = 1,
    patches: tuple[Patches, ...] | None = None, chained: bool = False, made: Traced | None = None,
) -> CapturedModel:
    """`capture` with these lists of layers. `patches`: the encoders of a twin that takes images aligned with tokens already, as
    `example` says; `chained`: each call of a layer must read what the one before it makes; `made`: the trace, if there is one
    already."""
    started = time.perf_counter()
    target = target or CpuTarget()
    name = type(model).__name__
    plain = fake_twin(model, FakeTensorMode())  # as it is now: `model` may be streamed when it is captured again
    plain_stack = find_layers(plain, layers)
    split_experts(plain, plain_stack, expert_pieces)
    rows = rows_of(plain)
    if patches is None:
        patches, example = install_encoders(plain, example)
    elif key.without_adapters and patches:
        refuse_adapters(patches, name)
    taken = () if loss is None else taken_by_loss(loss, example or {})
    traced = example if loss is None else _without_loss(plain, example, taken)
    masks_added = is_transformers_model(plain) and is_eager(plain, plain_stack)
    if masks_added and "bool" in masks_in(masks_of(traced)).get("attention_mask", ""):
        refuse_added(name, "attention_mask")
    graph, twin, batch, attention, shortened = found = made or trace(plain, layers, traced, key)
    if graph.changes_state and shortened is None:  # else it was called twice already
        fakes, tried, given, options = subject(plain, layers, traced, key, CAPTURE_SHAPE, attention)
        with fakes:
            refuse_changing_state(tried, model_arguments(given, key.images), options)
    apart = fixes_rows(graph) and bool(images_of(batch))
    if apart:
        graph, twin, batch, attention, _ = found = trace(plain, layers, traced, key, images_apart=True)
    validity, pairs = Validity(plain, layers, traced, key, found, apart), pairs_of(batch)
    follow_gradients(graph)
    if pairs:
        adopt_masked_attention(graph)

    def for_key(other: CaptureKey) -> CapturedModel:
        with recording(), under_way(f"tracing {name} for another kind of batch"):
            return _capture(plain, layers, example=example, pipeline=pipeline, target=target, key=other, loss=loss,
                            patches=patches, made=validity.unlike.pop(other, None))  # its experts are in pieces already

    def hides(other: CaptureKey, argument_name: str) -> bool:
        fakes, tried, given, options = subject(plain, layers, traced, other, CAPTURE_SHAPE, our_attention(plain, traced, other))
        with fakes:
            return only_hides(tried, model_arguments(given, other.images), options, argument_name)

    structure, positions = output_structure(graph, name, other_loss=loss is not None)
    patches = with_places(patches, take_aligned(graph, name), name)
    places = places_of(graph, name, images_of(batch), key.images)
    has_loss = loss is not None or structure.has_loss
    count = _one if loss is not None else normalise_loss(graph, graph.results[positions[0]]) if has_loss else None
    of_places = counts_places(graph)
    totals, arguments_mix = take_totals(graph)
    draw_functionally(graph)
    stack = find_layers(twin, layers)
    sections = split_at_layers(graph, twin, stack, [graph.results[p] for p in positions], chained)
    for section in sections:
        number_draws(section)
    renaming = batch_symbols(graph, name)
    sizes = {symbol: Source("size", next(iter(batch)), (BATCH, LENGTH).index(size)) for symbol, size in renaming.items()}
    sections = with_repeats([piece for section in sections for piece in in_pieces(section, rows, sizes)], found.repeats)
    if found.shortened is not None:
        twin = subject(plain, layers, traced, key, CAPTURE_SHAPE, attention)[1]  # with all layers
    layer_names = tuple(dict.fromkeys(section.layer or section.name for section in sections[1:-1] if section.visit == 1))
    to_logits = with_results(sections[-1], [len(positions) - 1]) if structure.has_logits else None
    if loss is not None:
        assert to_logits is not None, "refused above"
        sections[-1] = with_loss(graph, renaming, to_logits, loss, taken)
    assumed = conditions(graph.shape_env.guards, renaming)  # what a loss asks of sizes among them

    build = functools.partial(build_template, fakes=graph.fakes, renaming=renaming, target=target, pipeline=pipeline)
    templates: dict[str, Template] = {}
    names: dict[str, str] = {}  # structural key -> template
    calls, mixing = [], ""
    for section in sections if has_loss else sections[:-1]:
        at(section.call_name)
        template_key = structural_key(section)
        if template_key not in names:
            names[template_key] = section.name if section.name in ("prologue", "epilogue") else _next_layer_name(templates)
            own_loss = loss is not None and section.name == "epilogue"
            templates[names[template_key]] = build(names[template_key], section, tokens_at_once=CHUNK_TOKENS if own_loss else 0)
            mixing = mixing or across_rows(templates[names[template_key]], section)
        first_visit = section.name if section.visit > 1 else ""
        calls.append(Call(section.call_name, names[template_key], tuple(section.sources), first_visit))
    heads = None
    if to_logits is not None:
        hidden = HiddenStates(name, twin, model_arguments(batch, key.images), sections[:-1], to_logits)
        heads = Heads(graph, to_logits, hidden, build, templates, renaming)
    if not has_loss:
        assert heads is not None, "refused above"
        calls.append(heads.head(LOGITS).call)
    read_early = {s.name for call in calls[:-1] for s in call.sources if s.kind == "batch"}
    batch_inputs = tuple(n for n in batch if loss is None or n in read_early)
    batch_inputs += tuple(n for n, _, _ in taken if n not in batch_inputs)
    labels = tuple(n for n in batch_inputs if has_loss and n not in read_early and n not in map(argument, key.further))
    fused = all_layers_call_attention(graph)
    return CapturedModel(
        calls=tuple(calls), templates=templates, batch_inputs=batch_inputs, labels=labels, stacks=layers,
        layer_names=layer_names, rows=rows,
        same_logits_without_labels=_same_logits_without_labels(
            twin, graph, positions, model_arguments(batch, key.images), labels),
        fused_attention=fused, causal=not pairs and not masks_pairs(graph) and (fused or says_causal(stack)),
        masks_hide=_of_transformers(plain), masks_added=masks_added,
        evaluating=frozenset(n for n, m in twin.named_modules() if not m.training),
        fused_loss="linear_cross_entropy" in templates[calls[-1].template].stages["joint"], has_loss=has_loss,
        key=key, holds=validity.holds, for_key=functools.cache(for_key), only_hides=hides,
        has_loss_denominator=count is not None, is_averaged=is_averaged(graph),
        across_rows=arguments_mix or ("" if is_averaged(graph) else mixing), totals=totals, counts_places=of_places,
        count_targets=count, places=places, patches=patches, output=structure, heads=heads, token_loss=loss is not None,
        conditions=assumed, seconds=time.perf_counter() - started)


def _one(batch: Mapping[str, Tensor]) -> Tensor:
    """What a user's loss is divided by, unless the caller says `num_items_in_batch`."""
    return torch.ones(())


def _without_loss(model: nn.Module, example: Mapping[str, Tensor] | None, taken: Described) -> dict[str, Tensor] | None:
    """The example of what the model itself takes, labels included if it has such a parameter: it returns a loss to replace."""
    names = {name for name, _, _ in taken}
    given = {name: tensor for name, tensor in (example or {}).items() if name not in names}
    tokens = next(iter(given.values()), torch.empty(CAPTURE_SHAPE, dtype=torch.long, device="meta"))
    return (given or {"input_ids": tokens}) | (
        {"labels": tokens} if "labels" in forward_signature(model).parameters else {})


def _same_logits_without_labels(
    twin: nn.Module, graph: ModelGraph, positions: Sequence[int], batch: Mapping[str, Tensor], labels: tuple[str, ...]
) -> bool:
    """Whether logits have the same shape without labels: some models then compute those of the last position alone.

    Models of transformers do not, unless asked by an argument that streamed models refuse."""
    if is_transformers_model(twin) or len(positions) < 2:
        return True
    captured = tuple(graph.results[positions[1]].meta["example_value"].shape)
    fakes = next(twin.parameters()).fake_mode  # type: ignore[attr-defined]
    with fakes, torch.no_grad():
        try:
            returned = twin(**{k: torch.zeros(v.shape, dtype=v.dtype) for k, v in batch.items() if k not in labels})
        except TRACING_ERRORS:  # of a model that needs its labels: it has no logits without them
            return False
    leading = min(2, len(captured) - 1)  # dimensions of the batch: a classifier's logits have rows alone
    shapes = [tuple(t.shape) for t in pytree.tree_leaves(returned) if isinstance(t, Tensor) and t.dim() > leading]
    return shapes == [(*CAPTURE_SHAPE[:leading], *captured[leading:])]


def _of_transformers(model: nn.Module) -> bool:
    """Whether the code around the layers is transformers' own, with PEFT's adapters or without."""
    own: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return type(own).__module__.startswith("transformers.")


def _next_layer_name(templates: Mapping[str, Template]) -> str:
    count = sum(name.startswith("decoder") for name in templates)
    return "decoder" if count == 0 else f"decoder_{count}"
