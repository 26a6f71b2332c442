"""The tables of the units' shares: predicted at the measured times, and beside the counted ones."""

from __future__ import annotations

from collections.abc import Iterator

from ..operation import FORWARD
from ..problem import HEADLINE
from ..record_schema import NAIVE, NUMBER
from ..text import label
from .columns import TFLOPS, Cell, shown, status_in, table_of
from .record_set import NOT_MEASURED, STALE, Ladder
from .rows import Row
from .utilisation import (
    CLOCK_HZ,
    COUNTED,
    EXPS,
    FMAS_A_SLOT,
    LANES,
    SMEM_BYTES,
    TENSOR_FMAS,
    UNITS,
    attention,
    counted_shares,
    is_modelled,
    shares,
)

HEAD_DIMS = (64, 128, 256)
SEQ = HEADLINE.shape.seq_q
NOT_MODELLED = "not modelled: of this GPU the peaks are not known"
_TITLES = {"tensor": "Tensor", "exp": "Exp", "fma": "FMA", "smem": "Shared memory"}


def rows(ladder: Ladder) -> list[Row]:
    """One row per head_dim and attention: TFLOP/s and utilisation.shares(), or their status.

    They are those of the grid without a mask, at the headline's length; at the headline's head_dim
    also those of steps that the grid does not have.
    """
    found = []
    for head_dim in HEAD_DIMS:
        measured = _measured(ladder, head_dim)
        steps = [step.name for step in ladder.steps if step.name in measured]
        for name in dict.fromkeys((*steps, *measured)):
            tflops, stale = measured[name]
            row: Row = {"head_dim": head_dim, "name": label(name, stale=stale), "tflops": tflops}
            counts = attention(ladder, name)
            if isinstance(counts, str):
                found.append({**row, "status": counts})
            else:
                found.append({**row, **shares(counts, ladder.operation, head_dim, tflops)})
    return found


def _measured(ladder: Ladder, head_dim: int) -> dict[str, tuple[float, bool]]:
    """TFLOP/s by the name of a step or a peer; whether its source has changed since."""
    found = {}
    if head_dim == HEADLINE.shape.head_dim:
        found = {
            name: (record["tflops"], name in ladder.measured.stale)
            for name, record in ladder.measured.records.items()
        }
    if ladder.grid:
        for cell in ladder.grid.record["cells"]:
            if cell["name"] == f"d{head_dim}_{SEQ}":
                found |= {
                    name: (rate, name in ladder.grid.stale)
                    for name, rate in cell["tflops"].items()
                    if isinstance(rate, NUMBER) and name != NAIVE
                }
    return found


def utilisation(ladder: Ladder) -> str:
    """What share of its peak each unit must have, of each step and peer at three head_dims."""
    device = _device(ladder)
    found = rows(ladder) if device else []
    if not found:
        return NOT_MEASURED
    if not is_modelled(device):
        return NOT_MODELLED
    columns = {
        ">D": shown("head_dim"),
        "Attention": shown("name"),
        ">TFLOP/s": TFLOPS,
        **{f">{title}": _unit(unit) for unit, title in _TITLES.items()},
        ">Instructions over issue": shown("instructions", "{:.2f} ×".format),
        f">with 1/{FMAS_A_SLOT} for a tensor FMA": shown("packed", "{:.2f} ×".format),
    }
    return f"{table_of(status_in('>Tensor', columns), found)}\n\n{_conditions(ladder, device)}"


def _device(ladder: Ladder) -> str | None:
    record = ladder.grid.record if ladder.grid else ladder.newest
    return record and record["device"]


def _unit(unit: str) -> Cell:
    """In bold the unit with the largest share, or those that have as large a one."""

    def cell(row: Row) -> str:
        if row.get(unit) is None:
            return ""
        largest = max(row[each] or 0.0 for each in UNITS)
        text = _percent(row[unit])
        return f"**{text}**" if row[unit] > largest * (1 - 1e-9) else text

    return cell


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _conditions(ladder: Ladder, device: str) -> str:
    of_all = "(2D + 5)" if ladder.operation == FORWARD else "(5D + 5), in two kernels (7D + 10)"
    return (
        f"For how much of the measured time each unit of the {device} must be busy at the least, "
        f"by [utilisation.py](common/report/utilisation.py): at {CLOCK_HZ / 1e9:g} GHz, with "
        f"{TENSOR_FMAS} multiply-adds of the tensor cores, {EXPS} exponentials, {LANES} "
        f"multiply-adds and {SMEM_BYTES} bytes of shared memory for an SM and a clock. In bold: "
        "the unit that is nearest to its peak. Instructions: "
        f"{of_all} for each element of S, over the {LANES} lanes for which an SM can issue one in "
        f"a clock. N {SEQ}, bf16, no mask; TFLOP/s from the table over shapes, or where that lacks "
        "a step, from the results. Torch's unfused code is left out: it moves S through memory."
    )


def counted_rows(ladder: Ladder) -> list[Row]:
    """One row per step that Nsight Compute has looked at: utilisation.counted_shares()."""
    return list(_counted_rows(ladder))


def _counted_rows(ladder: Ladder) -> Iterator[Row]:
    for name, record in ladder.measured.records.items():
        if name in ladder.measured.stale:
            yield {"name": name, "status": STALE}
            continue
        counts = attention(ladder, name)
        if isinstance(counts, str):
            yield {"name": name, "status": counts}
        elif numbers := counted_shares(counts, record):
            yield {"name": name, **numbers}


def utilisation_counted(ladder: Ladder) -> str:
    """The model's shares of the clocks that Nsight Compute counted, beside those it counted."""
    found = counted_rows(ladder) if ladder.newest else []
    if not found:
        return NOT_MEASURED
    assert ladder.newest is not None
    if not is_modelled(ladder.newest["device"]):
        return NOT_MODELLED

    def both(unit: str) -> Cell:
        def cell(row: Row) -> str:
            if "counted" not in row:
                return ""
            predicted, counted = row["predicted"][unit], row["counted"][unit]
            return f"{'–' if predicted is None else f'{100 * predicted:.0f}'} / {100 * counted:.0f}"

        return cell

    columns = {
        "Step": shown("name"),
        ">Clock (GHz)": shown("ghz", "{:.2f}".format),
        **{f">{_TITLES.get(unit, unit.capitalize())} (%)": both(unit) for unit in COUNTED},
    }
    return table_of(status_in(">Clock (GHz)", columns), found) + (
        "\n\nThe least that the model says / what Nsight Compute counted, over all kernels of a "
        "step at the headline's shape, in clocks: at whatever rate they came. Tensor, exp (XU), "
        "FMA and issue were counted of the clocks in which an SM had a block, shared memory (with "
        "L1, one pipe) of all. Issue: instructions without the tensor cores' products."
    )
