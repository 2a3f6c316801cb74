"""What is done to a model's graph: attention adopted, values rewritten, cut into prologue, layers and epilogue."""
from __future__ import annotations
