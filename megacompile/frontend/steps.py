"""The steps of a capture, in order: from a model to templates and calls. `STEPS` is the list."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import FakeTensorMode, pytree
from megacompile.frontend.batches.images import (
    ImagePositions,
    Patches,
    find_image_positions,
    install_encoders,
    model_arguments,
    refuse_adapters,
    take_aligned,
    with_positions,
)
from megacompile.frontend.batches.pair_masks import argument, masks_in, masks_of, pairs_of, refuse_added
from megacompile.frontend.batches.split_rows import fixes_rows, images_of
from megacompile.frontend.batches.tables import EmbeddingTable, find_tables, take_totals
from megacompile.frontend.batches.tables import counts_positions as computes_with_positions
from megacompile.frontend.captured import AttentionFacts, BatchFacts, LayerFacts, LossFacts
from megacompile.frontend.graph.attention_calls import (
    adopt_masked_attention,
    all_layers_call_mixers,
    is_eager,
    masks_pairs,
    says_causal,
)
from megacompile.frontend.graph.grad_modes import follow_gradients
from megacompile.frontend.graph.loss import TargetCount, is_averaged, normalize_loss
from megacompile.frontend.graph.output import OutputStructure, has_rows_of_tokens, output_structure
from megacompile.frontend.graph.pieces import Rows, in_pieces, rows_of, split_experts
from megacompile.frontend.graph.randomness import draw_functionally, number_draws
from megacompile.frontend.graph.sequences import check_divided, divide_attention
from megacompile.frontend.graph.split import Section, split_at_layers, structural_key
from megacompile.frontend.pipeline import CountTargets, Step
from megacompile.frontend.templates.across_rows import across_rows, mixes_by_itself
from megacompile.frontend.templates.build import Condition, Renaming, batch_symbols, build_template, conditions, with_results
from megacompile.frontend.templates.hidden_states import LOGITS, BuildTemplate, Heads, HiddenStates
from megacompile.frontend.templates.template import BATCH, LENGTH, Call, Source, TargetLike, Template, TemplatePass
from megacompile.frontend.templates.token_functions import Described, taken_by_loss, with_loss
from megacompile.frontend.tracing.alike_layers import with_repeats
from megacompile.frontend.tracing.explained import TRACING_ERRORS
from megacompile.frontend.tracing.fake_model import CAPTURE_SHAPE, capture_shape, is_transformers_model, make_fake_model
from megacompile.frontend.tracing.layers import LayerStack, find_layers
from megacompile.frontend.tracing.model_graph import ModelGraph
from megacompile.frontend.tracing.modes import refuse_changing_state
from megacompile.frontend.tracing.peft_tracing import forward_signature
from megacompile.frontend.tracing.trace import Traced, Validity, subject, trace
from megacompile.ir.plan import CaptureKey
from megacompile.ir.token_loop import CHUNK_TOKENS
from megacompile.system.progress import at

Example = Mapping[str, Tensor] | None
Loss = Callable[..., Any] | None


# ---------------------------------------------------------------- the copy that is traced
def copy_model(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A fake copy of the model in its current state, since the model may be streamed when it is captured again."""
    return make_fake_model(model, FakeTensorMode(), dtype=dtype)


def divide_experts(plain: nn.Module, layers: tuple[str, ...], expert_pieces: int) -> Mapping[str, Rows]:
    """Replaces each module of experts by `expert_pieces` modules."""
    split_experts(plain, find_layers(plain, layers), expert_pieces)
    return rows_of(plain)


def take_patches(
    plain: nn.Module, example: Example, known_patches: tuple[Patches, ...] | None, key: CaptureKey, name: str,
) -> tuple[tuple[Patches, ...], Example]:
    """Makes encoders of images of any size read patches aligned with tokens, and aligns those of the example."""
    if known_patches is None:
        return install_encoders(plain, example)
    if key.without_adapters and known_patches:
        refuse_adapters(known_patches, name)
    return known_patches, example


def leave_out_loss(plain: nn.Module, example: Example, loss: Loss) -> tuple[Example, Described]:
    """The example without the tensors that only the user's loss reads, and these tensors' names, dtypes and shapes. Labels stay
    if the model has such a parameter. It then returns a loss, to be replaced."""
    if loss is None:
        return example, ()
    read = taken_by_loss(loss, example or {})
    names = {name for name, _, _ in read}
    given = {name: tensor for name, tensor in (example or {}).items() if name not in names}
    tokens = next(iter(given.values()), torch.empty(CAPTURE_SHAPE, dtype=torch.long, device="meta"))
    labels = {"labels": tokens} if "labels" in forward_signature(plain).parameters else {}
    return (given or {"input_ids": tokens}) | labels, read


