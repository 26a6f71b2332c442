"""NVIDIA's compute-sanitizer on every step, on small shapes that leave ragged tiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.build import nvcc
from common.step import ROOT, Step, all_steps

CASES = "ragged,causal_short_k,head_dim_40"


def _compute_sanitizer() -> str:
    name = "compute-sanitizer"
    found = shutil.which(name) or shutil.which(name, path=Path(nvcc()).parent)
    return found or pytest.skip("no compute-sanitizer on PATH")


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
@pytest.mark.parametrize("step", all_steps(), ids=lambda step: step.name)
def test_clean(step: Step, tool: str) -> None:
    command = [_compute_sanitizer(), "--tool", tool, "--error-exitcode", "66"]
    command += ["--kernel-regex", "kernel_substring=attention_"]
    command += [sys.executable, "verify/check.py", str(step.path), "--backend", "gpu"]
    command += ["--cases", CASES]
    # Without torch's cache every tensor is an allocation of its own, whose end memcheck knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "0 hazards" in run.stdout, run.stdout[-2000:]
