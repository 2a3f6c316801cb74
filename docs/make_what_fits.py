"""Plans every model of a list on every machine of a list, and writes docs/what-fits.md and the page's data from the plans.

    python docs/make_what_fits.py            makes the missing plans (all: an hour or two of one core), then the page
    python docs/make_what_fits.py Qwen3-8B   makes the missing plans of these models
    python docs/make_what_fits.py --page     only the page

Plans are kept in docs/what-fits.jsonl, a line each. Delete lines there to have them made again.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PAGE, PLANS = ROOT / "docs" / "what-fits.md", ROOT / "docs" / "what-fits.jsonl"
CHOOSER = ROOT / "docs" / "extra" / "what-fits-chooser.html"
BATCH, LENGTH = 64, 1024
#: The share of the host's memory that is left to training.
HOST_SHARE = 0.94

HEAD = """# What fits

Find your machine, then your model. Each cell has tokens per second, then GiB of GPU memory and of host memory. A dash: it does
not fit. All figures are predicted by `megacompile plan`, except those in **bold**, which were measured
([results](performance.md)). A step has {batch} sequences of {length:,} tokens on each GPU. Predictions for an H200 were within
10% of what was measured ([results](performance.md#predictions)). Rates of the other machines come from data sheets, and nothing
was measured on them, so take their times as estimates.

- **full**: every weight is trained, with FP32 master weights and moments and exact gradient clipping (14 bytes a parameter).
- **reduced**: every weight is trained, with bf16 weights as their own masters, 8-bit moments, and updates as gradients arrive
  (4 bytes a parameter, no clipping).
- **LoRA**: adapters of rank 16 on all linear layers, over bf16 weights.
- **NF4**: the same over four-bit weights, also those of experts.

On the site, <a href="what-fits-chooser.html">choose</a> a machine, a model and a method. For another model or batch:
`megacompile plan MODEL --hardware rtx4090 --host-memory 64GiB`. `python docs/make_what_fits.py` makes this page.
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    name: str
    profile: str
    host_gb: int
    gpus: int = 1


MACHINES = (
    Machine("RTX 3090, 24 GB, host 64 GB", "rtx3090", 64), Machine("RTX 4090, 24 GB, host 64 GB", "rtx4090", 64),
    Machine("RTX 4090, 24 GB, host 128 GB", "rtx4090", 128), Machine("RTX 5090, 32 GB, host 128 GB", "rtx5090", 128),
    Machine("DGX Spark (GB10), 128 GB shared", "gb10", 64), Machine("L40S, 48 GB, host 256 GB", "l40s", 256),
    Machine("A100, 80 GB, host 256 GB", "a100", 256), Machine("H100, 80 GB, host 256 GB", "h100", 256),
    Machine("GH200, 96 GB, host 480 GB", "gh200", 480), Machine("H200, 141 GB, host 128 GB", "h200", 128),
    Machine("H200, 141 GB, host 256 GB", "h200", 256), Machine("B200, 192 GB, host 512 GB", "b200", 512),
    Machine("4 x RTX 4090, host 256 GB", "4xrtx4090", 256, 4), Machine("4 x RTX 5090, host 512 GB", "4xrtx5090", 512, 4),
    Machine("8 x H100, host 2 TB", "8xh100", 2048, 8),
)

_QWEN3 = dict(model_type="qwen3", vocab_size=151936, head_dim=128, num_key_value_heads=8)
#: Model -> fields of its config from transformers, or a name in benchmarks/shapes.py.
MODELS: dict[str, dict[str, Any] | str] = {
    "Llama-3.2-1B": dict(model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                         num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True),
    "Qwen3-4B": _QWEN3 | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
                              tie_word_embeddings=True),
    "Qwen3-8B": _QWEN3 | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
    "Qwen3.5-9B (hybrid)": "qwen3.5-9b",
    "Qwen3-14B": _QWEN3 | dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40),
    "GPT-OSS-20B (mixture)": "gpt-oss-20b",
    "Qwen3-30B-A3B (mixture)": "qwen3-moe-30b",
    "Qwen3-32B": _QWEN3 | dict(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64),
    "Llama-3.3-70B": "llama-70b",
    "GPT-OSS-120B (mixture)": "gpt-oss-120b",
}

#: Method -> arguments of `megacompile.schedule`, the rank of an adapter, the format of frozen weights.
METHODS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "full": ({}, 0, None),
    "reduced": (dict(optim="adamw_8bit", optim_args="master=bfloat16", update="arrival"), 0, None),
    "LoRA": ({}, 16, None),
    "NF4": ({}, 16, "nf4"),
}
#: (model, machine, method) -> tokens per second, GPU and host GiB, from docs/performance.md.
MEASURED: dict[tuple[str, str, str], tuple[int, float, float]] = {
    ("Qwen3-30B-A3B (mixture)", "H200, 141 GB, host 128 GB", "reduced"): (16085, 130.9, 117.5),
    ("GPT-OSS-20B (mixture)", "H200, 141 GB, host 128 GB", "reduced"): (14141, 128.7, 91.9),
}


