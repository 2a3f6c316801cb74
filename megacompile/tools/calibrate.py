"""Measures a machine's rates: `measure(device) -> Hardware`. Takes about a minute; nothing else should run meanwhile.

The work of lanes is timed as the runtime does it: the backend copies pinned memory, the host kernel runs AdamW. Each runs in a
thread of its own, first alone and then at the same time as others.
"""
from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacompile.api import make_backend
from megacompile.codegen.scaled_products import scaled_product
from megacompile.compat import fla
from megacompile.compat.core import grouped_mm
from megacompile.errors import DiskError
from megacompile.frontend.ops import attention_kernels
from megacompile.frontend.ops.recurrence import recurrence, recurrence_backward
from megacompile.ir.program import Lane
from megacompile.planning.config import check_device
from megacompile.planning.precision import FIRST_CAPABILITY
from megacompile.predict.durations import recurrence_flops
from megacompile.predict.hardware import Hardware, device_name
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.optimizer import host_update
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Part, Segment
from megacompile.runtime.optimizer.state_format import FLOAT32, FORMATS, StateFormat
from megacompile.streaming.optimizer.adamw import RULE, Options
from megacompile.system.direct_file import DirectFile, in_blocks
from megacompile.system.host_memory import PAGE, available_host_bytes, host_memory
from megacompile.system.host_memory import host_bytes as system_host_bytes
from megacompile.system.progress import Say, nothing

# --------------------
# Measures the drives for optimizer state: reading, writing, and both at once, of a file as training has it.
#: Bytes of the file. A drive writes less than this quickly, to a cache of its own.
FILE_BYTES = 1 << 34
#: Bytes of a slab: the moments of a small tile.
SLAB_BYTES = 1 << 28
MEASURED_S = 4.0


def with_disk_rates(hardware: Hardware, folder: Path, scale: float = 1.0, say: Say = nothing) -> Hardware:
    """The rates of a machine, with those of the drives under `folder`. `scale` multiplies the time of each measurement, and the
    size of the file. Raises `DiskError` if the folder cannot be used, or has too little space, or a drive fails."""
    slab_bytes = in_blocks(max(1 << 16, int(SLAB_BYTES * min(1.0, scale))))
    file = DirectFile(folder, max(4 * slab_bytes, in_blocks(int(FILE_BYTES * min(1.0, scale)))))
    try:
        return _measured(hardware, file, slab_bytes, MEASURED_S * scale, say)
    except OSError as error:
        raise DiskError(f"the drive of {folder} failed while it was measured ({error.strerror}): check the drive, or name "
                        "another folder") from error
    finally:
        file.close()


def _measured(hardware: Hardware, file: DirectFile, slab_bytes: int, seconds: float, say: Say) -> Hardware:
    starts = range(0, file.size - slab_bytes + 1, slab_bytes)
    into, source = host_memory(slab_bytes), host_memory(slab_bytes)
    source.fill_(1)
    say("writing a file on the disk")
    for start in starts:  # what was never written is read without the drive
        file.write(source, start)
    reading, writing = itertools.cycle(starts), itertools.cycle(starts)
    works = {"read": lambda: file.read(into, next(reading)), "write": lambda: file.write(source, next(writing))}
    alone = {}
    for way, work in works.items():
        say(f"measuring the disk: {way}")
        alone[way] = _rates({way: work}, slab_bytes, seconds)[way]
    say("measuring the disk: both at once")
    both = _rates(works, slab_bytes, seconds)
    beside = {f"disk_{way}": min(1.0, both[way] / alone[way]) for way in works}
    return replace(hardware, disk=alone, beside={**hardware.beside, "disk_read disk_write": beside})


def _rates(works: Mapping[str, Callable[[], None]], count: int, seconds: float) -> dict[str, float]:
    """Bytes per second of each work, of `count` bytes a call, while all of them run."""
    end = time.perf_counter() + seconds

    def run(work: Callable[[], None]) -> float:
        begin, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() < end:
            work()
            calls += 1
        return calls * count / (time.perf_counter() - begin)

    with ThreadPoolExecutor(len(works)) as pool:
        return dict(zip(works, pool.map(run, works.values()), strict=True))


