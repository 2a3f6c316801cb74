"""Rates of machines: profiles, measurements, and where they are stored."""
from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

import megacompile
from megacompile.codegen.scaled_products import scaled_product
from megacompile.errors import ArgumentError, InsufficientMemoryError, MegacompileError
from megacompile.ir.plan import Plan
from megacompile.ir.program import Lane
from megacompile.planning.explain import candidates
from megacompile.planning.planner import WORTH, WORTH_MOVING
from megacompile.planning.search_space import MOST_SEQUENCES
from megacompile.predict import hardware as module
from megacompile.predict.hardware import PROFILES, Hardware, cache_path
from megacompile.predict.simulate import Item
from megacompile.scheduling import Schedule
from megacompile.sizes import parse_bytes
from megacompile.tools import calibrate

LENGTH = 64
#: The host that updates slowest: parameters a second, and how long weights alone take. Faster ones are tried with these steps,
#: with others on demand.
SLOWEST, TRIED = (2e7, 1.3), (("step", False), ("arrival", True))
SIZES = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", [path.stem for path in PROFILES.glob("*.json")])
def test_profiles_load_and_say_where_their_numbers_are_from(name: str) -> None:
    found = Hardware.find(name)
    assert found.device_type == "cuda" and found.gemm_flops["bfloat16"] > found.gemm_flops["float32"]
    assert "measured" in found.source or "nominal" in found.source


def test_there_are_the_profiles_that_are_documented() -> None:
    documented = {"b200", "h200", "h100", "a100", "l40s", "rtx3090", "rtx4090", "rtx5090", "gb10", "gh200",
                  "8xh100", "8xh200", "8xb200", "4xrtx4090", "4xrtx5090"}
    assert documented == {path.stem for path in PROFILES.glob("*.json")}


@pytest.mark.parametrize("name", [path.stem for path in PROFILES.glob("*.json")])
def test_the_rates_of_a_profile_are_those_of_a_machine_that_may_exist(name: str) -> None:
    found = Hardware.find(name)
    assert 5e13 < found.gemm_flops["bfloat16"] < 2.5e15 and 1e13 < found.gemm_flops["float32"] < 2e14
    for shares in filter(None, (found.attention_efficiency, found.flash_efficiency)):
        assert 0.2 < shares["backward"] < shares["forward"] < 1
    assert all(0 <= keys < 1000 for keys in found.attention_overhead.values())
    assert 2e11 < found.memory_bandwidth < 1e13 and 1e-6 < found.launch_s < 1e-4
    assert set(found.link) == {"h2d", "d2h"} and all(1e10 < rate < found.memory_bandwidth for rate in found.link.values())
    assert 1e10 < found.host_copy < 5e11
    # AdamW reads and writes 28 bytes a parameter, a copy two for each byte.
    assert found.adam > 1e9 and 28 * found.adam < 8 * found.host_copy
    assert all(0.3 <= left <= 1 for lanes in found.beside.values() for left in lanes.values())
    assert 16 * 2**30 <= found.device_memory <= 200 * 2**30 and found.host_memory >= 32 * 2**30


@pytest.mark.parametrize("name", [path.stem for path in PROFILES.glob("*.json")])
def test_a_nominal_profile_says_what_its_numbers_are_from(name: str) -> None:
    source = Hardware.find(name).source
    assert source.startswith("measured") if name == "h200" else source.startswith("nominal: ") and "data sheet:" in source


@pytest.mark.parametrize("name", [path.stem for path in PROFILES.glob("[0-9]x*.json")])
def test_a_host_with_several_devices_has_their_rates_and_more_memory(name: str) -> None:
    host, one = Hardware.find(name), Hardware.find(name.partition("x")[2])
    assert host.name == f"{name[0]} x {one.name.removesuffix(' 80GB HBM3')}" and host.cores > one.cores
    assert host.gemm_flops == one.gemm_flops and host.link == one.link and host.peer_bandwidth == one.peer_bandwidth
    assert host.adam > one.adam and host.host_copy > one.host_copy and host.host_memory > one.host_memory


