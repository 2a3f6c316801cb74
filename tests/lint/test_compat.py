"""Private parts of PyTorch and of Hugging Face's libraries: `megacompile/compat` has each that the code uses, and so have the
installed libraries."""
from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import runpy
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn

from megacompile.compat import aot, core, dynamo, inductor, module_hooks, symbols
from megacompile.compat.attributes import ATTRIBUTES
from megacompile.compat.hugging_face import PARTS, Part, replaced

ROOT = Path(__file__).resolve().parents[2]
FILES: dict[str, Path] = runpy.run_path(str(ROOT / "docs" / "make_packages.py"))["source_files"]()
OTHERS = {name: ast.parse(path.read_text()) for name, path in FILES.items() if not name.startswith("megacompile.compat.")}
MODULES = (aot, core, dynamo, inductor, symbols)
#: What Python documents: `os._exit`, `sys._current_frames`, `_fields` of named tuples.
OF_PYTHON = {"_current_frames", "_exit", "_fields"}
LIBRARIES = ("transformers", "trl", "peft", "accelerate")
LISTED = {part.name for part in PARTS}
#: A class of ours that becomes a base beside one of theirs when a model is streamed.
MIXED_IN = {"megacompile.streaming.streamed_module.StreamedPretrained": "transformers.PreTrainedModel"}


def _is_private(dotted: str) -> bool:
    """Whether a dotted name is a private one of torch. ATen's ops are what graphs consist of, and tested apart."""
    parts = dotted.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and parts[1:2] != ["ops"] and (private or dotted.startswith("torch.fx.experimental"))


