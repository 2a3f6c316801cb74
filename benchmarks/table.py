"""The rows of `benchmarks/results/step.jsonl` as a Markdown table.

    python benchmarks/table.py [FILE]
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

from tabulate import tabulate

COLUMNS = {"layers": "layers", "K": "checkpoint_interval", "residuals kept": "saved_layers", "step": "step", "TFLOPS": "tflops",
           "step, s": "step_s", "GPU, GiB": "peak_device_gib", "predicted": "predicted_device_gib",
           "checkpoints": "checkpoint_gib", "host, bytes/parameter": "host_bytes_per_parameter"}


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results/step.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        kind = f"train_step, {row['waves']} waves" if row.get("train_step") else "loop"
        clip = "updates on arrival" if row.get("overlap") else "clipped" if row["max_grad_norm"] else "unclipped"
        row["step"] = "compute alone" if row["compute_only"] else f"{kind}, {clip}"
        row["tflops"], row["step_s"] = f"{row['tflops']:.0f}", f"{row['step_s']:.2f}"
        for size in ("peak_device_gib", "predicted_device_gib", "checkpoint_gib"):
            row[size] = f"{row[size]:.1f}"
    print(tabulate([[row[key] for key in COLUMNS.values()] for row in rows], list(COLUMNS), tablefmt="github",
                   disable_numparse=True))


if __name__ == "__main__":
    main()
