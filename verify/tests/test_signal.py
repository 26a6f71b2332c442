"""Signals between blocks: they order memory on a GPU and on the CPU, where misuse is reported."""

from __future__ import annotations

import pytest
import torch

from common.paths import ROOT
from common.runtime import cpu
from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step, read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

# In each row of o, 32 bytes, there is room for one.
INCLUDE = '#include "signals.cuh"\n#define SIGNAL(i) (*reinterpret_cast<Signal*>(p.o + 8 * (i)))'


def launched(backend, name: str, blocks: int, lanes: int) -> torch.Tensor:
    """lse [blocks, lanes] of the kernel of this name in verify/instructions."""
    if backend.name == "cpu":
        backend.calls = 2
    step = read_step(ROOT / "verify" / "instructions" / f"{name}.cu")
    q = torch.zeros(1, 1, blocks, 8, dtype=torch.bfloat16, device=backend.device)
    lse = torch.full((blocks, lanes), torch.nan, device=backend.device)
    backend.launch(step, q, q, q, q.clone(), lse, causal=False, softmax_scale=1.0)
    return lse.cpu()


MANY = [2, 48]  # blocks, all of which any GPU can run at once


@pytest.mark.parametrize("blocks", MANY)
def test_numbers_go_round(make_backend, blocks):
    expected = 19 * blocks + 1 + torch.arange(float(blocks))
    lse = launched(make_backend(), "signal", blocks, 64)
    assert torch.equal(lse, expected[:, None].expand(-1, 64))


@pytest.mark.parametrize("blocks", MANY)
def test_a_warp_takes_many_signals(make_backend, blocks):
    rounds, lanes = torch.arange(20)[:, None], torch.arange(32)
    numbers = torch.arange(1, blocks)[:, None, None] * rounds + lanes  # [blocks - 1, rounds, lanes]
    summed = numbers.gather(2, (lanes ^ rounds).expand(numbers.shape)).sum((0, 1))
    expected = torch.cat([numbers[:, -1], summed[None]])
    assert torch.equal(launched(make_backend(), "signals", blocks, 32), expected.float())


# ---- who waits for whom


def run_little(
    folder, body: str, backend: CpuBackend, blocks: int = 2, num_lse: int = 1, threads: int = 32
) -> torch.Tensor:
    step = write_step(folder, "little", body, threads=threads, globals_=INCLUDE)
    return run(step, backend, torch.zeros(1, 1, blocks, 8), num_lse=num_lse)[1]


CHAIN = """
    if (block > 0) take_signal(SIGNAL(block - 1));
    const float before = block > 0 ? p.lse[block - 1] : 0;
    WRITE
    if (block < gridDim.x - 1) post_signal(SIGNAL(block));
    WRITE_LATE
"""


def run_racing(folder, body: str, backend: CpuBackend, **arguments) -> torch.Tensor | None:
    """lse as of run_little(); None where that reports a race between blocks."""
    try:
        return run_little(folder, body, backend, **arguments)
    except SimtError as error:
        if "data race between blocks" not in str(error):
            raise
        return None


def chain(late: bool = False) -> str:
    write = "if (t == 0) p.lse[block] = before + 1;"
    body = CHAIN.replace("WRITE_LATE", write if late else "")
    return body.replace("WRITE", "" if late else write)


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("blocks", [1, 2, 3, 40])
def test_each_block_waits_for_the_one_before(tmp_path, monkeypatch, blocks, workers):
    monkeypatch.setattr(cpu, "_num_cores", lambda: workers)
    for seed in range(6):
        backend = CpuBackend(seed)
        backend.calls = 3
        lse = run_little(tmp_path, chain(), backend, blocks, num_lse=blocks)
        assert torch.equal(lse, torch.arange(1.0, blocks + 1))


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_what_is_written_after_a_post_is_not_seen(tmp_path, monkeypatch, workers):
    """The block that takes reads poison; if it reads later, that is reported as a race."""
    monkeypatch.setattr(cpu, "_num_cores", lambda: workers)
    for seed in range(10):
        lse = run_racing(tmp_path, chain(late=True), CpuBackend(seed), blocks=3, num_lse=3)
        assert lse is None or lse.isnan().any()


def test_what_another_warp_writes_must_have_been_written(tmp_path):
    """The warp that posts speaks only for itself: the others have to come to a barrier before."""
    body = """
    if (block == 0) {
        if (t == 32) p.lse[0] = 5;
        BARRIER
        if (t < 32) post_signal(SIGNAL(0));
    } else if (t < 32) {
        take_signal(SIGNAL(0));
        if (t == 0) p.lse[1] = p.lse[0];
    }
"""

    def right(barrier: str, seed: int) -> bool:
        little = body.replace("BARRIER", barrier)
        lse = run_racing(tmp_path, little, CpuBackend(seed), num_lse=2, threads=64)
        return lse is not None and lse[1] == 5

    assert all(right("__syncthreads();", seed) for seed in range(12))
    assert not all(right("", seed) for seed in range(12))


