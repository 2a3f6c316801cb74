"""Node names carry no meaning. A user's pass may rename every node, and nothing else changes."""
from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import fx

import megacompile
from megacompile.ir.plan import Plan
from megacompile.ir.program import STAGES, Builder, Program, nodes, op_of, rebuild
from megacompile.ir.text import parse, print_program
from megacompile.passes import PIPELINE
from megacompile.passes.manager import Compiled, compile_program
from megacompile.predict.simulate import simulate
from megacompile.verify.verifier import judge


class Rename:
    """A pass that gives the nodes of each section other names: each other's, which mislead whoever reads them, or new ones."""

    def __init__(self, stage: str, after: str, shuffled: bool) -> None:
        self.name, self.requires, self.provides, self.shuffled = f"rename_{after}", stage, stage, shuffled

    def run(self, program: Program, plan: Plan) -> Program:
        rng = random.Random(f"{self.name} {self.shuffled}")
        return program.evolve(sections={key: self.renamed(graph, rng) for key, graph in program.sections.items()})

    def renamed(self, graph: fx.Graph, rng: random.Random) -> fx.Graph:
        names = [node.name for node in nodes(graph)]
        if self.shuffled:
            rng.shuffle(names)
        else:
            names = [f"n{number}" for number in rng.sample(range(10**6), len(names))]
        new = iter(names)
        return rebuild(graph, lambda node, arguments, build: build.add(op_of(node).name, next(new), **arguments))


def renaming(shuffled: bool) -> tuple[Any, ...]:
    """The pipeline, with all nodes renamed before each pass and at the end."""
    first = Rename(STAGES[0], "model", shuffled)
    return first, *itertools.chain.from_iterable((each, Rename(each.provides, each.name, shuffled)) for each in PIPELINE)


def without_names(program: Program) -> str:
    """The text of a program whose nodes are numbered in program order."""
    def numbered(graph: fx.Graph) -> fx.Graph:
        number = itertools.count()

        def visit(node: fx.Node, arguments: dict[str, Any], build: Builder) -> fx.Node:
            return build.add(op_of(node).name, f"n{next(number)}", **arguments)

        return rebuild(graph, visit)

    return print_program(program.evolve(sections={key: numbered(graph) for key, graph in program.sections.items()}))


SCHEDULES: dict[str, dict[str, Any]] = {
    "streamed": {"checkpoint_interval": 2, "weight_slots": 3, "micro_batches": (2, 1)},
    "slabs": {"pinned": False, "gradient_slabs": 2, "micro_batches": (1, 1)},
    "checkpoints on the host": {"host_checkpoints": 2, "micro_batches": (2, 1)},
    "residuals": {"saved_layers": 2, "micro_batches": (1, 1)},
    "outputs": {"outputs": True, "micro_batches": (1, 1)},
    "resident": {"resident": ("prologue", "layers.0"), "resident_state": ("prologue",), "visiting_state": ("layers.2",)},
    "updates on arrival": {"update": "arrival", "resident": ("layers.0", "layers.1"), "resident_state": ("layers.0",)},
    "whole step": {"whole_step": True, "micro_batches": (1, 1), "waves": 2, "host_sums": ("layers.1", "epilogue")},
    "whole step, checkpoints on the host": {"whole_step": True, "micro_batches": (1, 1, 1), "waves": 2, "host_checkpoints": 1},
    "tied": {"tied": True, "micro_batches": (1, 1)},
    "layers that run twice": {"runs": 2, "shared": True, "checkpoint_interval": 2, "weight_slots": 3, "micro_batches": (1, 1)}}


@pytest.mark.sample(5)
@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "new names"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_passes_verifier_and_simulator_read_no_names(schedule: dict[str, Any], shuffled: bool,
                                                     make_schedule: Callable[..., Compiled]) -> None:
    usual = make_schedule(**schedule)
    chosen = {"micro_batches": (1,), **{key: value for key, value in schedule.items()
                                        if key not in ("whole_step", "outputs", "tied", "runs", "shared")}}
    plan = Plan.of(sum(chosen["micro_batches"]), 8, **chosen)
    renamed = compile_program(usual.stages["model"], plan, renaming(shuffled)).program
    assert without_names(renamed) == without_names(usual.program)
    assert renamed != usual.program
    assert parse(print_program(renamed)) == renamed
    verdicts, error = judge(renamed)
    assert error is None
    assert [verdict.rule for verdict in verdicts if verdict.holds] == [v.rule for v in judge(usual.program)[0] if v.holds]

    def seconds(node: fx.Node) -> float:
        return 1.0 + len(op_of(node).name)

    times, expected = simulate(renamed, seconds), simulate(usual.program, seconds)
    assert (times.steps_s, times.busy_s, times.critical_s) == (expected.steps_s, expected.busy_s, expected.critical_s)


def trained(whole: bool, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after three steps."""
    model = megacompile.stream(tiny_models.build(), device="cpu", micro_batch_size=2, host_checkpoints=1, **options)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses = []
    for seed in range(3):
        if whole:
            losses.append(float(model.megacompile.train_step(tiny_models.batch(seed), optimizer)))
        else:
            losses.append(tiny_models.train_step(model, optimizer, seed))
    kept = tiny_models.weights(model)
    predicted = model.megacompile.program()
    model.megacompile.close()
    assert len(predicted.sections) > 1
    return losses, kept


@pytest.mark.sample(1)
@pytest.mark.parametrize("whole", [False, True], ids=["loop", "whole step"])
def test_a_model_trains_to_the_same_bits_under_other_names(whole: bool) -> None:
    losses, weights = trained(whole)
    for shuffled in (True, False):
        same, found = trained(whole, passes=renaming(shuffled))
        assert same == losses
        assert tiny_models.same_bits(found, weights)
