"""Faults: what a kernel may not do is reported, by the SIMT runtime or by a sanitizer."""

from __future__ import annotations

import platform
import re
import subprocess
import time

import pytest

from common.errors import UsageError
from common.problem import Specialization
from common.runtime import cpu
from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

# What 48 threads (a full warp and half of one) execute.
FAULTS = [
    # With an even seed buffers end at a guard page, with an odd one they start there.
    Fault(
        "read_past_end", "p.lse[0] = p.k[16];", r"block \d, thread \d+ @: past the end of k \(64 b"
    ),
    Fault(
        "read_before_start", "p.lse[0] = p.v[-1];", r"read .* @: 4 bytes before the start of v", 1
    ),
    Fault(
        "read_far_past_end", "p.lse[0] = p.q[99999];", "read .* @: past the end of q .* byte 399996"
    ),
    Fault("write_past_end", "if (t == 7) p.o[16] = 1;", "write .*thread 7 @: past the end of o"),
    Fault("write_before_start", "p.lse[-2] = 1;", "write .* @: 8 bytes before the start of lse", 1),
    Fault("write_workspace", "scores[9999] = 1;", r"write .* @: past the end of workspace\[0\]"),
    Fault("write_slack_end", "p.o[17] = 1;", "write in kernel test_kernel: past the end of o", 1),
    Fault(
        "write_slack_start", "p.o[-1] = 1;", "write in kernel test_kernel: before the start of o"
    ),
    Fault(
        "write_input", "const_cast<float*>(p.q)[3] = 1;", "write to an input .* @: at byte 12 of q"
    ),
    Fault(
        "null", "static_cast<float*>(p.workspace[1])[t] = 1;", "write .* @: through a null pointer"
    ),
    Fault(
        "wild",
        "p.lse[0] = *reinterpret_cast<float*>(uintptr_t{1} << 40);",
        "read .* @: at address .*, in or near no buffer",
    ),
    Fault(
        "smem_past_end",
        "raw[272] = 1;",
        r"write .* @: past the end of shared memory \(260 bytes\), at byte 272",
    ),
    Fault(
        "smem_before", "p.lse[0] = raw[-1];", "read .* @: 1 bytes before the start of shared mem", 1
    ),
    Fault("smem_slack_end", "raw[270] = 1;", "write .*, block .: past the end of shared memory", 1),
    Fault(
        "smem_slack_start",
        "raw[-8] = 1;",
        "write .*, block .: before the start of shared memory; an odd seed finds the line",
    ),
    Fault(
        "smem_too_small",
        "shared_memory<double[33]>()[t % 2] = 1;",
        "too little shared memory .*: shared_memory @: the layout has 264 bytes, .* asks for 260",
    ),
    Fault(
        "smem_misaligned",
        "struct alignas(64) Wide { float x[64]; }; shared_memory<Wide>().x[0] = 1;",
        "misaligned shared memory .*: shared_memory @: .* asks for 260 bytes, not a multiple of 64",
    ),
    Fault(
        "load_misaligned",
        "p.lse[0] = load_float4(p.q + 1).x;",
        "misaligned access .*: load_float4 @ needs a multiple of 16 .* at byte 4 of q",
    ),
    Fault(
        "store_misaligned",
        "const float x[4] = {}; store_vector(p.o + 2, x);",
        "misaligned access .*: store_vector @ .* at byte 8 of o",
    ),
    Fault(  # in a function of a header
        "wrapper_past_end", "p.lse[0] = load_float4(p.q + 16).x;", "read .* @: past the end of q"
    ),
    Fault(  # in libc
        "memcpy_past_end",
        "memcpy(p.lse, p.q + 12, 16 * p.seq_q);",
        "read .* @: past the end of q",
    ),
    Fault(
        "last_collective",
        "__syncthreads(); if (t == 3) p.o[20] = 1;",
        r"thread 3 @: past the end of o.*\n  the last collective it passed: __syncthreads @",
    ),
    Fault(
        "early_exit",
        "if (t < 20) __syncthreads();",
        "barrier divergence in kernel test_kernel, block .: no thread can go on"
        r"\n  threads 0-19 wait at __syncthreads @\n  threads 20-47 have exited",
    ),
    Fault(
        "two_barriers",
        "if (t % 2) __syncthreads(); else if (t < 4) __syncwarp(1u << t); else\n__syncthreads();",
        r"barrier divergence .*\n  threads 0, 2 have exited"
        r"\n  threads 1, 3, 5, .* 47 wait at __syncthreads @"
        r"\n  threads 4, 6, .* 46 wait at __syncthreads \(faults.cu:\d+\)",
    ),
    Fault(
        "barrier_and_shuffle",
        "if (t < 32) __syncthreads(); else __shfl_sync(0xffff, t, 0), __syncwarp(0xffff);",
        r"barrier divergence .*\n  threads 0-31 wait at __syncthreads @\n  threads 32-47 have ex",
    ),
    Fault(
        "exited_lane",
        "if (t != 5 && t < 16) __shfl_xor_sync(0xffff, t, 1);",
        r"lane that has exited .*\n  threads 0-4, 6-15 wait at __shfl_xor_sync @ with mask 0x0000f"
        r"fff\n  threads 5, 16-47 have exited",
    ),
    Fault(
        "own_lane_missing",
        "if (t == 3) __shfl_sync(0x7, t, 0);",
        "lane outside its own mask .*thread 3: __shfl_sync @ with mask 0x00000007, .* lane 3",
    ),
    Fault(
        "no_such_lane",
        "if (t >= 32) __shfl_down_sync(0xffffffff, t, 1);",
        "mask with lanes that do not exist .*: __shfl_down_sync @ .*; the warp has 16 lanes",
    ),
    Fault(
        "source_outside_mask",
        "if (t < 8) __shfl_sync(0xff, t, t + 1);",
        "shuffle from a lane outside the mask .*: __shfl_sync @ .*, where lane 7 reads lane 8",
    ),
    Fault(
        "different_masks",
        "if (t < 3) __shfl_sync(t ? 0x7 : 0x3, t, 0);",
        r"with different masks .*\n  thread 0 waits at __shfl_sync @ with mask 0x00000003"
        r"\n  threads 1-2 wait at __shfl_sync @ with mask 0x00000007\n  threads 3-47 have exited",
    ),
    Fault(
        "different_places",
        "if (t < 2) { if (t) __syncwarp(3); else __any_sync(3, 1); }",
        r"in different places .*\n  thread 0 waits at __any_sync @ .*\n  thread 1 waits at __syncw",
    ),
    Fault(
        "deadlock",
        "if (t < 3) __syncwarp(t == 0 ? 0x3 : t == 1 ? 0x6 : 0x5);",
        r"deadlock .*\n  thread 0 waits .* 0x00000003\n  thread 1 .* 0x00000006\n  thread 2 .*5\n",
    ),
    Fault(
        "stack_overflow",
        "p.lse[0] = deep(t + 10000);",
        r"stack overflow .* \(faults.cu:\d+\): .* in thread",
    ),
    Fault(
        "stack_overflow_of_the_first",
        "if (t == 0) p.lse[0] = deep(10000);",
        r"stack overflow .*, thread 0 .* in thread 0\b",
    ),
    Fault(
        "stack_overflow_of_the_last",
        "if (t == 47) p.lse[0] = deep(10000);",
        r"stack overflow .*, thread 47 .* in thread 47\b",
    ),
    Fault(
        "endless_loop",
        "for (volatile int i = 0; t == 9; ) i = 0;",
        "time limit .*thread 9 @: still",
    ),
]

