"""Several ranks compute what one process does that has the rows of all of them: native PyTorch in fp32."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chunked_job import STEPS
from chunked_models import Layer, model_of, tokens
from jobs import EXACT, JOBS, USUAL, train, train_native
from processes import start
from torch import Tensor

#: Run by two ranks in one job, which takes seconds to start; four ranks, and on demand eight, run those that shards of another
#: size may break.
OF_FOUR = ("expert pieces", "uneven rows", "matrices of experts")
AGAIN = ("qwen2|again", "sums on the host|reference")
#: (ranks, job)
ALL = [*((2, name) for name in JOBS if name not in EXACT),
       *((ranks, name) for ranks in (4, 8) for name in OF_FOUR if name not in EXACT)]


def chosen(jobs: Sequence[Any], usual: Callable[[Any], bool]) -> list[Any]:
    """Test parameters: those that are not usual run on demand."""
    return [job if usual(job) else pytest.param(*(job if isinstance(job, tuple) else (job,)), marks=pytest.mark.nightly)
            for job in jobs]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[int], Callable[..., Any]]:
    """By number of ranks: what each rank had at the end of a job."""
    folders: dict[int, Path] = {}
    jobs = JOBS if request.config.getoption("--nightly") else USUAL

    def run(ranks: int) -> Callable[..., Any]:
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
            names = [f"{name}|" for name in (jobs if ranks == 2 else OF_FOUR)] + (list(AGAIN) if ranks == 2 else [])
            start(Path(__file__).parents[1] / "support" / "jobs.py", ranks, folders[ranks], names).results(420)
        return functools.partial(found_by, folders[ranks])

    return run


def found_by(folder: Path, name: str, rank: int, kind: str = "") -> dict[str, Any]:
    """What a rank had at the end of a job."""
    found: dict[str, Any] = torch.load(folder / f"{name}|{kind}.{rank}.pt")
    assert "error" not in found, found["error"]
    return found


@pytest.mark.parametrize(("ranks", "name"), chosen(ALL, lambda job: job[0] == 4 or (job[0] == 2 and job[1] in USUAL)))
def test_ranks_train_as_one_process_with_all_rows(trained: Callable[[int], Callable[..., Any]], ranks: int, name: str) -> None:
    expected = train_native(name, ranks)
    for rank in range(ranks):
        # Muon's products of matrices are in bfloat16.
        assert_trained(trained(ranks)(name, rank), expected, rank, drift=5e-4 if name == "matrices" else 2e-4)


def assert_trained(found: Mapping[str, Any], expected: Mapping[str, Any], rank: int, drift: float = 2e-4) -> None:
    """What a rank had at the end is what native PyTorch had that has the rows of all ranks."""
    assert_alike(found, expected, rank, first=1e-6, drift=drift, zero=1e-8)
    if expected["norm"] is not None:
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-3)


def assert_alike(found: Mapping[str, Any], expected: Mapping[str, Any], rank: int, *, first: float, drift: float,
                 zero: float) -> None:
    """Losses, gradients and weights are alike within these tolerances: `first`, of the first loss; `drift`, of later losses and
    of weights; `zero`, of the norm of a gradient that should be zero."""
    wanted = [loss[rank] if isinstance(loss, list) else loss for loss in expected["losses"]]
    assert found["losses"][0] == pytest.approx(wanted[0], rel=first, abs=first)
    assert found["losses"] == pytest.approx(wanted, rel=drift)
    for key, gradient in found["gradients"].items():
        assert torch.linalg.vector_norm(gradient - expected["gradients"][key]) <= 1e-5 * torch.linalg.vector_norm(
            expected["gradients"][key]) + zero, key
    # The weights count together: the gradient of a key's bias is only rounding, which Adam turns into steps of full size.
    assert distance(found["weights"], expected["weights"]) <= drift * distance(expected["weights"])


def distance(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> float:
    """The Euclidean norm of all tensors, less the others."""
    return sum(float((tensor if others is None else tensor - others[key]).detach().double().square().sum())
               for key, tensor in tensors.items()) ** 0.5


@pytest.mark.parametrize("again", AGAIN)
def test_repeated_runs_and_the_reference_interpreter_have_the_same_bits(trained: Callable[[int], Callable[..., Any]],
                                                                        again: str) -> None:
    name, _, kind = again.partition("|")
    for rank in range(2):
        one, other = trained(2)(name, rank), trained(2)(name, rank, kind)
        assert one["losses"] == other["losses"] and one["norm"] == other["norm"]
        for part in ("weights", "moments", "gradients"):
            assert all(torch.equal(one[part][key], other[part][key]) for key in one[part] | other[part])


@pytest.mark.parametrize("name", chosen(list(JOBS), lambda name: name in USUAL))
def test_every_rank_reads_the_same_weights_and_state(trained: Callable[[int], Callable[..., Any]], name: str) -> None:
    one, other = (trained(2)(name, rank) for rank in range(2))
    for part in ("weights", "moments", "gradients"):
        assert all(torch.equal(one[part][key], other[part][key]) for key in one[part] | other[part])


@pytest.mark.parametrize(("ranks", "name"), chosen([(2, name) for name in EXACT] + [(4, "matrices of experts")],
                                                   lambda job: job[0] == 4 or job[1] in USUAL))
def test_ranks_that_share_matrices_have_the_bits_of_one(trained: Callable[[int], Callable[..., Any]], ranks: int,
                                                        name: str) -> None:
    """Each orthogonalizes whole matrices, of which it updates a part."""
    alone = train(name, 0)
    for part in ("weights", "moments"):
        assert all(torch.equal(alone[part][key], trained(ranks)(name, 1)[part][key]) for key in alone[part])


def test_rows_of_all_ranks_are_packed_together(trained: Callable[[int], Callable[..., Any]]) -> None:
    """Each computes half of four rows of 16. Packed apart, rank 0 would have three rows, and so would rank 1."""
    for rank in range(2):
        stats = trained(2)("unbalanced rows", rank)["stats"]
        assert stats["step_computed_tokens"] == 64 and stats["step_useful_tokens"] == 50


def test_rank_0_searches_for_the_plans_of_all_ranks(trained: Callable[[int], Callable[..., Any]]) -> None:
    assert [trained(2)("qwen2", rank)["stats"]["plan_searches"] for rank in range(2)] == [1, 0]


def test_ranks_that_have_evaluated_other_lengths_take_one_capture_for_a_branch_on_the_length(tmp_path: Path) -> None:
    (losses, traced), other = start(Path(__file__).parents[1] / "support" / "chunked_job.py", 2, tmp_path, []).results(240)
    native = model_of(Layer)
    optimizer = torch.optim.AdamW(native.parameters(), lr=1e-2)
    for length, loss in zip(STEPS, losses, strict=True):
        ids = tokens(length, rows=4)
        expected = native(input_ids=ids, labels=ids)["loss"]
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert abs(expected.item() - loss) <= 1e-5 * expected.item(), length
    assert other == [losses, traced] and traced == [0, 8, 3, 8]
