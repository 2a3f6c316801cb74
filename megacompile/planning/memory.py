"""Bytes that a plan takes on the device at its peak, and on the host in addition to weights and optimizer state.

Slots are counted as `passes/schedule/place.py` makes them, and values that outlive an op as the program keeps them. An op's own
values take `cost.peak_bytes`. `tests/ir/test_memory.py` holds these formulas to programs of random plans, byte for byte, and
`docs/decisions/0064-memory-estimates.md` says what is only a bound.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.hidden_states import ALL
from megacompile.frontend.templates.template import Call, Template
from megacompile.ir.placement import Updated
from megacompile.ir.places import Family
from megacompile.ir.plan import SHARD_SLOTS, Plan
from megacompile.ir.program import CallSpec
from megacompile.predict import cost
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.weights.tiling import Tiling

#: An allocator's blocks are larger than requested, by one part in this many.
ROUNDING = 56


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
    return [rows * cost.activation_checkpoint_bytes(template, length)
            for template in _on_host(captured, tiling, plan) for rows, length in _largest_wave(plan)]


def _on_host(captured: CapturedModel, tiling: Tiling, plan: Plan) -> list[Template]:
    """The templates of the calls whose outputs are checkpoints in host memory."""
    if not plan.host_checkpoints:
        return []
    layers = tiling.differentiated(captured.calls)
    begins = plan.from_host([call.name for call in layers])
    return [captured.templates[before.template] for before, layer in pairwise(layers) if layer.name in begins]


def _fetched_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> int:
    """Bytes of the slots through which checkpoints return, in turn: for each block those of each micro-batch."""
    templates = _on_host(captured, tiling, plan)
    sizes = [max((rows * cost.activation_checkpoint_bytes(template, length) for template in {*templates}), default=0)
             for rows, length in plan.sizes]
    fetched = [sizes[mb] for wave in range(plan.waves) for _ in templates for mb in plan.wave(wave)]
    return sum(max(fetched[slot::plan.checkpoint_slots], default=0) for slot in range(plan.checkpoint_slots))


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
    """Bytes of memory of a host that a plan takes in addition to weights, state and the budget of pinned memory, by purpose.
    Ranks share gradients and sums, and have checkpoints and slabs of their own."""
    waits = plan.update == "step"
    return {"checkpoints": tiling.ranks_here * sum(host_checkpoint_bytes(captured, tiling, plan)),
            "sums": sum(tiling.layouts[tile].sum_bytes for tile in plan.host_sums) // tiling.spread,
            "gradients": tiling.host_parts()["gradients"] if waits else 0,
            "state slabs": state_slab_bytes(tiling, plan.state_slabs),
            "slabs": 0 if waits or not plan.pinned else (
                tiling.ranks_here * slab_bytes(tiling, plan.gradient_slabs, plan.resident_state))}


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
    return tiling.ranks_here * (max((tiling.layouts[tile].disk_bytes for tile in tiling.on_disk if tile in boundary), default=0)
                           + sum(min(count, len(group)) * max(group, default=0) for group in groups))


def slot_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> int:
    """Bytes of the slots of weights, gradients and fetched checkpoints. They are allocated once and stay, so an evaluation
    counts all of them too."""
    return sum(slot_parts(captured, tiling, plan).values())


def slot_parts(captured: CapturedModel, tiling: Tiling, plan: Plan) -> dict[Family, int]:
    """The bytes of `slot_bytes` by family, boundary tiles included."""
    layouts, boundary = tiling.layouts, tiling.boundary()
    kept = plan.resident_state if plan.update == "step" else ()  # tiles whose gradients have their own slots
    streamed = boundary.difference(plan.resident)
    by_call = [sorted((layouts[t].weight_bytes for t in streamed.intersection(tiling.tiles_of[call.name])), reverse=True)
               for call in captured.calls]
    # How often a forward and a backward read each tile.
    uses = Counter(tile for calls in (captured.calls, tiling.differentiated(captured.calls)) for call in calls
                   for tile in tiling.tiles_of[call.name])
    turns = [_turns(layers, plan, kept, uses) for layers in tiling.size_classes()]
    # A section takes an unused slot before it reuses one. A whole step has one forward and one backward per wave.
    return {
        Family.FETCHED_CHECKPOINTS: _fetched_bytes(captured, tiling, plan),
        Family.WEIGHTS: sum(weights for weights, _ in turns) + sum(max(sizes) for sizes in zip_longest(*by_call, fillvalue=0)),
        Family.GRADIENTS: sum(gradients for _, gradients in turns) + max(
            (layouts[t].reduced_bytes for t in boundary if layouts[t].trainable and t not in kept), default=0),
        Family.RESIDENT: sum(layouts[t].weight_bytes for t in plan.resident if t not in plan.resident_state),
        Family.UPDATED_WEIGHTS: sum(layouts[t].weight_bytes for t in plan.resident_state),
        Family.UPDATED_STATE: sum(layouts[t].shard_state_bytes for t in plan.resident_state),
        Family.UPDATED_GRADIENTS: sum(layouts[t].reduced_bytes for t in kept),
        Family.VISITING: _visiting(tiling, plan, "visiting"),
        Family.MOMENTUM: _visiting(tiling, plan, "momentum") if plan.ranks > 1 else 0,
        Family.WEIGHT_SHARDS: _shards(tiling, plan, uses) if plan.ranks > 1 else 0}


def _visiting(tiling: Tiling, plan: Plan, kind: str) -> int:
    """Bytes of the slot through which values of this kind of visiting tiles pass."""
    if not plan.visiting_state:
        return 0
    tiles = tiling.tiles()
    return max(tiles[name].bytes_of(kind, plan.ranks) for name in plan.visiting_state)


def _shards(tiling: Tiling, plan: Plan, uses: Mapping[str, int]) -> int:
    """Bytes of the slots through which shards pass before they are gathered: two for each size class of layers' tiles, and one
    for the boundary. Resident tiles arrive once, after their update on the host."""
    arriving = [x for x in tiling.layouts.values() if not plan.placement(x.name).resident
                or x.trainable and plan.placement(x.name).updated is not Updated.ON_DEVICE]
    boundary = tiling.boundary()
    size = max((x.shard_bytes for x in arriving if x.name in boundary), default=0)
    for layers in tiling.size_classes():
        here = [x for x in layers if x in arriving]
        streamed = [x for x in here if not plan.placement(x.name).resident]
        count = max(len(here) - len(streamed), _arrivals(layers, streamed, plan, uses))
        size += min(SHARD_SLOTS, count) * max((x.shard_bytes for x in here), default=0)
    return size


def _turns(layers: Sequence[TileLayout], plan: Plan, kept: Sequence[str], uses: Mapping[str, int]) -> tuple[int, int]:
    """Bytes of the slots of weights, and of gradients, that tiles of one size class take turns in. Excludes gradients of the
    `kept` tiles. Gradients leave once."""
    streamed = [x for x in layers if not plan.placement(x.name).resident]
    trained = [x for x in layers if x.trainable and x.name not in kept]
    sent = len(trained) + (plan.waves - 1) * sum(plan.placement(x.name).updated is Updated.FROM_HOST_SUMS for x in trained)
    arrivals = _arrivals(layers, streamed, plan, uses)
    return (min(plan.weight_slots, arrivals) * max((x.weight_bytes for x in streamed), default=0),
            min(plan.gradient_slots, sent) * max((x.reduced_bytes for x in trained), default=0))


def _arrivals(layers: Sequence[TileLayout], streamed: Sequence[TileLayout], plan: Plan, uses: Mapping[str, int]) -> int:
    """How often the `streamed` tiles of a size class arrive in a whole step. A tile alone in its class that several calls read
    arrives once."""
    alone = len(layers) == len(streamed) == 1 and uses[streamed[0].name] > 2
    return 1 if alone else plan.waves * sum(uses[x.name] for x in streamed)


@dataclass(frozen=True)
class _Stack:
    """The layers of a model under a plan, by the names of their templates, from the first to the last."""

    captured: CapturedModel
    plan: Plan
    calls: Sequence[Call]  # those with a backward
    below: Sequence[Call]  # those without one, which come first

    @functools.cached_property
    def names(self) -> list[str]:
        return [call.template for call in self.calls]

    @functools.cached_property
    def recomputed(self) -> list[str]:
        """The layers that are recomputed, the first ones."""
        return self.plan.recomputed(self.names)

    @functools.cached_property
    def saving(self) -> list[str]:
        """The layers that keep their residuals, the last ones."""
        return self.names[len(self.recomputed):]

    @functools.cached_property
    def kinds(self) -> dict[str, Template]:
        return {call.template: self.captured.templates[call.template] for call in (*self.below, *self.calls)}


def training_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan, fused: bool = False) -> Estimate:
    """The peak of a forward and its backward. It is at one of these moments: the last forwards; the loss (or the outputs that
    the caller gets, and the epilogue's backward); the first backward of layers that keep their residuals, of layers that are
    recomputed, or of the prologue. `fused`: templates run compiled."""
    moments = training_moments(captured, tiling, plan, fused)
    slots = moments["forward"].slots
    products = max((tiling.layouts[tile].product_bytes for tile in plan.resident_state), default=0)
    return max([*moments.values(), Estimate(slots, 0, 0, products)], key=lambda moment: moment.total)


def training_moments(captured: CapturedModel, tiling: Tiling, plan: Plan, fused: bool = False) -> dict[str, Estimate]:
    """The device bytes of each of these moments."""
    calls = tiling.differentiated(captured.calls)
    stack = _Stack(captured, plan, calls, captured.calls[1:len(captured.calls) - 1 - len(calls)])
    outputs, joined = ([], 0) if plan.output == "loss" else _outputs(captured, plan)
    activations, workspace = _activations(stack, outputs, joined), _workspace(stack, outputs, joined, fused)
    slots, accumulators = slot_bytes(captured, tiling, plan), accumulator_bytes(tiling, plan, calls)
    if plan.held_state:
        _count_held(accumulators, stack, tiling)
    return {at: Estimate(slots, accumulators[at], activations[at], workspace[at]) for at in workspace}


def _count_held(accumulators: dict[str, int], stack: _Stack, tiling: Tiling) -> None:
    """Adds the tiles that the device holds for their update to accumulators, by moment. In the first wave they may still be
    returning; its accumulators take the memory of those that have. In the last wave's backward, each takes its memory after
    that of its call's residuals and accumulators was freed. The memory that is free may be in pieces that are too small for the
    largest part of a tile."""
    plan, tiles = stack.plan, tiling.tiles()
    held = {name: tiles[name].bytes_of("held") for name in plan.held_state}
    # Accumulators that other waves have added to are counted as long as any lives.
    counted = {t for t in tiling.layouts if plan.waves > 1 and t not in plan.host_sums}
    kept = [sum(cost.residual_bytes(layer, *plan.sizes[mb], plan.residuals) + cost.output_bytes(layer, *plan.sizes[mb])
                for mb in plan.wave(plan.waves - 1)) for layer in (stack.kinds[name] for name in stack.saving)]
    calls = list(tiling.tiles_of)
    moments = ["prologue", *["recompute"] * (len(calls) - 2 - len(kept)), *["backward"] * len(kept), "epilogue"]
    more, taken, freed = dict.fromkeys(moments, 0), 0, 0
    for at in reversed(range(len(calls))):
        in_residuals = sum(kept[at - len(calls) + len(kept) + 2:]) if moments[at] == "backward" else 0
        more[moments[at]] = max(more[moments[at]], taken - freed - in_residuals)
        ended = {tile for tile in tiling.tiles_of[calls[at]] if not any(tile in tiling.tiles_of[name] for name in calls[:at])}
        taken += sum(held.get(tile, 0) for tile in ended)
        freed += _sum(tiling, ended & counted)
    part = max(max(tiling.layouts[name].gradient_bytes, *tiling.layouts[name].moment_bytes) for name in held)
    left = max(0, taken - _sum(tiling, set(tiling.layouts))) if plan.waves > 1 else taken  # still returning in the last wave
    for moment in accumulators:
        accumulators[moment] = part + max(accumulators[moment] + more.get(moment, 0) + left, taken)


def _activations(stack: _Stack, outputs: Sequence[int], joined: int) -> dict[str, int]:
    """Bytes of activations that outlive an op, by moment. `outputs`, `joined`: see `_outputs`; none if the caller gets a loss,
    which takes no memory."""
    plan, recomputed, sizes = stack.plan, stack.recomputed, _largest_wave(stack.plan)
    hidden = {name: sum(cost.output_bytes(layer, *size) for size in sizes) for name, layer in stack.kinds.items()}
    residuals = {name: sum(cost.residual_bytes(layer, *size, plan.residuals) for size in sizes)
                 for name, layer in stack.kinds.items()}
    # `on_the_way`: the value between two layers, or its gradient. `arriving`: without the micro-batch that an op makes.
    on_the_way = max(hidden.values())
    arriving = on_the_way - min(max(cost.output_bytes(layer, *size) for layer in stack.kinds.values()) for size in sizes)
    given = _given(stack.captured, plan)
    starts = range(plan.checkpoint_interval, len(recomputed), plan.checkpoint_interval)[plan.host_checkpoints:]
    checkpoints = (given + sum(cost.output_bytes(stack.captured.templates["prologue"], *size) for size in sizes)
                   + sum(hidden[recomputed[i - 1]] for i in starts))
    if stack.below:  # the input of the first block
        checkpoints += hidden[stack.below[-1].template]
    of_caller = 2 * (joined or sum(outputs))  # outputs and their gradient
    # A layer that keeps its residuals also keeps its output, which the next layer's backward reads, and the first of them its
    # input. They are freed before other layers are recomputed.
    kept = checkpoints + sum(hidden[name] + residuals[name] for name in stack.saving)
    if stack.saving:
        kept += hidden[recomputed[-1]] if recomputed else 0
        last = stack.kinds[stack.saving[-1]]
        forward = kept - min(cost.output_bytes(last, *size) + cost.residual_bytes(last, *size, plan.residuals)
                             for size in sizes)
    else:
        kept += hidden[stack.captured.calls[-2].template] if outputs else 0  # the epilogue's input
        forward = checkpoints + (arriving if len(recomputed) - 1 in (0, *starts) else on_the_way)
    before = {"outputs": kept} if outputs else {"loss": kept + (arriving if stack.saving else on_the_way)}
    return {"forward": forward, **before, "epilogue": kept + of_caller + arriving, "backward": kept + of_caller + on_the_way,
            "recompute": checkpoints + of_caller + on_the_way, "prologue": given + of_caller + on_the_way}


def _workspace(stack: _Stack, outputs: Sequence[int], joined: int, fused: bool) -> dict[str, int]:
    """Bytes of the op that needs the most, by moment."""
    plan = stack.plan
    epilogue = stack.captured.calls_for(plan.output)[-1].template

    def peak(template: str, variant: str) -> int:
        return _peak(stack.captured, template, variant, plan, fused)

    def saved(name: str, size: tuple[int, int]) -> int:
        layer = stack.kinds[name]
        return cost.residual_bytes(layer, *size, plan.residuals) + cost.output_bytes(layer, *size)

    # In a block, every layer but the last keeps its residuals and its output.
    inside = max((sum(saved(name, size) for name in block[:-1]) for block in plan.blocks(stack.names)
                  for size in _largest(plan)), default=0)
    last = ({"outputs": sum(outputs[:-1]) + max(peak(epilogue, "outputs"), joined and outputs[-1] + joined),
             "epilogue": peak(epilogue, "recompute_backward")} if outputs else {"loss": peak(epilogue, "loss")})
    return {
        "forward": max([*(peak(name, "forward_saving") for name in {*stack.saving}),
                        *(peak(name, "forward") for name in {*stack.recomputed, *(call.template for call in stack.below)}),
                        peak("prologue", "forward")]),
        **last,
        "backward": max((peak(name, "backward") for name in {*stack.saving}), default=0),
        "recompute": inside + max((peak(name, variant) for name in {*stack.recomputed} for variant in (
            ("recompute_backward", "backward") if plan.checkpoint_interval > 1 else ("recompute_backward",))), default=0),
        "prologue": peak("prologue", "recompute_backward")}


def accumulator_bytes(tiling: Tiling, plan: Plan, layers: Sequence[Call]) -> dict[str, int]:
    """Bytes of the FP32 accumulators of gradients at each of these moments. `layers`: those that have a backward."""
    # Accumulators of tiles that are added up on the device live until the last wave has added to them. Those of other tiles
    # live from the backward of the last call that reads the tile to that of the first.
    passing = set(tiling.layouts) if plan.waves == 1 else set(plan.host_sums)
    calls = {name: at for at, name in enumerate(tiling.tiles_of)}
    first, last = dict[str, int](), dict[str, int]()
    for at, tiles in enumerate(tiling.tiles_of.values()):
        for tile in passing.intersection(tiles):
            first.setdefault(tile, at)
            last[tile] = at
    begun, ended = [0] * (len(calls) + 1), [0] * (len(calls) + 1)
    for tile, at in first.items():
        size = _sum(tiling, {tile})
        ended[at] += size
        begun[last[tile]] += size
    # Several processes add up the accumulators that a backward has completed during the next one.
    waiting = [*ended]
    for at in reversed(range(len(calls))):
        waiting[at] = ended[at] or waiting[at + 1]
    begun, ended = ([*accumulate(reversed(each))][::-1] for each in (begun, ended))

    def live(low: int, high: int) -> int:
        """Those of all calls from `low` to `high`."""
        return begun[low] - ended[high + 1] + (waiting[high + 1] if plan.processes > 1 else 0)

    def most(spans: Iterable[Sequence[str]]) -> int:
        return max((live(calls[span[0]], calls[span[-1]]) for span in spans), default=0)

    blocks = plan.blocks([call.name for call in layers])
    recomputed = [name for block in blocks for name in block]
    # Of several micro-batches, each runs the backward of a whole block before the next one does.
    spans = blocks if len(plan.wave(0)) > 1 else [(name,) for name in recomputed]
    loss, staying = live(len(calls) - 1, len(calls) - 1), _sum(tiling, set(tiling.layouts) - passing)
    return {moment: staying + size for moment, size in {
        "forward": 0, "outputs": 0, "loss": loss, "epilogue": loss, "recompute": most(spans), "prologue": live(0, 0),
        "backward": most((call.name,) for call in layers[len(recomputed):])}.items()}


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
