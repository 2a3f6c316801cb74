from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import torch

import megacompile
from megacompile.codegen import cache
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.runtime.optimizer import host_kernels, native
from megacompile.system.control_groups import cores

needs_library = pytest.mark.skipif(native.library() is None, reason="no compiler: the PyTorch path is all there is")


@pytest.mark.nightly(held_by="tests/model/test_native.py::test_an_update_whose_kernel_cannot_be_built_has_the_same_bits")
@needs_library
def test_processes_may_build_at_the_same_time(tmp_path: Path) -> None:
    program = (  # a package of the same name and places, without the imports of the real one: seconds each
        "import sys, pathlib, types; package = sys.modules['megacompile'] = types.ModuleType('megacompile')\n"
        "package.__path__ = sys.argv[2:]\n"
        "from megacompile.runtime.optimizer import native\n"
        "print(native.build(pathlib.Path(sys.argv[1]), native.compiler_command()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), *megacompile.__path__]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert [str(file) for file in tmp_path.iterdir()] == [outputs[0]], "one library, no temporary files"
    assert native.instruction_sets(native.load(Path(outputs[0])))[0] == "portable"


@pytest.mark.nightly(held_by="tests/model/test_native.py::test_an_update_whose_kernel_cannot_be_built_has_the_same_bits")
@needs_library
def test_a_second_build_uses_the_first_and_a_changed_source_does_not(tmp_path: Path) -> None:
    compiler = native.compiler_command()
    built = native.build(tmp_path, compiler)
    written = built.stat().st_mtime_ns
    assert native.build(tmp_path, compiler) == built
    assert built.stat().st_mtime_ns == written
    changed = native.SOURCE.read_bytes() + b"\n// changed\n"
    assert native.build(tmp_path, compiler, changed) != built


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Forgets the loaded library, so that a test sees a process's first use; the loaded one comes back after it."""
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "cache"))
    for kept in (native._library, native._update_library):
        kept.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for kept in (native._library, native._update_library):
        kept.cache_clear()


@pytest.mark.nightly(held_by="tests/model/test_native.py::test_an_update_whose_kernel_cannot_be_built_has_the_same_bits")
@needs_library
def test_no_step_waits_for_the_compiler(fresh_library: pytest.MonkeyPatch) -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu")
    megacompile.AdamW(model.parameters())
    assert native._library.cache_info().currsize == 1, "the host's kernels are built with the optimizer"
    built = native._update_library.cache_info().currsize
    assert built >= 1
    batch = tiny_models.batch(0)
    model(**batch).loss.backward()
    model.megacompile.synchronize()
    assert native._update_library.cache_info().currsize == built


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler", "true"])
def test_a_broken_compiler_is_said_once_and_the_results_stand(
    fresh_library: pytest.MonkeyPatch, compiler: str, tmp_path: Path
) -> None:
    fresh_library.setenv("CXX", compiler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        norms = [host_kernels.norm(torch.ones(100)) for _ in range(2)]
        assert native.library() is None
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert "Install g++" in str(caught[0].message)
    assert not list(tmp_path.glob("cache/*.tmp"))
    assert norms == [10.0, 10.0]


@needs_library
def test_an_update_whose_kernel_cannot_be_built_has_the_same_bits(fresh_library: pytest.MonkeyPatch) -> None:
    def trained() -> dict[str, torch.Tensor]:
        model = megacompile.stream(tiny_models.build(), device="cpu", compile=False)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        model(**tiny_models.batch(0)).loss.backward()
        optimizer.step()
        return tiny_models.weights(model)

    by_kernel = trained()
    native._update_library.cache_clear()
    fresh_library.setenv("CXX", "false")
    with pytest.warns(RuntimeWarning, match="megacompile runs the optimizer in PyTorch, .* Install g"):
        by_pytorch = trained()
    assert native.library() is not None
    assert tiny_models.same_bits(by_kernel, by_pytorch)


def test_cache_directory_is_private(tmp_path: Path) -> None:
    made = cache.cache_directory({"XDG_CACHE_HOME": str(tmp_path)})
    assert made == tmp_path / "megacompile"
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    assert cache.cache_directory({"MEGACOMPILE_CACHE": str(made)}).stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(cache.CacheError, match="MEGACOMPILE_CACHE"):
        cache.cache_directory({"MEGACOMPILE_CACHE": str(tmp_path / "file" / "below")})


def test_default_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert native.default_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert native.default_threads() >= 1


def test_processes_of_torchrun_share_the_cores_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets OMP_NUM_THREADS=1 by itself, which would leave an update to one thread."""
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr("megacompile.system.control_groups._cpu_quotas", lambda *_: iter(()))
    monkeypatch.setattr(native, "cores", lambda: 32)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert native.default_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert native.default_threads() == 1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    cores.cache_clear()
    assert native.default_threads() == 16
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert native.default_threads() == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))  # bound to the processors near its GPU
    cores.cache_clear()
    assert native.default_threads() == 12
    cores.cache_clear()


@pytest.mark.parametrize(("files", "expected"), [
    ({}, None), ({"job/cpu.max": "max 100000"}, None), ({"job/cpu.max": "100000 100000"}, 1),
    ({"job/cpu.max": "max 100000", "cpu.max": "50000 100000"}, 1), ({"job/cpu.max": "99900000 100000"}, None),
    ({"cpu/step/cpu.cfs_quota_us": "100000", "cpu/step/cpu.cfs_period_us": "100000"}, 1),
    ({"cpu/step/cpu.cfs_quota_us": "-1", "cpu/step/cpu.cfs_period_us": "100000"}, None),
], ids=["none", "unlimited", "one", "half, of a group around", "more than there are", "version 1", "version 1, unlimited"])
def test_threads_are_no_more_than_a_container_s_share_of_the_processors(
        files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    """A share above what there is, or none, leaves all processors that the process may run on."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/step\n1:cpu,cpuacct:/step\n0::/job\n")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    assert cores(tmp_path / "proc", tmp_path / "groups") == (expected or len(os.sched_getaffinity(0)))


def test_more_threads_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + cores())
    with pytest.warns(RuntimeWarning, match="torch computes with .* threads on .* cores.*set OMP_NUM_THREADS="):
        ThreadBackend()


def test_segment_has_the_layout_of_the_source() -> None:
    assert ctypes.sizeof(native.NativeSegment) == 7 * 8 + 14 * 4, "3 int64, 4 pointers, a key, 12 floats, padding"
