"""Private parts of Dynamo, which traces models. Importing it takes seconds."""
from __future__ import annotations

from typing import Any

import torch._dynamo
from torch._dynamo import (
    config,  # settings of a trace: regions, loggers, caches
    mark_dynamic,  # makes a dimension of an input a symbol
    reset,  # forgets earlier traces
)
from torch._dynamo.functional_export import dynamo_graph_capture_for_export  # one graph of a whole model
from torch._dynamo.source import ConstantSource  # names the symbol of a number of rows
from torch._dynamo.utils import (
    counters,  # what inductor found in its cache
    get_metrics_context,  # delays Dynamo's log of its settings
)
from torch._dynamo.variables.lazy import LazySymNodeFormatString  # a message about sizes, in traced code

__all__ = ["ConstantSource", "LazySymNodeFormatString", "config", "counters", "dynamo_graph_capture_for_export",
           "get_metrics_context", "mark_dynamic", "regions", "reset"]


def regions() -> Any:
    """The module that decides whether a region is reused for another call; None in torch 2.11, which never does."""
    return getattr(torch._dynamo.variables, "invoke_subgraph", None)
