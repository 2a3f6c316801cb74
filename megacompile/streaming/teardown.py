"""Releases a streamed model's resources: when it is closed or garbage-collected, and when the interpreter exits."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megacompile.frontend.tracing.trace_caches import forget_generated_code, forget_symbols
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.executor import Executor
from megacompile.runtime.memory.activation_checkpoints import HostCheckpoints
from megacompile.runtime.memory.arena import Arena
from megacompile.runtime.memory.store import Store
from megacompile.runtime.ranks import Ranks
from megacompile.runtime.reference import ReferenceExecutor


def give_back(executor: Executor | ReferenceExecutor, arena: Arena, checkpoints: HostCheckpoints, store: Store,
              backend: Backend, ranks: Ranks | None = None) -> None:
    """Stops the lanes once they have finished their work, and then frees the memory that they used. A step that fails, as on a
    lost device, does not keep the others from being taken; then the first error is raised."""

    def unpin() -> None:
        for part in (*store.streamed_memory(), *(state for tile in store.tiles.values() for state in tile.state())):
            backend.unpin(part)

    def memory() -> None:
        each(store.first_touch.stop,
              backend.synchronize,  # a garbage-collected model may have copies in flight
              arena.close, checkpoints.close, store.drop_sums, unpin,
              *(file.stop_threads for file in store.files),
              *([] if ranks is None else [ranks.close]))

    each(partial(executor.close, then=memory), forget_symbols, forget_generated_code)


def each(*steps: Callable[[], object]) -> None:
    """Takes all steps, though some fail, and then raises the first failure."""
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as failure:
            failures.append(failure)
    if failures:
        raise failures[0]
