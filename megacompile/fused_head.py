"""Public name of `megacompile.trainers.fused_head`: lets a trainer of your own use the fused head of TRL."""
from __future__ import annotations

from megacompile.trainers.fused_head import streamed_heads

__all__ = ["streamed_heads"]
