"""Fine-tuning in one command, `megacompile train`. Read in the order in which data passes through:

    files.py     JSON, JSON lines, CSV, Parquet, data sets -> rows, each a dict with its number
    formats.py   a row -> the messages of a conversation, or a text
    chat.py      a conversation -> token ids, and which of them are learnt
    rows.py      the sequences that a model is trained on, and batches of them in an order that only a seed decides
    packing.py   texts, or conversations, that share sequences
    data.py      all of this: what --data names -> rows
    settings.py  what a run is asked for, in flags or in a YAML file
    recipe.py    the numbers that decide what is learned, and their defaults for each kind of run
    refused.py   options of other trainers that are refused, with what to use instead
    saves.py     checkpoints, beside training and at the end
    progress.py  what is measured of each step, and how it is shown
    reports.py   what is written of a run: log.jsonl, loss.svg
    trackers.py  TensorBoard, W&B and MLflow, which get the same
    run.py       the run itself
"""
from __future__ import annotations
