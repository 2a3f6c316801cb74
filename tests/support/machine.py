"""What ops do to memory, told a second time: places that hold contents, instructions that read and write them.

Nothing here is the verifier's or the vocabulary's: lanes, reads, writes and meanings (`contents.py`) are written down anew from
what an op is for (`docs/schedule-language.md`), and only the graph's nodes are read.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

LANES = ("compute", "h2d", "d2h", "cpu", "pack", "collective", "disk_read", "disk_write")
READ, WRITE = "read", "write"
_OF_KERNELS = ("weights", "inputs", "saved", "gradient", "accumulators")
KERNELS = ("forward", "forward_saving", "loss", "evaluate", "outputs", "recompute_backward", "backward")

#: op -> (lane, what it reads, what it writes): a parameter, "result", or a part of its tiles in host memory.
TOUCHES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "pack": ("pack", ("weights/",), ("result",)),
    "prefetch": ("h2d", ("staging", "weights/"), ("result",)),
    **dict.fromkeys(KERNELS, ("compute", _OF_KERNELS, ("accumulators", "result"))),
    "zeros": ("compute", (), ("result",)),
    "scale": ("compute", ("value",), ("value",)),
    "reduce": ("compute", ("accumulators",), ("result",)),
    "offload": ("d2h", ("reduced",), ("result",)),
    "offload_norms": ("d2h", ("reduced",), ("gradients/",)),
    "accumulate": ("cpu", ("slab",), ("gradients/",)),
    "add_to_sum": ("cpu", ("slab", "gradients/"), ("sums/",)),
    "norms_of_sum": ("cpu", ("sums/",), ("gradients/",)),
    "clip": ("cpu", ("gradients/",), ("result",)),
    "update": ("cpu", ("slab", "gradients/", "clip", "moments"), ("weights/", "state/", "moments")),
    "update_weights": ("cpu", ("gradients/", "clip", "state/", "moments"), ("weights/",)),
    "update_moments": ("cpu", ("gradients/", "clip", "moments"), ("state/", "moments")),
    "update_from_sum": ("cpu", ("sums/", "clip"), ("weights/", "state/")),
    "update_on_device": ("compute", ("reduced", "clip"), ("resident", "state")),
    "momentum": ("h2d", ("gradients/", "weights/", "state/", "clip"), ("result",)),
    "update_visiting": ("h2d", ("gradients/", "clip", "momentum"), ("weights/", "state/", "result")),
    "hold": ("compute", ("reduced", "current"), ("result",)),
    "fetch_held": ("h2d", ("gradients/", "weights/", "state/"), ("held",)),
    "update_held": ("h2d", ("gradients/", "clip"), ("held",)),
    "return_weights": ("d2h", ("held",), ("weights/",)),
    "return_state": ("d2h", ("clip",), ("held", "state/")),
    "read_state": ("disk_read", ("moments/",), ("result",)),
    "write_state": ("disk_write", ("moments",), ("moments/",)),
    "fetch_state": ("cpu", ("state/", "weights/"), ("result",)),
    "store_state": ("cpu", ("state", "weights/"), ("state/",)),
    "fetch_gradients": ("cpu", ("gradients/",), ("result",)),
    "offload_weights": ("d2h", ("resident",), ("weights/",)),
    "result": ("compute", ("values",), ()),
    "lease": ("compute", (), ()),
    "leased": ("compute", (), ()),
    "output_gradient": ("compute", (), ("result",)),
    "stash": ("d2h", ("value",), ("result",)),
    "fetch": ("h2d", ("stashed",), ("result",)),
    "pack_shard": ("pack", ("weights/",), ("result",)),
    "prefetch_shard": ("h2d", ("staging", "weights/"), ("result",)),
    "gather": ("collective", ("shard",), ("result",)),
    "gather_resident": ("collective", ("resident",), ("resident",)),
    "gather_momentum": ("collective", ("momentum",), ("momentum",)),
    **dict.fromkeys(("reduce_scatter", "all_reduce"), ("collective", ("accumulators",), ("accumulators",))),
    "share_norms": ("collective", ("reduced",), ("reduced",)),
    "share_host_norms": ("cpu", ("gradients/",), ("gradients/",)),
    "total_loss": ("compute", ("values",), ("result",)),
    "share_loss": ("collective", ("value",), ("value",)),
    "announce": ("cpu", ("weights/", "moments/"), ("announced/",)),
}
#: What only several ranks do, all of them or none.
OF_SEVERAL = ("pack_shard", "prefetch_shard", "gather", "gather_resident", "reduce_scatter", "all_reduce", "share_norms",
              "share_host_norms", "momentum", "gather_momentum", "total_loss", "share_loss", "announce")
#: Sections that each of several ranks runs when it likes. Before them the caller waits until all have announced their updates.
ALONE = ("evaluate", "load", "store", "refresh", "rescue")

#: What any section of any program may do to a kind of place: (lane, access).
MAY_TOUCH: dict[str, frozenset[tuple[str, str]]] = {kind: frozenset(
    (lane, access) for lane, accesses in lanes.items() for access in accesses) for kind, lanes in {
        "W": {"h2d": (WRITE,), "compute": (READ,)},
        "G": {"compute": (READ, WRITE), "d2h": (READ,)},
        "S": {"pack": (WRITE,), "h2d": (READ,)},
        "D": {"d2h": (WRITE,), "cpu": (READ,)},
        "P": {"h2d": (WRITE,)},
        "H": {"d2h": (WRITE,), "h2d": (READ,)},
        "C": {"h2d": (WRITE,), "compute": (READ,)},
        "V": {"h2d": (WRITE,)},
        "N": {"h2d": (READ, WRITE)},
        "M": {"disk_read": (WRITE,), "cpu": (READ, WRITE), "disk_write": (READ,)},
        "R": {"h2d": (WRITE,), "compute": (READ,)},
        "RW": {"h2d": (WRITE,), "compute": (READ, WRITE), "d2h": (READ,)},
        "RS": {"cpu": (READ, WRITE), "compute": (READ, WRITE)},
        "RH": {"compute": (WRITE,), "h2d": (WRITE,), "d2h": (READ, WRITE)},
        "RG": {"compute": (READ, WRITE), "cpu": (WRITE,), "d2h": (READ,)},
        "moments": {"disk_read": (READ,), "disk_write": (WRITE,)},
        "weights": {"cpu": (READ, WRITE), "h2d": (READ, WRITE), "d2h": (WRITE,), "pack": (READ,)},
        "gradients": {"d2h": (WRITE,), "cpu": (READ, WRITE), "h2d": (READ,)},
        "sums": {"cpu": (READ, WRITE)}}.items()}
#: The same of programs of several ranks, which exchange weights and norms in a lane of its own.
_EXCHANGED = {"W": (WRITE,), "P": (READ,), "R": (WRITE,), **dict.fromkeys(("G", "N", "RW", "RG"), (READ, WRITE))}
MAY_TOUCH_OF_SEVERAL = {kind: accesses | {("collective", access) for access in _EXCHANGED.get(kind, ())}
                        for kind, accesses in MAY_TOUCH.items()}
#: `state` is not there: whoever touches a tile's state touches its weights too, and of two in different lanes one writes them.
#: Moments alone are the exception. Only another update follows them in another lane, and its gradients come after those read
#: for them.
#: `moments` are those on disk.


@dataclass(frozen=True)
class Job:
    """Who runs a program: `ranks` on each of `hosts`. The ranks of a host share its memory."""

    ranks: int = 1
    hosts: int = 1

    @property
    def several(self) -> bool:
        return self.ranks * self.hosts > 1


class HarmError(Exception):
    """What goes wrong in a program."""


def kind_of(place: str) -> str:
    """"W" for "WB0" and "Wb0", "weights" for "weights/layers.0"; "" for a value's own memory."""
    if place.startswith("%"):
        return ""
    if "/" in place:
        return place.split("/")[0]
    return "".join(letter for letter in place.split("@")[0] if letter.isupper()).removesuffix("B")


