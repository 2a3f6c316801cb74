"""Two ranks move the biases of routers alike, by the loads of all rows."""
from __future__ import annotations

from pathlib import Path

import torch
from expert_load_run import RATE, STEPS, rows_of
from processes import start
from test_expert_adapters import base
from test_expert_loads import counted

RUN = Path(__file__).parents[1] / "support" / "expert_load_run.py"


def test_biases_follow_the_loads_of_all_ranks(tmp_path: Path) -> None:
    first, second = start(RUN, 2, tmp_path).results()
    native = base("deepseek_v3")
    for step in range(STEPS):
        for layer, load in counted(native, [rows_of(native, step, rank) for rank in range(2)]).items():
            bias = native.get_submodule(layer).mlp.gate.e_score_correction_bias
            bias.data += RATE * torch.sign(load.double().mean() - load).to(bias)
    expected = {name: bias.tolist() for name, bias in native.named_buffers() if name.endswith("e_score_correction_bias")}
    assert first == second == expected and any(map(any, expected.values()))
