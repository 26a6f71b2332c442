"""merge() and add() in one pass over memory, which is all that they take time for: in Triton.

Operators of torch would read and write what is merged three times as often, and are half as fast
where a tensor is a chunk of another one's rows. Triton comes with torch where that is built for
CUDA, and only there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a block


def launch(kernel: triton.JITFunction, *tensors: Tensor) -> None:
    """One of the kernels below, on the tensors that its first parameters name.

    Each is [batch, heads, seq, head_dim], as the first one is, or [batch, heads, seq].
    """
    batch, heads, seq, head_dim = tensors[0].shape
    strides = [stride for t in tensors for stride in t.stride()[:-1]]
    with torch.cuda.device(tensors[0].device):
        kernel[triton.cdiv(seq, ROWS), heads, batch](
            *tensors, *strides, seq, head_dim, DIM=triton.next_power_of_2(head_dim), ROWS=ROWS
        )


@triton.jit
def merge_kernel(
    o,
    lse,
    part,
    part_lse,
    out,
    o_batch,
    o_head,
    o_row,
    lse_batch,
    lse_head,
    part_batch,
    part_head,
    part_row,
    part_lse_batch,
    part_lse_head,
    out_batch,
    out_head,
    out_row,
    seq,
    head_dim,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)[None, :]
    is_row = row < seq
    is_element = is_row[:, None] & (d < head_dim)

    lse += batch * lse_batch + head * lse_head + row
    part_lse += batch * part_lse_batch + head * part_lse_head + row
    lse_1, lse_2 = tl.load(lse, is_row, 0.0), tl.load(part_lse, is_row, 0.0)
    weight = tl.sigmoid(lse_2 - lse_1)[:, None]  # of the part

    o += batch * o_batch + head * o_head + row[:, None] * o_row + d
    part += batch * part_batch + head * part_head + row[:, None] * part_row + d
    out += batch * out_batch + head * out_head + row[:, None] * out_row + d
    o_1, o_2 = tl.load(o, is_element).to(tl.float32), tl.load(part, is_element).to(tl.float32)
    tl.store(out, o_1 + (o_2 - o_1) * weight, is_element)

    larger = tl.maximum(lse_1, lse_2)
    lse_of_both = larger + tl.log(tl.exp(lse_1 - larger) + tl.exp(lse_2 - larger))
    tl.store(lse, lse_of_both, is_row)


@triton.jit
def add_kernel(
    total,
    part,
    total_batch,
    total_head,
    total_row,
    part_batch,
    part_head,
    part_row,
    seq,
    head_dim,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    batch, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)[None, :]
    is_element = (row < seq)[:, None] & (d < head_dim)
    total += batch * total_batch + head * total_head + row[:, None] * total_row + d
    part += batch * part_batch + head * part_head + row[:, None] * part_row + d
    sum_1, sum_2 = tl.load(total, is_element), tl.load(part, is_element)
    tl.store(total, sum_1.to(tl.float32) + sum_2.to(tl.float32), is_element)
