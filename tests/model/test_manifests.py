"""Manifests with a correct checksum and wrong contents: refused before anything has changed."""
from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resumable import Run, load
from tiny_models import same_bits

from megacompile import save_checkpoint
from megacompile.checkpoint import manifest, schedulers
from megacompile.checkpoint.manifest import decode, encode
from megacompile.errors import CheckpointError

Place = tuple[Any, ...]
ABSENT = object()
#: What takes the place of a field, or removes it.
WRONG = (ABSENT, None, True, -5, 2.5, math.nan, 2**70, "x", [], {})


def rewrite(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps({"crc32": manifest._checksum(body), **body}))


def fields(value: Any, path: Place = ()) -> Iterator[Place]:
    """Where each value of a tree lies; of long lists the ends alone."""
    yield path
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    for key, item in items if len(items) < 20 else [items[0], items[-1]]:
        yield from fields(item, (*path, key))


def changed(body: dict[str, Any], path: Place, value: Any) -> dict[str, Any]:
    body = copy.copy(body)
    place: Any = body
    for key in path[:-1]:
        place[key] = copy.copy(place[key])
        place = place[key]
    if value is ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body


#: Where another value is as good as the one that is there, and which.
GOOD = [
    (r"extra", lambda value: value is not ABSENT),
    (r"extra .*", lambda value: True),
    (r"model", lambda value: value == "x"),
    (r"made_with", lambda value: value == {}),
    (r"made_with \w+", lambda value: value in ("x", ABSENT)),
    (r"options \d (state_dtype|master)", lambda value: value is ABSENT),  # an older version wrote it
    (r"options \d (lr|eps|weight_decay)", lambda value: type(value) in (int, float) and value >= 0),
    (r"options \d initial_lr|scheduler state (gamma|(base_lrs|_last_lr) \d)",
     lambda value: type(value) in (int, float) and abs(value) < 2**63),
    (r"scheduler state milestones .counter( \d)?( 0)?", lambda value: value is ABSENT or value == [] or type(value) is int),
    (r"scheduler state \w+", lambda value: type(value) is bool),
    (r"random python .tuple 2|random numpy .tuple 4", lambda value: value is None or type(value) in (int, float)
     and math.isfinite(value)),
]


def is_good(body: dict[str, Any], path: Place, value: Any) -> bool:
    place: Any = body
    for key in path:
        place = place[key]
    if value is not ABSENT and type(value) is type(place) and value == place:
        return True
    words = " ".join(map(str, path))
    return any(re.fullmatch(pattern, words) and good(value) for pattern, good in GOOD)


def state_of(run: Run) -> Any:
    """All that a load may change, by value."""
    words = torch.tensor(np.random.get_state()[1])
    tensors = {**run.masters(), **run.moments(), "torch": torch.get_rng_state(), "numpy": words}
    steps = [run.optimizer.state[p].get("step") for p in run.model.parameters()]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    return tensors, copy.deepcopy((steps, groups, run.scheduler.state_dict(), random.getstate(), np.random.get_state()[2:]))


def test_every_field_of_a_manifest_is_checked_before_anything_changes(run: Run, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "runs", run.model, run.optimizer, scheduler=run.scheduler, extra={"done": 2})
    path = saved / manifest.NAME
    body = json.loads(path.read_text())
    del body["crc32"]
    few = ("layers.0.0.weight", "layers.1.1.weight", "scale")  # frozen, trained, a buffer
    assert body["tensors"].keys() >= {*few}
    places = [place for place in fields({**body, "tensors": {name: body["tensors"][name] for name in few}}) if place]
    run.steps(1)
    before = state_of(run)
    files = {each: each.read_bytes() for each in saved.iterdir()}
    tried, loaded, said = 0, [], []
    for place in places:
        for value in WRONG:
            if is_good(body, place, value):
                continue
            tried += 1
            rewrite(path, changed(body, place, value))
            try:
                load(saved, run)
            except CheckpointError as error:
                said.append(str(error))
            else:
                loaded.append((place, value))
    after = state_of(run)
    assert not loaded and tried > 700
    assert not [each for each in said if str(saved) not in each or "\n" in each or len(each) >= 1000]
    assert same_bits(after[0], before[0]) and repr(after[1]) == repr(before[1])
    path.write_bytes(files[path])
    assert {each: each.read_bytes() for each in saved.iterdir()} == files
    assert load(saved, run) == {"done": 2}


# ---------------------------------------------------------------- schedulers
def made(kind: str) -> tuple[torch.optim.Optimizer, Any]:
    """A scheduler of torch, over an optimizer of its own."""
    module = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    given: dict[str, tuple[Any, ...]] = {
        "LambdaLR": (lambda step: 0.5,), "MultiplicativeLR": (lambda step: 0.5,), "StepLR": (2,), "MultiStepLR": ([2, 4],),
        "ExponentialLR": (0.9,), "CosineAnnealingLR": (5,), "CosineAnnealingWarmRestarts": (2,), "CyclicLR": (0.01, 0.1),
        "OneCycleLR": (0.1, 20)}
    if kind in ("SequentialLR", "ChainedScheduler"):
        parts = [module.ConstantLR(optimizer, total_iters=2), module.ExponentialLR(optimizer, 0.9)]
        joined = module.ChainedScheduler(parts) if kind == "ChainedScheduler" else module.SequentialLR(optimizer, parts, [2])
        return optimizer, joined
    return optimizer, getattr(module, kind)(optimizer, *given.get(kind, ()))


KINDS = sorted(kind.__name__ for kind in vars(torch.optim.lr_scheduler).values() if isinstance(kind, type)
               and issubclass(kind, torch.optim.lr_scheduler.LRScheduler) and not kind.__name__.endswith("LRScheduler"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_scheduler_of_torch_takes_back_what_it_had(kind: str) -> None:
    optimizer, scheduler = made(kind)
    early = encode(scheduler.state_dict(), "it")
    for _ in range(5):
        optimizer.step()
        scheduler.step(*([0.3] if kind == "ReduceLROnPlateau" else []))
    late = encode(scheduler.state_dict(), "it")
    for state, there in ((late, made(kind)[1]), (early, scheduler)):
        found = decode(json.loads(json.dumps(state)))
        schedulers.check(found, there, same_torch=True)
        schedulers.load(found, there)
        assert encode(there.state_dict(), "it") == state


def test_a_scheduler_that_refuses_its_state_leaves_everything_as_it_was(run: Run, tmp_path: Path) -> None:
    class Own:
        def __init__(self) -> None:
            self.count = 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]
            if self.count == 7:
                raise RuntimeError("not seven")

    run.scheduler = Own()  # type: ignore[assignment]
    run.scheduler.count = 7
    saved = save_checkpoint(tmp_path, run.model, run.optimizer, scheduler=run.scheduler)
    run.scheduler.count = 3
    with torch.no_grad():
        run.model.head.weight.add_(1)
    before = state_of(run)
    with pytest.raises(CheckpointError, match=r"Own cannot load the state that was saved \(RuntimeError: not seven\): create"):
        load(saved, run)
    after = state_of(run)
    assert same_bits(after[0], before[0]) and repr(after[1]) == repr(before[1]) and run.scheduler.count == 3
