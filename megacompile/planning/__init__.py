"""From a model, a batch and a budget to a plan."""
from __future__ import annotations
