"""Private parts of PyTorch: only `megacompile/compat` names any, and the installed torch has each of them."""
from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn

from megacompile.compat import aot, core, dynamo, inductor, module_hooks, symbols
from megacompile.compat.attributes import ATTRIBUTES

ROOT = Path(__file__).resolve().parents[2]
FILES: dict[str, Path] = runpy.run_path(str(ROOT / "docs" / "make_packages.py"))["source_files"]()
OTHERS = {name: path for name, path in FILES.items() if not name.startswith("megacompile.compat.")}
MODULES = (aot, core, dynamo, inductor, symbols)
#: Private attributes of objects that are not PyTorch's: of transformers, of its Trainer.
FOREIGN = {"_attn_implementation", "_gradient_checkpointing_func", "_is_expert_parallel", "_is_hf_initialized",
           "_model_mapping", "_n_gpu", "_name_or_path", "_weight_conversions"}
#: Functions that Python documents: `os._exit` and `sys._current_frames`.
OF_PYTHON = {"_current_frames", "_exit"}


def _is_private(dotted: str) -> bool:
    """Whether a dotted name is a private one of torch. ATen's ops are what graphs consist of, and tested apart."""
    parts = dotted.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and parts[1:2] != ["ops"] and (private or dotted.startswith("torch.fx.experimental"))


def _names(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a file imports or writes out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", name := ast.unparse(node)):
            yield name


def test_no_other_file_names_a_private_part_of_torch() -> None:
    found = [f"{module} names {name}" for module, path in OTHERS.items()
             for name in sorted(set(filter(_is_private, _names(ast.parse(path.read_text())))))]
    assert not found, "put it into megacompile/compat, with what it is for"


@pytest.mark.parametrize(("source", "private"), [
    ("import torch._dynamo", True), ("from torch.utils import _pytree as pytree", True), ("x = torch._C._nn.linear", True),
    ("from torch.fx.experimental.symbolic_shapes import ShapeEnv", True), ("torch.cuda._sleep(1)", True),
    ("import torch", False), ("torch.__version__", False), ("torch.ops.aten._to_copy.default", False), ("self._torch", False)])
def test_a_private_name_is_seen(source: str, private: bool) -> None:
    assert any(map(_is_private, _names(ast.parse(source)))) is private


def test_each_part_is_there_and_says_what_it_is_for() -> None:
    for module in MODULES:
        assert sorted(module.__all__) == list(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)
        source = Path(str(module.__file__)).read_text()
        for line in source.splitlines():
            if "import " in line and _is_private(line.split()[1]) and "(" not in line:
                assert "  # " in line or line.startswith("import"), f"{module.__name__}: {line}"


def _private_attributes() -> dict[str, list[str]]:
    """Attribute -> the files that have it of an object other than `self`, but for those that the package defines itself."""
    own: set[str] = set()
    used: dict[str, list[str]] = {}
    for module, path in OTHERS.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if of_self and isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
                elif not of_self and re.match(r"_[^_]", node.attr) and not re.match(r".*\b_?(aten|ops)\.", ast.unparse(node)):
                    used.setdefault(node.attr, []).append(module)
    return {name: modules for name, modules in used.items() if name not in own | FOREIGN | OF_PYTHON}


def test_private_attributes_are_listed() -> None:
    assert {name: modules for name, modules in _private_attributes().items() if name not in ATTRIBUTES} == {}


def test_private_attributes_are_where_they_should_be() -> None:
    for name, (owner, purpose) in ATTRIBUTES.items():
        assert purpose
        if owner:
            module, _, cls = owner.rpartition(".")
            assert hasattr(getattr(importlib.import_module(module), cls), name), f"{owner}.{name}"
    module: Any = nn.Linear(2, 2)
    assert module._parameters.keys() == {"weight", "bias"} and module._buffers == {} == module._modules
    assert nn.ModuleList([module])._modules["0"] is module
    before = module.weight._version
    with torch.no_grad():
        module.weight.add_(1)
    assert module.weight._version == before + 1 and not module.weight._backward_hooks
    module.register_forward_hook(print)
    assert list(module._forward_hooks.values()) == [print]
    handle = module.register_forward_pre_hook(print, with_kwargs=True)
    module.register_forward_hook(repr, with_kwargs=True, always_call=True)
    module.register_full_backward_hook(str)
    assert list(module_hooks.hooks_of(module)) == [print, print, repr, str]
    assert list(vars(module)[module_hooks.BEFORE_FORWARD]) == [handle.id]
    assert [len(vars(module)[name]) for name in module_hooks.FLAGS] == [1, 1, 1]
    assert torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info.is_write
    x = torch.zeros(4)
    assert x[1:]._is_view() and x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata


def test_private_ops_are_there() -> None:
    names = {node.attr for path in FILES.values() for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Attribute) and re.search(r"\b_?aten\._\w+$", ast.unparse(node))}
    assert {"_to_copy", "_safe_softmax"} <= names
    assert [name for name in names if not hasattr(torch.ops.aten, name)] == []


