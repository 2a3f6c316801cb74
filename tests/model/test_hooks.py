"""Forward hooks: of the model as a whole in streamed calls, and of any module in the plain model on the device."""
from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import device_copies
import pytest
import tiny_models
import torch
from tiny_models import batch
from torch import Tensor, nn

import megacompile
from megacompile import api
from megacompile.errors import UnsupportedError
from megacompile.frontend.capture import capture

INSIDE = ("model.embed_tokens", "model.layers.0", "model.layers.2.mlp", "model.norm", "lm_head")


class Seen:
    """State: how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def method(self, *_: Any) -> None:
        self.calls += 1


def zeroed(_: nn.Module, __: Any, output: Any) -> Any:
    """A hook that changes what its module computes."""
    return tuple(each * 0 for each in output) if isinstance(output, tuple) else output * 0


def doubled(_: nn.Module, __: Any, output: Any) -> Any:
    output.loss = 2 * output.loss
    return output


def next_tokens(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % tiny_models.VOCABULARY}


@torch.no_grad()
def loss(model: Any) -> float:
    return float(model(**batch()).loss)


@pytest.fixture
def streamed() -> Iterator[Any]:
    model = megacompile.stream(tiny_models.build().eval(), device="cpu")
    yield model
    model.megacompile.close()


# ---------------------------------------------------------------- before there is a copy
@pytest.mark.parametrize("inside", INSIDE)
def test_a_hook_inside_the_model_acts_in_its_copy(inside: str, streamed: Any) -> None:
    plain, calls = tiny_models.build().eval(), list[str]()
    for model in (plain, streamed):
        model.get_submodule(inside).register_forward_hook(zeroed)
    streamed.get_submodule(inside).register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    with streamed.megacompile.on_device() as native:
        assert loss(native) == pytest.approx(loss(plain), abs=1e-6) != pytest.approx(loss(tiny_models.build().eval()), abs=1e-6)
    assert len(calls) == 1
    streamed.generate(batch()["input_ids"], max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    assert len(calls) == 1 + 3, "once for each token"


@pytest.mark.parametrize("hook", [lambda seen: seen, lambda seen: seen.method], ids=["an object", "a method"])
def test_a_hook_that_remembers_remembers_calls_of_the_copy(hook: Callable[[Seen], Any], streamed: Any) -> None:
    seen = Seen()
    streamed.lm_head.register_forward_hook(hook(seen))
    with streamed.megacompile.on_device() as native:
        loss(native)
    assert seen.calls == 1


# ---------------------------------------------------------------- while a copy is kept
@pytest.mark.parametrize("inside", ["", "model.layers.2.mlp", "lm_head"])
def test_a_hook_that_is_registered_while_a_copy_is_kept_acts_in_its_next_use(inside: str, streamed: Any) -> None:
    seen = list[int]()
    with streamed.megacompile.on_device() as native:
        loss(native)
    handle = streamed.get_submodule(inside).register_forward_hook(lambda *_: seen.append(1))
    with streamed.megacompile.on_device() as native:
        loss(native)
    assert len(seen) == 1
    handle.remove()
    with streamed.megacompile.on_device() as native:
        loss(native)
    assert len(seen) == 1, "it was removed"


def test_a_hook_that_is_removed_while_a_copy_is_kept_acts_no_more(streamed: Any) -> None:
    expected = loss(tiny_models.build().eval())
    handle = streamed.lm_head.register_forward_hook(zeroed)
    with streamed.megacompile.on_device() as native:
        assert loss(native) != pytest.approx(expected, abs=1e-6)
    handle.remove()
    with streamed.megacompile.on_device() as native:
        assert loss(native) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_hook_that_is_removed_during_a_use_acts_no_more(by_itself: bool, streamed: Any) -> None:
    seen = list[int]()

    def hook(*_: Any) -> None:
        seen.append(1)
        if by_itself:
            handle.remove()

    handle = streamed.model.layers[0].register_forward_hook(hook)
    with streamed.megacompile.on_device() as native:
        loss(native)
        handle.remove()
        loss(native)
    assert len(seen) == 1


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_are_not_copied_with_what_they_hold(register: str, streamed: Any) -> None:
    class Holds(Seen):
        lock = threading.Lock()

        def __init__(self) -> None:
            super().__init__()
            self.own = threading.Lock()

        def __deepcopy__(self, _: Any) -> Any:
            raise AssertionError("it is copied")

    handle = getattr(streamed, register)(Holds())
    with streamed.megacompile.on_device() as native:
        loss(native)
    handle.remove()


def test_hooks_of_a_kept_copy_stay_the_same_objects(streamed: Any) -> None:
    """Compiled code is guarded by them."""
    def hooks(native: Any) -> list[Any]:
        return [*native.lm_head._forward_hooks.values(), *native.model.norm._forward_hooks.values()]

    def remembered(*_: Any) -> None: ...

    for hook in (remembered, Seen().method):
        streamed.lm_head.register_forward_hook(hook)
    with streamed.megacompile.on_device() as native:
        before = hooks(native)
    with streamed.megacompile.on_device() as native:
        assert len(before) == 2 and all(map(operator.is_, hooks(native), before))


def test_a_module_that_was_replaced_is_in_the_next_copy(streamed: Any) -> None:
    with streamed.megacompile.on_device() as native:
        before = loss(native)
    own = streamed.model.layers[0].mlp.act_fn
    streamed.model.layers[0].mlp.act_fn = nn.Tanh()
    with streamed.megacompile.on_device() as native:
        assert loss(native) != pytest.approx(before, abs=1e-6)
        streamed.model.layers[0].mlp.act_fn = nn.Sequential(own)
        with pytest.raises(megacompile.MegacompileError, match=r"leave the\s+block"), streamed.megacompile.on_device():
            raise AssertionError("it is another model")
    streamed.model.layers[0].mlp.act_fn = own
    with streamed.megacompile.on_device() as native:
        assert loss(native) == pytest.approx(before, abs=1e-6)


def test_hooks_of_layers_that_take_turns_stay_beside_those_of_the_user(streamed: Any) -> None:
    more, expected, seen = device_copies.bytes_beside(streamed, 0), loss(tiny_models.build().eval()), list[Tensor]()
    streamed.model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output))
    for uses in (1, 2):
        with streamed.megacompile.on_device(in_turns=True, more_bytes=more) as native:
            assert device_copies.turning(streamed) == 3 and loss(native) == pytest.approx(expected, abs=1e-6)
        assert len(seen) == uses


# ---------------------------------------------------------------- the model as a whole
@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_a_hook_of_the_whole_model_acts_once_in_streamed_calls_and_in_its_copy(
        kind: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was registered before `stream` or after."""
    monkeypatch.setattr(api, "capture", capture)  # not that of a model without hooks, which another test has left
    def hooked(model: Any) -> Any:
        if kind == "forward":
            model.register_forward_hook(doubled)
        else:
            model.register_forward_pre_hook(next_tokens, with_kwargs=True)
        return model

    plain = hooked(tiny_models.build().eval())
    model = copy.deepcopy(plain) if when == "before" else tiny_models.build().eval()
    model = megacompile.stream(model, device="cpu")
    if when == "after":
        hooked(model)
    with model.megacompile.on_device() as native:
        assert loss(native) == pytest.approx(loss(plain), abs=1e-5)
    assert loss(model) == pytest.approx(loss(plain), abs=1e-5)
    assert float(model(**batch()).loss.detach()) == pytest.approx(loss(plain), abs=1e-5), "also with gradients"
    model.megacompile.close()


