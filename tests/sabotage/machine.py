"""What ops do to memory, told a second time: places that hold contents, instructions that read and write them.

Nothing here is the verifier's or the vocabulary's: lanes, reads, writes and meanings are written down anew from what an
op is for (`docs/schedule-language.md`), and only the graph's nodes are read. A *content* is a number that stands for what
is in memory. Copies hand contents on; a kernel's content is a hash of the kernel's and of what it read; sums are sums, so
that they come out the same in any order. Two programs with the same contents compute the same.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

LANES = ("compute", "h2d", "d2h", "cpu", "pack")
READ, WRITE = "read", "write"
_OF_KERNELS = ("weights", "inputs", "saved", "gradient", "accumulators")
_KERNELS = ("forward", "forward_saving", "loss", "evaluate", "outputs", "recompute_backward", "backward")

#: op -> (lane, what it reads, what it writes): a parameter, "result", or a part of its tiles in host memory.
TOUCHES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "pack": ("pack", ("weights/",), ("result",)),
    "prefetch": ("h2d", ("staging", "weights/"), ("result",)),
    **dict.fromkeys(_KERNELS, ("compute", _OF_KERNELS, ("accumulators", "result"))),
    "zeros": ("compute", (), ("result",)),
    "scale": ("compute", ("value",), ("value",)),
    "reduce": ("compute", ("accumulators",), ("result",)),
    "offload": ("d2h", ("reduced",), ("result",)),
    "offload_norms": ("d2h", ("reduced",), ("gradients/",)),
    "accumulate": ("cpu", ("slab",), ("gradients/",)),
    "add_to_sum": ("cpu", ("slab", "gradients/"), ("sums/",)),
    "norms_of_sum": ("cpu", ("sums/",), ("gradients/",)),
    "clip": ("cpu", ("gradients/",), ("result",)),
    "adam": ("cpu", ("gradients/", "clip"), ("weights/", "state/")),
    "adam_weights": ("cpu", ("gradients/", "clip", "state/"), ("weights/",)),
    "adam_moments": ("cpu", ("gradients/", "clip"), ("state/",)),
    "adam_of_sum": ("cpu", ("sums/", "clip"), ("weights/", "state/")),
    "adam_resident": ("compute", ("reduced", "clip"), ("resident", "state")),
    "adam_visiting": ("h2d", ("gradients/", "clip"), ("weights/", "state/", "result")),
    "fetch_state": ("cpu", ("state/", "weights/"), ("result",)),
    "store_state": ("cpu", ("state", "weights/"), ("state/",)),
    "fetch_gradients": ("cpu", ("gradients/",), ("result",)),
    "offload_weights": ("cpu", ("resident",), ("weights/",)),
    "result": ("compute", ("values",), ()),
    "lease": ("compute", (), ()),
    "leased": ("compute", (), ()),
    "output_gradient": ("compute", (), ("result",)),
    "stash": ("d2h", ("value",), ("result",)),
    "fetch": ("h2d", ("stashed",), ("result",)),
}

#: What any section of any program may do to a kind of place: (lane, access).
MAY_TOUCH: dict[str, frozenset[tuple[str, str]]] = {kind: frozenset(
    (lane, access) for lane, accesses in lanes.items() for access in accesses) for kind, lanes in {
        "W": {"h2d": (WRITE,), "compute": (READ,)},
        "G": {"compute": (READ, WRITE), "d2h": (READ,)},
        "S": {"pack": (WRITE,), "h2d": (READ,)},
        "D": {"d2h": (WRITE,), "cpu": (READ,)},
        "P": {"h2d": (WRITE,)},  # programs of several ranks read it in a lane of their own
        "H": {"d2h": (WRITE,), "h2d": (READ,)},
        "C": {"h2d": (WRITE,), "compute": (READ,)},
        "V": {"h2d": (WRITE,)},
        "R": {"h2d": (WRITE,), "compute": (READ,)},
        "RW": {"h2d": (WRITE,), "compute": (READ, WRITE), "cpu": (READ,)},
        "RS": {"cpu": (READ, WRITE), "compute": (READ, WRITE)},
        "RG": {"compute": (READ, WRITE), "cpu": (WRITE,), "d2h": (READ,)},
        "weights": {"cpu": (READ, WRITE), "h2d": (READ, WRITE), "pack": (READ,)},
        "gradients": {"d2h": (WRITE,), "cpu": (READ, WRITE), "h2d": (READ,)},
        "sums": {"cpu": (READ, WRITE)}}.items()}
#: `state` is not there: whoever touches a tile's state touches its weights too, and of two in different lanes one writes them;
#: but moments alone, which only another update follows in another lane, of gradients that come behind those read for them.


class HarmError(Exception):
    """What goes wrong in a program."""


def kind_of(place: str) -> str:
    """"W" for "WB0" and "Wb0", "weights" for "weights/layers.0"; "" for a value's own memory."""
    if place.startswith("%"):
        return ""
    if "/" in place:
        return place.split("/")[0]
    return "".join(letter for letter in place.split("@")[0] if letter.isupper()).removesuffix("B")


