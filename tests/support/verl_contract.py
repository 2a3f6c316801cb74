"""What `megacompile/trainers/verl_engine.py` relies on in verl, as JSON, recorded in `verl_contract.json`:

    VERL_PYTHON tests/support/verl_contract.py > tests/support/verl_contract.json

VERL_PYTHON: the interpreter of an environment with the release of verl that the engines were tested with."""
from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).resolve().parents[2] / "megacompile" / "trainers" / "verl_engine.py"
#: The class of each of the settings that `check_settings` gets.
SETTINGS = {"engine": "FSDPEngineConfig", "model": "HFModelConfig", "optimizer": "FSDPOptimizerConfig",
            "checkpoint": "CheckpointConfig"}


def imported() -> dict[str, str]:
    """What the engine imports from verl: the module of each name."""
    tree = ast.parse(ENGINE.read_text())
    return {alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
            and node.module.split(".")[0] == "verl" for alias in node.names}


def parameters(function: Any) -> str:
    """The names of a function's parameters, with "=" where there is a default, and stars."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return " ".join(stars.get(each.kind, "") + each.name + "=" * (each.default is not each.empty)
                    for each in inspect.signature(function).parameters.values())


def written(function: ast.FunctionDef) -> str:
    """The same of a function's source."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    usual = len(names) - len(given.defaults)
    made = [name + "=" * (index >= usual) for index, name in enumerate(names)]
    made += ["*" + given.vararg.arg] if given.vararg else []
    made += [each.arg + "=" * (default is not None) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return " ".join(made + (["**" + given.kwarg.arg] if given.kwarg else []))


def recorded() -> dict[str, Any]:
    import verl
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config
    from verl.workers.engine import BaseEngine

    methods = {name: parameters(each) for name, each in vars(BaseEngine).items() if inspect.isfunction(each)}
    found = {name: getattr(importlib.import_module(module), name) for name, module in imported().items()}
    classes = {name: CheckpointConfig if name == "CheckpointConfig" else getattr(config, name) for name in SETTINGS.values()}
    return {
        "version": verl.__version__, "methods": methods,
        "properties": [name for name, each in vars(BaseEngine).items() if isinstance(each, property)],
        "functions": {name: parameters(each) for name, each in found.items() if inspect.isfunction(each)},
        "fields": {owner: " ".join(each.name for each in dataclasses.fields(classes[name]))
                   for owner, name in SETTINGS.items()}}


if __name__ == "__main__":
    print(json.dumps(recorded(), indent=2))
