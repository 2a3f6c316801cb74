"""Muon: `torch.optim.Muon` for matrices and AdamW for everything else, with the same bits wherever matrices are updated."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
from resumable import Decoder, steps
from tiny_models import assert_torn, batch, cut_power, same_bits, state_of
from torch import Tensor, nn

import megacompile
from megacompile import load_checkpoint, save_checkpoint
from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.runtime.optimizer.state_format import BFLOAT16, EIGHT_BITS
from megacompile.streaming.optimizer.muon import orthogonal

LINEAR = ("layers.0.1.weight", "layers.1.1.weight", "layers.2.1.weight")
FORMATS: dict[str, dict[str, str]] = {
    "float32": {}, "bfloat16": {"state_dtype": "bfloat16"}, "8bit": {"state_dtype": "8bit"},
    "8bit alone": {"state_dtype": "8bit", "master": "bfloat16"}}
formats = pytest.mark.parametrize("stored", FORMATS)


def streamed(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    return megacompile.stream(Decoder().to(dtype), layers="layers", device="cpu", micro_batch_size=2, **options)


@pytest.fixture
def model() -> Iterator[Any]:
    made = streamed()
    yield made
    made.megacompile.close()


def muon(model: Any, **options: Any) -> Any:
    return megacompile.Muon(model.parameters(), **{"lr": 1e-2, "max_grad_norm": 1.0, **options})


def weights_of(model: Any) -> dict[str, Tensor]:
    model.megacompile.synchronize()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------- against PyTorch
@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [
    {}, {"nesterov": False, "momentum": 0.4}, {"adjust_lr_fn": "original", "lr": 0.02}, {"weight_decay": 0.0, "ns_steps": 3}])
def test_it_is_muon_of_torch_for_matrices_and_adamw_for_the_rest(options: dict[str, Any]) -> None:
    model, plain = streamed(torch.float32), Decoder()
    plain.load_state_dict(model.state_dict())
    ours = muon(model, max_grad_norm=None, **options)
    named = {name: p for name, p in plain.named_parameters() if p.requires_grad and name != "unread"}
    given = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw", **options}
    theirs = (torch.optim.Muon([named.pop(name) for name in LINEAR], **given),
              torch.optim.AdamW(named.values(), lr=given["lr"], weight_decay=given["weight_decay"]))
    for seed in range(10):
        model(**batch(seed, rows=4)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                plain.get_parameter(name).grad = parameter.grad.clone()
        for optimizer in (ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = weights_of(model)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(found[name], parameter, rtol=0, atol=1e-5), name
    model.megacompile.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("ratio", [None, "original", "match_rms_adamw"])
def test_a_state_that_torch_has_saved_trains_on_as_there(ratio: str | None) -> None:
    """`eps` of torch, which is `ns_eps` here, among its options."""
    native = Decoder()
    model = megacompile.stream(copy.deepcopy(native), layers="layers", device="cpu")
    theirs = torch.optim.Muon([native.get_parameter(name) for name in LINEAR], lr=0.02, eps=0.5, adjust_lr_fn=ratio)
    for seed in range(2):
        native(**batch(seed)).backward()
        theirs.step()
        native.zero_grad()
    model.load_state_dict(native.state_dict())
    ours = megacompile.Muon([model.get_parameter(name) for name in LINEAR], eps=1e-3)
    ours.load_state_dict(theirs.state_dict())
    assert (ours.param_groups[0]["eps"], ours.param_groups[0]["ns_eps"]) == (1e-3, 0.5)
    for seed in (3, 4):
        for each, optimizer in ((native, theirs), (model, ours)):
            each(**batch(seed)).backward()
            optimizer.step()
            each.zero_grad()
    found = weights_of(model)
    for name in LINEAR:
        torch.testing.assert_close(found[name], native.get_parameter(name).detach(), rtol=0, atol=1e-5, msg=name)
    model.megacompile.close()


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (80, 32)])
def test_the_direction_has_the_bits_of_torch(shape: tuple[int, int]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz
    given = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    coefficients = (3.4445, -4.775, 2.0315)
    scratch = torch.empty(4 * given.numel() + 4 * min(shape) ** 2, dtype=torch.uint8)
    found = orthogonal(given, coefficients, 5, 1e-7, scratch)
    assert torch.equal(found, _zeropower_via_newtonschulz(given, coefficients, 5, 1e-7))
    assert 0.5 < torch.linalg.svdvals(found.float()).median() < 1.3


# ---------------------------------------------------------------- bits
@pytest.mark.sample(3)
@formats
@pytest.mark.parametrize("options", [
    dict(resident=("layers.1", "layers.0"), resident_state=("layers.0", "layers.1")),
    dict(resident="all", resident_state="all"), dict(visiting_state="all"), dict(deferred_moments=True),
    dict(checkpoint_interval=2), dict(reference=True)], ids=lambda each: next(reversed(each)))
def test_every_plan_has_the_same_bits(stored: str, options: dict[str, Any], model: Any) -> None:
    optimizer = muon(model, **FORMATS[stored])
    steps(model, optimizer, range(3))
    other = streamed(**options)
    again = muon(other, **FORMATS[stored])
    steps(other, again, range(3))
    assert same_bits(state_of(model, optimizer), state_of(other, again))
    other.megacompile.close()


@formats
def test_a_whole_step_has_the_bits_of_a_loop(stored: str, model: Any) -> None:
    other, found = streamed(), []
    for each, whole in ((model, False), (other, True)):
        optimizer = muon(each, **FORMATS[stored])
        steps(each, optimizer, range(3), whole)
        found.append(state_of(each, optimizer))
    assert same_bits(*found)
    other.megacompile.close()


@pytest.mark.sample(2)
@formats
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(stored: str, model: Any, tmp_path: Path) -> None:
    optimizer = muon(model, **FORMATS[stored])
    steps(model, optimizer, range(2))
    save_checkpoint(tmp_path, model, optimizer)
    steps(model, optimizer, range(2, 4))
    other = streamed()
    again = muon(other, **FORMATS[stored])
    load_checkpoint(tmp_path, other, again)
    steps(other, again, range(2, 4))
    assert same_bits(state_of(model, optimizer), state_of(other, again))
    other.megacompile.close()


def test_an_update_that_stops_between_visits_is_completed(model: Any) -> None:
    optimizer, other = muon(model), streamed()
    steps(model, optimizer, range(2))
    again = muon(other)
    steps(other, again, range(1))
    other.megacompile.synchronize()
    cut_power(other, "update_visiting", 2)
    other(**batch(1, rows=4)).backward()
    again.step()
    assert_torn(other)
    again.step()
    assert same_bits(state_of(model, optimizer), state_of(other, again))
    other.megacompile.close()


# ---------------------------------------------------------------- which parameters, and what is kept
def test_matrices_of_layers_keep_one_moment_and_everything_else_two(model: Any) -> None:
    optimizer = muon(model)
    steps(model, optimizer, range(1))
    kept = {name: set(optimizer.state[p]) - {"step"} for name, p in model.named_parameters() if p in optimizer.state}
    assert {name for name, keys in kept.items() if keys == {"momentum_buffer"}} == set(LINEAR)
    assert all(keys == {"exp_avg", "exp_avg_sq"} for name, keys in kept.items() if name not in LINEAR)


def test_a_group_may_leave_its_matrices_to_adamw(model: Any) -> None:
    first = [p for name, p in model.named_parameters() if name == LINEAR[0]]
    rest = [p for name, p in model.named_parameters() if name != LINEAR[0]]
    optimizer = megacompile.Muon([{"params": first, "matrices": False}, {"params": rest}])
    steps(model, optimizer, range(1))
    assert "exp_avg_sq" in optimizer.state[first[0]]


@pytest.mark.nightly(held_by=(
    "tests/model/test_muon.py::test_experts_and_parts_of_fused_matrices_are_matrices_by_themselves",
    "tests/model/test_muon.py::test_a_group_may_leave_its_matrices_to_adamw"))
def test_routers_are_matrices_unless_their_group_says_otherwise() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_experts=4,
                                 num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    plain = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, num_hidden_layers=2))
    model = megacompile.stream(plain, device="cpu")
    routers = {name: p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}
    others = {name: p for name, p in model.named_parameters() if name not in routers}
    assert len(routers) == 2
    for matrices in (True, False):
        megacompile.Muon([{"params": [*routers.values()], "matrices": matrices}, {"params": [*others.values()]}])
        whole = {name for name, memory in engine.states(model).items() if memory.kept.whole}
        assert (routers.keys() <= whole) == matrices == bool(routers.keys() & whole)
        assert {name for name in others if ".experts." in name or "_proj." in name} == whole - routers.keys()
    model.megacompile.close()


class Experts(nn.Module):
    """A stack of matrices, of which each is one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(3, 16, 32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btc,eco->bto", x, self.proj)[..., :16].tanh()


class Fused(nn.Module):
    """A fused matrix of parts with different numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(16, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv_proj(x)[..., 8:24].tanh()


def decoder_of(layer: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    plain = Decoder()
    plain.layers = nn.ModuleList(layer() for _ in range(2))
    return megacompile.stream(plain, layers="layers", device="cpu")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layer", "split", "parts"), [
    (Experts, None, [(e, slice(None)) for e in range(3)]), (Fused, (16, 8, 8), [slice(0, 16), slice(16, 24), slice(24, 32)]),
    (Fused, None, [slice(0, 32)])], ids=["experts", "split", "fused"])
def test_experts_and_parts_of_fused_matrices_are_matrices_by_themselves(
        layer: type[nn.Module], split: tuple[int, ...] | None, parts: list[Any]) -> None:
    model = decoder_of(layer)
    ((name, parameter),) = [(n, p) for n, p in model.named_parameters() if n.startswith("layers.0")]
    rest = [p for n, p in model.named_parameters() if p is not parameter and not n.startswith("layers.1")]
    other = [p for n, p in model.named_parameters() if n.startswith("layers.1")]
    optimizer = megacompile.Muon([{"params": [parameter], "split": split}, {"params": rest}, {"params": other}],
                                 weight_decay=0.0, lr=1e-2)
    before = weights_of(model)[name]
    model(**batch(0, rows=4)).backward()
    gradient = parameter.grad.clone()
    optimizer.step()
    moved = before - weights_of(model)[name]
    for part in parts:
        momentum = 0.05 * gradient[part]
        ahead = gradient[part].lerp(momentum, 0.95)
        scratch = torch.empty(4 * ahead.numel() + 4 * min(ahead.shape) ** 2, dtype=torch.uint8)
        direction = orthogonal(ahead, (3.4445, -4.775, 2.0315), 5, 1e-7, scratch)
        assert torch.allclose(moved[part], 1e-2 * 0.2 * max(ahead.shape) ** 0.5 * direction.float(), atol=1e-6)
    model.megacompile.close()


def test_blocks_that_two_matrices_would_share_are_kept_in_bfloat16() -> None:
    model = decoder_of(Fused)
    parameters = {name: p for name, p in model.named_parameters() if "qkv" in name}
    rest = [p for name, p in model.named_parameters() if "qkv" not in name]
    first, second = parameters.values()
    megacompile.Muon([{"params": [first], "split": (24, 8)}, {"params": [second], "split": (16, 16)}, {"params": rest}],
                     state_dtype="8bit")
    kept = {name: engine.states(model)[name].kept.format for name in parameters}
    assert [*kept.values()] == [BFLOAT16, EIGHT_BITS], "24 x 16 elements are one and a half blocks, 16 x 16 are one"
    model.megacompile.close()


# ---------------------------------------------------------------- plans
def test_matrices_stay_on_the_device_or_visit_it(model: Any) -> None:
    optimizer = muon(model)
    steps(model, optimizer, range(1))
    plan = model.megacompile.plan
    assert set(plan.visiting_state) == {"layers.0", "layers.1", "layers.2"} and not plan.resident_state
    visited = [slot.bytes for name, slot in model.megacompile.program(batch(0, rows=4)).slots.items() if name.startswith("V")]
    largest = max(x.visit_bytes for x in engine.layouts(model).values())
    assert largest > 16 * 16 * (2 + 2 + 2 + 4 + 4 + 4) and max(visited) >= largest


@pytest.mark.nightly(held_by=(
    "tests/model/test_muon.py::test_matrices_stay_on_the_device_or_visit_it",
    "tests/model/test_state_table.py::test_the_first_choice_that_fits_is_proposed_at_every_size_of_the_host"))
def test_a_plan_for_muon_holds_its_matrices_and_their_products() -> None:
    model = tiny_models.build(bf16=True, hidden_size=256, intermediate_size=1024, num_hidden_layers=6)
    found = {}
    for optim in ("adamw", "muon"):
        made = megacompile.schedule(model, batch=2, length=64, hardware="h200", optim=optim, resident_state=())
        found[optim] = made
    layers = {tile for tile in found["muon"].tiling.layouts if ".layers." in tile}
    assert set(found["muon"].plan.visiting_state) >= layers
    host = {optim: made.tiling.host_bytes() for optim, made in found.items()}
    assert host["muon"] < host["adamw"]
    assert found["muon"].outlook().states and all(not row.choice.on_arrival for row in found["muon"].outlook().states)


# ---------------------------------------------------------------- refusals
@pytest.mark.nightly(held_by="tests/model/test_state_table.py::test_a_row_s_bytes_are_what_is_allocated")
def test_what_whole_matrices_do_not_allow_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="leave update out"):
        muon(model, overlap="backward", max_grad_norm=None)
    with pytest.raises(UnsupportedError, match="one of the group has 16"):
        muon(model, split=(4, 4))
    with pytest.raises(MegacompileError, match="ns_steps=0 is out of range"):
        muon(model, ns_steps=0)
    with pytest.raises(UnsupportedError, match="leave update='arrival' out"):
        megacompile.schedule(tiny_models.build(), batch=2, length=16, hardware="h200", optim="muon", update="arrival")
    optimizer = muon(model)
    optimizer.param_groups[0]["matrices"] = False
    with pytest.raises(MegacompileError, match="make a new optimizer"):
        steps(model, optimizer, range(1))