FAULT_GLOBALS = """
// More stack than a thread has.
__device__ __attribute__((noinline)) float deep(int n) {
    volatile float local[100];
    local[n % 100] = n;
    return n ? deep(n - 1) + local[n % 100] : 0.0f;
}
"""


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    return write_faults(
        tmp_path_factory.mktemp("faults"),
        FAULTS,
        "    char* raw = reinterpret_cast<char*>(&smem);\n    raw[t] = 0;",
        globals_=FAULT_GLOBALS,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, fault, monkeypatch):
    monkeypatch.setattr(cpu, "MIN_TIME_LIMIT_S", 1)
    expect_report(faults_step, FAULTS, fault)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_fault(faults_step, seed):
    run(faults_step, CpuBackend(seed), scenario=-1)


def test_a_long_launch_says_what_runs(faults_step, monkeypatch):
    """The message comes at once, not when the launch ends."""
    written = []

    class Stderr:
        def write(self, text: str) -> None:
            if text:
                written.append((time.monotonic(), text))

        def flush(self) -> None:
            pass

    monkeypatch.setattr(cpu.sys, "stderr", Stderr())
    endless = next(i for i, fault in enumerate(FAULTS) if fault.name == "endless_loop")
    with pytest.raises(SimtError, match=r"time limit .* still running after 7 s") as error:
        run(faults_step, CpuBackend(time_limit_s=7), scenario=endless)
    [(moment, text)] = written
    assert time.monotonic() - moment > 0.5
    assert re.fullmatch(
        r"faults \(d8_fp32\): still computing in kernel test_kernel, block \d, thread 9 "
        r"\(faults.cu:\d+\) after [56] s; the limit is 7 s\n",
        text,
    )
    assert "still computing" not in str(error.value)