def test_warps_wait_for_signals_of_their_own(tmp_path):
    """While one waits the others go on, in whatever order their signals come."""
    body = """
    const int warp = t / 32;
    if (block == 0) {
        take_signal(SIGNAL(warp));
        if (warp == 2) post_signal(SIGNAL(4));
        if (warp == 1) post_signal(SIGNAL(3));
        if (t % 32 == 0) p.lse[warp] = 1;
    } else if (block == 1 && warp == 0) {
        post_signal(SIGNAL(2));
        take_signal(SIGNAL(4));
        post_signal(SIGNAL(1));
        take_signal(SIGNAL(3));
        post_signal(SIGNAL(0));
    }
"""
    for seed in range(6):
        lse = run_little(tmp_path, body, CpuBackend(seed), blocks=5, num_lse=3, threads=96)
        assert (lse == 1).all()


# Block 0 takes the signals of blocks 1, 3, ...: lane 0 the last one's, lane 1 none, and so on.
SEVERAL = """
    const int last = gridDim.x - 1;
    if (block == 0) {
        const int of = last - t;
        take_signals(of > 0 && of % 2 ? &SIGNAL(of) : nullptr);
        float sum = 0;
        for (int i = 1; i <= last; i += 2) sum += p.lse[i];
        if (t == 0) p.lse[0] = sum;
    } else if (block % 2) {
        WAIT
        if (t == 0) p.lse[block] = block;
        post_signal(SIGNAL(block));
        POST
    }
"""
# These post at will, or one after another, by signals 2, 4, ... among themselves.
ORDERS = {
    "any": {"WAIT": "", "POST": ""},
    "rising": {
        "WAIT": "if (block > 1) take_signal(SIGNAL(block - 1));",
        "POST": "if (block < last) post_signal(SIGNAL(block + 1));",
    },
    "falling": {
        "WAIT": "if (block < last) take_signal(SIGNAL(block + 1));",
        "POST": "if (block > 1) post_signal(SIGNAL(block - 1));",
    },
}


def several(order: str) -> str:
    body = SEVERAL
    for place, statement in ORDERS[order].items():
        body = body.replace(place, statement)
    return body


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("order", ORDERS)
def test_lanes_take_signals_of_their_own(tmp_path, monkeypatch, order, workers):
    """In whatever order they are posted. Every lane sees what was written before any of them."""
    monkeypatch.setattr(cpu, "_num_cores", lambda: workers)
    for blocks in (2, 8, 32):
        for seed in range(4):
            backend = CpuBackend(seed)
            backend.calls = 2
            lse = run_little(tmp_path, several(order), backend, blocks, num_lse=blocks)
            assert lse[0] == sum(range(1, blocks, 2))


def test_without_signals_to_take_nobody_waits(tmp_path):
    body = "take_signals(nullptr); if (t == 0) p.lse[block] = 1;"
    assert (run_little(tmp_path, body, CpuBackend(), num_lse=2) == 1).all()


def test_a_lane_without_a_signal_waits_for_the_others(tmp_path):
    """And sees what has been written before those were posted, as one with a signal does."""
    body = """
    if (block == 0) {
        take_signals(t == TAKES ? &SIGNAL(1) : nullptr);
        if (t == 9) p.lse[0] = p.lse[1];
    } else {
        if (t == 3) p.lse[1] = 7;
        post_signal(SIGNAL(1));
    }
"""
    for lane in (0, 9, 31):
        for seed in range(6):
            little = body.replace("TAKES", str(lane))
            assert run_little(tmp_path, little, CpuBackend(seed), num_lse=2)[0] == 7


def test_warps_take_several_signals_each(tmp_path):
    """While one waits the others go on: what the first one takes, the second one lets be posted."""
    body = """
    const int warp = t / 32, lane = t % 32;
    if (block == 0) {
        take_signals(lane < 2 ? &SIGNAL(2 * warp + lane) : nullptr);
        if (warp == 1) post_signal(SIGNAL(4));
        if (lane == 0) p.lse[warp] = 1;
    } else if (block == 1 && warp == 0) {
        post_signal(SIGNAL(0));
        post_signal(SIGNAL(3));
        post_signal(SIGNAL(2));
        take_signal(SIGNAL(4));
        post_signal(SIGNAL(1));
    }
"""
    for seed in range(6):
        lse = run_little(tmp_path, body, CpuBackend(seed), blocks=5, num_lse=2, threads=64)
        assert (lse == 1).all()


