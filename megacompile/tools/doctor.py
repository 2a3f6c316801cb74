"""`megacompile doctor` checks whether this machine has what training needs, and says how to fix what is missing.

It changes nothing, except that it builds the host kernels if they have not been built.
"""
from __future__ import annotations

import enum
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from megacompile.codegen.cache import CacheError, cache_directory
from megacompile.predict.hardware import Hardware, device_name
from megacompile.runtime.optimizer import native
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import available_host_bytes, cores, group_rooms, host_bytes
from megacompile.system.linux import resource
from megacompile.system.progress import Say, nothing
from megacompile.weights.tiling import HOST_MARGIN_BYTES

#: The oldest compute capability with bfloat16 tensor cores. PyTorch's flash attention kernel requires it too.
_LEAST_CAPABILITY = (8, 0)


class State(enum.StrEnum):
    GOOD = "ok"
    SLOW = "slower"  # training works, but would be faster with the remedy
    ABSENT = "no"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is empty if nothing needs to be done."""

    subject: str
    state: State
    found: str
    remedy: str = ""


def examine(say: Say = nothing) -> list[Finding]:
    """All findings about this machine, in the order of the report. `say` is called with the name of each check."""
    checks: dict[Callable[[], Finding | Iterator[Finding]], str] = {
        _versions: "versions", _compiler: "the host kernels (building them if necessary)", _headers: "Python's headers",
        _cache: "the cache folder", _openmp: "OpenMP", _host_memory: "host memory", _locked_memory: "locked memory",
        _huge_pages: "huge pages", _cuda: "CUDA", _cupy: "CuPy", _link: "the link"}
    findings: list[Finding] = []
    for check, what in checks.items():
        say(f"checking {what}")
        found = check()
        findings.extend([found] if isinstance(found, Finding) else found)
    return findings


def devices(findings: list[Finding]) -> list[str]:
    """The device types that can train a model, according to these findings."""
    absent = {finding.subject for finding in findings if finding.state is State.ABSENT}
    host = not absent & {"versions", "host memory"}
    return [name for name, needs in (("cpu", set()), ("cuda", {"CUDA device", "CuPy"})) if host and not absent & needs]


def report(findings: list[Finding]) -> str:
    """The findings as a table, and a line that says on which devices training is possible."""
    rows = [(f.subject, f.state.value, f.found, f.remedy) for f in findings]
    able = devices(findings)
    last = (f"training is possible on {' and '.join(able)}" if able else
            "training is not possible here: see the lines that say no")
    return tabulate(rows, ["", "", "found", "remedy"], tablefmt="simple", maxcolwidths=[None, None, 48, 56]) + f"\n\n{last}"


# -------------------------------------------------------------------- the host
def _versions() -> Finding:
    found = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("versions", State.ABSENT, found, "use Linux")
    return Finding("versions", State.GOOD, found)


def _compiler() -> Finding:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        library = native.library()
    if library is None:
        reason = str(said[-1].message) if said else "the reason was reported earlier"
        return Finding("host kernels", State.SLOW, f"not built ({reason}); AdamW uses PyTorch operations instead",
                       "install g++ 9 or later (apt install g++), or set CXX")
    words = native.compiler_command()
    return Finding("host kernels", State.GOOD, f"built with {' '.join(words)}, {native.instruction_sets(library)[-1]}")


def _headers() -> Finding:
    """Inductor's CPU kernels and Triton's CUDA launchers are Python extensions, which need Python's headers."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Finding("Python headers", State.GOOD, str(header.parent))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Finding("Python headers", State.SLOW, f"{header} is missing: templates cannot be compiled",
                   f"install your Python's headers (apt install python{version}-dev), or stream(model, compile=False)")


def _cache() -> Finding:
    try:
        return Finding("cache folder", State.GOOD, str(cache_directory()))
    except CacheError as error:
        return Finding("cache folder", State.SLOW, str(error), "set MEGACOMPILE_CACHE to a folder that you own")


def _openmp() -> Finding:
    threads, there = native.default_threads(), cores()
    found = f"{threads} thread{'s' * (threads != 1)} on {there} core{'s' * (there != 1)} for AdamW"
    if threads != there:
        return Finding("OpenMP", State.SLOW, f"{found} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')})",
                       "unset OMP_NUM_THREADS, unless other work needs the cores")
    return Finding("OpenMP", State.GOOD, found)


