"""Start-up cost: the package and every command's help import no torch, and every public name still resolves."""
from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Process

import megacompile

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "streamed_k1_three_micro_batches.txt"
#: What the documentation has told users to import: names of modules, and what they must have.
DOCUMENTED = {
    "megacompile.corpus": "ByteTokenizer read_text",
    "megacompile.dpo": "DPOTrainer",
    "megacompile.errors": "MegacompileError",
    "megacompile.fused_head": "streamed_heads",
    "megacompile.grpo": "GRPOTrainer",
    "megacompile.inspection": "pass_log",
    "megacompile.losses": "log_probabilities log_probabilities_and_entropies next_tokens zero_where_ignored",
    "megacompile.passes": "PIPELINE TEMPLATE_PIPELINE insert_after insert_before replace_pass",
    "megacompile.passes.pipeline": "compile_program",
    "megacompile.passes.template": "Target copy_graph",
    "megacompile.picture": "save",
    "megacompile.plan": "BatchSpec Plan Shape",
    "megacompile.program": "CallSpec Program Tile copy_section find uses",
    "megacompile.rloo": "RLOOTrainer",
    "megacompile.sft": "SFTTrainer",
    "megacompile.text": "parse",
    "megacompile.timeline": "save_trace",
    "megacompile.trainer": "Trainer",
    "megacompile.training": "",
}
#: It imports verl, which has an environment of its own.
NEEDS_VERL = "megacompile.trainers.verl_engine"
#: Pages and programs that show users what to import.
SHOWN = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.py"))]
#: An import from megacompile, in one line or with its names in parentheses.
STATEMENT = re.compile(r"(?<![\w.])(?:from megacompile[\w.]* import (?:\([^)]*\)|[^\n`#;]+)|import megacompile(?:\.\w+)+)")
#: A name with its module, such as `megacompile.trainer.Trainer`. It is not part of a path or of another name.
DOTTED = re.compile(r"(?<![\w./-])megacompile(?:\.\w+)+")
#: Seconds of processor time each.
HEAVY = {"numpy", "sympy", "torch", "transformers"}


def modules_after(script: str) -> set[str]:
    """The modules that a fresh process has imported after a script."""
    code = f"import contextlib, io, json, sys\nwith contextlib.redirect_stdout(io.StringIO()):\n{script}\n" \
           "print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not HEAVY & modules_after("    import megacompile")


def test_the_help_of_every_command_imports_nothing_heavy() -> None:
    script = """
    from typer.testing import CliRunner
    from megacompile.cli import app
    for name in ("", "--version", *(command.callback.__name__ for command in app.registered_commands)):
        words = [name] if name.startswith("--") else [*filter(None, [name]), "--help"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
"""
    assert not HEAVY & modules_after(script)


def test_another_system_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """In a process that has imported PyTorch, which is made for the system that is here, but not megacompile."""
    script = """
import platform, sys
import torch, torch._dynamo, torch._inductor.compile_fx, transformers
for name in [name for name in sys.modules if name.partition(".")[0] == "megacompile"]:
    del sys.modules[name]  # the process was forked from one that has
from typer.testing import CliRunner
from megacompile.cli import app

def run(system, fcntl):
    sys.platform, sys.modules["fcntl"] = system.lower(), fcntl
    platform.system = lambda: system
    for words in (["doctor"], ["calibrate"], ["plan", "absent"], ["train", "absent", "--data", "absent"]):
        print(CliRunner().invoke(app, words).stderr, end="")

fcntl = sys.modules["fcntl"]
run("Linux", None)
run("Darwin", fcntl)
"""
    (tmp_path / "script.py").write_text(script)
    process = Process(tmp_path / "script.py", [], os.environ, tmp_path / "printed")
    code, printed = process.wait(120), (tmp_path / "printed").read_text()
    remedy = "use a Linux machine or container"
    assert code == 0 and printed.splitlines() == [
        *4 * [f"megacompile: megacompile runs on Linux, and this Linux has a Python without fcntl: {remedy}"],
        *4 * [f"megacompile: megacompile runs on Linux, and this is Darwin: {remedy}"]], printed


