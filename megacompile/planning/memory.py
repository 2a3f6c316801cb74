"""Bytes that a plan takes on the device at its peak, and on the host in addition to weights and optimizer state.

Slots are counted as `passes/schedule/place.py` makes them, and values that outlive an op as the program keeps them. An op's own
values take `cost.peak_bytes`.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.hidden_states import ALL
from megacompile.frontend.templates.template import Call, Template
from megacompile.ir.placement import Updated
from megacompile.ir.plan import SHARD_SLOTS, Plan
from megacompile.ir.program import CallSpec
from megacompile.predict import cost
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.weights.tiling import Tiling

#: An allocator's blocks are larger than requested, by one part in this many.
ROUNDING = 64


@dataclass(frozen=True)
class Estimate:
    """Device bytes of a plan, by purpose."""

    slots: int
    accumulators: int
    checkpoints: int  # activations that outlive an op
    workspace: int  # of the op that needs most

    @property
    def total(self) -> int:
        values = self.accumulators + self.checkpoints + self.workspace
        return self.slots + values + values // ROUNDING


def host_checkpoint_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> list[int]:
    """Bytes of each checkpoint that one forward keeps in host memory, in the order in which they are stashed."""
    layers = tiling.differentiated(captured.calls)
    begins = plan.from_host([call.name for call in layers])
    templates = [captured.templates[before.template] for before, layer in pairwise(layers) if layer.name in begins]
    return [rows * cost.activation_checkpoint_bytes(template, length)
            for template in templates for rows, length in _largest_wave(plan)]


def planned_calls(captured: CapturedModel, tiling: Tiling, plan: Plan) -> tuple[CallSpec, ...]:
    """The calls in the form of schedules, under a plan."""
    return tiling.call_specs(captured.calls_for(plan.output), captured.templates, plan.length, plan.lengths)


def _largest_wave(plan: Plan) -> list[tuple[int, int]]:
    """Rows and length of the micro-batches of the wave that needs the most memory: the first. If lengths differ, its
    micro-batches have as many tokens as the largest ones of all waves."""
    count, sizes = len(plan.wave(0)), plan.sizes
    if plan.waves == 1 or not plan.lengths:
        return [*sizes[:count]]
    return sorted(sizes, key=lambda size: size[0] * size[1])[-count:]


def _largest(plan: Plan) -> list[tuple[int, int]]:
    """Rows and length of the micro-batches that may need the most memory: the first, or each if lengths differ."""
    return [*dict.fromkeys(plan.sizes)] if plan.lengths else [plan.sizes[0]]


def host_parts(captured: CapturedModel, tiling: Tiling, plan: Plan) -> dict[str, int]:
    """Bytes of host memory that a plan takes in addition to weights, state and the budget of pinned memory, by purpose. Ranks
    share gradients and sums, and have checkpoints and slabs of their own."""
    waits = plan.update == "step"
    return {"checkpoints": plan.ranks * sum(host_checkpoint_bytes(captured, tiling, plan)),
            "sums": sum(tiling.layouts[tile].sum_bytes for tile in plan.host_sums),
            "gradients": tiling.host_parts()["gradients"] if waits else 0,
            "state slabs": state_slab_bytes(tiling, plan.state_slabs),
            "slabs": 0 if waits or not plan.pinned else (
                plan.ranks * slab_bytes(tiling, plan.gradient_slabs, plan.resident_state))}


def slab_bytes(tiling: Tiling, count: int, resident_state: Collection[str]) -> int:
    """Bytes of slabs, `count` of them for each size class of layers' tiles, through which gradients pass that are consumed on
    arrival."""
    boundary = tiling.boundary()
    passing = {x.name: x.reduced_bytes for x in tiling.layouts.values() if x.trainable and x.name not in resident_state}
    groups = [[passing[x.name] for x in layers if x.name in passing] for layers in tiling.size_classes()]
    return (max((size for name, size in passing.items() if name in boundary), default=0)
            + sum(min(count, len(group)) * max(group, default=0) for group in groups))


def state_slab_bytes(tiling: Tiling, count: int) -> int:
    """Bytes of slabs, `count` of them for tiles of layers on each rank, through which moments on disk pass."""
    if not tiling.on_disk:
        return 0
    boundary = tiling.boundary()
    groups = [[x.disk_bytes for x in layers if x.name in tiling.on_disk] for layers in tiling.size_classes()]
    return tiling.ranks * (max((tiling.layouts[tile].disk_bytes for tile in tiling.on_disk if tile in boundary), default=0)
                           + sum(min(count, len(group)) * max(group, default=0) for group in groups))


def slot_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> int:
    """Bytes of the slots of weights, gradients and fetched checkpoints. They are allocated once and stay, so an evaluation
    counts all of them too."""
    layouts, boundary = tiling.layouts, tiling.boundary()
    kept = plan.resident_state if plan.update == "step" else ()  # tiles whose gradients have their own slots
    streamed = boundary.difference(plan.resident)
    by_call = [sorted((layouts[t].weight_bytes for t in streamed.intersection(tiling.tiles_of[call.name])), reverse=True)
              for call in captured.calls]
    fetched = host_checkpoint_bytes(captured, tiling, plan)
    # A section takes an unused slot before it reuses one. A whole step has one forward and one backward per wave.
    return (min(plan.checkpoint_slots, plan.waves * len(fetched)) * max(fetched, default=0)
            + sum(_turns(layers, plan, kept, lambda tile: tiling.runs(tile))
                  for layers in tiling.size_classes())
            + sum(max(sizes) for sizes in zip_longest(*by_call, fillvalue=0))
            + sum(layouts[t].weight_bytes for t in plan.resident)
            + sum(layouts[t].shard_state_bytes for t in plan.resident_state) + sum(layouts[t].reduced_bytes for t in kept)
            + _visiting(tiling, plan)
            + max((layouts[t].reduced_bytes for t in boundary if layouts[t].trainable and t not in kept), default=0)
            + (_shards(tiling, plan) if plan.ranks > 1 else 0))


def _visiting(tiling: Tiling, plan: Plan) -> int:
    """Bytes of the slot through which visiting tiles pass."""
    if not plan.visiting_state:
        return 0
    tiles = tiling.tiles()
    return max(tiles[name].bytes_of("visiting", plan.ranks) for name in plan.visiting_state)


def _shards(tiling: Tiling, plan: Plan) -> int:
    """Bytes of the slots through which shards pass before they are gathered: two for each size class of layers' tiles, and one
    for the boundary. Tiles that are updated on the device arrive only in `load`, whole."""
    arriving = [x for x in tiling.layouts.values() if plan.placement(x.name).updated is not Updated.ON_DEVICE]
    boundary = tiling.boundary()
    of_layers = [max((x.shard_bytes for x in layers if x in arriving), default=0) for layers in tiling.size_classes()]
    return SHARD_SLOTS * sum(of_layers) + max((x.shard_bytes for x in arriving if x.name in boundary), default=0)


def _turns(layers: Sequence[TileLayout], plan: Plan, kept: Sequence[str], runs: Callable[[str], int]) -> int:
    """Bytes of the slots of weights and gradients that tiles of one size class take turns in. Excludes gradients of the `kept`
    tiles. Weights arrive for each of the `runs` of a tile. Gradients leave once."""
    streamed = [x for x in layers if not plan.placement(x.name).resident]
    trained = [x for x in layers if x.trainable and x.name not in kept]
    sent = len(trained) + (plan.waves - 1) * sum(plan.placement(x.name).updated is Updated.FROM_HOST_SUMS for x in trained)
    arrivals = 2 * plan.waves * sum(runs(x.name) for x in streamed)
    return (min(plan.weight_slots, arrivals) * max((x.weight_bytes for x in streamed), default=0)
            + min(plan.gradient_slots, sent) * max((x.reduced_bytes for x in trained), default=0))


@dataclass(frozen=True)
class _Stack:
    """The layers of a model under a plan, by the names of their templates, from the first to the last."""

    captured: CapturedModel
    plan: Plan
    calls: Sequence[Call]  # those with a backward
    below: Sequence[Call]  # those without one, which come first

    @property
    def names(self) -> list[str]:
        return [call.template for call in self.calls]

    @functools.cached_property
    def recomputed(self) -> list[str]:
        """The layers that are recomputed, the first ones."""
        return self.plan.recomputed(self.names)

    @property
    def saving(self) -> list[str]:
        """The layers that keep their residuals, the last ones."""
        return self.names[len(self.recomputed):]

    @property
    def kinds(self) -> dict[str, Template]:
        return {call.template: self.captured.templates[call.template] for call in (*self.below, *self.calls)}


def training_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan, fused: bool = False) -> Estimate:
    """The peak of a forward and its backward. It is at one of these moments: the last forwards; the loss (or the outputs that
    the caller gets, and the epilogue's backward); the first backward of layers that keep their residuals, of layers that are
    recomputed, or of the prologue. `fused`: templates run compiled."""
    calls = tiling.differentiated(captured.calls)
    stack = _Stack(captured, plan, calls, captured.calls[1:len(captured.calls) - 1 - len(calls)])
    outputs, joined = ([], 0) if plan.output == "loss" else _outputs(captured, plan)
    activations, workspace = _activations(stack, outputs, joined), _workspace(stack, outputs, joined, fused)
    slots, accumulators = slot_bytes(captured, tiling, plan), accumulator_bytes(tiling, plan, calls)
    moments = [Estimate(slots, accumulators[at], activations[at], workspace[at]) for at in workspace]
    products = max((tiling.layouts[tile].product_bytes for tile in plan.resident_state), default=0)
    return max([*moments, Estimate(slots, 0, 0, products)], key=lambda moment: moment.total)


def _activations(stack: _Stack, outputs: Sequence[int], joined: int) -> dict[str, int]:
    """Bytes of activations that outlive an op, by moment. `outputs`, `joined`: see `_outputs`; none if the caller gets a loss,
    which takes no memory."""
    plan, recomputed, sizes = stack.plan, stack.recomputed, _largest_wave(stack.plan)
    hidden = {name: sum(cost.output_bytes(layer, *size) for size in sizes) for name, layer in stack.kinds.items()}
    residuals = {name: sum(cost.residual_bytes(layer, *size, plan.residuals) for size in sizes)
                 for name, layer in stack.kinds.items()}
    # The inputs of the first layer: the batch and the prologue's output. `on_the_way`: the value between two layers.
    on_the_way = max(hidden.values())
    first = (_given(stack.captured, plan) + on_the_way
             + sum(cost.output_bytes(stack.captured.templates["prologue"], *size) for size in sizes))
    block = plan.checkpoint_interval
    checkpoints = first + sum(hidden[recomputed[i - 1]] for i in range(block, len(recomputed), block)[plan.host_checkpoints:])
    if recomputed and stack.saving:  # the input of the layer after them, which keeps its residuals
        checkpoints += hidden[recomputed[-1]]
    if stack.below:  # the input of the first block
        checkpoints += hidden[stack.below[-1].template]
    if outputs and not stack.saving:  # the epilogue's input
        checkpoints += hidden[stack.captured.calls[-2].template]
    # A layer that keeps its residuals also keeps its output, which the next layer's backward reads. They are freed before
    # other layers are recomputed.
    kept = checkpoints + sum(hidden[name] + residuals[name] for name in stack.saving)
    of_caller = 2 * (joined or sum(outputs))  # outputs and their gradient
    before = {"outputs": kept} if outputs else {"loss": kept}
    return {"forward": kept, **before, "epilogue": kept + of_caller, "backward": kept + of_caller,
            "recompute": checkpoints + of_caller, "prologue": first + of_caller}


def _workspace(stack: _Stack, outputs: Sequence[int], joined: int, fused: bool) -> dict[str, int]:
    """Bytes of the op that needs the most, by moment."""
    plan, block = stack.plan, stack.plan.checkpoint_interval
    epilogue = stack.captured.calls_for(plan.output)[-1].template

    def peak(template: str, variant: str) -> int:
        return _peak(stack.captured, template, variant, plan, fused)

    inside = max(cost.residual_bytes(layer, *size) + cost.output_bytes(layer, *size)
                 for layer in stack.kinds.values() for size in _largest(plan))
    last = ({"outputs": sum(outputs[:-1]) + max(peak(epilogue, "outputs"), joined and outputs[-1] + joined),
             "epilogue": peak(epilogue, "recompute_backward")} if outputs else {"loss": peak(epilogue, "loss")})
    return {
        "forward": max([*(peak(name, "forward_saving") for name in {*stack.saving}),
                        *(peak(name, "forward") for name in {*stack.recomputed, *(call.template for call in stack.below)}),
                        peak("prologue", "forward")]),
        **last,
        "backward": max((peak(name, "backward") for name in {*stack.saving}), default=0),
        "recompute": max((
            (block - 1) * inside + max(peak(name, "recompute_backward"), peak(name, "backward") if block > 1 else 0)
            for name in {*stack.recomputed}), default=0),
        "prologue": peak("prologue", "recompute_backward")}


def accumulator_bytes(tiling: Tiling, plan: Plan, layers: Sequence[Call]) -> dict[str, int]:
    """Bytes of the FP32 accumulators of gradients at each of these moments. `layers`: those that have a backward."""
    prologue, *_, epilogue = map(set, tiling.tiles_of.values())
    # Accumulators of tiles that are added up on the device live until the last wave has added to them.
    passing = set(tiling.layouts) if plan.waves == 1 else set(plan.host_sums)
    # The accumulators of a tile that several calls read live from the backward of its last call to that of its first.
    spanning = (prologue & epilogue) | {tile for tile in passing if tiling.runs(tile) > (tile not in prologue | epilogue)}
    layer = max((_sum(tiling, passing.intersection(tiling.tiles_of[call.name]) - prologue - epilogue - spanning)
                 for call in layers), default=0)
    loss, first = _sum(tiling, epilogue & passing), _sum(tiling, prologue & passing)
    inside = _sum(tiling, spanning & passing) + plan.checkpoint_interval * layer
    staying = _sum(tiling, set(tiling.layouts) - passing)
    live = {"forward": 0, "outputs": 0, "loss": loss, "epilogue": loss, "backward": inside, "recompute": inside,
            "prologue": first}
    if plan.processes > 1:
        waiting = max(_sum(tiling, passing & tiles) for tiles in _complete(tiling))
        live |= {moment: live[moment] + waiting for moment in ("backward", "recompute", "prologue")}
    return {moment: staying + size for moment, size in live.items()}


def _complete(tiling: Tiling) -> list[set[str]]:
    """The tiles whose gradients are complete after the backward of each call but the prologue. Several ranks and hosts add up
    their accumulators during the backward of the next call."""
    found: list[set[str]] = []
    for tiles in tiling.tiles_of.values():
        found.append(set(tiles).difference(*found))
    return found[1:]


def evaluation_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan, fused: bool = False) -> Estimate:
    """The peak of a forward without gradients, whose result is the logits (or values of tokens) of the whole batch."""
    prologue, epilogue = captured.templates["prologue"], captured.calls_for(plan.output)[-1].template
    hidden = sum(cost.output_bytes(prologue, rows, plan.length) for rows in plan.micro_batches)  # all states may be joined
    outputs, joined = _outputs(captured, plan)
    kept = len(captured.calls) + 1 if plan.output == ALL else 3  # all hidden states, and one in addition to its parts
    before = max(_peak(captured, call.template, "forward", plan, fused) for call in captured.calls[:-1])
    last = _peak(captured, epilogue, "evaluate" if plan.output == "loss" else "outputs", plan, fused)
    activations = _given(captured, plan) + kept * hidden + sum(outputs[:-1])
    return Estimate(slot_bytes(captured, tiling, plan), 0, activations, max(before, last, joined and outputs[-1] + joined))


def _given(captured: CapturedModel, plan: Plan) -> int:
    """Device bytes of a batch's images and masks of pairs: the caller's and the lanes' own copy. Tokens take only a few
    bytes."""
    patches = sum(each.encoder.elements * each.dtype.itemsize for each in captured.patches)
    return 2 * plan.batch * plan.length * (patches + plan.length * captured.pair_bytes)


def _outputs(captured: CapturedModel, plan: Plan) -> tuple[list[int], int]:
    """Bytes of the epilogue's outputs for each micro-batch, and of the outputs of the whole batch if they are joined, with
    shorter rows padded to the longest; else 0."""
    template = captured.templates[captured.calls_for(plan.output)[-1].template]

    def size(rows: int, length: int) -> int:
        if plan.output != "loss":
            return cost.output_bytes(template, rows, length)
        variant = template.variant("outputs" if "outputs" in template.variant_names else "evaluate")
        return cost.result_bytes(template, variant, rows, length)

    joined = sum(size(rows, plan.length) for rows in plan.micro_batches)
    return [size(*each) for each in plan.sizes], joined if len(plan.micro_batches) > 1 else 0


def _elements(layout: TileLayout) -> int:
    return layout.elements if layout.trainable else 0


def _sum(tiling: Tiling, tiles: set[str]) -> int:
    """Bytes of the FP32 accumulators of these tiles."""
    return 4 * sum(_elements(tiling.layouts[tile]) for tile in tiles)


def _peak(captured: CapturedModel, template: str, variant: str, plan: Plan, fused: bool) -> int:
    """Peak bytes of a variant for the micro-batch that needs the most."""
    found = captured.templates[template]
    return max(cost.peak_bytes(found, found.variant(variant, found.chunk(rows, plan.token_chunk), plan.residuals), rows, length,
                               fused) for rows, length in _largest(plan))
