"""Checks whether training a model fits host memory: from its parameters alone, before anything is traced, loaded or planned;
and with the state of an optimizer, before it is made."""
from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megacompile.errors import InsufficientMemoryError, MegacompileError, listed
from megacompile.frontend.tracing.fake_model import streamed_dtype
from megacompile.frontend.tracing.layers import LayerStack
from megacompile.ir.placement import LISTS_OF_UPDATED, Updated
from megacompile.ir.plan import STATE_SLABS
from megacompile.planning.config import StreamConfig
from megacompile.planning.memory import slab_bytes, state_slab_bytes
from megacompile.predict.durations import update_rate
from megacompile.predict.hardware import Hardware
from megacompile.runtime.memory.state_layout import ADAMW_STATE, NO_STATE, ElementState
from megacompile.runtime.optimizer.state_format import EIGHT_BITS, FLOAT32, FORMATS, StateFormat
from megacompile.sizes import format_bytes
from megacompile.weights.tiling import Tiling, host_margin_bytes


# -------------------- How an optimizer may keep its state in host memory: the combinations of its options, with their bytes
@dataclass(frozen=True)
class StateChoice:
    """A way to store optimizer state. `format`: of moments. `exact`: bf16 weights have FP32 masters. `on_arrival`: tiles are
    updated as their gradients arrive, so that no gradient waits in host memory, and nothing is clipped. `moments`: the number
    of moments that most parameters have."""

    format: StateFormat = FLOAT32
    exact: bool = True
    on_arrival: bool = False
    moments: int = 2

    @property
    def options(self) -> str:
        """The optimizer's options that select it."""
        master, update = "master='bfloat16'" * (not self.exact), "update='arrival'" * self.on_arrival
        return ", ".join(filter(None, (f"state_dtype='{self.format.name}'", master, update)))

    @property
    def state(self) -> ElementState:
        """The optimizer state of most parameters."""
        return ElementState(ADAMW_STATE.moments[:self.moments], self.format, self.exact)

    def bytes(self, dtype: torch.dtype) -> float:
        """Bytes of host memory for each trained parameter of a dtype: weight, gradient and state."""
        return dtype.itemsize * (1 if self.on_arrival else 2) + self.state.bytes(dtype)


#: The default state of an optimizer.
EXACT = StateChoice()


def combinations(dtypes: Iterable[torch.dtype], clipped: bool = False) -> list[StateChoice]:
    """All choices for weights of these dtypes. `clipped`: without updates on arrival."""
    masters = (True, False) if set(dtypes) == {torch.bfloat16} else (True,)  # an FP32 weight is its own master
    arrivals = (False,) if clipped else (False, True)
    return [StateChoice(*each[::-1]) for each in itertools.product(arrivals, masters, FORMATS.values())]


def by_accuracy(dtypes: Iterable[torch.dtype], clipped: bool = False) -> list[StateChoice]:
    """The choices to propose if memory is short. Those that cost less accuracy come first, and those that clip before those
    that do not."""
    def rank(choice: StateChoice) -> tuple[bool, bool]:
        return not choice.exact, choice.on_arrival

    alone = [c for c in combinations(dtypes, clipped) if c.format is EIGHT_BITS or (c.exact and not c.on_arrival)]
    return sorted(alone, key=rank)  # stable: formats stay in their order


def bytes_each(tiling: Tiling, on_arrival: bool) -> float:
    """Bytes of host memory for each parameter of a tile that is trained."""
    trained = [layout for layout in tiling.host.values() if layout.trainable]
    on_disk = sum(tiling.host[tile].host_parts()["moments"] for tile in tiling.on_disk)
    there = sum(layout.host_bytes(not on_arrival) for layout in trained) - on_disk
    return there / max(1, sum(layout.parameters for layout in trained))


def with_choice(tiling: Tiling, choice: StateChoice) -> Tiling:
    """The tiling of the same weights with the same moments, stored as `choice` says."""
    return tiling.with_states({name: replace(state, format=choice.format, exact=choice.exact)
                               for name, state in tiling.states.items()})


