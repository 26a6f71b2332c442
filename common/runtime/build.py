"""Compiles steps, once for each content: the cache key is all that goes into the compiler."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import UsageError
from ..problem import Specialization
from ..source import DEVICE_DIR, ROOT, included_headers
from ..step import Step

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


def toolkit_program(name: str) -> str | None:
    """Path of a program of the CUDA toolkit: on PATH, or under $CUDA_HOME or /usr/local/cuda."""
    return shutil.which(name) or shutil.which(name, path=_toolkit_bin())


def _toolkit_bin() -> Path:
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")


@cache
def nvcc() -> str:
    """Path of nvcc. Raises UsageError where there is none."""
    found = toolkit_program("nvcc")
    if not found:
        raise UsageError(
            f"no nvcc on PATH or in {_toolkit_bin()}: install the CUDA toolkit or set CUDA_HOME"
        )
    return found


def toolkit_version() -> str:
    """nvcc's version, e.g. "13.0.88". Raises UsageError where there is no nvcc."""
    return re.search(r"V([\d.]+)", compiler_version(nvcc()))[1]


@cache
def host_compiler() -> tuple[str, ...]:
    """The C++20 compiler: $CXX, which may have arguments, else g++ or clang++.

    Raises UsageError where there is none.
    """
    for wanted in [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]:
        name, *arguments = shlex.split(wanted)
        if found := shutil.which(name):
            return (found, *arguments)
    raise UsageError(
        f"no C++ compiler ({os.environ.get('CXX') or 'g++ or clang++'}): "
        "install g++ 12 or clang 15 or newer, or set CXX"
    )


@cache
def compiler_version(*compiler: str) -> str:
    """What `compiler --version` says. Raises UsageError where that fails."""
    ended = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    if ended.returncode:
        raise UsageError(f"'{' '.join(compiler)} --version' fails: is that a compiler?")
    return ended.stdout.strip()


def compile_cached(
    compiler: tuple[str, ...], flags: list[str], source: Path, include_dir: Path, name: str
) -> Build:
    """Runs `compiler flags -I include_dir source -o build/<name>-<hash>`, or finds that output.

    The hash covers the command line, the compiler's version, the source and the headers it
    includes. Where another process is compiling the same, waits for that. Raises UsageError with
    the compiler's first error.
    """
    command = [*compiler, *flags, f"-I{include_dir}", str(source)]
    key = hashlib.sha256("\0".join([*command, compiler_version(*compiler)]).encode())
    for path in (source, *included_headers(source, include_dir)):
        key.update(path.name.encode() + b"\0" + path.read_bytes())
    suffix = "".join(Path(name).suffixes)
    output = BUILD_DIR / f"{name.removesuffix(suffix)}-{key.hexdigest()[:16]}{suffix}"
    log = output.with_name(output.name + ".log")
    if not (output.exists() and log.exists()):
        BUILD_DIR.mkdir(exist_ok=True)
        # It stays: were it removed, two could hold a lock of that name.
        with output.with_name(output.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (output.exists() and log.exists()):  # nobody has compiled it meanwhile
                _compile(command, source, output, log)
    return Build(output, log.read_text(encoding="utf-8"))


def _compile(command: list[str], source: Path, output: Path, log: Path) -> None:
    unfinished, unfinished_log = (path.with_name(path.name + ".tmp") for path in (output, log))
    run = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if run.returncode:
        unfinished.unlink(missing_ok=True)
        said = output.with_suffix(".errors.txt")
        said.write_text(run.stderr, encoding="utf-8")
        lines = run.stderr.splitlines()
        errors = [line for line in lines if "undefined reference" in line]
        errors += [line for line in lines if "error" in line] or ["it does not say why"]
        raise UsageError(
            f"{Path(command[0]).name} cannot compile {source.name}: {errors[0]} "
            f"(all it says: {said.relative_to(ROOT)})"
        )
    # The log first: where there is an output, its log is whole.
    unfinished_log.write_text(run.stderr + run.stdout, encoding="utf-8")
    unfinished_log.replace(log)
    unfinished.replace(output)


def cubin_flags(spec: Specialization, arch: str) -> list[str]:
    """What nvcc is told for one architecture, e.g. "sm_90"."""
    return [
        "-cubin",
        "-std=c++20",
        "-O3",
        "-lineinfo",
        f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}",
        "-Xptxas=-v",
        *spec.defines,
    ]


def build_cubin(step: Step, spec: Specialization, arch: str) -> Build:
    """Compiles a step for one architecture. Raises UsageError where its limits exclude spec."""
    step.require(spec)
    name = f"{step.name}_{spec}_{arch}.cubin"
    return compile_cached((nvcc(),), cubin_flags(spec, arch), step.path, DEVICE_DIR, name)


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
