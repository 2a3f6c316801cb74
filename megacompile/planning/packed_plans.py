"""Plans of packed rows: searched once for a length, and derived for the number of rows that a step has.

A search simulates dozens of programs and takes seconds, while steps of packed rows differ only in their number of
micro-batches. So a plan is searched for micro-batches with full kernels, and a step with another number of rows takes all its
other choices. The last rows form micro-batches of powers of two, so that kernels are compiled for few sizes. Where kernels
serve any number of rows, all micro-batches have about the same size instead.
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from megacompile.ir.plan import FULL_TOKENS, Plan, Shape
from megacompile.planning.planner import Choice, Planner


class PackedPlans:
    """State: the plans that were searched, by shape. `balanced`: a step's micro-batches have about the same size, which may be
    any number."""

    def __init__(self, balanced: bool = False) -> None:
        self.balanced = balanced
        self._searched: dict[Shape, Plan] = {}

    def choose(self, planner: Planner, shape: Shape) -> Choice:
        """The plan of a training step of packed rows. Raises as `Planner.choose`.

        It depends on the shape and not on earlier steps: a resumed run, whose first step has another number of rows, gives the
        same bits as one that was not interrupted."""
        full = max(1, FULL_TOKENS // shape.length)
        # About as much work as the step, which decides how much of the update is hidden; or at least as much.
        alike, enough = _power_of_two_in(max(1, shape.batch // full)), -(-shape.batch // full)
        answers = Counter[str]()
        for count, anew in ((alike, False), (enough, False), (enough, True)):  # anew: less memory may be free now
            wanted = replace(shape, batch=full * count)
            base = None if anew else self._searched.get(wanted)
            if base is None or base.resident_state != planner.resident_state():
                choice = planner.choose(wanted.batch, shape.length, True, shape.update, shape.whole_step, shape.output)
                base = self._searched[wanted] = choice.plan
                planner, answers = planner.after(choice), answers + choice.answers
            for plan in derived(base, shape, self.balanced):
                if planner.fits(plan):
                    return Choice(plan, planner.stateful, answers)
        raise AssertionError("a plan for no fewer rows fits, and so do its choices for these")

    def in_few_sizes(self, plan: Plan) -> Plan:
        """The plan of an evaluation with micro-batches of powers of two, or `balanced` ones, none larger than it has."""
        size = max(plan.micro_batches)
        if self.balanced:
            return replace(plan, micro_batches=_balanced(plan.batch, size))
        size = _power_of_two_in(size)
        return replace(plan, micro_batches=(size,) * (plan.batch // size) + _powers_of_two(plan.batch % size))

    def clear(self) -> None:
        self._searched.clear()


def derived(base: Plan, shape: Shape, balanced: bool = False) -> list[Plan]:
    """Plans with the choices of `base` for a shape with another number of rows.

    Micro-batches have the size of those of `base`, and smaller ones of powers of two follow; or they are `balanced`, as few as
    possible. For a whole step, the first plan has about as many rows per wave as `base`, the second at most as many
    micro-batches per wave."""
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
    """The largest power of two that is not above `number`."""
    return 1 << (number.bit_length() - 1)


def _powers_of_two(number: int) -> tuple[int, ...]:
    """The powers of two that add up to `number`, the largest first."""
    return tuple(1 << bit for bit in reversed(range(number.bit_length())) if number >> bit & 1)


def _balanced(number: int, most: int) -> tuple[int, ...]:
    """`number` in as few parts as possible, none above `most`, which differ by at most one; the larger ones first."""
    count = -(-number // most)
    least, larger = divmod(number, count)
    return (least + 1,) * larger + (least,) * (count - larger)
