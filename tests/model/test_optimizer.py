"""Options, groups, states and gradients changed from outside: a streamed optimizer behaves like `torch.optim`."""
from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import engine
import pytest
import tiny_models
import torch
from tiny_models import assert_same_weights, batch, same_bits, train_step, weights

import megacompile
from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.ir.program import Lane, op_of
from megacompile.streaming.user_tensors import gradients

ADAMW = dict(lr=1e-2, eps=1e-4)


def both(model: Any, native: Any) -> list[tuple[Any, Any]]:
    return [(model, megacompile.AdamW), (native, torch.optim.AdamW)]


# ---------------------------------------------------------------- groups and options

@pytest.mark.parametrize("how", ["add_param_group", "append"])
def test_parameters_that_are_added_later_are_updated_from_then_on(model: Any, native: Any, how: str) -> None:
    for each, kind in both(model, native):
        first, *others = each.parameters()
        optimizer = kind(others[:3], **ADAMW)
        train_step(each, optimizer)
        if how == "append":
            optimizer.param_groups[0]["params"] += [first, *others[3:]]
        else:
            optimizer.add_param_group({"params": [first, *others[3:]], "weight_decay": 0.5})
        for seed in range(2):
            each(**batch(seed)).loss.backward()
            optimizer.step()
            each.zero_grad()
        assert [int(optimizer.state[p]["step"]) for p in (first, others[0])] == [2, 3]
    assert_same_weights(model, native)


def test_a_group_that_is_refused_is_not_added(model: Any) -> None:
    first, *others = model.parameters()
    optimizer = megacompile.AdamW(others, **ADAMW)
    for group in ({"params": [torch.nn.Parameter(torch.zeros(2))]}, {"params": [first], "lr": -1.0}):
        with pytest.raises(MegacompileError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    train_step(model, optimizer)


def test_a_parameter_that_is_in_the_groups_twice_is_refused(model: Any) -> None:
    first, *others = model.parameters()
    optimizer = megacompile.AdamW([first, *others], **ADAMW)
    optimizer.param_groups[0]["params"].append(first)
    model(**batch(0)).loss.backward()
    with pytest.raises(MegacompileError, match="a parameter is in the optimizer's groups twice"):
        optimizer.step()


@pytest.mark.sample(4)
@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize(("option", "value"), [
    ("maximize", True), ("decoupled_weight_decay", False), ("betas", (1, 1)), ("betas", torch.ones(2)), ("lr", -1e-3),
    ("weight_decay", torch.tensor(-0.1)), ("eps", float("nan")), ("lr", "1e-3")], ids=str)
def test_an_option_that_is_set_later_is_checked_before_anything_changes(
        model: Any, option: str, value: Any, overlap: str | None) -> None:
    optimizer = megacompile.AdamW(model.parameters(), overlap=overlap, **ADAMW)
    start = weights(model)
    optimizer.param_groups[0][option] = value
    with pytest.raises(MegacompileError, match=option):
        train_step(model, optimizer)
    model.zero_grad()
    with pytest.raises(MegacompileError, match=option):
        model.megacompile.train_step(batch(0), optimizer)
    assert same_bits(weights(model), start) and all(state["step"] == 0 for state in optimizer.state.values())


def test_an_option_of_the_whole_optimizer_is_checked_when_it_is_set(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), **ADAMW)
    with pytest.raises(MegacompileError, match=r"max_grad_norm=-1.0 is out of range"):
        optimizer.max_grad_norm = -1.0
    del optimizer.param_groups[0]["eps"]
    model(**batch(0)).loss.backward()
    with pytest.raises(MegacompileError, match="a parameter group has no eps"):
        optimizer.step()


