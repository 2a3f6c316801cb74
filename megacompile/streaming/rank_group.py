"""The ranks that train one model: agreements before sections that all ranks run, and waits for updates.

With a single process, agreements and waits return at once.
"""
from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megacompile.errors import LaneError, MegacompileError, NonFiniteError, RankError, UnsupportedError, named_line
from megacompile.frontend.capture import CapturedModel
from megacompile.inputs.across_ranks import AllRows, joined, tell
from megacompile.inputs.batch import BatchArguments
from megacompile.inputs.divided_sequences import divided, divided_by_all
from megacompile.ir.plan import BatchSpec, Plan
from megacompile.planning.config import StreamConfig
from megacompile.planning.planner import Choice
from megacompile.runtime.ranks import Ranks
from megacompile.runtime.update import Update
from megacompile.streaming.batch_io import seed_of_forward
from megacompile.streaming.programs.captures import ModelCaptures
from megacompile.streaming.programs.executables import Executable, Executables


# --------------------
# The program of a spec that all ranks run: rank 0 chooses the plan, and every rank makes the program from it.
#
# A search simulates dozens of programs, so one rank searches and the others get its plan. Only rank 0's plans are kept on disk
# for the next start: ranks that find different plans could not run together.
def compiled_by_all(executables: Executables, spec: BatchSpec, keep: Collection[Executable], ranks: Ranks) -> Executable:
    """The program of a spec, the same on every rank. All ranks call this. Raises on every rank what `Executables.get` raises,
    and `RankError` if the ranks' programs differ."""
    found = executables.known(spec, keep)
    digests = ranks.agree("compile", None if found is None else found.digest)
    if None in digests:
        found = _from_one_plan(executables, spec, keep, ranks)
        digests = ranks.agree("compile", found.digest)
    ranks.require_equal("program", digests)
    return executables.get(spec, keep)


def _from_one_plan(executables: Executables, spec: BatchSpec, keep: Collection[Executable], ranks: Ranks) -> Executable:
    if ranks.rank == 0:
        try:
            found = executables.get(spec, keep)
        except MegacompileError:
            ranks.agree("plan")
            raise
        ranks.agree("plan", (found.plan.values(), executables.stateful))
        return found
    chosen = ranks.agree("plan")[0]
    if chosen is None:
        executables.get(spec, keep)  # raises what it raises on rank 0
        raise RankError("rank 0 cannot plan this step, and this rank can: give every rank the same model and options")
    values, stateful = chosen
    return executables.known(spec, keep) or executables.get(spec, keep, Choice(Plan.of(**values), stateful))