def test_the_order_of_blocks_follows_the_seed(tmp_path, monkeypatch):
    """Each block counts when it begins and when it ends, where one runs at a time."""
    monkeypatch.setattr(cpu, "_num_cores", lambda: 1)
    counter = INCLUDE + "\n__device__ int counter = 0;"
    body = """
    if (t == 0) p.lse[block] = counter++;
    if (block % 2) take_signal(SIGNAL(block - 1));
    else post_signal(SIGNAL(block));
    if (t == 0) p.lse[gridDim.x + block] = counter++;
"""

    def order(seed: int) -> tuple[float, ...]:
        step = write_step(tmp_path, "counted", body, threads=32, globals_=counter)
        _, lse = run(step, CpuBackend(seed), torch.zeros(1, 1, 8, 8), num_lse=16)
        assert sorted(lse.tolist()) == list(range(16))
        return tuple(lse.tolist())

    orders = [order(seed) for seed in range(6)]
    assert orders == [order(seed) for seed in range(6)]
    assert len(set(orders)) == 6


def test_bank_conflicts_are_counted_in_all_blocks(tmp_path):
    step = write_step(
        tmp_path,
        "counted",
        "if (block > 0) take_signal(SIGNAL(block - 1));\n"
        "store_float4(smem.first + 4 * t, float4{});\n"
        "if (block < gridDim.x - 1) post_signal(SIGNAL(block));",
        threads=32,
        globals_=INCLUDE,
        layout="alignas(16) float first[128];",
    )
    q = torch.zeros(1, 1, 20, 8)
    (access,) = CpuBackend().count_shared_accesses(step, q, q, q, causal=False, softmax_scale=1)
    assert access.accesses == 20


def test_the_time_limit_names_a_block_that_runs(tmp_path):
    body = """
    if (block != 3) {
        take_signal(SIGNAL(block));
    } else {
        volatile int i = 0;
        while (i == 0) {
        }
    }
"""
    with pytest.raises(SimtError, match=r"time limit in kernel test_kernel, block 3, thread \d"):
        run_little(tmp_path, body, CpuBackend(time_limit_s=2), blocks=6)


# ---- reports

AT = r"the signal at byte \d+ of o \(64 bytes\)"

