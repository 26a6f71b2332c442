"""What a backward case adds to q, k and v: o and lse, and the gradient of o."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import torch

from verify.reference import attention_reference

if TYPE_CHECKING:
    from verify.case import Case


def saved_by_forward(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of the tensors as they are, by the oracle."""
    return attention_reference(q, k, v, **case.arguments_on(q.device))


def saved_with_more_keys(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of attention to as many keys more, as where the keys are shared out to devices.

    P no longer adds up to 1, and rowsum(P * dP) is not rowsum(dout * o).
    """
    rng = torch.Generator().manual_seed(0)
    before = (torch.randn(x.shape, generator=rng).to(x.device, x.dtype) for x in (k, v))
    more = [torch.cat((x, y), 2) for x, y in zip(before, (k, v), strict=True)]
    return attention_reference(q, *more, **case.arguments)


def normal_gradient(case: Case, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(case.shape.o, generator=rng, device=rng.device)


def scaled_gradient(factor: float):
    """Normal, cut off at 3.5 standard deviations, which are the factor."""

    def dout(case: Case, rng: torch.Generator) -> torch.Tensor:
        return factor * normal_gradient(case, rng).clamp(-3.5, 3.5)

    return dout


def zero_in_places(case: Case, rng: torch.Generator) -> torch.Tensor:
    """Normal, but 0 in half of the rows and in half of the columns of the others."""
    dout = normal_gradient(case, rng)
    dout[:, :, torch.rand(case.shape.seq_q, generator=rng) < 0.5] = 0
    dout[..., torch.rand(case.shape.v_head_dim, generator=rng) < 0.5] = 0
    return dout


def rows_of_all_sizes(case: Case, rng: torch.Generator) -> torch.Tensor:
    """Normal, each row times a power of two from 2^-20 to 1."""
    sizes = torch.randint(-20, 1, (*case.shape.q[:3], 1), generator=rng)
    return torch.exp2(sizes.float()) * normal_gradient(case, rng)


def sequences_of_all_sizes(case: Case, rng: torch.Generator) -> torch.Tensor:
    """Normal, cut off, times a power of two for each sequence and head of k and v, or 0.

    What brings dS of one of them into fp16's range takes that of another one out of it.
    """
    dout = scaled_gradient(1)(case, rng)
    of_groups = dout.unflatten(1, (case.shape.kv_heads, -1))
    sizes = cycle((2.0**9, 2.0**-13, 2.0**-2, 0, 2.0**5))
    for sequence in case.sequences:
        for h in range(case.shape.kv_heads if sequence.seq_q > 0 else 0):
            of_groups[sequence.batch, h, :, sequence.queries] *= next(sizes)
    return dout
