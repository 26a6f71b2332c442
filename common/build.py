"""Compiles steps, once for each content: the cache key is all that goes into the compiler."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import UsageError
from common.step import ROOT, Specialization, Step

BUILD_DIR = ROOT / "build"


@dataclass(frozen=True)
class Build:
    """A compiled file and what the compiler said while making it."""

    path: Path
    log: str


@dataclass(frozen=True)
class Resources:
    """What one kernel takes; bytes of shared memory are a block's, the others a thread's."""

    registers: int
    static_smem: int
    dynamic_smem: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@cache
def nvcc() -> str:
    """Path of nvcc: on PATH, or under $CUDA_HOME or /usr/local/cuda. Raises UsageError without."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    found = shutil.which("nvcc") or shutil.which("nvcc", path=home / "bin")
    if not found:
        raise UsageError(
            f"no nvcc on PATH or in {home / 'bin'}: install the CUDA toolkit or set CUDA_HOME"
        )
    return found


@cache
def host_compiler() -> str:
    """Path of the C++20 compiler: $CXX, else g++ or clang++. Raises UsageError without."""
    wanted = os.environ.get("CXX")
    found = shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("clang++")
    if not found:
        raise UsageError(
            f"no C++ compiler ({wanted or 'g++ or clang++'}): "
            "install g++ 12 or clang 15 or newer, or set CXX"
        )
    return found


@cache
def compiler_version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()


def compile_cached(
    command: list[str], step_path: Path, include_dirs: list[Path], name: str
) -> Build:
    """Runs `command step_path -o build/<name>-<hash>` unless that output is there already.

    The hash covers the command, the compiler's version, the step, launch.h and every header in
    include_dirs. Raises UsageError with the compiler's first error.
    """
    headers = [ROOT / "common" / "launch.h"]
    headers += [
        path for folder in include_dirs for path in sorted(folder.rglob("*")) if path.is_file()
    ]
    key = hashlib.sha256("\0".join([*command, compiler_version(command[0])]).encode())
    for path in (step_path, *headers):
        key.update(path.name.encode() + b"\0" + path.read_bytes())
    suffix = "".join(Path(name).suffixes)
    output = BUILD_DIR / f"{name.removesuffix(suffix)}-{key.hexdigest()[:16]}{suffix}"
    log = output.with_name(output.name + ".log")
    if output.exists() and log.exists():
        return Build(output, log.read_text())
    BUILD_DIR.mkdir(exist_ok=True)
    unfinished = output.with_name(f"{output.name}.{os.getpid()}.{id(key)}.tmp")
    run = subprocess.run(
        [*command, str(step_path), "-o", str(unfinished)], capture_output=True, text=True
    )
    if run.returncode:
        unfinished.unlink(missing_ok=True)
        said = output.with_suffix(".errors.txt")
        said.write_text(run.stderr)
        errors = [line for line in run.stderr.splitlines() if "error" in line] or ["no message"]
        raise UsageError(
            f"{Path(command[0]).name} cannot compile {step_path.name}: {errors[0]} "
            f"(all it says: {said.relative_to(ROOT)})"
        )
    log.write_text(run.stderr + run.stdout)
    unfinished.rename(output)
    return Build(output, run.stderr + run.stdout)


def cubin_command(step: Step, spec: Specialization, arch: str) -> list[str]:
    """nvcc's command line for one architecture, e.g. "sm_90", without source and output."""
    return [
        nvcc(),
        "-cubin",
        "-std=c++20",
        "-O3",
        "-lineinfo",
        f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}",
        "-Xptxas=-v",
        f"-I{ROOT / 'common' / 'device'}",
        f"-DHEAD_DIM={spec.head_dim}",
        f"-DELEMENT={spec.dtype}",
        f"-DCAUSAL={int(spec.causal)}",
    ]


def build_cubin(step: Step, spec: Specialization, arch: str) -> Build:
    """Compiles a step for one architecture. Raises UsageError where its limits exclude spec."""
    step.require(spec)
    return compile_cached(
        cubin_command(step, spec, arch),
        step.path,
        [ROOT / "common" / "device"],
        f"{step.name}_{spec}_{arch}.cubin",
    )


def parse_resources(log: str) -> dict[str, Resources]:
    """ptxas -v's report, by kernel; dynamic shared memory is not known to it and left 0."""
    resources = {}
    for report in re.split(r"Compiling entry function '", log)[1:]:
        name = report[: report.index("'")]

        def number(pattern: str, report: str = report) -> int:
            found = re.search(pattern, report)
            return int(found[1]) if found else 0

        resources[name] = Resources(
            registers=number(r"Used (\d+) registers"),
            static_smem=number(r"(\d+) bytes smem"),
            dynamic_smem=0,
            stack_bytes=number(r"(\d+) bytes stack frame"),
            spill_store_bytes=number(r"(\d+) bytes spill stores"),
            spill_load_bytes=number(r"(\d+) bytes spill loads"),
        )
    return resources
