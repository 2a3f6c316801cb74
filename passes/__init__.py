"""The two pipelines: passes over templates and passes over programs, each in the order in which they run."""
from __future__ import annotations

from megacompile.passes.pipeline import insert_after, insert_before, replace_pass
from megacompile.passes.schedule import (
    differentiate,
    micro_batch,
    offload,
    optimizer,
    partition,
    place,
    prefetch,
    shard,
    synchronize,
)
from megacompile.passes.template import accumulate_in_gemm, attention, chunk_tokens, float8, fuse_loss, recurrence

__all__ = ["PIPELINE", "TEMPLATE_PIPELINE", "insert_after", "insert_before", "replace_pass"]

#: Over graphs of templates. Each is `run(graph, target) -> graph`.
TEMPLATE_PIPELINE = (attention, recurrence, fuse_loss, float8, chunk_tokens, accumulate_in_gemm)

#: Over programs. Each is `run(program, plan) -> program`.
PIPELINE = (micro_batch, partition, differentiate, prefetch, offload, optimizer, shard, place, synchronize)
