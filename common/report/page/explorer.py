"""The grid explorer: every measured shape and kind of inputs, on every GPU, of all candidates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...operation import FORWARD, OPERATIONS
from ...problem import NORMAL
from ...record_schema import FA3_DETERMINISTIC, NUMBER
from ...text import label
from .. import rows
from ..derived import peer_ratios
from ..record_set import Cells, Ladder, RecordSet
from .section import Section, read_markup

VARIANCE_1 = "normal_1"  # the inputs of the grids
DIGITS = 4  # of a rate, as in the tables


def section(record_sets: Sequence[RecordSet]) -> Section:
    boards = [board for one in record_sets for board in _boards(one)]
    return Section("grid", "explorer", "Every shape", read_markup("explorer"), boards)


def _boards(record_set: RecordSet) -> Iterator[dict]:
    """Of each ladder that was measured over shapes: its candidates and its cells."""
    for operation in OPERATIONS.values():
        ladder = record_set.of(operation)
        if not ladder.grid:
            continue
        record = ladder.grid.record
        cells = [_cell(row, record["dtype"], VARIANCE_1) for row in rows.grid(ladder)]
        stale = ladder.grid.stale
        if operation == FORWARD and (measured := record_set.distributions):
            cells += _of_distributions(measured, ladder)
            stale |= measured.stale
        names = list(dict.fromkeys(name for cell in cells for name in cell["tflops"]))
        repeating = ladder.taken(deterministic=True)
        yield {
            "device": record["device"],
            "operation": operation.name,
            "candidates": [
                {
                    "name": name,
                    "label": label(name, stale=name in stale),
                    "peer": name not in record["sources"],
                }
                for name in names
            ],
            "taken": ladder.taken(),
            # A peer's mode that repeats every bit is compared with the step that does.
            "repeating": {"taken": repeating, "peer": FA3_DETERMINISTIC}
            if peer_ratios(record, *repeating, peer=FA3_DETERMINISTIC)
            else None,
            "ceiling": record["ceiling"]["tflops"],
            "cells": cells,
        }


def _of_distributions(measured: Cells, ladder: Ladder) -> list[dict]:
    ratios = peer_ratios(measured.record, *ladder.taken())
    return [
        _cell(cell | {"ratio": ratios.get(cell["name"])}, cell["dtype"], cell["inputs"])
        for cell in measured.record["cells"]
        # Those on variance 1 in the grid's dtype are in the grid already, of more steps.
        if (cell["inputs"], cell["dtype"]) != (VARIANCE_1, ladder.grid.record["dtype"])
    ]


def _cell(row: dict, dtype: str, inputs: str) -> dict:
    return {
        "name": row["name"],
        "dtype": dtype,
        "inputs": _kind(inputs),
        "head_dim": row["head_dim"],
        "mask": "causal" if row["causal"] else "none",
        "shape": _shape(row, own_name=inputs == VARIANCE_1),
        "tflops": {
            name: float(f"{rate:.{DIGITS}g}")
            for name, rate in row["tflops"].items()
            if isinstance(rate, NUMBER)
        },
        "ratio": row["ratio"],
    }


def _kind(inputs: str) -> str:
    return f"logits of std {NORMAL[inputs]}" if inputs in NORMAL else inputs.replace("_", " ")


def _shape(row: dict, *, own_name: bool) -> str:
    """Batch, heads and length, and the name of a cell that is not called after those."""
    heads, kv_heads, seq = row["heads"], row["kv_heads"], row["seq"]
    seq_k = row.get("seq_k", seq)
    shared = heads if heads == kv_heads else f"{heads}/{kv_heads}"
    length = seq if seq == seq_k else f"{seq} on {seq_k}"
    text = f"{row['batch']} × {shared} × {length}"
    word = re.match(r"(?!d\d)[a-z_]+", row["name"]) if own_name else None
    if not word:
        return text
    return f"{text}, {word[0].rstrip('_').removesuffix('_causal').replace('_', ' ')}"
