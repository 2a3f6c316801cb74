"""The rule of an optimizer as data: what state it keeps, its arithmetic for one element, and which numbers that needs."""
from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


class Part(enum.IntEnum):
    """The part of an update that is stored. Storing the weights, then the moments, gives the same bits as the whole. The next
    forward needs only the weights, which are two thirds of the traffic."""

    WHOLE = 0
    WEIGHTS = 1
    MOMENTS = 2


@dataclass(frozen=True)
class Moment:
    """A number that a rule stores for each element, such as `exp_avg`. `signed`: it may be negative."""

    name: str
    signed: bool


@dataclass(frozen=True)
class Rule:
    """An elementwise update. A new one is a file with a `Rule` and a class of `StreamedOptimizer` (see `lion.py`), here or in a
    user's own code. To be known by a name, in `--optim` and in TrainingArguments, it needs an entry in `OPTIMIZERS` of
    `megacompile/streaming/optimizer/names.py`; to be found as `megacompile.Name`, one in `megacompile/__init__.py`.

    Attributes:
        name: for messages, such as "lion".
        moments: the numbers that it keeps for each element, one or two.
        scalars: the names of the numbers that `code` reads, the same for all elements of a parameter.
        code: the body of a C++ function, compiled for the host and for the device. `master` (float&) is the weight, `gradient`
            (float) is already clipped, `moments` (float*) are read and written, and `s` has the scalars. Arithmetic is on
            `Exact` numbers (`csrc/values.h`), so that both give the same bits.
        functions: C++ functions that `code` calls.
        values: the scalars of a parameter, from its group's options and its step, which counts from 1.
        reference: the same update in PyTorch, in place, on fp32 tensors: (master, gradient, moments, options, step).
        separable: whether moments do not depend on weights, so that they may be updated later than these.
    """

    name: str
    moments: tuple[Moment, ...]
    scalars: tuple[str, ...]
    code: str
    values: Callable[[Any, int], tuple[float, ...]]
    reference: Callable[[Tensor, Tensor, list[Tensor], Any, int], None]
    functions: str = ""
    separable: bool = True

    def declarations(self) -> str:
        """The rule's C++ definitions for `update.cpp` and `update.cu`."""
        fields = "".join(f"  float {name};\n" for name in self.scalars)
        signed = " || ".join(f"k == {k}" for k, moment in enumerate(self.moments) if moment.signed) or "false"
        return (f"struct Scalars {{\n{fields}}};\nconstexpr int kCount = {len(self.moments)};\n"
                f"INLINE constexpr bool is_signed(int k) {{ return {signed}; }}\n{self.functions}"
                f"INLINE void apply(float& master, float gradient, float* moments, const Scalars& s) {{\n{self.code}\n}}\n")


@dataclass(frozen=True)
class MatrixRule:
    """An update that reads whole matrices, on the device: two elementwise rules, with products of matrices between them.

        direction = momentum(gradient, moment)      fp32; stores the moment
        direction = rule.direction(direction)       products of matrices
        weights(master, direction)                  stores the weights

    Attributes:
        name: as in "--optim muon".
        momentum: an elementwise rule whose `master` is the direction, which it only writes.
        weights: an elementwise rule without moments, whose `gradient` is the direction.
        options_of: what the rule reads of a group's options for a parameter of some shape, copied by value.
        matrices: the sizes (rows, columns) of the matrices of a parameter, in their order in its memory, where each is
            contiguous; from the options of its segment.
        options_for: the options for one of these matrices: (options, rows, columns).
        direction: (direction, fp32 [rows, columns], options, scratch) -> bf16 [rows, columns]. With several ranks, which
            exchange it, the given direction is bf16. `scratch`: uint8, room for two matrices and two square ones of the smaller
            size, in bf16 (`products_bytes`).
    """

    name: str
    momentum: Rule
    weights: Rule
    options_of: Callable[[Mapping[str, Any], tuple[int, ...]], Any]
    matrices: Callable[[Any], list[tuple[int, int]]]
    options_for: Callable[[Any, int, int], Any]
    direction: Callable[[Tensor, Any, Tensor], Tensor]


#: Alignment of the parts of scratch memory, in bytes.
SCRATCH_ALIGNMENT = 256


def direction_bytes(rows: int, columns: int) -> int:
    """Bytes of scratch memory for the direction of a matrix."""
    return -(-4 * rows * columns // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def products_bytes(rows: int, columns: int) -> int:
    """Bytes of scratch memory for the products of a matrix."""
    return direction_bytes(rows, columns) + 4 * min(rows, columns) ** 2


def scratch_bytes(rows: int, columns: int) -> int:
    """Bytes of scratch memory for the update of a matrix."""
    return direction_bytes(rows, columns) + products_bytes(rows, columns)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of one parameter in a tile, which are updated with the same options. `options`: of the rule.
    `step` counts from 1, this update included. `first`: the index of the element `start` in its parameter. `seed`: of the
    parameter's random bits. `position`: of the parameter in its tile."""

    start: int
    stop: int
    options: Any
    step: int
    first: int = 0
    seed: int = 0
    position: int = 0

    def within(self, start: int, stop: int, at: int) -> Segment | None:
        """The part of the segment in [start, stop), renumbered for memory in which `start` is the element `at`; None if there
        is none."""
        begin, end = max(self.start, start), min(self.stop, stop)
        if begin >= end:
            return None
        return replace(self, start=begin - start + at, stop=end - start + at, first=self.first + begin - self.start)
