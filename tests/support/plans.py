"""Programs to be sabotaged: those of the goldens, some more of names, and random ones."""
from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from megacompile.ir.plan import UPDATES, Plan

NAMED: dict[str, dict[str, Any]] = {
    "streamed": {},
    "blocks of two, three micro-batches": {"micro_batches": (2, 1, 1), "checkpoint_interval": 2, "weight_slots": 3},
    "one block, slab pool": {"checkpoint_interval": 4, "weight_slots": 4, "pinned": False, "gradient_slabs": 2},
    "resident, three micro-batches": {"micro_batches": (1, 1, 1), "resident": ("layers.1", "epilogue")},
    "updated on the device": {"resident": ("prologue", "layers.0"), "resident_state": ("prologue", "layers.0")},
    "visiting the device": {"resident": ("prologue", "layers.1"), "resident_state": ("prologue",),
                            "visiting_state": ("layers.0", "layers.1", "epilogue")},
    "held for the update, two waves": {
        "whole_step": True, "micro_batches": (1, 1), "waves": 2, "resident": ("layers.1",),
        "held_state": ("prologue", "layers.1", "epilogue")},
    "moments on disk": {"disk_state": ("prologue", "layers.0", "layers.2", "layers.3"), "resident": ("layers.2",),
                        "state_slabs": 1},
    "moments on disk after all weights": {
        "disk_state": ("prologue", "layers.0", "layers.2", "layers.3"), "deferred_moments": True, "state_slabs": 2},
    "moments on disk, updates on arrival": {"update": "arrival", "micro_batches": (1, 1), "state_slabs": 2, "gradient_slabs": 2,
                                            "disk_state": ("layers.0", "layers.1", "layers.2", "layers.3", "epilogue")},
    "moments after all weights, two micro-batches": {
        "deferred_moments": True, "micro_batches": (1, 1), "resident": ("prologue", "layers.0"),
        "resident_state": ("prologue",), "visiting_state": ("layers.1",)},
    "updates on arrival": {"update": "arrival", "micro_batches": (1, 1), "resident": ("prologue", "layers.0"),
                           "resident_state": ("layers.0",)},
    "checkpoints on the host, two micro-batches": {"micro_batches": (2, 1), "host_checkpoints": 3},
    "three waves added up on the host": {"whole_step": True, "micro_batches": (1, 1, 1), "waves": 3,
                                         "host_sums": ("prologue", "layers.1", "layers.3")},
    "three waves, of the epilogue alone on the host": {
        "whole_step": True, "micro_batches": (1, 1, 1), "waves": 3, "host_sums": ("epilogue",)},
    "waves on the host through slabs, updates on arrival": {
        "whole_step": True, "micro_batches": (1, 1), "waves": 2, "pinned": False, "update": "arrival",
        "host_sums": ("layers.0", "epilogue"), "resident": ("layers.0",)},
    "outputs, two micro-batches": {"outputs": True, "micro_batches": (2, 1), "checkpoint_interval": 2, "weight_slots": 3},
    "outputs, tied, updates on arrival": {"outputs": True, "tied": True, "update": "arrival", "saved_layers": 1},
    "layers that run twice": {"layers": 2, "runs": 2, "micro_batches": (1, 1)},
    "a layer that runs three times in one block, a shared tile": {
        "layers": 1, "runs": 3, "shared": True, "checkpoint_interval": 3, "weight_slots": 1, "update": "arrival"},
    "layers that run twice, waves on the host, a shared tile": {
        "layers": 2, "runs": 2, "shared": True, "whole_step": True, "micro_batches": (1, 1), "waves": 2,
        "host_sums": ("layers.0", "shared"), "resident": ("shared",)},
    "tied, residuals kept, a frozen layer": {"tied": True, "saved_layers": 2, "frozen": ("layers.0",)},
}

_EVERY_TILE = ("prologue", "layers.0", "layers.1", "layers.2", "layers.3", "epilogue")
#: Streamed, and all resident, in blocks of each size, in one micro-batch and in three. Three more of them are goldens.
NAMED |= {
    f"{place}, K = {interval}, micro-batches {micro_batches}": {
        "checkpoint_interval": interval, "micro_batches": micro_batches,
        **({"resident": _EVERY_TILE} if place == "all resident" else {"weight_slots": min(interval + 1, 4)})}
    for interval in (1, 2, 4) for micro_batches in ((1,), (2, 2, 1)) for place in ("all streamed", "all resident")
    if (place, interval, micro_batches) not in {
        ("all streamed", 1, (2, 2, 1)), ("all streamed", 4, (1,)), ("all resident", 2, (2, 2, 1))}}


