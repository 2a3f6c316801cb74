"""The plain model on the device: it generates what the model generates without streaming, is current, and gives its memory
back."""
from __future__ import annotations

import copy
import gc
import itertools
import warnings
import weakref
from typing import Any
from unittest import mock

import device_copies
import engine
import pytest
import tiny_models
import torch
from tiny_models import batch
from torch import Tensor

import megacompile
from megacompile.errors import InsufficientMemoryError, MegacompileError
from megacompile.ir.program import Lane, Tile
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.streaming.device_copy import DeviceCopy, Turns
from megacompile.streaming.generation.turns import TurningLayer, copied_bytes, slot_bytes, staying_layers
from megacompile.streaming.generation.ways import Way, cache_bytes, working_bytes

LAYERS = 6
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
#: Options of `generate`: greedy, sampling with a seed, beams, processors of logits, a static cache.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False}, "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beams": {"num_beams": 3, "do_sample": False}, "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static"}}


def left_padded(rows: int = 3, length: int = 7) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, :2 * row] = 0
    return {"input_ids": batch(4, rows, length)["input_ids"].clamp_min(8) * mask, "attention_mask": mask}


def generated(model: Any, **how: Any) -> Tensor:
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on padding and sampling
        return model.generate(**left_padded(), **OPTIONS, **how)


streamed = device_copies.streamed_in_module(LAYERS)


@pytest.fixture
def elsewhere(streamed: Any) -> DeviceCopy:
    """The copy, not made yet."""
    found = streamed.megacompile.device_copy
    found.release()
    return found


# ---------------------------------------------------------------- what it generates
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_generation_is_that_of_the_plain_model(how: dict[str, Any], streamed: Any) -> None:
    plain = copy.deepcopy(streamed)
    assert torch.equal(generated(streamed, **how), generated(plain, **how))


def test_assisted_decoding_is_that_of_the_plain_model(streamed: Any) -> None:
    plain, draft = copy.deepcopy(streamed), tiny_models.build(num_hidden_layers=1).eval()
    prompt = {name: tensor[:1] for name, tensor in left_padded().items()}
    for how in (dict(assistant_model=draft), dict(prompt_lookup_num_tokens=2)):
        ours, theirs = (model.generate(**prompt, **OPTIONS, do_sample=False, **how) for model in (streamed, plain))
        assert torch.equal(ours, theirs)


@pytest.mark.nightly(
    held_by="tests/model/test_adapters.py::test_greedy_tokens_are_peft_s_with_all_weights_on_the_device_and_streamed")
