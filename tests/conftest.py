"""What tests of all folders share: a factory of small schedules, made by the real pipeline, and captures."""
from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

# Inductor tries out six instruction sets in each fresh cache, for longer than a small test takes: scalar code serves here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
import alike_models
import torch
from fixtures import *  # noqa: F403  (fixtures of several tiers)
from hypothesis import HealthCheck, settings
from torch import fx

from megacompile import api
from megacompile.frontend.templates.joint import JointGraph
from megacompile.ir.plan import Plan
from megacompile.ir.program import CallSpec, Program, Tile, model_program
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import Compiled, compile_program
from megacompile.planning import planner
from megacompile.streaming.programs import executables

# Limits of time would make tests depend on what else the machine does.
settings.register_profile("megacompile", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("megacompile")

LAYER_BYTES, BOUNDARY_BYTES, OUTPUT_BYTES = 2048, 8192, 512


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt; read the diff")
    parser.addoption("--nightly", action="store_true", help="run all tests: every causal language model of transformers, the "
                     "tests that are marked nightly, and all cases of those that are marked sample")
    parser.addoption("--curve-steps", type=int, default=0, help="how many steps tests/nightly/test_curves.py "
                     "trains each family")
    parser.addoption("--sabotage-programs", type=int, default=8, help="how many random programs "
                     "tests/ir/test_sabotage.py breaks; from 500 on it also breaks goldens in many more ways")
    parser.addoption("--kill-moments", type=int, default=5, help="at how many random moments a training process is killed")
    parser.addoption("--interrupts", type=int, default=5, help="at how many lines Ctrl-C comes, in each kind of step")


_frozen = [0, 0]  # how many modules and captures there were when the heap was frozen


def pytest_sessionstart() -> None:
    gc.set_threshold(100_000, 20, 50)


def pytest_runtest_setup() -> None:
    """Modules and captures stay to the end, half a million objects and more: the collector, which would read them all each time
    (a tenth of the tests' time), need not look at them. Done between tests, so that no test's own objects are among them, and
    only when there are many new ones, since looking for them takes a tenth of a second."""
    now = [len(sys.modules), len(alike_models.captured)]
    if now[0] >= _frozen[0] + 50 or now[1] >= _frozen[1] + 4:
        gc.collect()
        gc.freeze()
        _frozen[:] = now


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of this run: without `--nightly`, none of `tests/nightly` and none that is marked nightly; of the cases
    of a test that is marked `sample(count)`, so many, spread evenly over those that are not nightly."""
    if not (torch.cuda.is_available() and importlib.util.find_spec("cupy")):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device and CuPy"))
    if config.getoption("--nightly"):
        return
    kept = [item for item in items if not item.get_closest_marker("nightly") and item.path.parent.name != "nightly"]
    cases: dict[str, list[pytest.Item]] = {}
    for item in kept:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set(items) - set(kept)
    for alike in cases.values():
        sample = alike[0].get_closest_marker("sample")
        if sample:
            count = min(sample.args[0], len(alike))
            left_out |= set(alike) - {alike[index * len(alike) // count] for index in range(count)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def no_kept_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test searches its plans under what it has changed, and leaves none to others. Tests of kept plans undo this."""
    monkeypatch.setattr(planner, "question", lambda *asked: None)


@functools.cache
def compiled_schedule(layers: int = 4, micro_batches: tuple[int, ...] = (1,), frozen: tuple[str, ...] = (),
                      tied: bool = False, whole_step: bool = False, outputs: bool = False, runs: int = 1,
                      shared: bool = False, matrices: tuple[str, ...] = (), **plan: Any) -> Compiled:
    """All stages of a model of one prologue, `layers` equal layers and one epilogue; `tied`: the epilogue reads the
    prologue's tile too; `outputs`: training gives outputs, no loss; `runs`: how often the layers run, all after all; `shared`:
    every second one of them reads a small tile more, the same; `matrices`: tiles that are updated by whole matrices.
    Cached: programs are immutable."""
    stack = [f"layers.{i}" for i in range(layers)]
    tiles, calls = {}, []
    for name in ("prologue", *stack, *(["shared"] if shared else []), "epilogue"):
        size = {"prologue": BOUNDARY_BYTES, "epilogue": BOUNDARY_BYTES, "shared": LAYER_BYTES // 4}.get(name, LAYER_BYTES)
        tiles[name] = Tile(name, size // 2, size, size, name not in frozen, 5 * size, size if name in matrices else 0,
                           disk_bytes=4 * size if name in plan.get("disk_state", ()) else 0)
    for name in ("prologue", *(layer + f"@{run + 1}" * (run > 0) for run in range(runs) for layer in stack), "epilogue"):
        role, own = "layer" if "." in name else name, name.partition("@")[0]
        read = ("prologue", "epilogue") if tied and name == "epilogue" else (own,)
        if shared and own in stack[::2]:
            read = (own, "shared")
        calls.append(CallSpec(name, role, "decoder" if role == "layer" else name, read,
                              ("recompute_backward",) if name == "prologue" else (),
                              OUTPUT_BYTES if role == "layer" and "host_checkpoints" in plan else 0))
    batch = sum(micro_batches)
    model = model_program(calls, tiles, batch, labels=not outputs, whole_step=whole_step, differentiable=outputs)
    return compile_program(model, Plan.of(batch, 8, micro_batches, **plan), PIPELINE)


@pytest.fixture(scope="session")
def make_schedule() -> Callable[..., Compiled]:
    return compiled_schedule


@pytest.fixture(scope="session", autouse=True)
def shared_captures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "capture", alike_models.capture_once)
        alike_models.keep_graphs_of_all_tests(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_joint_graphs() -> Iterator[None]:
    """More than half of the time of a capture goes into the backward graphs of its layers. They depend on the forward graph and
    its inputs alone, are never changed, and many captures have some in common: those for other kinds of batches, other numbers
    of layers or other passes, and models that differ in their loss."""
    build = importlib.import_module("megacompile.frontend.templates.build")
    known: OrderedDict[Hashable, JointGraph] = OrderedDict()

    def shared(make: Callable[..., JointGraph]) -> Callable[..., JointGraph]:
        def found(graph: fx.GraphModule, fakes: Any, *rest: Any, decompositions: Any = None, **options: Any) -> JointGraph:
            key = (make, *_described(graph), repr((rest, options)), decompositions is None, torch.is_grad_enabled())
            if key not in known:
                known[key] = make(graph, fakes, *rest, decompositions=decompositions, **options)
                if len(known) > 128:
                    known.popitem(last=False)
            known.move_to_end(key)
            return known[key]

        return found

    with pytest.MonkeyPatch.context() as patch:
        for name in ("joint_graph", "forward_graph"):
            patch.setattr(build, name, shared(getattr(build, name)))
        yield


def _described(graph: fx.GraphModule) -> Iterator[Hashable]:
    """What decides the graphs that are made of this one: its code, nested code, functions, and its inputs."""
    yield graph.code
    for node in graph.graph.nodes:
        if node.op == "call_function":
            yield node.target
        elif node.op == "get_attr":
            nested = getattr(graph, node.target)
            yield nested.code if isinstance(nested, fx.GraphModule) else id(nested)
        elif node.op == "placeholder":
            value = node.meta["example_value"]
            sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
            yield tuple((str(size), size.node.hint if isinstance(size, torch.SymInt) else size) for size in sizes)
            if isinstance(value, torch.Tensor):
                yield value.dtype, value.device, value.requires_grad, type(value)


@pytest.fixture(scope="session", autouse=True)
def shared_schedules() -> Iterator[None]:
    """A streamed model's program is a pure function of its calls, its plan and the passes, and programs are immutable: models
    that are built and planned alike share it. (Stages may be exchanged by hand: each model has its own table of them.)"""
    @functools.lru_cache(maxsize=256)
    def compiled(model: Program, plan: Plan, passes: tuple[Any, ...], runs: tuple[Any, ...], verify_stages: bool) -> Compiled:
        return compile_program(model, plan, passes, verify_stages=verify_stages)

    def shared(model: Program, plan: Plan, passes: tuple[Any, ...], verify_stages: bool) -> Compiled:
        found = compiled(model, plan, passes, tuple(each.run for each in passes), verify_stages)
        return Compiled(dict(found.stages), list(found.log))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executables, "compile_program", shared)
        yield
