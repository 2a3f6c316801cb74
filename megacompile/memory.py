"""What a plan takes on the device, in bytes: the first memory model.

Slots are counted exactly as `passes/schedule/place.py` makes them. Everything else is an upper bound: values that outlive
an op are counted as if all were there at the busiest moment, and an op holds what `cost.peak_bytes` says.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from megacompile import cost
from megacompile.frontend.capture import CapturedModel
from megacompile.plan import Plan
from megacompile.runtime.store import TileLayout
from megacompile.tiling import Tiling


@dataclass(frozen=True)
class Estimate:
    """Device bytes of a plan, by purpose."""

    slots: int
    accumulators: int
    checkpoints: int  # activations that outlive an op
    workspace: int  # of the op that holds most

    @property
    def total(self) -> int:
        return self.slots + self.accumulators + self.checkpoints + self.workspace


def slot_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> int:
    """Weight and gradient slots. They are made once and stay, so that an evaluation counts gradients' slots too."""
    layouts, border = tiling.layouts, _border(captured, tiling)
    layers = [layout for tile, layout in layouts.items() if tile not in border]
    streamed = [x for x in layers if x.name not in plan.resident]
    trained = [x for x in layers if x.trainable]
    ranked = [sorted((layouts[t].weight_bytes for t in tiling.tiles_of[call.name] if t not in plan.resident), reverse=True)
              for call in (captured.calls[0], captured.calls[-1])]
    return (min(plan.weight_slots, len(streamed)) * max((x.weight_bytes for x in streamed), default=0)
            + sum(max(sizes) for sizes in zip_longest(*ranked, fillvalue=0))
            + sum(layouts[t].weight_bytes for t in plan.resident)
            + min(plan.gradient_slots, len(trained)) * max((x.gradient_bytes for x in trained), default=0)
            + max((layouts[t].gradient_bytes for t in border if layouts[t].trainable), default=0))


def training_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> Estimate:
    """A forward and its backward."""
    length, largest = plan.length, plan.micro_batches[0]
    templates, layer_calls = captured.templates, captured.calls[1:-1]
    kinds = {call.template: templates[call.template] for call in layer_calls}
    border = _border(captured, tiling)
    block = plan.checkpoint_interval

    layer_elements = max((_elements(layout) for tile, layout in tiling.layouts.items() if tile not in border), default=0)
    first, last = (sum(_elements(tiling.layouts[t]) for t in tiling.tiles_of[call.name])
                   for call in (captured.calls[0], captured.calls[-1]))
    accumulators = 4 * max(last + block * layer_elements, first)
    if plan.waves > 1:  # every tile's live until the last wave has added to them
        accumulators = 4 * sum(map(_elements, tiling.layouts.values()))

    there = [plan.micro_batches[mb] for mb in plan.wave(0)]  # the first wave is the largest
    hidden = {name: sum(cost.output_bytes(layer, rows, length) for rows in there) for name, layer in kinds.items()}
    residuals = {name: sum(cost.residual_bytes(layer, rows, length) for rows in there) for name, layer in kinds.items()}
    shared = sum(cost.output_bytes(templates["prologue"], rows, length) for rows in there)
    names = [call.template for call in layer_calls]
    recomputing = max(0, len(names) - plan.saved_layers)
    # The first block begins with what all layers share; two more: a layer's input and output, or its gradients.
    checkpoints = shared + 2 * max(hidden.values()) + sum(hidden[names[i - 1]] for i in range(block, recomputing, block))
    # A layer that keeps its residuals also keeps its output: the next one's backward begins with it.
    checkpoints += sum(residuals[name] + hidden[name] for name in names[recomputing:])

    recomputed = max(cost.residual_bytes(t, largest, length) + cost.output_bytes(t, largest, length) for t in kinds.values())
    layers = max(_peak(captured, name, "recompute_backward", plan) for name in kinds)
    if plan.token_chunk and (block > 1 or plan.saved_layers):
        # Without chunks, the joint recompute and backward holds the most; these two hold all tokens even so.
        layers = max(layers, *(_peak(captured, name, variant, plan) for name in kinds
                               for variant in ("forward_saving", "backward")))
    workspace = max(
        (block - 1) * recomputed + layers,
        _peak(captured, "epilogue", "loss", plan), _peak(captured, "prologue", "recompute_backward", plan))
    return Estimate(slot_bytes(captured, tiling, plan), accumulators, checkpoints, workspace)


def evaluation_bytes(captured: CapturedModel, tiling: Tiling, plan: Plan) -> Estimate:
    """A forward without gradients. Logits of the whole batch are its result, put together from micro-batches."""
    templates, epilogue = captured.templates, captured.templates["epilogue"]
    hidden = sum(cost.output_bytes(templates["prologue"], rows, plan.length) for rows in plan.micro_batches)
    logits = [cost.result_bytes(epilogue, epilogue.variant("logits"), rows, plan.length) for rows in plan.micro_batches]
    layers = max(_peak(captured, call.template, "forward", plan) for call in captured.calls[1:-1])
    joined = logits[-1] + sum(logits) if len(logits) > 1 else 0
    workspace = max(layers, _peak(captured, "epilogue", "evaluate", plan), joined)
    return Estimate(slot_bytes(captured, tiling, plan), 0, 3 * hidden + sum(logits[:-1]), workspace)


def _border(captured: CapturedModel, tiling: Tiling) -> set[str]:
    return {tile for call in (captured.calls[0], captured.calls[-1]) for tile in tiling.tiles_of[call.name]}


def _elements(layout: TileLayout) -> int:
    return layout.elements if layout.trainable else 0


def _peak(captured: CapturedModel, template: str, variant: str, plan: Plan) -> int:
    """Of the largest micro-batch, the first."""
    found = captured.templates[template]
    return cost.peak_bytes(found, found.variant(variant, plan.token_chunk), plan.micro_batches[0], plan.length)
