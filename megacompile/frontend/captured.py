"""`CapturedModel`: a model as calls of templates, and what is known about it. The result of `capture`."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
from torch import Tensor

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.images import ImagePositions, Patches
from megacompile.frontend.batches.pair_masks import of_pairs
from megacompile.frontend.batches.tables import EmbeddingTable
from megacompile.frontend.graph.loss import TargetCount
from megacompile.frontend.graph.output import OutputStructure
from megacompile.frontend.graph.pieces import Rows
from megacompile.frontend.templates.across_rows import chooses_tokens
from megacompile.frontend.templates.build import Condition
from megacompile.frontend.templates.hidden_states import LOGITS, Head, Heads
from megacompile.frontend.templates.layer_caches import LayerCache, layer_cache
from megacompile.frontend.templates.template import BATCH, LENGTH, Call, Template
from megacompile.frontend.tracing.fake_model import capture_shape
from megacompile.ir.plan import CaptureKey


class OtherBatches(Protocol):
    """The same model for batches that this capture does not serve."""

    def holds(self, training: bool, size: tuple[int, int]) -> bool:
        """True if the graphs also hold in this mode and at this [batch, length] size, which were not captured."""

    def for_key(self, key: CaptureKey) -> CapturedModel:
        """The model captured for another key. The first call with a key takes as long as the first capture."""

    def only_hides(self, key: CaptureKey, name: str) -> bool:
        """True if the model turns the batch argument `name` of a key only into bool tensors. Does not capture. False if this
        cannot be known without a capture."""

    def is_implied(self, key: CaptureKey, name: str, values: Callable[[int], Tensor]) -> bool:
        """True if a batch of a key means the same without the batch argument `name`, if each of its rows is `values(length)`.
        Does not capture. False if this cannot be known without a capture."""


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """The layers that stream. `stacks`: the qualified names of the lists that hold them. `layer_names`: the layers' names, in
    the order of their first runs. `rows`: the parameters that are shares of the model's parameters, by the names that calls
    use."""

    stacks: tuple[str, ...]
    layer_names: tuple[str, ...]
    rows: Mapping[str, Rows]


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """The arguments that the model reads from a batch, and its computations across the batch's rows.

    `forward_arguments`: the names of all arguments of the model's forward. `batch_inputs`: those that are read from a batch, in
    their positional order. `labels`: those that only the loss reads. `same_logits_without_labels`: a forward without labels
    computes the logits that were captured with them. `logits_of_tokens`: logits have a row for each token; a classifier of
    sequences has one for each sequence, and chooses a token for it by rules of its own, which may see padding.
    `across_rows`: the name and source line of an operation on several sequences at once, in which case batches are not split;
    else "". `totals`: how values made of all rows of a batch are computed, for each of its micro-batches. `counts_positions`:
    the model computes with such a value of the positions in a row, which differs for longer rows. `image_positions`: where
    features (of images, for example) are put among tokens; each checks a batch. `patches`: encoders of images of any size,
    whose batch arguments are aligned with tokens. `tables`: embeddings that are read by other values than tokens; each checks
    a batch.
    """

    forward_arguments: frozenset[str]
    batch_inputs: tuple[str, ...]
    labels: tuple[str, ...]
    same_logits_without_labels: bool
    logits_of_tokens: bool
    across_rows: str
    totals: tuple[TargetCount, ...]
    counts_positions: bool
    image_positions: tuple[ImagePositions, ...]
    patches: tuple[Patches, ...]
    tables: tuple[EmbeddingTable, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """The model's attention.

    `fused_attention`: every layer's attention is our op. Otherwise some layer runs the model's own code, whose masks take
    B x T x T bytes. `causal`: no token sees a later one, either by our op or because the model's attention modules say so
    (`is_causal`). `masks_hide`: an `attention_mask` only hides tokens from attention; a custom model may also pool by it.
    `masks_added`: the model runs transformers' eager attention, which adds masks to scores.
    """

    fused_attention: bool
    causal: bool
    masks_hide: bool
    masks_added: bool


@dataclass(frozen=True, kw_only=True)
class LossFacts:
    """The model's loss.

    `has_loss`: False for a model without a head: its calls end with the call of its output ("logits"), and the caller computes
    losses from that. `fused_loss`: the epilogue's loss never holds all logits of the micro-batch. `token_loss`: the loss is a
    function of tokens that the user gave. `count_targets(batch on the host)`: gives a batch's loss denominator, a 0-d float32
    tensor; None if the loss is not a sum over the "loss_denominator" input. `is_averaged`: the loss has another part besides
    that sum, so the step's loss is the mean of the micro-batches' losses, weighted by rows. `needs_targets_alone`: the head
    computes tokens with a target alone if it is told their number, which is `count_targets` of the micro-batch.
    """

    has_loss: bool
    fused_loss: bool
    token_loss: bool
    count_targets: Callable[[Mapping[str, Tensor]], Tensor] | None
    is_averaged: bool
    needs_targets_alone: bool

    @property
    def has_loss_denominator(self) -> bool:
        """True if the loss is a sum over the "loss_denominator" input. Then micro-batches add up."""
        return self.count_targets is not None


@dataclass(frozen=True, kw_only=True)
class CapturedModel(LayerFacts, BatchFacts, AttentionFacts, LossFacts):
    """A model as calls of templates.

    `calls`: the prologue, the layers in order, the epilogue. `templates`: by the name that calls use. `key`: the batches that
    it was captured for. `evaluating`: the modules that are in evaluation mode while the model is in the captured mode.
    `output.rebuild(loss, logits)`: the model's own return value around these two. `heads`: what can replace the epilogue when
    the caller differentiates; None if the model returns no logits. `conditions`: on B and T, under which the graphs hold.
    `others`: the same model for other batches. `seconds`: how long the capture took.
    """

    calls: tuple[Call, ...]
    templates: dict[str, Template]
    key: CaptureKey
    evaluating: frozenset[str]
    output: OutputStructure
    heads: Heads | None
    conditions: tuple[Condition, ...]
    others: OtherBatches
    seconds: float

    @functools.cached_property
    def has_experts(self) -> bool:
        """True if some layer multiplies each token with the weights of chosen experts."""
        return any(template.has_experts for template in self.templates.values())

    @functools.cached_property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """What each layer keeps of a sequence for later tokens, as far as its graph shows."""
        found = {name: layer_cache(self.templates[name]) for name in {call.template for call in self.calls[1:-1]}}
        return tuple(found[call.template] for call in self.calls[1:-1])

    @property
    def guards(self) -> list[str]:
        """The conditions as text."""
        return [str(condition.expression) for condition in self.conditions]

    @functools.cached_property
    def chooses_tokens(self) -> bool:
        """True if the model selects tokens of a row by their values, and may select others among equal ones in a longer row."""
        return any(map(chooses_tokens, self.templates.values()))

    @functools.cached_property
    def pair_bytes(self) -> int:
        """Bytes of the batch's masks of pairs for each pair of a query and a key in a sequence."""
        read = {source.name: given for call in self.calls
                for source, given in zip(call.sources, self.templates[call.template].inputs, strict=True)
                if source.kind == "batch" and of_pairs(given)}
        return sum(math.prod(map(int, x.shape[1:-2])) * x.dtype.itemsize for x in read.values() if x.dtype is not None)

    @property
    def main_output(self) -> str:
        """The output that training starts from: "loss", or the model's output if it has no loss."""
        return "loss" if self.has_loss else LOGITS

    def calls_for(self, output: str) -> tuple[Call, ...]:
        """The calls of a program that gives the "loss" or a head's outputs. Raises `UnsupportedError` for an unknown head."""
        return self.calls if output == "loss" else (*self.calls[:-1], self.head(output).call)

    def left_out_of(self, output: str) -> set[str]:
        """Parameters that the model reads, but not for this output."""
        def read(calls: Sequence[Call]) -> set[str]:
            return {source.name for call in calls for source in call.sources if source.kind == "parameter"}
        return read(self.calls) - read(self.calls_for(output))

    def reached_from(self, output: str) -> frozenset[str]:
        """The parameters that get a gradient from an output ("loss", or a head's). PyTorch leaves `.grad` of the others None,
        and its optimizers do not change them."""
        if output not in self._reached:
            calls, found = self.calls_for(output), set[str]()
            outputs: Collection[int] = range(self.templates[calls[-1].template].outputs)
            for call in reversed(calls):
                sources = [call.sources[i] for i in self.templates[call.template].reached_from(outputs)]
                found.update(source.name for source in sources if source.kind == "parameter")
                outputs = {source.index for source in sources if source.kind == "carried"}
            self._reached[output] = frozenset(self.rows[name].parameter if name in self.rows else name for name in found)
        return self._reached[output]

    @functools.cached_property
    def _reached(self) -> dict[str, frozenset[str]]:
        """Cached results of `reached_from`, by output."""
        return {}

    def head(self, output: str) -> Head:
        """The head of this name. Raises `UnsupportedError` if there is none."""
        return self.require_heads().head(output)

    def require_heads(self) -> Heads:
        """Raises `UnsupportedError` for a model that returns only its loss."""
        if self.heads is None:
            raise UnsupportedError("the model returns only its loss: let its forward return logits [batch, length, "
                                   "vocabulary] as well")
        return self.heads

    def same_in_evaluation(self) -> bool:
        """True if the model computes the same in evaluation mode. The first call runs the model on fakes."""
        return self.others.holds(False, capture_shape(self.key))

    def for_key(self, key: CaptureKey) -> CapturedModel:
        """The same model, captured for another key. The first call with a key takes as long as the first capture."""
        return self.others.for_key(key)

    def only_hides(self, key: CaptureKey, name: str) -> bool:
        """True if it is known, without capturing for `key`, that the model turns its batch argument `name` only into bool
        tensors."""
        return self.others.only_hides(key, name)

    def is_implied(self, key: CaptureKey, name: str, values: Callable[[int], Tensor]) -> bool:
        """True if it is known that the model, given a batch of `key` without the argument `name`, assumes these values in each
        row: `values(length)`."""
        return self.others.is_implied(key, name, values)

    def check_shape(self, batch: int, length: int, output: str = "loss") -> None:
        """Raises `UnsupportedError` if the captured graphs, including those of `output`, do not hold at this batch size and
        length. The first check of a size of 1 runs the model on fakes."""
        size = tuple(1 if n == 1 else traced for n, traced in zip((batch, length), capture_shape(self.key), strict=True))
        if 1 in size and not self.others.holds(not self.key.evaluating, size):  # type: ignore[arg-type]
            raise UnsupportedError(f"at {batch} x {length} the model performs other operations than at larger sizes, which "
                                   "were captured: remove the branch on a size of 1 from the model's forward, or avoid it")
        for condition in (*self.conditions, *(() if output == "loss" or self.heads is None else self.heads.conditions)):
            if condition.expression.subs({BATCH: batch, LENGTH: length}) == sympy.false:
                raise UnsupportedError(
                    f"a batch of {batch} x {length} breaks {condition.expression}, which the captured graph assumes"
                    f"{condition.line}: keep batches within it, or remove the branch on sizes from the model's forward")

    def holds_at(self, length: int) -> bool:
        """True if the captured graphs hold at this length, judged by conditions on the length alone."""
        if length not in self._held:
            self._held[length] = all(condition.expression.subs({LENGTH: length}) != sympy.false
                                     for condition in self.conditions if condition.expression.free_symbols == {LENGTH})
        return self._held[length]

    @functools.cached_property
    def _held(self) -> dict[int, bool]:
        """Cached results of `holds_at`, by length."""
        return {}

    def most_rows(self, length: int, limit: int) -> int:
        """Largest number of rows of this length, halving from `limit`, at which the captured graphs hold; 0 if they do not hold
        for one row. Heads may have further conditions."""
        if (length, limit) not in self._most_rows:
            self._most_rows[length, limit] = next(filter(
                lambda rows: rows == 0 or self._takes(rows, length), (limit >> bit for bit in range(limit.bit_length() + 1))))
        return self._most_rows[length, limit]

    @functools.cached_property
    def _most_rows(self) -> dict[tuple[int, int], int]:
        """Cached results of `most_rows`."""
        return {}

    def _takes(self, batch: int, length: int) -> bool:
        try:
            self.check_shape(batch, length)
        except UnsupportedError:
            return False
        return True

    def reads_batches_as(self, other: CapturedModel) -> bool:
        """True if both captures of a model, in training and in evaluation, read, pad and split batches alike."""
        def facts(captured: CapturedModel) -> tuple[Any, ...]:
            counted = (captured.totals, captured.image_positions, captured.patches)
            return (captured.batch_inputs, captured.labels, captured.same_logits_without_labels, captured.logits_of_tokens,
                    bool(captured.across_rows), *map(len, counted), captured.counts_positions, captured.chooses_tokens,
                    captured.fused_attention, captured.causal, captured.masks_hide, captured.masks_added, captured.has_loss,
                    captured.has_loss_denominator, captured.is_averaged, captured.heads is None, captured.evaluating)
        return facts(self) == facts(other) and (self.same_in_evaluation() or not other.same_in_evaluation())
