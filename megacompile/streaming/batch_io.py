"""What a caller hands over to the lanes and gets back: a batch in parts, their results put together, gradients in parts."""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megacompile.frontend.capture import CapturedModel
from megacompile.ir.plan import Plan
from megacompile.ir.program import Lane
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.kernels import Activation, Batch
from megacompile.streaming.dropout_seed import draw


def batch_of(backend: Backend, captured: CapturedModel, plan: Plan, constants: Mapping[str, Tensor],
             inputs: Mapping[str, Tensor], loss_denominator: Tensor | None) -> Batch:
    """The batch goes to the device here, outside of the program (it is a few kilobytes a step, but for images, and masks of
    pairs of tokens)."""
    # Copies, even where they are on the device already: the caller may refill its batch before the backward.
    moved = {name: tensor.to(backend.device, copy=True) for name, tensor in inputs.items()}
    if loss_denominator is not None:
        loss_denominator = loss_denominator.to(device=backend.device, dtype=torch.float32, copy=True)
    random = draw(captured, plan.micro_batches, backend.device)
    shares = torch.tensor([n / plan.batch for n in plan.micro_batches]).to(backend.device) if captured.is_averaged else None
    totals = _totals_of(backend, captured, inputs)
    backend.enter([*moved.values(), *(t for t in (loss_denominator, random, shares, *totals) if t is not None)])
    micro_batches = [{name: tensor[a:b] for name, tensor in moved.items()} for a, b in _cuts(plan)]
    return Batch(micro_batches, constants, loss_denominator, shares, totals, random)


def _totals_of(backend: Backend, captured: CapturedModel, inputs: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Values made of all rows of a batch, on the device; None for those of arguments that it has not."""
    read = {source.name for total in captured.totals for source in total.sources} & inputs.keys()
    given = {name: inputs[name].cpu() for name in read}
    return [total(given).contiguous().to(backend.device) if all(source.name in given for source in total.sources) else None
            for total in captured.totals]


def loss_of(backend: Backend, batch: Batch) -> Tensor:
    """The loss of a step, 0-d."""
    with backend.lane(Lane.COMPUTE):
        losses = [value.loss for value in batch.results["loss"] if value.loss is not None]
        loss = _total(losses)
    backend.exit([loss])
    return loss


def outputs_of(backend: Backend, batch: Batch) -> tuple[Tensor, ...]:
    """What the epilogue gives without a loss, of all sequences."""
    with backend.lane(Lane.COMPUTE):
        outputs = tuple(_joined(parts) for parts in _columns(batch.results.pop("outputs")))
    backend.exit(list(outputs))
    return outputs


def outputs_and_hidden_states_of(backend: Backend, batch: Batch) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`outputs_of`; and what each call but the last layer's hands on, of all sequences, where the program returns it."""
    return outputs_of(backend, batch), _hidden_states_of(backend, batch)


def _hidden_states_of(backend: Backend, batch: Batch) -> tuple[Tensor, ...]:
    found, count, states = batch.results.pop("forward"), len(batch.micro_batches), []
    with backend.lane(Lane.COMPUTE):
        while found:
            states.append(_joined([value.outputs[0] for value in found[:count]]))
            del found[:count]  # parts go as the whole comes
    backend.exit(states)
    return tuple(states)


def evaluation_of(backend: Backend, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """The loss, and logits where the model returns them; of a batch without labels logits alone."""
    if "outputs" in batch.results:
        (logits_alone,) = outputs_of(backend, batch)
        return None, logits_alone
    losses, *logits = _columns(batch.results.pop("evaluate"))
    with backend.lane(Lane.COMPUTE):
        loss, joined = _total(losses), _joined(logits[0]) if logits else None
    backend.exit([loss, *([] if joined is None else [joined])])
    return loss, joined


def send_gradients(backend: Backend, plan: Plan, batch: Batch, gradients: Sequence[Tensor]) -> None:
    """What the caller's backward begins with: the gradient of the loss, or of each output."""
    moved = [gradient.to(backend.device).contiguous() for gradient in gradients]
    backend.enter(moved)
    if plan.output == "loss":
        (batch.scale,) = moved
    else:
        batch.output_gradients = [tuple(gradient[a:b] for gradient in moved) for a, b in _cuts(plan)]


def _cuts(plan: Plan) -> list[tuple[int, int]]:
    """Where each micro-batch begins and ends."""
    return list(itertools.pairwise(itertools.accumulate(plan.micro_batches, initial=0)))


def _columns(values: Sequence[Activation]) -> list[tuple[Tensor, ...]]:
    """Each output's parts."""
    return list(zip(*(value.outputs for value in values), strict=True))


def _total(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(losses)).sum(dim=0) if len(losses) > 1 else losses[0].clone()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
