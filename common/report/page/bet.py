"""The bet of v11 and v12: how often it is lost as the logits spread, and what that costs."""

from __future__ import annotations

from ...problem import NORMAL
from ...record_schema import NUMBER, SHARES
from ...text import label
from ..record_set import RecordSet
from .section import Section, read_markup


def section(record_set: RecordSet) -> Section:
    measured = record_set.distributions
    if measured is None:
        return Section("bet", "bet", "The bet", read_markup("bet"), None)
    record = measured.record
    cells = [
        {
            "inputs": cell["inputs"],
            "std": NORMAL.get(cell["inputs"]),
            **{key: cell[key] for key in ("dtype", "head_dim", "causal", *SHARES)},
            "tflops": {
                name: float(f"{rate:.4g}")
                for name, rate in cell["tflops"].items()
                if isinstance(rate, NUMBER)
            },
        }
        for cell in record["cells"]
    ]
    names = list(dict.fromkeys(name for cell in cells for name in cell["tflops"]))
    data = {
        "device": record["device"],
        "candidates": [
            {
                "name": name,
                "label": label(name, stale=name in measured.stale),
                "peer": name not in record["sources"],
            }
            for name in names
        ],
        "cells": cells,
    }
    return Section("bet", "bet", "The bet", read_markup("bet"), data)
