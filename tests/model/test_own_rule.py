"""An optimizer of one's own is one class and one rule: this file has both, and nothing else knows of them."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from resumable import Streamed, steps
from tiny_models import batch, same_bits, state_of
from torch import Tensor

from megacompile import load_checkpoint, save_checkpoint
from megacompile.runtime.optimizer.rule import Moment, Rule
from megacompile.streaming.optimizer.hyper_parameters import BELOW_ONE, NON_NEGATIVE, Check
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer


@dataclass(frozen=True)
class Options:
    lr: float
    momentum: float


def _reference(master: Tensor, gradient: Tensor, moments: list[Tensor], options: Options, step: int) -> None:
    del step
    (m,) = moments
    m.mul_(options.momentum).add_(gradient)
    master.add_(m.sign(), alpha=-options.lr)


class SignSGD(StreamedOptimizer):
    """The sign of a decaying sum of gradients (Bernstein et al., "signSGD", 2018)."""

    rule: ClassVar[Rule] = Rule(
        name="sign_sgd_of_a_test", moments=(Moment("momentum_buffer", signed=True),), scalars=("lr", "momentum"),
        code="""\
  const float m = VALUE(Exact(moments[0]) * Exact(s.momentum) + Exact(gradient));
  const float step = m > 0.0f ? s.lr : m < 0.0f ? -s.lr : 0.0f;
  moments[0] = m;
  master = VALUE(Exact(master) - Exact(step));""",
        values=lambda options, step: (options.lr, options.momentum), reference=_reference)
    checks: ClassVar[Mapping[str, Check]] = {"lr": NON_NEGATIVE, "momentum": BELOW_ONE}

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9, *, state_dtype: str = "float32",
                 master: str = "float32", max_grad_norm: float | None = None, overlap: str | None = None) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum), state_dtype=state_dtype, master=master,
                         max_grad_norm=max_grad_norm, overlap=overlap, non_finite="raise", dump_folder="non-finite")

    def options_of(self, group: Mapping[str, Any]) -> Options:
        return Options(float(group["lr"]), float(group["momentum"]))


FORMATS: tuple[dict[str, Any], ...] = ({}, {"state_dtype": "8bit", "master": "bfloat16"})
formats = pytest.mark.parametrize("stored", FORMATS, ids=["float32", "8bit alone"])
#: Where tiles are updated.
PLANS: dict[str, dict[str, Any]] = {
    "on the host": dict(visiting_state=(), resident_state=()), "visiting": dict(visiting_state="all"),
    "on the device": dict(resident="all", resident_state="all"), "moments last": dict(deferred_moments=True),
    "the reference": dict(reference=True)}


@pytest.fixture(scope="module")
def streamed() -> Iterator[dict[str, Streamed]]:
    made = {name: Streamed(**options) for name, options in PLANS.items()}
    yield made
    for each in made.values():
        if each.model is not None:
            each.model.megacompile.close()


def trained(streamed: Streamed, stored: Mapping[str, Any], whole: bool = False, **more: Any) -> dict[str, Any]:
    model = streamed.fresh()
    optimizer = SignSGD(model.parameters(), **{"lr": 1e-3, "max_grad_norm": 1.0, **stored, **more})
    steps(model, optimizer, range(4), whole)
    return state_of(model, optimizer)


@pytest.mark.sample(2)
@formats
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
def test_a_rule_of_one_s_own_has_the_same_bits_under_every_plan(
        streamed: dict[str, Streamed], stored: dict[str, Any], whole: bool) -> None:
    first, *others = (trained(each, stored, whole) for each in streamed.values())
    start = streamed["on the host"].start
    assert not torch.equal(first["layers.1.1.weight"], start["layers.1.1.weight"]), "nothing was trained"
    assert all(same_bits(first, other) for other in others)


@formats
def test_it_updates_on_arrival(streamed: dict[str, Streamed], stored: dict[str, Any]) -> None:
    plain = streamed["moments last"]
    assert same_bits(trained(plain, stored, max_grad_norm=None, overlap="backward"), trained(plain, stored, max_grad_norm=None))


def test_a_step_moves_each_fp32_master_by_the_learning_rate(streamed: dict[str, Streamed]) -> None:
    model = streamed["on the host"].fresh()
    optimizer = SignSGD(model.parameters(), lr=2**-10)
    weight = model.layers[1][1].weight
    before = optimizer.master(weight)
    model(**batch(0, rows=4)).backward()
    moves = weight.grad.float().sign() * 2**-10
    optimizer.step()
    assert torch.equal(optimizer.master(weight), before - moves) and moves.any()
    assert optimizer.state[weight].keys() == {"step", "momentum_buffer"}


@formats
def test_its_runs_resume_to_the_bit(streamed: dict[str, Streamed], stored: dict[str, Any], tmp_path: Path) -> None:
    one = streamed["visiting"]
    expected, model = trained(one, stored), one.fresh()
    optimizer = SignSGD(model.parameters(), lr=1e-3, max_grad_norm=1.0, **stored)
    steps(model, optimizer, range(2))
    save_checkpoint(tmp_path, model, optimizer)
    again = SignSGD(one.fresh().parameters(), lr=1e-3, max_grad_norm=1.0, **stored)
    load_checkpoint(tmp_path, one.model, again)
    steps(one.model, again, range(2, 4))
    assert same_bits(state_of(one.model, again), expected)
