"""The rates of a machine, measured there by `calibrate` or given by a profile that is shipped with the package.

    Hardware.find("h200")       a profile of `megacompile/profiles/`, or a JSON file
    Hardware.find("8xh200")     the profile of a host with eight of them
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
from megacompile.system.files import read_regular, replace_file
from megacompile.version import __version__

PROFILES = Path(__file__).parents[1] / "profiles"
#: Bytes of host memory that AdamW reads and writes for each parameter in bf16. It takes what the memory gives.
ADAM_BYTES = 26
#: Bytes/s between hosts that each device is taken to have where a profile does not say: a link of 100 Gbit/s. It is nominal.
NETWORK_BANDWIDTH = 12.5e9
#: Bytes/s of the drives that a machine is taken to have where its profile does not say: four NVMe drives of PCIe 4, from data
#: sheets.
DISK: Mapping[str, float] = {"read": 27e9, "write": 11e9}
#: The lanes whose bytes cross the host's memory.
_CROSSING = frozenset({Lane.CPU, Lane.PACK, Lane.H2D, Lane.D2H})

_rate = schema.finite(least=0)
_size = schema.whole(0, 2**63 - 1)
_disk = schema.record(dict.fromkeys(("read", "write"), _rate))
_both_ways = schema.record(dict.fromkeys(("forward", "backward"), _rate))
_lanes = schema.text(rf"({'|'.join(Lane)})( ({'|'.join(Lane)}))*", "lanes")
#: The contents of a file of rates; `Hardware` itself checks that rates are positive.
_PROFILE = schema.record({
    "name": schema.text(), "cores": schema.whole(1, 2**20), "device_type": schema.one_of(("cuda", "cpu")),
    "source": schema.text(), "gemm_flops": schema.table(schema.text(), _rate), "attention_efficiency": _both_ways,
    "memory_bandwidth": _rate, "launch_s": _rate, "link": schema.record(dict.fromkeys(("h2d", "d2h"), _rate)),
    "host_copy": _rate, "adam": _rate, "device_memory": _size, "host_memory": _size,
}, optional={
    "beside": schema.table(_lanes, schema.table(schema.one_of(tuple(Lane)), _rate)), "grouped_efficiency": _rate,
    "grouped_overhead": schema.finite(least=0), "recurrence_efficiency": _rate,
    "fused_attention": schema.one_of(("flash", "cudnn")), "flash_efficiency": schema.table(schema.text(), _rate),
    "attention_overhead": _both_ways, "peer_bandwidth": _rate, "network_bandwidth": _rate, "disk": _disk,
    "adam_parts": schema.record(dict.fromkeys(("weights", "moments"), _rate)),
    "adam_formats": schema.record(dict.fromkeys(("bfloat16", "8bit"), _rate)),
    "adam_rounded": schema.record(dict.fromkeys(("float32", "bfloat16", "8bit"), _rate)),
})

#: The profile of one device, which the profile of a host with several such devices adds to.
_LIKE = schema.text(r"[a-z0-9]+", "the name of a profile")


@dataclass(frozen=True)
class Hardware:
    """Rates of one machine, each measured alone and at its sustained clock.

    Attributes:
        name: name of the device.
        cores: how many cores the host's kernels use.
        device_type: "cuda" or "cpu".
        source: where the numbers are from: "measured", with versions, or "nominal", from data sheets.
        gemm_flops: FLOP/s of large matrix products by dtype ("bfloat16", "float32", "float8" where the device has
            it, with one scale for each matrix), on random data, which draw the most power.
        grouped_efficiency: FLOP/s of grouped products (those of experts) with many rows for each expert, over that of GEMMs.
        grouped_overhead: what each expert of a grouped product costs beside its rows, as a number of rows: kernels multiply
            whole blocks of rows.
        recurrence_efficiency: FLOP/s of linear recurrences, counted in chunks of 64 tokens, over that of GEMMs.
        attention_efficiency: FLOP/s of causal attention on long sequences (half of the square counts) over that of GEMMs,
            "forward" and "backward", for the kernel `fused_attention`.
        flash_efficiency: the same for the flash kernel, which attention with windows uses even if `fused_attention` is another
            kernel; empty if it is the flash kernel.
        attention_overhead: time of the blocks that a mask hides in part, as a number of additional keys per query. (190 and 370
            on an H200.)
        memory_bandwidth: bytes/s of an elementwise kernel on the device, reads and writes together.
        launch_s: seconds between two small kernels.
        link: bytes/s of "h2d" and "d2h" copies from and to pinned memory.
        host_copy: bytes/s copied in host memory (each byte is read and written).
        adam: parameters/s of the host's fused AdamW.
        adam_parts: the rates of updating its "weights" alone and its "moments" alone, over `adam`. (Each moves 18 bytes of 26;
            1.3 and 1.66 on a Xeon.)
        adam_formats: the rates with moments in "bfloat16" and in "8bit", over `adam`, which is with moments in float32. (They
            move 18 and 14 bytes; 1.29 and 1.03 to 1.10 on Xeons with 16 cores, whose arithmetic limits 8 bits.)
        adam_rounded: the rates with bf16 weights that are their own masters, over `adam`, by the format of the moments. (They
            move 4 bytes less, and random bits for the rounding take arithmetic.)
        beside: for sets of lanes that are busy together ("d2h h2d"), the share of each lane's rate that remains, 0 to 1.
        peer_bandwidth: bytes/s that each device receives from the other devices of the host while all of them do; None: devices
            have no link of their own, and what they exchange crosses the host's memory twice.
        network_bandwidth: bytes/s that each device sends to other hosts, and receives from them, while all devices of the host
            do, for sums between copies of the model, and for gathers and sums within a copy that hosts divide; None: unknown,
            and `NETWORK_BANDWIDTH` is used. Calibration does not measure it, so every value is nominal.
        disk: bytes/s of "read" and "write" of a file on the drives for optimizer state, around the page cache. `beside` says
            what remains while they do both ("disk_read disk_write").
        device_memory: bytes of the device.
        host_memory: bytes of the host.
        fused_attention: the attention kernel of templates on this machine, "flash" or "cudnn".
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
    grouped_overhead: float = 0.0
    recurrence_efficiency: float = 0.13
    adam_parts: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(("weights", "moments"), 1.3))
    adam_formats: Mapping[str, float] = field(default_factory=lambda: {"bfloat16": 1.25, "8bit": 1.10})
    adam_rounded: Mapping[str, float] = field(default_factory=lambda: {"float32": 1.0, "bfloat16": 1.2, "8bit": 0.73})
    peer_bandwidth: float | None = None
    network_bandwidth: float | None = None
    disk: Mapping[str, float] = field(default_factory=lambda: dict(DISK))

    def __post_init__(self) -> None:
        rates = [*self.gemm_flops.values(), self.grouped_efficiency, self.recurrence_efficiency,
                 *self.attention_efficiency.values(), self.memory_bandwidth,
                 *self.flash_efficiency.values(), *self.link.values(), self.host_copy, self.adam, *self.adam_parts.values(),
                 *self.adam_formats.values(), *self.adam_rounded.values(),
                 *self.disk.values(),
                 *(left for lanes in self.beside.values() for left in lanes.values()),
                 *(rate for rate in (self.peer_bandwidth, self.network_bandwidth) if rate is not None)]
        if not all(rate > 0 for rate in rates):
            raise MegacompileError(f"the profile of {self.name} has a rate that is not positive: measure it again with "
                                   "megacompile calibrate")

    @property
    def peer_rate(self) -> float:
        """Bytes/s that each device receives from the others while all of them do."""
        return self.peer_bandwidth or 1 / (1 / self.link["h2d"] + 1 / self.link["d2h"])

    @property
    def network_rate(self) -> float:
        """Bytes/s between each device and other hosts."""
        return self.network_bandwidth or NETWORK_BANDWIDTH

    def attention_share(self, kernel: str, way: str) -> float:
        """FLOP/s of an attention kernel over those of GEMMs. `way`: "forward" or "backward"."""
        own = kernel.startswith("flash") and self.flash_efficiency
        return (own or self.attention_efficiency)[way]

    def speeds(self, busy: Collection[Lane], ranks: int = 1, network: bool = False) -> dict[Lane, float]:
        """The share of each lane's rate that remains while all of `busy` work, on each of `ranks` devices of a host. A set that
        was not measured is as slow as the slowest of its measured subsets, since more work beside a lane does not make it
        faster. `network`: exchanges cross it, and each device's link to the host with it."""
        speeds = {lane: min((lanes[lane] for together, lanes in self._beside if lane in lanes and together <= set(busy)),
                            default=1.0) for lane in busy}
        return self._shared(speeds, ranks, network) if ranks > 1 or network else speeds

    def _shared(self, speeds: dict[Lane, float], ranks: int, network: bool) -> dict[Lane, float]:
        """The remaining shares if several devices share the host's memory. Without links between them, and over a
        network, exchanges share each device's link to the host with its copies."""
        if (network or self.peer_bandwidth is None) and Lane.COLLECTIVE in speeds and {Lane.H2D, Lane.D2H} & speeds.keys():
            shared = speeds.keys() & {Lane.COLLECTIVE, Lane.H2D, Lane.D2H}
            speeds |= {lane: 0.5 * speeds[lane] for lane in shared}
        traffic = self._host_traffic(speeds, ranks)
        most = max([self._host_traffic({Lane.CPU: 1.0}, 1), *(self._host_traffic(lanes, 1) for _, lanes in self._beside)])
        crossing = _CROSSING | ({Lane.COLLECTIVE} if self.peer_bandwidth is None else set())
        left = min(1.0, most / traffic) if traffic else 1.0
        return {lane: speed * left if lane in crossing else speed for lane, speed in speeds.items()}

    def _host_traffic(self, speeds: Mapping[Lane, float], ranks: int) -> float:
        """Bytes/s that cross the host's memory. All ranks share the rates of the host's own work."""
        rates = {Lane.CPU: ADAM_BYTES * self.adam, Lane.PACK: 2 * self.host_copy,
                 **{lane: ranks * self.link[lane] for lane in (Lane.H2D, Lane.D2H)},
                 Lane.COLLECTIVE: 2 * ranks * self.peer_rate if self.peer_bandwidth is None else 0.0}
        return sum(rates[lane] * speed for lane, speed in speeds.items() if lane in rates)

    @functools.cached_property
    def _beside(self) -> list[tuple[frozenset[Lane], dict[Lane, float]]]:
        return [(frozenset(map(Lane, together.split())), {Lane(lane): left for lane, left in lanes.items()})
                for together, lanes in self.beside.items()]

    def table(self) -> str:
        """A row for each rate, in readable units."""
        rows = [(f"GEMM {dtype}", f"{rate / 1e12:.3g} TFLOPS") for dtype, rate in self.gemm_flops.items()]
        rows += [("grouped products", f"{self.grouped_efficiency:.0%} of GEMM, {self.grouped_overhead:.0f} rows over")]
        rows += [("recurrences", f"{self.recurrence_efficiency:.0%} of GEMM")]
        for kernel, shares in (("attention", self.attention_efficiency), ("flash attention", self.flash_efficiency)):
            rows += [(f"{kernel} {way}", f"{left:.0%} of GEMM, {self.attention_overhead[way]:.0f} keys over")
                     for way, left in shares.items()]
        rows += [("device memory", f"{self.memory_bandwidth / 1e9:.3g} GB/s"), ("launch", f"{self.launch_s * 1e6:.2g} us")]
        rows += [(f"{way} copy", f"{rate / 1e9:.3g} GB/s") for way, rate in self.link.items()]
        rows += [("host copy", f"{self.host_copy / 1e9:.3g} GB/s"), ("AdamW", f"{self.adam / 1e9:.3g} G parameters/s")]
        rows += [(f"disk {way}", f"{rate / 1e9:.3g} GB/s") for way, rate in self.disk.items()]
        rows += [(f"{part} alone", f"{faster:.0%} of AdamW") for part, faster in self.adam_parts.items()]
        rows += [(f"{together.replace(' ', ' beside ')}", ", ".join(f"{lane} {left:.0%}" for lane, left in lanes.items()))
                 for together, lanes in self.beside.items()]
        return f"{self.name}, {self.cores} cores: {self.source}\n{tabulate(rows, tablefmt='plain')}"

    # ---------------------------------------------------------------- finding and keeping
    @classmethod
    def find(cls, name: str | Path) -> Hardware:
        """A profile by name ("rtx4090", "RTX 4090", "4090", "A100-80GB"), or a JSON file. Raises `ArgumentError` with the names
        of all profiles, or of those that an ambiguous name may mean."""
        if os.path.isfile(name):  # unlike Path.is_file, this does not raise for an invalid file name
            return cls.load(Path(name))
        known = _profiles()
        short, size = _plain(str(name), known)
        meant = [stem for stem in known if short == stem] or [stem for stem in known if short and short in _parts(stem)]
        if len(meant) > 1:
            raise ArgumentError(f"{shortened(str(name))!r} may be {' or '.join(meant)}: give one of them")
        if not meant or not any(map(str.isdigit, short)):
            raise ArgumentError(f"unknown hardware {shortened(str(name))!r}: give one of {', '.join(known)}, or a file "
                                "that megacompile calibrate --output has written")
        found = cls.load(known[meant[0]])
        if size is not None and abs(size - found.device_memory / 2**30) > 0.1 * size:
            profile = f"the profile {meant[0]} {found.device_memory / 2**30:.0f} GiB"
            raise ArgumentError(f"{shortened(str(name))!r} has {size} GB and {profile}: give {meant[0]}, and "
                                f"device_memory='{size}GB' (--device-memory {size}GB)")
        return found

    @classmethod
    def here(cls, device: str | torch.device | None = None) -> Hardware:
        """This machine with this device. Raises `MegacompileError` if it was not measured and is not a known GPU."""
        path = cache_path(device)
        if path.is_file():
            return cls.load(path)
        _, name = device_name(device)
        for profile in map(cls.load, _profiles().values()):
            if re.match(rf"{re.escape(profile.name)}\b", name):
                return profile
        raise MegacompileError(f"{name} has not been measured: run megacompile calibrate once (a minute or two), or name "
                               f"a profile, such as hardware={next(iter(_profiles()))!r}")

    @classmethod
    def known(cls, device: str | torch.device | None = None) -> Hardware | None:
        """Like `here`, but None for a machine without known rates."""
        try:
            return cls.here(device)
        except MegacompileError:
            return None

    @classmethod
    def load(cls, path: Path) -> Hardware:
        """The rates in a file. Raises `MegacompileError` for a file that cannot be read or is not a profile."""
        try:
            found = json.loads(read_regular(path))
            if isinstance(found, dict) and (device := found.pop("like", None)) is not None:
                _LIKE(device, "like")
                found = {**json.loads(read_regular(PROFILES / f"{device}.json")), **found}
            _PROFILE(found, "profile")
            return cls(**found)
        except (OSError, RecursionError, ValueError) as error:
            if isinstance(error, MegacompileError):
                raise
            raise MegacompileError(f"{path} does not describe hardware: measure it again with megacompile calibrate\n"
                                   f"{error}") from error

    def save(self, path: Path) -> None:
        """Writes a JSON file. Raises `ArgumentError` if it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            rates = {name: rate for name, rate in dataclasses.asdict(self).items() if rate is not None}
            replace_file(path, [json.dumps(rates, indent=1).encode() + b"\n"])
        except OSError as error:
            raise ArgumentError(f"{path} cannot be written ({error.strerror}): give another file") from error


#: Words in the names of cards other than the card's own name.
_MAKERS = re.compile(r"nvidia|geforce|tesla|sxm\d?|pcie|hbm\d?e?")


def _plain(name: str, known: Collection[str]) -> tuple[str, int | None]:
    """(the name in lower case, without separators, maker and socket; the GB of memory that it states, or None): ("a100", 80)
    for "NVIDIA A100-SXM4-80GB"."""
    plain = _MAKERS.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))
    for stem in known:
        for part in _parts(stem):
            if match := re.fullmatch(rf"{part}(\d{{2,3}})gb?", plain):
                return part, int(match[1])
    return plain, None


def _profiles() -> dict[str, Path]:
    """The shipped profiles by name: those of one device, then those of hosts with several."""
    return {path.stem: path for path in sorted(PROFILES.glob("*.json"), key=lambda path: (path.stem[0].isdigit(), path.stem))}


def _parts(stem: str) -> list[str]:
    """A profile's name, and its letters and its number, which people also use alone (but not those of "8xh200")."""
    if stem[0].isdigit():
        return [stem]
    return [stem, *(part for part in re.split(r"(?<=[a-z])(?=\d)", stem) if part != stem)]


def device_name(device: str | torch.device | None = None) -> tuple[str, str]:
    """(type, name) of a device; None: cuda if there is one."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name(chosen)
    return chosen.type, "a GPU" if chosen.type == "cuda" else processor_name()


def cache_path(device: str | torch.device | None = None) -> Path:
    """The file with the rates of this machine under these versions."""
    versions: list[Any] = [*device_name(device), len(os.sched_getaffinity(0)), __version__, torch.__version__]
    return cache_directory() / "hardware" / (re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(map(str, versions))) + ".json")
