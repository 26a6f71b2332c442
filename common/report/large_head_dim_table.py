"""The table of head_dim 256 and more, and of v with one of its own."""

from __future__ import annotations

from collections import Counter

from ..operation import FORWARD, Operation
from ..step import LARGE_HEAD_DIM, is_large
from ..text import listed
from . import rows
from .captions import how_measured, inputs, missing, routes, summary
from .columns import Cell, bold_from_one, shown, table_of
from .derived import WIDE, large_head_dim_steps, large_ratios, wide_ratios
from .record_set import NOT_MEASURED, STALE, Cells, RecordSet
from .rows import Row


def large_head_dim(record_set: RecordSet, operation: Operation = FORWARD) -> str:
    """One row per head_dim and step: its TFLOP/s, the fastest peer's, and those over 256's."""
    measured = record_set.cells.get(operation.named("large_head_dim"))
    if measured is None or measured.stale:
        return STALE if measured else NOT_MEASURED
    found = rows.large_head_dim(record_set, operation)
    columns = {
        ">head_dim": _head_dim,
        "Step": shown("step"),
        **{f">{column}": _rates(column) for column in found[0]["by_column"]},
    }
    return f"{table_of(columns, found)}\n\n{_conditions(measured, found, operation)}"


def _head_dim(row: Row) -> str:
    head_dim, v_head_dim = row["head_dim"], row["v_head_dim"]
    return f"{head_dim}" if v_head_dim == head_dim else f"{head_dim} / {v_head_dim}"


def _rates(column: str) -> Cell:
    def cell(row: Row) -> str:
        rates = row["by_column"][column]
        if rates is None:
            return ""
        step, peer = (
            "missing" if rate is None else f"{rate:.0f}" for rate in (rates["rate"], rates["peer"])
        )
        ratio, of_256 = rates["ratio"], rates["over_256"]
        return (
            f"{step} / {peer}"
            + ("" if ratio is None else f", {bold_from_one(ratio)}")
            + ("" if of_256 is None else f" ({of_256:.3f})")
        )

    return cell


def _conditions(measured: Cells, found: list[Row], operation: Operation) -> str:
    record = measured.record
    large, narrow = large_head_dim_steps(record)
    peers = Counter(
        rates["name"]
        for row in found
        for rates in row["by_column"].values()
        if is_large(row["head_dim"], row["v_head_dim"]) and rates and rates["name"]
    )
    told = [f"{name} in {count}" for name, count in peers.most_common()]
    fastest = f"{listed(told)} cells" if told else "missing"
    cell = record["cells"][0]
    return (
        "TFLOP/s of the step / of the fastest peer, and the one over the other. In parentheses: "
        f"{listed(large)}'s TFLOP/s over those of {narrow}, which attention() takes up to head_dim "
        f"{LARGE_HEAD_DIM}, at {LARGE_HEAD_DIM} in the same column; at {WIDE}: "
        f"{summary(wide_ratios(record))}. Of several steps attention() takes the first. "
        f"{', '.join(large)} over the fastest peer, above {LARGE_HEAD_DIM} and "
        f"where v has its own: {summary(large_ratios(record))}. That is {fastest}. "
        "Two numbers are head_dim of q and k / of v. "
        f"{record['device']}, {record['dtype']}; {cell['batch'] * cell['seq']} tokens in sequences "
        f"of N, {cell['heads'] * cell['head_dim']} / head_dim heads, rounded down; "
        f"{inputs(operation)}; where the mask is causal, the operations of visible keys are "
        "counted. "
        f"Peers: {routes(record['cells'])}. {missing(record['cells'])}"
        f"{how_measured(measured, large_ratios)}"
    )