def test_where_it_does_not_fit_generation_streams_with_the_same_tokens(
        streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated(copy.deepcopy(streamed), do_sample=False)
    monkeypatch.setattr(DeviceCopy, "bytes", property(lambda self: 1 << 60))
    assert torch.equal(generated(streamed, do_sample=False), expected) and elsewhere.native is None
    with pytest.raises(InsufficientMemoryError, match=r"the weights take .* of device memory"), \
            streamed.megacompile.on_device():
        raise AssertionError("it does not fit")


@pytest.mark.parametrize("times", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_where_memory_ends_generation_starts_again_with_fewer_layers_or_sequences_there(
        times: int, streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated(copy.deepcopy(streamed), do_sample=False)
    elsewhere.free_slots()
    original, arrangements = type(tiny_models.build()).generate, []

    def ends(self: Any, *args: Any, **kwargs: Any) -> Any:
        arrangements.append(device_copies.turning(streamed) or None)
        return _out_of_memory() if len(arrangements) <= times else original(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_models.build()), "generate", ends)
    monkeypatch.setattr("megacompile.streaming.generation.ways.chooses_cache", lambda *_: True)  # offloading takes a GPU
    with pytest.warns(UserWarning, match=r"start again\s+with fewer"):
        found = streamed.generate(**left_padded(), **OPTIONS, do_sample=False)
    assert torch.equal(found, expected) and arrangements == [
        None, LAYERS, *([LAYERS] * 2 if times == 2 else [LAYERS, LAYERS, None] if times == 4 else [])]


def _out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


# ---------------------------------------------------------------- current weights, and memory
def test_it_is_the_plain_class_with_the_weights_of_the_last_step(streamed: Any, elsewhere: DeviceCopy) -> None:
    optimizer = megacompile.AdamW(streamed.parameters(), lr=1e-2)
    streamed.model.embed_tokens.weight.requires_grad_(True)
    for seed in range(3):
        streamed.megacompile.train_step(batch(seed), optimizer)
        with streamed.megacompile.on_device() as native:
            assert type(native) is type(tiny_models.build()) and not hasattr(native, "megacompile")
            for (name, theirs), (_, ours) in zip(native.named_parameters(), streamed.named_parameters(), strict=True):
                assert torch.equal(theirs, ours) and theirs.data_ptr() != ours.data_ptr(), name
                assert not theirs.requires_grad


def test_only_what_changed_is_copied_again(streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed.megacompile.on_device() as native:
        kept = native
        before = {name: p.data_ptr() for name, p in native.named_parameters()}
    with streamed.megacompile.on_device() as native:
        assert native is kept, "nothing has run since"
    with torch.no_grad():
        streamed.lm_head.weight.mul_(2)
    with streamed.megacompile.on_device() as native:
        assert native is kept and before == {name: p.data_ptr() for name, p in native.named_parameters()}
        assert torch.equal(native.lm_head.weight, streamed.lm_head.weight)
    with torch.no_grad():
        streamed.lm_head.weight.div_(2)


def test_flags_of_modules_are_those_of_the_model(streamed: Any) -> None:
    streamed.train()
    with streamed.megacompile.on_device() as native:
        assert native.training and native.model.layers[0].training and native.config is streamed.config
    streamed.eval()
    with streamed.megacompile.on_device() as native:
        assert not any(module.training for module in native.modules())


def test_the_streamed_model_takes_its_memory_back_if_the_budget_does_not_hold_both(
        streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed.megacompile.on_device() as kept, pytest.raises(MegacompileError, match=r"leave the\s+block"), torch.no_grad():
        streamed(**batch())
    with torch.no_grad():
        streamed(**batch())
    assert elsewhere.native is kept
    monkeypatch.setattr(DeviceCopy, "bytes", property(lambda self: self._streamed.planner.device_bytes))
    with torch.no_grad():
        streamed(**batch())
    assert elsewhere.native is None


def test_slots_give_way_and_the_next_step_has_the_same_bits(
        streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        expected = streamed(**batch()).loss
    arena = engine.arena(streamed)
    assert arena.device_bytes() > 0
    planner = engine.planner(streamed)
    monkeypatch.setattr(DeviceCopy, "bytes", property(lambda self: planner.device_bytes - planner.margin_bytes))
    with streamed.megacompile.on_device():
        assert arena.device_bytes() == 0
    with torch.no_grad():
        assert torch.equal(streamed(**batch()).loss, expected)


@pytest.mark.parametrize("fits", [True, False])
def test_tiles_that_the_device_updates_stay_there_while_a_generation_fits_beside_them(
        fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else their state is copied to the host; training has the same bits either way."""
    def trained(generating: bool) -> Any:
        model = megacompile.stream(tiny_models.build(), device="cpu", resident_state=("model.layers.1",))
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        monkeypatch.setattr(type(engine.executables(model)), "largest", property(lambda _: engine.planner(model).device_bytes))
        for seed in range(3):
            model.megacompile.train_step(batch(seed), optimizer)
            if generating:
                before = engine.arena(model).device_bytes()
                call = model, dict(**left_padded(), **OPTIONS)
                there = engine.planner(model).device_bytes - engine.planner(model).margin_bytes
                room = there - cache_bytes(*call) - working_bytes(*call) - (before if fits else 0)
                monkeypatch.setattr(DeviceCopy, "bytes", property(lambda _, room=room: room))
                model.generate(**left_padded(), **OPTIONS)
                assert 0 < engine.arena(model).device_bytes() < before if fits else engine.arena(model).device_bytes() == 0
                assert engine.residency(model).state_ahead == fits
        return tiny_models.state_of(model, optimizer)

    expected = trained(generating=False)
    assert tiny_models.same_bits(trained(generating=True), expected)


def test_a_larger_use_of_the_same_copy_frees_tiles_that_stayed_beside_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", resident_state=("model.layers.1",))
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    planner = engine.planner(model)
    monkeypatch.setattr(type(engine.executables(model)), "largest", property(lambda _: planner.device_bytes))
    model.megacompile.train_step(batch(), optimizer)
    there, weights = planner.device_bytes - planner.margin_bytes, model.megacompile.device_copy.bytes
    with model.megacompile.on_device(more_bytes=1) as native:
        assert engine.arena(model).device_bytes() > 0
    with model.megacompile.on_device(more_bytes=there - weights) as again:
        assert again is native and engine.arena(model).device_bytes() == 0
    model.megacompile.train_step(batch(), optimizer)
    with model.megacompile.on_device():
        assert engine.arena(model).device_bytes() == 0, "how much memory the use takes is not known"


def test_where_memory_ends_beside_tiles_that_stayed_the_same_way_is_tried_without_them(
        monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", resident_state=("model.layers.1",))
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    model.megacompile.train_step(batch(), optimizer)
    original, there = type(tiny_models.build()).generate, []

    def ends(self: Any, *args: Any, **kwargs: Any) -> Any:
        there.append(engine.arena(model).device_bytes())
        return _out_of_memory() if there[-1] else original(self, *args, **kwargs)

    made, copies = DeviceCopy._made, list[weakref.ref[Any]]()

    def remembered(self: DeviceCopy, *args: Any) -> Any:
        gc.collect()
        assert not any(copy() for copy in copies), "memory for two copies"
        copies.append(weakref.ref(found := made(self, *args)))
        return found

    monkeypatch.setattr(DeviceCopy, "_made", remembered)
    monkeypatch.setattr(DeviceCopy, "_there", lambda self, tensor: tensor.detach().clone())
    monkeypatch.setattr(type(tiny_models.build()), "generate", ends)
    model.generate(**left_padded(), **OPTIONS)
    assert there[0] > 0 and there[1:] == [0] and len(copies) == 2
    assert not [w for w in recwarn if "start again" in str(w.message)]


def test_an_interrupted_generation_leaves_training_intact(streamed: Any, elsewhere: DeviceCopy) -> None:
    optimizer = megacompile.AdamW(streamed.parameters(), lr=1e-3)
    streamed.megacompile.train_step(batch(), optimizer)
    with streamed.megacompile.on_device() as native:
        native.lm_head.register_forward_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            native.generate(**left_padded(), **OPTIONS)
    elsewhere.release()
    assert streamed.megacompile.train_step(batch(), optimizer).isfinite()


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.filterwarnings("ignore:the device has too little memory")
def test_generation_that_ends_at_its_third_token_leaves_the_bits_of_training(
        error: type[BaseException], streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = megacompile.stream(copy.deepcopy(streamed), device="cpu")
    plain = type(tiny_models.build())
    original, calls = plain.prepare_inputs_for_generation, []

    def ends(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        if len(calls) >= 3:
            raise error("ended")
        return original(self, *args, **kwargs)

    losses = []
    for model in (streamed, undisturbed):
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        losses.append([model.megacompile.train_step(batch(), optimizer).item()])
        if model is streamed:
            with monkeypatch.context() as patched:
                patched.setattr(plain, "prepare_inputs_for_generation", ends)
                with pytest.raises(error):
                    model.generate(**left_padded(), **OPTIONS)
            assert len(calls) >= 3
        losses[-1] += [model.megacompile.train_step(batch(), optimizer).item() for _ in range(2)]
    assert losses[0] == losses[1]
    for ours, theirs in zip(streamed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(generated(streamed, do_sample=False), generated(undisturbed, do_sample=False))
    undisturbed.megacompile.close()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------- layers that take turns
@pytest.fixture(params=[0, 1, 2, 3])
def staying(request: pytest.FixtureRequest, streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many layers stay on a device whose budget holds so many beside two slots."""
    budget = device_copies.bytes_with(streamed, request.param) + (1 << 30)
    planner = mock.Mock(wraps=engine.planner(streamed), device_bytes=budget - (1 << 10), margin_bytes=1 << 30)
    monkeypatch.setattr(type(engine.of(streamed)), "planner", property(lambda self: planner))
    monkeypatch.setattr("megacompile.streaming.streamed_module.ways_to_generate",
                        lambda model, given, arrange: iter([Way(Turns.SOME, -(1 << 10), given)]))
    return int(request.param)


@pytest.mark.sample(8)
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_layers_that_do_not_fit_take_turns_with_the_same_tokens(
        how: dict[str, Any], staying: int, streamed: Any, elsewhere: DeviceCopy) -> None:
    assert torch.equal(generated(streamed, **how), generated(copy.deepcopy(streamed), **how))
    assert device_copies.turning(streamed) == LAYERS - staying
    elsewhere.release()


def test_a_model_whose_layers_take_turns_is_not_compiled(staying: int, streamed: Any, elsewhere: DeviceCopy) -> None:
    with streamed.megacompile.on_device(in_turns=True, more_bytes=-(1 << 10)) as native:
        assert native.generation_config.disable_compile and not streamed.generation_config.disable_compile
    elsewhere.release()


def test_a_copy_that_does_not_succeed_leaves_no_slots(
        staying: int, streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_there", mock.Mock(side_effect=torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError), streamed.megacompile.on_device(in_turns=True, more_bytes=-(1 << 10)):
        pass
    assert elsewhere.turns is None and elsewhere.native is None


def test_a_layer_crosses_the_link_once_for_each_call_whatever_the_sequences(
        staying: int, streamed: Any, elsewhere: DeviceCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, copy_bytes = [], ThreadBackend.copy

    def counted(self: ThreadBackend, destination: Tensor, source: Tensor, lane: Lane) -> None:
        copied.append(source.numel())
        copy_bytes(self, destination, source, lane)

    monkeypatch.setattr(ThreadBackend, "copy", counted)
    generated(streamed, do_sample=False)
    assert elsewhere.turns is not None
    each, slots = copied_bytes(elsewhere.turns.program), slot_bytes(elsewhere.turns.program)
    calls = OPTIONS["max_new_tokens"]
    assert calls * each <= sum(copied) <= calls * each + slots, "and the first layers' for the next call"
    elsewhere.release()


def test_turns_use_the_weights_of_the_last_step(staying: int, streamed: Any, elsewhere: DeviceCopy) -> None:
    optimizer = megacompile.AdamW(streamed.parameters(), lr=1e-2)
    for seed in range(2):
        streamed.megacompile.train_step(batch(seed), optimizer)
        assert torch.equal(generated(streamed, do_sample=False), generated(copy.deepcopy(streamed), do_sample=False))
    elsewhere.release()


@pytest.mark.nightly(held_by="tests/model/test_device_copy.py::test_layers_that_do_not_fit_take_turns_with_the_same_tokens")
def test_weights_that_several_layers_or_the_head_share_stay_on_the_device() -> None:
    model: Any = tiny_models.build().eval()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    streamed = megacompile.stream(model, device="cpu")
    layers, tiling = streamed.megacompile.device_copy.layers(), engine.tiling(streamed)
    names = {s.name for layer in layers for tile in layer.tiles for s in tiling.host[tile.name].slices}
    assert not any("embed_tokens" in name or "lm_head" in name for name in names)
    assert {name for name in names if "up_proj" in name} == {f"model.layers.{n}.mlp.up_proj.weight" for n in (1,)}
    streamed.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/model/test_device_copy.py::test_layers_that_do_not_fit_take_turns_with_the_same_tokens",
    "tests/model/test_adapters.py::test_greedy_tokens_are_peft_s_with_all_weights_on_the_device_and_streamed"))
def test_an_adapter_takes_turns_with_its_layer_and_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.setattr("megacompile.streaming.streamed_module.ways_to_generate",
                        lambda model, given, arrange: iter([Way(Turns.ALL, 0, given)]))
    adapter = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    plain = peft.get_peft_model(tiny_models.build(num_hidden_layers=3), adapter).eval()
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    with_adapter = generated(model, do_sample=False)
    assert torch.equal(with_adapter, generated(plain, do_sample=False))
    layers = model.megacompile.device_copy.layers()
    assert [len(layer.tiles) for layer in layers] == [2] * 3, "the frozen tile, and the adapter's"
    with model.disable_adapter(), plain.disable_adapter():
        without = generated(model, do_sample=False)
        assert torch.equal(without, generated(plain, do_sample=False)) and not torch.equal(without, with_adapter)
    model.megacompile.close()


@pytest.mark.parametrize("count", range(1, 9))
def test_layers_that_stay_are_spread_evenly(count: int) -> None:
    layers = [TurningLayer(str(n), (Tile(str(n), 5, 10, 10, trainable=False),)) for n in range(9)]
    places = [int(layer.name) for layer in staying_layers(layers, 10 * count)]
    gaps = [b - a for a, b in itertools.pairwise([*places, 9])]
    assert len(places) == count and max(gaps) - min(gaps) <= 1
