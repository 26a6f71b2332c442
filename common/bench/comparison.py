"""Outputs are compared with each other where an oracle would take too long."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from ..errors import UsageError
from .peers import Outputs

# Of a row of o, as a share of its norm. Roundings to bf16 make 0.005, and a tile of keys that is
# lost among 131072 of them 0.03.
MOST_DIFFERENCE = 0.02


def agreeing(
    first: str,
    case: str,
    o: torch.Tensor,
    calls: dict[str, Callable[[], Outputs]],
    witnesses: Collection[str],
    missing: dict[str, str],
) -> dict[str, float]:
    """The differences from o of the calls that agree with it, by name.

    o is that of the call that is named first. Adds to missing why others do not agree. Raises
    UsageError, which names the case, where none of the witnesses does.
    """
    differences = {}
    for name, call in calls.items():
        try:
            outputs = call()
        except UsageError as refusal:
            missing[name] = str(refusal)
            continue
        difference = difference_of(outputs if isinstance(outputs, torch.Tensor) else outputs[0], o)
        if difference <= MOST_DIFFERENCE:  # false for NaN
            differences[name] = difference
        else:
            missing[name] = f"a row of its o differs by {difference:.2g} of the row's norm"
    if not differences.keys() & {*witnesses}:
        told = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise UsageError(f"{first} agrees with nobody on {case}: {told}")
    return differences


def difference_of(other: torch.Tensor, o: torch.Tensor) -> float:
    """The largest of any row: the norm of the difference, as a share of the norm of o's row."""
    expected = o.float()
    norms = (other.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return norms.max().item()
