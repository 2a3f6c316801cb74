"""A job in which one rank does something wrong, and how each rank of it ended."""
from __future__ import annotations

import json
import time
from typing import Any

import pytest
from processes import Job

#: Exit code of a process that ends with an exception, and not by a signal such as that of an abort.
RAISED = 1
#: Trains until rank 1, or the rank of the second argument, does what the first says. Each rank writes how it ended.
SCRIPT = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
import torch
import engine, megacompile
from megacompile.ir.program import OPS, nodes, op_of
from jobs import LR, even, qwen2
from transformers import Qwen2Config, AutoModelForCausalLM

OPTIONS = {"pack_shard": {"pinned_memory": "32KiB"}, "gather_resident": {"resident_state": "all"},
           "share_host_norms": {"micro_batch_size": 1, "waves": 3, "host_sums": "all"}}
rank, fault, folder = int(os.environ["RANK"]), sys.argv[1], Path(os.environ["RESULTS"])
faulty = rank == (int(sys.argv[2]) if len(sys.argv) > 2 else 1)

def end(error):
    (folder / f"{rank}.json").write_text(json.dumps({"error": type(error).__name__, "message": str(error), "at": time.time()}))
    raise error

try:
    if fault == "version" and faulty:
        import megacompile.runtime.ranks as ranks
        ranks.__version__ = "0.0.1"
    if fault == "cannot be captured" and faulty:
        model = torch.nn.Linear(3, 3)
    elif fault == "other model" and faulty:
        config = qwen2().config
        config.intermediate_size = 32
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = qwen2()
    options = {"stall_timeout": 3.0} if fault == "late" else {}
    options |= OPTIONS.get(fault, {})
    if "divided" in sys.argv:  # one copy of the model among all hosts
        torch.distributed.init_process_group("gloo")
        options["mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options |= {"saved_layers": 1} if fault == "other options" and faulty else {}
    model = megacompile.stream(model, device="cpu", compile=False, **options)
    kind = megacompile.Muon if fault.endswith("momentum") else megacompile.AdamW
    optimizer = kind(model.parameters(), lr=LR, max_grad_norm=1.0)
    loop = fault.startswith("loop")

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.01)
        time.sleep(0.3)

    def last_update_fails(node):  # while an instruction of the next forward takes longer than rank 0 lives
        if op_of(node).name == "gather":
            (folder / "gathers").touch()
            wait_for("failed")
            time.sleep(2)
        if node is last:
            wait_for("gathers")
            (folder / "failed").touch()
            raise RuntimeError("power cut")

    def ends(node):
        if op_of(node).name == "gather":
            wait_for("failed")
            os._exit(0)

    for step in range(10**6):
        batch = even(rank, step)
        if fault == "loop, update" and faulty and step == 2:
            model.megacompile.synchronize()
            (*_, last) = [each for each in nodes(model.megacompile.program().section("update")) if op_of(each).name == "update"]
            model(**batch).loss.backward()
            engine.probe(model, last_update_fails)
            optimizer.step()
            optimizer.zero_grad()
            continue
        if fault == "loop, update" and not faulty and step == 3:
            engine.probe(model, ends)
        if faulty and step == 3:
            (folder / "begun").write_text(str(time.time()))
            if fault == "raises":
                raise ValueError("no more rows")
            if fault in OPS:
                def probe(node):
                    if op_of(node).name == fault:
                        raise RuntimeError("power cut")
                engine.probe(model, probe)
            if fault == "loop, other call":
                model.megacompile.train_step(batch, optimizer)
            if fault == "late":
                time.sleep(10)
            if fault == "exits":
                sys.exit(0)
        if fault == "waits in C" and not faulty and step == 3:  # as in CUDA, for an exchange that never ends
            engine.backend(model).busy = lambda lane: True
            (folder / "waits").touch()
            ctypes.CDLL(None).sleep(120)
        if loop:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            model.megacompile.train_step(batch, optimizer)
except BaseException as error:
    end(error)
"""


def ended(job: Job, rank: int) -> dict[str, Any]:
    return json.loads((job.folder / f"{rank}.json").read_text())


def began(job: Job, rank: int = 1, seconds: float = 240.0) -> float:
    """When a rank began what goes wrong."""
    limit = time.monotonic() + seconds
    while not (job.folder / "begun").exists() or not (text := (job.folder / "begun").read_text()):
        assert time.monotonic() < limit and job.processes[rank].poll() is None, job.errors(0) + job.errors(rank)
        time.sleep(0.1)
    return float(text)


def nightly(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.nightly)
