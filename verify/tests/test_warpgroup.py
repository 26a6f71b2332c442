"""setmaxnreg and named barriers: who waits for whom, and what is reported."""

from __future__ import annotations

import pytest
import torch

from common.errors import UsageError
from common.runtime.cpu import CpuBackend
from common.step import Step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

INCLUDE = '#include "warpgroup.cuh"'


def run_little(folder, body: str, *, threads: int, seeds: int = 4, num_lse: int = 1) -> list:
    """lse of some seeds. x is in global memory, where no race is reported."""
    step = write_step(
        folder, "little", "    if (block) return;\n" + body, threads=threads,
        globals_=INCLUDE + "\n__device__ float x[512];",
    )  # fmt: skip
    return [run(step, CpuBackend(seed), num_lse=num_lse)[1] for seed in range(seeds)]


# ---- named barriers


@pytest.mark.parametrize("barrier", ["bar_sync(1, 64);", ""])
def test_a_barrier_of_some_warps(tmp_path, barrier):
    """Warps 0 and 1 exchange numbers; the others take no part."""
    body = f"""
    if (t >= 64) return;
    for (int i = 0; i < 20; ++i) {{
        x[t] = t + i;
        {barrier}
        const float other = x[t ^ 32];
        __syncwarp();
        {barrier}
        p.lse[t] = i == 0 ? 0 : p.lse[t];
        p.lse[t] += other - (t ^ 32) - i;
    }}
"""
    results = run_little(tmp_path, body, threads=128, num_lse=64)
    assert all((lse == 0).all() for lse in results) == bool(barrier)


@pytest.mark.parametrize("arrive_first", [False, True])
def test_what_is_read_after_an_arrive_may_be_overwritten(tmp_path, arrive_first):
    """Warp 1 reads what warp 0 has written, and lets it write the next number."""
    read, arrive = "p.lse[32 * i + t % 32] = x[t % 32];", "if (i < 8) bar_arrive(2, 64);"
    body = f"""
    for (int i = 0; i < 9; ++i) {{
        if (t < 32) {{
            if (i) bar_sync(2, 64);
            x[t] = i;
            bar_arrive(1, 64);
        }} else {{
            bar_sync(1, 64);
            {arrive + read if arrive_first else read + arrive}
        }}
    }}
"""
    results = run_little(tmp_path, body, threads=64, num_lse=9 * 32)
    expected = torch.arange(9.0).repeat_interleave(32)
    right = [torch.equal(lse, expected) for lse in results]
    assert sum(right) <= 2 if arrive_first else all(right)


@pytest.mark.parametrize("full", ["bar_sync(3, 64);", "bar_arrive(3, 64);"])
def test_who_arrives_does_not_wait(tmp_path, full):
    """Warp 0 fills, warp 1 empties; each arrives at the barrier that the other one waits for."""
    times = 20 if "sync" in full else 1
    body = f"""
    for (int i = 0; i < {times}; ++i) {{
        if (t < 32) {{
            if (i) bar_sync(15, 64);
            x[t] = i + 1;
            bar_arrive(3, 64);
        }} else {{
            {full}
            p.lse[t - 32] = x[t - 32] + (i ? p.lse[t - 32] : 0);
            if (i + 1 < {times}) bar_arrive(15, 64);
        }}
    }}
"""
    results = run_little(tmp_path, body, threads=64, seeds=12, num_lse=32)
    assert all((lse == times * (times + 1) / 2).all() for lse in results) == ("sync" in full)


def test_barriers_do_not_mix(tmp_path):
    """Each pair of warps uses a barrier of its own."""
    body = """
    const int pair = t / 64;
    x[t] = t;
    bar_sync(1 + pair, 64);
    p.lse[t] = x[t ^ 32];
"""
    for lse in run_little(tmp_path, body, threads=512, num_lse=512):
        assert torch.equal(lse, (torch.arange(512) ^ 32).float())


def test_arrivals_may_be_left(tmp_path):
    run_little(tmp_path, "    if (t < 32) bar_arrive(2, 64);", threads=64)


# ---- registers


def test_registers_come_from_others(tmp_path):
    """384 threads have 168 registers each: two warpgroups take 240 once the third keeps only 24."""
    body = """
    if (t == 0) x[0] = 0;
    __syncthreads();
    if (t >= 256) {
        for (int i = 0; i < 8; ++i) __syncwarp();
        x[0] = 1;
        setmaxnreg_dec<24>();
    } else {
        setmaxnreg_inc<168>();
        setmaxnreg_inc<240>();
        p.lse[t] = x[0];
        setmaxnreg_inc<240>();
    }
"""
    for lse in run_little(tmp_path, body, threads=384, num_lse=256):
        assert (lse == 1).all()


@pytest.mark.parametrize(("threads", "launched"), [(128, 256), (384, 168), (512, 128), (640, 96)])
def test_registers_at_the_launch(tmp_path, threads, launched):
    run_little(
        tmp_path,
        f"    setmaxnreg_inc<{launched}>(); setmaxnreg_dec<{launched}>();",
        threads=threads,
        seeds=1,
    )


