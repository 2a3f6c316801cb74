"""Plans kept on disk: found only for the same question, and only if the file is unchanged."""
from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from test_inductor import fresh_process

from megacompile import api, scheduling
from megacompile.codegen import cache as sealed_cache
from megacompile.errors import NoFittingPlanError
from megacompile.ir.options import Scope, named
from megacompile.ir.placement import Placements
from megacompile.ir.plan import Plan
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE, insert_after
from megacompile.passes.schedule import place
from megacompile.planning import plan_cache, planner, step_time
from megacompile.planning.config import StreamConfig
from megacompile.planning.planner import Planner
from megacompile.planning.step_time import simulator_of
from megacompile.predict.hardware import Hardware

FREE = {"device": 100 * 2**30, "host": 2**40}
QUESTION = {"batch": 8, "tiles": ["a", "b"]}
PLAN = Plan(8, 16, (4, 4), saved_layers=3, waves=2, pinned=False, residuals="attention",
            placements=Placements.named(("a", "b"), resident_state=("b",), host_sums=("c", "a")))


def use(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("MEGACOMPILE_CACHE", str(folder / "cache"))
    patch.setenv("XDG_CONFIG_HOME", str(folder / "configuration"))
    patch.setattr(sealed_cache, "_key", lambda: bytes(range(32)))
    patch.setattr(planner, "question", plan_cache.question)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; that of plans below it is not made yet."""
    use(tmp_path, monkeypatch)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """A test that expects no warning gets none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def only_file(cache: Path) -> Path:
    (path,) = (cache / "plans").iterdir()
    return path


# ---------------------------------------------------------------- files

def test_a_kept_plan_is_found_as_it_was() -> None:
    assert plan_cache.find(QUESTION, FREE) is None
    plan_cache.keep(QUESTION, FREE, PLAN)
    assert plan_cache.find(QUESTION, FREE) == PLAN
    plan_cache.keep(QUESTION, FREE, replace(PLAN, saved_layers=0))
    assert plan_cache.find(QUESTION, FREE) == replace(PLAN, saved_layers=0)


def test_every_field_of_a_plan_has_a_rule() -> None:
    assert plan_cache.FIELDS.keys() == PLAN.values().keys()


@pytest.mark.parametrize(("free", "serves"), [
    ({"device": 100.9}, True), ({"device": 99.1}, True), ({"device": 101.1}, False), ({"device": 98.9}, False),
    ({"host": 1.1 * 2**10}, True), ({"host": 0.9 * 2**10}, True), ({"host": 1.2 * 2**10}, False), ({"host": 0}, False),
    ({"device": None}, False), ({"host": None}, False),
], ids=str)
def test_a_plan_serves_where_about_as_much_memory_is_free(free: dict[str, Any], serves: bool) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)
    now = FREE | {name: gib if gib is None else int(gib * 2**30) for name, gib in free.items()}
    assert (plan_cache.find(QUESTION, {name: count for name, count in now.items() if count is not None}) == PLAN) is serves


@pytest.mark.parametrize("other", [{"batch": 9}, {"batch": "8"}, {"tiles": ["b", "a"]}, {"more": None}], ids=str)
def test_another_question_has_another_plan(other: dict[str, Any]) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)
    assert plan_cache.find(QUESTION | other, FREE) is None


def test_other_source_code_searches_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)
    monkeypatch.setattr(plan_cache, "source_digest", lambda: "of another version")
    assert plan_cache.find(QUESTION, FREE) is None


