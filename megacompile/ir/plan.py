"""Plan: every choice that a planner or a user makes about a schedule, as data. Passes read it and nothing else."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacompile.errors import MegacompileError, shortened
from megacompile.limits import check_micro_batches, check_whole

#: When tiles are updated: at the end of a step, or each as its gradients arrive.
UPDATES = ("step", "arrival")
#: Sequences' worth of tokens beyond which a larger micro-batch is no faster: kernels are full by then.
FULL_TOKENS = 16384
#: What layers that keep residuals keep: all that their backward needs, or the results of attention, around which the rest is
#: computed again.
RESIDUALS = ("all", "attention")


@dataclass(frozen=True)
class CaptureKey:
    """Which graphs of a model a batch needs. `further`: the batch arguments beside those that every batch has, by name (a mask,
    positions that start again within a row), masks of pairs with what they are ("mask: bool [B, 1, T, T]"); `evaluating`:
    those of evaluation mode, if they are others than in training mode; `without_adapters`: with PEFT's adapters switched off;
    `images`: how many each sequence has, of a model that takes some."""

    further: tuple[str, ...] = ()
    evaluating: bool = False
    without_adapters: bool = False
    images: int = 1

    @property
    def packed(self) -> bool:
        """Whether positions alone say which tokens of a row belong together, as those of packed rows do."""
        return self.further == ("position_ids",)


PLAIN = CaptureKey()


@dataclass(frozen=True)
class Shape:
    """What a program is compiled for: sequences, tokens a sequence, whether there are labels, whether it trains; and whether
    it must be `lean`, without the residuals that a plan keeps where memory is left. `update` is "step" or "arrival" (see
    `Plan`); `whole_step` is one program for a step, otherwise there are sections of their own. `output` is what the epilogue
    gives: the model's "loss" (without labels its logits alone), or a head's outputs, which the caller differentiates: "logits",
    or the name of a function of tokens. `further`, `evaluating`, `without_adapters` and `images` say which of the model's
    captures serves it (`CaptureKey`)."""

    batch: int
    length: int
    labels: bool
    training: bool
    lean: bool = False
    update: str = "step"
    whole_step: bool = False
    output: str = "loss"
    further: tuple[str, ...] = ()
    evaluating: bool = False
    without_adapters: bool = False
    images: int = 1

    @property
    def capture_key(self) -> CaptureKey:
        return CaptureKey(self.further, self.evaluating, self.without_adapters, self.images)

    @property
    def packed(self) -> bool:
        return self.capture_key.packed


def kept_residuals(saved_layers: int, residuals: str) -> str:
    """How many layers keep residuals, and which, if not all: as tables say it."""
    return f"{saved_layers}{f' ({residuals})' if residuals != 'all' else ''}"


def check_residuals(residuals: str | None, checkpoint_interval: int | None) -> None:
    """Raises `MegacompileError` where these do not go together."""
    if residuals == "attention" and (checkpoint_interval or 1) > 1:
        raise MegacompileError("a block of several layers keeps all residuals for a while: attention's alone (residuals) go "
                               "with checkpoint_interval=1")


@dataclass(frozen=True)
class Plan:
    """How one batch shape is trained.

    `micro_batches` are sequences each, in order. Blocks of `checkpoint_interval` layers lie between two activation
    checkpoints; the last `saved_layers` layers keep their residuals and are not recomputed, or, where `residuals` are those of
    "attention", keep its results and recompute the rest. A whole step goes forward and back in `waves`, consecutive shares of
    the micro-batches. Tiles are updated at "step", after an exact clip over all gradients, or each on "arrival" of its
    gradients, unclipped; in `update_order` (empty: as they arrive). `resident` tiles keep their weights on the device; those
    of them in `resident_state` their optimizer state and gradients too, and are updated there. `visiting_state` tiles go there
    for their update, a chunk at a time, and home again. With `deferred_moments` the host updates the weights of all other tiles
    first, and then their moments, beside the next forward and backward.
    `pinned` says that tiles themselves are pinned; otherwise weights pass through `staging_slabs` and gradients through
    `gradient_slabs` pinned slabs (the paper's pinned slab pool). Templates compute what treats each token alone
    `token_chunk` positions of a micro-batch at a time; 0: all at once. The checkpoints of the lowest `host_checkpoints`
    borders between blocks, whose backward comes last, wait for it in host memory, and come back into `checkpoint_slots`
    device slots. Between waves gradients are added up on the device, in FP32 accumulators, but those of `host_sums` tiles in
    FP32 in host memory, to which each wave's come in link precision. `output`: see `Shape`."""

    batch: int
    length: int
    micro_batches: tuple[int, ...]
    checkpoint_interval: int = 1
    saved_layers: int = 0
    weight_slots: int = 2
    gradient_slots: int = 2
    resident: tuple[str, ...] = ()
    resident_state: tuple[str, ...] = ()
    pinned: bool = True
    staging_slabs: int = 2
    gradient_slabs: int = 12
    waves: int = 1
    update: str = "step"
    token_chunk: int = 0
    update_order: tuple[str, ...] = ()
    host_checkpoints: int = 0
    checkpoint_slots: int = 2
    host_sums: tuple[str, ...] = ()
    output: str = "loss"
    visiting_state: tuple[str, ...] = ()
    deferred_moments: bool = False
    residuals: str = "all"

    def __post_init__(self) -> None:
        """Raises `MegacompileError` for a plan that cannot be: a person may have written it."""
        least = {"batch": 1, "length": 1, "weight_slots": 1, "gradient_slots": 1, "staging_slabs": 1, "gradient_slabs": 1,
                 "checkpoint_slots": 1, "checkpoint_interval": 1, "saved_layers": 0, "token_chunk": 0, "host_checkpoints": 0}
        for name, value in least.items():
            check_whole(name, getattr(self, name), value)
        check_micro_batches(len(self.micro_batches))
        for name in ("resident", "resident_state", "update_order", "host_sums", "visiting_state"):
            tiles = getattr(self, name)
            if len(set(tiles)) < len(tiles):
                raise MegacompileError(f"{name} names a tile twice: name each once")
        if sum(self.micro_batches) != self.batch or min(self.micro_batches, default=0) < 1:
            raise MegacompileError(f"micro-batches of {shortened(str(self.micro_batches))} are not a split of {self.batch} "
                                   "sequences")
        if not 1 <= self.waves <= len(self.micro_batches):
            raise MegacompileError(f"{len(self.micro_batches)} micro-batches cannot go in {self.waves} waves: plan fewer waves "
                                   "or smaller micro-batches")
        if self.update not in UPDATES:
            raise MegacompileError(f"update is {self.update!r}, and must be one of {', '.join(UPDATES)}")
        if self.residuals not in RESIDUALS:
            raise MegacompileError(f"residuals is {self.residuals!r}, and must be one of {', '.join(RESIDUALS)}")
        check_residuals(self.residuals, self.checkpoint_interval)
        if not set(self.resident_state) <= set(self.resident):
            raise MegacompileError("what is updated on the device (resident_state) must have its weights there (resident)")

        if self.host_sums and self.waves == 1:
            raise MegacompileError("gradients are added up on the host (host_sums) between waves, and there is one wave")
        if set(self.host_sums) & set(self.resident_state):
            raise MegacompileError("what is updated on the device (resident_state) has its gradients added up there, not in "
                                   "host memory (host_sums)")
        if self.visiting_state and self.update == "arrival":
            raise MegacompileError("tiles visit the device for their update (visiting_state) at the end of a step, not on "
                                   "arrival of their gradients")
        if self.deferred_moments and self.update == "arrival":
            raise MegacompileError("deferred_moments updates moments after all weights at the end of a step, not on arrival of "
                                   "gradients: leave out one of the two")
        if set(self.visiting_state) & {*self.resident_state, *self.host_sums}:
            raise MegacompileError("what visits the device for its update (visiting_state) neither lives there "
                                   "(resident_state) nor has its gradients added up in host memory (host_sums)")

    def wave_of(self, mb: int) -> int:
        return mb * self.waves // len(self.micro_batches)

    def wave(self, number: int) -> list[int]:
        """The micro-batches of a wave, by number."""
        return [mb for mb in range(len(self.micro_batches)) if self.wave_of(mb) == number]

    def blocks(self, layers: Sequence[str]) -> list[tuple[str, ...]]:
        """The layers that are recomputed, in blocks; the last block may be shorter. Layers that keep their residuals
        belong to none."""
        recomputed = layers[:max(0, len(layers) - self.saved_layers)]
        step = self.checkpoint_interval
        return [tuple(recomputed[i:i + step]) for i in range(0, len(recomputed), step)]

    def from_host(self, layers: Sequence[str]) -> list[str]:
        """The layers whose input waits in host memory: each begins a block. (The first block's input is the prologue's output,
        which every layer shares in part; it stays.)"""
        return [block[0] for block in self.blocks(layers)[1:1 + self.host_checkpoints]]


def split(batch: int, micro_batch_size: int) -> tuple[int, ...]:
    """Sequences of each micro-batch; the last may be smaller. Raises `MegacompileError` for more than a program takes."""
    check_micro_batches(-(-batch // micro_batch_size))
    whole, rest = divmod(batch, micro_batch_size)
    return (micro_batch_size,) * whole + ((rest,) if rest else ())
