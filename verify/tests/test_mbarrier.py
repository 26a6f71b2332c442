"""mbarriers: phases end when all arrivals are there, waits may return false; misuse is reported."""

from __future__ import annotations

import pytest
import torch

from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

INCLUDE = '#include "mbarrier.cuh"'
LAYOUT = "Mbarrier barriers[3]; float word; alignas(8) char last[12];"
WAIT = """
constexpr auto wait = [](Mbarrier& barrier, int parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
};
"""

ROUNDS = 9
# Thread 0 tells the others a number a round, once all of them have read the one before.
PING_PONG = """
    if (block) return;
    Mbarrier& full = smem.barriers[0];
    Mbarrier& empty = smem.barriers[1];
    if (t == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 47);
    }
    __syncthreads();
    for (int round = 0; round < 9; ++round) {
        if (t == 0) {
            EMPTY
            smem.word = 100 + round;
            mbarrier_arrive(full);
        } else {
            FULL
            p.lse[48 * round + t] = smem.word;
            mbarrier_arrive(empty);
        }
    }
"""
WAIT_EMPTY = "wait(empty, (round + 1) % 2);"  # in the first round there is nothing to read
WAIT_FULL = "wait(full, round % 2);"


def ping_pong(empty: str = WAIT_EMPTY, full: str = WAIT_FULL) -> str:
    return PING_PONG.replace("EMPTY", empty).replace("FULL", full)


def told(step: Step, seed: int) -> bool:
    """Whether each thread has read the number of each round."""
    _, lse = run(step, CpuBackend(seed), num_lse=48 * ROUNDS)
    expected = torch.arange(100.0, 100 + ROUNDS)[:, None].expand(-1, 47)
    return torch.equal(lse.view(ROUNDS, 48)[:, 1:], expected)


def write(tmp_path, body: str, threads: int = 48) -> Step:
    return write_step(
        tmp_path, "phases", body, threads=threads, globals_=INCLUDE + WAIT, layout=LAYOUT
    )


def test_phases_follow_each_other(tmp_path):
    step = write(tmp_path, ping_pong())
    assert all(told(step, seed) for seed in range(6))


@pytest.mark.parametrize(
    "wrong",
    [
        {"empty": ""},
        {"full": "mbarrier_try_wait_parity(full, round % 2);"},
        {"empty": "mbarrier_try_wait_parity(empty, (round + 1) % 2);"},
        {"full": "wait(full, (round + 1) % 2);"},
    ],
    ids=["no wait", "full waited for once", "empty waited for once", "wrong parity"],
)
def test_a_wrong_wait_is_found(tmp_path, wrong):
    step = write(tmp_path, ping_pong(**wrong))

    def right(seed: int) -> bool:
        try:
            return told(step, seed)
        except SimtError:
            return False

    assert not any(right(seed) for seed in range(4))


def test_a_wait_returns_false_at_times(tmp_path):
    """Even where the phase has completed, as the one of parity 1 before phase 0 has. The lanes of a
    warp fail together, in whatever order they run, different warps do not; in one of two runs every
    first attempt fails."""
    body = """
    if (block) return;
    if (t == 0) mbarrier_init(smem.barriers[0], 1);
    __syncthreads();
    for (int i = 0; i < 64; ++i)
        p.lse[64 * t + i] = mbarrier_try_wait_parity(smem.barriers[0], 1);
"""
    step = write(tmp_path, body, threads=128)

    def returned(seed: int) -> torch.Tensor:
        """[warps, 64]"""
        _, lse = run(step, CpuBackend(seed), num_lse=64 * 128)
        lanes = lse.view(4, 32, 64)
        assert (lanes == lanes[:, :1]).all()
        return lanes[:, 0]

    first, odd, other = returned(0), returned(1), returned(2)
    for result in (first, odd, other):
        assert 0.6 < result.mean() < 0.9
    assert torch.equal(first, returned(0))
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert (first[:, 0] != odd[:, 0]).all()


