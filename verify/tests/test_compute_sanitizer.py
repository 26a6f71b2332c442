"""NVIDIA's compute-sanitizer on all steps, on small shapes that leave ragged tiles.

`python -m verify.tests.test_compute_sanitizer TOOL CASE ...` is what the tools watch. It launches
and checks nothing, as the tools slow down torch's kernels, too.

Two of the tools do not know a rule of PTX and report steps that keep it. They watch copies of the
steps that do the same in a way they know.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from common.bench.cells import build_all
from common.catalog import all_steps
from common.operation import OPERATIONS
from common.paths import BUILD_DIR, ROOT
from common.records import write_atomically
from common.runtime.backend import run
from common.runtime.build import nvcc
from common.runtime.cpu import CpuBackend
from common.step import Step, read_step
from verify.cases import find_cases
from verify.check import check_case
from verify.tests.patch_samples import chosen

CASES = (
    "single_token",
    "ragged",
    "causal_short_k",
    "gqa_causal_padded",
    "head_dim_40",
    "head_dim_256",
)
# More work tiles than multiprocessors; v12's and b10's blocks hand some over.
MANY_TILES = ("shares_gpu", "shares_gpu_128", "query_shares_gpu_128")
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "initcheck": "ERROR SUMMARY: 0 errors",
    "synccheck": "ERROR SUMMARY: 0 errors",
}


def all_lanes_arrive(code: str) -> str:
    """The code for racecheck, which does not see that by __syncwarp all lanes have read what lane 0
    then releases, and reports each stage that is used again. Here they all arrive at the mbarrier.
    Where threads of other blocks arrive, as many do as before.
    """
    of_others = set(re.findall(r"mbarrier_arrive_cluster_relaxed\(([\w.]+)", code))

    def more_arrivals(init: re.Match[str]) -> str:
        return init[0] if init["name"] in of_others else f"{init['to']}, 32 * ({init['count']}));"

    arrival = r"(?:if \(\w+\) )?mbarrier_arrive\([^;]*\);\s*"
    arrivals = rf"({arrival}|{{\s*(?:{arrival})+}})"
    code = re.sub(rf"if \((?:lane|threadIdx\.x % 32) == 0\)\s+{arrivals}", r"\1", code)
    init = r"(?P<to>mbarrier_init\((?P<name>[\w.]+)[^;]*), (?!1\))(?P<count>[^;]+)\);"
    return re.sub(init, more_arrivals, code)


def meet_in_pairs(code: str) -> str:
    """The code for synccheck, which calls threads divergent that come to a barrier from two places
    of the code. Here one warpgroup waits for the other's arrival, then the other for this one's.
    """
    first = "if (threadIdx.x < 128) bar_arrive(14, 256), bar_sync(15, 256);"
    second = "else bar_sync(14, 256), bar_arrive(15, 256);"
    barrier = r"bar_sync\((?:CONSUMERS|DS)_BARRIER, 128 \* CONSUMERS\);"
    return re.sub(barrier, f"{{ {first} {second} }}", code)


REWRITES: dict[str, Callable[[str], str]] = {
    "racecheck": all_lanes_arrive,
    "synccheck": meet_in_pairs,
}


def rewritten(step: Step, tool: str) -> Step:
    """A copy of the step for the tool."""
    path = BUILD_DIR / f"{step.name}_for_{tool}.cu"
    write_atomically(path, REWRITES[tool](step.path.read_text(encoding="utf-8")))
    return read_step(path)


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
    command += [sys.executable, "-m", "verify.tests.test_compute_sanitizer", tool, *CASES]
    # Not initcheck: a block that goes on with another's work looks for its signal in memory that
    # nobody has written yet.
    if tool != "initcheck":
        command += MANY_TILES
    # Without torch's cache every tensor is an allocation of its own, whose end memcheck knows.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert "launched" in ended.stdout, ended.stdout[-2000:]
    assert CLEAN[tool] in ended.stdout, ended.stdout[-4000:]


def copies() -> list[tuple[str, Step]]:
    """The copies that differ from their steps, each with its tool."""
    return [
        (tool, copy)
        for tool in REWRITES
        for step in all_steps()
        if (copy := rewritten(step, tool)).code_sha256 != step.code_sha256
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_rewritten_step_is_right:
        its = chosen(copies(), metafunc.config.getoption("mutants"))
        metafunc.parametrize(
            "copy", [copy for _, copy in its], ids=[copy.path.stem for _, copy in its]
        )


def test_steps_are_rewritten_for_each_tool() -> None:
    assert {tool for tool, _ in copies()} == set(REWRITES)


def test_a_rewritten_step_is_right(copy: Step) -> None:
    """Once: in what orders threads may run, the step itself is tested."""
    name = "head_dim_320" if copy.limits.highest_head_dim >= 320 else "ragged"
    (case,) = find_cases([name], copy.operation)
    result = check_case(copy, case, [CpuBackend()])
    assert result.passed, str(result)


def _launch_all(tool: str, *names: str) -> None:
    from common.runtime.gpu import GpuBackend

    backend = GpuBackend()
    for operation in OPERATIONS.values():
        steps = [step for step in all_steps() if step.operation == operation]
        if tool in REWRITES:
            steps = [rewritten(step, tool) for step in steps]
        cases = find_cases(names, operation)
        build_all(backend, steps, cases)
        for step, case in product(steps, cases):
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
    _launch_all(*sys.argv[1:])
