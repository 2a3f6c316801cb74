"""megacompile: train decoder models whose weights, gradients and optimizer state live in host memory.

Importing the package imports almost none of its modules. Names and modules are loaded on first access (PEP 562).
"""
from __future__ import annotations

import importlib
import importlib.util
import pathlib
from typing import TYPE_CHECKING, Any

_checkout = pathlib.Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").exists() and (_checkout / "passes").is_dir():
    # In a checkout, `megacompile.passes` and `megacompile.runtime` are folders next to this one. In an installed wheel they
    # are inside the package.
    __path__.append(str(_checkout))

from megacompile.errors import MegacompileError  # noqa: E402  (after the path is complete)
from megacompile.version import __version__  # noqa: E402, F401  (public)

__all__ = ["SGD", "AdamW", "CheckpointWriter", "Float8", "Lion", "MegacompileError", "Muon", "dequantize", "explain_capture",
           "from_config", "from_pretrained", "latest_checkpoint", "layer_stack", "load_checkpoint", "quantize",
           "register_layers", "save_checkpoint", "schedule", "stream"]

#: The module of each public name. The imports under `TYPE_CHECKING` below tell type checkers the same; a test compares both.
_MODULE_OF = {
    "AdamW": "megacompile.streaming.optimizer.adamw",
    "CheckpointWriter": "megacompile.checkpoint",
    "Float8": "megacompile.ir.precision",
    "Lion": "megacompile.streaming.optimizer.lion",
    "Muon": "megacompile.streaming.optimizer.muon",
    "SGD": "megacompile.streaming.optimizer.sgd",
    "dequantize": "megacompile.weights.quantizing",
    "explain_capture": "megacompile.capture_report",
    "from_config": "megacompile.loading",
    "from_pretrained": "megacompile.loading",
    "latest_checkpoint": "megacompile.checkpoint",
    "layer_stack": "megacompile.frontend.tracing.layers",
    "load_checkpoint": "megacompile.checkpoint",
    "quantize": "megacompile.weights.quantizing",
    "register_layers": "megacompile.frontend.tracing.layers",
    "save_checkpoint": "megacompile.checkpoint",
    "schedule": "megacompile.scheduling",
    "stream": "megacompile.api",
}

if TYPE_CHECKING:
    from megacompile.api import stream
    from megacompile.capture_report import explain_capture
    from megacompile.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint, save_checkpoint
    from megacompile.frontend.tracing.layers import layer_stack, register_layers
    from megacompile.ir.precision import Float8
    from megacompile.loading import from_config, from_pretrained
    from megacompile.scheduling import schedule
    from megacompile.streaming.optimizer.adamw import AdamW
    from megacompile.streaming.optimizer.lion import Lion
    from megacompile.streaming.optimizer.muon import Muon
    from megacompile.streaming.optimizer.sgd import SGD
    from megacompile.weights.quantizing import dequantize, quantize
else:
    def __getattr__(name: str) -> Any:
        """Imports a public name or a module of the package on first access."""
        if name in _MODULE_OF:
            found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            found = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
