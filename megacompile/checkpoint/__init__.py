"""Checkpoints of a training run: everything that it needs to go on to the bit. `docs/checkpoints.md` has the format.

    values.py, files.py, manifest.py   what is written: values, tensors, and what says which
    folders.py                         how a checkpoint comes to be whole or not at all
    subject.py, random_state.py        what is saved
    writer.py, loading.py              saving beside training; going on
"""
from __future__ import annotations

from megacompile.checkpoint.folders import latest_checkpoint
from megacompile.checkpoint.loading import load_checkpoint
from megacompile.checkpoint.writer import CheckpointWriter, save_checkpoint

__all__ = ["CheckpointWriter", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]