def _names(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a file imports or writes out, with imported names in full."""
    imported = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", name := ast.unparse(node)):
            first, _, rest = name.partition(".")
            yield f"{imported.get(first, first)}.{rest}"


def _imported(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_other_file_names_a_private_part_of_torch() -> None:
    listed = {f"{owner}.{name}" for name, (owner, _) in ATTRIBUTES.items()}
    found = [f"{module} names {name}" for module, tree in OTHERS.items()
             for name in sorted(set(filter(_is_private, _names(tree))) - listed)]
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


_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def _private_attributes(trees: Mapping[str, ast.AST]) -> dict[str, list[str]]:
    """Attribute -> the files that have it of an object other than `self`, but for those that the files define themselves and
    those that have a row."""
    own: set[str] = set()
    used: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
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
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
                name = getattr(node.args[1], "value", None)
                if isinstance(name, str) and re.match(r"_[^_]", name):
                    used.setdefault(name, []).append(module)
    return {name: modules for name, modules in used.items() if name not in own | OF_PYTHON | LISTED | ATTRIBUTES.keys()}


def test_private_attributes_are_listed() -> None:
    assert _private_attributes(OTHERS) == {}


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


@pytest.mark.parametrize(("library", "least", "below"), [
    ("torch", "2.11", "2.14"), ("transformers", "5.17", "5.24"), ("trl", "", "1.17"), ("peft", "", "0.22"),
    ("accelerate", "1.9", "1.16")])
def test_the_versions_that_may_be_installed_are_those_that_were_tested(library: str, least: str, below: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [each for group in (project["dependencies"], *project["optional-dependencies"].values()) for each in group]
    bounds = f"{library}{least and f'>={least},'}<{below}"
    assert {each for each in wanted if re.match(rf"{library}\b", each)} == {bounds}
    low, installed, high = (tuple(int(part) for part in each.split(".")[:2] if part)
                            for each in (least, importlib.metadata.version(library), below))
    assert low <= installed < high


def _resolved(owner: str) -> Any:
    try:
        return pkgutil.resolve_name(owner)
    except (AttributeError, ImportError) as error:
        raise AssertionError(f"{owner} is gone") from error


def _kin(owner: Any) -> list[Any]:
    """A class with those that it derives from, as far as they are theirs; or a function or module."""
    return [each for each in getattr(owner, "__mro__", [owner]) if each is owner or each.__module__.startswith(LIBRARIES)]


@functools.cache
def _words(owner: Any) -> set[str]:
    """Attributes, functions and texts in the source of a module, a function or a class (without its bases)."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner)))))
    return {found for node in nodes for key in ("attr", "name", "value")
            if isinstance(found := getattr(node, key, None), str)}


def _has(owner: Any, name: str) -> bool:
    return any(name in vars(each) or name in _words(each) for each in _kin(owner))


def _fault(part: Part) -> str | None:
    """What the installed libraries lack of a part; None if nothing."""
    try:
        owner = _resolved(part.owner)
    except AssertionError as gone:
        return str(gone)
    if not hasattr(owner, part.name) and not _has(owner, part.name):
        return f"{part.owner} has no {part.name}"
    wanted = part.parameters.split()
    lacking = [each for each in wanted if each not in inspect.signature(getattr(owner, part.name)).parameters]
    return f"{part.owner}.{part.name} does not take {', '.join(lacking)}" if lacking else None


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_library_has_each_part(library: str) -> None:
    parts = [part for part in PARTS if part.owner.split(".")[0] == library]
    assert parts and all(part.purpose for part in parts)
    assert [fault for part in parts if (fault := _fault(part))] == []


@pytest.mark.parametrize(("part", "fault"), [
    (("transformers.no_such_module", "x"), "transformers.no_such_module is gone"),
    (("transformers.Trainer", "_no_such_method"), "transformers.Trainer has no _no_such_method"),
    (("transformers.Trainer", "log", "", "logs verse"), "transformers.Trainer.log does not take verse")])
def test_a_part_that_is_gone_is_named(part: tuple[str, ...], fault: str) -> None:
    assert _fault(Part(*part, *[""] * (3 - len(part)))) == fault


def _is_listed(dotted: str) -> bool:
    """Whether a dotted name needs no row, or has one. The name of a module needs parts with rows in it."""
    parts = dotted.split(".")
    if parts[0] not in LIBRARIES or parts[-1].startswith("__"):
        return True
    ends = next((number for number, part in enumerate(parts, 1) if part[0].isupper()), len(parts))
    public = ends <= 2 and not any(part.startswith("_") for part in parts)  # the documented names are in the packages
    owners = [part.owner for part in PARTS] + [f"{part.owner}.{part.name}" for part in PARTS]
    return public or any(f"{owner}.".startswith(f"{dotted}.") for owner in owners)


def _lineage(dotted: str, classes: Mapping[str, tuple[ast.ClassDef, list[str]]]) -> tuple[list[ast.ClassDef], set[str]]:
    """A class of ours with its bases that are ours, and the names of its bases that are not. "?": one in a variable."""
    if dotted not in classes:
        return [], {dotted}
    node, bases = classes[dotted]
    found = [_lineage(base, classes) for base in bases]
    return [node, *(each for ours, _ in found for each in ours)], {each for _, theirs in found for each in theirs}


def _private_names_of_self(node: ast.ClassDef) -> set[str]:
    """What a class calls its own: methods, class attributes, and attributes of `self`, `cls` and `super()`."""
    inside = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
    names = {each.attr for each in inside if ast.unparse(each.value) in ("self", "cls", "super()")}
    names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    names |= {each.id for stated in node.body if isinstance(stated, ast.Assign | ast.AnnAssign) for each in ast.walk(stated)
              if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return {name for name in names if re.match(r"_[^_]", name)}


def _unlisted_of_classes(trees: Mapping[str, ast.AST]) -> Iterator[str]:
    """Private names in classes that derive from theirs, which theirs have too and which have no row."""
    rows: set[tuple[Any, str]] = set()
    classes: dict[str, tuple[ast.ClassDef, list[str]]] = {}
    for module, tree in trees.items():
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        known = {node.name: f"{module}.{node.name}" for node in nodes} | _imported(tree)
        variables = {target.id for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets
                     if isinstance(target, ast.Name)} - known.keys()

        def in_full(base: ast.expr, known: dict[str, str] = known, variables: set[str] = variables) -> str:
            first, dot, rest = ast.unparse(base).partition(".")
            return "?" if first in variables else f"{known.get(first, first)}{dot}{rest}"

        for node in nodes:
            mixed = MIXED_IN.get(f"{module}.{node.name}")
            classes[f"{module}.{node.name}"] = node, [*map(in_full, node.bases), *([mixed] if mixed else [])]
    for dotted in classes:
        ours, bases_of_others = _lineage(dotted, classes)
        theirs = [_resolved(base) for base in bases_of_others if base.split(".")[0] in LIBRARIES]
        if not theirs and "?" not in bases_of_others:
            continue
        for name in {name for node in ours for name in _private_names_of_self(node)}:
            rows = rows or {(_resolved(part.owner), part.name) for part in PARTS}
            unlisted = any(_has(base, name) and not any((each, name) in rows for each in _kin(base)) for base in theirs)
            if unlisted or ("?" in bases_of_others and name not in LISTED):
                yield f"{dotted}: {name}"


def _unlisted(trees: Mapping[str, ast.AST]) -> list[str]:
    """Parts of the libraries that files use, override or replace without a row."""
    found = [*_private_attributes(trees), *_unlisted_of_classes(trees)]
    for module, tree in trees.items():
        found += [f"{module}: {name}" for name in _names(tree) if not _is_listed(name)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("replaced"):
                found += [f"{module}: replaced {word.arg}" for word in node.keywords if word.arg not in LISTED]
            text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"\w+(\.\w+)+", text) and not _is_listed(text):
                found.append(f"{module}: {text}")
    return found


def test_each_part_of_hugging_face_that_is_used_has_a_row() -> None:
    assert _unlisted(OTHERS) == []


@pytest.mark.parametrize(("source", "seen"), [
    ("from transformers.trainer import _is_peft_model", True), ("from trl.trainer.utils import pad", True),
    ("import transformers as t\nt.AutoModelForCausalLM._from_config(c)", True), ("model.config._moe_implementation", True),
    ("getattr(model, '_tp_plan', None)", True), ("replaced(module, get_peft_model=f, unwrap_model=f)", True),
    ("replaced(module, **values)", True), ("kind.__module__ == 'trl.trainer.distillation_trainer'", True),
    ("from transformers import Trainer as T\nclass A(T): ...\nclass B(A):\n def _inner_training_loop(self): ...", True),
    ("import trl\nclass A(trl.GRPOTrainer):\n def f(self):\n  return self._textual_logs, self._logs", True),
    ("def f(module):\n theirs = module.VLLMGeneration\n class A(theirs):\n  def _generate_all(self): ...", True),
    ("import transformers\nclass A(transformers.Trainer):\n def _ours(self): self._save_optimizer_and_scheduler(x)", False),
    ("from transformers import Trainer\nTrainer.log, __name__ == 'peft.tuners.tuners_utils'", False),
    ("replaced(module, get_peft_model=f)", False)])
def test_a_part_without_a_row_is_seen(source: str, seen: bool) -> None:
    assert bool(_unlisted({"planted": ast.parse(source)})) is seen


def test_replaced_values_come_back() -> None:
    with replaced(textwrap, dedent=print):
        assert textwrap.dedent is print
    assert textwrap.dedent("  a") == "a"
    with pytest.raises(AttributeError), replaced(textwrap, no_such_name=print):
        pass