def test_the_source_digest_covers_every_part_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    read = Path.read_bytes

    def reading(path: Path) -> bytes:
        return read(path) + b"#" * any(path.as_posix().endswith(name) for name in changed)

    monkeypatch.setattr(Path, "read_bytes", reading)
    digests = [plan_cache.source_digest.__wrapped__()]
    for name in ("megacompile/planning/planner.py", "passes/schedule/place.py", "memory/store.py", "templates/joint.py"):
        changed[:] = [name]
        digests.append(plan_cache.source_digest.__wrapped__())
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("damage", [
    lambda p: p.write_bytes(b"evil"), lambda p: p.write_bytes(b""), lambda p: os.truncate(p, 40),
    lambda p: p.write_bytes(p.read_bytes() + b" "), lambda p: p.write_bytes(p.read_bytes().replace(b"true", b"false")),
    lambda p: p.write_bytes(p.read_bytes().replace(b'"batch": 8', b'"batch": 9')), lambda p: os.truncate(p, 1 << 24),
    lambda p: (p.rename(p.with_name("elsewhere")), p.symlink_to("elsewhere")), lambda p: (p.unlink(), os.mkfifo(p)),
    lambda p: (p.unlink(), p.mkdir()), lambda p: p.write_bytes(sealed_cache.with_seal("another.json", p.read_bytes()[:-32])),
], ids=["replaced", "empty", "truncated", "lengthened", "a flag", "a number", "huge", "a link", "a FIFO", "a folder",
        "another name's"])
def test_a_damaged_or_foreign_file_is_passed_over_with_a_warning(damage: Callable[[Path], Any], cache: Path) -> None:
    plan_cache.keep(QUESTION, FREE, replace(PLAN, deferred_moments=True))
    damage(only_file(cache))
    with pytest.warns(RuntimeWarning, match="a plan in the cache is not used and is searched for again"):
        assert plan_cache.find(QUESTION, FREE) is None


def test_a_file_with_another_users_seal_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)
    monkeypatch.setattr(sealed_cache, "_key", lambda: bytes(32))
    with pytest.warns(RuntimeWarning, match="was changed since megacompile wrote it"):
        assert plan_cache.find(QUESTION, FREE) is None


def test_a_damaged_file_is_replaced(cache: Path) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)
    only_file(cache).write_bytes(b"evil")
    plan_cache.keep(QUESTION, FREE, PLAN)
    assert plan_cache.find(QUESTION, FREE) == PLAN


@pytest.mark.parametrize(("field", "value"), [
    ("batch", 9), ("batch", True), ("batch", 8.0), ("batch", None), ("micro_batches", [8, 0]), ("micro_batches", [[8]]),
    ("micro_batches", 8), ("waves", 3), ("resident", ["a", "a"]), ("resident", "ab"), ("resident", [1]),
    ("visiting_state", ["a"]), ("host_sums", ["b"]), ("output", "x" * 2000),
    ("residuals", "some"), ("update", None), ("pinned", 1), ("weight_slots", 2**40), ("more", 1), ("length", ...),
], ids=str)
def test_an_invalid_plan_is_skipped_even_if_it_is_sealed(field: str, value: Any, cache: Path) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)
    path = only_file(cache)
    found = json.loads(path.read_bytes()[:-32])
    found["plan"][field] = value
    if value is ...:
        del found["plan"][field]
    path.write_bytes(sealed_cache.with_seal(path.name, json.dumps(found).encode()))
    with pytest.warns(RuntimeWarning, match="searched for again"):
        assert plan_cache.find(QUESTION, FREE) is None


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[]", '{"plan": {}, "free": {}}', '{"plan": null, "more": 1}', "",
                                  "\ud800"], ids=range(7))
def test_other_json_is_passed_over(text: str, cache: Path) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)
    path = only_file(cache)
    path.write_bytes(sealed_cache.with_seal(path.name, text.encode("utf-8", "surrogatepass")))
    with pytest.warns(RuntimeWarning, match="searched for again"):
        assert plan_cache.find(QUESTION, FREE) is None


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=["read-only", "not ours", "full"])
def test_where_nothing_can_be_written_nothing_is(error: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)

    def refused(*args: Any, **options: Any) -> Any:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    monkeypatch.setattr(os, "utime", refused)
    plan_cache.keep({"another": 1}, FREE, PLAN)
    assert plan_cache.find({"another": 1}, FREE) is None
    assert plan_cache.find(QUESTION, FREE) == PLAN, "what is there is read all the same"
    assert len(os.listdir(cache / "plans")) == 1