def check_masks(plain: nn.Module, layers: tuple[str, ...], traced_example: Example, name: str) -> bool:
    """Returns whether the model runs eager attention, which adds masks to scores. Refuses a bool mask for it."""
    added = is_transformers_model(plain) and is_eager(plain, find_layers(plain, layers))
    if added and "bool" in masks_in(masks_of(traced_example)).get("attention_mask", ""):
        refuse_added(name, "attention_mask")
    return added


# ---------------------------------------------------------------- the trace
def trace_model(plain: nn.Module, layers: tuple[str, ...], traced_example: Example, key: CaptureKey,
                known_trace: Traced | None) -> Traced:
    """One graph of the whole model, with layers as regions. Of several similar layers, traces one."""
    return known_trace or trace(plain, layers, traced_example, key)


def check_state(plain: nn.Module, layers: tuple[str, ...], traced_example: Example, key: CaptureKey, traced: Traced) -> None:
    """Refuses a model that computes something else at its second call."""
    if traced.graph.changes_state and traced.shortened is None:  # a shortened model was called twice already
        fakes, fake_model, given, options = subject(plain, layers, traced_example, key, traced.attention)
        with fakes:
            refuse_changing_state(fake_model, model_arguments(given, key.images), options)


def trace_images_apart(plain: nn.Module, layers: tuple[str, ...], traced_example: Example, key: CaptureKey,
                       traced: Traced) -> tuple[Traced, bool]:
    """Traces again, with the number of images as a size of its own, if the first trace fixed the batch size."""
    if fixes_rows(traced.graph) and images_of(traced.batch):
        return trace(plain, layers, traced_example, key, images_apart=True), True
    return traced, False


def take_trace(
    plain: nn.Module, layers: tuple[str, ...], traced_example: Example, key: CaptureKey, traced: Traced, images_apart: bool,
) -> tuple[Validity, ModelGraph, nn.Module, dict[str, Tensor], LayerStack]:
    """Records which operations were traced, before the graph is rewritten, to compare other modes and sizes with."""
    validity = Validity(plain, layers, traced_example, key, traced, images_apart)
    return validity, traced.graph, traced.fake_model, traced.batch, find_layers(traced.fake_model, layers)


# ---------------------------------------------------------------- the graph, rewritten
def mark_gradients(graph: ModelGraph) -> None:
    """Marks each value of the graph as needing a gradient or not, also if layers run under `torch.no_grad()`."""
    follow_gradients(graph)


def adopt_attention(graph: ModelGraph, batch: dict[str, Tensor]) -> None:
    """Replaces attention under masks that the batch gives by our op."""
    if pairs_of(batch):
        adopt_masked_attention(graph)


def find_output(graph: ModelGraph, name: str, loss: Loss) -> tuple[OutputStructure, list[int]]:
    """The structure of the model's return value, and which of the graph's results are the loss, the logits and the auxiliary
    loss of routers."""
    return output_structure(graph, name, other_loss=loss is not None)


def place_images(graph: ModelGraph, name: str, patches: tuple[Patches, ...], batch: dict[str, Tensor],
                 key: CaptureKey) -> tuple[tuple[Patches, ...], tuple[ImagePositions, ...]]:
    """Finds the positions among tokens where the model puts images' features, and takes features by row."""
    patches = with_positions(patches, take_aligned(graph, name), name)
    return patches, find_image_positions(graph, name, images_of(batch), key.images)


def normalize(graph: ModelGraph, loss: Loss, output: OutputStructure,
              positions: Sequence[int]) -> tuple[bool, CountTargets | None]:
    """Turns a mean over targets into a sum divided by an input. Returns how to count a batch's targets on the host."""
    if loss is not None:
        return True, _one
    return output.has_loss, normalize_loss(graph, graph.results[positions[0]]) if output.has_loss else None


def _one(batch: Mapping[str, Tensor]) -> Tensor:
    """The denominator of a user's loss, unless the caller passes `num_items_in_batch`."""
    return torch.ones(())


def take_batch_totals(graph: ModelGraph) -> tuple[bool, tuple[TargetCount, ...], str]:
    """Turns values computed from all rows of the batch's arguments into inputs. Names one that the host cannot compute."""
    return computes_with_positions(graph), *take_totals(graph)


