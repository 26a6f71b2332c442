"""The table of packed sequences, windows and caches that are not full."""

from __future__ import annotations

from collections import Counter

from ..operation import FORWARD, Operation
from ..problem import MOST_DECODED
from ..text import listed
from . import rows
from .captions import flops, inputs, missing, rounds, routes, skipped, states_of, summary
from .columns import Cell, bold_from_one, shown, table_of
from .derived import by_group, fastest_peer, lengths_ratios, padded_ratios, taken_of
from .record_set import NOT_MEASURED, STALE, RecordSet
from .rows import Row

_GROUPS = {
    "packed": "packed",
    "windows": "with windows",
    "caches": "on caches",
    "decoding": f"of up to {MOST_DECODED} queries",
}


def lengths(record_set: RecordSet, operation: Operation = FORWARD) -> str:
    """One row per kind of sequences and mask: TFLOP/s of the step taken, and the fastest peer's."""
    whole = record_set.lengths.get(operation.named("lengths"))
    if whole is None or whole.stale:
        return STALE if whole else NOT_MEASURED
    found = rows.lengths(record_set, operation)
    columns = {
        "Sequences": shown("title"),
        "Mask": _mask,
        **{f">{heads}": _rates(heads) for heads in found[0]["by_heads"]},
    }
    return f"{table_of(columns, found)}\n\n{_conditions(whole.record, operation)}"


def _mask(row: Row) -> str:
    left, right = row["window"]
    sides = (
        "causal" if row["causal"] else "",
        "" if left is None else f"{left} before",
        "" if right is None else f"{right} after",
    )
    return ", ".join(filter(None, sides)) or "none"


def _rates(heads: str) -> Cell:
    def cell(row: Row) -> str:
        rates = row["by_heads"][heads]
        if rates is None:
            return ""
        step, peer = (
            "missing" if rate is None else f"{rate:.0f}" for rate in (rates["step"], rates["peer"])
        )
        ratio = rates["ratio"]
        return f"{step} / {peer}" + ("" if ratio is None else f", {bold_from_one(ratio)}")

    return cell


def _conditions(record: dict, operation: Operation) -> str:
    cells, ratios = record["cells"], lengths_ratios(record)
    *_, padding = record["sources"]
    taken = Counter(map(taken_of, cells)).most_common()
    step = listed(name for name, _ in taken)
    cells_of = (
        "" if len(taken) == 1 else f" ({listed(f'{name} in {n} cells' for name, n in taken)})"
    )
    groups = "".join(
        f"; {_GROUPS[group]}: {summary(of_group)}"
        for group, of_group in by_group(record, ratios).items()
        if of_group
    )
    peers = Counter(filter(None, (fastest_peer(cell, record["sources"]) for cell in cells)))
    told = [f"{name} in {count}" for name, count in peers.most_common()]
    fastest = f"{listed(told)} cells" if told else "missing"
    read = listed(operand.name for operand in operation.inputs if operand.strided)
    padded, equal = (summary(padded_ratios(record, equal=equal)) for equal in (False, True))
    return (
        f"TFLOP/s of {step}{cells_of} / of the fastest peer, and its speed over that one's, in "
        "bold where it is no slower. FLOPs are those of the pairs of a query and a key that it "
        f"sees, whoever computes more. {flops(operation)}{step} over the fastest peer: "
        f"{summary(ratios)}{groups}"
        f". That is {fastest}. {step} over {padding} of a batch of the packed sequences, padded to "
        f"the longest, where a causal mask hides the padding: {padded}; where all are of equal "
        f"length, and there is no padding: {equal}. Sequences: how many of how many tokens, packed "
        "one after another unless they are a batch. Mask: causal, and how many keys before and "
        f"after its own a query sees at most. {record['device']}, {record['dtype']}; "
        f"{inputs(operation)}. All read {read} where they lie: [tokens, heads, head_dim], of a "
        f"batch [batch, sequence, heads, head_dim]. Peers: {routes(cells)}. Median of "
        f"{rounds(cells)}, L2 flushed before each call; whoever is much slower than the fastest is "
        f"timed apart. {missing(cells)}{skipped(record['skipped'])}{states_of(cells)}"
    )
