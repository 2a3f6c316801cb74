"""Where the optimizer's state of a tile is: for each moment a buffer, in which each parameter has a region.

    moment 0    exp_avg of parameter a | of parameter b | of parameter c
    moment 1    exp_avg_sq of a        | of b

A region holds the values of a parameter's elements in its format, then the scales of its blocks, if the format has any.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.state_format import BLOCK, FLOAT32, StateFormat

#: Alignment of regions in bytes, so that no two share a cache line.
_ALIGNED = 128


def aligned_bytes(count: int) -> int:
    """The number of bytes, rounded up with padding."""
    return -(-count // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class ElementState:
    """The state that an optimizer stores for each element of a parameter: moments by name, in a format, and whether a bf16
    weight has an exact FP32 master, whose low bits are its remainder. `whole`: an update reads the whole matrix at once, on the
    device. `separable`: moments may be updated later than weights (`Rule`). `rule`: the name of
    what updates the element."""

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    format: StateFormat = FLOAT32
    exact: bool = True
    whole: bool = False
    separable: bool = True
    rule: str = "adamw"

    def bytes(self, dtype: torch.dtype) -> float:
        """Approximate bytes of an element of this dtype."""
        return self.moment_bytes + (2 if self.exact and dtype == torch.bfloat16 else 0)

    @property
    def moment_bytes(self) -> float:
        """Bytes of the moments of an element."""
        return len(self.moments) * (self.format.value_bytes + (4 / BLOCK if self.format.scaled else 0.0))


#: AdamW's default state.
ADAMW_STATE = ElementState()
#: The state of a frozen parameter.
NO_STATE = ElementState((), FLOAT32, exact=False, rule="")


@dataclass(frozen=True)
class StateLayout:
    """`states` and `counts`: the state of each parameter of a tile, and the number of its elements with padding."""

    states: tuple[ElementState, ...]
    counts: tuple[int, ...]

    @property
    def moments(self) -> int:
        """The number of buffers."""
        return max((len(state.moments) for state in self.states), default=0)

    @functools.cached_property
    def _regions(self) -> list[list[int]]:
        """For each moment, the byte at which each parameter's region begins, and the total bytes."""
        return [self._begins(moment) for moment in range(self.moments)]

    def _begins(self, moment: int) -> list[int]:
        begins = [0]
        for state, count in zip(self.states, self.counts, strict=True):
            size = state.format.bytes(count) if moment < len(state.moments) else 0
            begins.append(begins[-1] + aligned_bytes(size))
        return begins

    @property
    def moment_bytes(self) -> list[int]:
        """Bytes of each moment's buffer."""
        return [begins[-1] for begins in self._regions]

    def at(self, buffers: Sequence[Tensor], position: int, start: int, stop: int) -> Moments:
        """The moments of elements [start, stop) of a parameter. `buffers`: uint8, one for each moment. If there are scales,
        `start` is the first element of a block."""
        state = self.states[position]
        found = [self._views(buffers[moment], moment, position, start, stop) for moment in range(len(state.moments))]
        return Moments(state.format, tuple(values for values, _ in found),
                       tuple(scales for _, scales in found) if state.format.scaled else ())

    def _views(self, buffer: Tensor, moment: int, position: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        each, count = self.states[position].format, self.counts[position]
        begin = self._regions[moment][position]
        values = buffer[begin + start * each.value_bytes:begin + stop * each.value_bytes].view(each.dtype)
        scales = begin + count * each.value_bytes
        assert not each.scaled or (start % BLOCK == 0 and scales % 4 == 0), "a block has one scale"
        first, last = start // BLOCK, each.scales(stop)
        return values, buffer[scales + 4 * first:scales + 4 * last].view(torch.float32)

    def spans(self, position: int, count: int) -> dict[str, tuple[int, int, int]]:
        """The location of each stored tensor of the first `count` elements of a parameter, by name: (moment, first byte in its
        buffer, bytes)."""
        state, found = self.states[position], {}
        for moment, name in enumerate(state.moments):
            begin, values = self._regions[moment][position], state.format.value_bytes
            found[name] = moment, begin, values * count
            if state.format.scaled:
                found[scale_of(name)] = moment, begin + self.counts[position] * values, 4 * state.format.scales(count)
        return found

    def slack_bytes(self, shards: int) -> int:
        """The most bytes that the regions of this many shards take beyond those of the whole tile."""
        scaled = sum(state.format.scaled for state in self.states)
        return 0 if shards == 1 else 3 * _ALIGNED * scaled * self.moments * shards

    def named(self, buffers: Sequence[Tensor], position: int) -> Iterator[tuple[str, Tensor]]:
        """All stored tensors of a parameter by name, such as `exp_avg`, and `exp_avg_scale` if there are scales. [n]."""
        moments = self.at(buffers, position, 0, self.counts[position])
        for name, values in zip(self.states[position].moments, moments.values, strict=True):
            yield name, values
        for name, scales in zip(self.states[position].moments, moments.scales, strict=False):
            yield scale_of(name), scales


def scale_of(moment: str) -> str:
    """The name of the scales of a moment."""
    return f"{moment}_scale"

