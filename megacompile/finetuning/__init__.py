"""Fine-tuning in one command, `megacompile train`. Read in the order in which data passes through:

    files.py     JSON, JSON lines, CSV, Parquet, data sets -> rows, each a dict with its number
    formats.py   a row -> the messages of a conversation, or a text
    chat.py      a conversation -> token ids, and which of them are learnt
    packing.py   texts -> sequences of one length
    rows.py      the sequences that a model is trained on, and batches of them in an order that only a seed decides
    settings.py  what a run is asked for, in flags or in a YAML file
    run.py       data, model, loop, checkpoints, logs: the run itself
    reports.py   what is written of a run: log.jsonl, TensorBoard, loss.svg
"""
from __future__ import annotations