#: Programs of several ranks: each way in which they exchange what they have.
OF_SEVERAL: dict[str, dict[str, Any]] = {
    f"{ranks} ranks, {name}": {**NAMED[name], "ranks": ranks} for ranks, name in (
        (2, "streamed"), (4, "blocks of two, three micro-batches"), (2, "one block, slab pool"),
        (2, "resident, three micro-batches"), (2, "updated on the device"), (2, "visiting the device"),
        (4, "moments after all weights, two micro-batches"), (2, "updates on arrival"),
        (2, "checkpoints on the host, two micro-batches"),
        (2, "three waves added up on the host"),
        (2, "three waves, of the epilogue alone on the host"), (4, "waves on the host through slabs, updates on arrival"),
        (2, "outputs, two micro-batches"), (2, "outputs, tied, updates on arrival"), (2, "layers that run twice"),
        (2, "layers that run twice, waves on the host, a shared tile"), (2, "tied, residuals kept, a frozen layer"),
        (2, "moments on disk"), (2, "moments on disk after all weights"), (2, "moments on disk, updates on arrival"))}
OF_SEVERAL["2 ranks, matrices visiting the device"] = {
    **NAMED["visiting the device"], "matrices": ("layers.0", "layers.1"), "ranks": 2}
#: Programs of several hosts, with one rank or several on each.
OF_SEVERAL |= {
    f"{hosts} hosts, {ranks} {'rank' if ranks == 1 else 'ranks'} each, {name}": {**NAMED[name], "ranks": ranks, "hosts": hosts}
    for hosts, ranks, name in (
        (2, 2, "streamed"), (2, 1, "blocks of two, three micro-batches"), (2, 2, "updated on the device"),
        (2, 1, "visiting the device"), (3, 2, "three waves added up on the host"), (2, 1, "updates on arrival"),
        (2, 2, "outputs, tied, updates on arrival"), (2, 1, "layers that run twice, waves on the host, a shared tile"))}


@st.composite
def schedules(draw: st.DrawFn, layers: int | None = None, often: bool = True, several: bool = False) -> dict[str, Any]:
    """Arguments of `make_schedule`: a small model, of so many layers, and a plan for it. `often`: its layers may run twice, and
    share a tile. `several`: two or four ranks run it, on one host or on several."""
    layers = layers or draw(st.integers(1, 4))
    runs = 2 if often and layers < 3 and draw(st.booleans()) else 1
    whole_step, tied = draw(st.booleans()), draw(st.booleans())
    micro_batches = tuple(sorted(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)), reverse=True))
    names = [f"layers.{i}" for i in range(layers)]
    frozen = tuple(draw(st.sets(st.sampled_from(names), max_size=1)))
    shared = often and draw(st.booleans())
    tiles = ["prologue", *names, *(["shared"] if shared else []), "epilogue"]
    resident = [tile for tile in tiles if draw(st.integers(0, 3)) == 0]
    interval, update = draw(st.integers(1, layers)), draw(st.sampled_from(UPDATES))
    order = tuple(draw(st.permutations(tiles))) if update == "arrival" and draw(st.booleans()) else ()
    waves = draw(st.integers(1, len(micro_batches))) if whole_step else 1
    stateful = tuple(tile for tile in resident if tile not in frozen and draw(st.booleans()))
    summed = tuple(tile for tile in tiles if waves > 1 and tile not in stateful and draw(st.booleans()))
    visiting = tuple(tile for tile in tiles if update == "step" and tile not in (*frozen, *stateful, *summed)
                     and draw(st.integers(0, 3)) == 0)
    held = tuple(tile for tile in tiles if update == "step" and not several
                 and tile not in (*frozen, *stateful, *summed, *visiting) and draw(st.integers(0, 3)) == 0)
    on_disk = tuple(tile for tile in tiles if tile not in (*frozen, *stateful, *summed, *visiting, *held)
                    and draw(st.integers(0, 3)) == 0)
    return {
        "disk_state": on_disk, "state_slabs": draw(st.integers(1, 3)),
        "layers": layers, "micro_batches": micro_batches, "frozen": frozen, "tied": tied, "whole_step": whole_step,
        "runs": runs, "shared": shared, "matrices": visiting if several and draw(st.booleans()) else (),
        "outputs": not whole_step and draw(st.booleans()),
        "checkpoint_interval": interval, "saved_layers": draw(st.integers(0, layers)),
        "weight_slots": interval + draw(st.integers(0, 2)), "gradient_slots": draw(st.integers(1, 2)),
        "resident": tuple(resident),
        "resident_state": stateful, "host_sums": summed, "visiting_state": visiting, "held_state": held,
        "pinned": draw(st.booleans()), "staging_slabs": draw(st.integers(1, 2)), "gradient_slabs": draw(st.integers(1, 3)),
        "waves": waves, "update": update, "deferred_moments": update == "step" and draw(st.booleans()), "update_order": order,
        "host_checkpoints": draw(st.integers(0, 2)), "checkpoint_slots": draw(st.integers(1, 2)),
        **(dict(zip(("ranks", "hosts"), draw(st.sampled_from(((2, 1), (4, 1), (2, 2), (1, 2), (2, 3)))), strict=True))
           if several else {})}


def plan_of(schedule: dict[str, Any]) -> Plan:
    options = {"micro_batches": (1,), **schedule}
    for name in ("layers", "runs", "shared", "matrices", "frozen", "tied", "whole_step", "outputs"):
        options.pop(name, None)
    return Plan.of(sum(options["micro_batches"]), 8, **options)
