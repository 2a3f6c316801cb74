"""Measures the drives for optimizer state: reading, writing, and both at once, of a file as training has it."""
from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from megacompile.errors import DiskError
from megacompile.predict.hardware import Hardware
from megacompile.system.direct_file import DirectFile, in_blocks
from megacompile.system.host_memory import host_memory
from megacompile.system.progress import Say, nothing

#: Bytes of the file. A drive writes less than this quickly, to a cache of its own.
FILE_BYTES = 1 << 34
#: Bytes of a slab: the moments of a small tile.
SLAB_BYTES = 1 << 28
MEASURED_S = 4.0


def with_disk_rates(hardware: Hardware, folder: Path, scale: float = 1.0, say: Say = nothing) -> Hardware:
    """The rates of a machine, with those of the drives that `folder` is on. `scale` multiplies the time of each measurement,
    and the size of the file. Raises `DiskError` if the folder cannot be used, or has too little space, or a drive fails."""
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
