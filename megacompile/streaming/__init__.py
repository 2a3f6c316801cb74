"""One streamed model: its state, the calls of its user, and its optimizer."""
from __future__ import annotations