def _host_memory() -> Iterator[Finding]:
    available = available_host_bytes()
    found = f"{format_bytes(available)} of {format_bytes(host_bytes())} available"
    hint = f"room for about {available / 14 / 1e9:.3g} billion bf16 parameters"
    if available < HOST_MARGIN_BYTES:
        yield Finding("host memory", State.ABSENT, found,
                      f"free some memory: training needs at least {format_bytes(HOST_MARGIN_BYTES)}")
    else:
        yield Finding("host memory", State.GOOD, f"{found}, {hint}")
    rooms = list(group_rooms())
    if rooms and min(rooms) <= available:
        yield Finding("control group", State.SLOW, f"its limit leaves {format_bytes(max(0, min(rooms)))}",
                      "give the container more memory (docker --memory, the pod's limits)")


def _locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", State.GOOD, "unlimited")
    found = f"{format_bytes(limit)} (ulimit -l)"
    if not torch.cuda.is_available():
        return Finding("locked memory", State.GOOD, f"{found}; only CUDA needs it")
    return Finding("locked memory", State.SLOW, found,
                   "if pinning fails: ulimit -l unlimited (docker --ulimit memlock=-1), or pinned_memory= in stream()")


def _huge_pages() -> Finding:
    try:
        words = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii").split()
    except OSError:
        words = ["[never]"]
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    if chosen == "never":
        return Finding("huge pages", State.SLOW, chosen,
                       "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: pinning takes time for each page")
    return Finding("huge pages", State.GOOD, chosen)


# -------------------------------------------------------------------- the device
def _cuda() -> Iterator[Finding]:
    driver = _nvidia_smi("driver_version")
    if driver is None:
        yield Finding("CUDA driver", State.ABSENT, "nvidia-smi finds no NVIDIA GPU",
                      "no driver is needed to train on the CPU or to plan")
    else:
        yield Finding("CUDA driver", State.GOOD, driver)
    if not torch.cuda.is_available():
        built = f"torch was built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch was built without CUDA"
        remedy = "" if driver is None else (
            "the driver is older than torch's CUDA, or CUDA_VISIBLE_DEVICES hides the GPU" if torch.version.cuda else
            "install torch for CUDA (pytorch.org)")
        yield Finding("CUDA device", State.ABSENT, built, remedy)
        return
    for index in range(torch.cuda.device_count()):
        chosen = torch.cuda.get_device_properties(index)
        capability = chosen.major, chosen.minor
        found = (f"{chosen.name}, compute capability {chosen.major}.{chosen.minor}, {format_bytes(chosen.total_memory)}, "
                 f"CUDA {torch.version.cuda}")
        old = capability < _LEAST_CAPABILITY
        yield Finding("CUDA device", State.SLOW if old else State.GOOD, found,
                      "below 8.0 there are no bf16 tensor cores and no fused attention: use float32" if old else "")


def _cupy() -> Finding:
    major = (torch.version.cuda or "13").split(".")[0]
    remedy = f"pip install cupy-cuda{'12x' if major == '12' else '13x'}"
    try:
        import cupy
    except Exception as error:  # CuPy is missing, or a library that it needs
        needed = "" if not torch.cuda.is_available() else remedy
        return Finding("CuPy", State.ABSENT, f"not usable ({type(error).__name__})", needed)
    try:
        version = cupy.cuda.runtime.runtimeGetVersion()
    except Exception as error:  # the driver is missing or too old
        return Finding("CuPy", State.ABSENT, f"{cupy.__version__}, but CUDA does not work ({error})",
                       "see the line about the driver")
    found = f"{cupy.__version__} for CUDA {version // 1000}.{version % 1000 // 10}"
    if torch.version.cuda and str(version // 1000) != major:
        return Finding("CuPy", State.SLOW, f"{found}, but torch uses {torch.version.cuda}", remedy)
    return Finding("CuPy", State.GOOD, found)


def _link() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        return
    lanes = _nvidia_smi("pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max")
    words = [word.strip() for word in (lanes or "").split(",")]
    if len(words) == 3 and all(word.isdecimal() for word in words):
        narrow = int(words[1]) < int(words[2])
        yield Finding("PCIe", State.SLOW if narrow else State.GOOD, f"generation {words[0]}, {words[1]} of {words[2]} lanes",
                      "move the card to a slot with all lanes" if narrow else "")
    hardware = Hardware.known()
    if hardware is None:
        yield Finding("link", State.SLOW, f"{device_name()[1]} has not been measured",
                      "run megacompile calibrate, so that plans fit this machine")
    else:
        rates = ", ".join(f"{way} {rate / 1e9:.3g} GB/s" for way, rate in hardware.link.items())
        yield Finding("link", State.GOOD, f"{rates} ({hardware.source})")


def _nvidia_smi(fields: str) -> str | None:
    """The output of nvidia-smi for the first GPU, or None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True,
                              timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None
