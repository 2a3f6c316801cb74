"""The counters, sizes and times of a streamed model."""
from __future__ import annotations

from typing import Any

from megacompile.streaming.streamed import Streamed


def compiled_variants(streamed: Streamed) -> int:
    """The number of kernels that were compiled, or loaded, so far."""
    return sum(served.binder.variants for served in streamed.captures)


def stats_of(streamed: Streamed) -> dict[str, Any]:
    """As `Handle.stats` describes them."""
    return dict(
        steps=streamed.step.count, skipped_steps=len(streamed.step.skipped.steps), kept_tiles=len(streamed.step.skipped.tiles),
        shapes=len(streamed.shapes), templates=len(streamed.captured.templates),
        compiled_variants=compiled_variants(streamed),
        variants_of_any_size=sum(served.binder.variants_of_any_size for served in streamed.captures),
        micro_batch_shapes=sum(len(served.binder.sizes) for served in streamed.captures),
        plan_searches=streamed.shapes.answers["searched"], plans_from_cache=streamed.shapes.answers["kept"],
        **streamed.step.tokens.stats(),
        capture_s=sum(served.captured.seconds for served in streamed.captures),
        compiled=streamed.binder.inductor.compiled, compiled_from_cache=streamed.binder.inductor.from_cache,
        compile_s=streamed.binder.inductor.seconds,
        host_bytes=sum(streamed.store.bytes().values()) + streamed.arena.slab_bytes() + streamed.activation_checkpoints.bytes(),
        host_parts=streamed.store.bytes(), checkpoint_bytes=streamed.activation_checkpoints.bytes(),
        disk_bytes=sum(file.bytes for file in streamed.store.files),
        disk_bytes_read=streamed.store.disk_bytes_read,
        disk_bytes_written=streamed.store.disk_bytes_written,
        slab_bytes=streamed.arena.slab_bytes(), slot_bytes=streamed.arena.device_bytes(),
        peak_device_bytes=streamed.backend.peak_bytes(),
        predicted_device_bytes=streamed.shapes.largest,
        parameters=sum(x.parameters for x in streamed.tiling.layouts.values()))