def draw_dropout(graph: ModelGraph) -> None:
    """Makes every dropout a function of an input (seed, call, rows), so that a recompute draws the same mask."""
    draw_functionally(graph)


# ---------------------------------------------------------------- the graph in pieces
def split(graph: ModelGraph, fake_model: nn.Module, stack: LayerStack, positions: Sequence[int],
          chained: bool) -> list[Section]:
    """Cuts the graph into a prologue, one section for each layer call, and an epilogue."""
    return split_at_layers(graph, fake_model, stack, [graph.results[position] for position in positions], chained)


def number_dropouts(sections: Sequence[Section]) -> None:
    """Gives each dropout in a section its own number."""
    for section in sections:
        number_draws(section)


def name_sizes(graph: ModelGraph, name: str) -> Renaming:
    """Names the symbols of batch size and length B and T. Refuses a model that fixes one of them."""
    return batch_symbols(graph, name)


def divide_sequences(graph: ModelGraph, sections: Sequence[Section], key: CaptureKey) -> list[Section]:
    """Puts exchanges around attention, if ranks have the tokens of a sequence together."""
    if key.sequence_ranks == 1:
        return list(sections)
    return [divide_attention(section, key, graph.fakes) for section in sections]


def cut_expert_pieces(sections: Sequence[Section], rows: Mapping[str, Rows], renaming: Renaming,
                      batch: dict[str, Tensor]) -> list[Section]:
    """Cuts a layer's section at the beginning of each piece of its experts."""
    sizes = {symbol: Source("size", next(iter(batch)), (BATCH, LENGTH).index(size)) for symbol, size in renaming.items()}
    return [piece for section in sections for piece in in_pieces(section, rows, sizes)]


def repeat_layers(
    sections: Sequence[Section], traced: Traced, plain: nn.Module, layers: tuple[str, ...], traced_example: Example,
    key: CaptureKey,
) -> tuple[list[Section], nn.Module, tuple[str, ...]]:
    """Adds a copied section for each layer that was not traced. Also returns the fake model with all layers, and their
    names."""
    fake_model = traced.fake_model
    if traced.shortened is not None:
        fake_model = subject(plain, layers, traced_example, key, traced.attention)[1]
    repeated = with_repeats(sections, traced.repeats)
    names = dict.fromkeys(section.layer or section.name for section in repeated[1:-1] if section.visit == 1)
    return repeated, fake_model, tuple(names)


def attach_loss(
    graph: ModelGraph, sections: Sequence[Section], output: OutputStructure, positions: Sequence[int], renaming: Renaming,
    loss: Loss, read_by_loss: Described,
) -> tuple[list[Section], Section | None, Section | None]:
    """The sections, with the user's loss instead of the model's; the epilogue that returns only logits, if the model returns
    logits; and the one that also returns an auxiliary loss of routers, if the model has one."""
    *others, epilogue = sections
    logits = output.logits_position
    to_logits = with_results(epilogue, [logits]) if output.has_logits else None
    to_auxiliary = None
    if len(positions) > logits + 1:
        to_auxiliary = with_results(epilogue, [logits, logits + 1])
        epilogue = with_results(epilogue, range(logits + 1))
    if loss is not None:
        assert to_logits is not None, "refused in find_output"
        epilogue = with_loss(graph, renaming, to_logits, loss, read_by_loss)
    return [*others, epilogue], to_logits, to_auxiliary


def collect_conditions(graph: ModelGraph, renaming: Renaming) -> tuple[Condition, ...]:
    """The conditions of the graph on B and T. A user's loss may have added to them."""
    return conditions(graph.shape_env.guards, renaming)


# ---------------------------------------------------------------- templates
def build_templates(
    graph: ModelGraph, sections: Sequence[Section], renaming: Renaming, target: TargetLike,
    template_passes: Sequence[TemplatePass], has_loss: bool, loss: Loss,
) -> tuple[BuildTemplate, dict[str, Template], tuple[Call, ...], str]:
    """Differentiates each section that differs from all before it, and makes every section a call of its template. Names an
    operation on several rows, or ""."""
    build = functools.partial(build_template, fakes=graph.fakes, renaming=renaming, target=target, pipeline=template_passes)
    templates: dict[str, Template] = {}
    names: dict[str, str] = {}  # structural key -> template
    calls, mixing = [], ""
    for section in sections if has_loss else sections[:-1]:
        at(section.call_name)
        structure = structural_key(section, target.precision)
        if structure not in names:
            name = section.name if section.name in ("prologue", "epilogue") else _next_layer_name(templates)
            own_loss = loss is not None and section.name == "epilogue"
            names[structure] = name
            templates[name] = build(name, section, tokens_at_once=CHUNK_TOKENS if own_loss else 0)
            mixing = mixing or across_rows(templates[name], section)
        first_visit = section.name if section.visit > 1 else ""
        calls.append(Call(section.call_name, names[structure], tuple(section.sources), first_visit))
    return build, templates, tuple(calls), mixing


