#!/usr/bin/env bash
# Everything that needs one CUDA GPU: the GPU tests, then the rows of docs/performance.md, appended to $1 as JSON lines.
set -u
out=${1:-benchmarks/results/step.jsonl}
row() { timeout "${limit:-200}" python3 benchmarks/step.py --append "$out" "$@" || echo "FAILED: $*"; }
export OMP_WAIT_POLICY=passive  # spinning OpenMP threads take cores from the lanes
python3 -m pytest tests/gpu tests/unit/test_templates.py -m gpu -q --import-mode=importlib --tb=short
row --saved-layers 0                          # every layer recomputed: the least memory at K = 1
row --saved-layers 0 --compute-only           # the same templates computing alone
row                                           # the planner's own choice
row --compute-only
row --saved-layers 0 --checkpoint-interval 4
row --saved-layers 0 --layers 16
row --saved-layers 0 --layers 8
