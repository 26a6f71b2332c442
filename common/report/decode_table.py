"""The table of few queries on many keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..operation import FORWARD
from ..text import listed
from . import rows
from .captions import device_states, inputs, summary
from .columns import Cell, bold_from_one, heads, percent, shown, table_of
from .derived import BANDWIDTH_BATCH, BANDWIDTH_KEYS, decode_ratios
from .record_set import NOT_MEASURED, STALE, RecordSet
from .rows import Row


def decode(record_set: RecordSet) -> str:
    """One row per head_dim and number of queries: the step's speed over the fastest peer's."""
    found = rows.decode(record_set)
    if not found:
        return STALE if record_set.decode else NOT_MEASURED
    assert record_set.decode is not None
    columns = {
        ">head_dim": shown("head_dim"),
        ">Queries": shown("seq_q"),
        **{f">{keys} keys: mean, smallest": _ratios(keys) for keys in found[0]["by_keys"]},
        ">Slower": lambda row: f"{row['slower']} of {row['cells']}",
        ">Of a copy's speed": shown("copy_share", percent),
    }
    return f"{table_of(columns, found)}\n\n{_conditions(record_set.decode.record)}"


def _ratios(keys: str) -> Cell:
    def cell(row: Row) -> str:
        ratios = row["by_keys"][keys]
        if ratios is None:
            return "missing"
        return f"{bold_from_one(ratios['mean'])}, {bold_from_one(ratios['smallest'])}"

    return cell


def _conditions(record: dict) -> str:
    step, *before = record["sources"]
    cells = record["cells"]
    gains = "".join(
        f"; {step} over {name}: {summary(decode_ratios(record, name))}" for name in before
    )
    taken = " or ".join(dict.fromkeys(cell["taken"] for cell in cells))
    if len({cell["taken"] for cell in cells}) > 1:
        taken = f"{taken}, as attention() takes one or the other,"
    keys = sorted({cell["seq_k"] for cell in cells})
    samples = [
        each["samples_ms"]
        for cell in cells
        for each in cell["attentions"].values()
        if "samples_ms" in each
    ]
    least, most = min(map(len, samples)), max(map(len, samples))
    states = [cells[0]["environment"]["before"], *(cell["environment"]["after"] for cell in cells)]
    routes = {name: route for cell in cells for name, route in cell["routes"].items()}
    told = "; ".join(f"{name}: {route}" for name, route in routes.items()) or "all missing"
    return (
        f"{taken} over the fastest peer: {summary(decode_ratios(record))}{gains}. Geometric means "
        f"and smallest ratios of batches {_listed(cells, 'batch')} and of heads "
        f"{listed(dict.fromkeys(map(heads, cells)))}; in bold: no slower. Slower: of the cells "
        f"with {keys[0]} to {keys[-1]} keys, in how many a peer is faster. Of a copy's speed: the "
        "bytes of q, k, v, o and lse, once each, in a second, over those that torch's copy reads "
        f"and writes, {record['copy_bytes_per_second'] / 1e12:.3g} TB/s; the smallest share at "
        f"batch {BANDWIDTH_BATCH} from {BANDWIDTH_KEYS} keys on. {record['device']}, "
        f"{record['dtype']}, no mask; {inputs(FORWARD)}. All read q, k and v where they lie: "
        f"[batch, heads, sequence, head_dim]. Peers: {told}. Median of "
        f"{most if least == most else f'{least} to {most}'} interleaved rounds per cell, L2 "
        f"flushed before each call. {_missing(cells)}{_skipped(record['skipped'])}"
        f"{device_states(states)}"
    )


def _listed(cells: Sequence[dict], key: str) -> str:
    return listed(map(str, dict.fromkeys(cell[key] for cell in cells)))


def _missing(cells: Sequence[dict]) -> str:
    """A sentence on who is missing in how many cells, and why in most of those."""
    reasons: dict[str, Counter[str]] = {}
    for cell in cells:
        for name, each in cell["attentions"].items():
            if "missing" in each:
                reasons.setdefault(name, Counter())[each["missing"]] += 1
    told = "; ".join(
        f"{name} in {why.total()} of {len(cells)} cells: {why.most_common(1)[0][0]}"
        for name, why in reasons.items()
    )
    return f"Missing: {told.rstrip('.')}. " if told else ""


def _skipped(skipped: dict[str, str]) -> str:
    return f"{len(skipped)} cells do not fit into the device's memory. " if skipped else ""
