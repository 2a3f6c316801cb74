"""Checkpoints of a training run: everything needed to resume it bit-exactly. `docs/checkpoints.md` describes the format.

    values.py, files.py, manifest.py   the file formats: values, tensors, and the manifest that lists them
    folders.py                         folders of checkpoints, which are created atomically
    subject.py, random_state.py        the state that is saved
    writer.py, loading.py              saving while training continues; resuming
"""
from __future__ import annotations

from megacompile.checkpoint.folders import latest_checkpoint
from megacompile.checkpoint.loading import load_checkpoint
from megacompile.checkpoint.writer import CheckpointWriter, save_checkpoint

__all__ = ["CheckpointWriter", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]
