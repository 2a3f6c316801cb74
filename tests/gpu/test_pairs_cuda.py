"""Masks of token pairs on CUDA: the kernel against explicit scores, and bf16 models against native PyTorch."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import assert_same_gradients
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.frontend.ops.attention import attention

pytestmark = pytest.mark.gpu
LENGTH = 203  # of no multiple of anything, so that rows of a mask begin anywhere


def seen(heads: int = 1) -> Tensor:
    """Any keys, and each query itself."""
    generator = torch.Generator().manual_seed(heads)
    return (torch.rand(3, heads, LENGTH, LENGTH, generator=generator) > 0.5) | torch.eye(LENGTH, dtype=torch.bool)


def prefix() -> Tensor:
    """So many tokens of each row see each other both ways; what follows is causal."""
    prompts = torch.arange(LENGTH) < torch.tensor([0, 77, LENGTH])[:, None, None, None]
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() | prompts


def fill_free_memory_with_nan() -> None:
    """So that what is read before it is written shows."""
    blocks = [torch.full((2**size,), float("nan"), device="cuda") for size in (*range(7, 24), *range(7, 24))]
    del blocks


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(1, 2), (8, 2), (1, 8)])
def test_the_kernel_is_explicit_scores(heads: int, groups: int, has_sinks: bool) -> None:
    """With queries that see nothing; where each has its own keys, all three are of one projection's result."""
    torch.manual_seed(0)
    projected = torch.randn(3, LENGTH, 8 + 2 * groups, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    given = [x.detach().requires_grad_() for x in projected.split([8, groups, groups], 1)]
    if has_sinks:
        given.append(torch.randn(8, device="cuda", dtype=torch.bfloat16).requires_grad_())
    exact = [x.detach().float().requires_grad_() for x in given]
    mask = seen(heads).cuda()
    mask[0, :, 5] = mask[2, :, -1] = False
    fill_free_memory_with_nan()
    out, _ = attention(*given[:3], 0.125, 0, 0.0, "efficient", mask, *given[3:])
    expected, _ = attention(*exact[:3], 0.125, 0, 0.0, "math", mask, *exact[3:])
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=2e-2)
    assert not out[0, :, 5].any() and not out[2, :, -1].any()
    sent = torch.randn_like(expected)
    fill_free_memory_with_nan()
    for ours, theirs in zip(torch.autograd.grad(out, given, sent.bfloat16()), torch.autograd.grad(expected, exact, sent),
                            strict=True):
        assert (ours.float() - theirs).norm() <= 2e-2 * theirs.norm()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(found.transpose(1, 2).reshape(x.shape))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 256), nn.Linear(256, 512)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor, mask: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return (F.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten()),)


@pytest.mark.parametrize("what", ["a prefix", "of each head", "added", "one's own"])
def test_a_model_trains_as_native_pytorch_does(what: str) -> None:
    """In bf16, compiled, beside float32."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2)
    own = what == "one's own"
    native: Any = Masked().bfloat16() if own else AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    biases = torch.randn(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
    mask = {"a prefix": prefix(), "of each head": seen(4), "added": biases.bfloat16(), "one's own": seen()}[what]
    ids = torch.randint(0, 512, (3, LENGTH))
    batch = {"input_ids": ids, "labels": ids, ("mask" if own else "attention_mask"): mask}
    model = megacompile.stream(copy.deepcopy(native), micro_batch_size=2, example=batch if own else None)
    native.float().cuda()
    loss = model(**{name: x.cuda() for name, x in batch.items()})[0]
    expected = native(**{name: x.cuda().float() if x.is_floating_point() else x.cuda() for name, x in batch.items()})[0]
    assert abs(float(loss.detach()) - float(expected.detach())) < 2e-2
    loss.backward()
    expected.backward()
    assert_same_gradients(model, native, 0.05)
    model.megacompile.close()
