"""Moves a batch to the device in micro-batches, joins their results, and splits gradients for the backward."""
from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.hidden_states import batch_name
from megacompile.inputs.across_ranks import AllRows
from megacompile.ir.plan import Plan
from megacompile.ir.program import Lane
from megacompile.losses import IGNORED
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.kernels import Activation, Batch


# --------------------
# The seed of one forward's dropout: one number from PyTorch's global generator, and the position of each micro-batch.
#
# `torch.manual_seed` makes a run repeatable. A checkpoint that stores the generator's state continues the same sequence. A
# model without dropout draws nothing.
def seed_of_forward(captured: CapturedModel) -> int | None:
    """Returns a new seed, or None for a model without dropout."""
    if not any(source.kind == "random" for call in captured.calls for source in call.sources):
        return None
    return int(torch.randint(1 << 62, ()))


def positions(seed: int, captured: CapturedModel, plan: Plan, first: int, total: int, device: torch.device) -> Tensor:
    """int64 [micro-batches, calls, 5], in the format that `megacompile.frontend.graph.randomness` reads. `first`: the number of
    the first row, of `total` rows. The position of an element in the batch counts rows of its micro-batch's length. Rows of
    another length get another seed. Otherwise their elements would have the same positions."""
    drawn = []
    for rows, length in plan.sizes:
        drawn.append([[seed + plan.length - length, call, first, rows, total] for call in range(len(captured.calls))])
        first += rows
    return torch.tensor(drawn, dtype=torch.int64).to(device)


K = TypeVar("K", bound=Hashable)


def batch_of(backend: Backend, captured: CapturedModel, plan: Plan, constants: Mapping[str, Tensor],
             inputs: Mapping[str, Tensor], present: Tensor, loss_denominator: Tensor | None, seed: int | None,
             all_rows: AllRows | None = None) -> Batch:
    """Copies a batch to the device, outside of the program. It is a few kilobytes per step, except for images and masks of
    pairs of tokens. `present`: which positions hold a token, bool [rows, length]. `seed`: for dropout. `all_rows`: the rows of
    all ranks, if this batch is only a part of them; None: it is whole."""
    all_rows = all_rows or AllRows(0, plan.batch, inputs)
    # Copies tensors that are on the device too: the caller may refill its batch before the backward.
    moved = {name: tensor.to(backend.device, copy=True) for name, tensor in inputs.items()}
    if loss_denominator is not None:
        loss_denominator = loss_denominator.to(device=backend.device, dtype=torch.float32, copy=True)
    random = None if seed is None else positions(seed, captured, plan, all_rows.first, all_rows.total, backend.device)
    shares = torch.tensor([n / all_rows.total for n in plan.micro_batches]).to(backend.device) if captured.is_averaged else None
    totals = _totals_of(backend, captured, all_rows.inputs)
    targets = _target_tokens(captured, plan, inputs, loss_denominator is not None)
    micro_batches = _cut(plan, moved)
    read = [tensor for inputs in micro_batches for tensor in inputs.values()] if plan.lengths else [*moved.values()]
    counts = captured.has_experts and not present.all()
    padding = [part[0] for part in _cut(plan, {0: (~present).to(backend.device)})] if counts else []
    backend.enter([*read, *padding, *(t for t in (loss_denominator, random, shares, *totals) if t is not None)])
    return Batch(micro_batches, constants, loss_denominator, targets, shares, totals, random, padding=padding)


def _target_tokens(captured: CapturedModel, plan: Plan, inputs: Mapping[str, Tensor], with_loss: bool) -> Sequence[int]:
    """The number of target tokens of each micro-batch, if the head can skip the other tokens. `with_loss`: the head computes
    the model's loss; otherwise it may compute a function of tokens."""
    given = inputs.get(batch_name("targets"))
    if with_loss and captured.needs_targets_alone and captured.count_targets is not None:
        numbers = [captured.count_targets(part) for part in _cut(plan, inputs)]
    elif given is not None and given.dim() == 2:
        numbers = [(part["targets"] != IGNORED).sum() for part in _cut(plan, {"targets": given})]
    else:
        return ()
    return [int(number) for number in torch.stack(numbers).tolist()]


