"""Nothing that is read is executed, and only megacompile's own cache files are loaded (docs/security.md)."""
from __future__ import annotations

import ast
import contextlib
import os
import pickle
import socket
import stat
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacompile.codegen import cache, inductor
from megacompile.runtime.optimizer import native

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("megacompile", "passes", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))]

#: Modules whose reading runs what it reads.
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "code", "runpy"}
#: Python's own functions that run text.
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What in a file could run what somebody else wrote."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"line {node.lineno} imports {name}" for name in names if name.split(".")[0] in UNSAFE_MODULES)
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
        if called in UNSAFE_CALLS or called in ("os.system", "os.popen"):
            yield f"line {node.lineno} calls {called}"
        if called == "torch.load" and given.get("weights_only") != "True":
            yield f"line {node.lineno} unpickles anything"
        if called in ("numpy.load", "np.load") and given.get("allow_pickle", "False") != "False":
            yield f"line {node.lineno} unpickles anything"
        if called in ("yaml.load", "yaml.unsafe_load") or "True" in (given.get("shell"), given.get("trust_remote_code")):
            yield f"line {node.lineno} runs what it is given: {called}"


def test_no_file_of_ours_runs_what_it_reads() -> None:
    assert len(SOURCES) > 150
    assert not [f"{path}: {said}" for path in SOURCES for said in unsafe(ast.parse(path.read_text()))]


@pytest.mark.parametrize("text", [
    "import pickle", "from pickle import loads", "import torch\ntorch.load(f)", "torch.load(f, weights_only=False)",
    "eval(text)", "exec(compile(text, '', 'exec'))", "subprocess.run(text, shell=True)", "os.system(text)", "import dill as d",
    "np.load(f, allow_pickle=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)"])
def test_what_runs_what_it_reads_is_seen(text: str) -> None:
    assert list(unsafe(ast.parse(text)))


def test_what_only_looks_like_it_is_allowed() -> None:
    assert not list(unsafe(ast.parse("model.eval()\ntorch.load(f, weights_only=True)\nself.compile(x)\ntorch.compile(f)")))


# ---------------------------------------------------------------- the key

def test_a_key_is_private_and_stays(tmp_path: Path) -> None:
    key = cache.key_in(tmp_path / "megacompile")
    path = tmp_path / "megacompile/cache.key"
    assert len(key) == 32 and cache.key_in(tmp_path / "megacompile") == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(path.parent) == ["cache.key"]


@pytest.mark.parametrize("spoil", [
    lambda p: p.chmod(0o640), lambda p: p.write_bytes(b"short"), lambda p: p.write_bytes(bytes(33)),
    lambda p: (p.rename(p.with_name("elsewhere")), p.symlink_to("elsewhere")), lambda p: p.unlink(),
], ids=["readable by others", "short", "long", "a link", "gone"])
def test_a_key_that_others_may_know_is_replaced(spoil: Any, tmp_path: Path) -> None:
    key = cache.key_in(tmp_path)
    spoil(tmp_path / "cache.key")
    new = cache.key_in(tmp_path)
    assert new != key and cache.key_in(tmp_path) == new
    assert stat.S_IMODE((tmp_path / "cache.key").lstat().st_mode) == 0o600


def test_a_user_without_a_configuration_folder_has_the_key_in_the_cache(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "cache"))
    assert cache._key.__wrapped__() == cache.key_in(tmp_path / "cache")


# ---------------------------------------------------------------- built kernels

@pytest.fixture
def compiler(tmp_path: Path) -> list[str]:
    """Writes `built N` for the N-th time that it compiles."""
    script = tmp_path / "compiler.py"
    script.write_text(textwrap.dedent("""
        import pathlib, sys
        if "--version" in sys.argv:
            sys.exit(print("one"))
        count = pathlib.Path(__file__).with_name("count")
        count.write_text((count.read_text() if count.exists() else "") + "x")
        pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text(f"built {len(count.read_text())}")
    """))
    return [sys.executable, str(script)]


