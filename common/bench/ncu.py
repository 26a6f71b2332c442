"""Nsight Compute's counters of a step at the headline problem.

`python -m common launch steps/v04_register_tiles.cu` is what ncu watches. It replays each kernel
many times, so its durations are never mixed with measured times.
"""

from __future__ import annotations

import csv
import subprocess
import sys

import torch

from verify.case import Case

from ..errors import UsageError
from ..metrics import METRICS
from ..paths import ROOT
from ..runtime.backend import run
from ..runtime.build import toolkit_program
from ..step import Step
from .device_state import NOT_COLLECTED

NO_PERMISSION = "ERR_NVGPUCTRPERM"  # what ncu says where only administrators may read the counters


def collect(step: Step) -> dict[str, dict[str, float | None]] | str:
    """ncu's METRICS of each kernel of the step, by kernel and metric name, in base units.

    "not collected" and why where the driver does not permit it. Raises UsageError where ncu is
    missing or fails.
    """
    ncu = toolkit_program("ncu")
    if not ncu:
        raise UsageError("no ncu on PATH: install Nsight Compute, a part of the CUDA toolkit")
    command = [ncu, "--clock-control", "none", "--kernel-name", "regex:^attention_"]
    command += ["--metrics", ",".join(METRICS), "--csv", "--page", "raw", "--print-units", "base"]
    command += [sys.executable, "-m", "common", "launch", str(step.path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if NO_PERMISSION in ended.stdout + ended.stderr:
        return f"{NOT_COLLECTED}: not permitted ({NO_PERMISSION})"
    lines = ended.stdout.splitlines()
    table = [line for line in lines if line.startswith('"')]
    if ended.returncode or not table:
        said = [line for line in lines + ended.stderr.splitlines() if "error" in line.lower()]
        raise UsageError(f"ncu collected nothing: {' '.join(said[:2]) or 'it does not say why'}")
    return parse(table)


def parse(table: list[str]) -> dict[str, dict[str, float | None]]:
    """From the lines of ncu's raw CSV page: a row of names, one of units, then one per kernel."""
    names, _, *rows = csv.reader(table)
    kernels = {}
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        kernels[cells["Kernel Name"].partition("(")[0]] = {
            metric: _number(cells[metric]) for metric in METRICS
        }
    return kernels


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", ""))
    except ValueError:  # "n/a": this card does not count it
        return None


def launch_once(step: Step) -> None:
    """Launches the step at the headline problem; nothing is checked or timed."""
    from ..runtime.gpu import GpuBackend

    backend = GpuBackend()
    case = Case.of("headline", step.operation.headline, step.operation)
    run(backend, step, *case.make(backend.device), **case.arguments)
    torch.cuda.synchronize()