def _totals_of(backend: Backend, captured: CapturedModel, inputs: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Values computed from all rows of a batch, on the device. None for a value whose arguments the batch does not have."""
    return [total.on_host(inputs).contiguous().to(backend.device) if all(s.name in inputs for s in total.sources) else None
            for total in captured.totals]


def loss_of(backend: Backend, batch: Batch) -> Tensor:
    """The loss of a step, 0-d. The caller's stream waits only for the loss, not for the backward that follows."""
    losses = [value.loss for value in batch.results["loss"] if value.loss is not None]
    backend.exit(losses, batch.loss_known)
    with torch.no_grad():
        return _total(losses)


def outputs_of(backend: Backend, batch: Batch) -> tuple[Tensor, ...]:
    """The epilogue's outputs for all sequences, for a program without a loss."""
    with backend.lane(Lane.COMPUTE):
        outputs = tuple(_joined(parts) for parts in _columns(batch.results.pop("outputs")))
    backend.exit(list(outputs))
    return outputs


def outputs_and_hidden_states_of(backend: Backend, batch: Batch) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`outputs_of`, and the hidden states of each call except the last layer, for all sequences, if the program has them."""
    return outputs_of(backend, batch), _hidden_states_of(backend, batch)


def _hidden_states_of(backend: Backend, batch: Batch) -> tuple[Tensor, ...]:
    found, count, states = batch.results.pop("forward"), len(batch.micro_batches), []
    with backend.lane(Lane.COMPUTE):
        while found:
            states.append(_joined([value.outputs[0] for value in found[:count]]))
            del found[:count]  # frees each part once it is joined
    backend.exit(states)
    return tuple(states)


def evaluation_of(backend: Backend, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """Returns the loss, and the logits if the model returns them. Without labels, returns only the logits."""
    if "outputs" in batch.results:
        (logits_alone,) = outputs_of(backend, batch)
        return None, logits_alone
    losses, *logits = _columns(batch.results.pop("evaluate"))
    with backend.lane(Lane.COMPUTE):
        loss, joined = _total(losses), _joined(logits[0]) if logits else None
    backend.exit([loss, *([] if joined is None else [joined])])
    return loss, joined


def send_gradients(backend: Backend, plan: Plan, batch: Batch, gradients: Sequence[Tensor]) -> None:
    """Sends the gradient of the loss, or of each output, to the device, where the backward starts from it. The loss covers all
    ranks' rows. A loss that the caller computes from outputs covers its own rows, and its gradients are those of the mean of
    the ranks' losses, as with `DistributedDataParallel`."""
    moved = [gradient.to(backend.device).contiguous() for gradient in gradients]
    if plan.output != "loss" and plan.processes > 1:
        moved = [gradient / plan.processes for gradient in moved]
    if plan.output == "loss":
        (batch.scale,) = moved
    else:
        batch.output_gradients = [tuple(part.values()) for part in _cut(plan, dict(enumerate(moved)))]
        moved = [gradient for part in batch.output_gradients for gradient in part] if plan.lengths else moved
    backend.enter(moved)


def _cut(plan: Plan, whole: Mapping[K, Tensor]) -> list[dict[K, Tensor]]:
    """The rows of each micro-batch. Shorter rows are copied, since kernels read contiguous memory."""
    rows = itertools.pairwise(itertools.accumulate(plan.micro_batches, initial=0))
    return [{name: tensor[a:b, :plan.length_of(mb)].contiguous() if plan.lengths else tensor[a:b]
             for name, tensor in whole.items()} for mb, (a, b) in enumerate(rows)]


def _columns(values: Sequence[Activation]) -> list[tuple[Tensor, ...]]:
    """The parts of each output."""
    return list(zip(*(value.outputs for value in values), strict=True))


def _total(losses: Sequence[Tensor]) -> Tensor:
    return torch.stack(tuple(losses)).sum(dim=0) if len(losses) > 1 else losses[0].clone()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts, with zeros after shorter ones."""
    if len(parts) == 1:
        return parts[0]
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(tuple(parts))
    rows, longest = sum(len(part) for part in parts), max(parts, key=lambda part: part.shape[1])
    joined = longest.new_zeros(rows, *longest.shape[1:])
    first = 0
    for part in parts:
        joined[first:first + len(part), :part.shape[1]] = part
        first += len(part)
    return joined
