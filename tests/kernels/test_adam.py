from __future__ import annotations

import itertools
import math
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacompile.runtime.optimizer import host_update, native
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Part, Segment
from megacompile.runtime.optimizer.state_format import FLOAT32
from megacompile.streaming.optimizer.adamw import RULE, Options

SIZES = (0, 1, 15, 17, 4097, 65537)
INSTRUCTION_SETS = tuple(
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            (library := native.library()) is None or name not in native.instruction_sets(library),
            reason=f"this processor, or an absent compiler, cannot run {name}",
        ),
    )
    for name in native.INSTRUCTION_SETS
)
needs_library = pytest.mark.skipif(native.library() is None, reason="no compiler: the PyTorch path is all there is")


@pytest.fixture(params=["native", "pytorch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the kernels and on the PyTorch path."""
    if request.param == "pytorch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no compiler")
    return str(request.param)


def random(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def segment(start: int, stop: int, step: int = 1, **changes: float) -> Segment:
    values: dict[str, float] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, **changes}
    return Segment(start, stop, Options(**values), step)


def adamw(weights: Tensor, remainder: Tensor | None, gradient: Tensor, m: Tensor, v: Tensor, segments: list[Segment],
          *scale: float, **options: object) -> None:
    """AdamW with FP32 moments of the same elements."""
    pairs = [(s, Moments(FLOAT32, (m[s.start:s.stop], v[s.start:s.stop]))) for s in segments]
    host_update.update(RULE, weights, remainder, gradient, pairs, *scale, **options)  # type: ignore[arg-type]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(bits(left), bits(right))


def ulps(left: Tensor, right: Tensor) -> int:
    """Largest distance of two tensors, counted in representable values; NaN equals NaN."""
    ordered = [torch.where(bits(x) < 0, -(bits(x).long() & 0x7FFFFFFF), bits(x).long()) for x in (left, right)]
    distance = (ordered[0] - ordered[1]).abs().masked_fill(left.isnan() & right.isnan(), 0)
    return int(distance.max()) if left.numel() else 0


class State:
    """A parameter with its optimizer state, for runs that are compared."""

    def __init__(self, n: int, weights: torch.dtype, gradient: torch.dtype = torch.float32) -> None:
        self.gradient_dtype = gradient
        self.remainder: Tensor | None = None
        self.weights = random(n, seed=1)
        if weights == torch.bfloat16:
            self.weights, self.remainder = host_update.split_fp32(self.weights)
        self.m, self.v = torch.zeros(n), torch.zeros(n)

    def run(self, segments: list[Segment], seed: int = 2, **options: object) -> State:
        gradient = random(self.weights.numel(), seed, self.gradient_dtype)
        adamw(self.weights, self.remainder, gradient, self.m, self.v, segments, **options)  # type: ignore[arg-type]
        return self

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.weights, self.remainder, self.m, self.v) if x is not None]

    def master(self) -> Tensor:
        return self.weights if self.remainder is None else host_update.join_fp32(self.weights, self.remainder)


DTYPES = [(w, g) for w in (torch.float32, torch.bfloat16) for g in (torch.float32, torch.bfloat16)]


