"""The SIMT backend: executes steps on the CPU to check them; simt/ says what it watches for.

A step becomes a program of its own, so that nothing a kernel does can hurt this process. The
program reads one request (struct Request of simt/run.cpp) from stdin and writes outputs, workspaces
and counts to stdout, or a report of what a kernel did wrong to stderr.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from ..lengths import Lengths
from ..operation import Operation
from ..problem import Specialization
from ..step import Step
from .backend import Call, empty_outputs, launch, not_enough_memory, refuse, specialization
from .build import compile_cached, compiler_version, host_compiler
from .kernels import KernelCall, one_kernel
from .launch import (
    LaunchDescriptor,
    LengthsParams,
    Plan,
    descriptor_type,
    lengths_of,
    params_type,
    read_plan,
    sizes_of,
)
from .pack import Packer, simt_encoder
from .segments import SegmentedTensor

SIMT_DIR = Path(__file__).parent / "simt"

COMMON_FLAGS = (
    "-x",
    "c++",
    "-std=c++20",
    "-pthread",
    "-rdynamic",  # kernels are looked up by name
    "-g1",  # a report names the line of an access that traps,
    "-gdwarf-4",  # where addr2line of binutils 2.40 takes DWARF 5's headers for the step itself
    "-fno-omit-frame-pointer",  # by which the runtime walks the stack
    "-fno-math-errno",
    "-fno-strict-aliasing",  # device compilers allow a tile of floats to be read as float4
    "-ftrivial-auto-var-init=pattern",  # uninitialized variables are not the 0 of fresh memory
    "-Wno-unknown-pragmas",
)
STEP_FLAGS = ("-O1",)  # a step runs only a few times: most of a check is compilation
# Most of a run is in here. Reports name lines of steps alone, and a program is 20 times smaller.
RUNTIME_FLAGS = ("-O3", "-c", "-g0")
SANITIZED_RUNTIME_FLAGS = ("-O1", "-c", "-g0")  # -O3 takes half a minute, more than it saves
SANITIZED_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

FAULT_EXIT_CODE = 65  # of common/runtime/simt/report.h
PROGRESS = "still computing"  # likewise
MULTIPROCESSORS = 2  # few: a persistent block computes many work tiles; odd seeds add one
MAX_WORKERS = 16  # each has a stack for every thread of a block
MIN_TIME_LIMIT_S = 60
# The most shared memory that a block can ask for, in KiB, by architecture.
SMEM_LIMITS_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 120: 99}
# Far below what the slowest steps reach, sanitized, on one core; v02 has a block per query.
MULTIPLY_ADDS_PER_S, QUERIES_PER_S = 1e6, 200

# Where in the program something happened: addresses, the innermost call first.
_CODE = re.compile(r"<code((?: 0x[0-9a-f]+)*)>")


class SimtError(RuntimeError):
    """A kernel did something illegal; the message is the runtime's or a sanitizer's report."""


@dataclass(frozen=True)
class SharedAccess:
    """The accesses to shared memory from one place in a source; see simt/banks.h."""

    operation: str  # the wrapper's name
    file: str
    line: int
    accesses: int  # of whole warps
    ideal: int  # wavefronts they would take without bank conflicts
    wavefronts: int


_INPUT, _OUTPUT, _WORKSPACE, _KEPT = range(4)  # enum Kind


class _BufferRequest(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 16),
        ("segments", ctypes.c_int32),
        ("alignment", ctypes.c_int32),
        ("misalignment", ctypes.c_int32),
        ("address_at", ctypes.c_int32),
        ("map_at", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    ]


class _KernelRequest(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 48),
        ("blocks", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("smem_bytes", ctypes.c_int32),
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("workers", ctypes.c_int32),
        ("time_limit_s", ctypes.c_int32),
        ("count_banks", ctypes.c_int32),
        ("calls", ctypes.c_int32),
        ("buffers", _BufferRequest * 16),
        ("kernels", _KernelRequest * 3),
    ]


class CpuBackend:
    """Runs steps on CPU tensors. Implements common.runtime.backend.Backend.

    The seed orders blocks and threads, and its parity chooses which end of each buffer touches a
    guard page. sanitize compiles with AddressSanitizer and UndefinedBehaviorSanitizer, which
    excludes the search for data races in the step's own accesses. A call that takes longer than
    time_limit_s fails; with None only endless loops reach the limit. A persistent step launches
    blocks for `multiprocessors`; a program makes `calls` calls and returns the last one's outputs.
    Both may be set.
    """

    name = "cpu"
    device = torch.device("cpu")

    def __init__(
        self, seed: int = 0, sanitize: bool = False, time_limit_s: int | None = None
    ) -> None:
        self.seed = seed
        self.sanitize = sanitize
        self.time_limit_s = time_limit_s
        self.multiprocessors = MULTIPROCESSORS + seed % 2
        self.calls = 1

    def refusal(self, step: Step, spec: Specialization) -> str | None:
        return step.limits.refusal(spec)

    def build(self, step: Step, spec: Specialization) -> Path:
        code_flags = (
            *_flags(self.sanitize),
            *STEP_FLAGS,
            *_debug_flags(host_compiler()),
            *_nan_flags(host_compiler()),
            *([] if self.sanitize else _race_flags(host_compiler())),
        )
        flags = [
            *_runtime(self.sanitize),  # before the flag that says that all further files are C++
            *code_flags,
            *_precompiled(code_flags),
            *_link_flags(*host_compiler()),
            *spec.defines,
        ]
        name = f"{step.path.stem}_{spec}_simt{'_sanitize' if self.sanitize else ''}"
        return compile_cached(host_compiler(), flags, step.path, SIMT_DIR, name).path

    def descriptor(self, step: Step, spec: Specialization) -> LaunchDescriptor:
        return _read_descriptor(step.operation, self.build(step, spec))

    def launch(
        self,
        step: Step,
        *tensors: torch.Tensor,
        causal: bool,
        lengths: Lengths | None = None,
        **scalars: float,
    ) -> list[torch.Tensor]:
        """Launches the step and waits. Also raises SimtError."""
        return launch(self, step, tensors, causal, lengths, scalars)

    def prepare(self, step: Step, spec: Specialization) -> Call:
        step.require(spec)
        return lambda tensors, scalars, lengths=None: self._execute(
            step, spec, tensors, scalars, lengths
        )[0]

    def prepare_kernel(self, step: Step, spec: Specialization, name: str) -> KernelCall:
        step.require(spec)
        assert self.calls == 1, "a second call would add to what is kept again"
        plan = read_plan(step, self.descriptor(step, spec), self.multiprocessors)
        one_kernel(step, plan, name)  # raises where there is none
        return lambda tensors, scalars, workspaces: self._execute(
            step, spec, tensors, scalars, kernel=name, lasting=workspaces
        )[0]

    def count_shared_accesses(
        self, step: Step, *inputs: torch.Tensor, causal: bool, **scalars: float
    ) -> list[SharedAccess]:
        """Runs the step once: its accesses to shared memory through a wrapper, in source order."""
        tensors = (*inputs, *empty_outputs(step.operation, inputs))
        values = [scalars[name] for name in step.operation.scalars]
        spec = specialization(tensors, causal)
        workspace, accesses = self._execute(step, spec, tensors, values, count_banks=True)
        if workspace is None:
            refuse(step, self.descriptor(step, spec).alignment, tensors)
        return accesses

    def _execute(
        self,
        step: Step,
        spec: Specialization,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
        lengths: Lengths | None = None,
        *,
        count_banks: bool = False,
        kernel: str | None = None,
        lasting: Sequence[torch.Tensor] = (),
    ) -> tuple[list[torch.Tensor] | None, list[SharedAccess]]:
        """What a call returns, and the accesses: none unless count_banks. Of one kernel, if it is
        named: what a KernelCall returns, of these workspaces.
        """
        operation = step.operation
        program = self.build(step, spec)
        descriptor = _read_descriptor(operation, program)
        plan = read_plan(step, descriptor, self.multiprocessors)
        num_returned = len(plan.workspaces)
        if kernel is not None:
            _, plan, num_returned = one_kernel(step, plan, kernel)
        lengths = lengths_of(step, lengths)
        sizes = sizes_of(tensors, lengths)
        workspace_bytes = plan.workspace_bytes(sizes)
        # The program fills its own addresses in: of each tensor, of its map, of each workspace.
        without_clusters = [1] * len(plan.kernels)
        packer = Packer(step, descriptor, plan, without_clusters, spec, simt_encoder(spec))
        packed = packer(tensors, scalars, lengths)
        if packed is None:
            return None, []
        params, blocks = packed
        _check_launch(step, spec, plan)
        _check_memory(step, sum(workspace_bytes))

        fields = params_type(operation)
        segmented = [SegmentedTensor(t) for t in tensors]
        buffers, contents = [], []
        for operand, t, own in zip(operation.operands, tensors, segmented, strict=True):
            is_input = operand in operation.inputs
            contents.append(own.segments)
            if is_input or kernel is not None:
                own.copy_from(t)
                contents.append(own.elements)
            buffers.append(
                _BufferRequest(
                    name=operand.name.encode(),
                    segments=len(own.segments),
                    alignment=16,
                    misalignment=t.data_ptr() % 16,
                    address_at=getattr(fields, operand.name).offset,
                    map_at=getattr(fields, f"{operand.name}_map").offset if operand.strided else -1,
                    kind=_INPUT if is_input else _OUTPUT if kernel is None else _KEPT,
                )
            )
        for name, t in zip(Lengths._fields, (lengths or ())[:3], strict=False):
            if t is None:
                continue
            contents += [np.array([[0, t.nbytes]]), t.numpy()]
            buffers.append(
                _BufferRequest(
                    name=name.encode(),
                    segments=1,
                    alignment=t.itemsize,  # so that an even seed's guard page is right behind it
                    address_at=ctypes.sizeof(fields) + getattr(LengthsParams, name).offset,
                    map_at=-1,
                    kind=_INPUT,
                )
            )
        for i, size in enumerate(workspace_bytes):
            if not size:
                continue
            contents.append(np.array([[0, size]]))
            if i < len(lasting):
                assert lasting[i].nbytes == size
                contents.append(lasting[i].numpy())
            buffers.append(
                _BufferRequest(
                    name=f"workspace[{i}]".encode(),
                    segments=1,
                    alignment=256,
                    address_at=fields.workspace.offset + i * ctypes.sizeof(ctypes.c_uint64),
                    map_at=-1,
                    kind=_KEPT if i < len(lasting) else _WORKSPACE,
                )
            )
        kernels = [
            (kernel.name.encode(), num_blocks, kernel.threads, kernel.smem_bytes)
            for kernel, num_blocks in zip(plan.kernels, blocks, strict=True)
            if num_blocks > 0
        ]
        request = _Request(
            seed=self.seed,
            workers=_num_cores(),
            time_limit_s=self.time_limit_s or self.calls * _time_limit_s(operation, tensors),
            count_banks=count_banks,
            calls=self.calls,
            buffers=(_BufferRequest * 16)(*buffers),
            kernels=(_KernelRequest * 3)(*kernels),
        )
        answer = _run(step, spec, program, b"".join([request, params, *contents]))

        offset = 0
        num_inputs = len(operation.inputs)
        outputs = zip(tensors[num_inputs:], segmented[num_inputs:], strict=True)
        for operand, (t, own) in zip(operation.outputs, outputs, strict=True):
            own.elements[:] = np.frombuffer(answer, own.elements.dtype, own.elements.size, offset)
            offset += own.elements.nbytes
            own.copy_to(t)
            if (written := own.written_gaps()).size:
                name = operand.name
                raise SimtError(
                    f"{step.name} ({spec}): write outside the output view: {written.size} elements "
                    f"between the rows of {name} have changed, the first {written[0]} elements "
                    f"after the start of {name}"
                )
        workspace = []
        for size in workspace_bytes:
            part = np.frombuffer(answer, np.uint8, size, offset)
            workspace.append(torch.from_numpy(part.copy()))
            offset += size
        for t, content in zip(lasting, workspace, strict=False):
            t.copy_(content)
        returned = list(lasting) or workspace[:num_returned]
        return returned, _read_accesses(answer[offset:])


def _flags(sanitize: bool) -> tuple[str, ...]:
    return COMMON_FLAGS + (SANITIZED_FLAGS if sanitize else ())


@cache
def _link_flags(*compiler: str) -> tuple[str, ...]:
    """Flags for a faster linker than GNU's usual one, which takes a quarter of what it takes to
    compile a mutant. It comes with many binutils, but not with all, and does not find the libraries
    of every compiler.
    """
    flag = "-fuse-ld=gold"
    if sys.platform != "linux" or not shutil.which("ld.gold"):
        return ()
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [*compiler, flag, "-x", "c++", "-", "-o", f"{folder}/program"],
            input=b"int main() {}",
            capture_output=True,
        )
    return () if ended.returncode else (flag,)


def _debug_flags(compiler: tuple[str, ...]) -> list[str]:
    """A flag that keeps g++ from tracking for debuggers where variables are: with -O1 a seventh of
    what it takes to compile a step, and reports name lines alone.
    """
    return [] if "clang" in compiler_version(*compiler) else ["-fno-var-tracking"]


def _nan_flags(compiler: tuple[str, ...]) -> list[str]:
    """Flags that make g++ on Linux initialize local variables with NaN.

    clang++ does so anyway, but only with floats: 16-bit pairs packed into integers are then small
    numbers, not NaN.
    """
    if sys.platform != "linux" or "clang" in compiler_version(*compiler):
        return []
    script = SIMT_DIR / "nan_pattern.sh"
    version = zlib.crc32(script.read_bytes())  # so that a changed script changes the flags
    return [
        "-pipe",
        "-wrapper",
        f"bash,{script}",
        "-Wl,--wrap=memset",
        f"-DNAN_INIT={version}",
        "-fno-tree-ccp",  # where one path initializes a variable with a constant, these
        "-fno-tree-fre",  # two passes make all paths do so
    ]


def _race_flags(compiler: tuple[str, ...]) -> list[str]:
    """Flags that make the compiler report accesses to simt/races.h, by ThreadSanitizer's calls.

    Its library is not linked, as the driver does not see the flag. It excludes AddressSanitizer.
    """
    if "clang" in compiler_version(*compiler):
        return ["-Xclang", "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"]
    return ["-Wp,-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]


def _precompiled(code_flags: tuple[str, ...]) -> list[str]:
    """Flags by which g++ finds the headers of language.h compiled, with the same flags.

    Where it cannot use them it takes the file without .gch, which is empty: the step includes those
    headers itself. Looked up each time, as headers may change while this process lives, and what is
    compiled of old ones does not go with new ones.
    """
    if "clang" in compiler_version(*host_compiler()):
        return []
    flags = [*code_flags, "-x", "c++-header", "-c"]
    name = "language.h.gch"
    found = compile_cached(host_compiler(), flags, SIMT_DIR / "language.h", SIMT_DIR, name)
    empty = found.path.with_suffix("")
    if not empty.exists():
        empty.touch()
    return ["-include", str(empty)]


@cache
def _runtime(sanitize: bool) -> tuple[str, ...]:
    """Paths of the objects that every step is linked with."""
    flags = [*_flags(sanitize), *(SANITIZED_RUNTIME_FLAGS if sanitize else RUNTIME_FLAGS)]
    suffix = "_sanitize.o" if sanitize else ".o"

    def compile_source(source: Path) -> str:
        name = source.stem + suffix
        return str(compile_cached(host_compiler(), flags, source, SIMT_DIR, name).path)

    with ThreadPoolExecutor(_num_cores()) as pool:
        return tuple(pool.map(compile_source, sorted(SIMT_DIR.glob("unit_*.cpp"))))


@cache
def _read_descriptor(operation: Operation, program: Path) -> LaunchDescriptor:
    """What `program describe` writes."""
    ended = subprocess.run([program, "describe"], capture_output=True, check=True)
    return descriptor_type(operation).from_buffer_copy(ended.stdout)


def _run(step: Step, spec: Specialization, program: Path, request: bytes) -> bytes:
    """The answer to a request. Raises SimtError with the report where there is one instead.

    Messages about its progress are passed on at once.
    """
    lines: list[str] = []

    def read(stderr: int) -> None:
        with open(stderr, encoding="utf-8", errors="replace") as messages:
            for line in messages:
                if line.startswith(PROGRESS):
                    text = f"{step.name} ({spec}): {_name_lines(line, step, program)}"
                    print(text, end="", file=sys.stderr, flush=True)
                else:
                    lines.append(line)

    stderr, its_stderr = os.pipe()
    reader = threading.Thread(target=read, args=(stderr,))
    reader.start()
    try:
        ended = subprocess.run(
            [program, "run"], input=request, stdout=subprocess.PIPE, stderr=its_stderr
        )
    finally:
        os.close(its_stderr)
        reader.join()
    messages = "".join(lines).strip()
    if ended.returncode == 0:
        if messages:  # what a kernel printed
            print(messages, file=sys.stderr)
        return ended.stdout
    if ended.returncode < 0:
        messages = f"the program was ended by {signal.Signals(-ended.returncode).name}\n{messages}"
    elif ended.returncode != FAULT_EXIT_CODE:
        messages = _shorten_sanitizer_report(messages)
    raise SimtError(f"{step.name} ({spec}): {_name_lines(messages, step, program)}")


def _name_lines(text: str, step: Step, program: Path) -> str:
    """Replaces addresses in the program by a line of the step, e.g. `(v01_naive.cu:95)`."""
    return _CODE.sub(lambda code: f"({_line_of(code[1].split(), step, program)})", text)


def _line_of(addresses: list[str], step: Step, program: Path) -> str:
    """The innermost line of the step's source among the calls that lead to the addresses."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if not tool:
        return "line unknown: no addr2line, of binutils or llvm, on PATH"
    command = [tool, "-i", "-e", program, *addresses]
    places = subprocess.run(command, capture_output=True, text=True).stdout
    for place in places.splitlines():
        if found := re.match(rf"(?:.*/)?({re.escape(step.path.name)}:\d+)\b", place):
            return found[1]
    return "line unknown"


