"""The table of few queries on many keys."""

from __future__ import annotations

from collections.abc import Sequence

from ..operation import FORWARD
from ..text import label, listed
from . import rows
from .captions import inputs, missing, rounds, routes, skipped, states_of, summary
from .columns import Cell, bold_from_one, heads, percent, shown, table_of
from .derived import BANDWIDTH_BATCH, BANDWIDTH_KEYS, decode_ratios, decode_step_figures
from .record_set import NOT_MEASURED, RecordSet, Whole
from .rows import Row


def decode(record_set: RecordSet) -> str:
    """One row per head_dim and number of queries: the step's speed over the fastest peer's."""
    found = rows.decode(record_set)
    if not found:
        return NOT_MEASURED
    assert record_set.decode is not None
    columns = {
        ">head_dim": shown("head_dim"),
        ">Queries": shown("seq_q"),
        **{f">{keys} keys: mean, smallest": _ratios(keys) for keys in found[0]["by_keys"]},
        ">Slower": lambda row: f"{row['slower']} of {row['cells']}",
        ">Of a copy's speed": shown("copy_share", percent),
    }
    return f"{table_of(columns, found)}\n\n{_conditions(record_set.decode)}"


def _ratios(keys: str) -> Cell:
    def cell(row: Row) -> str:
        ratios = row["by_keys"][keys]
        if ratios is None:
            return "missing"
        return f"{bold_from_one(ratios['mean'])}, {bold_from_one(ratios['smallest'])}"

    return cell


def _conditions(decode: Whole) -> str:
    record = decode.record
    labels = {name: label(name, stale=name in decode.changed) for name in record["sources"]}
    *few, general = record["sources"]
    cells = record["cells"]
    figures = decode_step_figures(record)
    gains = "".join(
        f"; {labels[name]} over {labels[general]}: {summary(decode_ratios(record, general, name))}"
        for name in few
    )
    steps = [labels[name] for name in record["sources"] if figures[name]["cells"]]
    taken = " or ".join(steps)
    if len(steps) > 1:
        taken = f"{taken}, as attention() takes one or the other,"
    keys = sorted({cell["seq_k"] for cell in cells})
    return (
        f"{taken} over the fastest peer: {summary(decode_ratios(record))}{gains}. Geometric means "
        f"and smallest ratios of batches {_listed(cells, 'batch')} and of heads "
        f"{listed(dict.fromkeys(map(heads, cells)))}; in bold: no slower. Slower: of the cells "
        f"with {keys[0]} to {keys[-1]} keys, in how many a peer is faster. Of a copy's speed: the "
        "bytes of q, k, v, o and lse, once each, in a second, over those that torch's copy reads "
        f"and writes, {record['copy_bytes_per_second'] / 1e12:.3g} TB/s; the smallest share at "
        f"batch {BANDWIDTH_BATCH} from {BANDWIDTH_KEYS} keys on. {record['device']}, "
        f"{record['dtype']}, no mask; {inputs(FORWARD)}. All read q, k and v where they lie: "
        f"[batch, heads, sequence, head_dim]. Peers: {routes(cells)}. "
        f"Median of {rounds(cells)}, L2 flushed before each call. {missing(cells)}"
        f"{skipped(record['skipped'])}{states_of(cells)}"
    )


def _listed(cells: Sequence[dict], key: str) -> str:
    return listed(map(str, dict.fromkeys(cell[key] for cell in cells)))