# ---- AdamW -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [5, 1000, 40000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95), (0.0, 0.9)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_equal_torch_adamw(path: str, n: int, betas: tuple[float, float], weight_decay: float) -> None:
    ours = State(n, torch.float32)
    theirs = torch.nn.Parameter(ours.weights.clone())
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, betas=betas, weight_decay=weight_decay, foreach=False)
    for step in range(1, 21):
        theirs.grad = random(n, seed=step)
        optimizer.step()
        ours.run([segment(0, n, step, lr=3e-3, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)], seed=step)
    torch.testing.assert_close(ours.weights, theirs.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours.m, optimizer.state[theirs]["exp_avg"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(ours.v, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-6, atol=1e-12)


def test_bf16_master_follows_the_fp32_trajectory_bit_for_bit(path: str) -> None:
    n = 20000
    split, full = (State(n, dtype, gradient=torch.bfloat16) for dtype in (torch.bfloat16, torch.float32))
    for step in range(1, 21):
        for state in (split, full):
            state.run([segment(0, n, step)], seed=step, gradient_scale=0.37)
        assert same_bits(split.master(), full.weights)
        assert same_bits(split.m, full.m)
        assert same_bits(split.v, full.v)
    assert same_bits(split.weights, host_update.split_fp32(full.weights)[0])


@pytest.mark.parametrize(("weights", "gradient"), DTYPES)
def test_pytorch_path_is_within_one_ulp(
    weights: torch.dtype, gradient: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.library() is None:
        pytest.skip("no compiler")
    n = 40000
    segments = [segment(0, 17), segment(40, 30001, weight_decay=0.0), segment(30001, n, step=9)]
    fused = State(n, weights, gradient).run(segments, gradient_scale=0.7)
    monkeypatch.setattr(native, "library", lambda: None)
    plain = State(n, weights, gradient).run(segments, gradient_scale=0.7)
    assert ulps(fused.master(), plain.master()) <= 1
    assert ulps(fused.m, plain.m) <= 1
    assert ulps(fused.v, plain.v) <= 1


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("weights", "gradient"), DTYPES)
def test_threads_and_instruction_set_change_no_bit(
    instruction_set: str, n: int, weights: torch.dtype, gradient: torch.dtype
) -> None:
    segments = [segment(0, n // 3), segment(n // 3, n, weight_decay=0.0, lr=0.1)]
    expected = State(n, weights, gradient).run(segments, threads=1, instruction_set="portable")
    for threads in (1, 2, 3, 7):
        state = State(n, weights, gradient).run(segments, threads=threads, instruction_set=instruction_set)
        for got, wanted in zip(state.tensors(), expected.tensors(), strict=True):
            assert same_bits(got, wanted)


@needs_library
@settings(max_examples=50)
@given(
    words=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=80),
    scale=st.sampled_from([0.0, 1e-30, 0.5, 1.0, math.inf, math.nan]),
    threads=st.sampled_from([1, 2, 3, 7]),
)
def test_no_bit_pattern_tells_instruction_sets_apart(words: list[int], scale: float, threads: int) -> None:
    # Any 32 bits are a float: NaNs with payloads, infinities and denormals among them.
    raw = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)
    n = raw.numel()
    library = native.library()
    assert library is not None
    results = []
    for instruction_set in native.instruction_sets(library):
        weights, m, v, gradient = raw.clone(), raw.flip(0), raw.roll(1), raw.roll(2)
        adamw(weights, None, gradient, m, v, [segment(0, n)], scale, threads, instruction_set)
        results.append((weights, m, v))
    for result in results[1:]:
        assert all(same_bits(got, wanted) for got, wanted in zip(result, results[0], strict=True))


@pytest.mark.parametrize(("weights", "gradient"), DTYPES)
def test_weights_and_moments_apart_have_the_bits_of_the_whole(path: str, weights: torch.dtype, gradient: torch.dtype) -> None:
    n = 40000
    segments = [segment(3, 10), segment(16, 30001, beta1=0.3), segment(30001, n - 5, weight_decay=0.0)]
    whole, parts = State(n, weights, gradient), State(n, weights, gradient)
    for seed in (2, 3):  # moments that are not zero
        whole.run(segments, seed, gradient_scale=0.7)
        before = [part.clone() for part in (parts.m, parts.v)]
        parts.run(segments, seed, gradient_scale=0.7, part=Part.WEIGHTS)
        assert same_bits(parts.master(), whole.master()) and all(map(same_bits, (parts.m, parts.v), before))
        before = [part.clone() for part in parts.tensors()[:-2]]
        parts.run(segments, seed, gradient_scale=0.7, part=Part.MOMENTS)
        assert all(map(same_bits, parts.tensors(), whole.tensors())) and all(map(same_bits, parts.tensors(), before))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_stored_nan_is_the_canonical_one(instruction_set: str) -> None:
    # Otherwise its sign and payload would depend on the order in which a compiler puts the operands of a sum.
    payloads = torch.tensor([0x7FC12345, -0x3EDCBB, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    weights, m, v = payloads.repeat(16), payloads.flip(0).repeat(16), payloads.roll(1).repeat(16)
    assert bool((weights.isnan() & m.isnan() & v.isnan()).all())
    adamw(weights, None, payloads.roll(2).repeat(16), m, v, [segment(0, 64)], instruction_set=instruction_set)
    for stored in (weights, m, v):
        assert bool((bits(stored) == 0x7FC00000).all())


@needs_library
def test_multiply_adds_divide_by_the_root_correction_as_a_division_does(tmp_path: Path) -> None:
    """Every mantissa, for ten pairs of beta2 and step; at 0.95 and 25 three results need the last of the multiply-adds."""
    scalars = [dict(zip(RULE.scalars, RULE.values(Options(1e-3, 0.9, beta2, 1e-8, 0.0), step), strict=True))
               for beta2 in (0.95, 0.999) for step in (1, 2, 7, 25, 10_000)]
    numbers = [repr(each[name]) for each in scalars for name in ("root_correction", "inverse", "rest")]
    program = tmp_path / "root_correction"
    (tmp_path / "rule.h").write_text(RULE.declarations())
    source = Path(__file__).parents[1] / "support" / "root_correction.cpp"
    flags = [flag for flag in native.FLAGS if flag != "-shared"]
    compile_it = [*native.compiler_command(), *flags, "-I", native.SOURCES, "-I", tmp_path, "-o", program, source]
    subprocess.run(compile_it, check=True)
    assert subprocess.check_output([program, *numbers], text=True) == "0\n"


@needs_library
def test_flush_to_zero_of_the_caller_changes_no_bit() -> None:
    n = 40000
    scale = 3e-19  # its square times 1 - beta2 is below FP32's smallest normal number
    expected = State(n, torch.float32).run([segment(0, n)], gradient_scale=scale)
    assert bool(((expected.v != 0) & (expected.v < 2**-126)).any()), "the test must meet denormals"
    assert torch.set_flush_denormal(True)
    try:
        flushed = State(n, torch.float32).run([segment(0, n)], gradient_scale=scale, threads=2)
    finally:
        torch.set_flush_denormal(False)
    for got, wanted in zip(flushed.tensors(), expected.tensors(), strict=True):
        assert same_bits(got, wanted)


def test_elements_outside_segments_keep_their_values(path: str) -> None:
    n = 50000
    before, after = State(n, torch.bfloat16), State(n, torch.bfloat16).run([segment(10, 20), segment(30000, 40000)])
    touched = torch.zeros(n, dtype=torch.bool)
    touched[10:20] = touched[30000:40000] = True
    for old, new in zip(before.tensors(), after.tensors(), strict=True):
        assert torch.equal(old[~touched], new[~touched])
    assert bool((after.m[touched] != 0).all())


def test_many_segments_equal_one(path: str) -> None:
    n = 40000
    bounds = [0, 0, 1, 2, 100, 16384, 16384, 16500, 39999, n]
    pieces = [segment(start, stop) for start, stop in itertools.pairwise(bounds)]
    whole, cut = State(n, torch.bfloat16).run([segment(0, n)]), State(n, torch.bfloat16).run(pieces)
    for got, wanted in zip(cut.tensors(), whole.tensors(), strict=True):
        assert same_bits(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_inf_survive_the_update(path: str, dtype: torch.dtype) -> None:
    state = State(64, dtype)
    master, gradient = torch.ones(64), torch.ones(64, dtype=dtype)
    master[0], master[1], master[2] = math.nan, math.inf, -math.inf
    gradient[3] = math.nan
    if dtype == torch.bfloat16:
        state.weights, state.remainder = host_update.split_fp32(master)
    else:
        state.weights = master
    adamw(state.weights, state.remainder, gradient, state.m, state.v, [segment(0, 64)])
    for result in (state.master(), state.weights.float()):
        assert math.isnan(result[0])
        assert result[1] == math.inf
        assert result[2] == -math.inf
        assert math.isnan(result[3])
        assert bool(result[4:].isfinite().all())
    assert math.isnan(state.m[3])
    assert math.isnan(state.v[3])


def test_segments_that_overlap_or_leave_the_tile_are_refused() -> None:
    for segments in ([segment(0, 5), segment(4, 8)], [segment(0, 9)], [segment(-1, 2)]):
        with pytest.raises(AssertionError, match="starts before"):
            State(8, torch.float32).run(segments)


# ---- FP32 master -----------------------------------------------------------------------------------------------------


def every_high_half() -> Tensor:
    low = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int64)
    high = torch.arange(1 << 16, dtype=torch.int64)
    return ((high[:, None] << 16) | low).flatten().to(torch.int32).view(torch.float32)


def test_split_and_join_return_every_master(path: str) -> None:
    master = every_high_half()
    joined = host_update.join_fp32(*host_update.split_fp32(master))
    assert torch.equal(bits(joined)[~master.isnan()], bits(master)[~master.isnan()])
    assert bool(joined[master.isnan()].isnan().all())


def test_weight_is_the_master_rounded_to_nearest_ties_away(path: str) -> None:
    master = every_high_half()
    weights, remainder = host_update.split_fp32(master)
    assert bool((weights.isnan() == master.isnan()).all()), "a NaN never rounds into inf or zero, nor comes from one"
    finite = master.isfinite()
    # On magnitudes, half up is ties away; beyond the largest bf16 comes inf, as in IEEE rounding.
    magnitude = bits(master).long() & 0x7FFFFFFF
    expected = ((magnitude + 0x8000) >> 16)[finite]
    assert torch.equal((bits(weights).long() & 0x7FFF)[finite], expected)
    assert torch.equal(weights.signbit()[finite], master.signbit()[finite])
    low = bits(master).long() & 0xFFFF
    assert torch.equal(remainder.long()[finite], torch.where(low >= 0x8000, low - 0x10000, low)[finite])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_split_and_join_are_the_same_on_every_instruction_set(instruction_set: str) -> None:
    master = every_high_half()
    expected = host_update.split_fp32(master, 1, "portable")
    got = host_update.split_fp32(master, 3, instruction_set)
    assert same_bits(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert same_bits(host_update.join_fp32(*got, 3, instruction_set), host_update.join_fp32(*expected, 1, "portable"))


# ---- norm, accumulate, copy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_that_of_double_precision(path: str, n: int, dtype: torch.dtype) -> None:
    gradient = random(n, dtype=dtype)
    assert host_update.norm(gradient) == pytest.approx(float(gradient.double().norm()), rel=1e-13)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_the_same_for_all_threads_and_instruction_sets(
    instruction_set: str, n: int, dtype: torch.dtype
) -> None:
    gradient = random(n, dtype=dtype)
    expected = host_update.squared_norm(gradient, 1, "portable")
    assert {host_update.squared_norm(gradient, threads, instruction_set) for threads in (1, 2, 3, 7)} == {expected}


def test_norm_propagates_nan_and_inf(path: str) -> None:
    gradient = random(40000)
    gradient[39999] = -math.inf
    assert host_update.norm(gradient) == math.inf
    gradient[17] = math.nan
    assert math.isnan(host_update.norm(gradient))
    assert host_update.norm(torch.full((4,), 3e38)) == pytest.approx(6e38, rel=1e-6), "a sum of squares beyond FP32's range"


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("destination", "source"), DTYPES)
def test_accumulate_adds_in_fp32_and_rounds_once(
    path: str, n: int, overwrite: bool, destination: torch.dtype, source: torch.dtype
) -> None:
    left, right = random(n, 1, destination), random(n, 2, source)
    if n > 1:
        right[0], right[1] = math.nan, -math.inf
    expected = (right if overwrite else left.float() + right.float()).to(destination)
    host_update.accumulate(left, right, overwrite=overwrite)
    assert torch.equal(left.isnan(), expected.isnan())
    assert torch.equal(left.nan_to_num(), expected.nan_to_num())


def test_fp32_gradients_round_to_bf16_ties_to_even_and_nan_stays_nan(path: str) -> None:
    source = every_high_half()
    got = torch.empty(source.numel(), dtype=torch.bfloat16)
    host_update.accumulate(got, source, overwrite=True)
    assert torch.equal(got.isnan(), source.isnan()), "a NaN with a full payload must not carry into zero"
    assert same_bits(got[~source.isnan()], source.bfloat16()[~source.isnan()])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_accumulate_is_the_same_for_all_threads_and_instruction_sets(instruction_set: str) -> None:
    source = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    start = source.flip(0)
    expected = start.clone()
    host_update.accumulate(expected, source, False, 1, "portable")
    for threads in (1, 2, 3, 7):
        got = start.clone()
        host_update.accumulate(got, source, False, threads, instruction_set)
        assert same_bits(got, expected)


@pytest.mark.parametrize("n", [*SIZES, 3_000_001])
@pytest.mark.parametrize("offset", [0, 1, 63])
def test_copy_moves_every_byte_and_no_other(path: str, n: int, offset: int) -> None:
    source = torch.arange(n, dtype=torch.int64).to(torch.uint8)
    destination = torch.full((n + 128,), 7, dtype=torch.uint8)
    host_update.copy(destination[offset : offset + n], source, threads=3 if path == "native" else None)
    assert torch.equal(destination[offset : offset + n], source)
    assert bool((destination[:offset] == 7).all())
    assert bool((destination[offset + n :] == 7).all())


@needs_library
def test_norm_blocks_of_both_paths_are_equal() -> None:
    library = native.library()
    assert library is not None
    assert library.megacompile_chunk_elements() == host_update._NORM_BLOCK
