"""The mean of two parts of attention, by their lse.

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
        from .merge_kernel import launch_merge

        launch_merge(o, lse, part, part_lse, out)
        return
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.copy_(torch.lerp(o.float(), part.float(), weight))
    lse.copy_(torch.logaddexp(lse, part_lse))
