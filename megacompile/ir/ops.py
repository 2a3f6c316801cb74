"""The vocabulary of schedules: lanes, accesses, and `OPS`, one entry for each op.

Each fact about an op is stated once, here: its arguments, the lane that runs it, what it reads and writes, what it makes.
`program.py` says how ops make a program; code that reads programs imports from there.
"""
from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any


class Lane(enum.StrEnum):
    """A queue of instructions that run one after the other. Lanes run concurrently."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    CPU = "cpu"
    PACK = "pack"
    COLLECTIVE = "collective"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"


class Access(enum.StrEnum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True)
class Op:
    """One op of the language.

    `parameters` are the keyword arguments of its nodes, in printed order; `optional` ones may be absent (None).
    `reads` and `writes` name places by rule: a parameter's name stands for the places of the values that it holds, "result" for
    the node's own place, and "weights[tile]" for that part of the tile that parameter `tile` names (or of each of `tiles`).
    """

    name: str
    lane: Lane | None
    parameters: tuple[str, ...]
    optional: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    result: str | None = None  # what kind of value a node of this op is; None: no value
    meaning: str = ""
    home: str | None = None  # the part of the tile that holds the result where no `into` is given
    only_waits: bool = False  # its reads wait for writes, but read no memory: nothing waits for them

    @property
    def __name__(self) -> str:  # fx prints and hashes targets by name
        return self.name

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The parameters that every node must have."""
        return tuple(name for name in self.parameters if name not in self.optional)

    @property
    def collective(self) -> bool:
        """True if all ranks must run it together."""
        return self.lane == Lane.COLLECTIVE or self.name == "share_host_norms"

    def __call__(self, **_: Any) -> Any:
        raise AssertionError(f"{self.name} is an op of a schedule, which only an executor can run")


# Values that a compute op reads. `saved` is a forward_saving node whose residuals a backward consumes.
_RUN = ("template", "call", "mb", "weights", "inputs")

