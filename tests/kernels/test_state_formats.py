"""Rules and formats of state: the same bits however an update is divided, rounding without bias, and the rules of PyTorch."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megacompile.runtime.optimizer import host_update, native, state_format
from megacompile.runtime.optimizer.host_update import Moments, split_fp32
from megacompile.runtime.optimizer.rule import Part, Rule, Segment
from megacompile.runtime.optimizer.state_format import BFLOAT16, BLOCK, EIGHT_BITS, FLOAT32, FORMATS, StateFormat
from megacompile.streaming.optimizer import adamw, lion, sgd

RULES: dict[str, tuple[Rule, object]] = {
    "adamw": (adamw.RULE, adamw.Options(1e-2, 0.9, 0.99, 1e-8, 0.1)),
    "lion": (lion.RULE, lion.Options(1e-3, 0.9, 0.99, 0.1)),
    "sgd": (sgd.RULE, sgd.Options(1e-1, 0.9, 0.0, 0.01, False)),
}
#: dtype of weights, and whether bf16 weights have an exact master.
MASTERS = {"fp32": (torch.float32, True), "bf16": (torch.bfloat16, True), "bf16 alone": (torch.bfloat16, False)}
needs_library = pytest.mark.skipif(native.library() is None, reason="no compiler: the PyTorch path is all there is")
rules = pytest.mark.parametrize(("rule", "options"), RULES.values(), ids=RULES)
masters = pytest.mark.parametrize(("dtype", "exact"), MASTERS.values(), ids=MASTERS)
formats = pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)


def random(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Parameter:
    """A parameter with its state, in memory of its own."""

    def __init__(self, rule: Rule, stored: StateFormat, dtype: torch.dtype, exact: bool, count: int = 5000) -> None:
        self.rule, self.count, self.remainder = rule, count, None
        self.weights = random(count, 1)
        if dtype == torch.bfloat16:
            self.weights, low = split_fp32(self.weights)
            self.remainder = low if exact else None
        values = tuple(torch.zeros(count, dtype=stored.dtype) for _ in rule.moments)
        scales = tuple(torch.zeros(stored.scales(count)) for _ in rule.moments if stored.scaled)
        self.moments = Moments(stored, values, scales)

    def segment(self, options: object, step: int, start: int = 0, stop: int | None = None) -> tuple[Segment, Moments]:
        stop, found = self.count if stop is None else stop, self.moments
        return (Segment(start, stop, options, step, first=start, seed=99),
                Moments(found.format, tuple(each[start:stop] for each in found.values),
                        tuple(each[start // BLOCK:] for each in found.scales)))

    def steps(self, options: object, count: int = 3, cuts: tuple[int, ...] = (), parts: tuple[Part, ...] = (Part.WHOLE,),
              **execution: object) -> Parameter:
        bounds = [*itertools.pairwise([0, *cuts, self.count])]
        for step in range(1, count + 1):
            for part in parts:
                host_update.update(self.rule, self.weights, self.remainder, random(self.count, 10 + step),
                                   [self.segment(options, step, *each) for each in bounds], 0.7, part=part,
                                   **execution)  # type: ignore[arg-type]
        return self

    def bits(self) -> list[bytes]:
        kept = [self.weights, *([] if self.remainder is None else [self.remainder]), *self.moments.values, *self.moments.scales]
        return [each.view(torch.uint8).numpy().tobytes() for each in kept]


# ---------------------------------------------------------------- bits
@needs_library
@rules
@masters
@formats
def test_an_update_has_the_same_bits_however_it_is_divided(
        rule: Rule, options: object, dtype: torch.dtype, exact: bool, stored: StateFormat) -> None:
    expected = Parameter(rule, stored, dtype, exact).steps(options, threads=1).bits()
    library = native.library()
    assert library is not None
    for instruction_set in native.instruction_sets(library):
        for threads in (1, 3):
            again = Parameter(rule, stored, dtype, exact)
            assert again.steps(options, threads=threads, instruction_set=instruction_set).bits() == expected
    assert Parameter(rule, stored, dtype, exact).steps(options, cuts=(256, 1024, 4096)).bits() == expected
    if rule.separable:
        assert Parameter(rule, stored, dtype, exact).steps(options, parts=(Part.WEIGHTS, Part.MOMENTS)).bits() == expected


@needs_library
@rules
@masters
@formats
def test_the_path_in_pytorch_has_the_bits_of_the_kernels(
        rule: Rule, options: object, dtype: torch.dtype, exact: bool, stored: StateFormat,
        monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Parameter(rule, stored, dtype, exact).steps(options, count=1)
    monkeypatch.setattr(native, "library", lambda: None)
    plain = Parameter(rule, stored, dtype, exact).steps(options, count=1)
    different = sum(a != b for ours, theirs in zip(kernels.bits(), plain.bits(), strict=True)
                    for a, b in zip(ours, theirs, strict=True))
    assert different <= 20, "some of 5,000 numbers are an ulp apart, as a fused multiply-add is"


def test_only_the_order_of_moments_and_weights_may_be_exchanged_where_they_do_not_depend_on_each_other() -> None:
    assert [rule.separable for rule, _ in RULES.values()] == [True, True, False]


# ---------------------------------------------------------------- rounding
def test_a_bf16_number_that_changes_by_less_than_half_a_step_follows_its_mean() -> None:
    """Rounding to the nearest would leave a second moment where it is: it changes by 0.1% a step."""
    rule, options = adamw.RULE, adamw.Options(0.0, 0.9, 0.999, 1e-8, 0.0)
    parameter = Parameter(rule, BFLOAT16, torch.float32, True, count=4096)
    parameter.moments.values[1].fill_(1.0)
    gradient = torch.full((4096,), 2.0)
    for step in range(1, 1001):
        host_update.update(rule, parameter.weights, None, gradient, [parameter.segment(options, step)])
    exact = 4 + (1 - 4) * 0.999 ** 1000
    assert parameter.moments.values[1].float().mean().item() == pytest.approx(exact, rel=2e-3)
    assert torch.full((4096,), 1.0).mul(0.999).add(0.004).bfloat16().eq(1).all(), "to the nearest"


@pytest.mark.parametrize("signed", [False, True])
def test_eight_bits_round_to_a_neighbour_and_have_the_right_mean(signed: bool) -> None:
    count = BLOCK * 64
    values = random(count, 3).abs() ** 3
    values = values * torch.where(random(count, 4) < 0, -1, 1) if signed else values
    codes, scales = state_format.store_codes(values, torch.zeros(count, dtype=torch.int64), signed)
    # A block in which each code occurs, with a scale of 1, says which numbers there are.
    table = state_format.load_codes(torch.arange(256).to(torch.uint8), torch.ones(1), signed).unique()
    inside = values / scales.repeat_interleave(BLOCK)
    above = torch.searchsorted(table, inside).clamp(1, len(table) - 1)
    lower, upper = (table[at] * scales.repeat_interleave(BLOCK) for at in (above - 1, above))
    mean, numbers, rounds = torch.zeros(count), torch.arange(count), 400
    for number in range(rounds):
        codes, _ = state_format.store_codes(values, state_format.random_bits(number, numbers) & 0xFFFF, signed)
        found = state_format.load_codes(codes, scales, signed)
        mean += found / rounds
        assert torch.minimum((found - lower).abs(), (found - upper).abs()).max() <= 1e-6 * values.abs().max()
    between = (inside > table[0]) & (inside < table[-1]) & ((inside.abs() > table[1]) | torch.tensor(signed))
    error = ((mean - values) / (upper - lower))[between]
    assert error.abs().mean() < 0.03 and error.mean().abs() < 0.002, "in steps between neighbours"


def test_eight_bits_keep_the_largest_of_a_block_and_never_a_zero_where_the_second_moment_is_not_zero() -> None:
    """A zero there would make a step as large as 1 / eps."""
    values = torch.cat([torch.tensor([1e-30, 0.0, 3.0]), torch.full((BLOCK - 3,), 1e-7)])
    codes, scales = state_format.store_codes(values, torch.zeros(BLOCK, dtype=torch.int64), signed=False)
    found = state_format.load_codes(codes, scales, signed=False)
    assert scales.tolist() == [3.0] and found[2] == 3.0
    assert found[1] == 0 and (found[values > 0] > 0).all()


def test_eight_bits_keep_the_sign_and_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([1.0, -1.0, 0.5, -1e-3] + [0.0] * (BLOCK - 4) + [float("inf")] + [1.0] * (BLOCK - 1))
    codes, scales = state_format.store_codes(values, torch.full((2 * BLOCK,), 1 << 15), signed=True)
    found = state_format.load_codes(codes, scales, signed=True)
    assert found[:4].sign().tolist() == [1, -1, 1, -1] and not found[4:BLOCK].any()
    assert scales[1] == float("inf") and not found[BLOCK:].isfinite().any(), "later steps say that it is not finite"


@formats
def test_bytes_of_moments(stored: StateFormat) -> None:
    assert stored.bytes(1024) == {FLOAT32: 4096, BFLOAT16: 2048, EIGHT_BITS: 1024 + 16}[stored]


# ---------------------------------------------------------------- the rules
@pytest.mark.parametrize("options", [
    sgd.Options(0.1, 0.0, 0.0, 0.0, False), sgd.Options(0.1, 0.9, 0.0, 0.01, False), sgd.Options(0.1, 0.9, 0.3, 0.0, False),
    sgd.Options(0.1, 0.9, 0.0, 0.01, True)], ids=str)
def test_sgd_is_that_of_pytorch(options: sgd.Options) -> None:
    theirs = torch.nn.Parameter(random(1000, 1).double())
    reference = torch.optim.SGD([theirs], lr=options.lr, momentum=options.momentum, dampening=options.dampening,
                                weight_decay=options.weight_decay, nesterov=options.nesterov)
    ours = Parameter(sgd.RULE, FLOAT32, torch.float32, True, count=1000)
    for step in range(1, 11):
        gradient = random(1000, step)
        theirs.grad = gradient.double()
        reference.step()
        host_update.update(sgd.RULE, ours.weights, None, gradient, [ours.segment(options, step)])
    torch.testing.assert_close(ours.weights.double(), theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_whose_momentum_is_changed_between_steps_is_that_of_pytorch(nesterov: bool) -> None:
    theirs = torch.nn.Parameter(random(1000, 1).double())
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=nesterov)
    ours = Parameter(sgd.RULE, FLOAT32, torch.float32, True, count=1000)
    for step, momentum in enumerate((0.0, 0.0, 0.9, 0.8, 0.0, 0.9, 0.9), 1):
        gradient = random(1000, step)
        theirs.grad, reference.param_groups[0]["momentum"] = gradient.double(), momentum
        reference.step()
        options = sgd.Options(0.1, momentum, 0.0, 0.0, nesterov)
        host_update.update(sgd.RULE, ours.weights, None, gradient, [ours.segment(options, step)])
        torch.testing.assert_close(ours.weights.double(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_lion_is_that_of_its_paper() -> None:
    """Algorithm 2 of Chen et al. 2023, in double precision."""
    lr, beta1, beta2, decay = 1e-2, 0.9, 0.99, 0.1
    ours = Parameter(lion.RULE, FLOAT32, torch.float32, True, count=1000)
    weights, moment = ours.weights.double(), torch.zeros(1000, dtype=torch.float64)
    for step in range(1, 11):
        gradient = random(1000, step)
        host_update.update(lion.RULE, ours.weights, None, gradient,
                           [ours.segment(lion.Options(lr, beta1, beta2, decay), step)])
        direction = (beta1 * moment + (1 - beta1) * gradient.double()).sign()
        weights = weights - lr * (direction + decay * weights)
        moment = beta2 * moment + (1 - beta2) * gradient.double()
    torch.testing.assert_close(ours.weights.double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.moments.values[0].double(), moment, rtol=1e-5, atol=1e-6)
