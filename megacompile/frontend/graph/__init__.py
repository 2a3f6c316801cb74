"""What is done to the graph of a model: adopted, rewritten, cut into prologue, layers and epilogue."""
from __future__ import annotations
