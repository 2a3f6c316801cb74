"""Kernels of packed rows for any size (`dynamic=True`): the results of kernels for one size, compiled once."""
from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import engine
import pytest
import sympy
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_inductor import fresh_process
from torch import Tensor, fx

import megacompile
from megacompile.codegen.inductor import Inductor
from megacompile.errors import MegacompileError
from megacompile.frontend.templates import variants
from megacompile.frontend.templates.symbolic_sizes import UNIT, UNITS, CodeForAnySize, SymbolicSizes, can_be_symbols
from megacompile.frontend.templates.template import BATCH, LENGTH, Variant
from megacompile.ir.placement import Placements
from megacompile.ir.plan import PLAIN, BatchSpec, CaptureKey, Plan
from megacompile.planning.config import StreamConfig
from megacompile.planning.packed_plans import derived
from megacompile.streaming.programs import captures
from megacompile.streaming.programs.captures import Binder

#: Rows of 64 tokens in micro-batches of at most 5.
OPTIONS: dict[str, Any] = dict(device="cpu", compile=True, repack=64, micro_batch_size=5)
TRAINING = """
import json, sys
sys.path.insert(0, sys.argv[1])
import test_symbolic_sizes as tests
model = tests.streamed(dynamic=None)
packed, before = [tests.bits(model, tests.filling(rows)) for rows in (7, 2)], model.megacompile.stats
plain, after = tests.bits(model, tests.tiny_models.batch()), model.megacompile.stats
variants = [[stats[name] for name in ("variants_of_any_size", "compiled_variants")] for stats in (before, after)]
print(json.dumps([[packed, plain, variants, tests.held(model)], after["compiled"], after["compiled_from_cache"]]))
"""


def build() -> Any:
    return tiny_models.build(num_hidden_layers=1)


def streamed(dynamic: bool | None) -> Any:
    return megacompile.stream(build(), dynamic=dynamic, **OPTIONS)


def padded(lengths: list[int]) -> dict[str, Tensor]:
    return tiny_models.right_padded(lengths, seed=7)


def filling(rows: int) -> dict[str, Tensor]:
    """A batch that is packed into this many rows: of 60 tokens, but for two that share one."""
    return padded([60] * (rows - 1) + [30, 28])


def train(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a batch, whose gradients the parameters have then."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return cast(Tensor, loss.detach())


def bits(model: Any, batch: dict[str, Tensor]) -> list[str]:
    """Those of the loss, and of a sum over gradients. The embedding's is left out: inductor's code for the CPU adds it up with
    atomic operations of several threads, in any order."""
    loss = train(model, batch)
    gradients = [p.grad.double().abs().sum() for name, p in model.named_parameters() if "embed_tokens" not in name]
    assert gradients
    return [loss.item().hex(), sum(gradients).item().hex()]  # type: ignore[union-attr]


def packed_binder(model: Any) -> Binder:
    return next(served.binder for served in engine.captures(model) if served.captured.key.packed)


def held(model: Any) -> list[list[int]]:
    """For which of some numbers of rows each variant's code holds."""
    return [[rows for rows in (2, 64, 65, 4096) if code is not None and code.of(rows, 64)]
            for codes in packed_binder(model).for_any_size.values() for code in codes.values()]


def as_traced(inductor: Inductor, graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Stands for `Inductor.compile`: the graph with its symbols, op by op."""
    inductor.compiled += 1
    return copy.deepcopy(graph)


@pytest.fixture(scope="module", params=["as traced", pytest.param("inductor", marks=pytest.mark.nightly)])
def compiler(request: pytest.FixtureRequest) -> Iterator[str]:
    """Inductor and the C++ compiler take forty seconds for what these tests need. What is ours is the graphs with symbols, and
    for which sizes which code is made and used: graphs that run as they were traced show the same. (test_compiled_values.py
    trains packed rows through inductor's code for any size in every run.)"""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as traced":
            patch.setattr(Inductor, "compile", as_traced)
        yield request.param


@pytest.fixture(scope="module")
def dynamic(compiler: str) -> Iterator[Any]:
    """A model whose kernels serve any number of packed rows."""
    model = streamed(dynamic=None)
    yield model
    model.megacompile.close()


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1024, 2048, 4096]), st.booleans())
def test_rows_are_split_into_as_few_micro_batches_as_can_be_about_as_large(rows: int, size: int, length: int,
                                                                          whole_step: bool) -> None:
    base = Plan(4 * size, 2048, (size,) * 4, saved_layers=3, waves=2 if whole_step else 1,
                placements=Placements.named(host_sums=("a",) if whole_step else ()))
    spec = BatchSpec(rows, length, labels=True, training=True, whole_step=whole_step, capture=CaptureKey(("position_ids",)))
    plans = derived(base, spec, balanced=True)
    most = size * 2048 // length
    if most == 0:
        assert not plans, "a micro-batch holds less than a row"
        return
    fewest = -(-rows // most)
    assert len(plans[0].micro_batches) == fewest
    assert [len(plan.micro_batches) for plan in plans] == sorted(len(plan.micro_batches) for plan in plans)
    for plan in plans:
        sizes = plan.micro_batches
        assert sum(sizes) == rows and len(sizes) <= fewest + 2 and max(sizes) <= most
        assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)
        assert replace(plan, batch=base.batch, length=base.length, micro_batches=base.micro_batches, waves=base.waves,
                       placements=base.placements) == base


