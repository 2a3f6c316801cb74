"""The engines for verl against verl's interface as it was recorded, without verl (`tests/support/verl_contract.py`)."""
from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import verl_contract

CONTRACT: dict[str, Any] = json.loads((Path(verl_contract.__file__).parent / "verl_contract.json").read_text())
TREE = ast.parse(verl_contract.ENGINE.read_text())
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}
METHODS = {node.name: node for node in CLASSES["MegacompileEngine"].body if isinstance(node, ast.FunctionDef)}
#: Methods of verl's base class that call the others.
INHERITED = {"train_batch", "infer_batch", "prime_delta_snapshots"}


def constant(name: str) -> Any:
    """The value of one of the engine's constants."""
    (value,) = (node.value for node in TREE.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(target, ast.Name) and target.id == name)
    return ast.literal_eval(value)


def test_the_engine_has_verls_methods_with_its_parameters() -> None:
    assert CONTRACT["methods"].keys() - METHODS.keys() == INHERITED
    for name in CONTRACT["methods"].keys() - INHERITED:
        theirs, ours = CONTRACT["methods"][name].split(), verl_contract.written(METHODS[name]).split()
        named = [each for each in theirs if "*" not in each]
        assert ours[:len(named)] == named, name
        assert all("=" in each or "**" in each for each in ours[len(named):]), f"{name} demands more than verl gives"
        assert set(theirs) - set(named) <= set(ours), f"{name} takes no further keywords"


def test_the_engine_has_verls_properties() -> None:
    assigned = {target.id for node in CLASSES["MegacompileEngine"].body if isinstance(node, ast.Assign)
                for target in node.targets if isinstance(target, ast.Name)}
    assert set(CONTRACT["properties"]) <= assigned


def test_calls_of_verls_functions_name_their_parameters() -> None:
    calls = [node for node in ast.walk(TREE) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
             and node.func.id in CONTRACT["functions"]]
    assert {node.func.id for node in calls if isinstance(node.func, ast.Name)} >= {
        "prepare_micro_batches", "postprocess_batch_func", "hf_delta_export", "get_cosine_schedule_with_warmup"}
    for node in calls:
        assert isinstance(node.func, ast.Name)
        known = [each.strip("=*") for each in CONTRACT["functions"][node.func.id].split()]
        assert len(node.args) <= len(known) and {each.arg for each in node.keywords} <= set(known), node.func.id


def test_everything_that_is_imported_from_verl_is_recorded() -> None:
    recorded = CONTRACT["functions"].keys() | {
        "BaseEngine", "BaseEngineCtx", "EngineRegistry", "FSDPEngineConfig", "PrecisionType", "ShardSpec", "tensordict_utils"}
    assert verl_contract.imported().keys() <= recorded


def test_settings_that_are_refused_are_verls() -> None:
    for owner, name, *_ in constant("_REFUSED"):
        assert name.split(".")[0] in CONTRACT["fields"][owner].split(), name
    read = {owner: {node.attr for node in ast.walk(TREE) if isinstance(node, ast.Attribute)
                    and ast.unparse(node.value) == f"self.{owner}_config"} for owner in CONTRACT["fields"]}
    for owner, names in read.items():
        assert names <= {*CONTRACT["fields"][owner].split(), "get_processor"}, owner


def test_the_recorded_release_is_one_that_the_engine_takes() -> None:
    assert CONTRACT["version"].startswith(tuple(f"{each}." for each in constant("VERSIONS")))


@pytest.mark.parametrize("function", ["forward_backward_batch", "get_per_tensor_param"])
def test_a_missing_parameter_is_noticed(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTRACT["methods"], function, CONTRACT["methods"][function] + " further")
    with pytest.raises(AssertionError):
        test_the_engine_has_verls_methods_with_its_parameters()
