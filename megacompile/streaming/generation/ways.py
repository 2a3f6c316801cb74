"""Ways to call `generate` with the plain model on the device, the fastest first, and the device memory that each takes."""
from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.frontend.templates.layer_caches import LayerCache
from megacompile.frontend.tracing.model_options import rope_types
from megacompile.predict.cost import RECURRENCE_CHUNK
from megacompile.streaming.device_copy import Arrangement, Turns


# --------------------
# The request of a `generate` call: its arguments by name, its prompts, and its options, which may be in a configuration.
def by_name(generate: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a bound `generate`, by name. Raises `TypeError` as the call would."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(generate)
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):  # PEFT's, which passes all on
        from transformers import GenerationMixin

        signature = inspect.signature(GenerationMixin.generate)
        args = (None, *args)
    bound = signature.bind(*args, **kwargs).arguments
    bound.pop("self", None)
    further = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    return {name: value for name, value in bound.items() if name != further} | bound.get(further, {})


def option_of(model: nn.Module, given: Mapping[str, Any], name: str) -> Any:
    """An option of a call: its argument (also if it is None), else the value in the call's configuration, else in the
    model's."""
    if name in given:
        return given[name]
    options = (given.get("generation_config"), getattr(model, "generation_config", None))
    return next((found for each in options if (found := getattr(each, name, None)) is not None), None)