def test_plans_that_compute_some_tokens_of_each_row_at_a_time_serve_no_rows_of_another_length() -> None:
    base = Plan(1, 2048, (1,), token_chunk=512)
    specs = [BatchSpec(2, length, labels=True, training=True, capture=CaptureKey(("position_ids",))) for length in (1024, 2048)]
    assert [bool(derived(base, spec, balanced=True)) for spec in specs] == [False, True]


@pytest.mark.parametrize("otherwise", [{"compile": False}, {"dynamic": False}], ids=str)
def test_without_kernels_for_any_size_micro_batches_are_powers_of_two(dynamic: Any, otherwise: dict[str, Any]) -> None:
    assert dynamic.megacompile.compiled(filling(8)).plan.micro_batches == (4, 4)
    model = megacompile.stream(build(), **{**OPTIONS, **otherwise})
    try:
        assert model.megacompile.compiled(filling(8)).plan.micro_batches == (5, 2, 1)
    finally:
        model.megacompile.close()


@pytest.mark.parametrize("rows", [9, 2, 3, 4, 5, 6, 7, 8, 1])
def test_kernels_for_any_number_of_rows_train_as_native_pytorch(rows: int, dynamic: Any) -> None:
    native = build()
    torch.testing.assert_close(train(dynamic, filling(rows)), train(native, filling(rows)), rtol=1e-6, atol=0)
    tiny_models.assert_same_gradients(dynamic, native)
    assert dynamic.megacompile.plan.batch == rows
    assert {key[2:] for key in packed_binder(dynamic).compiled} <= {(1, 64)}, "a single row of few tokens"


def test_kernels_for_any_number_of_rows_give_what_those_for_one_number_give(dynamic: Any) -> None:
    model = streamed(dynamic=False)
    try:
        assert bits(model, filling(5)) == bits(dynamic, filling(5))
        assert model.megacompile.plan.micro_batches == dynamic.megacompile.plan.micro_batches == (5,)
        assert model.megacompile.stats["variants_of_any_size"] == 0 < dynamic.megacompile.stats["variants_of_any_size"]
    finally:
        model.megacompile.close()


def test_steps_of_random_lengths_compile_each_variant_once(dynamic: Any) -> None:
    source = random.Random(5)
    seen = set()
    for longest in 3 * (60, 120, 60, 250, 30):
        for _ in range(3):
            dynamic.zero_grad()
            rows = [source.randint(2, longest) for _ in range(source.randint(2, 17))]
            dynamic(**padded([longest, *rows])).loss.backward()
            plan = dynamic.megacompile.plan
            seen.update((size, plan.length) for size in plan.micro_batches)
    assert {rows for rows, _ in seen} >= {1, 2, 3, 4, 5} and {length for _, length in seen} == {64, 128, 256}
    stats, binder = dynamic.megacompile.stats, packed_binder(dynamic)
    assert {length for _, length in binder.for_any_size} == {None}
    assert {key[2:] for key in binder.compiled} <= {(1, 64)}, "a single row of few tokens"
    assert stats["compiled"] + stats["compiled_from_cache"] == stats["compiled_variants"]
    assert stats["compiled_variants"] == len(binder.for_any_size) + len(binder.compiled)


@pytest.mark.parametrize("lengths", [[100] * 7 + [30, 28], [250, 3, 120, 60], [125, 3], [200, 5]], ids=str)
def test_kernels_of_one_length_train_rows_of_another_as_native_pytorch(lengths: list[int], dynamic: Any) -> None:
    train(dynamic, filling(5))
    before, native = dynamic.megacompile.stats, build()
    torch.testing.assert_close(train(dynamic, padded(lengths)), train(native, padded(lengths)), rtol=1e-6, atol=0)
    tiny_models.assert_same_gradients(dynamic, native)
    assert dynamic.megacompile.plan.length in (128, 224, 256)
    after = dynamic.megacompile.stats
    assert [after[name] - before[name] for name in ("compiled", "compiled_from_cache", "compiled_variants")] == [0, 0, 0]


