"""Records: what was measured on a GPU, in profiles/<gpu>/, and what is known without one.

The modules of common/bench/ write them: vNN.json is a step's (headline.py); grid.json is of many
shapes (grid.py), and grid_previous.json its run before, if that was of the same sources;
timelines/vNN.json has the clocks of a pipeline (timeline.py); latency.json is what small calls cost
(latency.py); static/vNN.json is what is known without a GPU (static_analysis.py).
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from .record_schema import GRID_RECORD, LATENCY_RECORD, RECORD, problem
from .source import ROOT, python_sha256
from .step import Step

SCHEMA = 2
PROFILES_DIR = ROOT / "profiles"
STATIC = "static"  # the folder in profiles/ that is not a GPU's
# In the folder of a GPU.
GRID = "grid.json"
GRID_PREVIOUS = "grid_previous.json"
LATENCY = "latency.json"

# What a repeated call of attention() runs on the host.
_HOST_FILES = (
    "functional.py",
    "operator.py",
    "cache.py",
    "runtime/backend.py",
    "runtime/gpu.py",
    "runtime/launch.py",
)

_VENDORS = {"nvidia"}


def gpu_folder(device: str) -> str:
    """The folder of a device's records: "NVIDIA GeForce RTX 4090" -> "geforce_rtx_4090"."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return "_".join(word for word in words if word not in _VENDORS)


def host_hashes() -> dict[str, str]:
    """SHA-256 of the code that a call of attention() runs on the host, by path in common/."""
    return {name: python_sha256(ROOT / "common" / name) for name in _HOST_FILES}


def is_stale(record: dict, step: Step) -> bool:
    """Whether the code of the step or of a header has changed since the record was made."""
    return record["code_sha256"] != step.code_sha256


def write_atomically(path: Path, content: str) -> None:
    """Replaces a file whole: whatever interrupts this, it holds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(content, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_record(path: Path, record: dict) -> None:
    text = json.dumps(record, indent=1)
    # One line for a list of numbers: thirty samples are read as a row or not at all.
    text = re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    write_atomically(path, text + "\n")


def read_records(folder: Path, form: dict = RECORD) -> dict[str, dict]:
    """The records of steps in a folder by file stem; an unreadable one is left out."""
    records = {path.stem: _read(path, form) for path in sorted(folder.glob("v[0-9][0-9]*.json"))}
    return {name: record for name, record in records.items() if record is not None}


def read_grid(folder: Path, name: str = GRID) -> dict | None:
    """A record of the grid in a folder; None where there is none or it is unreadable."""
    path = folder / name
    return _read(path, GRID_RECORD) if path.exists() else None


def read_latency(folder: Path) -> dict | None:
    """The record of small calls in a folder; None where there is none or it is unreadable."""
    path = folder / LATENCY
    return _read(path, LATENCY_RECORD) if path.exists() else None


def _read(path: Path, form: dict) -> dict | None:
    """The record in a file; an unreadable one is named on stderr."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise ValueError(f"not a record of schema {SCHEMA}")
        if wrong := problem(record, form):
            raise ValueError(wrong)
        if record.get("step", path.stem) != path.stem:
            raise ValueError(f"it is a record of {record['step']}")
    except (OSError, ValueError) as error:
        print(f"warning: skipped the unreadable record {path}: {error}", file=sys.stderr)
        return None
    return record
