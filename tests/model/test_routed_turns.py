"""Mixtures whose layers take turns: of experts only those that routers choose are copied, with the same tokens and logits."""
from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mixtures import CHOSEN, EXPERTS, NEW, Copies, build, generated, in_turns, models_in_module
from tiny_models import batch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import megacompile
from megacompile.errors import MegacompileError
from megacompile.streaming.device_copy import Turns
from megacompile.streaming.generation import turns
from megacompile.streaming.generation.turns import copied_bytes, most_tokens, turns_program

#: Experts beside recurrent layers and shared experts; in a layer without attention; after dense layers.
HYBRIDS = ["qwen3_next", "qwen3_5_moe_text", "granitemoehybrid", "nemotron_h", "lfm2_moe", "jamba", "kimi_linear"]
OTHERS = [pytest.param(each, marks=pytest.mark.nightly) for each in ["glm4_moe", *HYBRIDS]]
#: Gated; with biases, transposed; beside dense layers and shared experts.
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", *OTHERS]


family, plain, streamed = models_in_module(FAMILIES)


@pytest.fixture(scope="module")
def shared() -> Iterator[Any]:
    model = megacompile.stream(build("qwen3_moe"), device="cpu")
    yield model
    model.megacompile.close()


@pytest.fixture
def mixture(shared: Any) -> Any:
    """Without a copy on the device."""
    shared.megacompile.device_copy.release()
    return shared


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "top_p": 0.9}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_and_logits_are_those_of_whole_copies(
        rows: int, how: dict[str, Any], plain: Any, streamed: Any, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_turns(streamed) as native:
        found = generated(native, rows, **how)
    routed = [set(count) for _, count, _ in copies.calls]
    assert routed[:NEW] == [{"prefetch"}, *[{"prefetch", "prefetch_routed"}] * (NEW - 1)], "the prompt, and each token after it"
    streamed.megacompile.device_copy.release()
    with monkeypatch.context() as patch:
        patch.setattr(turns, "most_tokens", lambda layers: 0)
        with in_turns(streamed) as native:
            whole = generated(native, rows, **how)
    streamed.megacompile.device_copy.release()
    assert torch.equal(found[0], whole[0]) and torch.equal(found[1], whole[1])
    assert torch.equal(found[0], generated(plain, rows, **how)[0])


def test_a_token_copies_the_experts_that_it_chooses_and_the_rest_of_each_layer(
        plain: Any, streamed: Any, copies: Copies) -> None:
    parameters = dict(plain.named_parameters())
    stacked = sum(p.nbytes for name, p in parameters.items() if ".experts." in name and p.dim() == 3)
    layers = streamed.megacompile.device_copy.layers()
    with in_turns(streamed) as native:
        generated(native, 1, do_sample=False)
    streamed.megacompile.device_copy.release()
    chosen, whole = stacked * CHOSEN // EXPERTS, copies.of(0)
    for call in range(1, NEW):
        assert copies.of(call) == {"prefetch": whole["prefetch"] - stacked, "prefetch_routed": chosen}
    padding = 256 * len(parameters)  # of parameters, which the program counts
    assert 0 <= copied_bytes(turns_program(layers, 1)) - copies.of(1).total() < padding
    assert 0 <= whole.total() - sum(p.nbytes for name, p in parameters.items() if ".layers." in name) < padding
    way = streamed.megacompile.device_copy.arrangement(0, Turns.ALL)
    assert [way.bytes_for(tokens) for tokens in (1, 100, None)] == [
        copied_bytes(turns_program(layers, tokens)) for tokens in (1, 100, None)]


def test_tokens_that_choose_the_same_experts_copy_them_once(mixture: Any, copies: Copies) -> None:
    with in_turns(mixture) as native:
        generated(native, 3, do_sample=False)
    layers = mixture.megacompile.device_copy.layers()
    each = layers[-1].experts.tiles[0].weight_bytes // EXPERTS
    for _, count, chosen in copies.calls[1:NEW]:
        assert all(list(numbers) == sorted(set(numbers)) for numbers in chosen)
        assert count["prefetch_routed"] == each * sum(map(len, chosen))
        assert count.total() <= copied_bytes(turns_program(layers, 3))


def test_calls_of_many_tokens_copy_all_experts_and_few_tokens_of_a_prompt_do_not(mixture: Any, copies: Copies) -> None:
    most = most_tokens(mixture.megacompile.device_copy.layers())
    assert most == (EXPERTS - 1) // CHOSEN
    expected, found = list[bool](), list[bool]()
    with in_turns(mixture) as native, torch.no_grad():
        for number, tokens in enumerate([1, 1, most, most + 1, most + 1, 1]):
            before = copies.routed()
            native(batch(number, 1, tokens)["input_ids"])
            expected.append(number > 0 and tokens <= most)
            found.append(copies.routed() > before)
    assert found == expected, "the first call shows how layers run their experts"


def test_the_program_shows_what_is_copied_by_choice(mixture: Any) -> None:
    handle = mixture.megacompile
    few, many, whole = handle.generation_program(3), handle.generation_program(100), handle.generation_program()
    assert "p.prefetch_routed(" in few.text() and many == whole and "p.prefetch_routed(" not in whole.text()
    assert few.slots == whole.slots


# ---------------------------------------------------------------- what a layer may read
def test_weights_of_one_generation_do_not_reach_the_next(mixture: Any, copies: Copies) -> None:
    for _ in range(2):
        plain = copy.deepcopy(mixture)
        assert torch.equal(generated(mixture, 1, do_sample=False)[0], generated(plain, 1, do_sample=False)[0])
        with in_turns(mixture) as native:
            assert torch.equal(generated(native, 1, do_sample=False)[0], generated(plain, 1, do_sample=False)[0])
        with torch.no_grad():
            mixture.model.layers[1].mlp.experts.down_proj.mul_(-1)


def test_an_implementation_that_may_read_all_experts_gets_them(mixture: Any, copies: Copies) -> None:
    def reads_all(experts: Any, hidden: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        assert experts.gate_up_proj.isfinite().all() and experts.down_proj.isfinite().all()
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, hidden, numbers, weights)

    expected = generated(copy.deepcopy(mixture), 1, do_sample=False)[0]
    ALL_EXPERTS_FUNCTIONS.register("reads_all", reads_all)
    mixture.set_experts_implementation("reads_all")
    with in_turns(mixture) as native:
        assert torch.equal(generated(native, 1, do_sample=False)[0], expected)
    mixture.set_experts_implementation("grouped_mm")
    assert all(list(numbers) == list(range(EXPERTS)) for _, _, chosen in copies.calls for numbers in chosen)


def bypasses(experts: Any, *given: Any) -> Tensor:
    """As a kernel for a whole block does, which reads the weights itself."""
    return type(experts).forward(experts, *given)


def runs_twice(experts: Any, *given: Any) -> Tensor:
    experts(*given)
    return experts(*given)


@pytest.mark.parametrize("run", [bypasses, runs_twice])
def test_a_layer_that_reads_experts_in_another_way_copies_them_all(
        run: Any, mixture: Any, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first call on; a layer that begins to do so later is refused once."""
    expected = generated(copy.deepcopy(mixture), 1, do_sample=False)[0]
    with in_turns(mixture) as native, torch.no_grad():
        generated(native, 1, do_sample=False)
        block = native.model.layers[1].mlp
        monkeypatch.setattr(block, "forward", functools.partial(_block, block, run), raising=False)
        with pytest.raises(MegacompileError, match=r"runs its module of experts [02] times, and once in the call before"):
            native(batch(3, 1, 2)["input_ids"])
        before = copies.routed()
        assert torch.equal(generated(native, 1, do_sample=False)[0], expected) and copies.routed() == before


def _block(block: Any, run: Any, hidden: Tensor) -> Tensor:
    flat = hidden.view(-1, hidden.shape[-1])
    _, weights, numbers = block.gate(flat)
    return run(block.experts, flat, numbers, weights).view(hidden.shape)


def test_a_layer_that_fails_leaves_the_next_call_right(mixture: Any, copies: Copies) -> None:
    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    expected = generated(copy.deepcopy(mixture), 1, do_sample=False)[0]
    with in_turns(mixture) as native, torch.no_grad():
        for part in (native.model.layers[1].self_attn, native.model.layers[1].mlp.experts, native.model.layers[2]):
            generated(native, 1, do_sample=False)
            removed = part.register_forward_pre_hook(fails)
            with pytest.raises(KeyboardInterrupt):
                native(batch(3, 1, 2)["input_ids"])
            removed.remove()
            assert torch.equal(generated(native, 1, do_sample=False)[0], expected)


@pytest.mark.parametrize(("name", "codes"), [("qwen3_moe", "int8"), *(
    pytest.param(each, "nf4", marks=pytest.mark.nightly) for each in ("qwen3_moe", "gpt_oss", *HYBRIDS))])
def test_experts_in_codes_are_copied_whole(name: str, codes: str, copies: Copies) -> None:
    model = build(name, wide=64).requires_grad_(False)
    megacompile.quantize(model, codes)
    model = megacompile.stream(model, device="cpu")
    expected = generated(copy.deepcopy(model), 1, do_sample=False)[0]
    assert not any(layer.experts for layer in model.megacompile.device_copy.layers())
    with in_turns(model) as native:
        assert torch.equal(generated(native, 1, do_sample=False)[0], expected)
    assert not copies.routed()
    model.megacompile.close()


@pytest.mark.parametrize("name", ["qwen3_moe", *OTHERS])
def test_adapters_of_experts_are_added_to_chosen_experts(name: str, copies: Copies) -> None:
    peft = pytest.importorskip("peft")
    model = build(name)
    stacked = {".".join(each.split(".")[-2:]) for each, p in model.named_parameters() if ".experts." in each and p.dim() == 3}
    adapter = peft.LoraConfig(r=2, target_parameters=sorted(stacked), init_lora_weights=False)
    plain = peft.get_peft_model(model, adapter).eval()
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    with in_turns(model) as native:
        found = generated(native, 1, do_sample=False)[0]
    assert copies.routed() and torch.equal(found, generated(plain, 1, do_sample=False)[0])
    model.megacompile.close()
