"""The tensors that the nodes of a traced model computed while Dynamo traced them: fakes, which have a shape and a dtype."""
from __future__ import annotations

from typing import Any

from torch import Tensor


def example_of(node: Any) -> Tensor:
    value: Tensor = node.meta["example_value"]
    return value