def test_other_systems_have_what_needs_no_linux() -> None:
    script = ("import sys\nsys.modules['fcntl'] = sys.modules['resource'] = None\nimport megacompile\n"
              "from megacompile.cli import app\n"
              f"app(['verify', {str(GOLDEN)!r}])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["megacompile", "megacompile.cli"])
def test_the_package_can_be_run_as_the_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, megacompile.__version__), done.stderr


def test_every_public_name_is_there_and_listed() -> None:
    for name in megacompile.__all__:
        assert getattr(megacompile, name).__name__ == name
    assert set(megacompile.__all__) <= set(dir(megacompile))
    star: dict[str, Any] = {}
    exec("from megacompile import *", star)
    assert set(megacompile.__all__) <= set(star)


def test_public_names_can_be_pickled() -> None:
    for name in megacompile.__all__:
        assert pickle.loads(pickle.dumps(getattr(megacompile, name))) is getattr(megacompile, name)


def test_type_checkers_see_the_names_that_are_loaded_when_asked_for() -> None:
    tree = ast.parse(Path(megacompile.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == megacompile._MODULE_OF
    assert set(megacompile.__all__) == {*seen, "MegacompileError"}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_paths_that_the_documentation_named_still_import(module: str) -> None:
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in DOCUMENTED[module].split())


def shown(pattern: re.Pattern[str]) -> set[str]:
    return {match for path in SHOWN for match in pattern.findall(path.read_text(encoding="utf-8"))}


def exists(name: str) -> bool:
    """Whether attributes and modules lead to a dotted name. Operators of PyTorch count too: `passes.md` names them so."""
    found: Any = megacompile
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return hasattr(torch.ops.megacompile, name.split(".")[1])
        found = getattr(found, part)
    return True


def test_every_import_that_the_documentation_shows_works() -> None:
    statements = shown(STATEMENT)
    for statement in sorted(statements):
        exec(statement, {})
    names = sum(len(node.names) for statement in statements for node in ast.parse(statement).body
                if isinstance(node, ast.Import | ast.ImportFrom))
    assert len(statements) >= 15 and names >= 25, "the documentation shows more: the pattern has missed imports"


def test_every_dotted_name_that_the_documentation_shows_exists() -> None:
    names = shown(DOTTED)
    assert importlib.util.find_spec(NEEDS_VERL) is not None
    assert not [name for name in sorted(names) if not exists(name) and not name.startswith(NEEDS_VERL)]
    assert len(names) >= 60, "the documentation shows more: the pattern has missed names"


def test_an_import_that_does_not_work_is_seen() -> None:
    (statement,) = STATEMENT.findall("Use `from megacompile.losses import absent` instead.")
    with pytest.raises(ImportError):
        exec(statement, {})
    assert DOTTED.findall("`megacompile.trainer.Absent` in docs/megacompile.md") == ["megacompile.trainer.Absent"]
    assert not exists("megacompile.trainer.Absent")


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the place of what the name stands for."""
    assert not {module.name for module in pkgutil.iter_modules(megacompile.__path__)} & set(megacompile.__all__)


@pytest.mark.parametrize("named", [
    ["megacompile.errors", "megacompile.plan"],
    pytest.param([module for module in DOCUMENTED if module.count(".") == 1], marks=pytest.mark.nightly)], ids=["light", "all"])
def test_modules_are_attributes_without_an_import_of_their_own(named: list[str]) -> None:
    """In a fresh process, since an import anywhere in this one makes a module an attribute."""
    script = f"    import megacompile\n    assert megacompile.sizes.parse_bytes and all([{', '.join(named)}])"
    assert {*named, "megacompile.sizes"} <= modules_after(script)


@pytest.mark.parametrize("name", ["absent", "_absent", "__absent__"])
def test_what_does_not_exist_is_missed_as_of_any_module(name: str) -> None:
    assert not hasattr(megacompile, name)
    with pytest.raises(AttributeError, match=f"module 'megacompile' has no attribute '{name}'"):
        getattr(megacompile, name)
    with pytest.raises(ImportError):
        exec(f"from megacompile import {name}")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"megacompile.{name}")