@pytest.mark.nightly(
    held_by="tests/model/test_inductor.py::test_code_in_a_folder_serves_and_is_compiled_anew_where_it_was_damaged")
def test_a_second_process_compiles_nothing_and_computes_the_same_bits(tmp_path: Path) -> None:
    """It finds the code of packed rows, what that assumes, and the code of plain batches, which is for their number of rows."""
    first, second = (fresh_process(TRAINING, tmp_path / "cache") for _ in range(2))
    found, compiled, from_cache = first
    *_, ((of_any_rows, before), (still_of_any_rows, after)), numbers = found
    assert compiled >= 8 and from_cache == 0
    assert of_any_rows == still_of_any_rows > 0 and after > before, "plain batches have kernels of their own"
    assert [2, 64] in numbers, "the test is about code that does not hold for all numbers"
    assert second == [found, 0, compiled]


def test_code_is_not_used_for_sizes_that_break_what_it_assumes() -> None:
    code = CodeForAnySize(lambda rows, units, x: (rows, units, x), (BATCH, UNITS), ((BATCH * UNITS, 1),),
                          (sympy.Le(BATCH * UNITS, 10),), lambda function, strides: lambda x: function((x, strides)))
    assert code.of(6, 2 * UNIT) is None and code.of(5, 3 * UNIT) is None
    assert code.of(5, 2 * UNIT + 1) is None and code.of(2, UNIT) is None
    assert code.of(1, 3 * UNIT) is None, "too few tokens"
    made, longer, single = code.of(5, 2 * UNIT), code.of(3, 3 * UNIT), code.of(1, 4 * UNIT)
    assert made is not None and made("x") == (5, 2, ("x", [(10, 1)]))
    assert longer is not None and longer("x") == (3, 3, ("x", [(9, 1)]))
    assert single is not None and single("x") == (1, 4, ("x", [(4, 1)])), "a single row needs no code of its own"
    assert code.of(5, 2 * UNIT) is made


