"""Families generate what they generate unstreamed: greedily, and by seeded sampling, with padding on the left."""
from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tiny_configs import FIRST_PLAIN_TOKEN, VOCABULARY, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

import megacompile

FAMILIES = ("gemma3_text", "mixtral", "gpt_neox", "mamba2", "phi3", "qwen3_next", "olmo2", "gpt2", "falcon", "cohere2")


def generated(model: Any, **how: Any) -> Tensor:
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 7, [0] * 2 + [1] * 5, [0] * 4 + [1] * 3])
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on padding and sampling
        return model.generate(input_ids=ids * mask, attention_mask=mask, max_new_tokens=6, pad_token_id=0, eos_token_id=None,
                              **how)


@pytest.mark.parametrize("family", [FAMILIES[0], *(pytest.param(each, marks=pytest.mark.on_demand) for each in FAMILIES[1:])])
def test_a_family_generates_what_it_generates_unstreamed(family: str) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(family)).float().eval()
    model = megacompile.stream(copy.deepcopy(plain), device="cpu")
    for how in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        assert torch.equal(generated(model, **how), generated(plain, **how))
    model.megacompile.close()
