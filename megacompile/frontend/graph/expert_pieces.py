"""Experts in pieces: a module of very many experts becomes several modules of some of them, whose outputs are added.

A piece is what transformers' expert parallelism gives one of its ranks: experts `first` to `first + count`, and for each token
the numbers of those of its experts that are in the piece. Tokens sent elsewhere are left out (number `count`) by zeros, never
by products with zero. Pieces run one after the other, so that only one of them needs to be on the device.

`first` is a tensor that is passed from piece to piece: a constant would make each piece a different graph.
"""
from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.frontend.tracing.layers import LayerStack


@dataclass(frozen=True)
class Rows:
    """A piece's share of a parameter of all experts. `parameter`: its name in the model; the share is experts `first` to
    `stop`."""

    parameter: str
    first: int
    stop: int


boundary = torch.library.custom_op("megacompile::piece_boundary", lambda value: value.clone(), mutates_args=(),
                                   schema="(Tensor value) -> Tensor")
boundary.register_fake(torch.empty_like)
boundary.register_autograd(lambda _, gradient: gradient)
#: Marks in a model's graph where each piece begins and where the last one ends. `pieces.py` cuts there and removes it.
BOUNDARY = torch.ops.megacompile.piece_boundary


class ExpertPieces(nn.Module):
    """Replaces a module of experts in a model that is captured."""

    def __init__(self, experts: nn.Module, counts: Sequence[int]) -> None:
        super().__init__()
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        self.pieces = nn.ModuleList(_piece(experts, first, stop) for first, stop in bounds)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [N, hidden]; numbers of experts, int64 [N, k], and their weights [N, k]; returns [N, hidden]."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        run = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        first = torch.zeros((), dtype=torch.int64, device=top_k_index.device)
        total: Any = None
        for piece in self.pieces:
            first = BOUNDARY(first)
            count: Any = piece.num_experts
            number = top_k_index - first
            number = torch.where((number >= 0) & (number < count), number, count)
            part = run(piece, hidden_states, number, top_k_weights)
            total = part if total is None else total + part
            first = first + count
        return BOUNDARY(total)


def _piece(experts: nn.Module, first: int, stop: int) -> nn.Module:
    piece: Any = copy.copy(experts)
    piece._modules, piece._buffers = dict(experts._modules), dict(experts._buffers)
    piece._parameters = {name: nn.Parameter(p.detach()[first:stop].clone(), p.requires_grad)
                         for name, p in experts._parameters.items() if p is not None}
    piece.num_experts, piece._is_expert_parallel = stop - first, True
    return piece


def divisible(experts: nn.Module) -> bool:
    """Whether a module consists of experts that transformers can run apart: each of its parameters is one tensor [experts,
    ...] of its own. Such modules declare a weight's layout (`is_transposed`); only recent ones declare whether tokens may be
    sent to other experts (`_is_expert_parallel`)."""
    own = [p for p in experts._parameters.values() if p is not None]
    return (hasattr(experts, "is_transposed") and hasattr(experts, "num_experts") and bool(own)
            and all(p.dim() > 1 and p.shape[0] == experts.num_experts for p in own)
            and len(own) == len(list(experts.parameters())))


def experts_in(stack: LayerStack) -> Iterator[tuple[str, nn.Module]]:
    """The modules of experts in a stack's layers, one for each layer, by qualified name. Modules that an adapter holds as its
    `base_layer` are left out: the adapter reads their parameters itself."""
    for layer, module in zip(stack.names, stack.layers, strict=True):
        inside = [(f"{layer}.{name}", found) for name, found in module.named_modules() if divisible(found)]
        yield from inside if len(inside) == 1 and not inside[0][0].endswith("base_layer") else ()


def counts_of(experts: int, pieces: int) -> list[int]:
    """The number of experts in each piece, at most one piece for each expert. If it does not divide, the first pieces have one
    more."""
    whole, rest = divmod(experts, min(pieces, experts))
    return [whole + (i < rest) for i in range(min(pieces, experts))]


def split_experts(model: nn.Module, stack: LayerStack, pieces: int) -> None:
    """Replaces each module of experts by `pieces` pieces. Changes `model`."""
    for name, experts in list(experts_in(stack)) if pieces > 1 else ():
        number: Any = experts.num_experts
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, ExpertPieces(experts, counts_of(number, pieces)))


def rows_of(model: nn.Module) -> Mapping[str, Rows]:
    """What each parameter of a piece is a share of, by the parameter's name in a model whose experts were split."""
    found: dict[str, Rows] = {}
    for path, module in model.named_modules():
        first = 0
        for number, piece in enumerate(module.pieces if isinstance(module, ExpertPieces) else ()):
            stop = first + int(piece.num_experts)  # type: ignore[arg-type]
            found |= {f"{path}.pieces.{number}.{name}": Rows(f"{path}.{name}", first, stop) for name in piece._parameters}
            first = stop
    return found
