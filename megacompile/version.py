"""The version of the package, in a module of its own so that it can be read without importing the package."""
from __future__ import annotations

__version__ = "0.1.0"
