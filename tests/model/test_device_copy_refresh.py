"""What is copied to the device again when a copy of the model is kept there: what has changed, and nothing else."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import device_copies
import pytest
import tiny_models
import torch
from tiny_models import batch, same_bits, weights
from torch import nn

import megacompile

TRAINED = ("model.layers.1.", "model.norm.")
EVALUATED = batch(7)


@pytest.fixture
def partly() -> Iterator[Any]:
    """A streamed model of which one layer and the last norm are trained."""
    model = tiny_models.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED))
    made = megacompile.stream(model, device="cpu")
    yield made
    made.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_device_copy_refresh.py::test_a_step_has_only_trained_weights_copied_again")
def test_a_copy_that_was_made_in_inference_mode_gets_new_weights_outside_of_it(partly: Any) -> None:
    optimizer = optimizer_of(partly)
    with torch.inference_mode():
        partly.generate(EVALUATED["input_ids"], max_new_tokens=1, do_sample=False)
    partly(**batch(0)).loss.backward()
    optimizer.step()
    with partly.megacompile.on_device() as native, torch.no_grad():
        assert same_bits(weights(native), weights(partly))


def optimizer_of(model: Any) -> Any:
    return megacompile.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


class Copies:
    """Which tensors of the kept copy are written between two uses, by their version counters."""

    def __init__(self, model: Any) -> None:
        self._model = model
        with model.megacompile.on_device() as native:
            self._native, self._versions = native, versions(native)

    def again(self) -> set[str]:
        """The names of what another use writes to the same copy, which is then all current."""
        with self._model.megacompile.on_device() as native:
            assert native is self._native, "the copy is kept"
            now = versions(native)
            written = {name for name in now if now[name] != self._versions[name]}
            assert max((now[name] - self._versions[name] for name in written), default=1) == 1, "once each"
            self._versions = now
            state = native.state_dict()
            stale = [name for name, value in self._model.state_dict().items() if not torch.equal(state[name], value)]
            assert not stale
        return written


def versions(model: nn.Module) -> dict[str, int]:
    return {name: tensor._version for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_a_step_has_only_trained_weights_copied_again(partly: Any) -> None:
    copies, optimizer = Copies(partly), optimizer_of(partly)
    names = trained_names(partly)
    assert names and len(names) < len(list(partly.parameters())) / 2
    for seed in range(2):
        partly.megacompile.train_step(batch(seed), optimizer)
        assert copies.again() == names
        assert copies.again() == set(), "nothing has run since"


def test_a_loop_that_trains_has_only_trained_weights_copied_again(partly: Any) -> None:
    copies, optimizer = Copies(partly), optimizer_of(partly)
    tiny_models.train_step(partly, optimizer)
    assert copies.again() == trained_names(partly)


def test_a_frozen_weight_written_from_outside_is_copied_again_alone(partly: Any) -> None:
    copies = Copies(partly)
    with torch.no_grad():
        partly.model.layers[0].mlp.up_proj.weight.mul_(2)
        partly.model.rotary_emb.inv_freq.mul_(1)
    assert copies.again() - trained_names(partly) == {"model.layers.0.mlp.up_proj.weight", "model.rotary_emb.inv_freq"}
    assert copies.again() == set()


def test_a_frozen_weight_written_between_steps_is_copied_again_beside_the_trained_ones(partly: Any) -> None:
    copies, optimizer = Copies(partly), optimizer_of(partly)
    partly.megacompile.train_step(batch(), optimizer)
    with torch.no_grad():
        partly.lm_head.weight.div_(2)
    partly.megacompile.train_step(batch(1), optimizer)
    assert copies.again() == trained_names(partly) | {"lm_head.weight"}


def test_weights_that_are_loaded_are_all_copied_again(partly: Any) -> None:
    copies = Copies(partly)
    partly.load_state_dict({name: value / 2 for name, value in partly.state_dict().items()})
    assert copies.again() >= {name for name, _ in partly.named_parameters()}


@pytest.mark.nightly(held_by="tests/model/test_device_copy_refresh.py::test_a_step_has_only_trained_weights_copied_again")
@pytest.mark.parametrize("forward", [True, False], ids=["streamed evaluation", "nothing"])
def test_a_frozen_model_has_nothing_copied_again(forward: bool) -> None:
    model = megacompile.stream(tiny_models.build().requires_grad_(False).eval(), device="cpu")
    copies = Copies(model)
    if forward:
        with torch.no_grad():
            model(**batch())
    assert copies.again() == set()
    model.megacompile.close()


def test_layers_in_slots_are_not_copied_by_a_refresh_but_when_their_turn_comes(partly: Any) -> None:
    optimizer, more = optimizer_of(partly), device_copies.bytes_beside(partly, 0)
    partly.megacompile.train_step(batch(), optimizer)
    with partly.megacompile.on_device(in_turns=True, more_bytes=more) as native:
        assert device_copies.turning(partly) == 3
        before = versions(native)
    partly.megacompile.train_step(batch(1), optimizer)
    with partly.megacompile.on_device(in_turns=True, more_bytes=more) as again, torch.no_grad():
        assert again is native
        outside = {name for name, version in versions(native).items() if version != before[name] and ".layers." not in name}
        assert outside == {"model.norm.weight"}
        found = native(**EVALUATED).loss
    with torch.no_grad():
        assert found == pytest.approx(float(partly(**EVALUATED).loss), abs=1e-5)


@pytest.mark.parametrize("freeze", [
    lambda model: model.requires_grad_(False), lambda model: model.model.layers[1].mlp.requires_grad_(False)],
    ids=["all", "some"])
def test_weights_that_are_frozen_after_their_last_step_are_copied_as_they_were_trained(
        freeze: Callable[[Any], object], partly: Any) -> None:
    """Only training is refused after `requires_grad` has changed; evaluations are not."""
    copies, optimizer = Copies(partly), optimizer_of(partly)
    partly.megacompile.train_step(batch(), optimizer)
    with torch.no_grad():
        expected = float(partly(**EVALUATED).loss)
    freeze(partly)
    with torch.no_grad():
        assert float(partly(**EVALUATED).loss) == expected
    with partly.megacompile.on_device() as native, torch.no_grad():
        assert float(native(**EVALUATED).loss) == pytest.approx(expected, abs=1e-5)
    copies.again()


@pytest.mark.nightly(held_by=(
    "tests/model/test_device_copy_refresh.py::test_a_step_has_only_trained_weights_copied_again",
    "tests/model/test_device_copy_refresh.py::test_weights_that_are_frozen_after_their_last_step_are_copied_as_they_were_trained"))
def test_an_adapter_that_is_off_in_the_first_use_after_a_step_is_current_in_the_next_one() -> None:
    """PEFT freezes adapters while they are off."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
    model = megacompile.stream(peft.get_peft_model(tiny_models.build(), adapter), device="cpu")
    optimizer, copies = optimizer_of(model), Copies(model)
    model.megacompile.train_step(batch(), optimizer)
    model.megacompile.synchronize()
    with model.disable_adapter(), model.megacompile.on_device() as native, torch.no_grad():
        without = float(native(**EVALUATED).loss)
        assert without == pytest.approx(float(tiny_models.build()(**EVALUATED).loss), abs=1e-5)
    copies.again()
    with model.megacompile.on_device() as native, torch.no_grad():
        found = float(native(**EVALUATED).loss)
    with torch.no_grad():
        assert found == pytest.approx(float(model(**EVALUATED).loss), abs=1e-5) != without
    model.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/model/test_device_copy_refresh.py::test_weights_that_are_loaded_are_all_copied_again",
    "tests/model/test_surface.py::test_what_is_written_through_data_after_synchronize_counts"))
