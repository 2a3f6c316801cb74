"""Parts of the commands: shared options, checks of a machine, and measured rates."""
from __future__ import annotations
