"""CUDA runs the same programs: the same bits as the reference interpreter on the device, whatever the lanes' timing."""
from __future__ import annotations

import random
import time
from typing import Any

import engine
import pytest
import torch
from tiny_models import assert_same_gradients
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.errors import LaneError
from megacompile.ir.program import Lane, find, lane_of, op_of, operands, rebuild
from megacompile.runtime.backends.cuda import CudaBackend
from megacompile.runtime.optimizer import host_update
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Rule, Segment
from megacompile.runtime.optimizer.state_format import FORMATS, StateFormat
from megacompile.streaming.optimizer import adamw, lion, sgd

pytestmark = pytest.mark.gpu
LAYERS = 4


def build(dtype: torch.dtype = torch.bfloat16, layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (5, 128), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, labels=ids)


def late(model: Any, seed: int) -> None:
    """Lanes late by up to 4 ms, at random."""
    draw = random.Random(seed)
    engine.delay(model, lambda lane: engine.backend(model).delay(lane, draw.random() * 0.004 * (draw.random() < 0.3)))


def train(model: Any, steps: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0, **options)
    for step in range(steps):
        model(**batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: t.clone() for n, t in model.state_dict().items()}


def weights(seed: int | None = None, **options: Any) -> dict[str, torch.Tensor]:
    model = megacompile.stream(build(), device="cuda", compile=False, **options)
    if seed is not None:
        late(model, seed)
    try:
        return train(model)
    finally:
        model.megacompile.close()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module", autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return weights(micro_batch_size=2, reference=True)


@pytest.mark.parametrize("options", [
    dict(checkpoint_interval=1), dict(checkpoint_interval=2), dict(checkpoint_interval=4), dict(resident="all"),
    dict(pinned_memory="6MiB"), dict(saved_layers=2), dict(saved_layers=3, residuals="attention"), dict(weight_slots=4),
    dict(resident_state="all"),
    dict(resident_state=("tied", "model.layers.1"), checkpoint_interval=2), dict(host_checkpoints=True),
    dict(host_checkpoints=1, checkpoint_interval=2, saved_layers=1), dict(visiting_state="all"),
    dict(visiting_state=("tied", "model.layers.2"), resident_state=("model.layers.0",)), dict(deferred_moments=True),
    dict(deferred_moments=True, visiting_state=("model.layers.1",), resident_state=("tied",), checkpoint_interval=2)])
def test_every_plan_gives_the_bits_of_the_reference_interpreter(options: dict[str, Any], reference: Any) -> None:
    assert same(weights(seed=1, micro_batch_size=2, **options), reference)


@pytest.mark.parametrize("seed", range(10))
def test_late_lanes_change_no_bit(seed: int, reference: Any) -> None:
    assert same(weights(seed=seed, micro_batch_size=2), reference)


@pytest.mark.parametrize("overlap", [None, "backward"])
@pytest.mark.parametrize("options", [dict(), dict(pinned_memory="6MiB"), dict(resident_state=("model.layers.0",))])
def test_waves_that_the_host_adds_up_give_the_bits_of_the_reference_interpreter(
        overlap: str | None, options: dict[str, Any]) -> None:
    found = []
    for reference in (True, False):
        model = megacompile.stream(build(), device="cuda", compile=False, micro_batch_size=2, waves=2, host_sums="all",
                                   reference=reference, **options)
        if not reference:
            late(model, 7)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=None if overlap else 1.0, overlap=overlap)
        for step in range(3):
            model.megacompile.train_step(batch(step), optimizer)
        found.append({n: t.clone() for n, t in model.state_dict().items()})
        model.megacompile.close()
    assert same(*found)


@pytest.mark.parametrize("options", [dict(waves=2), dict(waves=2, resident_state="all"), dict(waves=2, host_checkpoints=True),
                                     dict(resident_state=("tied", "model.layers.0"))])
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_whole_steps_updated_on_the_device_give_the_bits_of_those_updated_on_the_host(
        overlap: str | None, options: dict[str, Any]) -> None:
    """Optimizer state too, brought home."""
    found = []
    for there in (options, {**options, "resident_state": ()}):
        model = megacompile.stream(build(), device="cuda", compile=False, micro_batch_size=2, **there)
        late(model, 3)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=None if overlap else 1.0, overlap=overlap)
        for step in range(3):
            model.megacompile.train_step(batch(step), optimizer)
        state = {f"{i} {key}": torch.as_tensor(value).clone()
                 for i, of in optimizer.state_dict()["state"].items() for key, value in of.items()}
        found.append({**{n: t.clone() for n, t in model.state_dict().items()}, **state})
        model.megacompile.close()
    assert same(*found)