@pytest.mark.parametrize("resident", [(), "all"])
def test_weights_that_are_written_through_data_after_synchronize_are_copied(resident: Any) -> None:
    """Frozen weights too, and in every mode: such a write leaves no trace."""
    model = tiny_models.build().eval()
    model.lm_head.requires_grad_(False)
    model = megacompile.stream(model, device="cpu", resident=resident)
    copies, optimizer = Copies(model), optimizer_of(model)
    model.megacompile.train_step(batch(), optimizer)
    copies.again()
    model.megacompile.synchronize()
    for weight in (model.lm_head.weight, model.model.layers[1].mlp.up_proj.weight):
        weight.data.mul_(2)
    copies.again()
    with model.megacompile.on_device() as native, torch.no_grad():
        found = float(native(**EVALUATED).loss)
    with torch.no_grad():
        assert found == pytest.approx(float(model(**EVALUATED).loss), abs=1e-5)
    model.megacompile.close()


@pytest.mark.parametrize("in_turns", [False, True], ids=["whole", "in turns"])
def test_what_a_user_writes_to_a_copy_reaches_neither_training_nor_a_later_use(in_turns: bool) -> None:
    model = megacompile.stream(tiny_models.build(bf16=True), device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    model(**batch()).loss.backward()
    optimizer.step()
    before = tiny_models.state_of(model, optimizer)
    how = {"in_turns": True, "more_bytes": device_copies.bytes_beside(model, 0)} if in_turns else {}
    with torch.no_grad(), model.megacompile.on_device(**how) as native:
        expected = native(**EVALUATED).loss
        for tensor in (*native.parameters(), *native.buffers()):
            tensor.mul_(2)
    assert tiny_models.same_bits(tiny_models.state_of(model, optimizer), before)
    with torch.no_grad(), model.megacompile.on_device(**how) as native:
        assert torch.equal(native(**EVALUATED).loss, expected)
    model.megacompile.close()