@pytest.mark.parametrize("tamper", [
    lambda p: p.write_bytes(b"evil"), lambda p: p.write_bytes(b"evil" + p.read_bytes()), lambda p: os.truncate(p, 20),
    lambda p: p.write_bytes(p.read_bytes() + b"more"), lambda p: p.write_bytes(b""),
    lambda p: (p.rename(p.with_name("elsewhere")), p.symlink_to("elsewhere")),
], ids=["replaced", "prefixed", "truncated", "lengthened", "empty", "a link"])
def test_a_library_that_was_tampered_with_is_built_again(tamper: Any, compiler: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    built = native.build(cache, compiler)
    assert native.build(cache, compiler) == built and built.read_bytes().startswith(b"built 1")
    tamper(built)
    assert native.build(cache, compiler) == built
    assert built.read_bytes().startswith(b"built 2") and not built.is_symlink()


def test_a_library_sealed_under_another_name_or_key_is_not_loaded(
        compiler: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    built = native.build(tmp_path / "cache", compiler)
    other = built.with_name("adam-other.so")
    other.write_bytes(built.read_bytes())
    assert cache.is_sealed_library(built) and not cache.is_sealed_library(other)
    monkeypatch.setattr(cache, "_key", lambda: bytes(32))
    assert not cache.is_sealed_library(built)


# ---------------------------------------------------------------- inductor's cache

class Trap:
    """Ends the process if it is unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two sealed files, one of them below another folder, which nobody works in."""
    path = tmp_path / "compiled"
    path.mkdir()
    first = cache.SealedFolder(path)
    (path / "fxgraph").mkdir()
    (path / "fxgraph/entry").write_bytes(b"ours")
    (path / "kernel.so").write_bytes(b"ours too")
    first.seal()
    os.close(first._lock)
    return path


def files(path: Path) -> set[str]:
    found = {each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file() or each.is_symlink()}
    return found - {"seals.json", "seals.lock"}


def test_what_was_sealed_is_there_at_the_next_start(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.SealedFolder(folder)
    assert files(folder) == {"fxgraph/entry", "kernel.so"}


def test_a_planted_file_is_removed_before_it_is_read(folder: Path, tmp_path: Path) -> None:
    (folder / "fxgraph/planted").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_bytes(b"not ours to remove")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "fxgraph/link").symlink_to(folder / "kernel.so")
    cache.SealedFolder(folder)
    assert files(folder) == {"fxgraph/entry", "kernel.so"} and (tmp_path / "elsewhere/file").exists()


def test_no_file_is_used_if_one_was_changed(folder: Path) -> None:
    (folder / "fxgraph/entry").write_bytes(pickle.dumps(Trap()))
    with pytest.warns(RuntimeWarning, match=r"fxgraph/entry\) was changed since megacompile wrote it, and is compiled again"):
        cache.SealedFolder(folder)
    assert not files(folder)


def test_a_changed_file_about_tuning_costs_no_other_file(folder: Path) -> None:
    (folder / "kernel.best_config").write_bytes(b"{}")
    first = cache.SealedFolder(folder)
    assert files(folder) == {"fxgraph/entry", "kernel.so"}  # removed: it has no seal yet
    (folder / "kernel.best_config").write_bytes(b"{}")
    first.seal()
    (folder / "kernel.best_config").write_bytes(b'{"num_warps": 4}')  # as inductor does at a first launch, before a kill
    os.close(first._lock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.SealedFolder(folder)
    assert files(folder) == {"fxgraph/entry", "kernel.so"}


def test_a_file_that_takes_another_s_name_is_not_used(folder: Path) -> None:
    (folder / "kernel.so").replace(folder / "fxgraph/entry")
    with pytest.warns(RuntimeWarning, match="compiled again"):
        cache.SealedFolder(folder)
    assert not files(folder)


@pytest.mark.parametrize("table", [b"", b"[1]", b"{", b"[" * 200_000, b"\xff", b'{"fxgraph/entry": 1, "kernel.so": "00"}'])
def test_a_damaged_table_of_seals_costs_the_cache_and_nothing_else(folder: Path, table: bytes) -> None:
    (folder / "seals.json").write_bytes(table)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache.SealedFolder(folder)
    assert not files(folder)


def test_an_emptied_file_counts_as_changed_and_an_unsealed_empty_file_is_removed(folder: Path) -> None:
    (folder / "locks").mkdir()
    (folder / "locks/left").touch()
    os.close(cache.SealedFolder(folder)._lock)
    assert files(folder) == {"fxgraph/entry", "kernel.so"}
    os.truncate(folder / "kernel.so", 0)
    with pytest.warns(RuntimeWarning, match=r"kernel.so\) was changed since megacompile wrote it, and is compiled again"):
        cache.SealedFolder(folder)
    assert not files(folder)


def test_pipes_and_sockets_are_removed_unread(folder: Path) -> None:
    os.mkfifo(folder / "fxgraph/pipe")
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(folder):
        made.bind("socket")
    (folder / "kernel.so").unlink()
    os.mkfifo(folder / "kernel.so")
    cache.SealedFolder(folder)
    assert {each.name for each in folder.rglob("*") if not each.is_dir()} == {"seals.json", "seals.lock", "entry"}


@pytest.mark.parametrize("name", ["seals.json", "seals.lock"])
@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)], ids=["FIFO", "folder", "link"])
def test_a_folder_whose_seals_are_no_files_is_not_used(name: str, plant: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "cache"))
    first = inductor.newest_folder()
    assert first is not None
    monkeypatch.setattr(cache, "_open", {})
    (first / name).unlink(missing_ok=True)
    plant(first / name)
    second = inductor.newest_folder()
    assert second is not None and (first.name, second.name) == ("0", "1")


def test_a_key_that_is_a_pipe_is_replaced_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cache.key")
    assert cache.key_in(tmp_path) == cache.key_in(tmp_path)


def test_an_unreadable_table_of_seals_costs_one_compilation_and_no_error(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "cache"))
    first = inductor.newest_folder()
    assert first is not None
    monkeypatch.setattr(cache, "_open", {})
    (first / "seals.json").write_text("[" * 200_000)
    (first.parent / "²").mkdir()
    assert inductor.newest_folder() == first


def test_where_another_process_is_at_work_nothing_is_removed_and_only_what_is_sealed_is_used(folder: Path) -> None:
    other = cache.SealedFolder(folder)
    cache.SealedFolder(folder)  # all of it is sealed
    (folder / "lock of the other").touch()
    cache.SealedFolder(folder)
    (folder / "fxgraph/half").write_bytes(b"being written")
    with pytest.raises(OSError, match="is in use, and not all of it is sealed"):
        cache.SealedFolder(folder)
    assert "fxgraph/half" in files(folder)
    other.seal()
    cache.SealedFolder(folder)


def test_a_start_beside_another_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "cache"))
    first = inductor.newest_folder()
    assert first is not None and first == inductor.newest_folder()
    (first / "half").write_bytes(b"being written")
    monkeypatch.setattr(cache, "_open", {})  # as in a process of its own
    second = inductor.newest_folder()
    assert second is not None and (first.name, second.name) == ("0", "1")
