"""The results of a capture, as text: the first thing to read if a model does not stream as expected."""
from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate
from torch import Tensor, nn

from megacompile.api import analyse, check_module
from megacompile.errors import MegacompileError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.ops.attention_kernels import fused_kernel
from megacompile.frontend.pipeline import Step, Watch
from megacompile.frontend.templates.template import Call, Template
from megacompile.frontend.tracing.layers import Layers, stack_candidates
from megacompile.inputs.batch import batch_types
from megacompile.inputs.repacking import obstacle
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import compute_device, device_budget, free_device_bytes
from megacompile.planning.precision import described_products
from megacompile.sizes import format_bytes
from megacompile.streaming.streamed_module import StreamedModule
from megacompile.weights.tiling import Tiling

#: The most lines of a step's changes that are shown, and the characters that are shown of each.
STEP_LINES, STEP_WIDTH = 24, 160


def explain_capture(model: nn.Module, *, layers: Layers | None = None, example: Mapping[str, Tensor] | None = None,
                    show_steps: Callable[[str], None] | None = None, **options: Any) -> str:
    """The results of a capture, as text to print: the stack and those beside it, calls, templates, tiles, ties, what is
    frozen, what the loss is, and the conditions that the graphs assume.

    For a streamed model: what runs. For any other, on the meta device too: what `stream` with these arguments would find.
    Nothing is changed. Raises what `stream` would raise. `show_steps` (such as `print`) is called after each step of the
    capture, with the step's name and the lines of the graph that it changed; if the capture is refused, the step after the last
    one shown has refused it. Raises `MegacompileError` if `show_steps` is given for a streamed model."""
    check_module(model)
    if isinstance(model, StreamedModule):
        if show_steps is not None:
            raise MegacompileError("show_steps is for a model that is not streamed yet, since its steps run only once: call "
                                   "explain_capture before stream")
        streamed = model.megacompile.streamed
        return report(model, streamed.captured, streamed.tiling)

    config = StreamConfig.of(**options)
    device = compute_device(config.device)
    return report(model, *analyse(model, config, device.type, layers, example, fused_kernel(device),
                                  device_budget(config, free_device_bytes(device)), watch=show_steps and _shown_by(show_steps)))


def _shown_by(show: Callable[[str], None]) -> Watch:
    return lambda step, before, after: show(step_text(step, before, after))


def step_text(step: Step, before: str, after: str) -> str:
    """A step's name, what it reads and makes, and how it changes the state's text."""
    gives = ", ".join(dict.fromkeys((*step.gives, *step.changes))) or "nothing: a check"
    changed = [line[:STEP_WIDTH] for line in difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
               if not line.startswith(("---", "+++", "@@"))]
    more = [f"... {len(changed) - STEP_LINES} more lines"] if len(changed) > STEP_LINES else []
    return "\n".join([f"{step.name}: {', '.join(step.reads)} -> {gives}", *(f"  {x}" for x in (*changed[:STEP_LINES], *more))])


def report(model: nn.Module, captured: CapturedModel, tiling: Tiling) -> str:
    """The sections of `explain_capture`, separated by blank lines."""
    return "\n\n".join([_summary(model, captured, tiling), _calls(captured, tiling), _templates(captured),
                        _tiles(captured, tiling), "\n".join(_remarks(model, captured, tiling))])


def _summary(model: nn.Module, captured: CapturedModel, tiling: Tiling) -> str:
    stacks, again = captured.stacks, sum(bool(call.again) for call in captured.calls)
    often = f", some more than once ({again} calls again)" if again else ""
    lines = [f"{type(model).__name__}: {len(captured.layer_names)} layers in {' and '.join(stacks)}{often}, "
             f"{sum(x.parameters for x in tiling.layouts.values()):,} parameters, captured in {captured.seconds:.1f} s"]
    others = [f"{path} ({count:,} parameters)" for path, count in stack_candidates(model).items()
              if not any(f"{path}.".startswith(f"{each}.") or each.startswith(f"{path}.") for each in stacks)]
    if others:  # but for those in layers, of experts say
        lines.append(f"other lists of modules: {_some(others)}; name lists in layers=(..., ...) to stream several")
    labels = ", ".join(captured.labels) or "none of them"
    lines.append(f"batch: {', '.join(captured.batch_inputs)}; only the loss reads {labels}")
    return "\n".join(lines)


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + ", ..." * (len(names) > most)


def _runs(calls: Sequence[Call], tiling: Tiling) -> Iterator[list[Call]]:
    """Consecutive calls with one template and tiles of the same sizes."""

    def kind(call: Call) -> Any:
        return call.template, [(x.weight_bytes, x.trainable) for x in _layouts(call, tiling)]

    for _, run in itertools.groupby(calls, kind):
        yield list(run)


def _layouts(call: Call, tiling: Tiling) -> list[Any]:
    return [tiling.layouts[tile] for tile in tiling.tiles_of[call.name]]


