"""A layer whose experts are divided among several calls trains as if it were whole, and its parameters stay whole."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, assert_same_gradients, assert_same_weights, batch, same_bits, train_step, weights
from torch import nn

import megacompile
from megacompile.errors import CaptureError, InsufficientMemoryError, MegacompileError, UnsupportedError
from megacompile.frontend.graph.expert_pieces import Rows, counts_of
from megacompile.frontend.templates.template import Call, Source
from megacompile.frontend.tracing.layers import find_layers
from megacompile.planning.config import StreamConfig
from megacompile.planning.expert_split import expert_pieces
from megacompile.weights.moving import build_store
from megacompile.weights.tiling import Tiling

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts_per_tok": 2}
#: Class of the config -> its fields, beside `_SIZES`.
_FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"num_local_experts": 3},
    "Qwen3MoeConfig": {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 5, "norm_topk_prob": True},
    "GptOssConfig": {"head_dim": 8, "num_local_experts": 5, "layer_types": ["sliding_attention", "full_attention"],
                     "sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "DeepseekV3Config": {"num_key_value_heads": 2, "moe_intermediate_size": 12, "n_routed_experts": 6, "n_shared_experts": 1,
                         "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
                         "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_hidden_layers": 3},
}
_PIECE = "model.layers.0.mlp.experts.pieces.0"


def _model(family: str = "MixtralConfig") -> Any:
    """Large random weights, so that every expert's output says something; biases and norms too."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family)(**{**_SIZES, **_FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def divided() -> Iterator[Any]:
    """Experts 0 and 1 in one piece, expert 2 in another."""
    model = megacompile.stream(_model(), device="cpu", expert_pieces=2, micro_batch_size=2)
    yield model
    model.megacompile.close()


def _fresh(model: Any) -> Any:
    model.load_state_dict(_model().state_dict())
    model.zero_grad()
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("interval", [1, 2])
def test_loss_and_every_gradient_are_native_pytorchs(divided: Any, interval: int) -> None:
    """In micro-batches of 2, 2 and 1 sequences."""
    native, model = _model(), _fresh(divided)
    model.megacompile.replan(checkpoint_interval=interval)
    assert [len(call.tiles) for call in model.megacompile.program(batch(rows=5)).calls] == [1] * 8
    for each in (native, model):
        each.loss = each(**batch(rows=5)).loss
        each.loss.backward()
    assert abs(model.loss.item() - native.loss.item()) < 1e-5
    assert_same_gradients(model, native)


def test_five_clipped_steps_are_native_pytorchs(divided: Any) -> None:
    """The norm that clips is of whole parameters, of which each piece has a share."""
    native, model = _model(), _fresh(divided)
    ours = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(native.parameters(), lr=1e-2)
    for seed in range(5):
        train_step(model, ours, seed)
        native(**batch(seed)).loss.backward()
        norm = nn.utils.clip_grad_norm_(native.parameters(), 0.5)
        assert norm > 0.5 and ours.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        theirs.step()
        theirs.zero_grad()
    model.megacompile.synchronize()
    assert_same_weights(model, native)


def test_gradients_that_the_user_clips_have_their_norms_in_every_piece(divided: Any) -> None:
    model = _fresh(divided)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    model(**batch()).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(0.25, rel=1e-4)


@pytest.mark.nightly(held_by=(
    "tests/model/test_expert_pieces.py::test_five_clipped_steps_are_native_pytorchs",
    "tests/model/test_visiting.py::test_visiting_tiles_get_the_bits_of_updates_on_the_host"))
def test_the_same_bits_under_every_plan(divided: Any) -> None:
    """Weights, and updates, of some pieces on the device; all residuals kept; the reference's order of things."""
    found = []
    for options in ({}, {"resident": (_PIECE,)}, {"resident_state": (_PIECE,), "resident": ()}, {"saved_layers": 3},
                    {"visiting_state": (_PIECE,), "saved_layers": None, "resident_state": None}):
        model = _fresh(divided)
        model.megacompile.replan(**options)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        for seed in range(2):
            train_step(model, optimizer, seed)
        model.megacompile.synchronize()
        found.append(weights(model))
    model.megacompile.replan(saved_layers=None, resident_state=None, visiting_state=None)
    assert all(same_bits(each, found[0]) for each in found)


