"""Every optimizer and format of state: the same bits under every plan, after every pause, and after a resume."""
from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
import torch
from resumable import Decoder, Streamed, steps
from tiny_models import assert_torn, batch, cut_power, same_bits, state_of
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import megacompile
from megacompile import load_checkpoint, save_checkpoint
from megacompile.errors import CheckpointError, InsufficientMemoryError, MegacompileError
from megacompile.ir.program import Lane
from megacompile.runtime.optimizer.state_format import FORMATS

Make = Callable[..., Any]

#: Optimizers with formats of state.
KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "adamw bfloat16": (megacompile.AdamW, {"state_dtype": "bfloat16"}),
    "adamw 8bit": (megacompile.AdamW, {"state_dtype": "8bit"}),
    "adamw 8bit alone": (megacompile.AdamW, {"state_dtype": "8bit", "master": "bfloat16"}),
    "adamw alone": (megacompile.AdamW, {"master": "bfloat16"}),
    "lion": (megacompile.Lion, {}),
    "lion 8bit": (megacompile.Lion, {"state_dtype": "8bit"}),
    "sgd": (megacompile.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "sgd bfloat16 alone": (megacompile.SGD, {"momentum": 0.9, "state_dtype": "bfloat16", "master": "bfloat16"}),
}
#: Plans that update elsewhere or in another order.
PLANS: dict[str, dict[str, Any]] = {
    "on the device": dict(resident=("layers.1", "layers.0"), resident_state=("layers.0", "layers.1")),
    "visits": dict(visiting_state=("layers.1", "epilogue")),
    "moments last": dict(deferred_moments=True),
    "slabs": dict(pinned_memory="32KiB"),
    "waves": dict(waves=2, host_sums=("layers.1", "layers.2")),
    "the reference": dict(reference=True),
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def one() -> Iterator[Streamed]:
    yield from used(Streamed())


@pytest.fixture(scope="module", params=PLANS)
def other(request: pytest.FixtureRequest) -> Iterator[Streamed]:
    yield from used(Streamed(**PLANS[request.param]))


def used(streamed: Streamed) -> Iterator[Streamed]:
    yield streamed
    if streamed.model is not None:
        streamed.model.megacompile.close()


@pytest.fixture(scope="module")
def reference_in_waves() -> Iterator[Streamed]:
    yield from used(Streamed(**PLANS["waves"], reference=True))


def made(model: Any, kind: str, **more: Any) -> Any:
    make, options = KINDS[kind]
    return make(model.parameters(), **{"lr": 1e-2, **options, **more})


def clipped(streamed: Streamed, kind: str, whole: bool) -> dict[str, Tensor]:
    """Weights and state after four clipped steps."""
    optimizer = made(streamed.fresh(), kind, max_grad_norm=1.0)
    steps(streamed.model, optimizer, range(4), whole)
    return state_of(streamed.model, optimizer)


@pytest.fixture(scope="module")
def expected(one: Streamed) -> Callable[[str, bool], dict[str, Tensor]]:
    """Weights and state after four clipped steps under the plain plan."""
    known: dict[tuple[str, bool], dict[str, Tensor]] = {}

    def found(kind: str, whole: bool) -> dict[str, Tensor]:
        if (kind, whole) not in known:
            known[kind, whole] = clipped(one, kind, whole)
        return known[kind, whole]

    return found


# ---------------------------------------------------------------- bits
@pytest.mark.sample(12)
@kinds
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
def test_every_plan_has_the_same_bits(
        kind: str, whole: bool, other: Streamed, expected: Any, reference_in_waves: Streamed) -> None:
    found = clipped(other, kind, whole)
    # Sums of waves in FP32 have other bits than one wave.
    in_waves = whole and "waves" in other.options
    assert same_bits(found, clipped(reference_in_waves, kind, whole) if in_waves else expected(kind, whole))


@pytest.mark.sample(3)
@kinds
def test_updates_on_arrival_have_the_bits_of_unclipped_updates(kind: str, one: Streamed) -> None:
    found = []
    for overlap in (None, "backward"):
        optimizer = made(one.fresh(), kind, overlap=overlap)
        steps(one.model, optimizer, range(3))
        found.append(state_of(one.model, optimizer))
    assert same_bits(*found)


@pytest.mark.sample(3)
@kinds
def test_late_lanes_change_no_bit(kind: str, one: Streamed, expected: Any) -> None:
    draw, model = random.Random(kind), one.fresh()

    def delay(lane: Lane) -> None:
        if draw.random() < 0.1:
            time.sleep(draw.random() * 1e-3)

    engine.delay(model, delay)
    optimizer = made(model, kind, max_grad_norm=1.0)
    steps(model, optimizer, range(4))
    found = state_of(model, optimizer)
    engine.delay(model, None)
    assert same_bits(found, expected(kind, False))


@pytest.mark.sample(3)
@kinds
def test_an_update_that_stops_half_way_is_completed(kind: str, one: Streamed, expected: Any) -> None:
    model = one.fresh()
    optimizer = made(model, kind, max_grad_norm=1.0)
    steps(model, optimizer, range(2))
    model.megacompile.synchronize()
    cut_power(model, "update", 3)
    model(**batch(2, rows=4)).backward()
    optimizer.step()
    assert_torn(model)
    optimizer.step()
    optimizer.zero_grad()
    steps(model, optimizer, range(3, 4))
    assert same_bits(state_of(model, optimizer), expected(kind, False))


@pytest.mark.sample(3)
@kinds
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
        kind: str, one: Streamed, expected: Any, tmp_path: Path) -> None:
    model = one.fresh()
    optimizer = made(model, kind, max_grad_norm=1.0)
    steps(model, optimizer, range(2))
    save_checkpoint(tmp_path, model, optimizer)
    kept = {key: value.clone() if isinstance(value, Tensor) else value
            for key, value in state_of(model, optimizer).items()}
    again = made(one.fresh(), kind, max_grad_norm=1.0)
    steps(one.model, again, range(7, 8))
    load_checkpoint(tmp_path, one.model, again)
    assert same_bits(state_of(one.model, again), kept)
    steps(one.model, again, range(2, 4))
    assert same_bits(state_of(one.model, again), expected(kind, False))


