"""Plans of packed rows: searched once for a length, and derived for whatever number of rows a step has.

A search simulates dozens of programs and takes seconds; steps of packed rows differ only in how many micro-batches they have.
So a plan is searched for whole micro-batches of full kernels, and a step with another number of rows takes its every choice.
Its last rows go in micro-batches of powers of two, so that kernels are compiled for few sizes; or, where kernels serve any
number of rows, all micro-batches are about as large.
"""
from __future__ import annotations

import math
from dataclasses import replace

from megacompile.ir.plan import FULL_TOKENS, Plan, Shape
from megacompile.planning.planner import Planner


class PackedPlans:
    """State: the plans that were searched, by the shape that each was searched for. `balanced`: a step's micro-batches are
    about as large, of any size."""

    def __init__(self, balanced: bool = False) -> None:
        self.balanced = balanced
        self._searched: dict[Shape, Plan] = {}

    def choose(self, planner: Planner, shape: Shape) -> Plan:
        """The plan of a training step of packed rows. Raises what `Planner.choose` raises.

        It depends on the shape, and not on the steps before: a resumed run, whose first step has another number of rows, has
        the bits of one that was not interrupted."""
        full = max(1, FULL_TOKENS // shape.length)
        # About as much work as the step has, since that decides how much of the update is hidden; or no less.
        alike, enough = _power_of_two_in(max(1, shape.batch // full)), -(-shape.batch // full)
        for count, anew in ((alike, False), (enough, False), (enough, True)):  # anew: there may be less memory than there was
            wanted = replace(shape, batch=full * count)
            base = None if anew else self._searched.get(wanted)
            if base is None or base.resident_state != planner.resident_state():
                base = planner.choose(wanted.batch, shape.length, True, shape.update, shape.whole_step, shape.output)
                self._searched[wanted] = base
            for plan in derived(base, shape, self.balanced):
                if planner.fits(plan):
                    return plan
        raise AssertionError("a plan for no fewer rows fits, and so do its choices for these")

    def in_few_sizes(self, plan: Plan) -> Plan:
        """The plan of an evaluation, in micro-batches no larger than it has: of powers of two, or `balanced`."""
        size = max(plan.micro_batches)
        if self.balanced:
            return replace(plan, micro_batches=_balanced(plan.batch, size))
        size = _power_of_two_in(size)
        return replace(plan, micro_batches=(size,) * (plan.batch // size) + _powers_of_two(plan.batch % size))

    def clear(self) -> None:
        self._searched.clear()


def derived(base: Plan, shape: Shape, balanced: bool = False) -> list[Plan]:
    """The same choices for a shape with another number of rows.

    Micro-batches are as large, and smaller ones of powers of two follow; or they are `balanced`, as few as can be. The first
    plan of a whole step has about as many rows in a wave, the second has no more micro-batches in one."""
    size = max(base.micro_batches)
    whole = (size,) * (shape.batch // size)
    micro_batches = _balanced(shape.batch, size) if balanced else whole + _powers_of_two(shape.batch % size)
    alike = round(shape.batch * base.waves / base.batch)
    no_more = math.ceil(len(micro_batches) * base.waves / len(base.micro_batches))
    counts = (alike, no_more) if shape.whole_step else (1,)
    plans = (replace(base, batch=shape.batch, micro_batches=micro_batches, waves=waves,
                     host_sums=base.host_sums if waves > 1 else ())
             for waves in (min(max(1, count), len(micro_batches)) for count in counts))
    return list(dict.fromkeys(plans))


def _power_of_two_in(number: int) -> int:
    """The largest that is not above."""
    return 1 << (number.bit_length() - 1)


def _powers_of_two(number: int) -> tuple[int, ...]:
    """The powers of two that a number is the sum of, the largest first."""
    return tuple(1 << bit for bit in reversed(range(number.bit_length())) if number >> bit & 1)


def _balanced(number: int, most: int) -> tuple[int, ...]:
    """As few parts of a number as can be, none above `most`, which differ by one at most; the larger ones first."""
    count = -(-number // most)
    least, larger = divmod(number, count)
    return (least + 1,) * larger + (least,) * (count - larger)
