"""What a machine can do: rates that `calibrate` measured there, or that a profile shipped with the package states.

    Hardware.find("h200")       a profile of `megacompile/profiles/`, or a JSON file
    Hardware.here(device)       what `megacompile calibrate` left in the user's cache; else the profile of this GPU
"""
from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from megacompile import schema
from megacompile.codegen.cache import cache_directory, processor_name
from megacompile.errors import ArgumentError, MegacompileError, shortened
from megacompile.ir.program import Lane
from megacompile.system.atomic_files import replace_file
from megacompile.system.regular_files import read_regular
from megacompile.version import __version__

PROFILES = Path(__file__).parents[1] / "profiles"

_rate = schema.finite(least=0)
_size = schema.whole(0, 2**63 - 1)
_both_ways = schema.record(dict.fromkeys(("forward", "backward"), _rate))
_lanes = schema.text(rf"({'|'.join(Lane)})( ({'|'.join(Lane)}))*", "lanes")
#: What a file of rates holds; `Hardware` itself sees to it that they are positive.
_PROFILE = schema.record({
    "name": schema.text(), "cores": schema.whole(1, 2**20), "device_type": schema.one_of(("cuda", "cpu")),
    "source": schema.text(), "gemm_flops": schema.table(schema.text(), _rate), "attention_efficiency": _both_ways,
    "memory_bandwidth": _rate, "launch_s": _rate, "link": schema.record(dict.fromkeys(("h2d", "d2h"), _rate)),
    "host_copy": _rate, "adam": _rate, "device_memory": _size, "host_memory": _size,
}, optional={
    "beside": schema.table(_lanes, schema.table(schema.one_of(tuple(Lane)), _rate)), "grouped_efficiency": _rate,
    "fused_attention": schema.one_of(("flash", "cudnn")), "flash_efficiency": schema.table(schema.text(), _rate),
    "attention_overhead": _both_ways, "adam_parts": schema.record(dict.fromkeys(("weights", "moments"), _rate)),
})


