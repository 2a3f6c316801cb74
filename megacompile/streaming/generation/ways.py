"""Ways to call `generate` with the plain model on the device, the fastest first, and the device memory that each takes."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megacompile.streaming.device_copy import Arrangement, Turns
from megacompile.streaming.generation.batch_parts import part_counts, part_of, reads_longest_row
from megacompile.streaming.generation.call_options import chooses_cache, option_of, prompt_of, with_options
from megacompile.streaming.generation.needed_bytes import cache_bytes, sequence_count, text_config, working_bytes

#: Fewest tokens, of all sequences together, that prompts are computed in at a time. Kernels of fewer leave the device idle, and
#: each chunk copies the layers that take turns once more.
LEAST_CHUNK = 4096
#: Bytes/s over PCIe Gen5 x16, and seconds in which transformers calls one layer whatever the number of sequences (docs/
#: performance.md: 28 layers and 256 tokens in 5 s). They only rank the ways.
_LINK, _LAYER_S = 5e10, 0.7e-3

#: `DeviceCopy.arrangement`.
Arrange = Callable[[int, Turns], Arrangement | None]


@dataclass(frozen=True)
class Way:
    """`turns`: which layers take turns in slots. `bytes`: of device memory beside the weights. `arguments`: of `generate`, for
    the whole batch. `parts`: how many parts of the batch generate one after another. `device_bytes`: with the weights there.
    `seconds`: about, for one more token of all sequences."""

    turns: Turns
    bytes: int
    arguments: dict[str, Any]
    parts: int = 1
    device_bytes: int = 0
    seconds: float = 0.0


def ways_to_generate(model: nn.Module, given: Mapping[str, Any], arrange: Arrange) -> Iterator[Way]:
    """The ways that fit, the fastest first. When memory ends with one, the next is tried, which takes less. In each of them the
    prompts are computed in chunks that are as large as fit.

    The caches of keys and values that transformers offloads wait in host memory, but for those of two layers. Parts of the
    batch need fewer at a time."""
    call = _Call(model, given, arrange)
    taken = math.inf
    if (whole := call.way(Turns.NONE)) is not None:
        yield whole
        taken = whole.device_bytes
    for way in sorted(call.slower(there=whole is not None), key=lambda way: way.seconds):
        if way.device_bytes < taken:
            yield way
            taken = way.device_bytes


@dataclass(frozen=True)
class _Call:
    """A call of `generate`."""

    model: nn.Module
    given: Mapping[str, Any]
    arrange: Arrange

    @property
    def layers(self) -> int:
        return int(getattr(text_config(self.model), "num_hidden_layers", 0))

    def slower(self, there: bool) -> list[Way]:
        """All ways that fit but the whole batch with all weights on the device. `there`: that one fits."""
        found: list[Way | None] = []
        for parts in part_counts(self.model, self.given):
            if parts > 1:
                found.append(self.way(Turns.NONE, parts))
                there = there or found[-1] is not None
            if not there:
                found.append(self.way(Turns.SOME, parts))
            found.append(self.way(Turns.ALL, parts))
        if self.layers and not chooses_cache(self.model, self.given):
            found.append(self.way(Turns.ALL, offloaded=True))
        return [way for way in found if way is not None]

    def way(self, turns: Turns, parts: int = 1, offloaded: bool = False) -> Way | None:
        """The way with the largest chunks of prompts that fits; None if none does."""
        part = part_of(0, parts, self.given)
        cache = cache_bytes(self.model, part)
        kept = 2 * cache // self.layers if offloaded else cache
        for chunks in _prefills(self.model, part):
            more = kept + working_bytes(self.model, with_options(part, **chunks))
            arrangement = self.arrange(more, turns)
            if arrangement is not None:
                options = chunks | ({"cache_implementation": "offloaded"} if offloaded else {})
                if turns != Turns.NONE:  # copies of layers are issued between them, which compiled code does not know
                    options["disable_compile"] = True
                seconds = max(arrangement.copied_bytes / _LINK, self.layers * _LAYER_S)
                if offloaded:  # the cache crosses the link in both directions for each token
                    seconds += 2 * cache / _LINK
                return Way(turns, more, with_options(self.given, **options), parts, arrangement.device_bytes + more,
                           parts * seconds)
        return None


def _prefills(model: nn.Module, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Options of `generate` with which the prompts are computed at once, or in ever smaller chunks. Only the user's own if the
    user has chosen, or if transformers cannot continue a chunk: with a recurrent state, with rotary frequencies of the longest
    row, without a cache, and with other inputs than tokens and their mask."""
    yield {}
    prompt, has_cache = prompt_of(given), getattr(model, "_supports_default_dynamic_cache", lambda: False)
    further = {name for name, value in given.items() if isinstance(value, Tensor)} - {"inputs", "input_ids", "attention_mask"}
    if (prompt is None or further or not has_cache() or getattr(model, "_is_stateful", False) or reads_longest_row(model)
            or option_of(model, given, "prefill_chunk_size") is not None or option_of(model, given, "use_cache") is False):
        return
    rows, chunk = sequence_count(model, prompt, given), 1 << max(0, prompt.shape[1] - 1).bit_length()
    while (chunk := chunk // 2) and rows * chunk >= LEAST_CHUNK:
        yield {"prefill_chunk_size": chunk}
