"""Modules of Python's library that are complete only on Linux. Import them from here: other systems are then refused with a
clear message."""
from __future__ import annotations

import platform
import sys

from megacompile.errors import UnsupportedError

_REMEDY = "use a Linux machine or container"

if sys.platform != "linux":
    raise UnsupportedError(f"megacompile runs on Linux, and this is {platform.system()}: {_REMEDY}")

try:
    import fcntl as fcntl
    import resource as resource
except ModuleNotFoundError as error:
    raise UnsupportedError(f"megacompile runs on Linux, and this {platform.system()} has a Python without {error.name}: "
                           f"{_REMEDY}") from None
