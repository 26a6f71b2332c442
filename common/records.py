"""Records: what was measured on a GPU, in profiles/<gpu>/, and what is known without one.

The modules of common/bench/ write them: vNN.json is a step's (headline.py), and
experiments/vNN_what.json that of a variant; grid.json and, of the backward ladder,
grid_backward.json are of many shapes (grid.py), distributions.json is of many kinds of inputs
(distributions.py), large_head_dim.json is of head_dim 256 and more (large_head_dim.py), and beside
each of these lies, as grid_previous.json, the run before, if that was of the same sources;
decode.json is of few queries on many keys (decode.py), lengths.json and lengths_backward.json of
packed sequences and windows (lengths.py); timelines/vNN.json has the clocks of a pipeline
(timeline.py); latency.json is what small calls cost (latency.py), pictures.json what heads look at
and what attention() errs (pictures.py), train.json how a model was trained on attention()
(train.py), whose q, k and v are in trained.npz, and training_speed.json what training takes
(training_speed.py), and in profiles/<gpu>x2/ sharded.json what attention over two GPUs takes
(sharded.py); profiles/static/vNN.json is what is known without a GPU (static_analysis.py).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from .errors import UsageError
from .operation import STEP_NAME, Operation
from .paths import ROOT
from .record_schema import Form, find_error
from .source import code_sha256, python_sha256
from .step import Step

SCHEMA = 2
PROFILES_DIR = ROOT / "profiles"
STATIC = "static"  # the folder in profiles/ that is not a GPU's
HEADLINE_GPU = "h200"  # the folder whose records README.md and worklog.md show
# In the folder of a GPU.
DISTRIBUTIONS_FILE = "distributions.json"
DECODE_FILE = "decode.json"
LATENCY_FILE = "latency.json"
TRAIN_FILE = "train.json"
PICTURES_FILE = "pictures.json"
TRAINED_FILE = "trained.npz"  # of common/trained_inputs.py
TRAINING_SPEED_FILE = "training_speed.json"
SHARDED_FILE = "sharded.json"  # in the folder of several GPUs

# The files whose code a repeated call of attention() runs on the host.
_HOST_FILES = (
    "functional.py",
    "operator.py",
    "validation.py",
    "step.py",
    "lengths.py",
    "cache.py",
    "runtime/backend.py",
    "runtime/gpu.py",
    "runtime/launch.py",
    "runtime/launcher.py",
    "runtime/pack.py",
    "runtime/pack.cpp",
)
# The files that say what heads are made up, and how maps and errors are computed.
_PICTURES_FILES = ("bench/pictures.py",)
# The files that say what a training step is.
_MODEL_FILES = ("bench/gpt.py", "bench/llama.py", "bench/trainer.py")
# The files whose code a call over several GPUs runs.
_SHARDED_FILES = (
    "ring_lanes.py",
    "runtime/gpu_kernels.py",
    "runtime/kernels.py",
    "sharded/__init__.py",
    "sharded/agreement.py",
    "sharded/kernels.py",
    "sharded/order.py",
    "sharded/ring.py",
    "sharded/sums.py",
    "sharded/transport.py",
    "sharded/ulysses.py",
)

_VENDORS = {"nvidia"}
_MEMORY = re.compile(r"\b\d+gb hbm\w*")


def gpu_folder(device: str) -> str:
    """The folder of a device's records: "NVIDIA GeForce RTX 4090" -> "geforce_rtx_4090".

    Without memory that is told with its kind: "NVIDIA H100 80GB HBM3" -> "h100".
    """
    words = re.findall(r"[a-z0-9]+", _MEMORY.sub("", device.lower()))
    return "_".join(word for word in words if word not in _VENDORS)


def gpus_folder(device: str, gpus: int) -> str:
    """The folder of the records of several GPUs of a kind: "h200x2"."""
    return f"{gpu_folder(device)}x{gpus}"


def grid_file(operation: Operation) -> str:
    """The name of the record of a ladder's grid, in the folder of a GPU."""
    return f"{operation.named('grid')}.json"


def large_head_dim_file(operation: Operation) -> str:
    """The name of the record of an operation at head_dim 256 and more, in the folder of a GPU."""
    return f"{operation.named('large_head_dim')}.json"


def lengths_file(operation: Operation) -> str:
    """The name of the record of a ladder's steps that take lengths, in the folder of a GPU."""
    return f"{operation.named('lengths')}.json"


def previous_path(path: Path) -> Path:
    """Where the run before the one of a record of cells is kept."""
    return path.with_stem(f"{path.stem}_previous")


def host_hashes() -> dict[str, str]:
    """SHA-256 of the code that a call of attention() runs on the host, by path in common/."""
    return _hashes(_HOST_FILES)


def model_hashes() -> dict[str, str]:
    """SHA-256 of the code of the models and of their training step, by path in common/."""
    return _hashes(_MODEL_FILES)


def sharded_hashes() -> dict[str, str]:
    """SHA-256 of the code that shards attention over GPUs, by path in common/."""
    return _hashes(_SHARDED_FILES)


def picture_hashes() -> dict[str, str]:
    """SHA-256 of the code that makes the pictures, by path in common/."""
    return _hashes(_PICTURES_FILES)


def _hashes(paths: Iterable[str]) -> dict[str, str]:
    return {path: _sha256(ROOT / "common" / path) for path in paths}


def _sha256(path: Path) -> str:
    return python_sha256(path) if path.suffix == ".py" else code_sha256(path)


def is_stale(record: dict, step: Step) -> bool:
    """Whether the code of the step or of a header has changed since the record was made."""
    return record["code_sha256"] != step.code_sha256


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically: whatever interrupts this, it holds the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_record(path: Path, record: dict) -> None:
    text = json.dumps(record, indent=1)
    # A list of numbers goes on one line: nobody reads thirty samples below each other.
    text = re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    write_atomically(path, text + "\n")


def read_records(folder: Path, form: Form) -> dict[str, dict]:
    """The records of steps or their variants in a folder, by file stem.

    Raises UsageError where one is malformed.
    """
    paths = [path for path in sorted(folder.glob("*.json")) if STEP_NAME.match(path.stem)]
    return {path.stem: _read(path, form) for path in paths}


def read_record(path: Path, form: Form) -> dict | None:
    """The record in a file, or None without one. Raises UsageError where it is malformed."""
    return _read(path, form) if path.exists() else None


def read_replaced(path: Path, form: Form) -> dict | None:
    """The record that a new one is about to replace.

    A malformed one is only named on stderr, so that measuring again repairs it.
    """
    try:
        return read_record(path, form)
    except UsageError as error:
        print(f"warning: {error}", file=sys.stderr)
        return None


def _read(path: Path, form: Form) -> dict:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        error = failure.strerror
    except (ValueError, RecursionError) as failure:
        error = str(failure)
    else:
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            error = f"not a record of schema {SCHEMA}"
        elif record.get("step", path.stem) != path.stem:
            error = f"it is a record of {record['step']}"
        else:
            error = find_error(record, form)
    if error:
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        raise UsageError(f"malformed record {shown}: {error}; restore it or measure again")
    return record
