"""Values that no machine can handle are refused at once, in a short message: numbers, names, repetitions."""
from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_models

import megacompile
from megacompile.errors import LONGEST_MESSAGE, ArgumentError, CheckpointError, MegacompileError, listed, shortened
from megacompile.ir import text
from megacompile.ir.plan import Plan, split
from megacompile.planning.config import StreamConfig
from megacompile.predict.hardware import Hardware
from megacompile.sizes import LARGEST, MOST_MICRO_BATCHES, parse_bytes

OPTIONS = sorted(LARGEST.keys() & StreamConfig.__dataclass_fields__.keys())


@pytest.mark.parametrize("name", OPTIONS)
def test_options_beyond_what_any_machine_has_are_refused(name: str) -> None:
    StreamConfig.of(**{name: LARGEST[name]})
    for more in (1, 2**62, 10**5000):
        with pytest.raises(MegacompileError, match=f"{name} must be .* at least . and at most {LARGEST[name]:,}, not"):
            StreamConfig.of(**{name: LARGEST[name] + more})


@pytest.mark.parametrize(("options", "message"), [
    (dict(batch=2**62), "batch must be a whole number of at least 1 and at most"),
    (dict(length=2**62), "length must be a whole number of at least 1 and at most"),
    (dict(batch=100_000, micro_batch_size=1), "100,000 micro-batches are more than the 16,384"),
    (dict(device="cuda:99999999999"), "device must be 'cpu' or 'cuda'"),
    (dict(device_memory="9" * 5000), "is not an amount of memory"),
    (dict(residuals="x" * 10**6), "residuals must be one of"),
    (dict(resident=("x" * 10**6,)), "resident names xxx"),
    (dict(resident=tuple(f"x{n}" for n in range(10**5))), "and 99,980 more, which are not tiles"),
])
def test_a_schedule_that_cannot_be_is_refused_in_a_short_message(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MegacompileError) as caught:
        megacompile.schedule(tiny_models.build(), **{"batch": 4, "length": 8, "device": "cpu", **options})
    assert message in str(caught.value) and len(str(caught.value)) < 1000


def test_a_plan_has_at_most_so_many_micro_batches() -> None:
    assert len(split(MOST_MICRO_BATCHES, 1)) == MOST_MICRO_BATCHES
    with pytest.raises(MegacompileError, match="micro-batches are more than"):
        split(MOST_MICRO_BATCHES + 1, 1)
    with pytest.raises(MegacompileError, match="micro-batches are more than"):
        Plan(20_000, 8, (1,) * 20_000)


@pytest.mark.parametrize("size", ["9" * 400, "9" * 5000, "9" * 40 + "TiB", 2**63, float("inf"), float("nan")])
def test_an_amount_of_memory_is_one_that_a_machine_may_have(size: Any) -> None:
    with pytest.raises(MegacompileError, match="is not an amount of memory"):
        parse_bytes(size)
    with pytest.raises(MegacompileError, match="is not an amount of memory"):
        parse_bytes(10**5000)  # of which Python makes no text


@pytest.mark.parametrize("name", ["x" * 10**6, "a/" * 10**5, "nul\0"])
def test_hardware_that_cannot_be_a_file_is_refused_in_a_short_message(name: str) -> None:
    with pytest.raises(ArgumentError, match="unknown hardware") as caught:
        Hardware.find(name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", '{"gemm_flops": 3}', "\xff"])
def test_a_file_that_describes_no_hardware_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(text, encoding="latin-1")
    with pytest.raises(MegacompileError, match="does not describe hardware"):
        Hardware.find(tmp_path / "mine.json")


def test_no_message_is_longer_than_people_read() -> None:
    error = CheckpointError("cause " + "x" * 10**6 + " remedy")
    assert len(str(error)) == LONGEST_MESSAGE
    assert str(error).startswith("cause ") and str(error).endswith(" remedy") and "(1,000,013 characters)" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert shortened("x" * 200) == "x" * 200 and len(shortened("x" * 201)) == 200
    assert listed(["a", "b"]) == "a, b" and listed(["a", "b", "c"], most=2) == "a, b, and 1 more"


def test_a_text_of_any_length_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LONGEST_TEXT", 1000)
    with pytest.raises(MegacompileError, match="the program cannot be read: it has more than 1,000 characters"):
        text.source_text("/dev/zero")
