"""Fine-tuning with one command, `megacompile train`. The modules, in the order in which data passes through them:

    files.py     reads rows from JSON, JSON lines, CSV, Parquet and data sets
    formats.py   converts a row into the messages of a conversation, or a text
    chat.py      converts a conversation into token ids and marks those that are learned
    rows.py      the sequences that a model is trained on, and their order, which depends only on a seed
    packing.py   puts several texts or conversations into one sequence
    data.py      all of these together: from the arguments of --data to rows
    settings.py  the settings of a run, from options or a YAML file
    refused.py   options of other trainers that are refused, with the reason and the replacement
    saves.py     checkpoints during training and at its end
    progress.py  measures each step and shows progress
    reports.py   the files of a run: log.jsonl, loss.svg
    trackers.py  sends the same values to TensorBoard, W&B and MLflow
    run.py       the run itself

The hyperparameters and their defaults for each kind of run are in `megacompile/tools/recipe.py`.
"""
from __future__ import annotations
