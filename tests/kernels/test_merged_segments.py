"""The device updates neighboring parameters with one kernel where that changes no bit."""
from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megacompile.runtime.memory.state_layout import ElementState, StateLayout
from megacompile.runtime.optimizer import host_update
from megacompile.runtime.optimizer.device_update import merged
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import Segment
from megacompile.runtime.optimizer.state_format import FLOAT32, FORMATS, StateFormat
from megacompile.streaming.optimizer.adamw import RULE, Options

COUNTS = (64, 128, 96, 32, 64)
DECAYED, PLAIN = (Options(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=decay) for decay in (0.1, 0.0))
ADAMW = (DECAYED, DECAYED, PLAIN, PLAIN, DECAYED)


def pairs(state: ElementState, counts: tuple[int, ...] = COUNTS, seed: int = 0) -> list[tuple[Segment, Moments]]:
    """Segments of parameters that lie side by side, with moments in a tile's layout."""
    layout = StateLayout((state,) * len(counts), counts)
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.rand(size // 4, generator=generator).view(torch.uint8) for size in layout.moment_bytes]
    found, start = [], 0
    for position, (count, options) in enumerate(zip(counts, ADAMW, strict=False)):
        segment = Segment(start, start + count, options, step=3, seed=position, position=position)
        found.append((segment, layout.at(buffers, position, 0, count)))
        start += count
    return found


def spans(found: list[tuple[Segment, Moments]]) -> list[tuple[int, int]]:
    return [(segment.start, segment.stop) for segment, _ in found]


def test_parameters_with_the_same_options_are_one_segment() -> None:
    assert spans(merged(pairs(ElementState()), exact=True)) == [(0, 192), (192, 320), (320, 384)]


@pytest.mark.parametrize("stored", [each for each in FORMATS.values() if each != FLOAT32], ids=lambda each: each.name)
def test_random_bits_and_scales_belong_to_a_parameter(stored: StateFormat) -> None:
    there = pairs(ElementState(format=stored), counts=(256, 256))
    assert spans(merged(there, exact=True)) == [(0, 256), (256, 512)]


def test_masters_that_are_rounded_at_random_are_not_merged() -> None:
    assert spans(merged(pairs(ElementState()), exact=False)) == spans(pairs(ElementState()))


def test_what_lies_apart_or_has_done_other_steps_is_not_merged() -> None:
    ragged = pairs(ElementState(), counts=(60, 64))  # the moments of the second begin on a cache line
    assert len(merged(ragged, exact=True)) == 2
    (first, m), (second, v) = pairs(ElementState())[:2]
    assert len(merged([(first, m), (dataclasses.replace(second, step=4), v)], exact=True)) == 2
    assert len(merged([(first, m), (dataclasses.replace(second, start=70), v)], exact=True)) == 2


def test_a_merged_segment_has_the_bits_of_its_parts() -> None:
    def updated(merge: bool) -> list[Tensor]:
        there = pairs(ElementState())
        weights = torch.randn(sum(COUNTS), generator=torch.Generator().manual_seed(1))
        gradient = torch.randn(sum(COUNTS), generator=torch.Generator().manual_seed(2))
        parts = merged(there, exact=True) if merge else there
        whole = [(segment, Moments(FLOAT32, tuple(values.as_strided((segment.stop - segment.start,), (1,))
                                                  for values in moments.values))) for segment, moments in parts]
        host_update.update(RULE, weights, None, gradient, whole)
        return [weights, *(values for _, moments in there for values in moments.values)]

    assert all(map(torch.equal, updated(True), updated(False)))
