"""The wheel: everything that the checkout has is in it, in the right place, and works without the checkout."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from megacompile import passes, runtime

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"megacompile": "megacompile", "passes": "megacompile/passes", "runtime": "megacompile/runtime"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: setuptools builds in the tree, and packs what an earlier build left in build/lib."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-index", "--no-build-isolation", "--no-deps",
                           "--wheel-dir", built, checkout], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(built.glob("megacompile-*.whl"))


def sources(places: Mapping[str, str]) -> set[str]:
    """Every source file of the checkout, by where its folder lies in what was built."""
    return {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
            for folder, inside in places.items() for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".cpp", ".cu", ".h", ".html", ".json", ".typed")}


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_source_file_of_the_checkout_and_no_other(wheel: Path) -> None:
    assert {name for name in names(wheel) if ".dist-info/" not in name} == sources(FOLDERS)


def test_the_source_archive_holds_what_a_wheel_is_built_from(checkout: Path, tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("megacompile-*.tar.gz"))) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert inside >= sources({folder: folder for folder in FOLDERS}) | {"pyproject.toml", "README.md", "LICENSE"}


def test_the_wheel_is_typed_and_carries_its_licence(wheel: Path) -> None:
    assert "megacompile/py.typed" in names(wheel)
    assert "megacompile/runtime/optimizer/csrc/host.cpp" in names(wheel)
    assert any(name.endswith("/LICENSE") for name in names(wheel))


def test_the_wheel_installs_the_command(wheel: Path) -> None:
    entry = next(name for name in names(wheel) if name.endswith("/entry_points.txt"))
    assert "megacompile = megacompile.cli:app" in zipfile.ZipFile(wheel).read(entry).decode()


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = ("import megacompile, megacompile.frontend, megacompile.passes, megacompile.runtime as runtime\n"
              "for module in (megacompile, megacompile.frontend, megacompile.passes, runtime):\n"
              "    print(module.__file__)\n"
              "from megacompile.cli import app\n"
              "app(['doctor'])")
    # PYTHONPATH comes before the editable install that these tests themselves may run from.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()[:4]
    assert "training is possible on cpu" in done.stdout and all(Path(file).is_relative_to(tmp_path) for file in files), files


def test_the_checkout_finds_its_folders_beside_the_package() -> None:
    assert [passes.__file__, runtime.__file__] == [str(ROOT / "passes/__init__.py"), str(ROOT / "runtime/__init__.py")]


def test_nobody_is_told_to_install_from_an_index_that_has_no_megacompile() -> None:
    files = [*(path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")),
             ROOT / "README.md"]
    told = {path.name for path in files if re.search(r"pip install ['\"]?megacompile", path.read_text(encoding="utf-8"))}
    assert not told


def test_every_dependency_is_pinned_by_the_constraints() -> None:
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    missing = {re.split(r"[<>=]", each)[0] for each in wanted} - set(pins)
    assert not missing, f"constraints.txt does not pin {sorted(missing)}"


def test_torch_is_pinned_to_one_release() -> None:
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_image_copies_what_the_wheel_is_built_from_and_installs_extras_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= {"FROM", "RUN", "COPY", "WORKDIR", "ENTRYPOINT", "CMD"}
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert copied == {*FOLDERS, "pyproject.toml", "README.md", "LICENSE"} and all((ROOT / name).exists() for name in copied)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == copied
    extras = re.search(r"/src\[([\w,]+)\]", text)
    assert extras is not None and set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()