def test_without_addr2line_a_report_says_so(faults_step, monkeypatch):
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    with pytest.raises(SimtError, match=r"thread \d+ \(line unknown: no addr2line.*past the end"):
        run(faults_step, CpuBackend(), scenario=0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 traps")
def test_division_by_zero(tmp_path):
    step = write_step(tmp_path, "division", "p.lse[0] = p.seq_q / (p.seq_q - p.seq_k);")
    with pytest.raises(SimtError, match=r"division by zero in .*, thread \d+ \(division.cu:"):
        run(step, CpuBackend())


# ---- the program


def test_killed_program(faults_step, monkeypatch):
    def killed(command, **options):
        return subprocess.CompletedProcess(command, -9, b"", b"")

    backend = CpuBackend()
    backend.descriptor(faults_step, Specialization(8, "fp32", False))
    monkeypatch.setattr(cpu.subprocess, "run", killed)
    with pytest.raises(SimtError, match="ended by SIGKILL"):
        run(faults_step, backend)


def test_workspace_must_fit(faults_step, monkeypatch):
    monkeypatch.setattr(cpu, "_available_bytes", lambda: 7)
    with pytest.raises(UsageError, match="needs a workspace of 8 bytes, and 7 are free"):
        run(faults_step, CpuBackend())


# ---- sanitizers


@pytest.fixture(scope="module")
def sanitized_step(tmp_path_factory) -> Step:
    return write_step(
        tmp_path_factory.mktemp("sanitized"),
        "sanitized",
        """
    float local[4] = {};
    float* alias = local;
    __syncthreads();
    switch (int(p.softmax_scale)) {
        case 0: smem.first[t] = 1; break;
        case 1: p.lse[0] = reinterpret_cast<const float4*>(p.q + 1)->x; break;
        case 2: alias[t] = 1; break;
        case 3: smem.counter = 0x7fffffff + p.seq_q; break;
        case 4: p.lse[0] = p.q[16]; break;
        case 5: if (t % 2) __syncthreads(); break;
        case 6: if (t == 0) store_float4(smem.second + 32, {}); break;  // ends after the layout
    }
    __syncthreads();
    p.lse[0] = local[t % 4];
""",
    )


@pytest.mark.parametrize(
    ("scenario", "report"),
    [
        # Where two workers report the same place at once, the sanitizer may leave out the column.
        (0, r"sanitized.cu:\d+(:\d+)?: runtime error: index \d+ out of bounds for type 'float"),
        (1, "runtime error: .* misaligned address"),
        (2, "insufficient space|stack-buffer-overflow"),
        (3, "signed integer overflow"),
        (4, "past the end of q"),
        (5, r"barrier divergence .*\n  threads 0, 2"),
        (6, "out-of-bounds write .*: past the end of shared memory"),
    ],
)
def test_sanitizers(sanitized_step, scenario, report):
    with pytest.raises(SimtError, match=report) as error:
        run(sanitized_step, CpuBackend(sanitize=True), scenario=scenario)
    first_line = str(error.value).splitlines()[0]
    assert re.search(r"in kernel test_kernel, block \d", first_line)
    assert len(str(error.value).splitlines()) < 20


@pytest.mark.parametrize("seed", [0, 1])
def test_sanitizers_accept(sanitized_step, seed):
    run(sanitized_step, CpuBackend(seed, sanitize=True), scenario=-1)