@pytest.mark.parametrize("options", [dict(), dict(checkpoint_interval=2, pinned_memory="6MiB"), dict(resident_state="all"),
                                     dict(host_checkpoints=True)])
def test_a_loop_that_updates_on_arrival_gives_the_bits_of_an_unclipped_loop(options: dict[str, Any]) -> None:
    """With late lanes: the backward returns before its last updates, and the next forward may not read old weights."""
    found = []
    for overlap in (None, "backward"):
        model = megacompile.stream(build(), device="cuda", compile=False, micro_batch_size=2, **options)
        late(model, 5)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, overlap=overlap)
        for step in range(4):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({n: t.clone() for n, t in model.state_dict().items()})
        model.megacompile.close()
    assert same(*found)


#: Each rule with the options of two parameters, the second of which is at its first step.
RULES: dict[str, tuple[Rule, Any, Any]] = {
    "adamw": (adamw.RULE, adamw.Options(1e-3, 0.9, 0.999, 1e-8, 0.1), adamw.Options(1e-2, 0.4, 0.95, 1e-6, 0.0)),
    "lion": (lion.RULE, lion.Options(1e-4, 0.9, 0.99, 0.1), lion.Options(1e-2, 0.4, 0.3, 0.0)),
    "sgd": (sgd.RULE, sgd.Options(1e-3, 0.9, 0.1, 0.01, False), sgd.Options(1e-2, 0.5, 0.0, 0.0, True))}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)])