def _next_layer_name(templates: Mapping[str, Template]) -> str:
    count = sum(name.startswith("decoder") for name in templates)
    return "decoder" if count == 0 else f"decoder_{count}"


def make_heads(
    graph: ModelGraph, fake_model: nn.Module, batch: dict[str, Tensor], key: CaptureKey, sections: Sequence[Section],
    to_logits: Section | None, to_auxiliary: Section | None, build: BuildTemplate, templates: dict[str, Template],
    renaming: Renaming, calls: tuple[Call, ...], has_loss: bool, name: str,
) -> tuple[Heads | None, tuple[Call, ...]]:
    """The heads that can replace the epilogue when the caller differentiates. For a model without a loss, the calls end with
    that of its output."""
    if to_logits is None:
        assert has_loss, "refused in find_output"
        return None, calls
    hidden = HiddenStates(name, fake_model, model_arguments(batch, key.images), sections[:-1], to_logits)
    heads = Heads(graph, to_logits, to_auxiliary, hidden, build, templates, renaming)
    return heads, calls if has_loss else (*calls, heads.head(LOGITS).call)


# ---------------------------------------------------------------- what is known of the model
def describe_layers(layers: tuple[str, ...], layer_names: tuple[str, ...], rows: Mapping[str, Rows]) -> LayerFacts:
    return LayerFacts(stacks=layers, layer_names=layer_names, rows=rows)


def describe_attention(graph: ModelGraph, batch: dict[str, Tensor], stack: LayerStack, plain: nn.Module,
                       masks_added: bool, templates: dict[str, Template], calls: tuple[Call, ...]) -> AttentionFacts:
    """The facts about attention: whether all layers call our ops, and what masks do."""
    layers = {templates[call.template] for call in calls[1:-1]}
    fused = all_layers_call_mixers(graph) and not any(map(mixes_by_itself, layers))
    causal = not pairs_of(batch) and not masks_pairs(graph) and (fused or says_causal(stack))
    return AttentionFacts(fused_attention=fused, causal=causal, masks_hide=_of_transformers(plain), masks_added=masks_added)


def _of_transformers(model: nn.Module) -> bool:
    """True if the code around the layers is transformers', with or without PEFT's adapters."""
    own: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return type(own).__module__.startswith("transformers.")


def describe_loss(graph: ModelGraph, loss: Loss, has_loss: bool, count_targets: CountTargets | None,
                  templates: dict[str, Template], calls: tuple[Call, ...]) -> LossFacts:
    """The facts about the loss: whether it adds up over micro-batches, and whether logits are held."""
    fused = "linear_cross_entropy" in templates[calls[-1].template].stages["joint"]
    alone = fused and isinstance(count_targets, TargetCount) and count_targets.counts_targets
    return LossFacts(has_loss=has_loss, fused_loss=fused, token_loss=loss is not None, count_targets=count_targets,
                     is_averaged=is_averaged(graph), needs_targets_alone=alone)


def describe_batch(
    graph: ModelGraph, fake_model: nn.Module, batch: dict[str, Tensor], key: CaptureKey, positions: Sequence[int],
    output: OutputStructure, calls: tuple[Call, ...], loss_facts: LossFacts, read_by_loss: Described, arguments_mix: str,
    layers_mix: str, totals: tuple[TargetCount, ...], counts_positions: bool, image_positions: tuple[ImagePositions, ...],
    patches: tuple[Patches, ...], tables: tuple[EmbeddingTable, ...],
) -> BatchFacts:
    """The facts about batches: which arguments are read, which only by the loss, and what is computed across rows."""
    read_early = {s.name for call in calls[:-1] for s in call.sources if s.kind == "batch"}
    inputs = tuple(n for n in batch if not loss_facts.token_loss or n in read_early)
    inputs += tuple(n for n, _, _ in read_by_loss if n not in inputs)
    labels = tuple(n for n in inputs
                   if loss_facts.has_loss and n not in read_early and n not in map(argument, key.further))
    same_logits = _same_logits_without_labels(fake_model, graph, positions, output, batch, labels, key)
    return BatchFacts(
        forward_arguments=frozenset(forward_signature(fake_model).parameters), batch_inputs=inputs, labels=labels,
        same_logits_without_labels=same_logits,
        logits_of_tokens=not output.has_logits or has_rows_of_tokens(graph, positions[output.logits_position]),
        across_rows=arguments_mix or ("" if loss_facts.is_averaged else layers_mix), totals=totals,
        counts_positions=counts_positions, image_positions=image_positions, patches=patches, tables=tables)


