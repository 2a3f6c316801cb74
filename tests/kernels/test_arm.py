"""The host's kernels on Arm: the bits of those on x86, for every rule and format of state, run by an emulator.

Needs a cross compiler and qemu's user mode (Debian: g++-aarch64-linux-gnu, qemu-user); elsewhere the tests are skipped."""
from __future__ import annotations

import ctypes
import functools
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_state_formats import FORMATS, MASTERS, RULES, Parameter, random
from torch import Tensor

from megacompile.runtime.optimizer import host_update, native
from megacompile.runtime.optimizer.native import NativeSegment
from megacompile.runtime.optimizer.rule import Rule
from megacompile.runtime.optimizer.state_format import StateFormat
from megacompile.streaming.optimizer import muon

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None or native.library() is None,
    reason=f"needs {COMPILER}, {EMULATOR} and the kernels of this machine")

#: A program that reads numbers and buffers, calls a kernel, and writes its result and the buffers.
MAIN = """
#include <cstdio>
#include <cstdlib>
static void* buffers[16]; static int64_t sizes[16], numbers[8]; static float floats[16];
static void all(bool good) { if (!good) std::abort(); }
int main() {
  int64_t count; double result = 0;
  all(std::fread(numbers, 8, 8, stdin) == 8 && std::fread(floats, 4, 16, stdin) == 16 && std::fread(&count, 8, 1, stdin) == 1);
  for (int64_t i = 0; i < count; ++i) {
    all(std::fread(&sizes[i], 8, 1, stdin) == 1);
    buffers[i] = std::aligned_alloc(64, (sizes[i] / 64 + 1) * 64);
    all(std::fread(buffers[i], 1, sizes[i], stdin) == static_cast<size_t>(sizes[i]));
  }
  %s
  std::fwrite(&result, 8, 1, stdout);
  for (int64_t i = 0; i < count; ++i) std::fwrite(buffers[i], 1, sizes[i], stdout);
}
"""
#: One segment: weights, remainders, gradients, and each moment with its scales.
UPDATE = """
  Segment segment{};
  segment.stop = numbers[0], segment.first = 0, segment.key = static_cast<uint32_t>(numbers[1]);
  for (int k = 0; k < kCount; ++k) segment.moments[k] = buffers[3 + 2 * k];
  for (int k = 0; k < kCount; ++k) segment.scales[k] = static_cast<float*>(buffers[4 + 2 * k]);
  std::memcpy(segment.scalars, floats, sizeof segment.scalars);
  megacompile_update(buffers[0], static_cast<int16_t*>(buffers[1]), buffers[2], static_cast<int>(numbers[2]), &segment, 1,
                     floats[15], static_cast<int>(numbers[3]), 0, 2);
"""
HOST = """
  float* const master = static_cast<float*>(buffers[0]); int16_t* const low = static_cast<int16_t*>(buffers[2]);
  const int64_t n = numbers[1]; const int a = static_cast<int>(numbers[2]), b = static_cast<int>(numbers[3]);
  if (numbers[0] == 0) result = megacompile_squared_norm(buffers[0], a, n, static_cast<double*>(buffers[1]), 0, 2);
  if (numbers[0] == 1) megacompile_accumulate(buffers[0], a, buffers[1], b, n, static_cast<int>(numbers[4]), 0, 2);
  if (numbers[0] == 2) megacompile_split(master, buffers[1], low, n, 0, 2);
  if (numbers[0] == 3) megacompile_join(buffers[1], low, master, n, 0, 2);
"""


class ArmLibrary:
    """A library of kernels for Arm, in an emulator. A call copies memory there and back."""

    def __init__(self, folder: Path, source: str, call: str) -> None:
        self.program = folder / f"kernels-{abs(hash(source))}"
        if not self.program.exists():
            flags = [flag for flag in native.FLAGS if flag not in ("-fPIC", "-shared")]
            subprocess.run([COMPILER, *flags, "-static", "-I", str(native.SOURCES), "-o", str(self.program), "-x", "c++", "-"],
                           input=source + MAIN % call, text=True, check=True, capture_output=True)

    def run(self, numbers: Sequence[int], floats: Sequence[float], memory: Sequence[tuple[Any, int]]) -> float:
        given = struct.pack("<8q16f", *numbers, *[0] * (8 - len(numbers)), *floats, *[0] * (16 - len(floats)))
        given += struct.pack("<q", len(memory))
        for address, size in memory:
            given += struct.pack("<q", size) + (ctypes.string_at(address, size) if size else b"")
        found = subprocess.run([EMULATOR, str(self.program)], input=given, check=True, capture_output=True).stdout
        at = 8
        for address, size in memory:
            if size:
                ctypes.memmove(address, found[at:at + size], size)
            at += size
        assert at == len(found)
        (result,) = struct.unpack("<d", found[:8])
        return float(result)


