"""Plans of packed rows: searched once for a length, and derived for whatever number of rows a step has.

A search simulates dozens of programs and takes seconds; steps of packed rows differ only in how many micro-batches they have.
So a plan is searched for whole micro-batches of full kernels, and a step with another number of rows takes its every choice.
Its last rows go in micro-batches of powers of two, so that kernels are compiled for few sizes.
"""
from __future__ import annotations

import math
from dataclasses import replace

from megacompile.plan import Plan, Shape
from megacompile.planner import FULL_TOKENS, Planner

#: A step of so many times the rows that a plan was searched for may deserve another plan.
_FAR = 2


class PackedPlans:
    """State: the plan that was searched for each kind of step, by its shape without a batch size; `searches`, how many."""

    def __init__(self) -> None:
        self._searched: dict[Shape, Plan] = {}
        self.searches = 0

    def choose(self, planner: Planner, shape: Shape) -> Plan:
        """The plan of a training step of packed rows. Raises what `Planner.choose` raises."""
        kind = replace(shape, batch=0)
        known = self._searched.get(kind)
        if known is not None and shape.batch <= _FAR * known.batch:
            for plan in derived(known, shape):
                if planner.fits(plan) and plan.resident_state == planner.resident_state():
                    return plan
        full = max(1, FULL_TOKENS // shape.length)
        # About as much work as the step has, since that decides how much of the update is hidden; or no less.
        for count in dict.fromkeys((round(shape.batch / full), -(-shape.batch // full))):
            self.searches += 1
            base = planner.choose(full * max(1, count), shape.length, True, shape.update, shape.whole_step, shape.output)
            self._searched[kind] = base
            for plan in derived(base, shape):
                if planner.fits(plan):
                    return plan
        raise AssertionError("a plan for no fewer rows fits, and so do its choices for these")

    def clear(self) -> None:
        self._searched.clear()


def derived(base: Plan, shape: Shape) -> list[Plan]:
    """The same choices for a shape with another number of rows.

    Micro-batches are as large, and smaller ones of powers of two follow. The first plan of a whole step has about as many rows
    in a wave, the second has no more micro-batches in one."""
    size = max(base.micro_batches)
    micro_batches = (size,) * (shape.batch // size) + _powers_of_two(shape.batch % size)
    alike = round(shape.batch * base.waves / base.batch)
    no_more = math.ceil(len(micro_batches) * base.waves / len(base.micro_batches))
    counts = (alike, no_more) if shape.whole_step else (1,)
    plans = (replace(base, batch=shape.batch, micro_batches=micro_batches, waves=waves,
                     host_sums=base.host_sums if waves > 1 else ())
             for waves in (min(max(1, count), len(micro_batches)) for count in counts))
    return list(dict.fromkeys(plans))


def _powers_of_two(number: int) -> tuple[int, ...]:
    """The powers of two that a number is the sum of, the largest first."""
    return tuple(1 << bit for bit in reversed(range(number.bit_length())) if number >> bit & 1)