#: Long enough for a GPU to settle at the clock rate that its power limit allows.
SUSTAINED_S = 3.0
SHORT_S = 0.6
CALLS_IN_FLIGHT = 4
#: 16 bytes for each of 2**27 parameters. The caches of a server's processor have a few hundred megabytes.
WORKING_SET_BYTES = 1 << 31
#: Bytes of state per parameter in an update: weight, gradient, remainder and two moments, rounded up to a power of two.
ADAM_BYTES = 16
_WORK = {Lane.H2D: "copies to the device", Lane.D2H: "copies to the host", Lane.CPU: "AdamW"}
_TOGETHER = (("d2h", "h2d"), ("cpu", "h2d"), ("cpu", "d2h"), ("cpu", "d2h", "h2d"))


def measure(device: str | torch.device | None = None, scale: float = 1.0, say: Say = nothing) -> Hardware:
    """The rates of this machine with `device` (None: cuda if there is a GPU).

    `scale` multiplies the time of each measurement. Below 1 it also reduces the host memory that is used, which makes rates
    too high once the data fits in caches. `say` is called with the name of each measurement.

    Uses up to 5 GB of host memory (less if less is available) and 2 GB on a GPU. Raises `DeviceUnavailableError`, and
    `MegacompileError` for an unknown device type."""
    check_device(device)
    backend = make_backend(device)
    host_bytes = _working_set(scale, available_host_bytes())
    compute = _Compute(backend, scale)
    say("reserving host memory, and building the host kernels if necessary")
    alone, beside = _lanes(backend, _activities(backend, host_bytes), SHORT_S * scale, say)
    cuda = backend.device.type == "cuda"
    source = f"measured with torch {torch.__version__}" + (f", CUDA {torch.version.cuda}" if cuda else "")
    gemm = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        say(f"measuring matrix products in {name}")
        gemm[name] = compute.gemm(dtype)
    if _multiplies_float8(backend.device):
        say("measuring matrix products in float8")
        gemm["float8"] = compute.float8()
    say("measuring products of experts")
    grouped, grouped_overhead = compute.grouped()
    say("measuring a recurrence")
    recurrence_efficiency = compute.recurrence(gemm)
    say("measuring attention")
    attention = compute.attention(gemm)
    say("measuring the device's memory and kernel launches")
    memory_bandwidth, launch = compute.memory_bandwidth(), compute.launch()
    say("measuring host memory")
    host_copy = _host_copy(SHORT_S * scale, host_bytes // 2)
    say("measuring AdamW for weights only, for moments only, and with smaller moments")
    adam_parts, adam_formats, adam_rounded = _adam_shares(SHORT_S * scale, host_bytes)
    return Hardware(
        name=device_name(backend.device)[1], cores=len(os.sched_getaffinity(0)), device_type=backend.device.type, source=source,
        gemm_flops=gemm, grouped_efficiency=grouped / gemm["bfloat16"], grouped_overhead=grouped_overhead,
        recurrence_efficiency=recurrence_efficiency, **attention,
        memory_bandwidth=memory_bandwidth, launch_s=launch,
        link={"h2d": alone[Lane.H2D], "d2h": alone[Lane.D2H]},
        host_copy=host_copy, adam=alone[Lane.CPU], beside=beside, adam_parts=adam_parts,
        adam_formats=adam_formats, adam_rounded=adam_rounded,
        host_memory=system_host_bytes(), fused_attention=attention_kernels.fused_kernel(backend.device),
        device_memory=torch.cuda.mem_get_info(backend.device)[1] if cuda else system_host_bytes())


def _multiplies_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def _lanes(backend: Backend, activities: Mapping[Lane, _Activity], seconds: float,
           say: Say) -> tuple[dict[Lane, float], dict[str, dict[str, float]]]:
    """The rate of each lane alone, and for lanes that work at the same time the share of it that each keeps, by their names.
    Closes the activities."""
    try:
        alone = {}
        for lane, activity in activities.items():
            say(f"measuring {_WORK[lane]}")
            alone[lane] = _together(backend, {lane: activity}, seconds)[lane]
        beside = {}
        for names in _TOGETHER:
            say(f"measuring {' with '.join(_WORK[Lane(name)] for name in names)}")
            chosen = {Lane(name): activities[Lane(name)] for name in names}
            found = _together(backend, chosen, seconds)
            beside[" ".join(names)] = {str(lane): min(1.0, found[lane] / alone[lane]) for lane in chosen}
    finally:
        for activity in activities.values():
            activity.close()
    return alone, beside


def _rate(call: Callable[[], object], units: float, seconds: float, synchronize: Callable[[], None],
          in_flight: int = CALLS_IN_FLIGHT) -> float:
    """Units per second, measured in the second half of `seconds`, when clock rates have settled. `in_flight` calls are issued
    between synchronizations."""
    passed, count = 0.0, 0
    for _ in range(2):
        begin, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - begin < seconds / 2:
            for _ in range(in_flight):
                call()
            synchronize()
            count += in_flight
        passed = time.perf_counter() - begin
    return units * count / passed


def _without_overhead(lengths: tuple[int, int], rates: tuple[float, float]) -> tuple[float, float]:
    """Fits a model of causal attention to its rates at two lengths, short and long (any unit of work per second).

    Returns the rate for infinitely long sequences, and the overhead of each query in keys: on average a query costs as much
    as `length / 2 + overhead` keys. The overhead is 0 if short sequences are not slower."""
    (short, long), (slow, fast) = lengths, rates
    keys = max(0.0, (fast - slow) / (2 * (slow / short - fast / long))) if slow * long > fast * short else 0.0
    return fast * (1 + 2 * keys / long), keys


class _Compute:
    """Measures the rates of the compute lane."""

    def __init__(self, backend: Backend, scale: float) -> None:
        self.backend, self.device, self.scale = backend, backend.device, scale
        self.cuda = self.device.type == "cuda"

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        # A GPU's power, and so its clock rate, depends on the data: zeros would give rates that are too high.
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def gemm(self, dtype: torch.dtype) -> float:
        """FLOP/s of a matrix product."""
        size = (8192 if dtype == torch.bfloat16 else 4096) if self.cuda else 1024
        a, b = self._random(size, size, dtype=dtype), self._random(size, size, dtype=dtype)
        out = torch.empty_like(a)
        seconds = SUSTAINED_S if self.cuda and dtype == torch.bfloat16 else SHORT_S
        return _rate(lambda: torch.mm(a, b, out=out), 2.0 * size ** 3, seconds * self.scale, self.backend.synchronize)

    def float8(self) -> float:
        """FLOP/s of the three products of a linear layer in float8, with one scale for each matrix, without casts.

        The weight's gradient is added to FP32 sums, as in training. A product alone has a higher rate, which a GPU does not
        keep up in training."""
        size = 8192 if self.cuda else 256
        a, b = (self._random(size, size, dtype=torch.float8_e4m3fn) for _ in range(2))
        scale, sums = torch.ones((), device=self.device), torch.zeros(size, size, device=self.device)

        def products() -> None:
            scaled_product(a, b.t(), scale, scale, None, torch.bfloat16, "float8_fast")
            scaled_product(a, b.t(), scale, scale, None, torch.bfloat16, "float8")
            sums.add_(scaled_product(a, b.t(), scale, scale, None, torch.float32, "float8"))

        return _rate(products, 6.0 * size ** 3, SUSTAINED_S * self.scale, self.backend.synchronize)

    def grouped(self) -> tuple[float, float]:
        """FLOP/s of a grouped product of experts with many rows and of the two products of its backward, in bf16; and what each
        expert costs in addition, in rows."""
        few, many = (128, 2048) if self.cuda else (32, 256)
        return _without_overhead((2 * few, 2 * many), (self._grouped(few), self._grouped(many)))

    def _grouped(self, rows: int) -> float:
        """FLOP/s with this mean number of rows. Some experts have several times as many as others, as in training."""
        experts, wide, narrow = (64, 2048, 768) if self.cuda else (4, 256, 128)
        hidden, weights, grad = (self._random(*shape, dtype=torch.bfloat16) for shape in (
            (experts * rows, wide), (experts, narrow, wide), (experts * rows, narrow)))
        shares = torch.linspace(1, 4, experts, device=self.device).cumsum(0)
        ends = (shares / shares[-1] * experts * rows).round().to(torch.int32)

        def products() -> None:
            for a, b in ((hidden, weights.transpose(1, 2)), (grad, weights), (grad.t(), hidden)):
                grouped_mm(a, b, offs=ends)

        return _rate(products, 6.0 * grad.numel() * wide, SHORT_S * self.scale, self.backend.synchronize)

    def recurrence(self, gemm: Mapping[str, float]) -> float:
        """FLOP/s of a gated delta rule, forward and backward, with the kernel that templates of this device have, as a fraction
        of the GEMM rate."""
        rows, length, heads, width = (16, 1024, 32, 128) if self.cuda else (1, 128, 4, 32)
        kernel, dtype = ("fla", torch.bfloat16) if self.cuda and fla.is_usable() else ("reference", torch.float32)
        shape = rows, length, heads, width
        query, key, value, grad = (torch.nn.functional.normalize(self._random(*shape, dtype=dtype), dim=-1) for _ in range(4))
        decay = torch.full(shape[:3], -0.1, device=self.device)
        tensors = query, key, value, decay, decay.exp().to(dtype)

        def both() -> None:
            recurrence(*tensors, 1.0, kernel)
            recurrence_backward(grad, *tensors, 1.0, kernel)

        flops = 4.0 * rows * length * heads * recurrence_flops(width, width, delta=True)
        measured = _rate(both, flops, SHORT_S * self.scale, self.backend.synchronize)
        return measured / gemm[str(dtype).removeprefix("torch.")]

    def attention(self, gemm: Mapping[str, float]) -> dict[str, Any]:
        """The fields of `Hardware` about causal attention on this device. The rates of a kernel at two lengths give its rate
        for long sequences, as a fraction of the GEMM rate, and the overhead of each query."""
        fused = attention_kernels.fused_kernel(self.backend.device) if self.cuda else "flash_cpu"
        shares, overheads = self._long_attention(fused, gemm)
        return dict(attention_efficiency=shares, attention_overhead=overheads,
                    flash_efficiency=self._long_attention("flash", gemm)[0] if fused == "cudnn" else {})

    def _long_attention(self, kernel: str, gemm: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        """A kernel's rate for long sequences, as a fraction of the GEMM rate, and its overhead, forward and backward."""
        lengths = (1024, 8192) if self.cuda else (128, 512)
        short, long = (self._attention(kernel, length, gemm) for length in lengths)
        found = {way: _without_overhead(lengths, (short[way], long[way])) for way in short}
        return {way: share for way, (share, _) in found.items()}, {way: keys for way, (_, keys) in found.items()}

    def _attention(self, kernel: str, length: int, gemm: Mapping[str, float]) -> dict[str, float]:
        """A kernel's FLOP/s as a fraction of the GEMM rate at one length, forward and backward."""
        heads, width, rows = (32, 128, 16384 // length) if self.cuda else (4, 64, 512 // length)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        query, key, value, grad = (self._random(rows, length, heads, width, dtype=dtype).transpose(1, 2) for _ in range(4))
        options = width ** -0.5, 0, 0.0
        forward, backward = attention_kernels.FORWARD[kernel], attention_kernels.BACKWARD[kernel]
        out, logsumexp = forward(query, key, value, *options)
        flops = 2.0 * rows * heads * length ** 2 * width
        rate = gemm[str(dtype).removeprefix("torch.")]
        measured = {
            "forward": _rate(lambda: forward(query, key, value, *options), flops, SHORT_S * self.scale,
                             self.backend.synchronize),
            "backward": _rate(lambda: backward(grad, query, key, value, out, logsumexp, *options), 2.5 * flops,
                              SHORT_S * self.scale, self.backend.synchronize)}
        return {name: found / rate for name, found in measured.items()}

    def memory_bandwidth(self) -> float:
        """Bytes per second, reads and writes together."""
        elements = 1 << (28 if self.cuda else 24)
        a, b = (torch.zeros(elements, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return _rate(lambda: torch.add(a, b, out=out), 3.0 * 2 * elements, SHORT_S * self.scale, self.backend.synchronize)

    def launch(self) -> float:
        """Seconds from one small kernel to the next."""
        small = torch.zeros(8, device=self.device)

        def hundred() -> None:
            for _ in range(100):
                small.add_(1)

        return 1 / _rate(hundred, 100.0, SHORT_S * self.scale, self.backend.synchronize)


@dataclass(frozen=True)
class _Activity:
    """Repeatable work of a lane. `units`: the amount of work in a call."""

    call: Callable[[], None]
    units: float
    close: Callable[[], None] = lambda: None


def _working_set(scale: float, available: int) -> int:
    """Bytes of host memory to work on: more than fits in any processor's caches, or what a small machine can spare. Smaller for
    a shortened measurement (`scale` below 1), whose purpose is to be quick."""
    return int(min(WORKING_SET_BYTES, available // 8) * min(1.0, scale)) // PAGE * PAGE


def _activities(backend: Backend, host_bytes: int) -> dict[Lane, _Activity]:
    """The work of each lane; units are bytes for copies and parameters for AdamW."""
    return {Lane.H2D: _copying(backend, Lane.H2D), Lane.D2H: _copying(backend, Lane.D2H),
            Lane.CPU: _updating(host_bytes // ADAM_BYTES)}


def _copying(backend: Backend, lane: Lane, size: int = 1 << 28) -> _Activity:
    host, device = host_memory(size), backend.memory(size)
    host.fill_(1)  # touches the pages before they are pinned
    backend.pin(host)
    into, source = (device, host) if lane == Lane.H2D else (host, device)

    def call() -> None:
        backend.copy(into, source, lane)
        event = backend.record(lane)
        if event is not None:
            event.synchronize()

    return _Activity(call, size, lambda: backend.unpin(host))


def _adam_shares(seconds: float, host_bytes: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """The rates of updating only weights and only moments, of updating both with moments in other formats, and of updating
    weights that are rounded at random, relative to updating both in float32."""
    elements = host_bytes // ADAM_BYTES

    def rate(part: Part = Part.WHOLE, stored: StateFormat = FLOAT32, rounded: bool = False) -> float:
        return _rate(_updating(elements, part, stored, rounded).call, 1.0, seconds, lambda: None, in_flight=1)

    whole = rate()
    return ({"weights": rate(Part.WEIGHTS) / whole, "moments": rate(Part.MOMENTS) / whole},
            {stored.name: rate(stored=stored) / whole for stored in FORMATS.values() if stored != FLOAT32},
            {stored.name: rate(stored=stored, rounded=True) / whole for stored in FORMATS.values()})


def _updating(elements: int, part: Part = Part.WHOLE, stored: StateFormat = FLOAT32, rounded: bool = False) -> _Activity:
    weights, gradient = (host_memory(2 * elements).view(torch.bfloat16).fill_(0.01) for _ in range(2))
    remainder = None if rounded else host_memory(2 * elements).view(torch.int16).fill_(0)
    values = tuple(host_memory(stored.value_bytes * elements).view(stored.dtype).fill_(0) for _ in range(2))
    scales = tuple(host_memory(4 * stored.scales(elements)).view(torch.float32).fill_(0) for _ in values if stored.scaled)
    moments = Moments(stored, values, scales)
    segments = [(Segment(0, elements, Options(1e-4, 0.9, 0.95, 1e-8, 0.1), step=10), moments)]
    return _Activity(lambda: host_update.update(RULE, weights, remainder, gradient, segments, 0.5, part=part), elements)


def _together(backend: Backend, activities: Mapping[Lane, _Activity], seconds: float) -> dict[Lane, float]:
    """Units per second of each activity while all of them run."""
    barrier = threading.Barrier(len(activities))
    counting = set(activities)

    def work(lane: Lane, activity: _Activity) -> float:
        try:
            with backend.lane(lane):
                activity.call()
                barrier.wait()
                begin, count = time.perf_counter(), 0
                while time.perf_counter() - begin < seconds:
                    activity.call()
                    count += 1
                passed = time.perf_counter() - begin
                counting.discard(lane)
                while counting:  # keeps running until the others have finished measuring
                    activity.call()
                return activity.units * count / passed
        except BaseException:
            barrier.abort()
            raise
        finally:
            counting.discard(lane)

    with ThreadPoolExecutor(len(activities)) as pool:
        running = {lane: pool.submit(work, lane, activity) for lane, activity in activities.items()}
        return {lane: future.result() for lane, future in running.items()}


def _host_copy(seconds: float, size: int) -> float:
    source, into = host_memory(size).fill_(1), host_memory(size).fill_(0)
    return _rate(lambda: host_update.copy(into, source), size, seconds, lambda: None, in_flight=1)