# --------------------
# Chooses the tiles whose moments are on disk: those that the user names, or the fewest that let training fit host memory.
#
# The tiles are spread evenly over the order of updates, so that the disk reads and writes while the host updates the others.
# Tiles of layers come first: boundary tiles are the largest, and each would need a slab of its size.
def with_disk(tiling: Tiling, config: StreamConfig, budget_bytes: int, on_arrival: bool, *, there: Collection[str] = (),
              in_memory: Collection[str] = ()) -> Tiling:
    """The tiling with moments on disk, if `config` has a disk. `budget_bytes`: host memory for training. `on_arrival`: no
    gradients wait there. `there`, `in_memory`: tiles whose moments stay on disk or in memory. Raises `MegacompileError` for
    named tiles that cannot be on disk. Does not refuse tiles that do not fit anyway."""
    if config.disk is None:
        return tiling
    named = config.disk_state
    able = [tile for tile in candidates(tiling, config) if tile not in in_memory]
    if named not in (None, "all"):
        _check_named(tiling, [tile for tile in named or () if tile not in in_memory], able)
    if named is not None:
        return replace(tiling, on_disk=tuple(tile for tile in able if named == "all" or tile in named or tile in there))
    fixed = [tile for tile in able if tile in there]
    free = [tile for tile in able if tile not in there]
    layers = [tile for tile in free if tile not in tiling.boundary()]
    boundary = [tile for tile in free if tile in tiling.boundary()]

    def chosen(count: int) -> Tiling:
        on_disk = {*fixed, *spread(layers, min(count, len(layers))), *boundary[:max(0, count - len(layers))]}
        return replace(tiling, on_disk=tuple(tile for tile in tiling.layouts if tile in on_disk))

    for slabs in (STATE_SLABS, 1) if config.state_slabs is None else (config.state_slabs,):
        def fits(count: int, slabs: int = slabs) -> bool:
            return tiles_bytes(chosen(count), on_arrival, slabs) <= budget_bytes

        # The first tiles gain nothing, since slabs are as large. From then on each gains as much as it has moments.
        fewest = 0 if fits(0) else bisect_left(range(len(free) + 1), True, lo=1, key=fits)
        if fewest <= len(free):
            return chosen(fewest)
    return chosen(len(free))


def tiles_bytes(tiling: Tiling, on_arrival: bool, slabs: int = 1) -> int:
    """Bytes of host memory for training, including the margin and `slabs` slabs of each rank for moments on disk."""
    return tiling.host_bytes(gradients=not on_arrival) + tiling.margin_bytes + state_slab_bytes(tiling, slabs)


def candidates(tiling: Tiling, config: StreamConfig) -> list[str]:
    """The tiles whose moments may be on disk: the host updates them, whole, and no option places them elsewhere."""
    elsewhere: set[str] = set()
    for option in LISTS_OF_UPDATED:
        names = getattr(config, option)
        if option != Updated.FROM_DISK and names not in (None, "all"):
            elsewhere.update(names)
    return [tile for tile, layout in tiling.layouts.items()
            if layout.disk_bytes and not layout.home and not layout.has_matrices and tile not in elsewhere]


def _check_named(tiling: Tiling, named: Sequence[str], able: Collection[str]) -> None:
    """Raises `MegacompileError` for a named tile that is not in `able`."""
    for tile in (tile for tile in named if tile not in able and tile in tiling.layouts):
        layout = tiling.layouts[tile]
        why = ("whole matrices are updated on the device" if layout.has_matrices
               else "it is a part of a tile, since experts are in pieces" if layout.home else "it is frozen")
        raise MegacompileError(f"disk_state names {tile}, whose moments cannot be on disk ({why}): leave it out; "
                               f"{listed(list(able)) or 'no tile'} can")