@dataclass(frozen=True)
class Instruction:
    """One node, read off the graph: names of nodes by parameter, and everything else that it says."""

    name: str
    op: str
    says: Mapping[str, Any]
    takes: Mapping[str, tuple[str, ...]]


def subject(each: Instruction) -> tuple[Any, ...]:
    """What the value of an instruction belongs to: a call and a micro-batch, or a tile. A backward asks by it."""
    return tuple(each.says.get(word) for word in ("call", "mb", "tile"))


def instructions(graph: fx.Graph) -> list[Instruction]:
    found = []
    for node in graph.nodes:
        says, takes = {}, {}
        for parameter, value in node.kwargs.items():
            held = value if isinstance(value, list | tuple) else (value,)
            names = tuple(v.name for v in held if isinstance(v, fx.Node))
            if names:
                takes[parameter] = names
            elif value is not None:
                says[parameter] = value
        found.append(Instruction(node.name, node.target.name, says, takes))
    return found


@dataclass(frozen=True)
class Step:
    """What a lane does: waits for events, or fires one, or reads and writes places. `at`: places by parameter."""

    name: str
    op: str
    lane: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)
    event: Any = None  # that it waits for, or fires


#: A release of a slot is no lane's; in program order it still ends what is there.
NOWHERE = ""


class _Names(dict[str, str]):
    """What is known of nodes above."""

    def __missing__(self, name: str) -> str:
        raise HarmError(f"{name} is spoken of where it is not yet, or does not run anywhere")


@dataclass
class Machine:
    """Turns sections, run one after the other, into steps. State: what sections leave to those behind them.

    `leases`: of each open forward, subject -> place; `sets`: the buffers for checkpoints that open forwards use; `carried`:
    place -> lane -> (whether it has written, event of its last access, event of its last write)."""

    leases: dict[int, dict[tuple[Any, ...], str]] = field(default_factory=dict)
    sets: dict[int, int] = field(default_factory=dict)
    carried: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    runs: int = 0

    def run(self, section: Sequence[Instruction], lease: int | None = None) -> list[Step]:
        """The steps of a section. `lease`: the number of the forward that it opens or goes back."""
        number, self.runs = self.runs, self.runs + 1
        kept = self.leases.setdefault(lease, {}) if lease is not None else {}
        if lease is not None and lease not in self.sets:
            self.sets[lease] = next(i for i in range(len(self.sets) + 1) if i not in self.sets.values())
        where, lanes = _Names(), _Names()
        made = {each.name: each for each in section}
        entered: dict[str, Any] = {}
        left: list[tuple[str, str, str, Any]] = []
        steps: list[Step] = []

        def slot(name: str) -> str:
            return f"{name}@{self.sets.get(lease, 0)}" if lease is not None and kind_of(name) == "H" else name

        for each in section:
            op, says = each.op, each.says
            if op == "enter":
                past = self.carried.get(slot(says["place"]), {}).get(says["lane"], (None, None))
                entered[each.name] = past[says["access"] == WRITE]
            elif op == "record":
                lane = lanes[each.name] = lanes[each.takes["node"][0]]
                steps.append(Step(each.name, op, lane, event=(number, each.name)))
            elif op == "wait":
                (event,) = each.takes["event"]
                fired = entered.get(event, (number, event))
                if fired is not None:
                    steps.append(Step(each.name, op, says["lane"], event=fired))
            elif op == "leave":
                (event,) = each.takes["event"]
                left.append((slot(says["place"]), says["access"], lanes[event], (number, event)))
            elif op == "release":
                place = where[each.takes["value"][0]]
                lanes[each.name] = "compute" if place.startswith("%") else NOWHERE
                steps.append(Step(each.name, op, lanes[each.name], (), (place,)))
            else:
                if op == "leased":
                    where[each.name] = kept.get(subject(each), f"%lease.{lease}.{subject(each)}")
                elif "into" in says:
                    where[each.name] = slot(says["into"])
                else:
                    where[each.name] = f"gradients/{says['tile']}" if op == "offload" else f"%{number}.{each.name}"
                if op == "lease":
                    (value,) = each.takes["value"]
                    kept[subject(made[value])] = where[value]
                if op in TOUCHES:
                    steps.append(self._touching(each, where))
                    lanes[each.name] = steps[-1].lane
        self._carry(left)
        return steps

    @staticmethod
    def _touching(each: Instruction, where: Mapping[str, str]) -> Step:
        lane, *touched = TOUCHES[each.op]
        at = {parameter: tuple(where[name] for name in names) for parameter, names in each.takes.items()}
        at["result"] = (where[each.name],)
        tiles = each.says.get("tiles") or ((each.says["tile"],) if "tile" in each.says else ())
        for part in ("weights", "gradients", "sums", "state"):
            at[f"{part}/"] = tuple(f"{part}/{tile}" for tile in tiles)
        if "staging" in at:
            at["weights/"] = ()
        if each.op == "add_to_sum" and "slab" in at:
            at["gradients/"] = ()
        reads, writes = (tuple(place for name in names for place in at.get(name, ())) for names in touched)
        return Step(each.name, each.op, lane, reads, writes, at, each.says)

    def give_back(self, lease: int) -> None:
        """A backward has run, or its loss has died: the forward's buffers may be used by the next."""
        self.sets.pop(lease, None)
        self.leases.pop(lease, None)

    def _carry(self, left: list[tuple[str, str, str, Any]]) -> None:
        """What was written was ordered after everything before it, which need not be known any more."""
        for place in {place for place, access, _, _ in left if access == WRITE}:
            self.carried[place] = {}
        for place, access, lane, event in left:
            lanes = self.carried.setdefault(place, {})
            lanes[lane] = (event, event if access == WRITE else lanes.get(lane, (None, None))[1])