@dataclass(slots=True)
class Instruction:
    """One node, read off the graph: names of nodes by parameter, and everything else that it says. Nobody changes it, nor a
    step: to forbid that would double the time in which steps, of which there are millions, are made."""

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


@dataclass(slots=True)
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
    shared: bool = False  # whether it is one of several ranks' of a host that do the same

    @property
    def only_waits(self) -> bool:
        """Whether it reads no memory, but says that what it names is written."""
        return self.op == "announce"


#: A release of a slot belongs to no lane. In program order it still ends what is there.
NOWHERE = ""


class _Names(dict[str, str]):
    """What is known of nodes above."""

    def __missing__(self, name: str) -> str:
        raise HarmError(f"{name} is spoken of where it is not yet, or does not run anywhere")


@dataclass
class Machine:
    """Turns sections, run one after the other, into steps. State: what sections leave to those after them.

    `leases`: of each open forward, subject -> place; `sets`: the buffers for checkpoints that open forwards use; `carried`:
    place -> lane -> (whether it has written, event of its last access, event of its last write); `announced`: the event of the
    last announcement. `job`: who runs the sections. `known`: steps by the number of the section's run and their name, of
    sections that differ in waits and events alone; new ones are added."""

    job: Job = field(default_factory=Job)
    known: dict[tuple[int, str], Step] = field(default_factory=dict)
    leases: dict[int, dict[tuple[Any, ...], str]] = field(default_factory=dict)
    sets: dict[int, int] = field(default_factory=dict)
    carried: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    announced: Any = None
    runs: int = 0

    def wait_for_updates(self) -> list[Step]:
        """What the caller of several ranks does: nothing begins before the others' updates are over, as this rank's are."""
        return [] if self.announced is None else [Step("the caller", "wait", lane, event=self.announced) for lane in LANES]

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
                    step = self.known.get((number, each.name))
                    if step is None:
                        step = self.known[number, each.name] = self._touching(each, where)
                    steps.append(step)
                    lanes[each.name] = steps[-1].lane
                if op == "announce":
                    self.announced = number, each.name, "announced"
                    steps.append(Step(each.name, "record", lanes[each.name], event=self.announced))
        self._carry(left)
        return steps

    def _touching(self, each: Instruction, where: Mapping[str, str]) -> Step:
        lane, *touched = TOUCHES[each.op]
        at = {parameter: tuple(where[name] for name in names) for parameter, names in each.takes.items()}
        at["result"] = (where[each.name],)
        tiles = each.says.get("tiles") or ((each.says["tile"],) if "tile" in each.says else ())
        for part in ("weights", "gradients", "sums", "state", "moments", "announced"):
            at[f"{part}/"] = tuple(f"{part}/{tile}" for tile in tiles)
        if "staging" in at:
            at["weights/"] = ()
        if "moments" in at:
            at["state/"] = ()
        if each.op == "announce":
            at["moments/"] = tuple(f"moments/{tile}" for tile in each.says.get("on_disk") or ())
        if each.op in ("add_to_sum", "update") and "slab" in at:
            at["gradients/"] = ()
        reads, writes = (tuple(place for name in names for place in at.get(name, ())) for names in touched)
        return Step(each.name, each.op, lane, reads, writes, at, each.says, shared=self.job.ranks > 1)

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
