"""Ops and kernels of ours that templates call."""
from __future__ import annotations
