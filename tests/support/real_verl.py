"""verl itself on a CPU, in an environment of its own, whose interpreter `MEGACOMPILE_VERL_PYTHON` names.

To make the environment, with the torch of `constraints.txt` for CPUs: `pip install torch==2.13.0 verl==0.9.1 uvicorn fastapi
sympy tabulate typer`. verl brings a transformers that is older than those of megacompile's own tests.
"""
from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: The interpreter of verl's environment; empty without one.
PYTHON = os.environ.get("MEGACOMPILE_VERL_PYTHON", "")
LIMIT_S = 600


def run(*arguments: str, ranks: int = 1, device: str = "cpu") -> str:
    """The output of a script or a module ("-m NAME") on so many ranks. `device`: for which verl chooses an engine; its own are
    registered for "cuda". Raises `AssertionError` with the end of the log if it fails."""
    own = {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": device, "HF_HUB_OFFLINE": "1",
           "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support"))), "OMP_NUM_THREADS": "1",
           "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *arguments]
    with tempfile.TemporaryDirectory() as folder:  # Hydra writes its settings there
        done = subprocess.run(command, env={**os.environ, **own}, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
                              check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def case(name: str, ranks: int = 1, **arguments: Any) -> Any:
    """What a case of `verl_run.py` returns."""
    script = str(Path(__file__).parent / "verl_run.py")
    return json.loads(run(script, name, json.dumps(arguments), ranks=ranks).splitlines()[-1])
