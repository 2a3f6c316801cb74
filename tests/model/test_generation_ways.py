"""`generate` in parts of the batch gives what it gives at once, and of the ways that fit the fastest comes first."""
from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from tiny_configs import tiny_config
from tiny_models import batch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer

import megacompile
from megacompile.streaming.device_copy import Arrangement, Turns
from megacompile.streaming.generation import ways
from megacompile.streaming.generation.ways import (
    Way,
    by_name,
    cache_bytes,
    generate_in_parts,
    option_of,
    part_counts,
    part_of,
    ways_to_generate,
)

ROWS = 5
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}


def prompts() -> dict[str, Tensor]:
    mask = torch.ones(ROWS, 7, dtype=torch.long)
    for row in range(ROWS):
        mask[row, :row] = 0
    return {"input_ids": batch(4, ROWS, 7)["input_ids"].clamp_min(8) * mask, "attention_mask": mask}


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_models.build(num_hidden_layers=2).eval()


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on padding and sampling
        yield


# ---------------------------------------------------------------- parts of the batch
@pytest.mark.sample(6)
@pytest.mark.parametrize("count", [1, 2, 3, ROWS])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}, {"repetition_penalty": 1.3},
                                 {"cache_implementation": "static"}, {"prefill_chunk_size": 2}],
                         ids=lambda how: " ".join(how) or "greedy")
def test_parts_generate_what_the_batch_generates(how: dict[str, Any], count: int, plain: Any) -> None:
    given = {**prompts(), **OPTIONS, "do_sample": False, **how}
    assert torch.equal(generate_in_parts(plain.generate, count, plain, given), plain.generate(**given))