@pytest.mark.parametrize("option", ["lr", "weight_decay", "betas"])
def test_what_is_changed_after_a_step_does_not_count_for_that_step(model: Any, native: Any, option: str) -> None:
    for each, kind in both(model, native):
        optimizer = kind(each.parameters(), **ADAMW)
        group = optimizer.param_groups[0]
        group[option] = [0.9, 0.99] if option == "betas" else torch.tensor(1e-2)
        each(**batch(0)).loss.backward()
        if each is model:
            engine.delay(model, lambda lane: time.sleep(0.01) if lane == Lane.CPU else None)
        optimizer.step()
        if option == "betas":
            group["betas"][:] = 0.1, 0.2
        else:
            group[option].fill_(0.3)
    assert_same_weights(model, native)


def test_a_state_of_adam_is_loaded_as_torch_s_adamw_loads_it(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), **ADAMW)
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(p.shape)) for p in model.parameters()], lr=1e-3)
    optimizer.load_state_dict(adam.state_dict())
    train_step(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-3


# ---------------------------------------------------------------- state

RESETS: dict[str, Any] = {
    "clear": lambda o, p: o.state.clear(),
    "another mapping": lambda o, p: setattr(o, "state", defaultdict(dict)),
    "those that are left": lambda o, p: setattr(
        o, "state", defaultdict(dict, {k: v for k, v in o.state.items() if k is not p})),
    "pop": lambda o, p: o.state.pop(p),
    "del": lambda o, p: o.state.__delitem__(p),
    "popitem": lambda o, p: o.state.popitem(),
    "empty": lambda o, p: o.state.__setitem__(p, {}),
    "cleared": lambda o, p: o.state[p].clear(),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("reset", RESETS)
def test_a_state_that_is_removed_starts_anew_at_the_next_step(model: Any, native: Any, reset: str) -> None:
    counts = []
    for each, kind in both(model, native):
        optimizer = kind(each.parameters(), **ADAMW)
        for seed in range(2):
            train_step(each, optimizer, seed)
        RESETS[reset](optimizer, each.model.layers[1].mlp.up_proj.weight)
        for seed in range(2, 4):
            train_step(each, optimizer, seed)
        counts.append([int(optimizer.state[p]["step"]) for p in each.parameters()])
    assert counts[0] == counts[1] and 2 in counts[0]
    assert_same_weights(model, native)


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_a_state_that_is_removed_starts_anew_in_whole_steps_and_on_arrival(
        model: Any, native: Any, overlap: str | None) -> None:
    for each, kind in both(model, native):
        optimizer = kind(each.parameters(), **ADAMW, **({"overlap": overlap} if each is model else {}))
        for seed in range(4):
            if seed == 2:
                optimizer.state.clear()
            if each is model and seed % 2:
                model.megacompile.train_step(batch(seed), optimizer)
            else:
                train_step(each, optimizer, seed)
    assert_same_weights(model, native)


def test_no_reset_of_the_state_loses_the_low_bits_of_a_master(bf16_model: Any) -> None:
    optimizer = megacompile.AdamW(bf16_model.parameters(), lr=1e-2)
    train_step(bf16_model, optimizer)
    masters = [optimizer.master(p) for p in bf16_model.parameters()]
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    optimizer.state.clear()
    saved = copy.deepcopy(optimizer.state_dict())
    bf16_model.load_state_dict(weights(bf16_model))  # as from a file, which has bf16 alone
    parameter = bf16_model.lm_head.weight
    assert torch.equal(optimizer.master(parameter), parameter.float())
    optimizer = megacompile.AdamW(bf16_model.parameters(), lr=1e-2)
    optimizer.load_state_dict(saved)
    assert all(torch.equal(optimizer.master(p), m) for p, m in zip(bf16_model.parameters(), masters, strict=True))
    assert not any(state["exp_avg"].any() for state in optimizer.state.values())


def test_part_of_a_state_that_is_removed_is_refused(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), **ADAMW)
    del optimizer.state[model.lm_head.weight]["exp_avg"]
    with pytest.raises(MegacompileError, match=r"state of lm_head.weight has no exp_avg: remove all of it"):
        train_step(model, optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("key", "value"), [("exp_avg", torch.zeros(1)), ("step", -1), ("step", "x"), ("step", 2.5)])
def test_a_state_that_no_step_can_have_is_refused_when_it_is_assigned(model: Any, key: str, value: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), **ADAMW)
    with pytest.raises(MegacompileError, match=f"the {key} of lm_head.weight"):
        optimizer.state[model.lm_head.weight][key] = value
    train_step(model, optimizer)


