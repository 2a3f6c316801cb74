"""What a program will take, before it runs: FLOPs, bytes, seconds, and the machines that rates are known of."""
from __future__ import annotations