def test_the_backward_knows_whether_its_graph_is_kept() -> None:
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            ctx.before = x.grad_fn
            return x + other

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            seen.append((core.graph_is_kept(), core.node_will_run(ctx.before)))
            return gradient, gradient

    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    y = Looks.apply(x * 2, other).sum()
    y.backward(retain_graph=True)
    y.backward()
    torch.autograd.grad(Looks.apply(x * 2, other).sum(), other)
    assert seen == [(True, True), (False, True), (False, False)]


def test_small_parts_do_what_they_are_for() -> None:
    assert core.parse_to("cpu", torch.float64)[:2] == (torch.device("cpu"), torch.float64)
    assert [float(norm) for norm in core.foreach_norm([torch.tensor([3.0, 4.0])], 2)] == [5.0]
    leaves, spec = core.pytree.tree_flatten({"a": (1, 2)})
    assert core.pytree.tree_unflatten(leaves, spec) == {"a": (1, 2)}
    with core.reported_as_export():
        assert torch.compiler.is_compiling() and torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()
    assert isinstance(torch.ops.aten.relu.default, core.OpOverload)
    graph = fx.symbolic_trace(lambda x: x + 1)
    assert graph.forward.__code__.co_filename in core.generated_code()
    ends = torch.tensor([2, 3], dtype=torch.int32)
    product = core.grouped_mm(torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(2, 8, 8, dtype=torch.bfloat16), offs=ends)
    assert product.shape == (3, 8) and bool((product == 8).all())


def test_fakes_have_symbols_and_no_data() -> None:
    with core.FakeTensorMode(shape_env=symbols.ShapeEnv()) as fakes:
        assert isinstance(torch.empty(1 << 40), core.FakeTensor)
    assert fakes.shape_env.guards == []
    size = sympy.Symbol("T", integer=True, positive=True)
    assert symbols.FloorDiv(7, 2) == 3 and symbols.Mod(7, 4) == 3 and symbols.PythonMod(size, 1) == 0
    assert symbols.sympy_interp(symbols.PythonReferenceAnalysis, {size: 5}, 2 * size + 1) == 11


def test_dynamo_names_inputs_and_settings_that_we_set() -> None:
    assert all(hasattr(dynamo.config, name) for name in ("ignore_logging_functions", "fake_tensor_cache_enabled"))
    graph: Any = dynamo.dynamo_graph_capture_for_export(lambda x: {"y": core.builtin_linear(x, x)})(torch.ones(2, 2))
    for replay in (graph._dynamo_bytecode_flatten, graph._dynamo_bytecode_unflatten):
        assert isinstance(replay.f_globals, dict)
    assert any(node.target is core.builtin_linear for node in graph.graph.nodes)
    regions = dynamo.regions()
    assert regions is None or callable(regions.is_reuse_eligible)
    dynamo.reset()


def test_inductor_has_the_settings_and_counters_that_we_read() -> None:
    assert isinstance(inductor.config.force_disable_caches, bool)
    assert callable(inductor.compile) and hasattr(inductor.inductor_prims, "force_stride_order")
    assert dynamo.counters["inductor"]["no such counter"] == 0


def test_light_modules_import_nothing_heavy() -> None:
    script = ("import sys\nimport megacompile.compat.core\n"
              "print({'torch._dynamo', 'torch._inductor', 'torch._functorch.aot_autograd', 'sympy'} & sys.modules.keys())")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_versions_of_torch_that_may_be_installed_are_those_that_were_tested() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = (each for each in wanted if re.match(r"torch\b", each))
    assert bounds == "torch>=2.11,<2.14"
    installed = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
    assert (2, 11) <= installed < (2, 14)