def test_states_may_be_written_exchanged_and_put_back(model: Any, native: Any) -> None:
    for each, kind in both(model, native):
        optimizer = kind(each.parameters(), **ADAMW)
        one, other, third = (layer.mlp.up_proj.weight for layer in each.model.layers)
        train_step(each, optimizer)
        state = optimizer.state
        state[one], state[other] = state[other], state[one]
        state[third].update(step=torch.tensor(7.0), exp_avg=torch.full_like(third, 1e-3))
        kept = state.pop(each.lm_head.weight)
        train_step(each, optimizer, 1)
        optimizer.state[each.lm_head.weight] = kept
        train_step(each, optimizer, 2)
        assert [int(optimizer.state[p]["step"]) for p in (third, each.lm_head.weight)] == [9, 2]
    assert_same_weights(model, native)


# ---------------------------------------------------------------- several optimizers

def test_two_optimizers_of_disjoint_parameters_train_as_they_do_natively(model: Any, native: Any) -> None:
    for each, kind in both(model, native):
        parameters = list(each.parameters())
        optimizers = [kind(parameters[::2], **ADAMW), kind(parameters[1::2], lr=3e-2, eps=1e-4, weight_decay=0.3)]
        for seed in range(4):
            each(**batch(seed)).loss.backward()
            for optimizer in optimizers if seed % 2 else optimizers[:1]:
                optimizer.step()
            each.zero_grad()
        assert [int(o.state[o.param_groups[0]["params"][0]]["step"]) for o in optimizers] == [4, 2]
    assert_same_weights(model, native)


