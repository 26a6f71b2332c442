"""Nsight Compute's counters of a step at the headline problem.

`python -m common launch steps/v04_register_tiles.cu` is what ncu watches. It replays each kernel
many times, so its durations are never mixed with measured times.
"""

from __future__ import annotations

import csv
import subprocess
import sys

import torch

from verify.cases import Case

from ..errors import UsageError
from ..runtime.backend import run
from ..runtime.build import toolkit_program
from ..source import ROOT
from ..step import Step
from .device_state import NOT_COLLECTED

# What tables and text call a counter: ncu's name of it and the factor to the unit in our name.
COUNTERS = {
    "duration_ms": ("gpu__time_duration.sum", 1e-6),
    "cycles": ("sm__cycles_elapsed.max", 1),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "memory_percent": ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "tensor_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "xu_percent": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1),
    "fma_percent": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active", 1),
    "lsu_percent": ("sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active", 1),
    "l1_data_percent": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", 1),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "dram_read_gb": ("dram__bytes_read.sum", 1e-9),
    "dram_write_gb": ("dram__bytes_write.sum", 1e-9),
    "l2_gb": ("lts__t_bytes.sum", 1e-9),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", 1),
    "local_loads": ("smsp__inst_executed_op_local_ld.sum", 1),
    "local_stores": ("smsp__inst_executed_op_local_st.sum", 1),
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALL_REASONS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
METRICS = (
    *(metric for metric, _ in COUNTERS.values()),
    *(STALL.format(reason) for reason in STALL_REASONS),
)

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
    """From the lines of ncu's raw CSV page: a row of names, one of units, then one a kernel."""
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


def readable(counters: dict[str, dict]) -> dict[str, dict[str, float | None]]:
    """The counters of each kernel under the names and in the units of COUNTERS."""
    return {
        kernel: {
            name: None if values.get(metric) is None else values[metric] * factor
            for name, (metric, factor) in COUNTERS.items()
        }
        for kernel, values in counters.items()
    }


def top_stalls(values: dict[str, float | None], count: int = 2) -> list[tuple[str, float]]:
    """The commonest reasons why a kernel's warps waited: warps stalled a cycle that issues."""
    stalls = [(reason, values.get(STALL.format(reason)) or 0.0) for reason in STALL_REASONS]
    return sorted(stalls, key=lambda stall: -stall[1])[:count]


def launch_once(step: Step) -> None:
    """Launches the step at the headline problem; nothing is checked or timed."""
    from ..runtime.gpu import GpuBackend

    backend = GpuBackend()
    case = Case.of("headline", step.operation.headline)
    run(backend, step, *case.make(backend.device), **case.arguments)
    torch.cuda.synchronize()
