"""Sequences divided among ranks: losses, gradients and weights are those of native PyTorch with whole sequences."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import start
from sequence_jobs import JOBS, train_native
from torch import Tensor

SCRIPT = Path(__file__).parents[1] / "support" / "sequence_jobs.py"
#: (ranks, copies, jobs). With two copies, each trains other rows. All but the first two run on demand.
RUNS = [(2, 1, ("qwen2", "documents", "uneven groups", "attention kept", "adapters")),
        (4, 1, ("windows and documents", "sinks")),
        (2, 1, tuple(JOBS)),
        (4, 1, ("llama", "documents", "uneven groups", "one group", "experts")),
        (4, 2, ("qwen2", "padding", "documents", "chunks", "arrival"))]


@pytest.fixture(scope="module", ids=str, params=[
    pytest.param(run, marks=[pytest.mark.nightly] * (number > 1)) for number, run in enumerate(RUNS)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(copies, results of each job on each rank)."""
    ranks, copies, jobs = request.param
    folder = tmp_path_factory.mktemp("sequences")
    start(SCRIPT, ranks, folder, [str(copies), *jobs]).results(600)
    return copies, {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks)] for name in jobs}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference over that of what is expected."""
    def norm(tensors: list[Tensor]) -> float:
        return float(torch.cat([each.detach().double().flatten() for each in tensors]).norm())
    assert found.keys() == expected.keys()
    return norm([found[name] - expected[name] for name in found]) / norm([*expected.values()])


def assert_trained(name: str, found: dict[str, Any], expected: dict[str, Any], drift: float = 2e-5) -> None:
    """That a rank has the results of native PyTorch. `drift`: of weights, relative."""
    assert "error" not in found, f"{name}: {found['error']}"
    assert found["losses"] == pytest.approx(expected["losses"], abs=max(1e-5, drift)), name
    assert found["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-4 + drift), name
    assert difference(found["weights"], expected["weights"]) < drift, name
    if name != "arrival":
        assert difference(found["gradients"], expected["gradients"]) < 1e-5, name
        assert found["norm"] == pytest.approx(expected["norm"], rel=max(1e-4, drift)), name


def test_divided_sequences_have_the_losses_gradients_and_weights_of_whole_ones(trained: Any) -> None:
    copies, results = trained
    for name, of_ranks in results.items():
        native = train_native(name, copies)
        for found in of_ranks:
            assert_trained(name, found, native)


def test_all_ranks_have_the_same_bits(trained: Any) -> None:
    for name, (first, *others) in trained[1].items():
        for other in others:
            assert all(torch.equal(first["weights"][each], other["weights"][each]) for each in first["weights"]), name
            assert first["losses"] == other["losses"], name