def _calls(captured: CapturedModel, tiling: Tiling) -> str:
    prologue, *_, epilogue = captured.calls
    differentiated = {*tiling.differentiated(captured.calls), *([epilogue] if tiling.trains else [])}
    rows = []
    for run in _runs(captured.calls, tiling):
        first, last = run[0], run[-1]
        name = first.name if len(run) == 1 else f"{first.name} .. {last.name.rpartition('.')[2]}"
        layouts = _layouts(first, tiling)
        trained = sum(x.parameters for x in layouts if x.trainable)
        backward = trained > 0 if first is prologue else first in differentiated
        rows.append((name, first.template, f"{sum(x.parameters for x in layouts):,}", f"{trained:,}",
                     format_bytes(sum(x.weight_bytes for x in layouts)), len(layouts), "yes" if backward else "none"))
    return str(tabulate(rows, ["call", "template", "parameters each", "trained", "weights", "tiles", "backward"],
                        disable_numparse=True, colalign=("left", "left", "right", "right", "right", "right", "left")))


def _templates(captured: CapturedModel) -> str:
    uses = [call.template for call in captured.calls]
    return str(tabulate([(name, uses.count(name), *_of_template(t)) for name, t in captured.templates.items()],
                        ["template", "calls", "ops", "reads", "outputs"], disable_numparse=True,
                        colalign=("left", "right", "right", "left", "left")))


def _of_template(template: Template) -> tuple[int, str, str]:
    variant = template.variant(template.variant_names[0])
    ops = sum(node.op == "call_function" for node in variant.graph.graph.nodes)
    reads = [f"{kind}: {', '.join(map(_shape, found))}" for kind, found in itertools.groupby(
        sorted((x for x in template.inputs if x.role.kind not in ("parameter", "size")), key=lambda x: x.role.kind),
        lambda x: x.role.kind)]
    outputs = [_dimensions([template.symbolic(size) for size in value.shape]) for value in template.output_values()]
    return ops, "; ".join(reads), ", ".join(outputs)


def _shape(x: Any) -> str:
    return f"{x.role.name} {_dimensions(x.shape)}".strip()


def _dimensions(sizes: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _tiles(captured: CapturedModel, tiling: Tiling) -> str:
    rows: dict[str, tuple[str, ...]] = {}  # by tile: one that several calls read is listed once
    for run in _runs(captured.calls, tiling):
        for position, tile in enumerate(_layouts(run[0], tiling)):
            last = _layouts(run[-1], tiling)[position].name
            inside = [part.name.removeprefix(f"{run[0].name}.") for part in tile.slices]
            rows.setdefault(tile.name, (
                tile.name if last == tile.name else f"{tile.name} .. {last}", str(tile.dtype).removeprefix("torch."),
                "trained" if tile.trainable else "frozen", f"{tile.host_bytes() / tile.parameters:.1f}",
                f"{len(inside)}: {_some(inside, 3)}"))
    return str(tabulate(list(rows.values()), ["tile", "dtype", "", "host bytes/parameter", "parameters"], disable_numparse=True,
                        colalign=("left", "left", "left", "right", "left")))


def _remarks(model: nn.Module, captured: CapturedModel, tiling: Tiling) -> Iterator[str]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in (each for each in names.values() if len(each) > 1):
        yield f"tied: {' = '.join(tied)}"
    for tile in tiling.layouts:
        readers = [call for call, tiles in tiling.tiles_of.items() if tile in tiles]
        if len(readers) > 1:
            yield f"tile {tile} is read by {', '.join(readers)}: one gradient, one update"
    unread = [each[0] for each in names.values() if each[0] not in tiling.position]
    if unread:
        yield f"no call reads {_some(unread)}: left as they are"
    below = [call for call in captured.calls[1:-1] if call not in tiling.differentiated(captured.calls)]
    if not tiling.trains:
        yield "nothing is trained: forwards alone"
    elif below:
        yield f"frozen below: the backward ends above {below[-1].name}"
    masked = "" if captured.causal else ", under masks that take batch x length x length bytes"
    yield (f"attention: megacompile's kernels in every layer{masked}" if captured.fused_attention else
           "attention: the model's own code in some layer, whose masks take batch x length x length bytes")
    fused = ", which never holds all logits" if captured.fused_loss else ""
    yield (f"loss: a sum over target tokens{fused}, and a part that is none (an auxiliary loss): one micro-batch a step, or "
           "the mean over those of a micro_batch_size" if captured.is_averaged else
           f"loss: a sum over target tokens{fused}: micro-batches change nothing" if captured.has_loss_denominator else
           "loss: none, it is made outside, of the model's output" if not captured.has_loss else
           "loss: no cross entropy over tokens that is recognized: one micro-batch a step")
    yield from described_products(captured)
    why = obstacle(captured, batch_types(captured))
    yield f"padded rows: {f'computed with their padding, since {why}' if why else 'packed into rows of one length'}"
    if captured.across_rows:
        yield f"rows of a batch are computed with at once, so that it is not split: {captured.across_rows}"
    yield f"assumed of a batch of B x T: {'; '.join(captured.guards) or 'nothing'}"
