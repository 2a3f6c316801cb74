"""Two GPUs have the tokens of each sequence together: losses, gradients and weights of native PyTorch in fp32."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import start
from sequence_jobs import train_native
from test_ranks_sequences import SCRIPT, assert_trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
JOBS = ("llama", "qwen2", "documents", "windows", "uneven heads", "one group", "chunks", "attention kept", "arrival")


def test_two_gpus_train_divided_sequences_as_native_pytorch(tmp_path: Path) -> None:
    start(SCRIPT, 2, tmp_path, ["1", *JOBS], fork=False, JOB_DEVICE="cuda").results(420)
    for name in JOBS:
        expected = train_native(name, 1)
        for rank in range(2):
            assert_trained(name, torch.load(tmp_path / f"{name}.{rank}.pt"), expected, drift=5e-4)
