"""Whether a step rounds to nearest: such errors cancel in a sum, those of truncation do not.

Twice the yardstick's error leaves room for truncation, which takes 0.7 u of everything, u being
the dtype's unit roundoff. bias() leaves none: it is 0 but for chance and what tensor cores lose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from verify.case import Case
from verify.reference import backward_rows

UNIT_ROUNDOFF_FP32 = 2.0**-24
MANTISSA_BITS = 20  # that tell numbers apart


def bias(o: torch.Tensor, expected: torch.Tensor) -> float:
    """How much further from zero than expected o is on average: mean((o - r) sign(r)) / mean|r|."""
    magnitude = expected.abs().sum().item()
    excess = ((o.double() - expected) * expected.sign()).sum().item()
    return excess / magnitude if magnitude > 0 else excess


def bias_allowance(case: Case, o: torch.Tensor, mark: torch.Tensor, delta: float) -> float:
    """How far from 0 bias() may be by chance: five standard deviations, plus a systematic part.

    mark [batch, heads, seq_q] has equal numbers where rows have equal weights, P.

    A rounding error is uniformly distributed within +-u of a number, with variance u^2 / 3:
    - those of o are independent of each other;
    - those of a row's weights, P, are not independent in the row's elements. Were they the same for
      all keys, they would add up to an error of u / sqrt(3) times the row's sum of |o|; as they
      differ, to less. `delta`, the error that a weight has from its logit, is treated alike;
    - rows of equal P share the errors of P, and in one head all those of o.
    The systematic part is the tensor cores' truncation: a sum of 8 products or more loses up to
    2^-23 of itself whenever another 8 are added.
    """
    magnitude = o.abs().sum().item()
    if magnitude == 0:
        return 0.0
    dtype = torch.finfo(case.dtype)
    unit_roundoff = dtype.eps / 2
    half_subnormal = dtype.smallest_normal * unit_roundoff
    _, group = mark.flatten().float().unique(return_inverse=True)
    rows = o.abs().flatten(0, 2)  # [batch * heads * seq_q, head_dim]
    of_groups = torch.zeros(int(group.max()) + 1, rows.shape[1], dtype=rows.dtype, device=o.device)
    of_o = of_groups.index_add(0, group, (unit_roundoff * rows).clamp(min=half_subnormal))
    of_p = of_groups.index_add(0, group, rows).sum(-1) * math.hypot(unit_roundoff, delta)
    variance = (of_o.square().sum() + of_p.square().sum()).item() / 3
    truncated = 2 * UNIT_ROUNDOFF_FP32 * case.most_keys / 8
    return 5 * math.sqrt(variance) / magnitude + truncated


class _Roundings:
    """What roundings may add up to by chance, each a fraction of +-u of a number.

    Numbers with the same mantissa are rounded alike, as those of equal rows and equal keys are, so
    that their errors add up; others are independent.
    """

    def __init__(self, device: torch.device) -> None:
        self.by_mantissa = torch.zeros(1 << MANTISSA_BITS, dtype=torch.float64, device=device)

    def add(self, rounded: torch.Tensor, weight: torch.Tensor) -> None:
        """Of these numbers; weight is what a relative error of 1 of each makes of the sum.

        A 0 is exact. Where a mask hides keys they are many, and adding to one place takes long.
        """
        not_exact = rounded != 0
        mantissa = rounded[not_exact].float().view(torch.int32) & 0x7FFFFF
        self.by_mantissa.index_add_(0, mantissa >> 23 - MANTISSA_BITS, weight[not_exact])

    def deviation(self) -> float:
        """The standard deviation of their sum in units of u."""
        return math.sqrt(self.by_mantissa.square().sum().item() / 3)


def gradient_bias_allowances(
    case: Case,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    systematic: Mapping[str, float],
) -> dict[str, float]:
    """How far from 0 bias() of the gradients may be: five standard deviations, plus the systematic.

    outputs: dq, dk and dv by the oracle. systematic: of each, the sum over all elements of an error
    that all may have with the same sign.

    dS, of which dq and dk are sums, and P, of which dv is, may have been rounded to the dtype, and
    the gradients are. An error of dS_ij changes sum(dq sign(dq)) by scale * sign(dq_i) k_j times
    itself.
    """
    names = [operand.name for operand in case.operation.outputs]
    dtype = torch.finfo(case.dtype)
    normal = dtype.smallest_normal  # smaller numbers have the same absolute error
    dq, dk, dv = (gradient.sign() for gradient in outputs)
    roundings = {name: _Roundings(inputs[0].device) for name in names}
    arguments = case.arguments_on(inputs[0].device)
    for rows in backward_rows(*inputs, torch.float64, **arguments):
        roundings["dq"].add(rows.ds, case.scale * (dq[rows.at] @ rows.k.mT) * rows.ds)
        roundings["dk"].add(rows.ds, (rows.q @ dk[rows.kv].mT) * rows.ds)
        roundings["dv"].add(rows.p, (rows.dout @ dv[rows.kv].mT) * rows.p.clamp(min=normal))
    allowances = {}
    for name, gradient in zip(names, outputs, strict=True):
        magnitude = gradient.abs()
        roundings[name].add(gradient, magnitude.clamp(min=normal))
        by_chance = 5 * dtype.eps / 2 * roundings[name].deviation()
        # What is below the smallest subnormal number becomes 0, or that.
        underflow = magnitude[magnitude < normal * dtype.eps].sum().item()
        total = magnitude.sum().item()
        most = by_chance + underflow + systematic[name]
        allowances[f"{name} bias"] = most / total if total else 0.0
    return allowances