@pytest.mark.sample(3)
@kinds
def test_a_state_dict_restores_the_state(kind: str, one: Streamed, expected: Any, tmp_path: Path) -> None:
    model = one.fresh()
    optimizer = made(model, kind, max_grad_norm=1.0)
    steps(model, optimizer, range(2))
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt")
    again = made(one.fresh(), kind, max_grad_norm=1.0)
    one.model.load_state_dict(weights)
    again.load_state_dict(state)
    steps(one.model, again, range(2, 4))
    assert same_bits(state_of(one.model, again), expected(kind, False))


@pytest.mark.sample(6)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("stored", list(itertools.permutations(FORMATS, 2)), ids=" beside ".join)
@pytest.mark.parametrize("make", [megacompile.AdamW, megacompile.Lion, megacompile.SGD, megacompile.Muon])
def test_a_state_of_groups_in_several_formats_is_saved_and_loaded_by_torch_to_the_bit(
        make: Make, stored: tuple[str, str], stepped: bool, one: Streamed, tmp_path: Path) -> None:
    def optimizer() -> Any:
        parameters = list(one.fresh().parameters())
        groups = [{"params": parameters[number::2], "state_dtype": stored[number]} for number in range(2)]
        return make(groups, lr=1e-2, **({"momentum": 0.9} if make is megacompile.SGD else {}))

    saved = optimizer()
    if stepped:
        steps(one.model, saved, range(2))
    expected = state_of(one.model, saved)
    torch.save((one.model.state_dict(), saved.state_dict()), tmp_path / "state.pt")
    kept = sum(tensor.nbytes for tensor in expected.values())
    assert (tmp_path / "state.pt").stat().st_size < kept + 100_000, "no more than the state is written"
    again = optimizer()
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    one.model.load_state_dict(weights)
    again.load_state_dict(state)
    assert same_bits(state_of(one.model, again), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_a_state_of_sgd_that_torch_has_saved_trains_on_as_there(stepped: bool, momentum: float) -> None:
    native = Decoder()
    ours = megacompile.stream(copy.deepcopy(native), layers="layers", device="cpu")
    theirs = torch.optim.SGD([p for p in native.parameters() if p.requires_grad], lr=0.1, momentum=momentum, dampening=0.2)
    for seed in range(2 * stepped):
        native(**batch(seed)).backward()
        theirs.step()
        theirs.zero_grad()
    ours.load_state_dict(native.state_dict())
    made = megacompile.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.1, momentum=momentum, dampening=0.2)
    made.load_state_dict(theirs.state_dict())
    for seed in (3, 4):
        for model, optimizer in ((native, theirs), (ours, made)):
            model(**batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(ours.named_parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)
    ours.megacompile.close()


@pytest.mark.sample(6)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), torch.tensor(float("inf"))])
@pytest.mark.parametrize(("make", "option"), [
    *((make, option) for make in (megacompile.AdamW, megacompile.Lion, megacompile.SGD, megacompile.Muon)
      for option in ("lr", "weight_decay")),
    (megacompile.AdamW, "eps"), (megacompile.SGD, "momentum"), (megacompile.SGD, "dampening"), (megacompile.Muon, "ns_eps"),
    (megacompile.AdamW, "betas"), (megacompile.Lion, "betas"), (megacompile.Muon, "ns_coefficients")])
