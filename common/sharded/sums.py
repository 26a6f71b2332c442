"""Of two parts of attention: the mean of their O, by lse, and the sum of their gradients.

With o_i = sum_j exp(s_j) v_j / exp(lse_i) over the keys of part i, and exp(lse_i) = sum_j exp(s_j),

    exp(lse) = exp(lse_1) + exp(lse_2),    o = (exp(lse_1) o_1 + exp(lse_2) o_2) / exp(lse)

The weight of the second part is exp(lse_2) / exp(lse) = sigmoid(lse_2 - lse_1).
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, out: Tensor) -> None:
    """Merges a part, in float32: out becomes the mean, rounded to its dtype, and lse that of both.

    o, part and out are [batch, heads, seq, head_dim], lse and part_lse float32 [batch, heads, seq],
    all with a contiguous last dimension; out may be o.
    """
    if o.is_cuda:
        from .kernels import launch, merge_kernel

        launch(merge_kernel, o, lse, part, part_lse, out)
        return
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.copy_(torch.lerp(o.float(), part.float(), weight))
    lse.copy_(torch.logaddexp(lse, part_lse))


def add(total: Tensor, part: Tensor) -> None:
    """total += part, in float32, rounded to total's dtype.

    Both are [batch, heads, seq, head_dim] with a contiguous last dimension.
    """
    assert total.shape == part.shape
    if total.is_cuda and total.numel():
        from .kernels import add_kernel, launch

        launch(add_kernel, total, part)
        return
    total.add_(part)