class RankGroup:
    """The ranks that train one model. `ranks`: None if this process trains alone. `agreed_budgets`: memory options that the
    user has not given, and that the ranks have agreed on. `check_lanes` raises the failure of this process's lanes, unless
    another rank caused it."""

    def __init__(self, ranks: Ranks | None, captures: ModelCaptures, agreed_budgets: Sequence[str],
                 check_lanes: Callable[[], None]) -> None:
        self.ranks, self.captures, self.agreed_budgets, self.check_lanes = ranks, captures, agreed_budgets, check_lanes
        self._averages_losses = False

    def asked(self, config: StreamConfig) -> StreamConfig:
        """The options that plans are made with, without budgets that the user has not given."""
        nothing: dict[str, Any] = dict.fromkeys(self.agreed_budgets)
        return replace(config, **nothing) if nothing else config

    @property
    def size(self) -> int:
        """The number of processes that train the model."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def sequence_ranks(self) -> int:
        """The number of ranks that have the tokens of a sequence together."""
        return 1 if self.ranks is None else self.ranks.sequence_ranks

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A context around work that all ranks do together. A rank that fails tells the others, which would wait for it. If a
        norm is not finite, all ranks fail and training can go on. Prefers the failure of this rank's lanes to the report that
        another rank has ended."""
        try:
            try:
                yield
            except RankError:
                self.check_lanes()
                raise
        except NonFiniteError:
            raise
        except BaseException as error:
            if self.ranks is not None:
                self.ranks.failed(error)
            raise

    def agree(self, doing: str) -> None:
        """Waits until all ranks are about to do the same thing. Raises `RankError`."""
        self.values(doing, None)

    def values(self, doing: str, value: Any) -> list[Any]:
        """The values of all ranks, in rank order: tensors, numbers, text, and containers of them. Raises `RankError`."""
        if self.ranks is None:
            return [value]
        with self.failing():  # Ctrl-C: the others would wait
            return self.ranks.agree(doing, value)

    def agree_on_factor(self, doing: str, gradient: Tensor) -> None:
        """Like `agree`. Also checks that all ranks multiply their loss, which covers all ranks' rows, by the same number.
        `gradient`: of the loss, 0-d. Raises `UnsupportedError`, `RankError`."""
        factors = [1.0] if self.ranks is None else self.values(doing, float(gradient))
        for rank, factor in enumerate(factors):
            if not math.isclose(factor, factors[0], rel_tol=1e-6) and not (math.isnan(factor) and math.isnan(factors[0])):
                raise UnsupportedError(f"rank {rank} multiplies its loss by {factor:g} and rank 0 by {factors[0]:g}, and the "
                                       "loss is that of all ranks' rows: multiply it by one number on every rank")

    def all_agree(self, doing: str, yes: bool) -> bool:
        """True if every rank answers yes. Raises `RankError`."""
        return all(self.values(doing, yes))

    def agree_on_update(self, doing: str, update: Update) -> None:
        """Like `agree`. Also checks that all ranks update the same parameters with the same options, since each rank updates a
        shard of every tile. Step counts may differ: a rank may learn later than another that a step was skipped. Raises
        `RankError`."""
        if self.ranks is None:
            return
        names = sorted(update.segments)
        numbers = tuple((s.start, s.stop, s.options) for name in names for s in update.segments[name])
        digests = self.ranks.agree(doing, (zlib.crc32("\n".join(names).encode()), hash(numbers), update.max_grad_norm))
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RankError(f"rank {rank} updates other parameters than rank 0, or with other options: give every rank's "
                                "optimizer the same groups and learning rates, and set .grad of the same parameters to None")

    @contextlib.contextmanager
    def all_or_none(self, doing: str, error: type[MegacompileError] = RankError) -> Iterator[None]:
        """A context around a part of a call that may fail on one rank alone, and after which all ranks go on. If it fails on
        one rank, it fails on all: there with its own error, elsewhere with an `error` that names the rank."""
        own: Exception | None = None
        try:
            yield
        except RankError:
            raise
        except Exception as caught:
            own = caught
        failed = [] if self.ranks is None else self.ranks.agree(doing, None if own is None else named_line(own))
        if own is not None:
            raise own
        if text := next(((rank, text) for rank, text in enumerate(failed) if text), None):
            where = "" if self.ranks is None else self.ranks.hosts.where(text[0])
            raise error(f"rank {text[0]}{where} has failed in {doing} ({text[1]}): correct it there, and make the call again "
                        "on every rank")

    @contextlib.contextmanager
    def averaging_losses(self) -> Iterator[None]:
        """A context in which the model's loss is the mean of the ranks' losses for their own rows, each divided by the rank's
        own denominator. DistributedDataParallel trains this loss. Otherwise the loss is a sum."""
        self._averages_losses = True
        try:
            yield
        finally:
            self._averages_losses = False

    def _averaged(self, given: BatchArguments) -> BatchArguments:
        """The batch with this rank's share of the mean over ranks, if losses are averaged."""
        if not self._averages_losses or given.loss_denominator is None:
            return given
        again = given.read_again
        return replace(given, loss_denominator=given.loss_denominator * (self.size // self.sequence_ranks), counted=False,
                       read_again=None if again is None else lambda rounding: self._averaged(again(rounding)))

    @contextlib.contextmanager
    def told(self, doing: str) -> Iterator[None]:
        """A context around work that a rank does alone before it calls `joined`. If it fails, `joined` raises an
        `UnsupportedError` on the other ranks that names the rank and the cause."""
        try:
            yield
        except LaneError:
            raise
        except Exception as error:
            if self.ranks is None:
                raise
            with self.failing():
                tell(self.ranks, doing, error)
                raise

    def divided(self, given: BatchArguments) -> BatchArguments:
        """This rank's tokens of a batch, if ranks have sequences together and none of them has longer rows. Tells no rank."""
        if self.ranks is None or self.sequence_ranks == 1:
            return given
        return divided(self.captures, given, self.ranks.sequence.position, self.sequence_ranks, given.length)

    def joined(self, given: BatchArguments, doing: str,
               output: str = "loss") -> tuple[BatchArguments, BatchArguments, AllRows | None, str]:
        """Four values: the batch in the shape that all ranks agree on; the batch as this rank would compute it alone, which may
        have another layout than `given`; the rows that the batch is a part of, or None if it has all rows; and the name of the
        output in the capture that serves all ranks. Raises what `across_ranks.joined` raises."""
        if self.ranks is None:
            return given, given, None, output
        given = self._averaged(given)
        if self.ranks.sequence_ranks > 1:
            given = divided_by_all(self.ranks, self.captures, given, doing)
        padded, alone, all_rows = joined(self.ranks, self.captures, given, doing)
        if output != "loss" and padded.key != given.key:
            own = self.captures.serve(given.key).captured.require_heads()
            output = self.captures.serve(padded.key).captured.require_heads().like(own, output)
        return padded, alone, all_rows, output

    def compiled(self, executables: Executables, spec: BatchSpec, keep: Collection[Executable]) -> Executable:
        """The program of a training step, the same on every rank. Raises what `Executables.get` raises, and `RankError`."""
        if self.ranks is not None:
            return compiled_by_all(executables, spec, keep, self.ranks)
        found = executables.get(spec, keep)
        executables.plan_ahead(spec, keep)
        return found

    def seed(self, captured: CapturedModel, all_rows: AllRows | None) -> int | None:
        """The seed for dropout of a forward; rank 0's if all ranks run it. None without dropout. Raises `RankError`."""
        seed = seed_of_forward(captured)
        return seed if self.ranks is None or all_rows is None or seed is None else self.ranks.agree("draw", seed)[0]

    def wait_for_updates(self) -> None:
        """Waits until host tiles have the updates of all ranks. Raises `RankError`."""
        if self.ranks is not None:
            self.ranks.wait_for_updates()