def model_of(name: str, rank: int, stored: str | None) -> Any:
    """The model on the meta device, with an adapter if `rank` is not 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from shapes import config

    import megacompile
    from megacompile.loading import parameters_on_meta

    fields = MODELS[name]
    with parameters_on_meta():
        made = config(fields) if isinstance(fields, str) else AutoConfig.for_model(**fields, max_position_embeddings=32768)
        model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    if rank:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    return megacompile.quantize(model, stored) if stored else model


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """A context in which a model is traced once for all machines that need the same templates."""
    from megacompile import api

    traced: dict[Any, Any] = {}
    trace = api.capture

    def capture(model: Any, **options: Any) -> Any:
        key = id(model), options["target"], options["expert_pieces"]
        if key not in traced:
            traced[key] = model, trace(model, **options)  # the model too: its id must stay its own
        return traced[key][1]

    with mock.patch.object(api, "capture", capture):
        yield


def planned(model: Any, name: str, machine: Machine, method: str) -> dict[str, Any]:
    """The row of a plan: tokens/s and GiB, or why it does not fit."""
    import megacompile
    from megacompile.errors import MegacompileError
    from megacompile.planning.explain import candidate

    options = METHODS[method][0]
    row: dict[str, Any] = dict(model=name, machine=machine.name, method=method)
    try:
        found = megacompile.schedule(
            model, batch=BATCH, length=LENGTH, hardware=machine.profile, gpus=machine.gpus,
            host_memory=int(machine.host_gb * HOST_SHARE * 1e9), checkpoint_interval=1, whole_step=True, **options)
    except MegacompileError as error:
        return row | dict(refused=type(error).__name__, reason=str(error).splitlines()[0])
    made = candidate(found.planner, found.plan, whole_step=True)
    assert made.times is not None, "a plan that was chosen fits"
    seconds = made.times.step_s
    return row | dict(tokens_per_s=round(BATCH * LENGTH * machine.gpus / seconds), gpu_gib=round(made.device_bytes / 2**30, 1),
                      host_gib=round(made.host_bytes / 2**30, 1), micro_batch=found.plan.micro_batches[0],
                      step_s=round(seconds, 2))


def known() -> dict[tuple[str, str, str], dict[str, Any]]:
    rows = [json.loads(line) for line in PLANS.read_text().splitlines()] if PLANS.exists() else []
    return {(row["model"], row["machine"], row["method"]): row for row in rows}


def make_missing(names: Iterable[str]) -> None:
    done = {key for key, row in known().items() if row.get("host_gib", 0) is not None}
    for name in names:
        for method, (_, rank, stored) in METHODS.items():
            missing = [machine for machine in MACHINES if (name, machine.name, method) not in done]
            model = model_of(name, rank, stored) if missing else None
            with captured_once():
                for machine in missing:
                    row = planned(model, name, machine, method)
                    print(*row.values(), flush=True)
                    with PLANS.open("a") as file:
                        file.write(json.dumps(row) + "\n")


def cell(row: dict[str, Any] | None, measured: tuple[int, float, float] | None) -> str:
    if measured is not None:
        return f"**{measured[0]:,}** ({measured[1]:.0f}, {measured[2]:.0f})"
    if row is None:
        return "?"
    if "tokens_per_s" not in row:
        return "-"
    host = "?" if row["host_gib"] is None else f"{row['host_gib']:.0f}"
    return f"{row['tokens_per_s']:,} ({row['gpu_gib']:.0f}, {host})"


def complete() -> list[str]:
    """The models that have a plan for every machine and method."""
    rows = known()
    return [name for name in MODELS if all((name, machine.name, method) in rows for machine in MACHINES for method in METHODS)]


def page() -> str:
    rows, parts = known(), [HEAD.format(batch=BATCH, length=LENGTH)]
    for machine in MACHINES:
        parts.append(f"\n## {machine.name}\n\n| model | {' | '.join(METHODS)} |\n|{'---|' * (len(METHODS) + 1)}")
        for name in complete():
            cells = [cell(rows.get(key), MEASURED.get(key)) for key in ((name, machine.name, method) for method in METHODS)]
            parts.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


#: A page that shows one plan of the data that it holds. It loads nothing.
HTML = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What fits</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark }}
label {{ display: block; margin: .6rem 0 }} select {{ font: inherit; width: 100%; padding: .3rem }}
output {{ display: block; margin-top: 1.2rem; padding: 1rem; border: 1px solid gray; border-radius: .4rem }}
</style>
<h1>What fits</h1>
<p>A step has {batch} sequences of {length:,} tokens on each GPU. <a href="what-fits.html">All plans, and what the methods
mean</a>.</p>
<label>Machine <select id="machine"></select></label>
<label>Model <select id="model"></select></label>
<label>Method <select id="method"></select></label>
<output id="plan" aria-live="polite"></output>
<script>
const plans = {plans};
const chosen = ["machine", "model", "method"].map(name => document.getElementById(name));
chosen.forEach((select, part) => {{
  for (const value of new Set(plans.map(plan => plan[part]))) select.add(new Option(value));
  select.addEventListener("change", show);
}});
function show() {{
  const plan = plans.find(each => chosen.every((select, part) => each[part] === select.value));
  document.getElementById("plan").textContent = plan[3] === null ? "It does not fit: " + plan[6] :
    plan[3].toLocaleString("en") + " tokens/s, " + plan[4] + " GiB of GPU memory, " + (plan[5] ?? "?") +
    " GiB of host memory (" + plan[6] + ")";
}}
show();
</script>
</html>
"""


def chooser() -> str:
    plans: list[list[Any]] = []
    for (name, machine, method), row in known().items():
        if name in complete():
            key = name, machine, method
            figures = MEASURED.get(key) or [row.get(field) for field in ("tokens_per_s", "gpu_gib", "host_gib")]
            told = row.get("reason") or ("measured" if key in MEASURED else "predicted")
            plans.append([machine, name, method, *figures, told])
    return HTML.format(batch=BATCH, length=LENGTH, plans=json.dumps(plans).replace("<", "\\u003c"))


if __name__ == "__main__":
    if "--page" not in sys.argv[1:]:
        make_missing(sys.argv[1:] or MODELS)
    PAGE.write_text(page())
    CHOOSER.parent.mkdir(exist_ok=True)
    CHOOSER.write_text(chooser())