def test_a_hook_inside_the_model_is_refused_in_streamed_calls(streamed: Any) -> None:
    handle = streamed.lm_head.register_forward_hook(zeroed)
    with pytest.raises(UnsupportedError, match=r"lm_head has a hook.*remove it"):
        loss(streamed)
    handle.remove()
    assert loss(streamed) == pytest.approx(loss(tiny_models.build().eval()), abs=1e-5)


def test_a_hook_of_the_whole_model_is_refused_where_no_call_would_run_it(streamed: Any) -> None:
    optimizer = megacompile.AdamW(streamed.parameters(), lr=1e-3)
    handle = streamed.register_forward_pre_hook(next_tokens, with_kwargs=True)
    for call in (lambda: streamed.megacompile.train_step(batch(), optimizer),
                 lambda: streamed.megacompile.last_hidden_state({"input_ids": batch()["input_ids"]})):
        with pytest.raises(UnsupportedError, match=r"the model has a hook.*remove it"):
            call()
    assert streamed.megacompile.compiled(batch()).spec.training, "looking at the program calls nothing"
    handle.remove()
    assert streamed.megacompile.train_step(batch(), optimizer).isfinite()


def test_a_method_of_a_module_that_is_a_hook_is_that_of_the_copys_module(streamed: Any) -> None:
    inner, seen = streamed.model.norm, list[nn.Module]()
    type(inner).remembered = lambda self, *_: seen.append(self)
    inner.register_forward_hook(inner.remembered)
    with streamed.megacompile.on_device() as native:
        loss(native)
        assert seen == [native.model.norm] != [inner]
    del type(inner).remembered


def test_hooks_with_which_transformers_collects_outputs_stay_in_the_copy(streamed: Any) -> None:
    for _ in range(3):
        with streamed.megacompile.on_device() as native, torch.no_grad():
            assert len(native(**batch(), output_hidden_states=True).hidden_states) == 4
        handle = streamed.register_forward_hook(lambda *_: None)
        handle.remove()