# What two blocks of 64 threads execute.
FAULTS = [
    Fault(
        "half_a_warp_posts",
        "if (t < 16) post_signal(SIGNAL(0));",
        r"lane that has exited .*\n.* wait at post_signal @ with mask 0xffffffff",
    ),
    Fault(
        "half_a_warp_takes",
        "if (t < 16) take_signal(SIGNAL(0)); else __syncwarp();",
        r"lanes wait for each other in different (places|masks)(.|\n)* wait at take_signal @",
    ),
    Fault(
        "half_a_warp_takes_several",
        "if (t < 16) take_signals(&SIGNAL(t % 2)); else if (t < 32) __syncwarp();",
        r"lanes wait for each other in different (places|masks)(.|\n)* wait at take_signals @",
    ),
    Fault(
        "the_other_half_has_exited",
        "if (t < 16) take_signals(nullptr);",
        r"lane that has exited .*\n.* wait at take_signals @ with mask 0xffffffff",
    ),
    Fault(
        "lanes_of_different_signals",
        "if (t < 32) post_signal(SIGNAL(t == 5));",
        r"threads disagree .*: post_signal @ .*\n"
        rf"  thread 0: {AT}\n  thread 5: {AT}",
    ),
    Fault(
        "misaligned",
        "post_signal(*reinterpret_cast<Signal*>(p.o + 1));",
        r"misaligned access .*: post_signal @ needs a multiple of 8 bytes, .* byte 4 of o",
    ),
    Fault(
        "in_shared_memory",
        "take_signal(*reinterpret_cast<Signal*>(smem.first));",
        r"access outside global memory .*: take_signal @ needs global memory, not the address at "
        "byte 0 of shared memory",
    ),
    Fault(
        "one_of_several_in_shared_memory",
        "take_signals(t % 32 == 5 ? reinterpret_cast<Signal*>(smem.first) : nullptr);",
        r"access outside global memory .*: take_signals @ needs global memory, not the address at "
        "byte 0 of shared memory",
    ),
    Fault(
        "past_the_end",
        "take_signal(SIGNAL(2));",
        r"out-of-bounds read .* @: past the end of o \(64 bytes\), at byte 64",
    ),
    Fault(
        "in_an_input",
        "if (t < 32) post_signal(*reinterpret_cast<Signal*>(const_cast<Element*>(p.q)));",
        r"write to an input .* @: at byte 0 of ",
    ),
    Fault(
        "never_posted",
        "if (block == 1 && t < 32) take_signal(SIGNAL(0));",
        r"^\S+ \(d8_fp32\): deadlock between blocks in kernel test_kernel: no block can go on\n"
        r"block 1: no thread can go on\n"
        r"  threads 0-31 wait at take_signal @ with mask 0xffffffff\n"
        r"  threads 32-63 have exited\n"
        r"  nobody has posted the signal at byte 0 of o \(64 bytes\)$",
    ),
    Fault(
        "one_of_several_never_posted",
        "if (t < 32) { if (block == 0) post_signal(SIGNAL(0)); "
        "else take_signals(t == 4 ? &SIGNAL(1) : t == 9 ? &SIGNAL(0) : nullptr); }",
        r"^\S+ \(d8_fp32\): deadlock between blocks in kernel test_kernel: no block can go on\n"
        r"block 1: no thread can go on\n"
        r"  threads 0-31 wait at take_signals @ with mask 0xffffffff\n"
        r"  threads 32-63 have exited\n"
        r"  nobody has posted the signal at byte 32 of o \(64 bytes\)$",
    ),
    Fault(
        "two_lanes_take_the_same",
        "if (t < 32) { if (block == 0) post_signal(SIGNAL(0)); "
        "else take_signals(t < 2 ? &SIGNAL(0) : nullptr); }",
        r"deadlock between blocks .*\nblock 1: (.|\n)* wait at take_signals @ (.|\n)*"
        r"  nobody has posted the signal at byte 0 of o",
    ),
    Fault(
        "a_cycle",
        "if (t < 32) { take_signal(SIGNAL(block)); post_signal(SIGNAL(1 - block)); }",
        r"deadlock between blocks .*: no block can go on"
        r"(?=(.|\n)*\nblock 0: )(?=(.|\n)*\nblock 1: )"
        r"(.|\n)*  nobody has posted the signal at byte 32 of o",
    ),
    Fault(
        "an_ended_block",
        "if (t < 32) { if (block) take_signal(SIGNAL(0)); else post_signal(SIGNAL(0)); "
        "if (block) take_signal(SIGNAL(0)); }",
        r"deadlock between blocks .*\nblock 1: (.|\n)* nobody has posted the signal at byte 0 of o",
    ),
    Fault(
        "its_own_barrier",
        "if (t >= 32) __syncthreads(); else take_signal(SIGNAL(0));",
        r"deadlock between blocks .*\nblock [01]: no thread can go on\n  threads 0-31 wait at "
        r"take_signal @ .*\n  threads 32-63 wait at __syncthreads @\n  nobody has posted",
    ),
    Fault(
        "never_taken",
        "if (block == 1 && t >= 32) post_signal(SIGNAL(1));",
        r"signal never taken in kernel test_kernel: post_signal @ in block 1, threads 32-63, has "
        r"posted the signal at byte 32 of o \(64 bytes\); the next launch would take it",
    ),
    Fault(
        "not_among_several",
        "if (t < 32) { if (block == 0) { post_signal(SIGNAL(0)); post_signal(SIGNAL(1)); } "
        "else take_signals(t == 9 ? &SIGNAL(0) : nullptr); }",
        r"signal never taken in kernel test_kernel: post_signal @ in block 0, threads 0-31, has "
        r"posted the signal at byte 32 of o \(64 bytes\); the next launch would take it",
    ),
    Fault(
        "posted_twice",
        "if (block == 1 && t < 32) for (int i = 0; i < 2; ++i) post_signal(SIGNAL(0));",
        r"signal posted twice in kernel test_kernel, block 1, thread \d+: post_signal @: "
        rf"post_signal @ in block 1, threads 0-31, has posted {AT}, which nobody has taken since",
    ),
    Fault(
        "overwritten",
        "if (block == 0 && t < 32) { post_signal(SIGNAL(0)); p.o[0] = 1; __syncwarp(); "
        "take_signal(SIGNAL(0)); }",
        rf"signal overwritten .*: take_signal @ finds something else: post_signal @ in block 0, "
        rf"threads 0-31, has posted {AT}",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("signal_faults")
    return write_faults(folder, FAULTS, threads=64, globals_=INCLUDE)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, monkeypatch, fault, workers):
    monkeypatch.setattr(cpu, "_num_cores", lambda: workers)
    expect_report(faults_step, FAULTS, fault)


def test_a_warp_must_be_whole(tmp_path):
    body = "if (t >= 32) post_signal(SIGNAL(0));"
    with pytest.raises(SimtError, match=r"mask with lanes that do not exist .*: post_signal"):
        run_little(tmp_path, body, CpuBackend(), threads=48)
