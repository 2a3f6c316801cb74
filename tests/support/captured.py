"""Captures of the families, made once for all tests of a process: most of the time of a small test is its capture."""
from __future__ import annotations

import functools
from typing import Any

import torch
from models import build

from megacompile import api
from megacompile.frontend import CapturedModel
from megacompile.passes import TEMPLATE_PIPELINE
from megacompile.passes.template import Target

CPU = Target("cpu", torch.float32)


@functools.cache
def captured(family: str, pipeline: tuple[Any, ...] = TEMPLATE_PIPELINE, target: Target = CPU,
             **overrides: Any) -> CapturedModel:
    """As `stream` captures it: what `tests/conftest.py` shares among streamed models it shares with these."""
    return api.capture(build(family, **overrides), layers=None, example=None, pipeline=pipeline, target=target)