def _same_logits_without_labels(
    fake_model: nn.Module, graph: ModelGraph, positions: Sequence[int], output: OutputStructure, batch: dict[str, Tensor],
    labels: tuple[str, ...], key: CaptureKey,
) -> bool:
    """True if logits have the same shape without labels. Without them some models compute only those of the last position.
    transformers models do not, unless asked by an argument that streamed models refuse."""
    if is_transformers_model(fake_model) or not (output.has_loss and output.has_logits):
        return True
    captured = tuple(graph.results[positions[output.logits_position]].meta["example_value"].shape)
    given = {name: value for name, value in model_arguments(batch, key.images).items() if name not in labels}
    fakes = next(fake_model.parameters()).fake_mode  # type: ignore[attr-defined]
    with fakes, torch.no_grad():
        try:
            returned = fake_model(**{name: torch.zeros(value.shape, dtype=value.dtype) for name, value in given.items()})
        except TRACING_ERRORS:  # the model needs its labels, so it has no logits without them
            return False
    leading = min(2, len(captured) - 1)  # dimensions of the batch: a classifier's logits only have rows
    shapes = [tuple(t.shape) for t in pytree.tree_leaves(returned) if isinstance(t, Tensor) and t.dim() > leading]
    return shapes == [(*capture_shape(key)[:leading], *captured[leading:])]


#: A capture, from the first step to the last. Names appear in progress lines and in `explain_capture(model, show_steps=print)`.
STEPS: tuple[Step, ...] = (
    Step("copy the model", copy_model, gives=("plain",)),
    Step("divide experts", divide_experts, gives=("rows",), changes=("plain",)),
    Step("take patches", take_patches, gives=("patches", "example"), changes=("plain",)),
    Step("leave out the loss", leave_out_loss, gives=("traced_example", "read_by_loss")),
    Step("check masks", check_masks, gives=("masks_added",)),
    Step("trace", trace_model, gives=("traced",)),
    Step("check state", check_state),
    Step("trace images apart", trace_images_apart, gives=("traced", "images_apart")),
    Step("take the trace", take_trace, gives=("validity", "graph", "fake_model", "batch", "stack")),
    Step("follow gradients", mark_gradients, changes=("graph",)),
    Step("adopt attention", adopt_attention, changes=("graph",)),
    Step("find the output", find_output, gives=("output", "positions")),
    Step("place images", place_images, gives=("patches", "image_positions"), changes=("graph",)),
    Step("find embedding tables", find_tables, gives=("tables",)),
    Step("normalize the loss", normalize, gives=("has_loss", "count_targets"), changes=("graph",)),
    Step("take batch totals", take_batch_totals, gives=("counts_positions", "totals", "arguments_mix"), changes=("graph",)),
    Step("draw dropout", draw_dropout, changes=("graph",)),
    Step("split at layers", split, gives=("sections",)),
    Step("number dropouts", number_dropouts, changes=("sections",)),
    Step("name sizes", name_sizes, gives=("renaming",)),
    Step("divide sequences", divide_sequences, gives=("sections",)),
    Step("cut expert pieces", cut_expert_pieces, gives=("sections",)),
    Step("repeat layers", repeat_layers, gives=("sections", "fake_model", "layer_names")),
    Step("attach the loss", attach_loss, gives=("sections", "to_logits", "to_auxiliary")),
    Step("collect conditions", collect_conditions, gives=("conditions",)),
    Step("build templates", build_templates, gives=("build", "templates", "calls", "layers_mix")),
    Step("check divided sequences", check_divided),
    Step("make heads", make_heads, gives=("heads", "calls"), changes=("templates",)),
    Step("describe layers", describe_layers, gives=("layer_facts",)),
    Step("describe attention", describe_attention, gives=("attention_facts",)),
    Step("describe the loss", describe_loss, gives=("loss_facts",)),
    Step("describe the batch", describe_batch, gives=("batch_facts",)),
)