def test_the_update_on_the_device_is_that_of_the_host_to_the_bit(
        dtype: torch.dtype, exact: bool, stored: StateFormat, name: str) -> None:
    """Numbers are of every kind: ordinary, tiny, huge, denormal, infinite, NaN."""
    count, generator = 1 << 20, torch.Generator().manual_seed(0)
    rule, first_options, second_options = RULES[name]

    def numbers(low: int, high: int) -> torch.Tensor:
        found = torch.randn(count, generator=generator) * 10.0 ** torch.randint(low, high, (count,), generator=generator)
        found[:8] = torch.tensor([0.0, -0.0, 1e-42, -1e-42, float("inf"), float("-inf"), float("nan"), 3.3e38])
        return found[torch.randperm(count, generator=generator)]

    weights, gradient = numbers(-38, 30).to(dtype), numbers(-38, 20).to(dtype)
    low = None
    if dtype == torch.bfloat16 and exact:
        low = torch.randint(-2**15, 2**15, (count,), generator=generator).to(torch.int16)
        low[weights.isnan()] = 0  # as they are stored
    scales: tuple[torch.Tensor, ...] = ()
    if stored.scaled:
        values = tuple(torch.randint(0, 256, (count,), generator=generator).to(torch.uint8) for _ in rule.moments)
        scales = tuple(numbers(-38, 20)[:stored.scales(count)].abs() for _ in values)
    else:
        drawn = [numbers(-38, 20) for _ in rule.moments]
        values = tuple((each if moment.signed else each.abs()).to(stored.dtype)
                       for each, moment in zip(drawn, rule.moments, strict=True))
    segments = [Segment(0, 512, first_options, step=3, seed=5),
                Segment(512, 1000, first_options, step=3, seed=6),  # with FP32 state, one kernel updates both
                Segment(1024, count - 3, second_options, step=1, seed=9, first=512)]

    def moments(values: tuple[torch.Tensor, ...], scales: tuple[torch.Tensor, ...]) -> list[tuple[Segment, Moments]]:
        return [(s, Moments(stored, tuple(v[s.start:s.stop] for v in values), tuple(each[s.start // 256:] for each in scales)))
                for s in segments]

    backend = CudaBackend()
    host = [weights, *([] if low is None else [low]), gradient, *values, *scales]
    there = [tensor.cuda() for tensor in host]
    torch.cuda.synchronize()
    first = len(host) - len(values) - len(scales)
    end = first + len(values)
    backend.update(rule, there[0], None if low is None else there[1], there[first - 1],
                   moments(tuple(there[first:end]), tuple(there[end:])), 0.37)
    backend.synchronize()
    host_update.update(rule, weights, low, gradient, moments(values, scales), 0.37)
    for index, (ours, theirs) in enumerate(zip(there, host, strict=True)):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8)), index


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_gradients_are_no_further_from_fp32_than_natives(compiled: bool) -> None:
    exact = build().float()
    exact(**batch(0)).loss.backward()
    native = build().cuda()
    native(**{k: v.cuda() for k, v in batch(0).items()}).loss.backward()
    streamed = megacompile.stream(build(), device="cuda", compile=compiled)
    streamed(**batch(0)).loss.backward()
    ours, theirs, true = (torch.cat([p.grad.float().cpu().flatten() for p in m.parameters()])
                          for m in (streamed, native, exact))
    error, usual = (ours - true).norm() / true.norm(), (theirs - true).norm() / true.norm()
    assert error <= 1.1 * usual, f"{error:.2e}, native {usual:.2e}"
    streamed.megacompile.close()


@pytest.mark.parametrize("dtype", [torch.float32])
def test_fp32_gradients_equal_natives(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    native = build(dtype)
    native(**batch(0)).loss.backward()
    streamed = megacompile.stream(build(dtype), device="cuda", compile=False, micro_batch_size=2)
    loss = streamed(**batch(0)).loss
    loss.backward()
    assert_same_gradients(streamed, native, 1e-5)
    streamed.megacompile.close()


def without(program: Any, section: str, wait: int) -> Any:
    """The program less one `wait`, by number, in a section."""
    victim = list(find(program.section(section), "wait"))[wait]
    graph = rebuild(program.section(section),
                    lambda node, arguments, b: None if node is victim else b.add(op_of(node).name, node.name, **arguments))
    return program.evolve(sections={**program.sections, section: graph})


def test_a_wait_deleted_by_hand_does_harm(reference: Any) -> None:
    """CUDA emits what the program says: without the wait, compute reads a slot before its weights are there, or before the
    copy was even requested."""
    model = megacompile.stream(build(), device="cuda", compile=False, micro_batch_size=2)
    executable = model.megacompile.compiled(batch(0))
    program = executable.program
    waits = list(find(program.section("forward"), "wait"))
    # The last arrival of weights that compute waits for.
    number = max(i for i, w in enumerate(waits) if lane_of(w) == Lane.COMPUTE
                 and op_of(operands(operands(w, "event")[0], "node")[0]).name == "prefetch")
    executable.compiled.stages["synchronize"] = without(program, "forward", number)
    engine.delay(model, lambda lane: engine.backend(model).delay(lane, 0.02 if lane == Lane.H2D else 0.0))
    try:
        harmed = not same(train(model, non_finite="skip"), reference)  # what a slot holds before its weights may be NaN
    except LaneError as error:
        harmed = isinstance(error.__cause__, KeyError)
    finally:
        model.megacompile.close()
    assert harmed


def test_a_recording_has_all_lanes_on_one_clock() -> None:
    model = megacompile.stream(build(), device="cuda", compile=False)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    begin = time.perf_counter()
    with model.megacompile.record() as recording:
        for step in range(3):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    took = time.perf_counter() - begin
    found = recording.timeline()
    model.megacompile.close()
    assert all(-1e-4 <= i.start_s <= i.end_s <= took for i in found.items)
    end = {(i.step, i.node): i.end_s for i in found.items}
    crossed = 0
    for wait in (i for i in found.items if op_of(i.node).name == "wait"):
        (event,) = operands(wait.node, "event")
        if op_of(event).name == "record":
            assert end[wait.step, operands(event, "node")[0]] <= wait.end_s + 5e-4, "two clocks"
            crossed += 1
    assert crossed > 10
    assert all(0 < found.occupancy(lane) <= 1 for lane in (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.CPU))


def test_a_loss_is_known_before_its_backward_has_ended() -> None:
    """The caller prepares the next batch meanwhile, in a whole step. The value is that of a step that nothing delays."""
    values = []
    for seconds in (0.0, 0.5):
        model = megacompile.stream(build(), device="cuda", compile=False, micro_batch_size=2)
        backend = engine.backend(model)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

        def delay(node: Any, backend: Any = backend, seconds: float = seconds) -> None:
            if op_of(node).name in ("backward", "recompute_backward"):
                backend.delay(Lane.COMPUTE, seconds)

        try:
            model.megacompile.train_step(batch(0), optimizer)
            model.megacompile.synchronize()
            engine.probe(model, delay)
            values.append(model.megacompile.train_step(batch(1), optimizer).item())
            assert not seconds or not backend.compute.query(), "the loss waited for the backward"
        finally:
            engine.probe(model, None)
            model.megacompile.close()
    assert values[0] == values[1]
