"""From a model to one graph with its layers as regions, and where else that graph holds."""
from __future__ import annotations