def test_without_a_cache_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "file" / "below"))
    plan_cache.keep(QUESTION, FREE, PLAN)
    assert plan_cache.find(QUESTION, FREE) is None


def test_a_write_that_fails_leaves_the_old_file_and_no_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_cache.keep(QUESTION, FREE, PLAN)
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        plan_cache.keep(QUESTION, FREE, replace(PLAN, saved_layers=0))
    assert plan_cache.find(QUESTION, FREE) == PLAN and len(os.listdir(cache / "plans")) == 1


def test_the_plans_used_last_stay(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 3)
    clock = iter(range(1, 100))

    def keep(number: int) -> None:
        plan_cache.keep({"number": number}, FREE, PLAN)
        newest = max((cache / "plans").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, ns=(next(clock), next(clock)))

    for number in range(3):
        keep(number)
    assert plan_cache.find({"number": 0}, FREE) == PLAN
    (cache / "plans" / "left by a killed process").touch()
    os.utime(cache / "plans" / "left by a killed process", ns=(0, 0))
    keep(3)
    found = [number for number in range(4) if plan_cache.find({"number": number}, FREE)]
    assert found == [0, 2, 3] and len(os.listdir(cache / "plans")) == 3


def test_a_reader_beside_writers_finds_one_of_their_plans() -> None:
    plans = [replace(PLAN, saved_layers=n) for n in range(4)]
    plan_cache.keep(QUESTION, FREE, plans[0])

    def write(plan: Plan) -> None:
        for _ in range(25):
            plan_cache.keep(QUESTION, FREE, plan)

    writers = [threading.Thread(target=write, args=(plan,)) for plan in plans]
    for writer in writers:
        writer.start()
    found = []
    while any(writer.is_alive() for writer in writers):
        found.append(plan_cache.find(QUESTION, FREE))
    for writer in writers:
        writer.join()
    assert found and all(plan in plans for plan in found)


# ---------------------------------------------------------------- questions

GPU = Hardware.find("h200")
SIZES = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2}


@functools.cache
def analyse(device_type: str = "cuda", **sizes: Any) -> Any:
    return api.analyse(tiny_models.build(**SIZES | sizes), StreamConfig.of(device="cpu"), device_type, None, None)


@pytest.fixture(scope="module")
def analysis() -> Any:
    """A captured model of four layers and its tiling."""
    return analyse()


def replace_kept(asking: Planner, plan: Plan) -> None:
    asked = plan_cache.question(asking, 16, 64, "step", False)
    assert asked is not None
    plan_cache.keep(asked, plan_cache.free_memory(asking), plan)


def make(analysis: Any, *, budget: int = 2**30, hardware: Hardware = GPU, host_bytes: int = 2**40,
         options: dict[str, Any] | None = None, **fields: Any) -> Planner:
    """As a process that has just begun makes it."""
    config = StreamConfig.of(device="cpu", **options or {})
    simulator = simulator_of(*analysis, hardware, fused=True, passes=config.passes)
    made = Planner(*analysis, config, budget, margin_bytes=0, host_bytes=host_bytes, simulator=simulator, cached=True)
    return replace(made, **fields)


