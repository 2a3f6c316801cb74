"""`megacompile doctor` finds problems, names the remedy, and says what can train."""
from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megacompile import cli
from megacompile.runtime.optimizer import native
from megacompile.tools import doctor
from megacompile.tools.doctor import Finding, State, devices, examine, report


def finding(subject: str) -> Finding:
    (found,) = (f for f in examine() if f.subject == subject)
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with one GPU, CUDA 13 and CuPy for it, as far as the doctor asks. Its answers may be changed."""
    answers = SimpleNamespace(major=9, cupy=13000, link="5, 16, 16")
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda _: SimpleNamespace(**{**vars(properties), "major": answers.major}))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: properties.name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cupy: Any = ModuleType("cupy")
    cupy.__version__, cupy.cuda = "14.0", SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=lambda: answers.cupy))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda fields: "580.1" if fields == "driver_version" else answers.link)
    return answers


def test_this_machine_can_train_on_its_cpu_and_the_command_says_so() -> None:
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "training is possible on cpu" in result.output
    for subject in ("host kernels", "OpenMP", "host memory", "locked memory", "CUDA device", "CuPy"):
        assert subject in result.output


def test_a_machine_that_cannot_train_ends_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_host_bytes", lambda: 1 << 20)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1 and "training is not possible here" in result.output
    assert finding("host memory").state is State.ABSENT


def test_all_is_well_with_a_gpu_of_today(gpu: Any) -> None:
    found = {f.subject: f for f in examine()}
    assert found["CUDA device"].state is found["CuPy"].state is found["PCIe"].state is found["link"].state is State.GOOD
    assert "compute capability 9.0, 140.00 GiB" in found["CUDA device"].found
    assert devices(list(found.values())) == ["cpu", "cuda"]
    assert report(list(found.values())).endswith("training is possible on cpu and cuda")


@pytest.mark.parametrize(("name", "value", "subject", "said"), [
    ("major", 7, "CUDA device", "use float32"),
    ("cupy", 12090, "CuPy", "pip install cupy-cuda13x"),
    ("link", "5, 4, 16", "PCIe", "slot with all lanes"),
])
def test_a_gpu_that_could_do_better_is_told_how(gpu: Any, name: str, value: Any, subject: str, said: str) -> None:
    setattr(gpu, name, value)
    assert finding(subject).state is State.SLOW and said in finding(subject).remedy
    assert devices(examine()) == ["cpu", "cuda"]


def test_a_gpu_without_cupy_trains_on_the_cpu_alone(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert finding("CuPy") == Finding("CuPy", State.ABSENT, "not usable (ModuleNotFoundError)",
                                      "pip install cupy-cuda13x")
    assert devices(examine()) == ["cpu"]


def test_torch_without_cuda_on_a_machine_with_a_driver_is_told_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda _: "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert finding("CUDA device").remedy == "install torch for CUDA (pytorch.org)"


def test_what_slows_the_host_is_found(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) + 1))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr(doctor, "group_rooms", lambda: iter([1 << 30]))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "file"))
    found = {f.subject: f for f in examine()}
    for subject, remedy in {"host kernels": "install g++", "OpenMP": "unset OMP_NUM_THREADS", "locked memory": "ulimit -l",
                            "control group": "more memory", "cache folder": "MEGACOMPILE_CACHE"}.items():
        assert found[subject].state is State.SLOW and remedy in found[subject].remedy, subject
    assert "8.00 MiB" in found["locked memory"].found and "1.00 GiB" in found["control group"].found


def test_a_python_without_headers_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert finding("Python headers").state is State.SLOW and "-dev" in finding("Python headers").remedy
    (tmp_path / "Python.h").touch()
    assert finding("Python headers").state is State.GOOD
