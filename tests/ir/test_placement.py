"""Placements: each tile has one, lists of names say the same, and lists that contradict each other are refused."""
from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

import megacompile
from megacompile.errors import MegacompileError
from megacompile.ir.placement import LISTS, STREAMED, Placement, Placements, Updated
from megacompile.ir.plan import Plan
from megacompile.ir.printing import MADE_FOR
from megacompile.passes.schedule import optimizer
from megacompile.planning.config import StreamConfig

EVERY = {Placement(updated, resident) for updated, resident in product(Updated, (False, True))}
PLACED = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(sorted(EVERY, key=repr)))


def test_a_tile_that_is_updated_on_the_device_has_its_weights_there() -> None:
    assert Placement(Updated.ON_DEVICE, resident=False) == Placement(Updated.ON_DEVICE, resident=True)
    assert {each.resident for each in EVERY if each.updated is Updated.ON_DEVICE} == {True}
    assert len(EVERY) == 2 * len(Updated) - 1, "weights of all other tiles may stay or not"


@given(PLACED)
def test_lists_of_names_say_where_each_tile_is(placed: dict[str, Placement]) -> None:
    """A tile is in one of the lists that say where it is updated, or in none; and one updated on the device is resident."""
    placements = Placements(placed)
    for tile in "abcdefgh":
        placement = placements.get(tile, STREAMED)
        assert placement == placed.get(tile, STREAMED)
        assert [name for name in LISTS[1:] if tile in placements.lists[name]] == (
            [] if placement.updated is Updated.ON_HOST else [placement.updated])
        assert (tile in placements.lists["resident"]) == placement.resident
    assert STREAMED not in placements.values()


@given(PLACED)
def test_placements_from_their_lists_are_the_same(placed: dict[str, Placement]) -> None:
    placements = Placements(placed)
    again = Placements.named(**placements.lists)
    assert again == placements == copy.deepcopy(placements) and hash(again) == hash(placements)
    assert again.lists == placements.lists, "in the same order"


@given(PLACED, st.sampled_from([each for each in Updated if each is not Updated.ON_HOST]), st.lists(
    st.sampled_from("abcdefgh"), unique=True))
def test_exactly_the_given_tiles_are_placed(placed: dict[str, Placement], updated: Updated, tiles: list[str]) -> None:
    before, after = Placements(placed), Placements(placed).placed(updated, tiles)
    assert {tile for tile, placement in after.items() if placement.updated is updated} == {*tiles}
    for tile in "abcdefgh":
        old, new = before.get(tile, STREAMED), after.get(tile, STREAMED)
        if tile in tiles:
            assert new == Placement(updated, old.resident)
        elif old.updated is not updated:
            assert new == old
        else:
            assert new == Placement(resident=old.resident and updated is not Updated.ON_DEVICE)


def test_order_is_kept_since_it_numbers_slots() -> None:
    first, second = (Placements.named(tiles) for tiles in (("a", "b"), ("b", "a")))
    assert first != second and first.lists["resident"] == ("a", "b") and second.lists["resident"] == ("b", "a")
    mixed = dict(resident=("c", "e"), resident_state=("c",), visiting_state=("a", "d", "e", "f"), held_state=("x",),
                 host_sums=("z", "b"), disk_state=("y",))
    assert Placements.named(**mixed).lists == mixed
    contradicting = Placements.named(("c", "e"), host_sums=("e", "d", "c"))
    assert contradicting.lists["resident"] == ("c", "e"), "where lists contradict each other, that of resident tiles decides"


@pytest.mark.parametrize(("lists", "message"), [
    (dict(resident=("a", "a")), "resident names a tile twice: name each once"),
    (dict(host_sums=("a", "b", "a")), "host_sums names a tile twice: name each once"),
    (dict(resident=("a",), resident_state=("a",), host_sums=("a",)), "resident_state and host_sums both name a, and a tile is "
                                                                     "updated in one place: name it in only one of them"),
    (dict(visiting_state=("a", "b"), resident_state=("b",)), "resident_state and visiting_state both name b"),
    (dict(visiting_state=("c", "a", "b"), host_sums=("b", "c")), "visiting_state and host_sums both name b, c"),
])
def test_lists_that_place_a_tile_twice_are_refused(lists: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(MegacompileError, match=message):
        Placements.named(**lists)
    with pytest.raises(MegacompileError, match=message):
        Plan.of(2, 8, (1, 1), waves=2, **lists)


@pytest.mark.parametrize(("first", "second"), [("resident_state", "visiting_state"), ("resident_state", "host_sums"),
                                               ("visiting_state", "host_sums"), ("host_sums", "disk_state")])
def test_options_that_place_a_tile_twice_are_refused(first: str, second: str) -> None:
    with pytest.raises(MegacompileError, match=f"{first} and {second} both name a, and .* in one place: name it in only"):
        StreamConfig.of(**{first: ("b", "a"), second: "a"}, disk="state")
    for others in ("all", None, (), ("c",)):
        StreamConfig.of(**{first: ("b", "a"), second: others, "resident": ("a", "c")}, disk="state")


@pytest.mark.parametrize(("options", "named"), [
    ({"resident_state": "all", "visiting_state": ("model.layers.1",)}, "visiting_state"),
    ({"visiting_state": "all", "host_sums": ("model.layers.1",), "waves": 2, "micro_batch_size": 1}, "host_sums")])
def test_all_means_the_tiles_that_no_other_option_names(options: dict[str, Any], named: str) -> None:
    plan = megacompile.schedule(tiny_models.build(), batch=2, length=8, device="cpu", whole_step=True, **options).plan
    everywhere = next(name for name, tiles in options.items() if tiles == "all")
    assert getattr(plan, named) == ("model.layers.1",)
    assert getattr(plan, everywhere) == ("prologue", "model.layers.0", "model.layers.2", "epilogue")


@pytest.mark.parametrize("placement", sorted(EVERY, key=repr), ids=str)
def test_a_plan_may_have_any_placement(placement: Placement) -> None:
    plan = Plan(2, 8, (1, 1), waves=2, placements=Placements({"a": placement}))
    assert plan.placement("a") == placement and plan.placement("b") == STREAMED
    assert Plan.of(**plan.values()) == plan and hash(Plan.of(**plan.values())) == hash(plan)
    assert all(getattr(plan, name) == plan.placements.lists[name] for name in LISTS)


def test_whoever_reads_placements_knows_each_of_them() -> None:
    assert optimizer._OPS.keys() == {*Updated}
    assert set(LISTS) <= MADE_FOR["plan"][0].keys(), "texts have every list"