USES: dict[str, Any] = {
    "step": lambda o, m, folder: o.step(), "state": lambda o, m, folder: o.state,
    "state_dict": lambda o, m, folder: o.state_dict(),
    "load_state_dict": lambda o, m, folder: o.load_state_dict({}), "set state": lambda o, m, folder: setattr(o, "state", {}),
    "add_param_group": lambda o, m, folder: o.add_param_group({"params": []}),
    "train_step": lambda o, m, folder: m.megacompile.train_step(batch(0), o),
    "checkpoint": lambda o, m, folder: megacompile.save_checkpoint(folder, m, o),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("use", USES)
def test_an_optimizer_whose_parameters_another_one_has_taken_over_raises(model: Any, use: str, tmp_path: Path) -> None:
    former = megacompile.AdamW(model.parameters(), **ADAMW)
    train_step(model, former)
    optimizer = megacompile.AdamW([model.lm_head.weight], **ADAMW)
    start = weights(model)
    with pytest.raises(MegacompileError, match=r"another optimizer, made later, updates lm_head.weight now"):
        USES[use](former, model, tmp_path)
    assert same_bits(weights(model), start)
    train_step(model, optimizer)


def test_a_parameter_that_another_optimizer_is_given_later_ends_updates_on_arrival(model: Any) -> None:
    first, *others = model.parameters()
    former = megacompile.AdamW(model.parameters(), overlap="backward", **ADAMW)
    optimizer = megacompile.AdamW(others, **ADAMW)
    former = megacompile.AdamW([first], overlap="backward", **ADAMW)
    optimizer.add_param_group({"params": [first]})
    train_step(model, optimizer)
    with pytest.raises(MegacompileError, match=r"made later, updates model.embed_tokens.weight now"):
        former.step()


def test_an_optimizer_that_is_made_again_begins_anew_and_may_take_the_state_over(model: Any, native: Any) -> None:
    for each, kind in both(model, native):
        former = kind(each.parameters(), **ADAMW)
        train_step(each, former)
        saved = former.state_dict()
        optimizer = kind(each.parameters(), **ADAMW)
        train_step(each, optimizer, 1)
        optimizer = kind(each.parameters(), **ADAMW)
        optimizer.load_state_dict(saved)
        train_step(each, optimizer, 2)
    assert_same_weights(model, native)


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", ["train_step", "loop", "arrival"])
@pytest.mark.parametrize("garbage", [False, True], ids=["dropped", "garbage"])
def test_a_new_optimizer_copies_no_state_of_one_that_nobody_has(model: Any, how: str, garbage: bool) -> None:
    """A second copy of the moments may not fit."""
    optimizer: Any = megacompile.AdamW(model.parameters(), overlap="backward" if how == "arrival" else None)
    if how == "train_step":
        model.megacompile.train_step(batch(0), optimizer)
    else:
        train_step(model, optimizer)
    model.megacompile.synchronize()
    gc.disable()
    try:
        if garbage:
            optimizer.itself = optimizer
        del optimizer
        with mock.patch.object(gradients, "move") as move:
            megacompile.AdamW(model.parameters())
        move.assert_not_called()
    finally:
        gc.enable()


def test_a_constructor_that_is_refused_takes_nothing_over(model: Any) -> None:
    former = megacompile.AdamW(model.parameters(), **ADAMW)
    train_step(model, former)
    with pytest.raises(UnsupportedError):
        megacompile.AdamW([{"params": [model.lm_head.weight]}, {"params": [model.model.norm.weight], "amsgrad": True}])
    assert former.state[model.lm_head.weight]["exp_avg"].any()
    train_step(model, former)


def test_what_takes_one_optimizer_is_refused_beside_another(model: Any, tmp_path: Path) -> None:
    first, *others = model.parameters()
    optimizer, other = megacompile.AdamW(others, **ADAMW), megacompile.AdamW([first], **ADAMW)
    for act in (lambda: model.megacompile.train_step(batch(0), optimizer),
                lambda: megacompile.save_checkpoint(tmp_path, model, optimizer)):
        with pytest.raises(MegacompileError, match=r"one optimizer, and another one updates model.embed_tokens"):
            act()
    del other
    model.megacompile.train_step(batch(0), optimizer)


# ---------------------------------------------------------------- gradients

@pytest.mark.parametrize("unscale", [True, False])
def test_a_gradient_scaler_trains_and_clips_as_without_one(model: Any, native: Any, unscale: bool) -> None:
    optimizer = megacompile.AdamW(model.parameters(), max_grad_norm=0.5, **ADAMW)
    theirs = torch.optim.AdamW(native.parameters(), **ADAMW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for seed in range(3):
        scaler.scale(model(**batch(seed)).loss).backward()
        if seed == 1:  # an overflow: the step is left out
            model.lm_head.weight.grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        if seed != 1:
            native(**batch(seed)).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(native.parameters(), 0.5)
            theirs.step()
            native.zero_grad()
            assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert_same_weights(model, native)


@pytest.mark.sample(4)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("change", ["norm", "value", "data", "numpy"])
def test_the_norm_is_of_the_gradients_that_the_step_uses(model: Any, change: str, foreach: bool) -> None:
    optimizer = megacompile.AdamW(model.parameters(), max_grad_norm=100.0, **ADAMW)
    model(**batch(0)).loss.backward()
    if change == "norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3, foreach=foreach)
    elif change == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)
    for parameter in model.parameters():
        if change == "data":
            parameter.grad.data.mul_(0.1)
        elif change == "numpy":
            parameter.grad.numpy().__imul__(0.1)
    expected = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("whole_step", [True, False])
def test_the_norm_is_known_before_the_update_is_done(model: Any, whole_step: bool) -> None:
    optimizer = megacompile.AdamW(model.parameters(), max_grad_norm=1.0, **ADAMW)
    released = threading.Event()
    engine.probe(model, lambda node: op_of(node).name == "update" and released.wait(60))
    begun = time.monotonic()
    if whole_step:
        model.megacompile.train_step(batch(0), optimizer)
    else:
        model(**batch(0)).loss.backward()
        optimizer.step()
    assert optimizer.grad_norm > 0 and time.monotonic() - begun < 60
    assert not engine.updating(model).done
    released.set()
    model.megacompile.synchronize()
    assert engine.updating(model).done


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_may_be_exchanged_shared_and_transposed(model: Any, native: Any, accumulate: bool) -> None:
    for each, kind in both(model, native):
        optimizer = kind(each.parameters(), **ADAMW)
        each(**batch(0)).loss.backward()
        one, other, third = each.model.layers
        p, q = one.mlp.up_proj.weight, other.mlp.up_proj.weight
        p.grad, q.grad = q.grad, p.grad
        third.self_attn.q_proj.weight.grad = third.self_attn.q_proj.weight.grad.t()
        one.mlp.down_proj.weight.grad = third.mlp.down_proj.weight.grad
        other.mlp.gate_proj.weight.grad, third.mlp.gate_proj.weight.grad = third.mlp.gate_proj.weight.grad, None
        if accumulate:
            each(**batch(1)).loss.backward()
        optimizer.step()
        each(**batch(2)).loss.backward()  # adds to all of them
    assert_same_weights(model, native)
    tiny_models.assert_same_gradients(model, native, 1e-4)


@pytest.mark.parametrize("then", ["backward", "train_step", "replaced"])
def test_a_gradient_that_is_kept_keeps_its_values(model: Any, then: str) -> None:
    optimizer = megacompile.AdamW(model.parameters(), **ADAMW)
    model(**batch(0)).loss.backward()
    kept = {name: p.grad for name, p in model.named_parameters()}
    expected = {name: gradient.clone() for name, gradient in kept.items()}
    if then == "replaced":
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    else:
        model.zero_grad()
        for seed in range(1, 3):
            if then == "backward":
                train_step(model, optimizer, seed)
            else:
                model.megacompile.train_step(batch(seed), optimizer)
    model.megacompile.synchronize()
    assert same_bits(kept, expected)


def test_views_of_a_gradient_that_are_kept_are_told_of_once(model: Any) -> None:
    engine.gradients(model)._warned = False
    model(**batch(0)).loss.backward()
    view = model.lm_head.weight.grad.view(-1)
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"a view of an earlier gradient of lm_head\.weight .* clone\(\) what you keep"):
        model(**batch(1)).loss.backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch(2)).loss.backward()
    assert torch.equal(view, model.lm_head.weight.grad.view(-1))