class ArmUpdate(ArmLibrary):
    """In place of `native.update_library`."""

    def __init__(self, folder: Path, definitions: str) -> None:
        super().__init__(folder, native.update_source(definitions), UPDATE)
        master, moments, self.count = (int(re.search(f"{name} (?:= )?([0-9])", definitions)[1])  # type: ignore[index]
                                       for name in ("MASTER", "MOMENTS", "kCount"))
        self.sizes = (4 if master == 1 else 2, 2 if master == 0 else 0, (4, 2, 1)[moments])
        self.scaled = moments == 2

    def megacompile_update(self, weights: int, remainders: int | None, gradients: int, dtype: int, table: int, segments: int,
                           scale: float, part: int, instruction_set: int, threads: int) -> None:
        assert segments == 1
        at = NativeSegment.from_address(table)
        n, (of_weight, of_remainder, of_moment) = at.stop, self.sizes
        memory = [(weights, n * of_weight), (remainders, n * of_remainder), (gradients, n * (2 if dtype else 4))]
        for k in range(self.count):
            memory += [(at.moments[k], n * of_moment), (at.scales[k], -(-n // 256) * 4 if self.scaled else 0)]
        self.run([n, at.key, dtype, part], [*at.scalars, 0, 0, 0, scale], memory)


_MUON = muon.Options(1e-2, "original", 0.95, True, 0.1, (3.4445, -4.775, 2.0315), 1e-7, 5, None, (50, 100), 2e-2)
#: Also the elementwise rules between which Muon multiplies matrices.
ON_ARM = {**RULES, "muon's momentum": (muon.MATRICES.momentum, _MUON), "muon's weights": (muon.MATRICES.weights, _MUON)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arm")


@pytest.mark.sample(6)
@pytest.mark.parametrize(("rule", "options"), ON_ARM.values(), ids=ON_ARM)
@pytest.mark.parametrize(("dtype", "exact"), MASTERS.values(), ids=MASTERS)
@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
def test_updates_on_arm_have_the_bits_of_x86(rule: Rule, options: object, dtype: torch.dtype, exact: bool, stored: StateFormat,
                                             folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Parameter(rule, stored, dtype, exact).steps(options).bits()
    monkeypatch.setattr(native, "update_library", functools.partial(ArmUpdate, folder))
    assert Parameter(rule, stored, dtype, exact).steps(options).bits() == here


def test_norms_sums_and_masters_on_arm_have_the_bits_of_x86(folder: Path) -> None:
    arm = ArmLibrary(folder, native.SOURCE.read_text(), HOST)
    n, kinds = 40_003, {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16}

    def memory(*tensors: Tensor) -> list[tuple[int, int]]:
        return [(each.data_ptr(), each.numel() * each.element_size()) for each in tensors]

    for dtype, kind in kinds.items():
        values = (random(n, 1) * 1e3).to(dtype)
        assert arm.run([0, n, kind], [], memory(values, torch.zeros(8))) == host_update.squared_norm(values)
        for source, other in kinds.items():
            for overwrite in (False, True):
                ours, theirs, added = values.clone(), values.clone(), random(n, 2).to(source)
                host_update.accumulate(ours, added, overwrite)
                arm.run([1, n, kind, other, overwrite], [], memory(theirs, added))
                assert torch.equal(ours, theirs)
    master = torch.cat([random(n - 3, 3), torch.tensor([float("nan"), float("inf"), -0.0])])
    weights, remainder = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    arm.run([2, n], [], memory(master, weights, remainder))
    expected = host_update.split_fp32(master)
    assert all(map(_same, expected, (weights, remainder)))
    joined = torch.empty(n)
    arm.run([3, n], [], memory(joined, weights, remainder))
    assert _same(joined, host_update.join_fp32(*expected))


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(*(x.view({2: torch.int16, 4: torch.int32}[x.element_size()]) for x in (left, right)))
