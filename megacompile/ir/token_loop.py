"""TokenLoop: a stretch of a template's graph that is computed one chunk of tokens at a time.

The pass `chunk_tokens` makes it, variants run and compile it, and the cost model looks inside. Values inside the stretch exist
for one chunk only. Results that have tokens are written chunk by chunk; sums over tokens are added up in float32.

A loop may know that tokens without a target have results of zero and add nothing to sums. If enough tokens have none, chunks
are made of the others, wherever they are, and the rest is left out.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from megacompile.losses import IGNORED


# --------------------
# The tensors that the nodes of a traced model computed while Dynamo traced them: fakes, which have a shape and a dtype.
def example_of(node: Any) -> Tensor:
    value: Tensor = node.meta["example_value"]
    return value


#: For how many tokens logits exist at a time, in the fused loss and in loops over a head. Larger chunks were not faster, and a
#: chunk of the fused loss takes 2 x chunk x vocabulary x 4 bytes.
CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class Tokens:
    """The dimension of a value that holds its tokens: `dim`, of size T, or B x T if `folded`. `order`: the dimensions from
    outermost to innermost in memory."""

    dim: int
    folded: bool
    order: tuple[int, ...]

    def chunk(self, whole: Tensor, batch: int, length: int, start: int, count: int) -> Tensor:
        """A view of positions start to start + count of every sequence. `whole` is [..., T, ...]; if folded it is
        [..., B * T, ...], and the view is [..., B, count, ...]."""
        if not self.folded:
            return whole.narrow(self.dim, start, count)
        return whole.unflatten(self.dim, (batch, length)).narrow(self.dim + 1, start, count)

    def take(self, whole: Tensor, batch: int, length: int, start: int, count: int) -> Tensor:
        """The chunk, dense in memory in `order`, since kernels are compiled for these strides."""
        piece = self.chunk(whole, batch, length, start, count)
        return self._dense(piece.flatten(self.dim, self.dim + 1) if self.folded else piece)

    def take_at(self, whole: Tensor, batch: int, length: int, index: Tensor, count: int) -> Tensor:
        """The tokens `index`, int64 [B * count], counted among all B * T, in the form of a chunk. Dense, as in `take`."""
        found = self._tokens_first(whole)[self._place(index, length)]
        return self._dense(found.movedim(0, self.dim) if self.folded else
                           found.unflatten(0, (batch, count)).movedim((0, 1), (self.dim - 1, self.dim)))

    def _tokens_first(self, whole: Tensor) -> Tensor:
        """A view [B, T, ...], or [B * T, ...] if folded."""
        return whole.movedim(self.dim, 0) if self.folded else whole.movedim((self.dim - 1, self.dim), (0, 1))

    def _place(self, index: Tensor, length: int) -> tuple[Tensor, ...]:
        return (index,) if self.folded else (index // length, index % length)

    def _dense(self, piece: Tensor) -> Tensor:
        dense = torch.empty_permuted(piece.shape, self.order, dtype=piece.dtype, device="meta").stride()
        same = all(size == 1 or a == b for size, a, b in zip(piece.shape, piece.stride(), dense, strict=True))
        return piece if same else self.empty(piece, piece.shape).copy_(piece)

    def put(self, piece: Tensor, whole: Tensor, batch: int, length: int, start: int, count: int) -> None:
        """Writes a chunk's values into `whole`."""
        piece = piece.unflatten(self.dim, (batch, count)) if self.folded else piece
        self.chunk(whole, batch, length, start, count).copy_(piece)

    def put_at(self, piece: Tensor, whole: Tensor, length: int, index: Tensor) -> None:
        """Writes a chunk's values to the tokens `index`, as for `take_at`."""
        rows = self._tokens_first(piece)
        self._tokens_first(whole)[self._place(index, length)] = rows if self.folded else rows.flatten(0, 1)

    def whole(self, piece: Tensor, batch: int, length: int) -> Tensor:
        """Uninitialized memory for all tokens of a value like `piece`."""
        shape = list(piece.shape)
        shape[self.dim] = batch * length if self.folded else length
        return self.empty(piece, shape)

    def empty(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return torch.empty_permuted(shape, self.order, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class Total:
    """A sum over tokens. `product`: each chunk returns its summand as the two operands of a matrix product."""

    product: bool


class TokenLoop(nn.Module):
    """`loop(batch, length, *inputs)` -> a tuple of results: runs `body` on chunks of `chunk` positions of all sequences.

    `body` takes the number of sequences, the number of positions in the chunk, then the inputs: cut to the chunk if `inputs`
    has `Tokens`, whole if it has None. It returns one tensor for each of `outputs`, two for a product. Totals are float32, or
    their own dtype if that is wider or not floating. `kernels`, by positions in a chunk, run instead of `body`. `targets`: the
    position of an input, int64 [B, T]; all results are zeros where it is `IGNORED`. None if the loop has no marked input. With
    `targets`, every value that has tokens has the dimension of sequences just before that of tokens, or folds both into one."""

    def __init__(self, body: fx.GraphModule, chunk: int, inputs: Sequence[Tokens | None],
                 outputs: Sequence[Tokens | Total], targets: int | None = None,
                 kernels: Mapping[int, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.body, self.chunk, self.targets = body, chunk, targets
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.kernels = dict(kernels or {})

    def counts(self, length: int) -> tuple[int, ...]:
        """The numbers of positions in chunks: that of all but the last chunk, and that of the last if it differs."""
        full, rest = divmod(length, self.chunk)
        return (*((self.chunk,) if full else ()), *((rest,) if rest else ()))

    def with_kernels(self, kernels: Mapping[int, Callable[..., Any]]) -> TokenLoop:
        return TokenLoop(self.body, self.chunk, self.inputs, self.outputs, self.targets, kernels)

    def forward(self, batch: int, length: int, *values: Any) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        first = None if self.targets is None else targets_first(values[self.targets], IGNORED)
        order, needed = (None, math.inf) if first is None else first
        for start in range(0, length, self.chunk):
            count = min(self.chunk, length - start)
            index = None if order is None else order[start * batch:(start + count) * batch]
            self._add(results, self._run(batch, length, start, count, values, index), batch, length, start, count, index)
            if (start + count) * batch >= needed:
                break
        return tuple(results)

    def _run(self, batch: int, length: int, start: int, count: int, values: Sequence[Any],
             index: Tensor | None) -> list[Tensor]:
        pieces = [value if tokens is None else tokens.take(value, batch, length, start, count) if index is None else
                  tokens.take_at(value, batch, length, index, count) for tokens, value in zip(self.inputs, values, strict=True)]
        return list(self.kernels.get(count, self.body)(batch, count, *pieces))

    def _add(self, results: list[Tensor], pieces: list[Tensor], batch: int, length: int, start: int, count: int,
             index: Tensor | None) -> None:
        """Adds a chunk's results to the loop's, which the first chunk creates. `index`: the chunk's tokens, if some are
        skipped."""
        for position, output in enumerate(self.outputs):
            piece = pieces.pop(0)
            if isinstance(output, Tokens):
                if start == 0:
                    results.append(output.whole(piece, batch, length))
                if index is None:
                    output.put(piece, results[position], batch, length, start, count)
                    continue
                if start == 0:
                    results[position].zero_()
                output.put_at(piece, results[position], length, index)
            elif output.product:
                other = pieces.pop(0)
                if start == 0:
                    results.append(piece.new_zeros((piece.shape[0], other.shape[1]), dtype=total_dtype(piece.dtype)))
                accumulate_product(results[position], piece, other)
            elif start == 0:
                results.append(piece.to(total_dtype(piece.dtype)))
            else:
                results[position].add_(piece)


def token_loops(graph: fx.GraphModule) -> dict[str, TokenLoop]:
    """The loops in a variant's graph, by the target of the node that calls each."""
    return {name: module for name, module in graph.named_children() if isinstance(module, TokenLoop)}


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def accumulate_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in total's dtype, inside the GEMM if the device has a mixed-precision one."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


# --------------------
# Selects the tokens of a micro-batch that a head computes: those with a target come first, the others may be skipped.
#
# Prompts and padding have no target. The host must know how many tokens have one before it launches kernels. To read the number
# from the device, it would have to wait until the device has computed all layers. So the number comes from the batch.
#: Tokens without a target are left out if they are at least this share of all. Fewer would not pay for copies of the others.
_LEFT_OUT_SHARE = 1 / 8

_known: ContextVar[int | None] = ContextVar("target_tokens", default=None)


@contextmanager
def target_tokens(number: int | None) -> Iterator[None]:
    """A context in which a loss over `number` target tokens is computed. None: the host does not know the number."""
    before = _known.set(number)
    try:
        yield
    finally:
        _known.reset(before)


def known_target_tokens() -> int | None:
    """The number that the innermost context has given, in this thread; None without a context."""
    return _known.get()


def targets_first(targets: Tensor, ignored: int) -> tuple[Tensor, int] | None:
    """The order of all tokens with those that have a target first, int64 [N], and the number of these. None if all tokens must
    be computed. `targets`: int64, N of them, with the value `ignored` where a token has none."""
    known, count = _known.get(), targets.numel()
    if known is None or count - known < _LEFT_OUT_SHARE * count:
        return None
    return torch.sort((targets.flatten() == ignored).to(torch.uint8), stable=True).indices, known
