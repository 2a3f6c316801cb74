"""The optimizer of a streamed model: AdamW, its state in tiles, and when it updates."""
from __future__ import annotations
