"""Predicts the cost of a program: FLOPs, bytes, seconds, and the machines with known rates."""
from __future__ import annotations
