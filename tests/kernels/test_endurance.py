"""What the endurance benchmark counts as growth."""
from __future__ import annotations

from typing import Any

import pytest
from endurance import Sample, drift, grown

from megacompile.errors import MegacompileError

FLAT: dict[str, Any] = dict(host_bytes=1000, device_bytes=500, threads=9, files=7, step_s=1.0)


def samples(name: str = "", per_sample: float = 0.0, until: int = 30) -> list[Sample]:
    """Thirty, of which one quantity grows from sample to sample."""
    found = []
    for number in range(30):
        values: dict[str, Any] = dict(FLAT)
        if name:
            values[name] += per_sample * min(number, until)
        found.append(Sample(**values))
    return found


@pytest.mark.parametrize(("name", "per_sample"), [
    ("host_bytes", 2.0), ("device_bytes", 1.0), ("threads", 1.0), ("files", 1.0), ("step_s", 0.002)])
def test_what_grows_to_the_end_is_found_and_what_only_warms_up_is_not(name: str, per_sample: float) -> None:
    assert grown(drift(samples()), 0.01, 0.01) is None
    assert grown(drift(samples(name, per_sample, until=10)), 0.01, 0.01) is None
    assert f"{name} by " in str(grown(drift(samples(name, per_sample)), 0.01, 0.01))


def test_too_few_samples_show_no_drift() -> None:
    with pytest.raises(MegacompileError, match="the run has 1 in all: give more --steps"):
        drift([Sample(**FLAT)])


def test_a_device_that_is_the_host_reserves_nothing() -> None:
    found = drift([Sample(**{**FLAT, "device_bytes": 0})] * 30)
    assert found["device_bytes"] == 0.0 and grown(found, 0.01, 0.01) is None
