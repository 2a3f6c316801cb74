"""The verifier: rules that every section must satisfy after every pass."""
from __future__ import annotations