def _read_accesses(lines: bytes) -> list[SharedAccess]:
    accesses = []
    for line in lines.decode().splitlines():
        operation, file, *numbers = line.split("\t")
        accesses.append(SharedAccess(operation, file, *map(int, numbers)))
    return sorted(accesses, key=lambda access: (access.file, access.line, access.operation))


def _shorten_sanitizer_report(messages: str) -> str:
    """Where in the grid, then the report's first paragraph: no shadow bytes, no legend."""
    lines = [line for line in messages.splitlines() if not re.fullmatch("=+", line)]
    places = [line for line in lines if line.startswith("sanitizer error in kernel")]
    report = itertools.takewhile(str.strip, (line for line in lines if line not in places))
    return "\n".join([*places[:1], *report])


def _num_cores() -> int:
    """The number of cores that this process may use, at most MAX_WORKERS."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    return min(os.cpu_count() or 1, MAX_WORKERS)


def _time_limit_s(operation: Operation, tensors: Sequence[torch.Tensor]) -> int:
    """Seconds after which a kernel must be in an endless loop."""
    q, k, v = tensors[:3]
    queries = q.numel() / q.shape[3]
    columns = max(q.shape[3], v.shape[3])
    multiply_adds = operation.products * queries * columns * k.shape[2]
    return int(MIN_TIME_LIMIT_S + multiply_adds / MULTIPLY_ADDS_PER_S + queries / QUERIES_PER_S)


def _check_launch(step: Step, spec: Specialization, plan: Plan) -> None:
    """Raises SimtError where a GPU that the step's limits name cannot launch its kernels.

    __launch_bounds__ are checked by the program.
    """
    least, most = _smem_limits(step.limits.arch)
    large_from = step.limits.large_smem_head_dim
    if large_from is not None and spec.head_dim >= large_from:
        least = most
    for kernel in plan.kernels:
        if kernel.smem_bytes <= least:
            continue
        asks = (
            f"{step.name} ({spec}): kernel {kernel.name} asks for {kernel.smem_bytes} bytes of "
            f"shared memory a block, and"
        )
        if kernel.smem_bytes > most:
            raise SimtError(f"{asks} the most that a GPU for {step.limits.arch} has is {most}")
        raise SimtError(
            f"{asks} not all GPUs for {step.limits.arch} have more than {least}: after the "
            f"architecture let 'limits:' say '; more than {least // 1024} KiB of shared memory "
            f"from head_dim {spec.head_dim} on', or a lower one, or name a higher architecture"
        )


def _smem_limits(arch: str) -> tuple[int, int]:
    """A block's shared memory where code for `arch` runs, in bytes: the least, the most of any GPU.

    Code for sm_90a runs on sm_90 only, code for sm_80 on every later architecture, too.
    """
    number = int(arch.removeprefix("sm_").rstrip("a"))
    exact = arch.endswith("a")
    limits = [
        kib for sm, kib in SMEM_LIMITS_KIB.items() if sm == number or (sm > number and not exact)
    ] or SMEM_LIMITS_KIB.values()
    return 1024 * min(limits), 1024 * max(limits)


def _check_memory(step: Step, workspace_bytes: int) -> None:
    """Raises NotEnoughMemoryError where the workspaces do not fit."""
    available = _available_bytes()
    if workspace_bytes > available:
        raise not_enough_memory(step, workspace_bytes, available)


def _available_bytes() -> int:
    """Memory for a new process: the kernel's estimate on Linux, else all of the machine's."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        return (
            int(re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text(encoding="utf-8"))[1])
            * 1024
        )
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
