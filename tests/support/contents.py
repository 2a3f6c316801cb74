"""What ops compute, told a second time: the contents that a step writes, from those that it reads.

A *content* is a number that stands for what is in memory. Copies hand contents on; a kernel's content is a hash of the kernel's
and of what it read; sums are sums, so that they come out the same in any order.

Several ranks and hosts all run the same steps at the same time, so one rank's memory stands for each rank's. What a rank has of
a tile, or knows of its norms, is `Own` until the ranks have exchanged it.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from machine import KERNELS, HarmError, Step

_MODULUS = 1 << 61
Content = Any
Look = Callable[[str], Content]


@dataclass(frozen=True)
class Own:
    """A content of which this rank has only its "shard"; or of whose shard it has the "norms", and not those of the whole."""

    what: str
    content: Content


def exchanged(what: str, content: Content) -> Content:
    """What ranks make of what each of them has."""
    return content.content if isinstance(content, Own) and content.what == what else mix("not a rank's own", what, content)


def own(content: Content) -> Content:
    """What a rank reads of its own, whatever the others have."""
    return content.content if isinstance(content, Own) else content


def mix(*parts: Any) -> int:
    return hash(parts) % _MODULUS


def total(*contents: int) -> int:
    """A sum: the same in any order."""
    return sum(contents) % _MODULUS


def effect(step: Step, look: Look) -> dict[str, Content]:
    """What a step writes, place by place. `look` says what is in a place, and raises `HarmError` if nothing is."""
    op, at, says = step.op, step.at, step.says
    result = at["result"][0]

    def one(parameter: str) -> Content:
        (place,) = at[parameter]
        return look(place)

    def of_shard(what: str, content: Content) -> Content:
        return Own(what, content) if step.shared else content

    if op in KERNELS:
        made = mix("forward", says["call"], says["mb"], *(look(p) for p in at.get("weights", ())), "of",
                   *(look(p) for p in at.get("inputs", ())))
        if "saved" in at and one("saved") != made:
            made = mix("residuals of another forward", made, one("saved"))
        if op in ("recompute_backward", "backward"):
            made = mix("backward", made, one("gradient"))
        elif op in ("loss", "evaluate", "outputs"):
            made = mix(op, made)
        return {result: made, **{place: total(look(place), mix("part", number, made))
                                 for number, place in enumerate(at.get("accumulators", ()))}}
    match op:
        case "pack" | "prefetch":
            if step.shared and "staging" not in at and one("announced/") != one("weights/"):
                raise HarmError(f"{step.name} copies shards that other ranks have not announced")
            return {result: one("staging") if "staging" in at else one("weights/")}
        case "pack_shard" | "prefetch_shard":
            return {result: one("staging") if "staging" in at else Own("shard", one("weights/"))}
        case "gather":
            return {result: exchanged("shard", one("shard"))}
        case "momentum":
            return {result: Own("shard", mix("momentum", one("state/"), one("gradients/"), one("clip")))}
        case "gather_momentum":
            return {at["momentum"][0]: exchanged("shard", one("momentum"))}
        case "gather_resident":
            return {at["resident"][0]: exchanged("shard", one("resident"))}
        case "share_norms" | "share_host_norms":
            (place,) = at["reduced" if op == "share_norms" else "gradients/"]
            return {place: exchanged("norms", look(place))}
        case "reduce_scatter" | "share_loss":
            (place,) = at["accumulators" if op == "reduce_scatter" else "value"]
            return {place: mix("over ranks", look(place))}
        case "all_reduce":
            (place,) = at["accumulators"]
            return {place: mix("over hosts", look(place))}
        case "total_loss":
            return {result: mix("total", total(*map(look, at["values"])))}
        case "announce":
            return {there: look(place) for place, there in zip(at["weights/"], at["announced/"], strict=True)}
        case "stash" | "fetch":
            return {result: one("value" if op == "stash" else "stashed")}
        case "offload":
            return {result: one("reduced")}
        case "fetch_state" | "fetch_gradients":
            return {result: one("state/" if op == "fetch_state" else "gradients/")}
        case "store_state":
            return {at["state/"][0]: one("state")}
        case "offload_weights":
            return {at["weights/"][0]: own(one("resident"))}
        case "offload_norms":
            return {at["gradients/"][0]: ("norms", one("reduced"))}
        case "zeros":
            return {result: 0}
        case "output_gradient":
            return {result: mix("sent", says["call"], says["mb"])}
        case "scale":
            return {at["value"][0]: mix("scaled", one("value"))}
        case "reduce":
            return {result: of_shard("norms", mix("reduced", one("accumulators")))}
        case "accumulate":  # what it adds up, it takes the norms of
            if says["overwrite"]:
                return {at["gradients/"][0]: one("slab")}
            return {at["gradients/"][0]: of_shard("norms", total(own(one("gradients/")), own(one("slab"))))}
        case "add_to_sum":
            wave = one("slab" if "slab" in at else "gradients/")
            return {at["sums/"][0]: wave if says["overwrite"] else total(one("sums/"), wave)}
        case "norms_of_sum":
            return {at["gradients/"][0]: of_shard("norms", ("norms", one("sums/")))}
        case "clip":
            stored = {place: look(place) for place in at["gradients/"]}
            return {result: mix("clip", *sorted((p, g[1] if isinstance(g, tuple) else g) for p, g in stored.items()))}
        case "read_state":
            return {result: one("moments/")}
        case "write_state":
            return {at["moments/"][0]: one("moments")}
        case "update" | "update_weights" | "update_moments" | "update_from_sum" | "update_on_device" | "update_visiting":
            if "momentum" in at and one("momentum") != mix("momentum", one("state/"), one("gradients/"), one("clip")):
                return {at["weights/"][0]: mix("another momentum", one("momentum"))}
            state = at["state" if op == "update_on_device" else "moments" if "moments" in at else "state/"][0]
            stored = "slab" if "slab" in at else "gradients/"
            gradients = one({"update_from_sum": "sums/", "update_on_device": "reduced"}.get(op, stored))
            moments = mix("moments", look(state), gradients, *([one("clip")] if "clip" in at else []))
            if op == "update_moments":
                return {state: moments}
            weights = at["resident" if op == "update_on_device" else "weights/"][0]
            made = {weights: mix("weights", look(weights), moments)}
            if op == "update_on_device":
                made = {weights: of_shard("shard", made[weights])}
            return made if op == "update_weights" else made | {state: moments}
        case "hold":
            return {result: ("held", one("reduced"), one("current") if "current" in at else None)}
        case "fetch_held":
            what, gradients, current = parts if len(parts := one("held")) == 3 else ("", 0, 0)
            weights = one("weights/") if current is None else current
            return {at["held"][0]: ("fetched" if what == "held" else "not held", gradients, weights, one("state/"))}
        case "update_held":
            what, gradients, weights, state = parts if len(parts := one("held")) == 4 else ("", 0, 0, 0)
            moments = mix("moments", state, gradients, one("clip")) if what == "fetched" else mix("not fetched", parts)
            return {at["held"][0]: ("updated", mix("weights", weights, moments), moments, 0, 0)}
        case "return_weights":
            return {at["weights/"][0]: parts[1] if len(parts := one("held")) == 5 else mix("not updated", parts)}
        case "return_state":
            return {at["state/"][0]: parts[2] if len(parts := one("held")) == 5 else mix("not updated", parts),
                    at["held"][0]: ("returned",)}
        case "result":
            for value in at["values"]:
                look(value)
    return {}
