"""Compiles steps, once per content: the cache key covers all that goes into the compiler."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import UsageError, explain
from ..paths import BUILD_DIR, DEVICE_DIR
from ..problem import Specialization
from ..source import included_headers
from ..step import Step

HOPPER = "sm_90"


@dataclass(frozen=True)
class Build:
    """A compiled file and what the compiler said while making it."""

    path: Path
    log: str


@dataclass(frozen=True)
class Resources:
    """A kernel's resources: shared memory in bytes per block, the others per thread."""

    registers: int
    static_smem: int
    dynamic_smem: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def toolkit_program(name: str) -> str | None:
    """Path of a program of the CUDA toolkit, or None.

    It is looked for on PATH, then under $CUDA_HOME or /usr/local/cuda, then where `make setup` puts
    NVIDIA's packages on a machine without a toolkit.
    """
    places = (os.environ.get("CUDA_HOME", "/usr/local/cuda"), Path(sys.prefix, "cuda"))
    found = (shutil.which(name, path=Path(place, "bin")) for place in places)
    return shutil.which(name) or next(filter(None, found), None)


@cache
def nvcc() -> str:
    """Path of nvcc. Raises UsageError where there is none."""
    found = toolkit_program("nvcc")
    if not found:
        raise UsageError(
            "no nvcc on PATH, in $CUDA_HOME or in /usr/local/cuda: install the CUDA toolkit, "
            "or run make setup where there is a driver"
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
    """Runs `compiler flags -I include_dir source -o build/<name>-<hash>`, unless it is cached.

    The hash covers the command line, the compiler's version, the source and the headers it
    includes. A damaged output, as after a crash or on a full disk, is compiled again. Where another
    process is compiling the same, waits for that. Raises UsageError with the compiler's first
    error, or with the file system's.
    """
    try:
        command = [*compiler, *flags, f"-I{include_dir}", str(source)]
        key = hashlib.sha256("\0".join([*command, compiler_version(*compiler)]).encode())
        for path in (source, *included_headers(source, include_dir)):
            key.update(path.name.encode() + b"\0" + path.read_bytes())
        suffix = "".join(Path(name).suffixes)
        output = BUILD_DIR / f"{name.removesuffix(suffix)}-{key.hexdigest()[:16]}{suffix}"
        return _find(output) or _compile_once(command, source, output)
    except OSError as error:
        raise UsageError(
            f"{source.name} cannot be compiled: {explain(error, BUILD_DIR) or error}"
        ) from None


_intact: dict[Path, tuple[int, int]] = {}  # verified outputs: modification time, size


def _find(output: Path) -> Build | None:
    """The output and its log, if both are whole.

    The file beside it, which is written last, has the log and the output's hash. The hash is
    computed once per process: it takes milliseconds, too long for each call of attention().
    """
    try:
        made = json.loads(_receipt(output).read_text(encoding="utf-8"))
        stat = output.stat()
        state = (stat.st_mtime_ns, stat.st_size)
        if _intact.get(output) != state:
            if hashlib.sha256(output.read_bytes()).hexdigest() != made["sha256"]:
                return None
            _intact[output] = state
        return Build(output, made["log"])
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        return None


def _receipt(output: Path) -> Path:
    return output.with_name(output.name + ".json")


def _compile_once(command: list[str], source: Path, output: Path) -> Build:
    """Compiles, unless another process has done so while this one waited for it."""
    BUILD_DIR.mkdir(parents=True, exist_ok=True)
    # The lock file stays: were it removed, two processes could hold a lock of that name.
    with output.with_name(output.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _find(output) or _compile(command, source, output)


def _compile(command: list[str], source: Path, output: Path) -> Build:
    unfinished = output.with_name(output.name + ".tmp")
    receipt, unfinished_receipt = _receipt(output), _receipt(unfinished)
    receipt.unlink(missing_ok=True)
    try:
        ended = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
        if ended.returncode:
            said = output.with_suffix(".errors.txt")
            said.write_text(ended.stderr, encoding="utf-8")
            raise UsageError(
                f"{Path(command[0]).name} cannot compile {source.name}: "
                f"{_first_error(ended.stderr)} (full output: {said})"
            )
        log = ended.stderr + ended.stdout
        sha256 = hashlib.sha256(unfinished.read_bytes()).hexdigest()
        text = json.dumps({"sha256": sha256, "log": log})
        unfinished_receipt.write_text(text, encoding="utf-8")
        unfinished.replace(output)
        unfinished_receipt.replace(receipt)
    finally:
        for path in (unfinished, unfinished_receipt):
            path.unlink(missing_ok=True)
    return Build(output, log)


def _first_error(said: str) -> str:
    """The most informative line of a compiler's messages."""
    lines = said.splitlines()
    for cause in ("No space left", "size limit exceeded", "undefined reference", "error"):
        for line in lines:
            if cause in line:
                return line.strip()
    return lines[0] if lines else "it does not say why"


def cubin_flags(spec: Specialization, arch: str) -> list[str]:
    """nvcc's flags for one architecture, e.g. "sm_90"."""
    return [
        "-cubin",
        "-std=c++20",
        "-O3",
        "-lineinfo",
        f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}",
        "-Xptxas=-v",
        *spec.defines,
    ]


def headline_arch(step: Step) -> str:
    """What the step is compiled for on the headline GPU."""
    return step.limits.arch if step.limits.arch.endswith("a") else HOPPER


def build_cubin(step: Step, spec: Specialization, arch: str) -> Build:
    """Compiles a step for one architecture. Raises UsageError where its limits exclude spec."""
    step.require(spec)
    name = f"{step.name}_{spec}_{arch}.cubin"
    return compile_cached((nvcc(),), cubin_flags(spec, arch), step.path, DEVICE_DIR, name)


def parse_resources(log: str) -> dict[str, Resources]:
    """Each kernel's resources from ptxas -v, which does not know dynamic shared memory: 0 here."""
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
