"""Plans of packed rows, and of rows in groups of similar length: searched once, and derived for the rows that a step has.

A search simulates dozens of programs and takes seconds, while such steps differ only in the number and length of their rows. So
a plan is searched for full micro-batches of the usual length, and a step with other rows takes all its other choices. The last
rows form micro-batches of powers of two, so that kernels are compiled for few sizes. Where kernels serve any size, all
micro-batches have about the same number of rows instead. Each group of rows has micro-batches of its own.
"""
from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import replace

from megacompile.errors import InsufficientMemoryError
from megacompile.ir.placement import Updated
from megacompile.ir.plan import FULL_TOKENS, BatchSpec, Plan
from megacompile.planning.planner import Choice, Planner

#: Balanced micro-batches that a step may have beyond the fewest possible, where device memory is short.
MORE_MICRO_BATCHES = 2


class PackedPlans:
    """State: the plans that were searched, by spec; and the spec that is searched for instead of another. `length`: tokens of
    a usual row. `balanced`: a step's micro-batches have about the same size, which may be any number."""

    def __init__(self, length: int, balanced: bool = False) -> None:
        self.length, self.balanced = length, balanced
        self._searched: dict[BatchSpec, Plan] = {}
        self._instead: dict[BatchSpec, BatchSpec] = {}

    def choose(self, planner: Planner, spec: BatchSpec) -> Choice:
        """The plan of a training step of packed rows, or of groups of rows. Raises as `Planner.choose`.

        It depends on the spec and not on earlier steps: a resumed run, whose first step has another number of rows, gives the
        same bits as one that was not interrupted."""
        # The number of rows in a micro-batch may be the user's, and says nothing about rows of another length. A row may be
        # longer than a full micro-batch of usual ones, too.
        usual = self.length if planner.config.micro_batch_size is None and spec.length <= FULL_TOKENS else spec.length
        if usual != spec.length:
            try:
                if (found := self._derived(planner, spec, usual)) is not None:
                    return found
            except InsufficientMemoryError:  # usual rows may be longer than those of this step
                pass
        if spec.group_rows:
            return self._of_groups(planner, spec)
        found = self._derived(planner, spec, spec.length)
        assert found is not None, "a plan for no fewer rows fits, and so do its choices for these"
        return found

    def _of_groups(self, planner: Planner, spec: BatchSpec) -> Choice:
        """The plan of groups of rows if there is none for full micro-batches of the usual length. It has the choices of a plan
        for full micro-batches of the longest row, or else of a plan for the same rows without groups, or is that plan
        itself."""
        with contextlib.suppress(InsufficientMemoryError):
            if (found := self._derived(planner, spec, spec.length)) is not None:
                return found
        plain = replace(spec, group_rows=(), group_lengths=())
        base, answers = self._searched.get(plain), Counter[str]()
        if base is None or base.resident_state != planner.resident_state():
            choice = _search(planner, plain)
            base = self._searched[plain] = choice.plan
            planner, answers = planner.after(choice), choice.answers
        plans = derived(base, spec, self.balanced, planner.config.micro_batch_size, planner.config.waves)
        return Choice(next(filter(planner.fits, plans), base), planner.stateful, answers)

    def _derived(self, planner: Planner, spec: BatchSpec, length: int) -> Choice | None:
        """Searches for a plan for full micro-batches of rows of this length, and returns a plan with its choices for the step.
        Returns None if the step's rows are too long for such a plan, if it computes some tokens of each row at a time, or if
        no such plan fits. With the length of the step's own rows, a plan always fits."""
        full = max(1, FULL_TOKENS // length)
        rows = -(-spec.tokens // length)
        # About as much work as the step, which decides how much of the update is hidden; or at least as much.
        counts = _power_of_two_in(max(1, rows // full)), -(-rows // full)
        alike, enough = (replace(spec, batch=full * count, length=length, group_rows=(), group_lengths=()) for count in counts)
        answers = Counter[str]()
        if alike not in self._instead:
            choice = self._with_room(planner, alike)
            planner, answers = planner.after(choice), choice.answers
        tried = [(self._instead[alike], False), (enough, False)]
        if length == spec.length:
            tried.append((enough, True))  # again: less may be free now
        for wanted, again in tried:
            base = None if again else self._searched.get(wanted)
            if base is None or base.resident_state != planner.resident_state():
                choice = _search(planner, wanted)
                base = self._searched[wanted] = choice.plan
                planner, answers = planner.after(choice), answers + choice.answers
            if not (plans := derived(base, spec, self.balanced, planner.config.micro_batch_size, planner.config.waves)):
                return None
            for plan in plans:
                if planner.fits(plan):
                    return Choice(plan, planner.stateful, answers)
        return None

    def _with_room(self, planner: Planner, usual: BatchSpec) -> Choice:
        """The plan for steps with the `usual` number of rows, whose choices also fit half as many rows again. Real data has
        such steps now and then. If the plan for the usual number filled the device, such a step would stop training for a
        search, and later plans would update fewer tiles on the device. So the search is for half as many rows again at once,
        unless no plan fits these."""
        more = replace(usual, batch=usual.batch + usual.batch // 2)
        choice = _search(planner, usual)
        self._searched[usual], self._instead[usual] = choice.plan, usual
        if any(map(planner.after(choice).fits, derived(choice.plan, more, self.balanced))):
            return choice
        try:
            roomy = _search(planner, more)
        except InsufficientMemoryError:
            return choice
        self._searched[more], self._instead[usual] = roomy.plan, more
        return replace(roomy, answers=choice.answers + roomy.answers)

    def in_few_sizes(self, plan: Plan, spec: BatchSpec, most: int | None = None) -> Plan:
        """The plan of an evaluation with micro-batches of powers of two, or `balanced` ones, none larger than it has. Groups of
        rows have separate micro-batches, of at `most` that many rows."""
        if spec.group_rows:
            micro_batches, lengths = _parts_of_groups(spec, max(plan.micro_batches) * plan.length, self.balanced, most)
            return plan if plan.token_chunk else replace(plan, micro_batches=micro_batches, lengths=lengths)
        size = max(plan.micro_batches)
        if self.balanced:
            return replace(plan, micro_batches=_balanced(plan.batch, size))
        return replace(plan, micro_batches=_in_powers_of_two(plan.batch, _power_of_two_in(size)))

    def clear(self) -> None:
        self._searched.clear()
        self._instead.clear()


def _search(planner: Planner, wanted: BatchSpec) -> Choice:
    return planner.choose(wanted.batch, wanted.length, True, wanted.update, wanted.whole_step, wanted.output)


def derived(base: Plan, spec: BatchSpec, balanced: bool = False, most: int | None = None,
            waves: int | None = None) -> list[Plan]:
    """Plans with the choices of `base` for a spec with other rows. Empty if a micro-batch of `base` is shorter than a row.
    Micro-batches have as many tokens as those of `base`, followed by smaller ones of powers of two. If `balanced`, there are as
    few as possible, and in later plans a few more, which need less memory. For a whole step, the first plan has about as many
    tokens per wave as `base`, the second at most as many micro-batches per wave. If given, `most` limits the rows in
    micro-batches of groups, and `waves` is the number of waves."""
    tokens = max(base.micro_batches) * base.length
    size = tokens // spec.length
    if size == 0 or (base.token_chunk and base.length != spec.length):  # a chunk is some tokens of each row
        return []
    divisions: list[tuple[tuple[int, ...], tuple[int, ...]]]
    if spec.group_rows:
        if most is None:  # graphs are known to hold for groups of this size (`rounded_lengths.py`)
            tokens = max(base.length, min(tokens, FULL_TOKENS))
        divisions = [_parts_of_groups(spec, each, balanced, most) for each in (tokens, tokens // 2) if each >= spec.length]
    elif balanced:
        divisions = [(each, ()) for each in _divisions(spec.batch, size)]
    else:
        divisions = [(_in_powers_of_two(spec.batch, size), ())]
    plans = []
    for micro_batches, lengths in divisions:
        alike = round(spec.tokens * base.waves / base.tokens)
        no_more = math.ceil(len(micro_batches) * base.waves / len(base.micro_batches))
        counts = (alike, no_more) if spec.whole_step else (1,)
        if spec.whole_step and spec.group_rows and waves is not None:
            counts = (waves,)
        in_one = base.placements.placed(Updated.FROM_HOST_SUMS, ())
        plans += [replace(base, batch=spec.batch, length=spec.length, micro_batches=micro_batches, lengths=lengths,
                          waves=count, placements=base.placements if count > 1 else in_one)
                  for count in (min(max(1, count), len(micro_batches)) for count in counts)]
    return list(dict.fromkeys(plans))


def _parts_of_groups(spec: BatchSpec, tokens: int, balanced: bool, most: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The micro-batches of a plan for groups of rows, and their lengths. Each has rows of one group: at most `tokens` tokens
    and at `most` that many rows. No row has more than `tokens` tokens."""
    sizes: list[tuple[int, int]] = []
    for rows, length in spec.groups:
        size = min(tokens // length, most or rows)
        parts = _balanced(rows, size) if balanced else _in_powers_of_two(rows, _power_of_two_in(size))
        sizes += [(part, length) for part in parts]
    return tuple(rows for rows, _ in sizes), tuple(length for _, length in sizes)


def _in_powers_of_two(number: int, size: int) -> tuple[int, ...]:
    """`number` in parts of this size, then in the powers of two that add up to the rest, the largest first."""
    return (size,) * (number // size) + _powers_of_two(number % size)


def _divisions(number: int, size: int) -> list[tuple[int, ...]]:
    """Rows in balanced micro-batches of at most `size`, the fewest first."""
    fewest = -(-number // size)
    return [_parts(number, count) for count in range(fewest, min(fewest + MORE_MICRO_BATCHES, number) + 1)]


def _power_of_two_in(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def _powers_of_two(number: int) -> tuple[int, ...]:
    """The powers of two that add up to `number`, the largest first."""
    return tuple(1 << bit for bit in reversed(range(number.bit_length())) if number >> bit & 1)


def _balanced(number: int, most: int) -> tuple[int, ...]:
    """`number` in as few parts as possible, none above `most`."""
    return _parts(number, -(-number // most))


def _parts(number: int, count: int) -> tuple[int, ...]:
    """`number` in `count` parts, which differ by at most one; the larger ones first."""
    least, larger = divmod(number, count)
    return (least + 1,) * larger + (least,) * (count - larger)