def test_newer_cards_are_faster() -> None:
    for slower, faster in (("rtx3090", "rtx4090"), ("rtx4090", "rtx5090"), ("a100", "h100")):
        one, two = Hardware.find(slower), Hardware.find(faster)
        assert one.gemm_flops["bfloat16"] < two.gemm_flops["bfloat16"] and one.memory_bandwidth < two.memory_bandwidth
        assert one.link["h2d"] <= two.link["h2d"] and one.device_memory <= two.device_memory


def test_an_unknown_profile_is_refused_with_those_there_are() -> None:
    with pytest.raises(MegacompileError, match=r"unknown hardware 'h2000'.*a100.*h200"):
        Hardware.find("h2000")


@pytest.mark.parametrize(("name", "profile"), [
    ("RTX4090", "rtx4090"), ("4090", "rtx4090"), ("rtx-4090", "rtx4090"), ("RTX 4090", "rtx4090"), ("H100", "h100"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"), ("A100-80GB", "a100"), ("8 x H200", "8xh200"),
    ("NVIDIA A100-SXM4-80GB", "a100"), ("a100_80g", "a100"),
    ("NVIDIA H100 80GB HBM3", "h100"), ("H100-PCIe", "h100"), ("3090_24GB", "rtx3090"), ("L40S", "l40s"), ("gb-10", "gb10")])
def test_a_profile_is_found_by_the_names_that_people_write(name: str, profile: str) -> None:
    assert Hardware.find(name) == Hardware.find(profile)


@pytest.mark.parametrize(("name", "said"), [
    ("rtx", "'rtx' may be rtx3090 or rtx4090 or rtx5090: give one of them"),
    ("100", "'100' may be a100 or h100"), ("9xh200", "unknown hardware '9xh200'"),
    ("A100-40GB", "'A100-40GB' has 40 GB and the profile a100 80 GiB: give a100, and device_memory='40GB'"),
    ("h20", "unknown hardware 'h20'"), ("L40", "unknown hardware 'L40'"),
    ("RTX 4090 Ti", "unknown hardware"), ("4090D", "unknown hardware"), ("a", "unknown hardware 'a'"),
    ("", "unknown hardware ''"), ("nvidia", "unknown hardware 'nvidia'")])
def test_a_name_of_several_cards_or_of_another_one_is_refused(name: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(said)):
        Hardware.find(name)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    for content in (b"{", json.dumps({"name": "x"}).encode(), b"[]", b"[" * 100_000, b"\xff", b"null"):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(MegacompileError, match="does not describe hardware"):
            Hardware.find(tmp_path / "x.json")


@pytest.mark.parametrize(("field", "value"), [
    ("cores", 2.5), ("cores", 0), ("gemm_flops", 3), ("gemm_flops", {"bfloat16": "fast"}), ("link", {"h2d": 1.0}),
    ("adam", math.nan), ("adam", math.inf), ("adam", True), ("device_memory", -1), ("device_memory", 2**70),
    ("beside", {"x y": {}}), ("beside", {"d2h h2d": {"d2h": None}}), ("fused_attention", "slow"), ("adam_parts", {}),
    ("name", None)])
def test_a_file_with_a_wrong_value_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    Hardware.find("h200").save(tmp_path / "x.json")
    assert Hardware.find(tmp_path / "x.json") == Hardware.find("h200")
    (tmp_path / "x.json").write_text(json.dumps({**json.loads((tmp_path / "x.json").read_text()), field: value}))
    with pytest.raises(MegacompileError, match=rf"x.json does not describe hardware: (?s:.*){field}"):
        Hardware.find(tmp_path / "x.json")


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(MegacompileError, match="not positive"):
        dataclasses.replace(Hardware.find("h200"), adam=0.0)


def test_lanes_alone_run_at_full_speed_and_company_never_helps() -> None:
    found = Hardware.find("h200")
    for lane in set(Lane) - {Lane.COMPUTE, Lane.COLLECTIVE}:
        assert found.speeds({lane, Lane.COMPUTE})[lane] == 1.0
    pair, three = found.speeds({Lane.H2D, Lane.CPU}), found.speeds({Lane.H2D, Lane.CPU, Lane.D2H})
    assert three[Lane.H2D] < pair[Lane.H2D] < 1 and three[Lane.CPU] <= pair[Lane.CPU] < 1
    everything = found.speeds(set(Lane))
    exchanging = found.speeds({Lane.COLLECTIVE, Lane.COMPUTE})
    assert everything == {**dict.fromkeys(Lane, 1.0), **three, **exchanging} and exchanging[Lane.COMPUTE] < 1


def test_devices_of_a_host_share_its_memory() -> None:
    found, both_ways = Hardware.find("h200"), {Lane.H2D, Lane.D2H}
    one, two, eight = (found.speeds(both_ways, ranks) for ranks in (1, 2, 8))
    assert all(one[lane] > two[lane] > eight[lane] for lane in both_ways)
    assert found.speeds({Lane.COLLECTIVE}, 8)[Lane.COLLECTIVE] == 1.0, "devices have links of their own"
    crossing = 8 * sum(found.link[lane] * eight[lane] for lane in both_ways)
    assert 26 * found.adam <= crossing < 1.2 * 26 * found.adam


def test_without_links_between_devices_exchanges_slow_copies_down() -> None:
    found = Hardware.find("rtx4090")
    for busy in ({Lane.H2D, Lane.COLLECTIVE}, {Lane.D2H, Lane.COLLECTIVE}):
        assert all(share <= 0.5 for share in found.speeds(busy, 2).values())
    two, eight = (found.speeds({Lane.COLLECTIVE}, ranks)[Lane.COLLECTIVE] for ranks in (2, 8))
    assert eight < two


def test_the_flash_kernel_has_a_rate_of_its_own_where_another_is_the_fused_one() -> None:
    hopper, older = Hardware.find("h200"), Hardware.find("a100")
    assert hopper.attention_share("flash", "forward") < hopper.attention_share("cudnn", "forward")
    assert older.attention_share("flash", "forward") == older.attention_efficiency["forward"]


@pytest.mark.parametrize(("rates", "expected"), [((600.0, 600.0), (600.0, 0.0)), ((483.0, 630.0), (658.6, 186.0)),
                                                 ((700.0, 600.0), (600.0, 0.0)), ((10.0, 600.0), (600.0, 0.0))])
def test_two_lengths_tell_the_rate_of_long_sequences_from_what_each_query_costs(
        rates: tuple[float, float], expected: tuple[float, float]) -> None:
    """The second: what an H200's forward has at 1,024 and 8,192 positions. No noise makes a rate that is not positive."""
    lengths = 1024, 8192
    rate, keys = calibrate._without_overhead(lengths, rates)
    assert (rate, keys) == pytest.approx(expected, rel=0.01)
    if keys:
        assert [rate / (1 + 2 * keys / length) for length in lengths] == pytest.approx(rates)


@pytest.fixture(scope="module")
def measured() -> Hardware:
    return calibrate.measure("cpu", scale=0.05)


@pytest.mark.nightly(held_by=(
    "tests/model/test_hardware.py::test_a_failing_lane_fails_the_measurement",
    "tests/model/test_hardware.py::test_a_whole_measurement_works_on_more_than_caches_hold_where_there_is_memory"))
def test_measuring_gives_rates_of_this_machine(measured: Hardware) -> None:
    assert (measured.device_type, measured.cores) == ("cpu", len(module.os.sched_getaffinity(0)))
    assert 0 < measured.grouped_efficiency < 100
    assert "measured" in measured.source and torch.__version__ in measured.source
    assert 1e8 < measured.host_copy < 1e13 and 1e6 < measured.adam < 1e11 and 1e8 < measured.gemm_flops["float32"] < 1e15
    assert {frozenset(lanes.split()) for lanes in measured.beside} == {
        frozenset(lanes) for lanes in (("d2h", "h2d"), ("cpu", "h2d"), ("cpu", "d2h"), ("cpu", "d2h", "h2d"))}
    assert all(0 < left <= 1 for lanes in measured.beside.values() for left in lanes.values())
    for row in ("GEMM bfloat16", "AdamW", "h2d copy", "cpu beside d2h beside h2d"):
        assert row in measured.table()


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_a_failing_lane_fails_the_measurement")
def test_the_rate_of_float8_is_that_of_its_products_where_a_device_has_them(
        measured: Hardware, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A product here takes as long as on a device of 300 TFLOPS, by the sizes of its operands; any other call a second."""
    rate, passed, products = 3e14, 0.0, set()

    def product(a: Tensor, b: Tensor, *given: Any) -> Tensor:
        nonlocal passed
        passed += 2.0 * a.shape[0] * a.shape[1] * b.shape[1] / rate
        products.add(given[-2:])
        return scaled_product(a, b, *given)

    def one_call(call: Callable[[], object], units: float, *_: Any, **__: Any) -> float:
        began = passed
        call()
        return units / (passed - began or 1.0)

    monkeypatch.setattr(calibrate, "_multiplies_float8", lambda device: True)
    monkeypatch.setattr(calibrate, "scaled_product", product)
    monkeypatch.setattr(calibrate, "_rate", one_call)
    said: list[str] = []
    calibrate.measure("cpu", scale=0.01, say=said.append).save(tmp_path / "profile.json")
    found = Hardware.find(tmp_path / "profile.json")
    assert found.gemm_flops["float8"] == pytest.approx(rate)
    assert products == {(torch.bfloat16, "float8_fast"), (torch.bfloat16, "float8"), (torch.float32, "float8")}
    assert "measuring matrix products in float8" in said and "GEMM float8" in found.table()
    assert "float8" not in measured.gemm_flops, "a CPU has no such products"


def test_products_in_float8_take_compute_capability_8_9(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not calibrate._multiplies_float8(torch.device("cpu"))
    for capability, expected in (((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert calibrate._multiplies_float8(torch.device("cuda", 0)) == expected


def test_a_whole_measurement_works_on_more_than_caches_hold_where_there_is_memory() -> None:
    assert calibrate._working_set(1.0, 256 << 30) == calibrate._working_set(3.0, 64 << 30) == 1 << 31
    assert calibrate._working_set(1.0, 8 << 30) == 1 << 30
    assert 0 < calibrate._working_set(0.05, 256 << 30) < 1 << 27


def test_a_failing_lane_fails_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(calibrate.host_update, "update", broken)
    with pytest.raises(ZeroDivisionError):
        calibrate.measure("cpu", scale=0.05)


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_rates_are_kept_apart_by_machine_and_version")
def test_what_was_measured_is_found_again(measured: Hardware, cache: Path) -> None:
    measured.save(cache_path("cpu"))
    assert cache_path("cpu").is_relative_to(cache)
    assert Hardware.here("cpu") == measured


def test_rates_are_kept_apart_by_machine_and_version(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_path("cpu")
    monkeypatch.setattr(module, "__version__", "99")
    newer = cache_path("cpu")
    monkeypatch.setattr(module, "device_name", lambda _: ("cuda", "NVIDIA H200"))
    assert len({before, newer, cache_path("cuda")}) == 3


@pytest.mark.parametrize(("gpu", "profile"), [
    ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 3090", "rtx3090"),
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GB10", "gb10"), ("NVIDIA A1000", None)])
def test_a_known_gpu_that_was_not_measured_has_its_profile(
        gpu: str, profile: str | None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_name", lambda _: ("cuda", gpu))
    if profile is None:
        with pytest.raises(MegacompileError, match=f"{gpu} has not been measured: run megacompile calibrate"):
            Hardware.here("cuda")
    else:
        assert Hardware.here("cuda") == Hardware.find(profile)


# ---- schedules on hardware ------------------------------------------------------------------------------------------

def plan(**options: Any) -> Schedule:
    return megacompile.schedule(tiny_models.build(bf16=True, **SIZES), batch=8, length=LENGTH,
                                **{"hardware": "h200", "micro_batch_size": 4, **options})


@pytest.fixture(scope="module")
def planned() -> Schedule:
    return plan()


def test_a_schedule_for_hardware_takes_its_device_and_memory(planned: Schedule) -> None:
    assert planned.device.type == "cuda"
    assert planned.planner.device_bytes == int(0.95 * Hardware.find("h200").device_memory)
    other = megacompile.schedule(tiny_models.build(), batch=8, length=LENGTH, hardware="h200",
                                 device_memory="2GiB", device="cpu")
    assert (other.device.type, other.planner.device_bytes) == ("cpu", 2 << 30)


def test_a_machine_that_was_not_measured_is_refused_when_times_are_asked_for(planned: Schedule, cache: Path) -> None:
    unmeasured = dataclasses.replace(planned, hardware=None, device=torch.device("cpu"))
    with pytest.raises(MegacompileError, match="run megacompile calibrate"):
        unmeasured.simulate()


def test_a_faster_device_has_shorter_steps(planned: Schedule) -> None:
    own = Hardware.find("h200")
    faster = dataclasses.replace(own, launch_s=own.launch_s / 2)  # tiny templates are launches and nothing else
    assert dataclasses.replace(planned, hardware=faster).simulate().step_s < planned.simulate().step_s


def test_compiled_templates_are_predicted_faster_than_op_by_op(planned: Schedule) -> None:
    planner = dataclasses.replace(planned.planner, config=dataclasses.replace(planned.planner.config, compile=False))
    assert planned.simulate().step_s < dataclasses.replace(planned, planner=planner).simulate().step_s


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_a_plan_says_how_fast_it_is_and_which_lane_binds")
def test_explaining_marks_the_chosen_plan_among_its_candidates(planned: Schedule) -> None:
    found = candidates(planned.planner, 8, LENGTH)
    assert planned.plan in [candidate.plan for candidate in found]
    text = planned.explain()
    assert "NVIDIA H200" in text
    (row,) = [line for line in text.splitlines() if line.startswith("->")]
    assert f"{planned.simulate().step_s:.3f}" in row.split()
    lines = text.splitlines()
    header = next(i for i, line in enumerate(lines) if "micro-batch" in line)
    assert len(lines[header + 2:]) >= len(found)  # under the header and its rule; more, where the search went further


def test_candidates_that_do_not_fit_are_listed_without_a_time(planned: Schedule) -> None:
    config = dataclasses.replace(planned.planner.config, micro_batch_size=None)
    roomy = dataclasses.replace(planned.planner, config=config, margin_bytes=0, keep_residuals=False)
    needs = [roomy.estimate(p).total for p in roomy.considered(8, LENGTH)]
    tight = dataclasses.replace(roomy, budget_bytes=max(needs) - 1)
    found = candidates(tight, 8, LENGTH)
    fitting = [c for c in found if c.times is not None]
    assert fitting and len(fitting) < len(found)
    for each in found:
        assert (each.device_bytes <= tight.device_bytes) == (each.times is not None)
        assert each.host_bytes == planned.tiling.host_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rate", "weights", "update", "whole_step"), [
    pytest.param(*host, *step, marks=[pytest.mark.nightly] * (host != SLOWEST and step not in TRIED))
    for host in (SLOWEST, (2e7, 0.9), (2e8, 1.3), (1e12, 1.3))
    for step in (("step", False), ("step", True), ("arrival", False), ("arrival", True))])
def test_no_plan_that_was_left_out_would_have_been_faster(rate: float, weights: float, update: str, whole_step: bool) -> None:
    """On hosts that hold a step up, and on one that does not, some are never simulated: a bound says that they are slower."""
    own = Hardware.find("h200")
    host = dataclasses.replace(own, adam=rate, adam_parts={**own.adam_parts, "weights": weights})
    found = plan(update=update, whole_step=whole_step, hardware=host, micro_batch_size=2, device_memory="516MiB")
    planner, simulator = dataclasses.replace(found.planner, stateful=None), found.planner.simulator
    assert simulator is not None
    compared = len(simulator.cautious)
    fitting = planner._with_each_state(8, LENGTH, update, whole_step, planner._state_counts(training=True))
    every = [variant for each in fitting for variant in simulator.orders(each, whole_step, may_defer=True)]
    for each in every:
        assert simulator.at_least(each, may_defer=False) <= simulator.cautious_s(each, whole_step) * (1 + 1e-9)
        assert simulator.at_least(each, may_defer=True) <= simulator.at_least(each, may_defer=False)
    best = min(simulator.cautious_s(each, whole_step) for each in every)
    assert simulator.cautious_s(found.plan, whole_step) <= WORTH**2 * best
    assert update == "arrival" or compared < len(every), "some were left out"


@pytest.mark.parametrize(("width", "batch", "memory", "all_there"), [
    (576, 8, None, True), (576, 8, "1500MiB", False), (4096, 128, None, False)])
def test_a_small_model_stays_on_a_device_that_holds_all_of_it(
        width: int, batch: int, memory: str | None, all_there: bool) -> None:
    """Simulated steps take as long with few tiles there. But copies and updates of the others must be issued."""
    with torch.device("meta"):
        model = tiny_models.build(bf16=True, hidden_size=width, intermediate_size=3 * width, num_attention_heads=width // 64,
                                  num_key_value_heads=width // 64, num_hidden_layers=12, vocab_size=4096)
    found = megacompile.schedule(model, batch=batch, length=512, hardware="h200", device_memory=memory, host_memory="256GiB")
    there = set(found.plan.resident_state) == set(found.planner.tiling.layouts)
    assert there == all_there and (found.plan.saved_layers == 12 or not all_there)


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_no_plan_that_was_left_out_would_have_been_faster")
def test_a_batch_of_another_size_moves_state_from_the_device_only_for_a_much_faster_step(
        monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = tiny_models.build(bf16=True, hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
                                  num_key_value_heads=4, num_hidden_layers=8)
    found = megacompile.schedule(model, batch=64, length=1024, hardware="h200", whole_step=True, device_memory="40GiB")
    first = dataclasses.replace(found.planner, stateful=None, cached=False)
    choice = first.choose(64, 1024, whole_step=True)
    later, simulator = first.after(choice), found.planner.simulator
    assert choice.stateful and simulator is not None

    def chosen(worth: float) -> Plan:
        monkeypatch.setattr("megacompile.planning.planner.WORTH_MOVING", worth)
        return later.choose(32, 1024, whole_step=True).plan

    same, fastest = chosen(WORTH_MOVING), chosen(1.0)
    gain = simulator.cautious_s(same, True) / simulator.cautious_s(fastest, True)
    assert same.resident_state == choice.stateful and len(fastest.resident_state) < len(choice.stateful)
    assert 1.01 < gain < 1.1 and chosen(gain - 0.005) == fastest and chosen(gain + 0.005) == same


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_no_plan_that_was_left_out_would_have_been_faster")
def test_plans_that_were_compared_leave_times_and_no_instructions() -> None:
    """Millions of objects, which Python's collector would go through again and again while the model trains."""
    def instructions() -> int:
        gc.collect()
        return sum(isinstance(each, Item) for each in gc.get_objects())

    before, found = instructions(), plan(whole_step=True)
    assert found.planner.simulator is not None and len(found.planner.simulator.cautious) > 1
    assert instructions() == before


@pytest.mark.sample(1)
@pytest.mark.parametrize("whole_step", [False, True])
def test_updates_that_fall_behind_are_ordered_by_what_the_next_forward_needs_first(whole_step: bool) -> None:
    own = Hardware.find("h200")
    fast, slow = (plan(update="arrival", whole_step=whole_step, resident_state=(), hardware=dataclasses.replace(own, adam=rate))
                  for rate in (1e12, 2e7))
    assert ("train_step" in slow.program().sections) == whole_step
    assert not fast.plan.update_order, "updates keep up with arrivals"
    tiles = tuple(slow.planner.tiling.layouts)
    assert sorted(slow.plan.update_order) == sorted(tiles)
    assert slow.plan.update_order.index(tiles[0]) < slow.plan.update_order.index(tiles[-2]), "the last layer's came first"
    simulator = slow.planner.simulator
    assert simulator is not None
    in_turn = dataclasses.replace(slow.plan, update_order=())
    assert slow.simulate().step_s < simulator.timeline(in_turn, whole_step).step_s


# ---- what fits -------------------------------------------------------------------------------------------------------

def test_the_host_memory_of_a_plan_is_given_by_section_and_they_are_all_of_it(planned: Schedule) -> None:
    found = planned.outlook()
    elements = sum(layout.elements for layout in planned.tiling.layouts.values())
    assert [found.host_parts[part] // elements for part in ("weights", "gradients", "remainder", "moments")] == [2, 2, 2, 8]
    assert sum(found.host_parts.values()) == planned.tiling.host_bytes() == found.chosen.host_bytes
    for part in found.host_parts:
        assert re.search(rf"^{part} +\d+\.\d +\d+\.\d\d$", found.text(), re.MULTILINE)


def test_the_need_that_a_refusal_names_is_enough_and_no_more(planned: Schedule) -> None:
    """That of the plan that needs least: with no optimizer state on the device."""
    poor = dataclasses.replace(planned.planner, budget_bytes=1 << 20, stateful=None)
    with pytest.raises(InsufficientMemoryError) as caught:
        poor.choose(8, LENGTH)
    needed = re.search(r"needs (\S+ .iB) of device memory", str(caught.value))
    assert needed is not None
    enough, rounding = parse_bytes(needed[1]) or 0, 1 << 13  # two decimals of a MiB
    assert dataclasses.replace(poor, budget_bytes=enough + rounding).choose(8, LENGTH)
    with pytest.raises(InsufficientMemoryError):
        dataclasses.replace(poor, budget_bytes=enough - rounding).choose(8, LENGTH)


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_the_need_that_a_refusal_names_is_enough_and_no_more")
def test_a_plan_fits_exactly_as_far_as_the_host_memory_goes(planned: Schedule) -> None:
    needed = planned.outlook().host_needed
    assert planned.outlook(needed).fits and "host: fits" in planned.outlook(needed).text()
    assert not planned.outlook(needed - 1).fits and "host: does not fit" in planned.outlook(needed - 1).text()


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_a_schedule_for_hardware_takes_its_device_and_memory")
def test_the_host_memory_is_that_of_the_hardware_unless_given(planned: Schedule) -> None:
    assert planned.outlook().host_budget == Hardware.find("h200").host_memory
    assert planned.outlook("2GiB").host_budget == 2 << 30


def test_a_plan_says_how_fast_it_is_and_which_lane_binds(planned: Schedule) -> None:
    text, step = planned.explain(), planned.simulate()
    assert f"speed: {step.step_s:.3f} s a step" in text and f"{step.binds} binds" in text
    (row,) = [line for line in text.splitlines() if line.startswith("->")]
    assert row.split()[13] == step.binds
    # The parts of compute add up to what the lane does beside updates.
    (parts,) = [line for line in text.splitlines() if line.startswith("parts: ")]
    seconds = [float(each) for each in re.findall(r"(\S+) s(?:;|$)", parts)]
    assert 0.9 * step.busy_s[Lane.COMPUTE] < sum(seconds) <= 1.01 * step.busy_s[Lane.COMPUTE]


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_the_need_that_a_refusal_names_is_enough_and_no_more")
def test_the_largest_batch_fits_and_one_sequence_more_does_not(planned: Schedule) -> None:
    room = planned.planner.margin_bytes + (30 << 20)
    planner = dataclasses.replace(planned.planner, budget_bytes=room, simulator=None, stateful=None)
    largest = planner.largest_batch(LENGTH)
    assert largest > 8
    assert planner.fits(dataclasses.replace(planner, stateful=None).choose(largest, LENGTH).plan)
    with pytest.raises(MegacompileError, match=f"a batch of {largest + 1} x {LENGTH} needs"):
        planner.choose(largest + 1, LENGTH)


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_the_largest_batch_is_none_if_nothing_fits")
def test_no_batch_larger_than_anybody_wants_is_looked_for(planned: Schedule) -> None:
    assert planned.planner.largest_batch(LENGTH) == MOST_SEQUENCES
    assert f"largest batch: {MOST_SEQUENCES} or more sequences of {LENGTH} tokens" in planned.explain()


def test_the_largest_batch_is_none_if_nothing_fits(planned: Schedule) -> None:
    assert dataclasses.replace(planned.planner, budget_bytes=1).largest_batch(LENGTH) == 0


@pytest.mark.nightly(held_by="tests/model/test_hardware.py::test_a_plan_says_how_fast_it_is_and_which_lane_binds")
def test_a_streamed_model_explains_the_plan_that_it_trains_by() -> None:
    model = megacompile.stream(tiny_models.build(), device="cpu", micro_batch_size=2)
    try:
        model(**tiny_models.batch(0, rows=6)).loss.backward()
        text = model.megacompile.explain(hardware="h200")
        (chosen,) = [line for line in text.splitlines() if line.startswith("->")]
        assert chosen.split()[1:3] == [str(model.megacompile.plan.checkpoint_interval), "2"]
        assert "device: fits" in text and "host: fits" in text
        with torch.no_grad():
            model(**tiny_models.batch(0, rows=6))
        assert model.megacompile.explain(hardware="h200").startswith("rows: 6 x 9"), "an evaluation has no plan to compare"
        with pytest.raises(MegacompileError, match="pass a batch with labels"):
            model.megacompile.simulate(hardware="h200")
    finally:
        model.megacompile.close()
