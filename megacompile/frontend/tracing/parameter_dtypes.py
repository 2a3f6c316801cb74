"""The dtype that a parameter is streamed in."""
from __future__ import annotations

import torch
from torch import nn


def streamed_dtype(parameter: nn.Parameter, wanted: torch.dtype | None) -> torch.dtype:
    """`wanted`, if it is given. Codes of quantized weights, which are integers, stay as they are."""
    return wanted if wanted is not None and parameter.is_floating_point() else parameter.dtype