def test_a_sparse_gradient_is_refused(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), **ADAMW)
    model(**batch(0)).loss.backward()
    model.lm_head.weight.grad = model.lm_head.weight.grad.to_sparse()
    with pytest.raises(UnsupportedError, match=r"the gradient of lm_head.weight is torch.sparse_coo"):
        optimizer.step()
    model.zero_grad()
    train_step(model, optimizer)


def test_hooks_of_loading_are_called_and_may_change_what_is_loaded(model: Any, native: Any) -> None:
    for each, kind in both(model, native):
        optimizer = kind(each.parameters(), **ADAMW)
        train_step(each, optimizer)
        saved, called = copy.deepcopy(optimizer.state_dict()), []

        def halved(_: Any, state: dict[str, Any], called: list[str] = called) -> dict[str, Any]:
            called.append("before")
            return {**state, "param_groups": [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]}

        optimizer.register_load_state_dict_pre_hook(halved)
        optimizer.register_load_state_dict_post_hook(lambda _, called=called: called.append("after"))
        optimizer.load_state_dict(saved)
        assert called == ["before", "after"] and optimizer.param_groups[0]["lr"] == ADAMW["lr"] / 2
        assert saved["param_groups"][0]["lr"] == ADAMW["lr"], "the hook has changed the caller's state"
        train_step(each, optimizer)
    assert_same_weights(model, native)
