"""Fine-tuning with one command, `megacompile train`. The modules, in the order in which data passes through them:

    settings.py            the settings of a run, from options or a YAML file; options of other trainers that are refused
    data.py                from the arguments of --data to rows: reads files, packs texts and conversations
    tools.py, formats.py   convert a row into the messages of a conversation, or a text
    chat.py                converts a conversation into token ids and marks those that are learned
    answers.py             rows for TRL's tasks: preferences and verdicts
    training_sequences.py  the sequences that a model is trained on, and their order, which depends only on a seed
    preparation.py         a run before its weights are loaded
    train_command.py       the run itself
    driver.py              the trainer of a run: our Trainer, or that of a TRL task, with the run's checkpoints and log
    saves.py               checkpoints during training and at its end
    run_progress.py        shows progress
    reports.py             the files of a run: log.jsonl, loss.svg
    trackers.py            sends the same values to TensorBoard, W&B and MLflow
    launch.py              one process for each GPU

The hyperparameters and their defaults for each kind of run are in `megacompile/tools/recipe.py`.
"""
from __future__ import annotations
