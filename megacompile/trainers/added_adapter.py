"""Adds a PEFT adapter to a model that is already streamed."""
from __future__ import annotations

import gc
from typing import Any

from megacompile.api import attach
from megacompile.errors import UnsupportedError
from megacompile.frontend.tracing.peft_tracing import traceable_adapters
from megacompile.weights.moving import build_store


def add_adapter(model: Any, adapter: Any, **options: Any) -> Any:
    """Closes a streamed model, wraps it with an adapter of this configuration, and streams the PEFT model with the same
    options. `options`: those of `peft.get_peft_model`.

    Raises `UnsupportedError` if the model takes other batch arguments than input_ids and labels."""
    from peft import get_peft_model

    captured, config = model.megacompile.streamed.captured, model.megacompile.streamed.config
    stacks = tuple(f"base_model.model.{path}" for path in captured.stacks)
    if set(captured.batch_inputs) != {"input_ids", "labels"}:
        raise UnsupportedError("a trainer can add an adapter only to a model that takes input_ids and labels: call "
                               "peft.get_peft_model before megacompile.stream(model, example=...)")
    model.megacompile.close()
    gc.collect()  # frees the old gradients and optimizer state
    with traceable_adapters():  # DoRA starts from the values of weights
        adapted = get_peft_model(model, adapter, **options)
    return attach(adapted, build_store, config, stacks, None)
