"""Kernels of padded and packed rows on CUDA against explicit scores, and bf16 models against native PyTorch."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import assert_same_gradients
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.frontend.ops.attention import attention
from megacompile.frontend.ops.segmented_attention import Bounds

pytestmark = pytest.mark.gpu
LENGTH = 200
PADDED = torch.where(torch.arange(LENGTH) >= torch.tensor([[0], [37], [199]]), 0, -1).int()
PACKED = torch.stack([(torch.arange(LENGTH) // n) for n in (200, 64, 7)]).int()


@pytest.mark.parametrize(("kernel", "segments", "window"), [
    ("flash_packed", PACKED, 0), ("flash_packed", PACKED, 16), ("efficient", PADDED, 0)],
    ids=["packed", "packed, a window", "padded"])
def test_kernels_are_explicit_scores(kernel: str, segments: torch.Tensor, window: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(3, heads, LENGTH, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
             .requires_grad_() for heads in (8, 2, 2)]
    exact = [x.detach().float().requires_grad_() for x in given]
    segments = segments.cuda()
    out, logsumexp = attention(*given, 0.125, window, 0.0, kernel, segments)
    expected, lse = attention(*exact, 0.125, window, 0.0, "math", segments)
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=2e-2)
    seen = (segments >= 0).cumsum(1) > 0
    torch.testing.assert_close(logsumexp.transpose(1, 2)[seen], lse.transpose(1, 2)[seen], rtol=0, atol=2e-2)
    sent = torch.randn_like(expected)
    for ours, theirs in zip(torch.autograd.grad(out, given, sent.bfloat16()), torch.autograd.grad(expected, exact, sent),
                            strict=True):
        assert (ours.float() - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize("what", ["packed", "padded", "dropout"])
def test_a_model_trains_as_native_pytorch_does(what: str) -> None:
    """In bf16, compiled, beside float32: bf16 kernels of PyTorch give a query that sees nothing, padding on the left, values of
    their own, where those of float32 give zeros. With dropout the loss alone, since native PyTorch draws other masks."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, attention_dropout=0.1 * (what == "dropout"))
    native: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model = megacompile.stream(copy.deepcopy(native), micro_batch_size=2)
    native.float().cuda()
    ids = torch.randint(0, 512, (3, LENGTH))
    positions = torch.stack([torch.arange(LENGTH) % n for n in (200, 64, 7)])
    further = {"packed": {"position_ids": positions}, "padded": {"attention_mask": (PADDED >= 0).long()}, "dropout": {}}[what]
    batch = {name: x.cuda() for name, x in {"input_ids": ids, "labels": ids, **further}.items()}
    loss, expected = model(**batch).loss, native(**batch, use_cache=False).loss
    assert abs(float(loss.detach()) - float(expected.detach())) < 2e-2
    loss.backward()
    expected.backward()
    if what == "dropout":  # other masks than native's
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    else:
        assert_same_gradients(model, native, 0.05)
    model.megacompile.close()


def test_kernels_for_several_rows_serve_a_single_one() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2)
    native: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model = megacompile.stream(copy.deepcopy(native), micro_batch_size=2, repack=256)
    native.float().cuda()
    ids, lengths = torch.randint(0, 512, (4, 250)), torch.tensor([250, 240, 130, 100])[:, None]
    mask = (torch.arange(250) < lengths).long()
    batch = {name: x.cuda() for name, x in {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100),
                                            "attention_mask": mask}.items()}
    loss, expected = model(**batch).loss, native(**batch, use_cache=False).loss
    assert abs(float(loss.detach()) - float(expected.detach())) < 2e-2
    loss.backward()
    expected.backward()
    assert_same_gradients(model, native, 0.05)
    assert model.megacompile.plan.micro_batches == (2, 1)
    stats = model.megacompile.stats
    assert stats["variants_of_any_size"] == stats["compiled_variants"]
    model.megacompile.close()


def test_where_sequences_begin_is_known_before_queued_copies_end() -> None:
    """A step begins while the last one's weights are still copied to the host."""
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]], dtype=torch.int32)
    memory, target = torch.zeros(2**30, dtype=torch.uint8, device="cuda"), torch.zeros(2**30, dtype=torch.uint8).pin_memory()
    copies, done = torch.cuda.Stream(), torch.cuda.Event()
    on_device = segments.cuda()
    Bounds.of(on_device.clone())  # compiles the kernel, and pins memory
    torch.cuda.synchronize()
    with torch.cuda.stream(copies):
        for _ in range(8):
            target.copy_(memory, non_blocking=True)
        done.record()
    found = Bounds.of(on_device)
    assert not done.query()
    assert found.on_host.tolist() == found.starts.tolist() == [0, 2, 5, 6, 7, 12] and found.longest == 5