def test_a_warp_that_waits_once_is_found(tmp_path):
    """The collective after the wait does not hide that some lanes have not waited. The data is in
    global memory, where no race is reported."""
    body = """
    if (block) return;
    if (t == 0) mbarrier_init(smem.barriers[0], 1);
    __syncthreads();
    if (t < 32) {
        WAIT
        p.lse[t] = __shfl_xor_sync(0xffffffff, p.o[0], 1);
    } else if (t == 32) {
        p.o[0] = 5;
        mbarrier_arrive(smem.barriers[0]);
    }
"""

    def right(step: Step, seed: int) -> bool:
        return (run(step, CpuBackend(seed), num_lse=32)[1] == 5).all()

    step = write(tmp_path, body.replace("WAIT", "wait(smem.barriers[0], 0);"))
    assert all(right(step, seed) for seed in range(8))
    once = body.replace("WAIT", "mbarrier_try_wait_parity(smem.barriers[0], 0);")
    (tmp_path / "once").mkdir()
    step = write(tmp_path / "once", once)
    found = [not right(step, seed) for seed in range(8)]
    assert 2 <= sum(found) <= 4  # it fails in one of two runs, where warp 1 often comes first


READ_AFTER_ARRIVE = """
    if (block) return;
    if (t == 0) {
        mbarrier_init(smem.barriers[0], 1);
        mbarrier_init(smem.barriers[1], 1);
    }
    __syncthreads();
    for (int round = 0; round < 9; ++round) {
        if (t == 0) {
            wait(smem.barriers[1], (round + 1) % 2);
            p.o[0] = round;  // in global memory, where no race is reported
            mbarrier_arrive(smem.barriers[0]);
        } else if (t == 32) {
            wait(smem.barriers[0], round % 2);
            BODY
        }
    }
"""
READ, ARRIVE = "p.lse[round] = p.o[0];", "mbarrier_arrive(smem.barriers[1]);"


@pytest.mark.parametrize("body", [READ + ARRIVE, ARRIVE + READ], ids=["read first", "arrive first"])
def test_what_is_read_after_an_arrive_may_be_overwritten(tmp_path, body):
    step = write(tmp_path, READ_AFTER_ARRIVE.replace("BODY", body))
    results = [run(step, CpuBackend(seed), num_lse=ROUNDS)[1] for seed in range(8)]
    right = [torch.equal(lse, torch.arange(float(ROUNDS))) for lse in results]
    assert all(right) if body == READ + ARRIVE else sum(right) <= 4  # about 1 is to be expected


def test_a_wait_that_is_overtaken_waits_on(tmp_path):
    """Two phases may complete before the waiting thread goes on: it then waits for a third one."""
    body = """
    if (block) return;
    if (t == 0) mbarrier_init(smem.barriers[0], 1);
    __syncthreads();
    if (t == 1) wait(smem.barriers[0], 0);
    if (t == 0) for (int i = 0; i < 2; ++i) mbarrier_arrive(smem.barriers[0]);
"""
    step = write(tmp_path, body)
    reports = []
    for seed in range(8):
        try:
            run(step, CpuBackend(seed))
        except SimtError as error:
            reports.append(str(error))
    assert reports  # of the orders in which both phases complete first
    for report in reports:
        assert "in phase 2 (parity 0), 1 of 1 arrivals missing" in report


AT_BYTE_8 = r"the mbarrier at byte 8 of shared memory \(initialized at faults.cu:\d+\)"

