"""`megacompile evaluate`: the loss and the perplexity of a model on texts or conversations, on repacked rows."""
from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from megacompile import training
from megacompile.finetuning.data import check_sources, read
from megacompile.finetuning.formats import Format
from megacompile.finetuning.training_sequences import Batch, in_order
from megacompile.inference.opening import Opening
from megacompile.tools.recipe import Kind, default_of


@dataclass(frozen=True)
class Evaluation:
    """`loss`: the mean in nats per token. `tokens`: the number of tokens in the mean. `seconds`: the duration."""

    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def words(self) -> str:
        return (f"loss {self.loss:.4f}, perplexity {self.perplexity:.4g}, over {self.tokens:,} tokens "
                f"({self.tokens / self.seconds:,.0f} tokens/s)")


def evaluate(source: str, opening: Opening, data: Sequence[str], format: Format | None, length: int | None, batch: int,
             console: Console) -> Evaluation:
    """Evaluates a model on the data of `megacompile train`. Only the answers of conversations count. Reads the data before it
    loads weights. `length`: None for the default of `megacompile train`. Raises what reading data and opening a model raise,
    and `MegacompileError` for a length that the model does not have."""
    check_sources(data, format)
    tokenizer, config = opening.open_tokenizer(source), opening.read_config(source)
    if length is None:
        length = default_of(Kind.FULL, getattr(config, "max_position_embeddings", None)).length
    training.check_length(config, length)
    rows = read(data, tokenizer, format, length, False, config.vocab_size, console.print)
    model = opening.open_model(source)
    batches: Iterator[Batch] = in_order(rows, batch)
    shown = track(batches, "evaluating", total=-(-len(rows) // batch), console=console, transient=True,
                  disable=not console.is_terminal)
    began = time.perf_counter()
    total, count = training.total_loss(model, shown)
    return Evaluation(total / max(1, count), count, time.perf_counter() - began)
