"""Models that a trainer is given by name: what cannot be honored is refused before anything is loaded."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megacompile.errors import UnsupportedError
from megacompile.trainers.named_models import _STREAMING, load_named


@pytest.mark.parametrize(("options", "reason"), [
    ({"dtype": "float16"}, r"dtype must be torch\.float32, torch\.bfloat16 or 'auto', not 'float16'"),
    ({"torch_dtype": "int8"}, r"dtype must be torch\.float32, torch\.bfloat16 or 'auto', not 'int8'"),
    ({"quantization_config": SimpleNamespace(load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type="fp4")},
     "bnb_4bit_quant_type='fp4' is not supported: give 'nf4'"),
    ({"device_map": "balanced"}, "is not supported: streaming decides where weights are"),
    ({"trust_remote_code": True}, "is not supported: code that comes with a model is not run")])
def test_what_a_model_by_name_cannot_have_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        load_named("no/model", SimpleNamespace(bf16=False, device="cpu"), options)


def test_options_of_stream_pass_to_a_model_by_name() -> None:
    assert {"precision", "device_memory", "micro_batch_size"} <= _STREAMING