# barriers[0] takes 48 arrivals, barriers[1] one; barriers[2] has not been initialized.
FAULTS = [
    Fault(
        "not_initialized",
        "mbarrier_arrive(smem.barriers[2]);",
        r"mbarrier not initialized .*: mbarrier_arrive @ needs an mbarrier_init before, of byte 16 "
        "of shared memory",
    ),
    Fault(
        "not_initialized_wait",
        "mbarrier_try_wait_parity(smem.barriers[2], 0);",
        "not initialized .*: mbarrier_try_wait_parity @",
    ),
    Fault(
        "initialized_twice",
        "if (t == 7) mbarrier_init(smem.barriers[1], 1);",
        rf"mbarrier initialized twice .*, thread 7: mbarrier_init @ finds {AT_BYTE_8}",
    ),
    Fault(
        "initialized_by_all",
        "mbarrier_init(smem.barriers[2], 1);",
        r"initialized twice .*: mbarrier_init @ finds the mbarrier at byte 16 of shared memory "
        r"\(initialized at faults.cu:\d+\)",
    ),
    Fault(
        "overwritten",
        "smem.barriers[1] = 0; mbarrier_arrive(smem.barriers[1]);",
        rf"mbarrier overwritten .*: mbarrier_arrive @ finds something else in {AT_BYTE_8}",
    ),
    Fault(
        "misaligned",
        "mbarrier_init(*reinterpret_cast<Mbarrier*>(&smem.word - 1), 1);",
        r"misaligned access .*: mbarrier_init @ needs a multiple of 8 bytes, not the address at "
        "byte 20 of shared memory",
    ),
    Fault(
        "global",
        "mbarrier_arrive(*reinterpret_cast<Mbarrier*>(p.o));",
        r"access outside shared memory .*: mbarrier_arrive @ needs 8 bytes of the block's shared "
        "memory, not the address at byte 0 of o",
    ),
    Fault(
        "partly_past_end",
        "mbarrier_init(*reinterpret_cast<Mbarrier*>(smem.last + 16), 1);",
        r"outside shared memory .*: mbarrier_init @ .* past the end of shared memory",
    ),
    Fault(
        "no_arrivals",
        "mbarrier_init(smem.barriers[2], 0);",
        r"wrong number of arrivals .*: mbarrier_init @ takes a count of 1 to 1048575, not 0",
    ),
    Fault(
        "too_many_arrivals",
        "if (t == 3) { mbarrier_arrive_expect_tx(smem.barriers[1], 16);\n"
        "mbarrier_arrive(smem.barriers[1]); }",
        r"too many arrivals .*, thread 3: mbarrier_arrive \(faults.cu:\d+\) is arrival 2 in a "
        rf"phase of 1 of {AT_BYTE_8}: in phase 0 \(parity 0\), 0 of 1 arrivals missing, still "
        "expects 16 bytes",
    ),
    Fault(
        "negative_bytes",
        "mbarrier_arrive_expect_tx(smem.barriers[1], -16);",
        r"wrong number of bytes .*: mbarrier_arrive_expect_tx @ can announce 0 to 1048575 bytes, "
        "not -16",
    ),
    Fault(
        "wrong_parity",
        "mbarrier_try_wait_parity(smem.barriers[1], 2);",
        r"wrong parity .*: mbarrier_try_wait_parity @ takes a parity of 0 or 1, not 2",
    ),
    Fault(
        "missing_arrivals",
        "if (t < 40) mbarrier_arrive(smem.barriers[0]); wait(smem.barriers[0], 0);",
        r"deadlock .*: no thread can go on\n  threads 0-47 wait at mbarrier_try_wait_parity "
        r"\(faults.cu:\d+\) for parity 0 of the mbarrier at byte 0\n  the mbarrier at byte 0 of "
        r"shared memory \(initialized at faults.cu:\d+\): in phase 0 \(parity 0\), 8 of 48 "
        r"arrivals missing$",
    ),
    Fault(
        "missing_bytes",
        "if (t == 0) mbarrier_arrive_expect_tx(smem.barriers[1], 4096); wait(smem.barriers[1], 0);",
        rf"deadlock .*\n.*\n  {AT_BYTE_8}: in phase 0 \(parity 0\), 0 of 1 arrivals missing, still "
        "expects 4096 bytes: no copy is on its way$",
    ),
    Fault(
        "different_barriers",
        "wait(smem.barriers[t % 2], 0);",
        r"deadlock .*\n  threads 0, 2, .* parity 0 of the mbarrier at byte 0\n  threads 1, 3, .* "
        r"parity 0 of the mbarrier at byte 8\n  the mbarrier at byte 0 .*\n  the mbarrier at byte "
        "8",
    ),
    Fault(
        "different_parities",
        "if (t == 9) mbarrier_arrive(smem.barriers[1]); __syncthreads();"
        "wait(smem.barriers[1], t != 9);",
        r"deadlock .*\n  threads 0-8, 10-47 wait .* for parity 1 .*\n  thread 9 has exited\n",
    ),
    Fault(
        "some_at_a_barrier",
        "if (t < 32) wait(smem.barriers[1], 0); else __syncthreads();",
        r"deadlock .*\n  threads 0-31 wait at mbarrier_try_wait_parity .*\n  threads 32-47 wait at "
        "__syncthreads @",
    ),
    Fault(
        "bytes_at_the_end",
        "if (t == 0) mbarrier_arrive_expect_tx(smem.barriers[1], 32);",
        r"block ends in the middle of an mbarrier's phase .*, block \d+: "
        rf"{AT_BYTE_8}: in phase 0 \(parity 0\), 0 of 1 arrivals missing, still expects 32 bytes$",
    ),
]
SETUP = """
    if (t == 0) {
        mbarrier_init(smem.barriers[0], 48);
        mbarrier_init(smem.barriers[1], 1);
    }
    __syncthreads();
"""


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("mbarrier_faults")
    return write_faults(folder, FAULTS, SETUP, globals_=INCLUDE + WAIT, layout=LAYOUT)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, fault):
    expect_report(faults_step, FAULTS, fault)