# Contents

_MODULUS = 1 << 61
Content = Any
Look = Callable[[str], Content]


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

    if op in _KERNELS:
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
            return {result: one("staging") if "staging" in at else one("weights/")}
        case "stash" | "fetch":
            return {result: one("value" if op == "stash" else "stashed")}
        case "offload":
            return {result: one("reduced")}
        case "fetch_state" | "fetch_gradients":
            return {result: one("state/" if op == "fetch_state" else "gradients/")}
        case "store_state":
            return {at["state/"][0]: one("state")}
        case "offload_weights":
            return {at["weights/"][0]: one("resident")}
        case "offload_norms":
            return {at["gradients/"][0]: ("norms", one("reduced"))}
        case "zeros":
            return {result: 0}
        case "output_gradient":
            return {result: mix("sent", says["call"], says["mb"])}
        case "scale":
            return {at["value"][0]: mix("scaled", one("value"))}
        case "reduce":
            return {result: mix("reduced", one("accumulators"))}
        case "accumulate":
            added = one("slab") if says["overwrite"] else total(one("gradients/"), one("slab"))
            return {at["gradients/"][0]: added}
        case "add_to_sum":
            wave = one("slab" if "slab" in at else "gradients/")
            return {at["sums/"][0]: wave if says["overwrite"] else total(one("sums/"), wave)}
        case "norms_of_sum":
            return {at["gradients/"][0]: ("norms", one("sums/"))}
        case "clip":
            stored = {place: look(place) for place in at["gradients/"]}
            return {result: mix("clip", *sorted((p, g[1] if isinstance(g, tuple) else g) for p, g in stored.items()))}
        case "adam" | "adam_weights" | "adam_moments" | "adam_of_sum" | "adam_resident" | "adam_visiting":
            state = at["state" if op == "adam_resident" else "state/"][0]
            gradients = one({"adam_of_sum": "sums/", "adam_resident": "reduced"}.get(op, "gradients/"))
            moments = mix("moments", look(state), gradients, *([one("clip")] if "clip" in at else []))
            if op == "adam_moments":
                return {state: moments}
            weights = at["resident" if op == "adam_resident" else "weights/"][0]
            made = {weights: mix("weights", look(weights), moments)}
            return made if op == "adam_weights" else made | {state: moments}
        case "result":
            for value in at["values"]:
                look(value)
    return {}
