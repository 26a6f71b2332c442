"""Outputs are compared with each other where an oracle would take too long."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.nn.functional import pad

from ..errors import UsageError
from ..operation import FORWARD, Operation
from .peers import Outputs

# Of a row of o, as a share of its norm. Roundings to bf16 make 0.005, and a tile of keys that is
# lost among 131072 of them 0.03.
MOST_DIFFERENCE = 0.02
# How many rows are compared as one. The terms of a gradient's row may cancel, those of a sequence's
# first query do: what is left of them then says how o was rounded, and peers may round their own.
# Of 64 rows together, such roundings make 0.008.
ROWS = {"o": 1, "dq": 64, "dk": 64, "dv": 64}


def agreeing(
    first: str,
    case: str,
    expected: Outputs,
    calls: dict[str, Callable[[], Outputs]],
    witnesses: Collection[str],
    missing: dict[str, str],
    operation: Operation = FORWARD,
) -> dict[str, float]:
    """The differences from what is expected of the calls that agree with it, by name.

    Expected are all outputs of the call that is named first, or its first ones, which are then all
    that is compared; the difference is the largest of these. Adds to missing why others do not
    agree. Raises UsageError, which names the case, where none of the witnesses does.
    """
    expected = _as_tuple(expected)
    compared = [output.name for output in operation.outputs][: len(expected)]
    differences = {}
    for name, call in calls.items():
        try:
            outputs = _as_tuple(call())[: len(expected)]
        except UsageError as refusal:
            missing[name] = str(refusal)
            continue
        by_output = {
            output: difference_of(*pair, ROWS[output])
            for output, *pair in zip(compared, outputs, expected, strict=True)
        }
        wrong = [output for output in compared if not by_output[output] <= MOST_DIFFERENCE]  # NaN
        if not wrong:
            differences[name] = max(by_output.values())
        else:
            output = wrong[0]
            what, whose = ("a row", "row's") if ROWS[output] == 1 else ("a part", "part's")
            told = f"{what} of its {output} differs by {by_output[output]:.2g} of the {whose} norm"
            missing[name] = told
    if not differences.keys() & {*witnesses}:
        told = "; ".join(f"{name}: {why}" for name, why in missing.items())
        raise UsageError(f"{first} agrees with nobody on {case}: {told}")
    return differences


def difference_of(other: torch.Tensor, expected: torch.Tensor, rows: int = 1) -> float:
    """The largest of any so many rows of a head: the norm of the difference, as a share of the norm
    of what is expected. The last rows of a head may be fewer.
    """
    expected = expected.float()
    norms = (_norms(x, rows) for x in (other.float() - expected, expected))
    return torch.div(*norms).max().item()


def _norms(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Of so many rows each of x [batch, heads, seq, head_dim]."""
    norms = x.norm(dim=-1)
    if rows == 1:
        return norms
    return pad(norms, (0, -norms.shape[-1] % rows)).unflatten(-1, (-1, rows)).norm(dim=-1)


def _as_tuple(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
