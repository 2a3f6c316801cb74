"""Reads what a user passes to a streamed model into the batch that a program runs on."""
from __future__ import annotations