def test_parameters_stay_whole(divided: Any, tmp_path: Path) -> None:
    """In the model, its gradients, its optimizer's state and its files."""
    model, plain = _fresh(divided), _model()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer)
    assert [(n, p.shape, p.is_contiguous()) for n, p in model.named_parameters()] == [
        (n, p.shape, True) for n, p in plain.named_parameters()]
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
    model.save_pretrained(tmp_path)
    assert same_bits(weights(type(plain).from_pretrained(tmp_path)), weights(model))


@pytest.mark.nightly(held_by=(
    "tests/model/test_expert_pieces.py::test_parameters_stay_whole",
    "tests/model/test_expert_pieces.py::test_five_clipped_steps_are_native_pytorchs"))
def test_checkpoints_with_pieces_and_without_are_each_others(divided: Any, tmp_path: Path) -> None:
    def steps(model: Any, optimizer: Any, seeds: range) -> dict[str, torch.Tensor]:
        for seed in seeds:
            train_step(model, optimizer, seed)
        model.megacompile.synchronize()
        moments = {f"{n}.v": optimizer.state[p]["exp_avg_sq"].clone() for n, p in model.named_parameters()}
        return weights(model) | moments

    whole = megacompile.stream(_model(), device="cpu", micro_batch_size=2)
    pairs = [(_fresh(model), megacompile.AdamW(model.parameters(), lr=1e-2)) for model in (divided, whole)]
    for number, ((model, optimizer), (other, others)) in enumerate((pairs, pairs[::-1])):
        saved = steps(model, optimizer, range(2))
        megacompile.save_checkpoint(tmp_path / str(number), model, optimizer)
        steps(other, others, range(2, 3))
        megacompile.load_checkpoint(tmp_path / str(number), other, others)
        assert same_bits(steps(other, others, range(0)), saved)
    whole.megacompile.close()


def test_pieces_are_decided_once(divided: Any) -> None:
    with pytest.raises(MegacompileError, match=r"replan\(\) cannot change expert_pieces"):
        divided.megacompile.replan(expert_pieces=3)


# ---------------------------------------------------------------- how many pieces, and where they lie
def test_experts_are_divided_where_half_of_the_device_cannot_hold_those_under_way() -> None:
    """Two slots of weights, two of gradients, and sums: 20 bytes a parameter in float32, 8 where experts are frozen."""
    model = _model()
    each = sum(p.numel() for n, p in model.named_parameters() if "layers.0.mlp.experts" in n) // 3

    def pieces(device_bytes: int, **options: Any) -> int:
        return expert_pieces(model, find_layers(model), StreamConfig.of(device="cpu", **options), device_bytes)

    assert [pieces(2 * 20 * each * held) for held in (3, 2, 1)] == [1, 2, 3]
    assert pieces(2 * 20 * each * 3 - 1) == 2 and pieces(1) == 3
    assert pieces(1, expert_pieces=1) == 1 and pieces(1 << 40, expert_pieces=2) == 2
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    assert [pieces(2 * 8 * each * held) for held in (3, 2, 1)] == [1, 2, 3]


def test_what_has_no_experts_is_not_divided() -> None:
    import tiny_models

    plain = tiny_models.build()
    assert expert_pieces(plain, find_layers(plain), StreamConfig.of(device="cpu"), 1) == 1
    with pytest.raises(UnsupportedError, match="expert_pieces=2 divides experts, and Qwen2ForCausalLM has none"):
        megacompile.stream(plain, device="cpu", expert_pieces=2)


@pytest.mark.parametrize(("experts", "pieces"), [(8, 3), (128, 5), (4, 4), (3, 9), (7, 1)])
def test_pieces_differ_by_one_expert_at_most(experts: int, pieces: int) -> None:
    counts = counts_of(experts, pieces)
    assert sum(counts) == experts and len(counts) == min(experts, pieces) and max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.randn(5, 3, 7)), nn.Parameter(torch.randn(5, 3))
        self.norm = nn.Parameter(torch.randn(11))


