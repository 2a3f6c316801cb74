"""The vocabulary of schedules: ops, programs, plans, and their text."""
from __future__ import annotations
