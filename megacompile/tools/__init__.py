"""What commands share: options, checks of a machine, measured rates."""
from __future__ import annotations
