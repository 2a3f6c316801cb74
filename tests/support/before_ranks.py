"""Runs first in the process that ranks are forked from. It imports what ranks import, and captures the models that most of them
stream, which would take each rank about eight seconds. It imports no module that reads a rank's environment."""
from __future__ import annotations

import alike_models
import peft  # noqa: F401
import pytest
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
from rank_decoder import decoder
from tiny_models import build
from torch import nn

import megacompile.trainer  # noqa: F401
from megacompile import api
from megacompile.frontend.ops.attention_kernels import fused_kernel
from megacompile.planning.config import StreamConfig


def capture(model: nn.Module, layers: str | None = None) -> None:
    api.analyse(model, StreamConfig.of(device="cpu"), "cpu", layers, None, fused_kernel(torch.device("cpu")))


alike_models.keep_graphs_of_all_tests(pytest.MonkeyPatch())
api.capture = alike_models.capture_once
capture(build())
for bf16 in (False, True):
    capture(decoder(bf16), "layers")
