#!/usr/bin/env bash
# Everything that needs one CUDA GPU, in one go: the GPU tests, then the rows of docs/performance.md, appended to $1 as JSON
# lines. Rows that are there already are made again: delete the file to start afresh.
set -u
out=${1:-benchmarks/results/step.jsonl}
row() { timeout "${limit:-200}" python3 benchmarks/step.py --append "$out" "$@" || echo "FAILED: $*"; }
python3 -m pytest tests/gpu -q --import-mode=importlib --tb=short
row --layers 28 --checkpoint-interval 1
row --layers 28 --checkpoint-interval 4 --steps 2
row --layers 16 --steps 2
row --layers 8 --steps 2