@pytest.mark.nightly(held_by="tests/model/test_symbolic_sizes.py::test_steps_of_random_lengths_compile_each_variant_once")
def test_the_second_step_compiles_what_other_sizes_need(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where code for many tokens may not hold for few. Rows come in pairs of 2 x 128 tokens, or alone."""
    real, hints = captures.compile_for_any_size, []

    def of_many_or_few(variant: Variant, examples: Any, sizes: SymbolicSizes, inductor: Inductor) -> CodeForAnySize | None:
        tokens, many = BATCH * UNIT * UNITS, sizes.size(BATCH * LENGTH) >= 200  # type: ignore[operator]
        hints.append(bool(many))
        code = real(variant, examples, sizes, inductor)
        return code and replace(code, conditions=(tokens >= 200 if many else tokens < 200,))

    monkeypatch.setattr(captures, "compile_for_any_size", of_many_or_few)
    model = megacompile.stream(build(), device_memory="8GiB", **{**OPTIONS, "repack": 128, "micro_batch_size": 2})
    native = build()
    try:
        for rows, codes in ((6, {True}), (6, {True, False}), (5, {True, False})):
            before = len(hints)
            batch = padded([120] * (rows - 1) + [60, 58])
            torch.testing.assert_close(train(model, batch), train(native, batch), rtol=1e-6, atol=0)
            tiny_models.assert_same_gradients(model, native)
            assert {*hints} == codes and (len(hints) > before) == (rows == 6)
        assert model.megacompile.plan.micro_batches == (2, 2, 1)
        binder = packed_binder(model)
        assert not binder.compiled and len(hints) == binder.variants_of_any_size
        assert len(hints) == 2 * len(binder.for_any_size), "one code serves all that are few"
    finally:
        model.megacompile.close()


def test_of_the_sizes_that_code_is_tuned_for_one_has_nearly_as_many_tokens(dynamic: Any) -> None:
    """On a GPU, code of some layers holds from 5,120 to 8,192 tokens only."""
    train(dynamic, filling(5))
    for batch, length in ((4, 1792), (3, 1824), (7, 320), (1, 1056), (40, 2048)):
        hints = packed_binder(dynamic)._hints(batch, length, True)
        assert any(0.75 * batch * length < rows * each <= batch * length for rows, each in hints)
        assert all(can_be_symbols(*hint) == (BATCH, UNITS) and hint[0] > 1 for hint in hints)


def test_a_size_that_something_asks_for_is_fixed() -> None:
    sizes = SymbolicSizes(8, 64, (BATCH, UNITS))
    rows, units = sizes.numbers
    assert rows != 1 and units != 1 and not sizes.are_fixed and not sizes.conditions(), "sizes of at least 2 are not 1"
    assert sizes.size(LENGTH) % 16 == 0 and not sizes.conditions(), "what divides a length is known"
    assert sizes.size(BATCH * LENGTH) <= 4096 and not sizes.are_fixed
    (condition,) = sizes.conditions()
    assert [bool(condition.subs({BATCH: 2, UNITS: units})) for units in (64, 65)] == [True, False]
    assert int(units) == 2 and sizes.are_fixed  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "symbols"), [
    ((2, 64), (BATCH, UNITS)), ((1, 128), (BATCH, UNITS)), ((1, 96), ()), ((2, 32), (BATCH,)), ((2, 65), (BATCH,)),
    ((1, 32), ())])
def test_sizes_with_as_many_tokens_as_two_rows_of_two_units_can_be_symbols(
        size: tuple[int, int], symbols: tuple[sympy.Symbol, ...]) -> None:
    assert can_be_symbols(*size) == symbols


@pytest.fixture
def fixing_model(compiler: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model whose loss fixes the number of rows: without Python's kernels, padding its labels does."""
    monkeypatch.setattr(variants, "enable_python_dispatcher", contextlib.nullcontext)
    model = streamed(dynamic=None)
    yield model
    model.megacompile.close()


def test_variants_that_fix_the_number_of_rows_are_compiled_for_each(fixing_model: Any) -> None:
    native = build()
    for rows in (3, 2):
        torch.testing.assert_close(train(fixing_model, filling(rows)), train(native, filling(rows)), rtol=1e-6, atol=0)
        tiny_models.assert_same_gradients(fixing_model, native)
    binder = packed_binder(fixing_model)
    fixed = {variant for (variant, _), codes in binder.for_any_size.items() if None in codes.values()}
    assert "loss" in {variant.name for variant in fixed}
    assert len(fixed) < len({variant for variant, _ in binder.for_any_size})
    assert {(variant, batch) for variant, _, batch, _ in binder.compiled} == {(v, rows) for v in fixed for rows in (2, 3)}


@pytest.mark.nightly(
    held_by="tests/model/test_symbolic_sizes.py::test_variants_that_fix_the_number_of_rows_are_compiled_for_each")
def test_variants_that_do_not_compile_with_a_symbol_are_compiled_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = Inductor.compile

    def without_symbols(inductor: Inductor, graph: Any, examples: Any) -> Any:
        if any(isinstance(each, torch.SymInt) for each in examples):
            raise RuntimeError("symbols are unknown")
        return compile_(inductor, graph, examples)

    monkeypatch.setattr(Inductor, "compile", without_symbols)
    model, native = streamed(dynamic=None), build()
    torch.testing.assert_close(train(model, filling(5)), train(native, filling(5)), rtol=1e-6, atol=0)
    tiny_models.assert_same_gradients(model, native)
    assert model.megacompile.stats["variants_of_any_size"] == 0 < model.megacompile.stats["compiled_variants"]
    model.megacompile.close()


def test_code_is_kept_while_a_packed_shape_lives(dynamic: Any) -> None:
    train(dynamic, filling(5))
    executables, binder = engine.executables(dynamic), packed_binder(dynamic)
    executables.limit = 2
    for rows in (2, 3, 4):
        dynamic.megacompile.compiled(filling(rows))
    assert {length for _, length in binder.for_any_size} >= {None}
    dynamic(**tiny_models.batch(rows=2, length=6)).loss.backward()  # what was trained last stays
    for length in (7, 8):
        dynamic.megacompile.compiled(tiny_models.batch(rows=2, length=length))
    assert not binder.for_any_size and not binder.compiled


def test_forms_with_positions_alone_are_packed() -> None:
    assert CaptureKey(("position_ids",)).packed and CaptureKey(("position_ids",), evaluating=True).packed
    assert not PLAIN.packed and not CaptureKey(("attention_mask", "position_ids")).packed


def test_dynamic_is_true_or_false() -> None:
    with pytest.raises(MegacompileError, match="dynamic must be True or False, not 'rows'"):
        StreamConfig(dynamic="rows")  # type: ignore[arg-type]
