"""The tables of attention over several GPUs: measured, and predicted by ring_model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..operation import BACKWARD, OPERATIONS
from ..record_schema import RING
from ..text import listed, megabytes
from . import rows
from .captions import device_states, flops, inputs
from .columns import (
    TFLOPS,
    TIME_MS,
    Cell,
    Show,
    bold_from_one,
    heads,
    mask,
    milliseconds,
    percent,
    shown,
    table_of,
)
from .derived import CONTEXT_PARALLEL
from .record_set import NOT_MEASURED, STALE, RecordSet
from .ring_model import NETWORK_BYTES_PER_S, hbm_bytes_per_s
from .rows import Row


def sharded(record_set: RecordSet) -> str:
    """For each number of GPUs a table: one row per problem and operation."""
    parts = []
    for gpus, whole in record_set.sharded.items():
        title = f"{gpus} × {whole.record['device']}:"
        parts.append(f"{title}\n\n{_sharded(record_set, gpus)}")
    return "\n\n".join(parts) or NOT_MEASURED


def _sharded(record_set: RecordSet, gpus: int) -> str:
    found = rows.sharded(record_set, gpus)
    if not found:
        return STALE

    def peak_memory(row: Row) -> str:
        sizes = row["peak_memory_bytes"].values()
        return " / ".join("missing" if size is None else megabytes(size) for size in sizes)

    def value(key: str, show: Show) -> Cell:
        return shown(key, show, none="missing")

    columns = {
        ">N": shown("seq"),
        ">Heads": heads,
        "Mask": mask,
        "Operation": shown("operation"),
        ">Ring (ms)": TIME_MS,
        ">TFLOP/s a GPU": TFLOPS,
        f">Over {gpus} × one GPU": value("of_ideal", "{:.3f} ×".format),
        ">Over context_parallel": value("over_context_parallel", bold_from_one),
        ">Ulysses (ms)": value("ulysses_ms", milliseconds),
        ">Hidden": shown("hidden", percent),
        ">Peak memory a GPU, ring / one GPU": peak_memory,
    }
    return f"{table_of(columns, found)}\n\n{_sharded_conditions(record_set, gpus, found)}"


def _sharded_conditions(record_set: RecordSet, gpus: int, found: Sequence[Row]) -> str:
    record = record_set.sharded[gpus].record
    cells = record["cells"]
    first = cells[0]
    measured = [cell[each.name]["attentions"] for cell in cells for each in OPERATIONS.values()]
    rings = [attentions[RING] for attentions in measured]
    routes = (attentions[name].get("route") for attentions in measured for name in CONTEXT_PARALLEL)
    peer = next(filter(None, routes), "missing, too").rpartition(",")[0]  # not how it rotates
    rounds = [len(ring["samples_ms"]) for ring in rings]
    once = ", one where that takes long" if min(rounds) == 1 else ""
    states = [first["environment"]["before"], *(cell["environment"]["after"] for cell in cells)]
    differences = [difference for ring in rings for difference in ring["differences"].values()]
    different = (
        "The ring's outputs differ from one GPU's by at most "
        f"{max(differences):.1e} of their root mean square. "
        if differences
        else ""
    )
    host_ms = statistics.median(ring["host_ms"] for ring in rings)
    return (
        f"Batch {first['batch']}, head_dim {first['head_dim']}, {record['dtype']}; "
        f"{inputs(BACKWARD)}. Steps {listed(record['sources'])}. Ring and Ulysses: attention() of "
        f"a sequence of N tokens that is sharded over the {gpus} GPUs, time of the slowest one. "
        f"Over {gpus} × one GPU: the ring's speed over {gpus} times that of attention() with the "
        "whole problem on one GPU. Over context_parallel: over the faster of torch's two ways to "
        f"rotate ({peer}); in bold: no slower. Median of {_range(rounds, 'd')} interleaved "
        f"rounds{once}, L2 flushed and the GPUs synchronized before each call; they sleep while "
        f"the hosts launch it, which takes {host_ms:.2g} ms in the median row and is in none of "
        "the times. "
        f"Backward's {flops(BACKWARD)}Hidden: of the time in which tensors travel, the share in "
        "which the GPU computes, in a call by itself. Peak memory: what one call takes of the "
        "fullest GPU beyond q, k, v and dout, and what forward has saved: o and lse, and for the "
        "ring another rank's k and v. "
        f"{different}{_missing(found)}{device_states(states)}"
    )


def _range(numbers: Sequence[float], form: str) -> str:
    least, most = (format(end, form) for end in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


def _missing(found: Sequence[Row]) -> str:
    """A sentence on the attentions that are missing in some rows, and why."""
    reasons: dict[str, dict[str, None]] = {}
    for row in found:
        for name, reason in row["missing"].items():
            reasons.setdefault(name, {})[reason] = None
    names: dict[str, list[str]] = {}  # by their reasons
    for name, why in reasons.items():
        names.setdefault(", ".join(why), []).append(name)
    told = "; ".join(f"{', '.join(which)}: {why}" for why, which in names.items())
    return f"Missing in some rows: {told}. " if told else ""


def sharded_model(record_set: RecordSet) -> str:
    """One row per problem and number of GPUs: ring_model's speed beside the measured one."""
    found = rows.sharded_model(record_set)
    if not found:
        return STALE if record_set.sharded else NOT_MEASURED

    def share(key: str, name: str) -> Cell:
        def cell(row: Row) -> str:
            value = row[key].get(name, NOT_MEASURED)
            return value if isinstance(value, str) else f"{value:.3f}"

        return cell

    def step_ms(row: Row) -> str:
        return " / ".join(map(milliseconds, row["step_ms"].values()))

    columns = {
        ">Heads": heads,
        ">N": shown("seq"),
        ">GPUs": shown("gpus"),
        ">A step (ms), forward / backward": step_ms,
    }
    for operation in OPERATIONS.values():
        for key in ("predicted", "measured"):
            columns[f">{operation.name.capitalize()}: {key}"] = share(key, operation.name)
    gpus, whole = next(
        (gpus, whole) for gpus, whole in record_set.sharded.items() if not whole.stale
    )
    link = whole.record["link"]
    most_bytes = max(each["bytes"] for each in link)
    rates = ", ".join(
        f"{each['gb_per_s']:.3g} by {each['blocks']}"
        for each in link
        if each["bytes"] == most_bytes
    )
    return table_of(columns, found) + (
        "\n\nThe ring's speed over that of as many GPUs, each with the whole problem; causal mask, "
        f"head_dim {whole.record['cells'][0]['head_dim']}, {whole.record['dtype']}. Predicted by "
        "[ring_model.py](common/report/ring_model.py) from the record of "
        f"{gpus} × {whole.record['device']}: from the speed of one GPU, on the same N or the "
        f"longest that was measured, and what NCCL's blocks move there each way ({rates}, in "
        f"GB/s); beyond 8 GPUs at most {NETWORK_BYTES_PER_S / 1e9:.0f} GB/s a GPU, of a network. "
        f"Merges and sums at {hbm_bytes_per_s(whole.record['device']) / 1e12:.3g} TB/s. A step: "
        "the products of one step of the ring, by themselves; of what it takes to launch a kernel "
        "or to begin a message the model knows nothing, so short steps are slower than it says."
    )
