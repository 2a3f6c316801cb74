"""Names of slots: `SlotName` puts them together and takes them apart."""
from __future__ import annotations

import pytest

from megacompile.ir.places import SlotName
from megacompile.ir.program import SLOT_KINDS, slot_family, stays


@pytest.mark.parametrize("family", SLOT_KINDS)
def test_a_name_is_taken_apart_as_it_was_put_together(family: str) -> None:
    for size_class, boundary in ((0, False), (0, True), (1, False), (25, False)):
        for number in (0, 7, 12):
            name = SlotName(family, size_class, boundary, number)
            assert SlotName.parse(str(name)) == name
            assert slot_family(str(name)) == family
            assert stays(str(name)) == family.startswith("R")


def test_names_are_written_as_programs_have_them() -> None:
    assert [str(SlotName("W", number=1)), str(SlotName("W", size_class=1)), str(SlotName("W", boundary=True))] == [
        "W1", "Wb0", "WB0"]
    assert sorted(["Wb0", "WB0", "W1", "W0", "RW0", "R3"], key=lambda name: SlotName.parse(name) or SlotName("")) == [
        "R3", "RW0", "W0", "W1", "WB0", "Wb0"]


@pytest.mark.parametrize("text", ["", "W", "w0", "%W0", "weights/layers.0", "W00", "Wa0", "W-1", "WBb", "W0 ", "0"])
def test_what_is_not_the_name_of_a_slot_is_none(text: str) -> None:
    assert SlotName.parse(text) is None
    assert not stays(text)
    assert slot_family(text) == ""
