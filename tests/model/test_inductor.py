"""Compiled code that outlives a process: the next start finds it, and handles damaged files."""
from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.select_algorithm import extern_kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacompile.codegen import inductor
from megacompile.codegen.inductor import Inductor, caching_in, newest_folder, version_digest
from megacompile.frontend.ops import linear_cross_entropy

HERE = Path(__file__).resolve().parents[1] / "support"
FILES: dict[str, Path] = runpy.run_path(str(HERE.parents[1] / "docs" / "make_packages.py"))["source_files"]()
#: Files that compiled templates depend on: those that define ops, the loop over tokens, and the passes over templates.
COMPILED_IN = sorted({module for module, path in FILES.items() if "torch.library.custom_op" in path.read_text()}
                     | {module for module in FILES if module.startswith("megacompile.passes.template.")}
                     | {"megacompile.ir.token_loop", "megacompile.ir.tokenwise", "megacompile.codegen.grouped_products"})

GRAPH = """
import json, warnings
import test_inductor as tests
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print(json.dumps([*tests.compile_once(lambda x: x.sin() * 2 + 1),
                      [str(w.message) for w in said if "compiled again" in str(w.message)]]))
"""


def fresh_process(script: str, cache: Path) -> Any:
    """What a Python process prints last, as JSON. Its collector runs as seldom as that of the tests (see tests/conftest.py)."""
    script = f"import gc\ngc.set_threshold(100_000, 20, 50)\n{script}"
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    environment = {**os.environ, "MEGACOMPILE_CACHE": str(cache), "PYTHONPATH": path}
    command = [sys.executable, "-c", script, str(HERE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def compile_once(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[bool, int, int]:
    """Whether the compiled function agrees with itself uncompiled; how many graphs were compiled, and found."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        example = torch.empty(64)
        graph = make_fx(lambda x: (function(x),))(example)
    inductor, x = Inductor(), torch.linspace(-3, 3, 64)
    (got,) = inductor.compile(graph, [example])(x)
    return torch.allclose(got, function(x), atol=1e-6), inductor.compiled, inductor.from_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def damage(cache: Path) -> int:
    """Overwrites compiled code."""
    files = [f for f in (cache / "compiled").rglob("*") if f.is_file() and f.suffix == ".so"]
    for file in files:
        file.write_bytes(b"no such thing")
    return len(files)


def test_code_in_a_folder_serves_and_is_compiled_anew_where_it_was_damaged(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at other starts: copies of a folder are found as new ones are."""
    def compile_in(cache: Path) -> tuple[bool, int, int]:
        monkeypatch.setenv("MEGACOMPILE_CACHE", str(cache))
        return compile_once(lambda x: x.sin() * 2 + 1)

    first, copied, damaged = (tmp_path / name for name in ("first", "copied", "damaged"))
    assert compile_in(first) == (True, 1, 0)
    for copy in (copied, damaged):
        shutil.copytree(first, copy)
    assert damage(damaged)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert compile_in(copied) == (True, 0, 1)
    with pytest.warns(RuntimeWarning, match="was changed since megacompile wrote it"):
        assert compile_in(damaged) == (True, 1, 0)


@pytest.mark.nightly(
    held_by="tests/model/test_inductor.py::test_code_in_a_folder_serves_and_is_compiled_anew_where_it_was_damaged")
def test_a_damaged_cache_is_compiled_anew_and_then_serves_again(tmp_path: Path) -> None:
    """Each start is a process of its own."""
    cache = tmp_path / "cache"
    assert fresh_process(GRAPH, cache) == [True, 1, 0, []]
    assert damage(cache)
    agrees, compiled, found, said = fresh_process(GRAPH, cache)
    assert (agrees, compiled, found) == (True, 1, 0) and len(said) == 1 and "was changed since megacompile wrote it" in said[0]
    assert fresh_process(GRAPH, cache) == [True, 0, 1, []]


@pytest.mark.parametrize("module", COMPILED_IN)
def test_a_change_of_what_compiled_code_depends_on_gives_another_folder(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = version_digest(), Path.read_bytes
    changed = FILES[module].resolve()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.resolve() == changed))
    assert version_digest.__wrapped__() != before


def test_files_that_define_ops_are_found() -> None:
    assert {"megacompile.frontend.ops.attention", "megacompile.frontend.graph.expert_pieces"} <= set(COMPILED_IN)


def test_missing_code_of_ours_does_not_turn_the_cache_off_silently(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_HASHED", ("frontend", "no_such_folder"))
    monkeypatch.setattr(inductor, "version_digest", version_digest.__wrapped__)
    with pytest.raises(FileNotFoundError, match="no_such_folder has no Python files: install megacompile again"):
        newest_folder()


def test_operands_of_grouped_products_lie_as_they_were_traced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    product: Any = torch._grouped_mm
    strides: list[list[tuple[int, ...]]] = []

    def watched(a: torch.Tensor, b: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        strides.append([a.stride(), b.stride()])
        return cast(torch.Tensor, product(a, b, *rest, **options))

    def function(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.t().clone(memory_format=torch.contiguous_format) * 2  # which reads columns
        return product(rows, weights, offs=ends), product((rows + 1).t(), rows + 3, offs=ends)

    inputs = torch.randn(32, 64).bfloat16(), torch.randn(3, 32, 16).bfloat16(), torch.tensor([9, 40, 64], dtype=torch.int32)
    with FakeTensorMode(shape_env=ShapeEnv()):
        examples = [torch.empty(x.shape, dtype=x.dtype) for x in inputs]
        graph = make_fx(function, tracing_mode="real")(*examples)
    monkeypatch.setattr(extern_kernels, "_grouped_mm", watched, raising=False)
    compiled = Inductor().compile(graph, examples)
    for got, expected in zip(compiled(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, expected)
    assert strides == [[(32, 1), (512, 16, 1)], [(1, 32), (32, 1)]]


def test_a_graph_that_inductor_refuses_is_refused_with_its_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: object, examples: object) -> None:
        raise NotImplementedError("no such op")

    folder = newest_folder()
    assert folder is not None
    (folder / "entry").touch()
    monkeypatch.setattr("megacompile.compat.inductor.compile", refuse)
    with pytest.raises(NotImplementedError, match="no such op"):
        compile_once(torch.sin)
    assert newest_folder() == folder


def test_without_a_cache_folder_models_compile_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "file" / "below"))
    assert newest_folder() is None
    agrees, compiled, found = compile_once(lambda x: x.cos() * 3 - 1)
    assert agrees and compiled + found == 1


def test_the_environment_is_as_it_was(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    folder = newest_folder()

    def fail() -> None:
        with caching_in(folder):
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
            os.environ["TRITON_CACHE_DIR"] = "as inductor does"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere" and "TRITON_CACHE_DIR" not in os.environ


def test_only_our_compilations_are_silent_about_tf32(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled."

    def compile_loudly(graph: torch.fx.GraphModule, examples: object) -> object:
        warnings.warn(text, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return graph

    monkeypatch.setattr("megacompile.compat.inductor.compile", compile_loudly)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compile_once(torch.sin)
        warnings.warn(text, stacklevel=1)
    assert [str(w.message) for w in said] == ["something else", text]


@pytest.mark.nightly(held_by=(
    "tests/model/test_inductor.py::test_a_last_chunk_that_does_not_compile_with_a_symbol_is_compiled_for_its_number",
    "tests/model/test_templates.py::test_linear_cross_entropy_equals_autograd_whatever_the_chunk"))
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_fused_gradient_of_a_chunk_is_the_unfused_one(cache: Path, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 9 tokens, and last chunks of any number of tokens, for which one compilation is enough. Inductor's cache keeps
    all of them."""
    compiled, compile_ = [], Inductor.compile
    counters["aot_autograd"].clear()

    def counted(inductor: Inductor, graph: torch.fx.GraphModule, examples: Any) -> Any:
        compiled.append(graph)
        return compile_(inductor, graph, examples)

    monkeypatch.setattr(Inductor, "compile", counted)
    for function in (linear_cross_entropy._fused_chunk_gradient, linear_cross_entropy._compiled_for_any_rows):
        function.cache_clear()
    for rows, compilations in ((9, 1), (5, 2), (2, 2), (8, 2), (5, 2), (1, 3)):
        scores, target, factor = torch.randn(rows, 11), torch.arange(rows), torch.full((rows,), 0.25)
        factor[rows // 2] = 0
        fused = linear_cross_entropy._fused_chunk_gradient(rows, 9, 11, torch.float32, scores.device, 0.5, softcap)
        with torch.no_grad():
            got = fused(scores, target, factor)
            expected = linear_cross_entropy._chunk_gradient(scores, target, factor, 0.5, softcap)
        torch.testing.assert_close(tuple(got), expected)
        assert len(compiled) == compilations
    assert counters["aot_autograd"]["autograd_cache_saved"] == 3
    assert not counters["aot_autograd"]["autograd_cache_bypass"]


def test_a_last_chunk_that_does_not_compile_with_a_symbol_is_compiled_for_its_number(
        cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = Inductor.compile

    def without_symbols(inductor: Inductor, graph: torch.fx.GraphModule, examples: Any) -> Any:
        if any(isinstance(each, torch.SymInt) for each in examples):
            raise RuntimeError("symbols are unknown")
        return compile_(inductor, graph, examples)

    monkeypatch.setattr(Inductor, "compile", without_symbols)
    for function in (linear_cross_entropy._fused_chunk_gradient, linear_cross_entropy._compiled_for_any_rows):
        function.cache_clear()
    given = torch.randn(3, 11), torch.arange(3), torch.full((3,), 0.25)
    fused = linear_cross_entropy._fused_chunk_gradient(3, 9, 11, torch.float32, given[0].device, 1.0, 0.0)
    torch.testing.assert_close(tuple(fused(*given)), linear_cross_entropy._chunk_gradient(*given, 1.0, 0.0))
    linear_cross_entropy._compiled_for_any_rows.cache_clear()


def test_each_rank_of_a_host_has_a_folder_of_compiled_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path))
    folders = set()
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        folders.add(newest_folder())
    assert None not in folders and len(folders) == 3
