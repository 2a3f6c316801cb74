"""The ops that several ranks run together, and what each rank tells the others."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megacompile.ir.program import argument, operands
from megacompile.runtime.frame import Frame, norms_of, own_bytes
from megacompile.runtime.kernels import Activation
from megacompile.runtime.memory.arena import Weights


def _gather(frame: Frame, node: fx.Node) -> Weights:
    weights = frame.arena.weights(argument(node, "into"), frame.store.whole(argument(node, "tile")).layout)
    frame.together.exchanges.gather(weights.memory, frame.read(node, "shard").memory)
    return weights


def _gather_resident(frame: Frame, node: fx.Node) -> None:
    weights: Weights = frame.read(node, "resident")
    frame.together.exchanges.gather(weights.memory, own_bytes(frame.store[argument(node, "tile")], weights.memory))


def _reduce_scatter(frame: Frame, node: fx.Node) -> None:
    (accumulators,) = operands(node, "accumulators")
    frame.together.exchanges.reduce_scatter(frame.values[accumulators].flat)


def _all_reduce(frame: Frame, node: fx.Node) -> None:
    (accumulators,) = operands(node, "accumulators")
    frame.together.exchanges.all_reduce(frame.values[accumulators].flat)


def _share_norms(frame: Frame, node: fx.Node) -> None:
    frame.together.exchanges.join_norms(frame.read(node, "reduced").norms)


def _share_host_norms(frame: Frame, node: fx.Node) -> None:
    frame.together.exchanges.join_host_norms(norms_of(frame.store[argument(node, "tile")]))


def _announce(frame: Frame, node: fx.Node) -> None:
    frame.together.updated()


def _total_loss(frame: Frame, node: fx.Node) -> Activation:
    losses = [value.loss for value in frame.read(node, "values")]
    return Activation((), loss=torch.stack(losses).sum(dim=0))


def _share_loss(frame: Frame, node: fx.Node) -> None:
    loss = frame.read(node, "value").loss
    assert loss is not None, "a total of nothing"
    frame.together.exchanges.add_up(loss)


COLLECTIVE_OPERATIONS: dict[str, Callable[[Frame, fx.Node], Any]] = dict(
    gather=_gather, gather_resident=_gather_resident, reduce_scatter=_reduce_scatter, all_reduce=_all_reduce,
    share_norms=_share_norms,
    share_host_norms=_share_host_norms, announce=_announce, total_loss=_total_loss, share_loss=_share_loss)