def with_options(given: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The arguments of `generate` with these options, which replace the user's. They are in the configuration if there is one:
    transformers prefers arguments to it."""
    found = {name: value for name, value in given.items() if name not in options}
    if found.get("generation_config") is None:
        return found | options
    found["generation_config"] = copy.deepcopy(found["generation_config"])
    for name, value in options.items():
        setattr(found["generation_config"], name, value)
    return found


def prompt_of(given: Mapping[str, Any]) -> Tensor | None:
    """int [rows, tokens]; None if the call has none."""
    found = next((x for x in (given.get("inputs"), given.get("input_ids")) if isinstance(x, Tensor)), None)
    return found if found is not None and found.dim() == 2 else None


def chooses_cache(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """True if the user has chosen how keys and values are stored."""
    return given.get("past_key_values") is not None or option_of(model, given, "use_cache") is False \
        or option_of(model, given, "cache_implementation") is not None


# -------------------- The device memory that a call of `generate` takes beside the weights
#: The number of tokens that transformers generates by default.
NEW_TOKENS = 20


def text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def layer_configs(model: nn.Module) -> list[Any]:
    """The config of each layer. Some families have layers of several sizes. The config of such a model raises for options that
    differ between layers."""
    config = text_config(model)
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * int(getattr(config, "num_hidden_layers", 0))


def sequence_count(model: nn.Module, prompt: Tensor, given: Mapping[str, Any]) -> int:
    """The number of sequences to generate: prompts, times beams, times sequences for each prompt."""
    counts = (option_of(model, given, name) for name in ("num_beams", "num_return_sequences"))
    return len(prompt) * max(1, *(count for count in counts if isinstance(count, int)), 1)


def cache_bytes(model: nn.Module, given: Mapping[str, Any], offloaded: bool = False) -> int:
    """Bytes of what the layers keep of all sequences on the device, if the model and the call tell; else 0. `offloaded`: keys
    and values are in host memory, except those of two layers."""
    prompt = prompt_of(given)
    if prompt is None:
        return 0
    layers, tokens = layer_caches(model), _longest(model, prompt, given)
    of_tokens = sorted(layer.token_bytes(tokens) for layer in layers)[-2 if offloaded else 0:]
    return sequence_count(model, prompt, given) * (sum(of_tokens) + sum(layer.state for layer in layers))


def _longest(model: nn.Module, prompt: Tensor, given: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that a call can generate, with its prompt."""
    new, longest = (option_of(model, given, name) for name in ("max_new_tokens", "max_length"))
    return prompt.shape[1] + new if isinstance(new, int) else max(prompt.shape[1] + NEW_TOKENS, longest or 0)


def can_offload_cache(model: nn.Module) -> bool:
    """True if transformers can keep keys and values in host memory. In layers that also have a recurrent state, it copies that
    to the host too, and back only after the layer has read it."""
    kinds = getattr(text_config(model), "layer_types", None) or ()
    return has_dynamic_cache(model) and not any(kind.startswith("hybrid") for kind in kinds)


def has_dynamic_cache(model: nn.Module) -> bool:
    """True if `generate` makes transformers' own cache, of layers that grow."""
    return bool(getattr(model, "_supports_default_dynamic_cache", lambda: False)())


def layer_caches(model: nn.Module) -> list[LayerCache]:
    """What each layer keeps, as the graphs of a streamed model show. The config tells what they do not: attention in a model's
    own code, and layers that keep something else than keys and values."""
    configs, size, nothing = layer_configs(model), _itemsize(model), LayerCache()
    found = [LayerCache(width, width, width > 0) for width in (2 * _key_width(each) * size for each in configs)]
    handle = getattr(model, "megacompile", None)
    if handle is not None:
        shown, told = handle.streamed.captured.layer_caches, found if not handle.streamed.captured.fused_attention else []
        found = [own if own.attentions else replace(other, state=own.state)
                 for own, other in itertools.zip_longest(shown, told, fillvalue=nothing)]
    # Some layers read the keys and values of an earlier one.
    modes = getattr(text_config(model), "kv_sharing_modes", None) or ()
    return [nothing if mode == "reuse" else replace(each, token=_kept_bytes(each, config, size))
            for each, config, mode in itertools.zip_longest(found, configs, modes, fillvalue=None) if each is not None]


def _kept_bytes(layer: LayerCache, config: Any, size: int) -> int:
    """Bytes for each token. Latent attention keeps what keys and values are computed from, and layers that choose tokens keep a
    further key."""
    latent, rotary, index = (
        int(getattr(config, name, None) or 0) for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim"))
    if not latent:
        return layer.token + (index * size if layer.attentions else 0)
    return layer.attentions * (latent + rotary + index) * size


def _key_width(layer: Any) -> int:
    """The elements of a token's keys in a layer, or of its values, if the layer's config tells; else 0."""
    heads = getattr(layer, "num_attention_heads", None)
    if heads is None:
        return 0
    width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return int((getattr(layer, "num_key_value_heads", None) or heads) * width)


def working_bytes(model: nn.Module, given: Mapping[str, Any]) -> int:
    """Bytes for computing a chunk of the prompts, for the keys and values that a layer reads, and for several fp32 copies of
    the logits of the last tokens, if the config tells; else 0."""
    prompt, widths = prompt_of(given), max(map(_working_width, layer_configs(model) or [text_config(model)]))
    if prompt is None or not widths:
        return 0
    rows, chunk = sequence_count(model, prompt, given), option_of(model, given, "prefill_chunk_size")
    layers, tokens = layer_caches(model), min(prompt.shape[1], chunk or prompt.shape[1])
    computed = tokens * widths * _itemsize(model) + -(-tokens // RECURRENCE_CHUNK) * max((x.state for x in layers), default=0)
    read = _longest(model, prompt, given) * max((x.read for x in layers), default=0)
    return rows * (computed + read + 4 * 4 * int(getattr(text_config(model), "vocab_size", 0)))


def _working_width(layer: Any) -> int:
    """The elements that a layer computes for a token, if its config tells; else 0."""
    hidden, wide = getattr(layer, "hidden_size", None), getattr(layer, "intermediate_size", None)
    return 6 * hidden + 3 * (wide if isinstance(wide, int) else 4 * hidden) if isinstance(hidden, int) else 0


def _itemsize(model: nn.Module) -> int:
    _, parameter = next(nn.Module.named_parameters(model))  # a streamed model's own method would wait for updates
    return parameter.element_size()


# --------------------
# A call of `generate` in parts of its batch, one after another, where the keys and values of all sequences do not fit.
#: Tensors with one row for each prompt.
BY_ROW = frozenset({"inputs", "input_ids", "attention_mask", "token_type_ids"})
#: Options that need the whole batch: results that cannot be joined, a time for all rows, prompts that are padded anew.
_WHOLE_BATCH = ("return_dict_in_generate", "max_time", "token_healing")


def part_counts(model: nn.Module, given: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of parts into which the batch can be cut: 1, 2, 4, ... up to one prompt in each. Only 1 if parts could not be
    joined, or if their results could differ from the whole batch's in more than the sampled numbers."""
    yield 1
    prompt, count = prompt_of(given), 1
    if prompt is None or not can_be_cut(model, given):
        return
    while count < len(prompt):
        count = min(2 * count, len(prompt))
        yield count


def can_be_cut(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """True if each row's tokens depend on its own prompt and on options alone, and results of several calls can be joined."""
    known = BY_ROW | {"generation_config", "tokenizer"}
    options = getattr(model, "generation_config", None)
    if any(name not in known and not hasattr(options, name) for name, value in given.items()
           if value is not None and value is not False):
        return False  # streamers, processors and criteria of the caller's, images, another model
    if any(option_of(model, given, name) for name in _WHOLE_BATCH) or reads_longest_row(model):
        return False
    if option_of(model, given, "cache_implementation") == "paged":
        return False  # the result has another shape
    # Without an end token transformers pads nothing: a row that has met a stop string goes on until all rows have.
    return _first(option_of(model, given, "eos_token_id")) is not None or option_of(model, given, "stop_strings") is None


def reads_longest_row(model: nn.Module) -> bool:
    """True if the tokens of a row may depend on other rows, or on how many tokens are computed at once. The rotary frequencies
    of LongRoPE follow the largest position of a call, transformers' RWKV adds a row's last token to all rows, and a user's own
    model may compute with several rows."""
    handle = getattr(model, "megacompile", None)
    several = getattr(text_config(model), "model_type", "") == "rwkv" or handle and handle.streamed.captured.across_rows
    return bool(several) or any(
        "longrope" in kind or "dynamic" in kind for module in nn.Module.modules(model) for kind in rope_types(module))


def _first(tokens: Any) -> int | None:
    return None if tokens is None else int(torch.as_tensor(tokens).flatten()[0])


def _padding(model: nn.Module, given: Mapping[str, Any]) -> int:
    """The token that transformers writes after the end of a sequence. Beam search treats 0 as no token."""
    end, padding = (_first(option_of(model, given, name)) for name in ("eos_token_id", "pad_token_id"))
    beams = (option_of(model, given, "num_beams") or 1) > 1
    found = end if padding is None or (beams and padding == 0) else padding
    assert found is not None, "without an end token all sequences are as long"
    return found


def part_of(number: int, count: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of part `number` of `count`. The first part is the largest, or as large as the others."""
    prompt = prompt_of(given)
    if count == 1 or prompt is None:
        return dict(given)
    return _with_rows(given, _rows_of_part(number, count, len(prompt)))


def _rows_of_part(number: int, count: int, prompts: int) -> slice:
    size, larger = divmod(prompts, count)
    start = number * size + min(number, larger)
    return slice(start, start + size + (number < larger))


def _with_rows(given: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """The arguments for these prompts."""
    return {name: value[rows] if name in BY_ROW and isinstance(value, Tensor) else value for name, value in given.items()}


@dataclass
class Finished:
    """The parts of a batch whose generation has ended, in batch order. State: the number of their `prompts`, and the `tokens`
    of each part, int [sequences, tokens]."""

    prompts: int = 0
    tokens: list[Tensor] = field(default_factory=list)


def generate_in_parts(generate: Callable[..., Any], count: int, model: nn.Module, given: Mapping[str, Any],
                      finished: Finished | None = None) -> Any:
    """The result of `generate(**given)`: int [sequences, tokens] if there are several parts. Shorter sequences are padded to
    the longest of all parts, as in one batch. `finished`: parts that are already generated. Each new part is added to it, and
    stays there if a later part runs out of memory."""
    finished = Finished() if finished is None else finished
    prompt = prompt_of(given)
    if prompt is None or (count == 1 and not finished.prompts):
        return generate(**given)
    first, left = finished.prompts, len(prompt) - finished.prompts
    if first:  # no part may be larger than the largest of `count` parts of the whole batch
        count = math.ceil(left / math.ceil(len(prompt) / count))
    for number in range(count):
        rows = _rows_of_part(number, count, left)
        finished.tokens.append(generate(**_with_rows(given, slice(first + rows.start, first + rows.stop))))
        finished.prompts = first + rows.stop
    longest = max(tokens.shape[1] for tokens in finished.tokens)
    return torch.cat([tokens if tokens.shape[1] == longest else nn.functional.pad(
        tokens, (0, longest - tokens.shape[1]), value=_padding(model, given)) for tokens in finished.tokens])


#: Fewest tokens, of all sequences together, that prompts are computed in at a time. Kernels of fewer leave the device idle, and
#: each chunk copies the layers that take turns once more.
LEAST_CHUNK = 4096
#: Types of recurrent models that compute a chunk of a prompt from the state after the one before. Others begin at zero.
_CONTINUED = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "zamba2", "zaya"})
#: Bytes/s over PCIe Gen5 x16, and seconds in which transformers calls one layer whatever the number of sequences
#: (benchmarks/results/README.md: 28 layers and 256 tokens in 5 s). They only rank the ways.
_LINK, _LAYER_S = 5e10, 0.7e-3

#: `DeviceCopy.arrangement`.
Arrange = Callable[[int, Turns], Arrangement | None]


@dataclass(frozen=True)
class Way:
    """`turns`: which layers take turns in slots. `bytes`: device memory beside the weights. `arguments`: for `generate`, for
    the whole batch. `parts`: how many parts of the batch generate one after another. `device_bytes`: with the weights.
    `seconds`: estimate for one more token of all sequences."""

    turns: Turns
    bytes: int
    arguments: dict[str, Any]
    parts: int = 1
    device_bytes: int = 0
    seconds: float = 0.0


def ways_to_generate(model: nn.Module, given: Mapping[str, Any], arrange: Arrange) -> Iterator[Way]:
    """The ways that fit, the fastest first. Each takes less memory than the one before it, so it can be tried if that one runs
    out of memory. Each computes the prompts in the largest chunks that fit. Offloaded caches of keys and values stay in host
    memory, except for two layers. Smaller parts of the batch need smaller caches at a time."""
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
        """All ways that fit, except the whole batch with all weights on the device. `there`: that way fits."""
        found: list[Way | None] = []
        for parts in part_counts(self.model, self.given):
            if parts > 1:
                found.append(self.way(Turns.NONE, parts))
                there = there or found[-1] is not None
            if not there:
                found.append(self.way(Turns.SOME, parts))
            found.append(self.way(Turns.ALL, parts))
        if can_offload_cache(self.model) and not chooses_cache(self.model, self.given):
            found.append(self.way(Turns.ALL, offloaded=True))
        return [way for way in found if way is not None]

    def way(self, turns: Turns, parts: int = 1, offloaded: bool = False) -> Way | None:
        """The way that fits with the largest chunks of prompts; None if none fits."""
        part = part_of(0, parts, self.given)
        cache = cache_bytes(self.model, part)
        kept = cache_bytes(self.model, part, offloaded=True) if offloaded else cache
        for chunks in _prefills(self.model, part):
            more = kept + working_bytes(self.model, with_options(part, **chunks))
            arrangement = self.arrange(more, turns)
            if arrangement is not None:
                options = chunks | ({"cache_implementation": "offloaded"} if offloaded else {})
                if turns != Turns.NONE:  # copies of layers are issued between them, which compiled code does not know
                    options["disable_compile"] = True
                prompt = prompt_of(part)
                tokens = None if prompt is None else sequence_count(self.model, prompt, part)
                seconds = max(arrangement.bytes_for(tokens) / _LINK, self.layers * _LAYER_S)
                if offloaded:  # the cache crosses the link in both directions for each token
                    seconds += 2 * (cache - kept) / _LINK
                return Way(turns, more, with_options(self.given, **options), parts, arrangement.device_bytes + more,
                           parts * seconds)
        return None


def _prefills(model: nn.Module, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Options of `generate` with which the prompts are computed at once, or in ever smaller chunks. Only the user's own options
    if the user has chosen, or if transformers cannot continue a chunk: with recurrent states, except `_CONTINUED` ones, with
    rotary frequencies of the longest row, without a cache, and with inputs other than tokens and their mask."""
    yield {}
    prompt, kind = prompt_of(given), getattr(text_config(model), "model_type", "")
    further = {name for name, value in given.items() if isinstance(value, Tensor)} - {"inputs", "input_ids", "attention_mask"}
    if (prompt is None or further or not has_dynamic_cache(model) or reads_longest_row(model)
            or (getattr(model, "_is_stateful", False) and kind not in _CONTINUED)
            or option_of(model, given, "prefill_chunk_size") is not None or option_of(model, given, "use_cache") is False):
        return
    rows, chunk = sequence_count(model, prompt, given), 1 << max(0, prompt.shape[1] - 1).bit_length()
    while (chunk := chunk // 2) and rows * chunk >= LEAST_CHUNK:
        yield {"prefill_chunk_size": chunk}
