"""A kernel in place of one of flash-linear-attention's that Triton 3.4 to 3.7.0 compiles wrongly on Hopper (its issue 640).

Import this module only where Triton is installed.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["length"])
def _chunk_gradients(query, key, value, grad_out, state, grad_state, grad_value, total,  # type: ignore[no-untyped-def]
                     of_query, of_key, of_corrected, of_total, bounds, chunks, scale, length, tokens, groups: tl.constexpr,
                     heads: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, size: tl.constexpr,
                     part: tl.constexpr, value_part: tl.constexpr, packed: tl.constexpr, corrects: tl.constexpr):
    chunk, head, which = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if packed:
        sequence = tl.load(chunks + 2 * chunk)
        begin = tl.load(bounds + sequence).to(tl.int64) + tl.load(chunks + 2 * chunk + 1) * size
        end = tl.load(bounds + sequence + 1).to(tl.int64)
    else:
        count = tl.cdiv(length, size)
        end = (chunk // count + 1) * length
        begin = end - length + (chunk % count) * size
    rows = begin + tl.arange(0, size)
    inside = rows < end
    channels = which * part + tl.arange(0, part)
    real = channels < width
    of_head = rows * heads + head
    of_group = rows * groups + head // (heads // groups)
    states = (chunk * heads + head) * width * value_width

    grad_q, grad_k, grad_c = (tl.zeros([size, part], tl.float32), tl.zeros([size, part], tl.float32),
                              tl.zeros([size, part], tl.float32))
    # A pair of tokens twice: Triton 3.4 to 3.7.0 multiplies wrongly with the transpose of a product in registers on Hopper.
    reads, read_by = tl.zeros([size, size], tl.float32), tl.zeros([size, size], tl.float32)
    of_last = 0.0
    for at in range(0, value_width, value_part):
        places = at + tl.arange(0, value_part)
        mask = inside[:, None] & (places < value_width)[None, :]
        where = of_head[:, None] * value_width + places[None, :]
        values, outs = tl.load(value + where, mask=mask, other=0.0), tl.load(grad_out + where, mask=mask, other=0.0)
        there = states + places[:, None] + channels[None, :] * value_width
        known = (places < value_width)[:, None] & real[None, :]
        before, after = tl.load(state + there, mask=known, other=0.0), tl.load(grad_state + there, mask=known, other=0.0)
        of_last += tl.sum(before.to(tl.float32) * after.to(tl.float32))
        reads = tl.dot(outs, tl.trans(values), reads, allow_tf32=False)
        read_by = tl.dot(values, tl.trans(outs), read_by, allow_tf32=False)
        grad_q = tl.dot(outs, before.to(values.dtype), grad_q, allow_tf32=False)
        grad_k = tl.dot(values, after.to(values.dtype), grad_k, allow_tf32=False)
        if corrects:
            changes = tl.load(grad_value + where, mask=mask, other=0.0).to(values.dtype)
            grad_c = tl.dot(changes, before.to(values.dtype), grad_c, allow_tf32=False)

    mask = inside[:, None] & real[None, :]
    put = of_head[:, None] * width + channels[None, :]
    if corrects:
        tl.store(of_corrected + put, -grad_c, mask=mask)
    take = of_group[:, None] * width + channels[None, :]
    queries, keys = tl.load(query + take, mask=mask, other=0.0), tl.load(key + take, mask=mask, other=0.0)
    final = tl.minimum(begin + size, end) - 1
    passed, all_passed = tl.load(total + of_head, mask=inside, other=0.0), tl.load(total + final * heads + head)
    grad_q = grad_q * (tl.exp2(passed) * scale)[:, None]
    grad_k = grad_k * tl.where(inside, tl.exp2(all_passed - passed), 0.0)[:, None]
    of_last = of_last * tl.exp2(all_passed) + tl.sum(grad_k * keys)
    both = inside[:, None] & inside[None, :]
    between = passed[:, None] - passed[None, :]
    reads = tl.where(both & (rows[:, None] >= rows[None, :]), reads * tl.exp2(between), 0.0) * scale
    read_by = tl.where(both & (rows[:, None] <= rows[None, :]), read_by * tl.exp2(-between), 0.0) * scale
    grad_q = tl.dot(reads.to(keys.dtype), keys, grad_q, allow_tf32=False)
    grad_k = tl.dot(read_by.to(queries.dtype), queries, grad_k, allow_tf32=False)
    found = tl.sum(grad_q * queries, 1) - tl.sum(grad_k * keys, 1)
    tl.store(of_query + put, grad_q, mask=mask)
    tl.store(of_key + put, grad_k, mask=mask)
    tl.store(of_total + which * tokens + of_head, tl.where(rows == final, found + of_last, found), mask=inside)


def chunk_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, w: Tensor | None = None, g: Tensor | None = None,
    g_gamma: Tensor | None = None, dv: Tensor | None = None, scale: float = 1.0, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, chunk_size: int = 64, chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """What flash-linear-attention's `chunk_bwd_dqkwg` returns: the gradients of queries, keys, of the keys that a delta rule
    corrects, and of `g`, the sums of logarithms (of base 2) of decays within each chunk.

    q, k [B, T, H, K]; v, do, dv [B, T, Hv, V]; h, dh [B, chunks, Hv, K, V], the states before chunks and the gradients of those
    after them; w [B, T, Hv, K]; g float32 [B, T, Hv]. With `cu_seqlens`, `chunk_indices` are the sequence and the place there
    of each chunk."""
    assert g is not None and g_gamma is None and not state_v_first
    assert cu_seqlens is None or chunk_indices is not None, "chunks of sequences have indices"
    batch, length, groups, width = k.shape
    heads, value_width = v.shape[2:]
    chunks = batch * triton.cdiv(length, chunk_size) if chunk_indices is None else len(chunk_indices)
    part, value_part = (min(64, max(16, triton.next_power_of_2(each))) for each in (width, value_width))
    parts = triton.cdiv(width, part)
    of_q, of_k = (x.new_empty(batch, length, heads, width) for x in (q, k))
    of_w = None if w is None else torch.empty_like(w)
    of_g = g.new_empty(parts, *g.shape)
    q, k, v, do, h, dh, g = (x.contiguous() for x in (q, k, v, do, h, dh, g))
    _chunk_gradients[(chunks, heads, parts)](
        q, k, v, do, h, dh, None if dv is None else dv.contiguous(), g, of_q, of_k, of_w, of_g, cu_seqlens, chunk_indices,
        scale, length, g.numel(), groups, heads, width, value_width, chunk_size, part, value_part, cu_seqlens is not None,
        w is not None, num_warps=4, num_stages=2)
    if heads != groups:
        of_q, of_k = (x.view(batch, length, groups, -1, width).sum(3) for x in (of_q, of_k))
    return of_q, of_k, of_w, of_g.sum(0)
