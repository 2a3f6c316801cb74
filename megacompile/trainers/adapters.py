"""Adapters (PEFT) that a trainer puts on a model which is streamed already."""
from __future__ import annotations

import gc
from typing import Any

from megacompile.api import attach
from megacompile.errors import UnsupportedError
from megacompile.weights.tiling import build_store


def add_adapter(model: Any, adapter: Any, **options: Any) -> Any:
    """PEFT's wrapper, with an adapter of this configuration, around the model of a streamed one, and streamed as that was.
    `options`: those of `peft.get_peft_model`."""
    from peft import get_peft_model

    captured, config = model.megacompile.streamed.captured, model.megacompile.streamed.config
    stacks = tuple(f"base_model.model.{path}" for path in captured.stacks)
    if set(captured.batch_inputs) != {"input_ids", "labels"}:
        raise UnsupportedError("an adapter is put on a model that takes input_ids and labels: call peft.get_peft_model before "
                               "megacompile.stream(model, example=...)")
    model.megacompile.close()
    gc.collect()  # gradients and optimizer state as they were
    return attach(get_peft_model(model, adapter, **options), build_store, config, stacks, None)