@pytest.mark.parametrize("registers", [16, 264, 100])
def test_a_number_that_ptxas_rejects(tmp_path, registers):
    with pytest.raises(UsageError, match=r"static assertion failed|static_assert failed"):
        run_little(tmp_path, f"    setmaxnreg_dec<{registers}>();", threads=128)


# What 384 threads execute.
FAULTS = [
    Fault(
        "dec_up",
        "setmaxnreg_dec<176>();",
        r"wrong number of registers .*: setmaxnreg_dec @ from 168 to 176 a thread",
    ),
    Fault(
        "inc_down",
        "setmaxnreg_inc<160>();",
        r"wrong number of registers .*: setmaxnreg_inc @ from 168 to 160 a thread",
    ),
    Fault(
        "too_many",
        "if (t < 128) setmaxnreg_dec<40>(); else setmaxnreg_inc<240>();",
        r"deadlock .*: no thread can go on(.|\n)*\n"
        r"  threads (128-255|256-383) wait at setmaxnreg_inc @(.|\n)*\n"
        r"  warpgroup [12] waits for 9216 registers, 7168 are free",
    ),
    Fault(
        "nothing_left",
        "if (t < 128) setmaxnreg_inc<176>();",
        r"deadlock .*\n  threads 0-127 wait at setmaxnreg_inc @\n  threads 128-383 have exited\n"
        "  warpgroup 0 waits for 1024 registers, 0 are free",
    ),
    Fault(
        "part_of_a_warpgroup",
        "if (t < 96) setmaxnreg_dec<24>();",
        r"barrier divergence .*\n  threads 0-95 wait at setmaxnreg_dec @\n",
    ),
    Fault(
        "different_registers",
        "const auto dec = [](auto n) { setmaxnreg_dec<n>(); };\n"
        "if (t % 128 == 77) dec(std::integral_constant<int, 32>()); else "
        "dec(std::integral_constant<int, 40>());",
        r"threads disagree .*: setmaxnreg_dec @\n  thread (0|128|256): 40 registers\n"
        r"  thread (77|205|333): 32 registers",
    ),
    Fault(
        "barrier_0",
        "bar_sync(0, 384);",
        r"wrong barrier .*: bar_sync @ with mask 0xffffffff, which has 1 to 15, not 0; 0 is that",
    ),
    Fault("barrier_16", "bar_arrive(16, 384);", "wrong barrier .*: bar_arrive @ .*, not 16;"),
    Fault("negative_barrier", "bar_sync(-1, 384);", "wrong barrier .*, not -1;"),
    Fault(
        "not_whole_warps",
        "bar_sync(1, 48);",
        "wrong number of threads .*: bar_sync @ .* a multiple of 32 up to the block's 384, not 48",
    ),
    Fault("no_threads", "bar_sync(1, 0);", "wrong number of threads .*, not 0"),
    Fault("too_many_threads", "bar_arrive(1, 416);", "wrong number of threads .*, not 416"),
    Fault(
        "lanes_of_different_barriers",
        "bar_sync(t == 6 ? 2 : 1, 384);",
        r"threads disagree .*: bar_sync @ .*\n  thread 0: barrier 1, 384 threads\n"
        "  thread 6: barrier 2, 384 threads",
    ),
    Fault(
        "warps_of_different_numbers",
        "bar_sync(1, t < 32 ? 64 : 96);",
        r"threads disagree .*: bar_sync @ .*: barrier 1 of (64|96) threads, while \d+ have arrived "
        "at it as one of (64|96)",
    ),
    Fault("half_a_warp", "if (t < 16) bar_sync(1, 64);", r"lane that has exited .*\n.* bar_sync @"),
    Fault(
        "missing_warp",
        "if (t < 64) bar_sync(7, 96);",
        r"deadlock .*\n  threads 0-63 wait at bar_sync @\n  threads 64-383 have exited\n"
        "  barrier 7: 64 of 96 threads have arrived",
    ),
    Fault(
        "syncthreads_instead",
        "if (t < 64) bar_sync(7, 384); else __syncthreads();",
        r"deadlock .*\n  threads 0-63 wait at bar_sync @\n  threads 64-383 wait at __syncthreads @"
        r"\n  barrier 7: 64 of 384 threads have arrived",
    ),
]


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    return write_faults(
        tmp_path_factory.mktemp("warpgroup_faults"), FAULTS, threads=384, globals_=INCLUDE
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, fault):
    expect_report(faults_step, FAULTS, fault)


NOT_WHOLE = [
    Fault(
        "not_whole",
        "setmaxnreg_dec<24>();",
        "warpgroup that is not whole .*: setmaxnreg_dec @, which needs 128 threads; those from 128 "
        "on are 64",
    )
]


def test_a_warpgroup_must_be_whole(tmp_path):
    step = write_faults(tmp_path, NOT_WHOLE, threads=192, globals_=INCLUDE)
    expect_report(step, NOT_WHOLE, NOT_WHOLE[0])
