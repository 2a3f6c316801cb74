"""What a plan takes on the device, in bytes, at its busiest moment; and on the host, beside tiles and slabs.

Slots are counted exactly as `passes/schedule/place.py` makes them, values that outlive an op as the program keeps them; an op
holds what `cost.peak_bytes` says.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.hidden_states import ALL
from megacompile.ir.plan import Plan
from megacompile.predict import cost
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.weights.tiling import Tiling

#: An allocator's blocks are a little larger than what is asked for: one part in so many.
ROUNDING = 64


@dataclass(frozen=True)
class Estimate:
    """Device bytes of a plan, by purpose."""

    slots: int
    accumulators: int
    checkpoints: int  # activations that outlive an op
    workspace: int  # of the op that holds most

    @property
    def total(self) -> int:
        values = self.accumulators + self.checkpoints + self.workspace
        return self.slots + values + values // ROUNDING


def checkpoint_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> list[int]:
    """Of the checkpoints in host memory of one forward, in the order in which they are stashed."""
    layers = tiling.differentiated(captured.calls)
    begins = plan.from_host([call.name for call in layers])
    sizes = [cost.checkpoint_bytes(captured.templates[before.template], plan.length)
             for before, layer in pairwise(layers) if layer.name in begins]
    return [size * plan.micro_batches[mb] for size in sizes for mb in plan.wave(0)]  # the first wave is the largest


def host_parts(captured: CapturedModel, tiling: Tiling, plan: Plan) -> dict[str, int]:
    """Host memory that a plan takes beside tiles and slabs, by purpose."""
    return {"checkpoints": sum(checkpoint_bytes(captured, tiling, plan)),
            "sums": sum(tiling.layouts[tile].sum_bytes for tile in plan.host_sums)}


def slot_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> int:
    """Slots of weights, gradients and fetched checkpoints. They are made once and stay, so that an evaluation counts all of
    them too."""
    layouts, border = tiling.layouts, tiling.border(captured.calls)
    kept = plan.resident_state if plan.update == "step" else ()  # gradients that have slots of their own
    streamed = border.difference(plan.resident)
    ranked = [sorted((layouts[t].weight_bytes for t in streamed.intersection(tiling.tiles_of[call.name])), reverse=True)
              for call in captured.calls]
    fetched = checkpoint_bytes(captured, tiling, plan)
    # A section takes a slot that was never used before it uses one again; a whole step has a forward and a backward a wave.
    return (min(plan.checkpoint_slots, plan.waves * len(fetched)) * max(fetched, default=0)
            + sum(_turns(layers, plan, kept, lambda tile: tiling.runs(captured.calls, tile))
                  for layers in tiling.ranked(captured.calls))
            + sum(max(sizes) for sizes in zip_longest(*ranked, fillvalue=0))
            + sum(layouts[t].weight_bytes for t in plan.resident)
            + sum(layouts[t].state_bytes for t in plan.resident_state) + sum(layouts[t].gradient_bytes for t in kept)
            + _visiting(tiling, plan)
            + max((layouts[t].gradient_bytes for t in border if layouts[t].trainable and t not in kept), default=0))


def _visiting(tiling: Tiling, plan: Plan) -> int:
    """Of the slot that tiles pass through which visit for their update."""
    if not plan.visiting_state:
        return 0
    tiles = tiling.tiles()
    return max(tiles[name].bytes_of("visiting") for name in plan.visiting_state)


def _turns(layers: list[TileLayout], plan: Plan, kept: Sequence[str], runs: Callable[[str], int]) -> int:
    """Of the slots that tiles of one rank take turns in: of weights and gradients, those `kept` aside. Weights arrive for
    each of the `runs` of a tile, gradients leave once."""
    streamed = [x for x in layers if x.name not in plan.resident]
    trained = [x for x in layers if x.trainable and x.name not in kept]
    sent = len(trained) + (plan.waves - 1) * sum(x.name in plan.host_sums for x in trained)
    arrivals = 2 * plan.waves * sum(runs(x.name) for x in streamed)
    return (min(plan.weight_slots, arrivals) * max((x.weight_bytes for x in streamed), default=0)
            + min(plan.gradient_slots, sent) * max((x.gradient_bytes for x in trained), default=0))


def training_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan, fused: bool = False) -> Estimate:
    """A forward and its backward at their busiest moment: the last forwards, the loss (or the outputs that the caller gets, and
    the epilogue's backward), the first backward of layers that kept their residuals, of those that are recomputed, or of the
    prologue. `fused`: templates run compiled."""
    length, largest = plan.length, plan.micro_batches[0]
    templates, layer_calls = captured.templates, tiling.differentiated(captured.calls)
    below = captured.calls[1:len(captured.calls) - 1 - len(layer_calls)]  # what has no backward
    kinds = {call.template: templates[call.template] for call in (*below, *layer_calls)}
    there = [plan.micro_batches[mb] for mb in plan.wave(0)]  # the first wave is the largest
    hidden = {name: sum(cost.output_bytes(layer, rows, length) for rows in there) for name, layer in kinds.items()}
    residuals = {name: sum(cost.residual_bytes(layer, rows, length, plan.residuals) for rows in there)
                 for name, layer in kinds.items()}
    shared = sum(cost.output_bytes(templates["prologue"], rows, length) for rows in there)
    names, block = [call.template for call in layer_calls], plan.checkpoint_interval
    recomputing = max(0, len(names) - plan.saved_layers)
    given = _given(captured, plan)
    # The first block begins with what all layers share. One more: what goes from layer to layer, there or back.
    on_the_way = max(hidden.values())
    borders = range(block, recomputing, block)[plan.host_checkpoints:]
    checkpoints = given + shared + on_the_way + sum(hidden[names[i - 1]] for i in borders)
    if 0 < recomputing < len(names):  # what the first of the layers begins with that keep their residuals
        checkpoints += hidden[names[recomputing - 1]]
    if below:  # what the first block begins with
        checkpoints += hidden[below[-1].template]
    outputs = [] if plan.output == "loss" else _outputs(captured, plan)
    if outputs and recomputing == len(names):  # what the epilogue begins with
        checkpoints += hidden[captured.calls[-2].template]
    # A layer that keeps its residuals also keeps its output: the next one's backward begins with it. All of these are gone
    # when the first layer is recomputed.
    kept = checkpoints + sum(residuals[name] + hidden[name] for name in names[recomputing:])

    first, last = (set(tiling.tiles_of[call.name]) for call in (captured.calls[0], captured.calls[-1]))
    # Of tiles that are added up on the device every accumulator lives until the last wave has added to it.
    passing = set(tiling.layouts) if plan.waves == 1 else set(plan.host_sums)
    # What several calls read lives from the last of them to the first.
    spanning = (first & last) | {tile for tile in passing if tiling.runs(captured.calls, tile) > (tile not in first | last)}
    layer = max((_sum(tiling, passing.intersection(tiling.tiles_of[call.name]) - first - last - spanning)
                 for call in layer_calls), default=0)
    accumulators = {"forward": 0, "outputs": 0, **dict.fromkeys(("loss", "epilogue"), _sum(tiling, last & passing)),
                    "prologue": _sum(tiling, first & passing),
                    **dict.fromkeys(("backward", "recompute"), _sum(tiling, spanning & passing) + block * layer)}
    staying = _sum(tiling, set(tiling.layouts) - passing)
    accumulators = {moment: staying + live for moment, live in accumulators.items()}

    def peak(template: str, variant: str) -> int:
        return _peak(captured, template, variant, plan, fused)

    saving, recomputed = names[recomputing:], names[:recomputing]
    inside = max(cost.residual_bytes(t, largest, length) + cost.output_bytes(t, largest, length) for t in kinds.values())
    workspace = {
        "forward": max([*(peak(name, "forward_saving") for name in {*saving}),
                        *(peak(name, "forward") for name in {*recomputed, *(call.template for call in below)}),
                        peak("prologue", "forward")]),
        "backward": max((peak(name, "backward") for name in {*saving}), default=0),
        "recompute": max((
            (block - 1) * inside + max(peak(name, "recompute_backward"), peak(name, "backward") if block > 1 else 0)
            for name in {*recomputed}), default=0),
        "prologue": peak("prologue", "recompute_backward")}
    epilogue = captured.calls_for(plan.output)[-1].template
    if outputs:
        workspace["outputs"] = sum(outputs[:-1]) + max(peak(epilogue, "outputs"), _joined(outputs))
        workspace["epilogue"] = peak(epilogue, "recompute_backward")
    else:
        workspace["loss"] = peak(epilogue, "loss")
    activations = {**dict.fromkeys(workspace, kept), "recompute": checkpoints, "prologue": given + shared + on_the_way}
    for moment in ("epilogue", "backward", "recompute", "prologue") if outputs else ():
        activations[moment] += 2 * sum(outputs)  # the caller's, and their gradient
    slots = slot_bytes(captured, tiling, plan)
    moments = (Estimate(slots, accumulators[at], activations[at], workspace[at]) for at in workspace)
    return max(moments, key=lambda moment: moment.total)


def evaluation_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan, fused: bool = False) -> Estimate:
    """A forward without gradients. Logits (or values of tokens) of the whole batch are its result."""
    prologue, epilogue = captured.templates["prologue"], captured.calls_for(plan.output)[-1].template
    hidden = sum(cost.output_bytes(prologue, rows, plan.length) for rows in plan.micro_batches)
    outputs = _outputs(captured, plan)
    kept = len(captured.calls) + 1 if plan.output == ALL else 3  # all of them, and one beside its parts
    before = max(_peak(captured, call.template, "forward", plan, fused) for call in captured.calls[:-1])
    last = _peak(captured, epilogue, "evaluate" if plan.output == "loss" else "outputs", plan, fused)
    activations = _given(captured, plan) + kept * hidden + sum(outputs[:-1])
    return Estimate(slot_bytes(captured, tiling, plan), 0, activations, max(before, last, _joined(outputs)))


def _given(captured: CapturedModel, plan: Plan) -> int:
    """What a batch of images, or with masks of pairs, is on the device, as the caller has it there and the lanes' own copy;
    tokens are a few bytes each."""
    patches = sum(each.encoder.elements * each.dtype.itemsize for each in captured.patches)
    return 2 * plan.batch * plan.length * (patches + plan.length * captured.pair_bytes)


def _outputs(captured: CapturedModel, plan: Plan) -> list[int]:
    """Bytes of the epilogue's outputs, of each micro-batch."""
    template = captured.templates[captured.calls_for(plan.output)[-1].template]
    if plan.output != "loss":
        return [cost.output_bytes(template, rows, plan.length) for rows in plan.micro_batches]
    variant = template.variant("outputs" if "outputs" in template.variant_names else "evaluate")
    return [cost.result_bytes(template, variant, rows, plan.length) for rows in plan.micro_batches]


def _joined(outputs: list[int]) -> int:
    """What is held beside all but the last of them while they are put together."""
    return outputs[-1] + sum(outputs) if len(outputs) > 1 else 0


def _elements(layout: TileLayout) -> int:
    return layout.elements if layout.trainable else 0


def _sum(tiling: Tiling, tiles: set[str]) -> int:
    """Bytes of FP32 accumulators."""
    return 4 * sum(_elements(tiling.layouts[tile]) for tile in tiles)


def _peak(captured: CapturedModel, template: str, variant: str, plan: Plan, fused: bool) -> int:
    """Of the largest micro-batch, the first."""
    found, rows = captured.templates[template], plan.micro_batches[0]
    cut = found.variant(variant, found.chunk(rows, plan.token_chunk), plan.residuals)
    return cost.peak_bytes(found, cut, rows, plan.length, fused)