def choose(planned: Planner, batch: int = 16, length: int = 64, **step: Any) -> tuple[Plan, int]:
    """The plan, and how many searches it took."""
    chosen = planned.choose(batch, length, **step)
    return chosen.plan, chosen.answers["searched"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", [{}, {"whole_step": True}, {"update": "arrival"}, {"output": "logits"}], ids=str)
def test_a_second_planner_finds_the_plan_that_the_first_has_searched(step: dict[str, Any], analysis: Any) -> None:
    searched, kept = (make(analysis, budget=12 * 2**20).choose(16, 64, **step) for _ in range(2))
    assert searched.plan == kept.plan
    assert (searched.answers, kept.answers) == ({"searched": 1}, {"kept": 1})
    assert searched.stateful == kept.stateful == kept.plan.resident_state


OTHERS: dict[str, Callable[[Any], tuple[Planner, dict[str, Any]]]] = {
    "batch": lambda a: (make(a), {"batch": 8}),
    "length": lambda a: (make(a), {"length": 32}),
    "update": lambda a: (make(a), {"update": "arrival"}),
    "whole step": lambda a: (make(a), {"whole_step": True}),
    "output": lambda a: (make(a), {"output": "logits"}),
    "device memory": lambda a: (make(a, budget=2**29), {}),
    "device memory that was given": lambda a: (make(a, options={"device_memory": "1GiB"}, budget=2**30 + 1), {}),
    "device memory of other models": lambda a: (make(a, taken_bytes=2**26), {}),
    "host memory": lambda a: (make(a, host_bytes=2**41), {}),
    "pinned memory": lambda a: (make(a, pinned_bytes=2**30), {}),
    "margin": lambda a: (make(a, margin_bytes=1), {}),
    "compiled or not": lambda a: (make(a, fused=True), {}),
    "updated on the device": lambda a: (make(a, stateful=("prologue",)), {}),
    "rates": lambda a: (make(a, hardware=replace(GPU, adam=GPU.adam / 2)), {}),
    "contention": lambda a: (make(a, hardware=replace(GPU, beside={})), {}),
    "layers": lambda a: (make(analyse(num_hidden_layers=5)), {}),
    "tiles": lambda a: (make(analyse(intermediate_size=192)), {}),
    "graphs": lambda a: (make(analyse(sliding_window=16, use_sliding_window=True, max_window_layers=0)), {}),
    "device": lambda a: (make(analyse("cpu")), {}),
    **{name: lambda a, name=name, value=value: (make(a, options={name: value}), {}) for name, value in {
        "checkpoint_interval": 2, "micro_batch_size": 2, "saved_layers": 1, "residuals": "all", "waves": 2, "host_sums": "all",
        "token_chunk": 32, "host_checkpoints": 1, "resident": ("prologue",), "resident_state": (),
        "visiting_state": (), "held_state": (), "deferred_moments": True, "weight_slots": 3, "gradient_slots": 3,
        "gradient_slabs": 5, "state_slabs": 2, "disk_state": ()}.items()},
    "tiles on disk": lambda a: (make((a[0], replace(a[1], on_disk=("prologue",)))), {}),
}
#: These take a capture of their own, seconds each.
CAPTURED = ("layers", "tiles", "graphs", "device")


@pytest.fixture(scope="module")
def kept(analysis: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the plan of `make(analysis)`."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        use(folder, patch)
        assert choose(make(analysis))[1] == 1
    return folder / "cache"


@pytest.mark.sample(4)
@pytest.mark.parametrize("changed", [
    pytest.param(other, marks=[pytest.mark.nightly] * (other in CAPTURED)) for other in OTHERS])
def test_another_key_is_searched_again(changed: str, analysis: Any, kept: Path, cache: Path) -> None:
    shutil.copytree(kept, cache)
    assert choose(make(analysis))[1] == 0
    other, step = OTHERS[changed](analysis)
    assert choose(other, **step)[1] == 1
    again, step = OTHERS[changed](analysis)
    assert choose(again, **step)[1] == 0


def test_another_torch_searches_again(analysis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(make(analysis))
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    assert choose(make(analysis))[1] == 1


def test_every_option_is_in_a_question_or_changes_no_plan() -> None:
    assert {*named(lambda row: row.scope is Scope.PLAN)} <= OTHERS.keys()


@pytest.mark.nightly(held_by="tests/model/test_kept_plans.py::test_a_plan_serves_where_about_as_much_memory_is_free")
def test_memory_that_is_found_free_need_not_be_the_same_to_the_byte(analysis: Any) -> None:
    budget, host = 3 * 2**30, 21 * 2**38
    planned = choose(make(analysis, budget=budget, host_bytes=host))
    assert choose(make(analysis, budget=budget + 2**20, host_bytes=host + 2**34)) == (planned[0], 0)
    given = {"device_memory": budget, "host_memory": host}
    assert choose(make(analysis, budget=budget, host_bytes=host, options=given))[1] == 1
    assert choose(make(analysis, budget=budget + 1, host_bytes=host, options=given))[1] == 1
    assert choose(make(analysis, budget=budget, host_bytes=host + 1, options=given))[1] == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("spoiled", [{"batch": 8, "micro_batches": (8,)}, {"length": 32}, {"update": "arrival"},
                                     {"output": "logits"},
                                     {"placements": Placements.named(("no such tile",))}], ids=str)
def test_a_plan_of_another_step_or_model_is_not_taken(spoiled: dict[str, Any], analysis: Any) -> None:
    planned = make(analysis)
    found, _ = choose(planned)
    replace_kept(make(analysis), replace(found, **{"placements": Placements(), "update_order": (), **spoiled}))
    assert choose(make(analysis)) == (found, 1)


def test_a_plan_that_does_not_fit_is_searched_again(analysis: Any) -> None:
    planned = make(analysis, budget=12 * 2**20)
    found, _ = choose(planned)
    replace_kept(make(analysis, budget=12 * 2**20),
                 replace(found, weight_slots=4000, checkpoint_interval=1, micro_batches=(16,)))
    assert choose(make(analysis, budget=12 * 2**20)) == (found, 1)


@pytest.mark.nightly(held_by="tests/model/test_kept_plans.py::test_a_plan_that_does_not_fit_is_searched_again")
def test_a_refusal_is_not_kept(analysis: Any, cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(NoFittingPlanError):
            make(analysis, budget=2**16).choose(16, 64)
    assert not (cache / "plans").exists()


@pytest.mark.parametrize("planned", [
    lambda a: make(a, cached=False), lambda a: make(a, simulator=None), lambda a: make(a, keep_residuals=False),
    lambda a: make(a, options={"passes": insert_after(PIPELINE, "place", place)}),
    lambda a: make(a, options={"template_passes": TEMPLATE_PIPELINE[:-1]}),
], ids=["not asked to", "unknown machine", "no search", "a pass of the user's", "a template pass of the user's"])
def test_what_is_not_searched_or_depends_on_more_is_not_kept(planned: Callable[[Any], Planner], analysis: Any, cache: Path,
                                                            ) -> None:
    with contextlib.suppress(Exception):
        planned(analysis).choose(16, 64)
    assert not cache.exists() or not (cache / "plans").exists()


def test_the_switch_of_the_code_cache_turns_it_off(analysis: Any, cache: Path) -> None:
    with torch._inductor.config.patch(force_disable_caches=True):
        assert choose(make(analysis))[1] == choose(make(analysis))[1] == 1
    assert not (cache / "plans").exists()


def test_a_search_says_how_many_plans_it_has_simulated(analysis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(step_time, "at", said.append)
    choose(make(analysis))
    assert said == [f"simulation {number + 1}" for number in range(len(said))] and len(said) > 1


SCHEDULE = """
import json, test_kept_plans as tests
print(json.dumps(tests.scheduled()))
"""


def scheduled() -> list[Any]:
    """How many plans were searched for a schedule, its plan, and the digests of its templates."""
    searched, search = [], Planner._search

    def counted(*asked: Any) -> Any:
        searched.append(asked)
        return search(*asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "_search", counted)
        made = scheduling.schedule(tiny_models.build(**SIZES), batch=16, length=64, hardware="h200", whole_step=True)
    return [len(searched), repr(made.plan), *(template.digest for template in made.templates.values())]


@pytest.mark.nightly(held_by=(
    "tests/model/test_kept_plans.py::test_a_second_planner_finds_the_plan_that_the_first_has_searched",
    "tests/model/test_kept_plans.py::test_a_kept_plan_is_found_as_it_was"))
def test_a_second_process_does_not_search(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process is this one, which has captured the model already; the second one hashes strings otherwise."""
    monkeypatch.setattr(sealed_cache, "_key", lambda: sealed_cache.key_in(tmp_path / "configuration" / "megacompile"))
    monkeypatch.setenv("PYTHONHASHSEED", "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1")
    first, second = scheduled(), fresh_process(SCHEDULE, cache)
    assert (first[0], second[0]) == (1, 0) and first[1:] == second[1:]