def test_a_tile_part_is_copied_into_a_slot_and_back_to_its_place() -> None:
    """Experts 2 to 4 of 5; what the piece reads beside them has a tile of its own."""
    model = nn.ModuleDict({"experts": _Experts()})
    experts: Any = model["experts"]
    bounds = enumerate([(0, 2), (2, 5)])
    rows = {f"pieces.{i}.{name}": Rows(f"experts.{name}", *each) for i, each in bounds for name in ("up", "bias")}
    calls = [Call(f"pieces.{i}", "t", tuple(Source("parameter", name) for name in (
        f"pieces.{i}.up", f"pieces.{i}.bias", *["experts.norm"] * i))) for i in range(2)]
    tiling = Tiling.of(model, calls, None, rows)
    assert tiling.tiles_of == {"pieces.0": ("pieces.0",), "pieces.1": ("pieces.1", "pieces.1.rest")}
    assert tiling.streamed_at["experts.up"] == (("pieces.0", 0), ("pieces.1", 0))
    assert list(tiling.host) == ["experts", "pieces.1.rest"]
    old = copy.deepcopy(experts)
    store, layout = build_store(model, tiling), tiling.layouts["pieces.1"]
    slot = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
    for here, there in store["pieces.1"].weights_with(slot):
        here.copy_(there)
    up, bias = layout.views(layout.flat(slot))
    assert torch.equal(up, old.up[2:]) and torch.equal(bias, old.bias[2:])
    up.mul_(2)
    for here, there in store["pieces.1"].weights_with(slot):
        there.copy_(here)
    assert torch.equal(experts.up, torch.cat([old.up[:2], 2 * old.up[2:]])) and torch.equal(experts.bias, old.bias)


# ---------------------------------------------------------------- all families, and the largest
@pytest.mark.nightly(held_by="tests/model/test_expert_pieces.py::test_loss_and_every_gradient_are_native_pytorchs")
@pytest.mark.parametrize(("pieces", "options"), [(2, {}), (3, {"checkpoint_interval": 2}), (6, {"micro_batch_size": 2})],
                         ids=str)
@pytest.mark.parametrize("family", _FAMILIES)
def test_every_family_trains_as_native_pytorch_does(family: str, pieces: int, options: dict[str, Any]) -> None:
    native = _model(family)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", expert_pieces=pieces, **options)
    for each in (native, model):
        each.loss = each(**batch(rows=5)).loss
        each.loss.backward()
    assert abs(model.loss.item() - native.loss.item()) < 1e-5
    assert_same_gradients(model, native)
    model.megacompile.close()


@pytest.mark.nightly(
    held_by="tests/model/test_expert_pieces.py::test_experts_are_divided_where_half_of_the_device_cannot_hold_those_under_way")
def test_gpt_oss_120b_has_a_plan_in_24_gib() -> None:
    """A layer's experts are 6 GB: two slots of weights, two of gradients and a sum would not fit."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GptOssConfig(), dtype=torch.bfloat16)
    options: dict[str, Any] = dict(batch=1, length=2048, device_memory="24GiB", host_memory="2TiB", hardware="rtx3090")
    schedule = megacompile.schedule(model, **options)
    largest = max(tile.weight_bytes for tile in schedule.program().tiles.values())
    assert len(schedule.captured.calls) == 2 + 36 * 4 and largest < 2.2 * 2**30
    assert schedule.planner.estimate(schedule.plan).total <= 24 * 2**30
    assert schedule.simulate().step_s > 0
    with pytest.raises(InsufficientMemoryError):
        megacompile.schedule(model, **options, expert_pieces=1)


class _Twice(nn.Module):
    """Goes through its experts a second time."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return self.block(self.block(hidden_states))


class _InPlace(_Twice):
    """Changes what its experts have read."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        seen = 2 * hidden_states
        given = self.block(seen)
        seen.add_(given)
        return seen


class _Switching(_Twice):
    """Has a part of its own without gradients, after the experts."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        given = self.block(hidden_states)
        with torch.no_grad():
            scale = given.abs().mean()
        return given / scale


@pytest.mark.nightly(held_by="tests/model/test_expert_pieces.py::test_what_has_no_experts_is_not_divided")
@pytest.mark.parametrize(("layer", "why"), [
    (_Twice, "runs its experts more than once"), (_InPlace, "changes a value in place that pieces of its experts read"),
    (_Switching, "switches gradients or autocast around its experts")])
def test_layers_whose_experts_cannot_be_divided_exactly_are_refused(layer: type[_Twice], why: str) -> None:
    model = _model()
    model.model.layers[1].mlp = layer(model.model.layers[1].mlp)
    with pytest.raises(CaptureError, match=rf"{why}.*keep the experts whole \(expert_pieces=1\)"):
        megacompile.stream(model, device="cpu", expert_pieces=2)