@pytest.mark.parametrize("padding", [{"pad_token_id": 3}, {"pad_token_id": None}], ids=["a token to pad with", "none"])
@pytest.mark.parametrize("in_a_config", [False, True])
def test_sequences_that_end_early_are_padded_as_those_of_one_batch(
        in_a_config: bool, padding: dict[str, Any], plain: Any) -> None:
    options = {**OPTIONS, "max_new_tokens": 24, "do_sample": False}
    free = plain.generate(**prompts(), **options)
    options |= padding | {"eos_token_id": [int(free[0, -20]), int(free[1, -15])]}  # two end early, and so a part does
    given: dict[str, Any] = {**prompts(), **({"generation_config": GenerationConfig(**options)} if in_a_config else options)}
    expected = plain.generate(**given)
    lengths = {plain.generate(**part_of(n, ROWS, given)).shape[1] for n in range(ROWS)}
    assert len(lengths) > 1, "nothing is padded"
    for count in (2, 4, ROWS):
        assert torch.equal(generate_in_parts(plain.generate, count, plain, given), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("padding", [0, 5])
def test_beams_that_end_early_are_filled_as_those_of_one_batch(padding: int, plain: Any) -> None:
    """Beam search takes a padding token 0 for no token."""
    given = {**prompts(), "max_new_tokens": 24, "num_beams": 3, "do_sample": False, "pad_token_id": padding}
    free = plain.generate(**given, eos_token_id=None)
    given["eos_token_id"] = [int(free[0, -20]), int(free[1, -15])]
    expected = plain.generate(**given)
    assert len({plain.generate(**part_of(n, ROWS, given)).shape[1] for n in range(ROWS)}) > 1, "nothing is filled"
    for count in (2, 4, ROWS):
        assert torch.equal(generate_in_parts(plain.generate, count, plain, given), expected)


def test_options_that_a_configuration_leaves_out_are_the_models(plain: Any) -> None:
    """As transformers has it: an argument, the configuration that was passed, the model's."""
    model = copy.deepcopy(plain)
    free = model.generate(**prompts(), **OPTIONS | {"max_new_tokens": 24}, do_sample=False)
    model.generation_config.update(pad_token_id=5, eos_token_id=[int(free[0, -20]), int(free[1, -15])], max_new_tokens=9)
    given = {**prompts(), "generation_config": GenerationConfig(max_new_tokens=24, do_sample=False)}
    expected = model.generate(**given)
    for count in (2, 4, ROWS):
        assert torch.equal(generate_in_parts(model.generate, count, model, given), expected)
    assert (expected == 5).any()
    each = cache_bytes(model, {**prompts(), "max_new_tokens": 9})
    assert cache_bytes(model, prompts()) == each < cache_bytes(model, given)
    assert option_of(model, {"pad_token_id": None}, "pad_token_id") is None
    model.generation_config.return_dict_in_generate = True
    assert list(part_counts(model, given)) == [1]
    model.generation_config = GenerationConfig()
    assert cache_bytes(model, prompts()) == cache_bytes(model, {**prompts(), "max_new_tokens": 20}), "transformers' default"


def test_a_model_whose_frequencies_follow_the_longest_row_is_not_cut() -> None:
    config = tiny_models.build().config
    factors = [1.0] * (config.hidden_size // config.num_attention_heads // 2)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 5,
            "short_factor": factors, "long_factor": [40 * factor for factor in factors]}
    model = tiny_models.build(rope_parameters=rope, max_position_embeddings=64).eval()
    given = {**prompts(), **OPTIONS, "do_sample": False}
    batch_of = {**prompts(), "position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)}
    alone = {name: tensor[-1:] for name, tensor in batch_of.items()}
    with torch.no_grad():
        assert not torch.allclose(model(**batch_of).logits[-1, -1], model(**alone).logits[0, -1], atol=1e-5)
    assert list(part_counts(model, given)) == [1]
    assert all(way.parts == 1 for way in ways_to_generate(model, given, lambda *_: Arrangement(0, 0)))
    assert list(ways._prefills(model, {**given, "max_new_tokens": 1})) == [{}]


def test_a_model_whose_rows_are_mixed_is_not_cut() -> None:
    """In transformers a later token of RWKV adds a row's last token to all rows."""
    config = tiny_config("rwkv")
    model = AutoModelForCausalLM.from_config(config).eval()
    given = {"input_ids": prompts()["input_ids"].clamp_min(8), **OPTIONS, "do_sample": False, "use_cache": True}
    alone = torch.cat([model.generate(**part_of(row, ROWS, given)) for row in range(ROWS)])
    assert not torch.equal(model.generate(**given), alone)
    assert list(part_counts(model, given)) == [1]


def test_arguments_may_be_positional(plain: Any) -> None:
    given, options = prompts(), GenerationConfig(max_new_tokens=3)
    ids, mask = given["input_ids"], given["attention_mask"]
    assert by_name(plain.generate, (ids, options), {"attention_mask": mask}) == {
        "inputs": ids, "generation_config": options, "attention_mask": mask}
    passing_on = lambda *args, **kwargs: None  # noqa: E731  (as PEFT's)
    assert by_name(passing_on, (ids,), {"top_k": 3}) == {"inputs": ids, "top_k": 3}
    assert by_name(plain.generate, (None,), {"input_ids": ids}) == {"inputs": None, "input_ids": ids}
    with pytest.raises(TypeError, match="multiple values"):
        by_name(plain.generate, (ids,), {"inputs": ids})


def test_parts_that_sample_differ_from_row_to_row_and_repeat_with_the_seed(plain: Any) -> None:
    same = {name: tensor[:1].expand(ROWS, -1) for name, tensor in prompts().items()}
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(generate_in_parts(plain.generate, 3, plain, {**same, **OPTIONS, "do_sample": True}))
    assert torch.equal(*found) and len(set(map(tuple, found[0].tolist()))) == ROWS


@pytest.mark.parametrize("given", [
    {"return_dict_in_generate": True}, {"max_time": 5.0}, {"logits_processor": [lambda ids, scores: scores]},
    {"stopping_criteria": [lambda ids, scores: False]}, {"streamer": TextStreamer(None)}, {"assistant_model": object()},
    {"prefix_allowed_tokens_fn": lambda row, ids: [1]}, {"past_key_values": object()}, {"synced_gpus": True},
    {"inputs_embeds": torch.zeros(ROWS, 7, 4)}, {"pixel_values": torch.zeros(2, 3, 4, 4)},
    {"generation_config": GenerationConfig(return_dict_in_generate=True)},
    {"stop_strings": "x", "eos_token_id": None, "pad_token_id": 0}, {"token_healing": True},
    {"cache_implementation": "paged"}], ids=lambda given: ", ".join(given))
def test_calls_that_see_the_whole_batch_are_not_cut(given: dict[str, Any], plain: Any) -> None:
    """The results would differ, or could not be joined."""
    assert list(part_counts(plain, {**prompts(), **given})) == [1]
    harmless = {"synced_gpus": False, "streamer": None, "generation_config": GenerationConfig(), "tokenizer": object()}
    assert list(part_counts(plain, {**prompts(), **harmless})) == [1, 2, 4, 5]


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13])
def test_parts_have_every_row_once_and_the_first_is_as_large_as_any(rows: int) -> None:
    ids = torch.arange(rows)[:, None].expand(rows, 3)
    for count in range(1, rows + 1):
        parts = [part_of(n, count, {"input_ids": ids, "temperature": 1.0}) for n in range(count)]
        assert torch.equal(torch.cat([part["input_ids"] for part in parts]), ids)
        sizes = [len(part["input_ids"]) for part in parts]
        assert sizes[0] == max(sizes) and max(sizes) - min(sizes) <= 1 and all(part["temperature"] == 1.0 for part in parts)