def spread(tiles: Sequence[str], count: int) -> list[str]:
    """`count` of the tiles, evenly spread."""
    return [tile for number, tile in enumerate(tiles)
            if (number + 1) * count // len(tiles) > number * count // len(tiles)]


#: The folder that refusals name.
DISK_EXAMPLE = "/nvme/state"


def check_host_first(model: nn.Module, stack: LayerStack, config: StreamConfig, available: int,
                     device_type: str, choice: StateChoice | None = None) -> None:
    """Raises `InsufficientMemoryError`, with what would fit, if the layers alone take more than the host has. All of them are
    read, but only a trace shows which other parameters are. `choice`: the optimizer's state; None: the smallest."""
    choice = choice or _choices(model, config)[-1]
    margin_bytes = host_margin_bytes(device_type)
    if host_bytes(stack.layers, config, choice) + margin_bytes > available:
        raise host_too_small(model, stack, config, choice, host_bytes([model], config, choice), available, margin_bytes)


def check_tiles(tiling: Tiling, available: int, config: StreamConfig) -> None:
    """Raises `InsufficientMemoryError`, before anything is allocated, if tiles do not fit even with the smallest state. They
    must fit beside the model's current weights, whose memory may not be freed in time (it may be shared). Raises what
    `with_disk` raises."""
    trained = [layout for layout in tiling.host.values() if layout.trainable]
    if not trained:
        return check_state(tiling, available, on_arrival=True, state="")
    least = by_accuracy({layout.dtype for layout in trained})[-1]
    smallest = with_disk(with_choice(tiling, least), config, available, least.on_arrival)
    return check_state(smallest, available, least.on_arrival, " with the smallest optimizer state", config)


def _choices(model: nn.Module, config: StreamConfig) -> list[StateChoice]:
    """The ways in which an optimizer may store its state of the model's parameters."""
    return by_accuracy({streamed_dtype(p, config.dtype) for p in model.parameters() if p.is_floating_point()})


def host_bytes(modules: Iterable[nn.Module], config: StreamConfig, choice: StateChoice, trained: bool | None = None) -> int:
    """Bytes of host memory to train these modules' parameters, shared ones counted once; the least, if moments may be on disk.
    `trained`: count all of them as trained, or as frozen; None: each as it is."""
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    on_disk = 0.0 if config.disk is None else choice.state.moment_bytes
    return round(sum(p.numel() * _bytes(streamed_dtype(p, config.dtype), choice, on_disk,
                                        p.requires_grad if trained is None or not p.is_floating_point() else trained)
                     for p in parameters))


def least_bytes(model: nn.Module) -> int:
    """Bytes of host memory for training with the smallest state, since the optimizer is not known yet."""
    config = StreamConfig()
    return host_bytes([model], config, _choices(model, config)[-1])


def _bytes(dtype: torch.dtype, choice: StateChoice, on_disk: float, trained: bool) -> float:
    return choice.bytes(dtype) - on_disk if trained else dtype.itemsize


def host_too_small(model: nn.Module, stack: LayerStack, config: StreamConfig, choice: StateChoice, needed: int,
                   available: int, margin_bytes: int, processes: int = 1) -> InsufficientMemoryError:
    """The error for a host with too little memory: the need with some state, what is available, and what would fit.
    `margin_bytes`: for the processes, beside the model."""
    beside = f" and {format_bytes(margin_bytes)} for {processes} processes" if processes > 1 else ""
    count = sum(p.numel() for p in model.parameters())
    with_state = "" if choice == EXACT else f" with {choice.options}"
    smaller = _smaller(model, stack, config, choice, needed, available, margin_bytes)
    options = "\nor ".join([*smaller, "use a host with more memory (host_memory), or several hosts for one "
                                    "copy (docs/several-gpus.md)"])
    return InsufficientMemoryError(
        f"training {type(model).__name__} takes {format_bytes(needed + margin_bytes)} of host memory ({count / 1e9:.3g} G "
        f"parameters, {needed / count:.3g} bytes each{with_state}{beside}) and {format_bytes(available)} are available: "
        f"{options}")


def _smaller(model: nn.Module, stack: LayerStack, config: StreamConfig, choice: StateChoice, needed: int,
             available: int, margin_bytes: int) -> list[str]:
    """Smaller choices that fit the host, the least change first. `margin_bytes`: for the processes, beside the model."""
    budget_bytes, found = available - margin_bytes, []
    for other in (replace(each, moments=choice.moments) for each in _choices(model, config)[1:]):
        size = host_bytes([model], config, other)
        if size < needed and size + other.on_arrival * _slab_bytes(model, stack, config) <= budget_bytes:
            dtype = config.dtype or next(model.parameters()).dtype
            count = sum(p.numel() for p in model.parameters())
            found.append(f"give the optimizer {other.options}: then it takes {format_bytes(size + margin_bytes)} "
                         f"({size / count:.3g} bytes each), {_speed(other, choice.state, dtype)}")
            break
    if config.disk is None and (moved := _moments_of_layers(stack, config, choice, needed - budget_bytes)) is not None:
        found.append(_with_disk(needed - moved[0] + margin_bytes, moved[1]))
    wide = any(streamed_dtype(p, config.dtype) == torch.float32 for p in model.parameters())
    narrow = host_bytes([model], StreamConfig(dtype=torch.bfloat16), choice)
    if wide and narrow <= budget_bytes:
        found.append(f"train in bfloat16: then it takes {format_bytes(narrow + margin_bytes)}")
    frozen = host_bytes([model], config, choice, trained=False)
    if needed > frozen <= budget_bytes:
        more = [host_bytes(stack.layers[first:], config, choice, trained=True)
                - host_bytes(stack.layers[first:], config, choice, trained=False) for first in range(len(stack.layers))]
        upper = sum(size <= budget_bytes - frozen for size in more)
        found.append(f"train adapters (LoRA) over frozen weights: then it takes {format_bytes(frozen + margin_bytes)}, "
                     "plus the adapters")
        if upper:
            found.append(f"train only the last {upper} of {len(stack.layers)} layers")
    each = choice.bytes(torch.bfloat16)
    if budget_bytes >= each * 10**8:
        found.append(f"use a model of up to {budget_bytes / each / 1e9:.3g} G parameters in bfloat16")
    found = found or ["use a smaller model"]
    if budget_bytes < frozen < needed:
        found[-1] += f" (even its frozen weights take {format_bytes(frozen + margin_bytes)})"
    return found


def _moments_of_layers(stack: LayerStack, config: StreamConfig, choice: StateChoice,
                       missing: int) -> tuple[int, int] | None:
    """The fewest layers that save this many bytes of host memory if their moments are on disk: (bytes that they save, without
    the slabs for these moments; bytes on disk). None if all layers together do not save as much."""
    on_disk = replace(config, disk=DISK_EXAMPLE)
    sizes = [host_bytes([layer], config, choice) - host_bytes([layer], on_disk, choice) for layer in stack.layers]
    for slabs in (STATE_SLABS, 1):
        moved = 0
        for count, size in enumerate(sorted(sizes, reverse=True), 1):
            moved += size
            if (saved := moved - min(slabs, count) * max(sizes)) >= missing:
                return saved, moved
    return None


def _with_disk(needed: int, on_disk: int) -> str:
    """The option that a refusal suggests to put moments on disk."""
    return (f"keep moments on a local drive (disk='{DISK_EXAMPLE}'): then it takes {format_bytes(needed)} of host memory and "
            f"{format_bytes(on_disk)} of the drive, and each step writes {format_bytes(on_disk)}")


def _slab_bytes(model: nn.Module, stack: LayerStack, config: StreamConfig) -> int:
    """The fewest bytes of slabs for gradients that are consumed on arrival: those of one layer, and of everything outside the
    layers."""
    layers = [host_bytes([layer], config, EXACT, trained=False) for layer in stack.layers]
    others = host_bytes([model], config, EXACT, trained=False) - host_bytes(stack.layers, config, EXACT, trained=False)
    return max(layers, default=0) + others


def check_state(tiling: Tiling, budget_bytes: int, on_arrival: bool, state: str = " with this optimizer",
                config: StreamConfig | None = None) -> None:
    """Raises `InsufficientMemoryError`, with the smallest change that fits, if tiles with their optimizer state take more than
    `budget_bytes` of host memory. `on_arrival`: no gradients wait there. `state`: its name, for the message. `config`: the
    options of `stream`, if moments may be on disk."""
    needed = tiles_bytes(tiling, on_arrival)
    if needed <= budget_bytes:
        return
    trained = [layout for layout in tiling.host.values() if layout.trainable]
    parameters = sum(s.count for layout in trained for s in layout.slices if s.trainable)
    kept = max(tiling.states.values(), key=lambda each: len(each.moments), default=NO_STATE)
    remedies = []
    for choice in by_accuracy({layout.dtype for layout in trained}, clipped=tiling.has_matrices):
        smaller = with_choice(tiling, choice)
        size = tiles_bytes(smaller, choice.on_arrival)
        slabs = tiling.ranks_here * slab_bytes(tiling, 1, ()) if choice.on_arrival else 0
        if size < needed and size + slabs <= budget_bytes:
            choice = replace(choice, moments=len(kept.moments))
            remedies.append(f"with {choice.options} it takes {format_bytes(size)} "
                            f"({bytes_each(smaller, choice.on_arrival):.3g} bytes each), "
                            f"{_speed(choice, kept, trained[0].dtype)}; docs/fine-tuning.md says what that costs in accuracy")
            break
    if config is not None and config.disk is None and tiling.hosts == 1:
        found = with_disk(tiling, replace(config, disk=DISK_EXAMPLE, disk_state=None), budget_bytes, on_arrival)
        if (least := tiles_bytes(found, on_arrival)) <= budget_bytes:
            written = tiling.ranks_here * sum(tiling.layouts[tile].disk_bytes for tile in found.on_disk)
            remedies.append(_with_disk(least, written))
    remedies = remedies or ["freeze some layers, train adapters, or use a machine with more memory"]
    raise InsufficientMemoryError(
        f"training{state} takes {format_bytes(needed)} of host memory ({parameters / 1e9:.3g} G trained parameters) and "
        f"{format_bytes(budget_bytes)} are available: " + "\nor ".join(remedies))


def _speed(choice: StateChoice, now: ElementState, dtype: torch.dtype) -> str:
    """The duration of the host's update with this state, relative to the state `now`, in words. Uses the rates of an H200's
    host if those of this machine are not known."""
    hardware = Hardware.known() or Hardware.find("h200")
    share = update_rate(hardware, now, dtype) / update_rate(hardware, choice.state, dtype)
    return f"and the host's update takes {share:.2f} times as long"
