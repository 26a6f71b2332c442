"""NVIDIA's compute-sanitizer on all steps, on small shapes that leave ragged tiles.

`python -m verify.tests.test_compute_sanitizer CASE ...` is what the tools watch. It launches and
checks nothing, as the tools slow down torch's kernels, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.catalog import all_steps
from common.paths import ROOT
from common.runtime.backend import run
from common.runtime.build import nvcc
from verify.cases import find_cases

CASES = ("single_token", "ragged", "causal_short_k", "gqa_causal_padded", "head_dim_40")
# More work tiles than multiprocessors; v12's blocks hand some over.
MANY_TILES = ("shares_gpu", "shares_gpu_128")
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "initcheck": "ERROR SUMMARY: 0 errors",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


@pytest.mark.gpu
@pytest.mark.parametrize("tool", CLEAN)
def test_clean(tool: str) -> None:
    name = "compute-sanitizer"
    program = shutil.which(name) or shutil.which(name, path=Path(nvcc()).parent)
    if not program:
        pytest.skip("no compute-sanitizer on PATH")
    command = [program, "--tool", tool, "--print-limit", "10"]
    if tool == "memcheck":  # cuda-bindings asks the driver for functions that it may not have
        command += ["--report-api-errors", "no"]
    if tool != "initcheck":  # which has to see torch's kernels, too, when they write q, k and v
        command += ["--kernel-regex", "kernel_substring=attention_"]
    command += [sys.executable, "-m", "verify.tests.test_compute_sanitizer", *CASES]
    # Not initcheck: a block of v12 looks for its signal in memory that nobody has written yet.
    # Not racecheck: it does not see that __syncwarp orders a warp where it compiles to no
    # instruction. It reports a race in v11 and v12 wherever a stage of `work` is used again, and
    # none if lane 0 alone reads from there, or if all lanes arrive after it.
    if tool in ("memcheck", "synccheck"):
        command += MANY_TILES
    # Without torch's cache every tensor is an allocation of its own, whose end memcheck knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "launched" in ended.stdout, ended.stdout[-2000:]
    assert CLEAN[tool] in ended.stdout, ended.stdout[-4000:]


def _launch_all() -> None:
    from common.runtime.gpu import GpuBackend

    backend = GpuBackend()
    for step in all_steps():
        for case in find_cases(sys.argv[1:], step.operation):
            if backend.refusal(step, case.specialization):
                continue
            kernels = backend.descriptor(step, case.specialization).kernels
            if case.gpu_only and not any(kernel.blocks_per_sm for kernel in kernels):
                continue  # many work tiles are one a block
            inputs = case.make(backend.device)
            run(backend, step, *inputs, **case.arguments)
    torch.cuda.synchronize()
    print("launched")


if __name__ == "__main__":
    _launch_all()