def test_an_option_that_is_not_finite_is_refused_whenever_it_is_set(make: Make, option: str, value: Any, one: Streamed) -> None:
    given = {"betas": (0.9, value), "ns_coefficients": (1.0, value, 1.0)}.get(option, value)
    with pytest.raises(MegacompileError, match=f"{option}=.* is out of range"):
        make(one.fresh().parameters(), **{option: given})
    optimizer = make(one.model.parameters(), lr=1e-2)
    before = state_of(one.model, optimizer)
    one.model(**batch()).backward()
    optimizer.param_groups[0][option] = given
    with pytest.raises(MegacompileError, match=f"{option}=.* is out of range"):
        optimizer.step()
    assert same_bits(state_of(one.model, optimizer), before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_a_maximum_norm_of_0_or_infinity_clips_nothing(overlap: str | None, one: Streamed) -> None:
    found = []
    for limit in (None, 0, 0.0, float("inf")):
        optimizer = megacompile.AdamW(one.fresh().parameters(), lr=1e-2, max_grad_norm=limit, overlap=overlap)
        steps(one.model, optimizer, range(2))
        assert optimizer.max_grad_norm is None
        found.append(state_of(one.model, optimizer))
    assert all(same_bits(each, found[0]) for each in found)


# ---------------------------------------------------------------- what is kept
@pytest.mark.sample(4)
@kinds
def test_host_memory_has_what_the_format_says(kind: str, one: Streamed) -> None:
    optimizer = made(one.fresh(), kind)
    steps(one.model, optimizer, range(1))
    one.model.megacompile.synchronize()
    make, options = KINDS[kind]
    moments = 2 if make is megacompile.AdamW else 1
    each = {"float32": 4, "bfloat16": 2, "8bit": 1 + 4 / 256}[options.get("state_dtype", "float32")]
    tile = engine.tiles(one.model)["prologue"]
    layout, parts = tile.layout, tile.parts()
    assert parts["moments"] == pytest.approx(moments * each * layout.elements, rel=0.15), "regions are padded"
    assert parts.get("remainder", 0) == (0 if options.get("master") else 2 * layout.elements)
    kept = optimizer.state_dict()["state"].values()
    assert any("remainder" in each for each in kept) == (not options.get("master"))


def test_groups_may_keep_their_moments_differently(one: Streamed) -> None:
    model = one.fresh()
    head = [*model.head.parameters()]
    rest = [p for p in model.parameters() if all(p is not other for other in head)]
    optimizer = megacompile.AdamW([{"params": head, "state_dtype": "8bit"}, {"params": rest}], lr=1e-2)
    steps(model, optimizer, range(2))
    assert optimizer.state[model.head.weight]["exp_avg"].dtype == torch.uint8
    assert optimizer.state[model.head.weight]["exp_avg_scale"].numel() == -(-model.head.weight.numel() // 256)
    assert optimizer.state[model.layers[1][1].weight]["exp_avg"].dtype == torch.float32


def test_an_optimizer_that_keeps_other_state_starts_anew_from_the_same_masters(one: Streamed) -> None:
    model = one.fresh()
    first = megacompile.AdamW(model.parameters(), lr=1e-2)
    steps(model, first, range(2))
    weight = model.layers[1][1].weight
    master = first.master(weight)
    second = megacompile.AdamW(model.parameters(), lr=1e-2, state_dtype="8bit")
    assert torch.equal(second.master(weight), master) and second.state[weight]["step"] == 0
    assert not second.state[weight]["exp_avg"].any()
    third = megacompile.AdamW(model.parameters(), lr=1e-2, master="bfloat16")
    assert torch.equal(third.master(weight), weight.float()), "a master that is not kept is rounded to its weight"
    steps(model, third, range(1))


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(("options", "message"), [
    ({"state_dtype": "int4"}, "state_dtype='int4' is out of range: give one of float32, bfloat16, 8bit"),
    ({"master": "float16"}, "master='float16' is out of range: give one of float32, bfloat16")])
def test_formats_that_do_not_exist_are_refused(options: dict[str, str], message: str, one: Streamed) -> None:
    with pytest.raises(MegacompileError, match=message):
        megacompile.AdamW(one.fresh().parameters(), **options)


def test_how_state_is_kept_cannot_change_later(one: Streamed) -> None:
    model = one.fresh()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    optimizer.param_groups[0]["state_dtype"] = "8bit"
    with pytest.raises(MegacompileError, match="state_dtype and master cannot change"):
        steps(model, optimizer, range(1))
    model.zero_grad()


def test_state_of_another_format_is_refused_and_changes_nothing(one: Streamed, tmp_path: Path) -> None:
    model = one.fresh()
    optimizer = made(model, "adamw 8bit")
    steps(model, optimizer, range(1))
    save_checkpoint(tmp_path, model, optimizer)
    state = optimizer.state_dict()
    again = made(one.fresh(), "adamw bfloat16")
    steps(model, again, range(1))
    before = state_of(model, again)
    with pytest.raises(CheckpointError, match="8bit"):
        load_checkpoint(tmp_path, model, again)
    with pytest.raises(MegacompileError, match="the saved optimizer has state_dtype='8bit', and this one 'bfloat16'"):
        again.load_state_dict(state)
    assert same_bits(state_of(model, again), before)


def test_the_memory_of_state_in_another_format_is_given_back(one: Streamed) -> None:
    model = one.fresh()
    optimizer = made(model, "adamw 8bit")
    steps(model, optimizer, range(1))
    before = [StorageWeakRef(moment.untyped_storage()) for tile in engine.tiles(model).values()
              for moment in tile.moments]
    steps(model, made(model, "adamw bfloat16"), range(1))
    assert before and all(storage.expired() for storage in before)


def test_a_master_that_is_not_kept_is_for_bf16_weights() -> None:
    from resumable import Decoder

    model = megacompile.stream(Decoder(), layers="layers", device="cpu", dtype=torch.float32)
    with pytest.raises(MegacompileError, match=r"master='bfloat16' is for bf16 weights, and .* is torch\.float32"):
        megacompile.AdamW(model.parameters(), master="bfloat16")
    model.megacompile.close()


def test_codes_of_8_bit_moments_are_not_replaced_by_numbers(one: Streamed) -> None:
    model = one.fresh()
    optimizer = made(model, "adamw 8bit")
    steps(model, optimizer, range(1))
    weight = model.head.weight
    with pytest.raises(MegacompileError, match=r"must be uint8, codes of 8-bit moments, not torch\.float32"):
        optimizer.state[weight]["exp_avg"] = torch.zeros(weight.shape)


def test_state_that_the_host_cannot_hold_is_refused_and_changes_nothing(one: Streamed, monkeypatch: Any) -> None:
    model = one.fresh()
    optimizer = made(model, "adamw 8bit")
    steps(model, optimizer, range(1))
    before = state_of(model, optimizer)
    monkeypatch.setattr(type(engine.store(model)), "available_bytes", lambda self, given: 1000)
    with pytest.raises(InsufficientMemoryError, match="training with this optimizer takes"):
        megacompile.AdamW(model.parameters())
    monkeypatch.undo()
    assert same_bits(state_of(model, optimizer), before)