# ---------------------------------------------------------------- which way
def described(way: Way) -> str:
    return " ".join([way.turns.value, *(["offloaded"] if way.arguments.get("cache_implementation") == "offloaded" else []),
                     *([f"in {way.parts}"] if way.parts > 1 else [])])


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence takes 60 bytes for keys and values, and 2 for computing."""
    monkeypatch.setattr(ways, "cache_bytes", lambda _, kwargs, **offloaded: 60 * len(kwargs["input_ids"]))
    monkeypatch.setattr(ways, "working_bytes", lambda _, kwargs: 2 * len(kwargs["input_ids"]))


@pytest.mark.parametrize(("room", "first", "last"), [
    (1000, ["none", "none in 2", "none in 4", "none in 5"], "all in 5"), (800, ["none in 2", "none in 4"], "all in 5"),
    (640, ["some", "all", "all in 2"], "all in 5"), (250, ["some in 2", "all in 2", "all in 4"], "all in 5"), (10, [], None)])
@pytest.mark.usefixtures("budget")
def test_the_fastest_way_that_fits_is_first_and_each_next_one_takes_less_memory(
        room: int, first: list[str], last: str | None, plain: Any) -> None:
    """The layers have 600 bytes, their slots 30, and turns take much longer than another call for a part of the batch."""
    def arrange(more: int, turns: Turns) -> Arrangement | None:
        there = {Turns.NONE: 600, Turns.SOME: room - more, Turns.ALL: 30}[turns]
        copied = {Turns.NONE: 0, Turns.SOME: 100e9, Turns.ALL: 200e9}[turns]
        return Arrangement(there, int(copied)) if more + max(there, 30) <= room else None

    found = list(ways_to_generate(plain, prompts(), arrange))
    assert [described(way) for way in found][:len(first)] == first
    assert last is None and not found or described(found[-1]) == last
    assert all(way.arguments.get("disable_compile", False) == (way.turns != Turns.NONE) for way in found)
    assert all(before.device_bytes > after.device_bytes for before, after in itertools.pairwise(found))
    assert all(way.device_bytes <= room for way in found)


@pytest.mark.parametrize(("weights", "cache", "expected"), [
    (1e9, 1e9, "all in 2"), (1e9, 1e6, "all offloaded"), (1e6, 1e9, "all in 2")])
def test_keys_and_values_wait_in_host_memory_where_that_moves_fewer_bytes(
        weights: float, cache: float, expected: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts copy the weights once more for each token, and an offloaded cache crosses the link twice."""
    monkeypatch.setattr(ways, "cache_bytes", lambda _, kwargs, offloaded=False:
                        int(cache) * len(kwargs["input_ids"]) // (20 if offloaded else 1))
    monkeypatch.setattr(ways, "working_bytes", lambda *_: 0)
    monkeypatch.setattr(ways._Call, "layers", 40)

    def arrange(more: int, turns: Turns) -> Arrangement | None:
        return Arrangement(0, int(weights)) if turns == Turns.ALL and more <= 3 * cache else None

    found = list(ways_to_generate(plain, prompts(), arrange))
    assert described(found[0]) == expected
    assert not any("offloaded" in described(way) for way in ways_to_generate(
        plain, {**prompts(), "cache_implementation": "static"}, arrange)), "the user has chosen"


def test_a_batch_that_does_not_fit_generates_in_parts_with_the_same_tokens(
        plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    device_copy, rows = model.megacompile.device_copy, []
    given = {**prompts(), **OPTIONS, "do_sample": False}
    arrangement = type(device_copy).arrangement

    def two_rows_fit(self: Any, more: int, turns: Turns) -> Arrangement | None:
        two = part_of(0, 3, given)
        return arrangement(self, more, turns) if turns == Turns.NONE and more <= ways.working_bytes(plain, two) + \
            cache_bytes(plain, two) else None

    monkeypatch.setattr(type(device_copy), "arrangement", two_rows_fit)
    original = type(plain).generate
    monkeypatch.setattr(type(plain), "generate", lambda self, *args, **kwargs: (
        rows.append(len(kwargs["input_ids"])), original(self, *args, **kwargs))[1])
    found = model.generate(**given)
    assert rows == [2, 1, 1, 1], "in four parts: the counts are powers of two"
    assert torch.equal(found, original(plain, **given))
    model.megacompile.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("smaller", "expected"), [(True, [2, 1, 1, 1, 1]), (False, [2, 1])],
                         ids=["in smaller parts", "streamed"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 2, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_parts_that_have_generated_stay_where_memory_ends_in_a_later_one(
        how: dict[str, Any], smaller: bool, expected: list[int], plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    device_copy, rows = model.megacompile.device_copy, []
    given = {**prompts(), **OPTIONS, "do_sample": False, **how}
    arrangement = type(device_copy).arrangement

    def fits(self: Any, more: int, turns: Turns) -> Arrangement | None:
        one, two = (ways.working_bytes(plain, part) + cache_bytes(plain, part)
                    for part in (part_of(0, count, given) for count in (5, 4)))
        return arrangement(self, more, turns) if turns == Turns.NONE and (one if smaller else one + 1) <= more <= two else None

    monkeypatch.setattr(type(device_copy), "arrangement", fits)
    original = type(plain).generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is type(plain):
            rows.append(len(kwargs["input_ids"]))
            if len(rows) == 2:
                raise torch.OutOfMemoryError("no memory")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(plain), "generate", generate)
    found = model.generate(**given)
    assert rows == expected
    assert torch.equal(found, original(plain, **given))
    model.megacompile.close()


# ---------------------------------------------------------------- how much it takes
def test_the_cache_of_keys_and_values_is_that_of_the_plain_model(plain: Any) -> None:
    given = prompts()
    for how in ({}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}):
        made = plain.generate(**given, **OPTIONS, **how, return_dict_in_generate=True)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in made.past_key_values.layers)
        predicted = cache_bytes(plain, {**given, **OPTIONS, **how})
        assert held <= predicted <= 1.2 * held  # the last token's are not kept