@dataclass(frozen=True)
class Hardware:
    """Rates of one machine, each measured alone and at its sustained clock.

    Attributes:
        name: of the device; `cores` that the host's kernels use.
        device_type: "cuda" or "cpu".
        source: where the numbers are from: "measured", with versions, or "nominal", from data sheets.
        gemm_flops: FLOP/s of large matrix products by dtype ("bfloat16", "float32"), on random data: power is the limit.
        grouped_efficiency: FLOP/s of grouped products, as experts have them, over the GEMMs'.
        attention_efficiency: causal attention's FLOP/s (half of the square counts) over the GEMMs', "forward" and "backward",
            of long sequences; flash_efficiency: of the flash kernel, which windows keep where `fused_attention` is another
            (empty: it is not); attention_overhead: further keys for each query that it takes as long as, blocks that a
            mask leaves a part of. (An H200 had 190 and 370.)
        memory_bandwidth: bytes/s of an elementwise kernel on the device, reads and writes together.
        launch_s: seconds between two small kernels.
        link: bytes/s of "h2d" and "d2h" copies from and to pinned memory.
        host_copy: bytes/s copied in host memory (each is read and written).
        adam: parameters/s of the host's fused AdamW; adam_parts: of its "weights" alone, and its "moments", over that. (Each
            moves 18 bytes of 26; a Xeon had 1.3 and 1.66.)
        beside: for sets of lanes that are busy together ("d2h h2d"), what is left of each lane's rate, 0 to 1.
        device_memory: bytes of the device; host_memory: bytes of the host.
        fused_attention: the kernel of templates there, "flash" or "cudnn"; `attention_efficiency` is this kernel's.
    """

    name: str
    cores: int
    device_type: str
    source: str
    gemm_flops: Mapping[str, float]
    attention_efficiency: Mapping[str, float]
    memory_bandwidth: float
    launch_s: float
    link: Mapping[str, float]
    host_copy: float
    adam: float
    device_memory: int
    host_memory: int
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    fused_attention: str = "flash"
    flash_efficiency: Mapping[str, float] = field(default_factory=dict)
    attention_overhead: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(("forward", "backward"), 0.0))
    grouped_efficiency: float = 1.0
    adam_parts: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(("weights", "moments"), 1.3))

    def __post_init__(self) -> None:
        rates = [*self.gemm_flops.values(), self.grouped_efficiency, *self.attention_efficiency.values(), self.memory_bandwidth,
                 *self.flash_efficiency.values(), *self.link.values(), self.host_copy, self.adam, *self.adam_parts.values(),
                 *(left for lanes in self.beside.values() for left in lanes.values())]
        if not all(rate > 0 for rate in rates):
            raise MegacompileError(f"the profile of {self.name} has a rate that is not positive: measure it again with "
                                   "megacompile calibrate")

    def attention_share(self, kernel: str, way: str) -> float:
        """Of the GEMMs' FLOP/s, what an attention kernel has, "forward" or "backward"."""
        own = kernel.startswith("flash") and self.flash_efficiency
        return (own or self.attention_efficiency)[way]

    def speeds(self, busy: Collection[Lane]) -> dict[Lane, float]:
        """What is left of the rate of each of the lanes that are busy at the same time. A set that was not measured is as
        slow as the slowest of its subsets: more work beside it makes nothing faster."""
        return {lane: min((lanes[lane] for together, lanes in self._beside if lane in lanes and together <= set(busy)),
                          default=1.0) for lane in busy}

    @functools.cached_property
    def _beside(self) -> list[tuple[frozenset[Lane], dict[Lane, float]]]:
        return [(frozenset(map(Lane, together.split())), {Lane(lane): left for lane, left in lanes.items()})
                for together, lanes in self.beside.items()]

    def table(self) -> str:
        """A row for each rate, in units for people."""
        rows = [(f"GEMM {dtype}", f"{rate / 1e12:.3g} TFLOPS") for dtype, rate in self.gemm_flops.items()]
        rows += [("grouped products", f"{self.grouped_efficiency:.0%} of GEMM")]
        for kernel, shares in (("attention", self.attention_efficiency), ("flash attention", self.flash_efficiency)):
            rows += [(f"{kernel} {way}", f"{left:.0%} of GEMM, {self.attention_overhead[way]:.0f} keys over")
                     for way, left in shares.items()]
        rows += [("device memory", f"{self.memory_bandwidth / 1e9:.3g} GB/s"), ("launch", f"{self.launch_s * 1e6:.2g} us")]
        rows += [(f"{way} copy", f"{rate / 1e9:.3g} GB/s") for way, rate in self.link.items()]
        rows += [("host copy", f"{self.host_copy / 1e9:.3g} GB/s"), ("AdamW", f"{self.adam / 1e9:.3g} G parameters/s")]
        rows += [(f"{part} alone", f"{faster:.0%} of AdamW") for part, faster in self.adam_parts.items()]
        rows += [(f"{together.replace(' ', ' beside ')}", ", ".join(f"{lane} {left:.0%}" for lane, left in lanes.items()))
                 for together, lanes in self.beside.items()]
        return f"{self.name}, {self.cores} cores: {self.source}\n{tabulate(rows, tablefmt='plain')}"

    # ---------------------------------------------------------------- finding and keeping
    @classmethod
    def find(cls, name: str | Path) -> Hardware:
        """A profile by name ("rtx4090", "RTX 4090", "4090", "A100-80GB"), or a JSON file. Raises `ArgumentError`, naming the
        profiles there are, or those that a name may stand for."""
        if os.path.isfile(name):  # unlike Path.is_file, no error for a name that no file can have
            return cls.load(Path(name))
        known = {path.stem: path for path in sorted(PROFILES.glob("*.json"))}
        short, size = _plain(str(name), known)
        meant = [stem for stem in known if short == stem] or [stem for stem in known if short and short in _parts(stem)]
        if len(meant) > 1:
            raise ArgumentError(f"{shortened(str(name))!r} may be {' or '.join(meant)}: give one of them")
        if not meant or not any(map(str.isdigit, short)):
            raise ArgumentError(f"there is no hardware {shortened(str(name))!r}: give one of {', '.join(known)}, or a file "
                                "that megacompile calibrate --output has written")
        found = cls.load(known[meant[0]])
        if size is not None and abs(size - found.device_memory / 2**30) > 0.1 * size:
            profile = f"the profile {meant[0]} {found.device_memory / 2**30:.0f} GiB"
            raise ArgumentError(f"{shortened(str(name))!r} has {size} GB and {profile}: give {meant[0]}, and "
                                f"device_memory='{size}GB' (--device-memory {size}GB)")
        return found

    @classmethod
    def here(cls, device: str | torch.device | None = None) -> Hardware:
        """This machine with this device. Raises `MegacompileError` if it was never measured and is no known GPU."""
        path = cache_path(device)
        if path.is_file():
            return cls.load(path)
        _, name = device_name(device)
        for profile in map(cls.load, sorted(PROFILES.glob("*.json"))):
            if re.match(rf"{re.escape(profile.name)}\b", name):
                return profile
        raise MegacompileError(f"{name} has not been measured: run megacompile calibrate once (a minute or two), or name "
                               f"a profile, such as hardware={min(p.stem for p in PROFILES.glob('*.json'))!r}")

    @classmethod
    def known(cls, device: str | torch.device | None = None) -> Hardware | None:
        """As `here`; None for a machine of which nothing is known."""
        try:
            return cls.here(device)
        except MegacompileError:
            return None

    @classmethod
    def load(cls, path: Path) -> Hardware:
        """Raises `MegacompileError` for a file that cannot be read, or does not say what a profile says."""
        try:
            found = json.loads(read_regular(path))
            _PROFILE(found, "profile")
            return cls(**found)
        except (OSError, RecursionError, ValueError) as error:
            if isinstance(error, MegacompileError):
                raise
            raise MegacompileError(f"{path} does not describe hardware: measure it again with megacompile calibrate\n"
                                   f"{error}") from error

    def save(self, path: Path) -> None:
        """As a JSON file. Raises `ArgumentError` where it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, [json.dumps(dataclasses.asdict(self), indent=1).encode() + b"\n"])
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written ({error.strerror}): give another file") from error


#: What names of cards have beside the card's own.
_MAKERS = re.compile(r"nvidia|geforce|tesla|sxm\d?|pcie|hbm\d?e?")


def _plain(name: str, known: Collection[str]) -> tuple[str, int | None]:
    """A name without case, separators, maker and kind of socket; and the memory that it says, in GB: "NVIDIA A100-SXM4-80GB" is
    "a100" with 80."""
    plain = _MAKERS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))
    for stem in known:
        for part in _parts(stem):
            if match := re.fullmatch(rf"{part}(\d{{2,3}})gb?", plain):
                return part, int(match[1])
    return plain, None


def _parts(stem: str) -> list[str]:
    """A profile's name, and what of it people say alone: its letters, its number."""
    return [stem, *(part for part in re.split(r"(?<=[a-z])(?=\d)", stem) if part != stem)]


def device_name(device: str | torch.device | None = None) -> tuple[str, str]:
    """(type, name) of a device; None: cuda if there is one."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name(chosen)
    return chosen.type, "a GPU" if chosen.type == "cuda" else processor_name()


def cache_path(device: str | torch.device | None = None) -> Path:
    """Where the rates of this machine, with these versions, are kept."""
    versions: list[Any] = [*device_name(device), len(os.sched_getaffinity(0)), __version__, torch.__version__]
    return cache_directory() / "hardware" / (re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(map(str, versions))) + ".json")