OPS: dict[str, Op] = {op.name: op for op in (
    Op("pack", Lane.PACK, ("tile", "into"), ("into",), ("weights[tile]",), ("result",), "staging",
       "copies a tile's weights into a pinned slab"),
    Op("prefetch", Lane.H2D, ("tile", "staging", "into"), ("staging", "into"), ("weights[tile]", "staging"), ("result",),
       "weights", "a tile's weights, host -> device"),
    Op("prefetch_routed", Lane.H2D, ("tile", "router", "into"), ("into",), ("weights[tile]", "router"), ("result",), "weights",
       "the weights of chosen experts, host -> device; others are stale"),
    # With several ranks each rank copies its share of a tile, and the ranks exchange shares.
    Op("pack_shard", Lane.PACK, ("tile", "into"), ("into",), ("weights[tile]",), ("result",), "packed_shard",
       "copies this rank's shard into a pinned slab"),
    Op("prefetch_shard", Lane.H2D, ("tile", "staging", "into"), ("staging", "into"), ("weights[tile]", "staging"), ("result",),
       "shard", "a shard of a tile's weights, host -> device"),
    Op("gather", Lane.COLLECTIVE, ("tile", "shard", "into"), ("into",), ("shard",), ("result",), "weights",
       "a tile's weights, from the shards of all ranks"),
    Op("resident", None, ("tile", "into"), ("into",), (), (), "weights", "the weights of a tile that stays on the device"),
    Op("resident_state", None, ("tile", "into"), ("into",), (), (), "state", "its optimizer state, if that stays there too"),
    Op("resident_gradients", None, ("tile", "into"), ("into",), (), (), "gradients", "its gradients, until the update"),
    Op("forward", Lane.COMPUTE, _RUN, ("weights",), ("weights", "inputs"), ("result",), "activation",
       "runs a template"),
    Op("forward_saving", Lane.COMPUTE, _RUN, ("weights",), ("weights", "inputs"), ("result",), "activation",
       "runs a template and keeps its residuals"),
    Op("loss", Lane.COMPUTE, (*_RUN, "accumulators"), ("weights", "accumulators"), ("weights", "inputs"),
       ("accumulators", "result"), "gradient", "the epilogue's loss, and its gradients for a unit loss"),
    Op("evaluate", Lane.COMPUTE, _RUN, ("weights",), ("weights", "inputs"), ("result",), "activation",
       "the epilogue's loss and logits, without gradients"),
    Op("outputs", Lane.COMPUTE, _RUN, ("weights",), ("weights", "inputs"), ("result",), "activation",
       "the epilogue's outputs without a loss"),
    Op("output_gradient", Lane.COMPUTE, ("call", "mb"), (), (), ("result",), "gradient",
       "the gradient of a call's outputs, which the caller sends"),
    Op("recompute_backward", Lane.COMPUTE, (*_RUN, "gradient", "accumulators"), ("weights", "accumulators"),
       ("weights", "inputs", "gradient"), ("accumulators", "result"), "gradient",
       "a layer's forward and backward in one graph"),
    Op("backward", Lane.COMPUTE, (*_RUN, "saved", "gradient", "accumulators"), ("weights", "accumulators"),
       ("weights", "inputs", "saved", "gradient"), ("accumulators", "result"), "gradient",
       "a layer's backward from its residuals"),
    Op("zeros", Lane.COMPUTE, ("tile",), (), (), ("result",), "accumulators", "a tile's FP32 gradient accumulators, zeroed"),
    Op("scale", Lane.COMPUTE, ("value",), (), ("value",), ("value",), None,
       "multiplies by the gradient of the caller's loss"),
    Op("reduce_scatter", Lane.COLLECTIVE, ("tile", "accumulators"), (), ("accumulators",), ("accumulators",), None,
       "adds up this rank's shard over all ranks"),
    # With several hosts, ranks with the same shard add it up, each on its host.
    Op("all_reduce", Lane.COLLECTIVE, ("tile", "accumulators"), (), ("accumulators",), ("accumulators",), None,
       "adds up this rank's shard over all hosts"),
    Op("reduce", Lane.COMPUTE, ("tile", "accumulators", "into"), ("into",), ("accumulators",), ("result",), "reduced",
       "FP32 accumulators -> gradients in link precision, and norms"),
    Op("share_norms", Lane.COLLECTIVE, ("tile", "reduced"), (), ("reduced",), ("reduced",), None,
       "norms of whole gradients, from those of all shards"),
    Op("offload", Lane.D2H, ("tile", "reduced", "into"), ("into",), ("reduced",), ("result",), "slab",
       "gradients, device -> host", "gradients"),
    Op("offload_norms", Lane.D2H, ("tile", "reduced"), (), ("reduced",), ("gradients[tile]",), None,
       "only the norms, for gradients that stay on the device"),
    Op("accumulate", Lane.CPU, ("tile", "slab", "overwrite"), (), ("slab",), ("gradients[tile]",), None,
       "adds a slab to the tile's gradients"),
    Op("share_host_norms", Lane.CPU, ("tile",), (), ("gradients[tile]",), ("gradients[tile]",), None,
       "as `share_norms`, of norms in host memory"),
    Op("clip", Lane.CPU, ("tiles",), (), ("gradients[tiles]",), ("result",), "clip",
       "the norm of all gradients, and the factor that clips"),
    # Updates run the `rule` of the tile's optimizer (left out: AdamW's). They differ in their lanes and in what they read and
    # write.
    Op("update", Lane.CPU, ("tile", "rule", "clip", "slab", "moments"), ("rule", "clip", "slab", "moments"),
       ("gradients[tile]", "slab", "clip", "moments"), ("weights[tile]", "moments"),
       None, "the update of one tile; gradients and moments may be in slabs"),
    Op("update_weights", Lane.CPU, ("tile", "rule", "clip", "moments"), ("rule", "clip", "moments"),
       ("gradients[tile]", "clip", "moments"), ("weights[tile]",), None,
       "only the weights of that update"),
    # It touches no weights, or prefetches would wait for it. Updates in other lanes are ordered after it by their gradients,
    # which overwrite the gradients that it reads.
    Op("update_moments", Lane.CPU, ("tile", "rule", "clip", "moments"), ("rule", "clip", "moments"),
       ("gradients[tile]", "clip", "moments"), ("moments",), None, "the moments of that update, after its weights"),
    Op("add_to_sum", Lane.CPU, ("tile", "slab", "overwrite"), ("slab",), ("gradients[tile]", "slab"), ("sums[tile]",), None,
       "adds a wave's gradients to the tile's FP32 sum"),
    Op("norms_of_sum", Lane.CPU, ("tile",), (), ("sums[tile]",), ("gradients[tile]",), None,
       "writes the norms of the sum to where the clip reads them"),
    Op("update_from_sum", Lane.CPU, ("tile", "rule", "clip"), ("rule", "clip"), ("sums[tile]", "clip"), ("weights[tile]",),
       None, "the same update, of the FP32 sum"),
    # A disk reads and writes at the same time, so each has a lane.
    Op("read_state", Lane.DISK_READ, ("tile", "into"), ("into",), ("moments[tile]",), ("result",), "moments",
       "a tile's moments, disk -> a slab"),
    Op("write_state", Lane.DISK_WRITE, ("tile", "moments"), (), ("moments",), ("moments[tile]",), None,
       "a tile's updated moments, slab -> disk"),
    # With several ranks each has a shard of every matrix, and the update reads the momentum of all of it.
    Op("momentum", Lane.H2D, ("tile", "clip", "into"), ("into",), ("gradients[tile]", "weights[tile]", "clip"), ("result",),
       "momentum", "the momentum of this rank's shard of a tile's matrices, which the update will store"),
    Op("gather_momentum", Lane.COLLECTIVE, ("tile", "momentum"), (), ("momentum",), ("momentum",), None,
       "the momentum of whole matrices, from the shards of all ranks"),
    # Both directions use one lane; otherwise prefetches would wait for one lane more, in every program.
    Op("update_visiting", Lane.H2D, ("tile", "rule", "clip", "momentum", "into"), ("rule", "momentum", "into"),
       ("gradients[tile]", "clip", "momentum"), ("weights[tile]", "result"), "visiting",
       "the same update, on the device, a chunk at a time, and back"),
    # A tile that the device holds arrives before the clip is known, beside the backward, and returns beside the next forward.
    Op("hold", Lane.COMPUTE, ("tile", "reduced", "current", "into"), ("current", "into"), ("reduced", "current"), ("result",),
       "held", "device memory for a tile's update, with its gradients, and its weights if they are on the device"),
    # Moments are no place of their own: gradients arrive after whatever still updates those of the step before.
    Op("fetch_held", Lane.H2D, ("tile", "held"), (), ("weights[tile]", "gradients[tile]"), ("held",), None,
       "its optimizer state, host -> device, and its weights if `hold` had none"),
    Op("held", None, ("tile", "into"), ("into",), (), (), "held", "what the backward fetched for its update"),
    # Beside the next forward, which compute has begun. It reads the host's gradients only to complete a step that failed.
    Op("update_held", Lane.H2D, ("tile", "rule", "held", "clip"), ("rule",), ("gradients[tile]", "clip"), ("held",), None,
       "the same update, on the device"),
    Op("return_weights", Lane.D2H, ("tile", "held"), (), ("held",), ("weights[tile]",), None,
       "its updated weights, device -> host"),
    # It touches no weights, as `update_moments`.
    Op("return_state", Lane.D2H, ("tile", "held", "clip"), (), ("clip",), ("held",), None,
       "its updated state, device -> host; ends its life on the device"),
    Op("announce", Lane.CPU, ("tiles", "on_disk"), ("on_disk",), ("weights[tiles]", "moments[on_disk]"), (), None,
       "tells other ranks that this rank's shards are updated",
       only_waits=True),
    # Host state is not a place of its own: every op that touches it also touches the tile's weights, which orders both.
    Op("fetch_state", Lane.CPU, ("tile", "into"), ("into",), ("weights[tile]",), ("result",), "state",
       "a tile's optimizer state, host -> device"),
    Op("store_state", Lane.CPU, ("tile", "state"), (), ("weights[tile]", "state"), (), None,
       "a tile's optimizer state, device -> host"),
    # Also in the cpu lane, so that schedules without it do not wait for one lane more.
    Op("fetch_gradients", Lane.CPU, ("tile", "into"), ("into",), ("gradients[tile]",), ("result",), "gradients",
       "gradients that the host changed, host -> device"),
    Op("offload_weights", Lane.D2H, ("tile", "resident"), (), ("resident",), ("weights[tile]",), None,
       "updated weights, device -> host"),
    Op("update_on_device", Lane.COMPUTE, ("tile", "rule", "resident", "state", "reduced", "clip"), ("rule", "clip"),
       ("state", "reduced", "clip"), ("resident", "state"), None,
       "the same update, bit for bit, of a tile on the device"),
    Op("gather_resident", Lane.COLLECTIVE, ("tile", "resident"), (), ("resident",), ("resident",), None,
       "weights that ranks have updated, from all ranks"),
    Op("total_loss", Lane.COMPUTE, ("values",), (), ("values",), ("result",), "activation", "the sum of losses"),
    Op("share_loss", Lane.COLLECTIVE, ("value",), (), ("value",), ("value",), None, "adds up a loss over all ranks"),
    Op("result", Lane.COMPUTE, ("key", "values"), (), ("values",), (), None, "hands values to the caller"),
    Op("lease", Lane.COMPUTE, ("value",), (), ("value",), (), None, "keeps a value for a later section"),
    Op("leased", Lane.COMPUTE, ("call", "mb", "tile"), ("call", "mb", "tile"), (), (), "activation",
       "what an earlier section kept: a call's value, or a tile's accumulators"),
    Op("stash", Lane.D2H, ("call", "mb", "value", "into"), ("into",), ("value",), ("result",), "stashed",
       "an activation checkpoint, device -> a pinned buffer"),
    Op("stashed", None, ("call", "mb", "into"), ("into",), (), (), "stashed", "a checkpoint that an earlier section stashed"),
    Op("fetch", Lane.H2D, ("call", "mb", "stashed", "into"), ("into",), ("stashed",), ("result",), "checkpoint",
       "a stashed checkpoint, host -> a device slot"),
    Op("release", None, ("value",), (), (), ("value",), None, "ends a value's life in its place"),
    Op("record", None, ("node",), (), (), (), "event", "an event on the node's lane, once the node is done"),
    Op("wait", None, ("lane", "event"), (), (), (), None, "the lane waits for the event"),
    Op("enter", None, ("place", "access", "lane"), (), (), (), "event",
       "the event of a lane's last access in earlier sections"),
    Op("leave", None, ("place", "access", "event"), (), (), (), None,
       "passes later sections the event of a last access"),
)}

#: Ops that run a template; the variant has the op's name.
TEMPLATE_OPS = frozenset({"forward", "forward_saving", "loss", "evaluate", "outputs", "recompute_backward", "backward"})
#: Ops that update a tile's weights.
UPDATE_OPS = ("update", "update_weights", "update_from_sum", "update_on_device", "update_visiting", "update_held")
