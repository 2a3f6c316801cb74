"""megacompile: train decoder models whose weights, gradients and optimizer state live in host memory."""
from __future__ import annotations

import pathlib

_checkout = pathlib.Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").exists() and (_checkout / "passes").is_dir():
    # Run from a checkout: `megacompile.passes` and `megacompile.runtime` are the folders beside this one. Installed
    # wheels have them inside the package already.
    __path__.append(str(_checkout))

__version__ = "0.1.0"

from megacompile.api import stream  # noqa: E402  (after the path is complete)
from megacompile.capture_report import explain_capture  # noqa: E402
from megacompile.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint, save_checkpoint  # noqa: E402
from megacompile.errors import MegacompileError  # noqa: E402
from megacompile.frontend.layers import layer_stack, register_layers  # noqa: E402
from megacompile.loading import from_pretrained  # noqa: E402
from megacompile.optim import AdamW  # noqa: E402
from megacompile.schedule import schedule  # noqa: E402

__all__ = ["AdamW", "CheckpointWriter", "MegacompileError", "explain_capture", "from_pretrained", "latest_checkpoint",
           "layer_stack", "load_checkpoint", "register_layers", "save_checkpoint", "schedule", "stream"]
