"""Tickets: blocks take each work once, on a GPU and on the CPU, where misuse is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.paths import ROOT
from common.runtime import cpu
from common.runtime.cpu import CpuBackend
from common.step import read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step


def taken(backend, blocks: int, works: int) -> torch.Tensor:
    """lse of verify/instructions/ticket.cu: 1, 2, ... where each work is taken once."""
    step = read_step(ROOT / "verify" / "instructions" / "ticket.cu")
    q = torch.zeros(1, 1, blocks, 8, dtype=torch.bfloat16, device=backend.device)
    k = torch.zeros(1, 1, works, 8, dtype=torch.bfloat16, device=backend.device)
    lse = torch.full((works,), torch.nan, device=backend.device)
    backend.launch(step, q, k, k, q.clone(), lse, causal=False, softmax_scale=1.0)
    return lse.cpu()


@pytest.mark.parametrize("works", [1, 40, 1000])
@pytest.mark.parametrize("blocks", [1, 2, 300])
def test_each_work_is_taken_once(make_backend, blocks, works):
    backend = make_backend()
    if backend.name == "cpu":
        backend.calls = 2
    assert torch.equal(taken(backend, blocks, works), torch.arange(1.0, works + 1))


def test_each_work_is_taken_once_by_many_os_threads(monkeypatch):
    monkeypatch.setattr(cpu, "_num_cores", lambda: 7)
    for seed in range(6):
        assert torch.equal(taken(CpuBackend(seed), 50, 5000), torch.arange(1.0, 5001))


# ---- what the CPU reports

SOURCE = {
    "globals_": """
#include "reduce.cuh"
#include "signal.cuh"
#include "ticket.cuh"

extern "C" __global__ void front(const __grid_constant__ AttentionParams p) {
    static_cast<int*>(p.workspace[0])[blockIdx.x] = 0;
}
""",
    "in_front": '{.name = "front", .grid = {{SEQ_Q, 1}}, .threads = 1},',
}
SETUP = "[[maybe_unused]] int* const counter = static_cast<int*>(p.workspace[0]);"

RACE = r"data race between blocks in kernel test_kernel, block \d, thread \d+ @: "
COUNTER = r"at byte 0 of workspace\[0\] \(8 bytes\)"
TICKETS_ALONE = rf"taken a ticket from @, {COUNTER}; until the launch has ended the counter is for"

# What two blocks execute.
FAULTS = [
    Fault("shared", "take_ticket(&smem.counter);", r"access outside global memory .*take_ticket @"),
    Fault(
        "misaligned",
        "take_ticket(reinterpret_cast<int*>(reinterpret_cast<char*>(counter) + 2));",
        r"misaligned access .*take_ticket @ needs a multiple of 4 bytes",
    ),
    Fault("out of bounds", "take_ticket(counter + (1 << 20));", r"out-of-bounds write .* @"),
    Fault(
        "an input",
        "take_ticket(const_cast<int*>(reinterpret_cast<const int*>(p.q)));",
        r"write to an input .* @",
    ),
    Fault(
        "a counter that nobody has set",
        "take_ticket(reinterpret_cast<int*>(p.lse));",
        r"counter not set in kernel test_kernel, block \d, thread \d+: take_ticket @ finds -1 at "
        r"byte 0 of lse \(4 bytes\); a kernel in front must set the counter to 0",
    ),
    Fault(
        "the counter is read",
        "if (t == 0) { take_ticket(counter); p.lse[0] = *counter; }",
        rf"{RACE}reads what block \d has {TICKETS_ALONE}",
    ),
    Fault(
        "the counter is set to 0 again",
        "if (t == 0) { take_ticket(counter); *counter = 0; }",
        rf"{RACE}(takes a ticket from what block \d has written @, {COUNTER}, and no signal orders|"
        rf"writes what block \d has {TICKETS_ALONE})",
    ),
    Fault(
        "the counter is added to",
        "if (t == 0) { take_ticket(counter); red_add(reinterpret_cast<float*>(counter), 1); }",
        rf"{RACE}(takes a ticket from what block \d has added to @, {COUNTER}; the sum is there|"
        rf"adds to what block \d has {TICKETS_ALONE})",
    ),
    Fault(
        "one block sets the counter",
        "if (t == 0) { if (block == 0) *counter = 0; take_ticket(counter); }",
        rf"{RACE}(takes a ticket from what block 0 has written @, {COUNTER}, and no signal orders|"
        rf"writes what block 1 has {TICKETS_ALONE})",
    ),
    Fault(
        "tickets order nothing",
        "if (t == 0) { take_ticket(counter); p.lse[0] = block; take_ticket(counter); }",
        rf"{RACE}writes what block \d has written @, at byte 0 of lse \(4 bytes\), and no signal",
    ),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return write_faults(tmp_path_factory.mktemp("faults"), FAULTS, SETUP, **SOURCE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_report(faults, fault, seed):
    expect_report(faults, FAULTS, replace(fault, seed=seed))


def test_a_signal_orders_what_one_block_sets(tmp_path):
    body = """
    int* const counter = static_cast<int*>(p.workspace[0]);
    Signal& is_set = *reinterpret_cast<Signal*>(p.o);
    if (block == 0 && t == 0) *counter = 5;
    if (block == 0) post_signal(is_set);
    if (block == 1) take_signal(is_set);
    if (t == 0) p.lse[take_ticket(counter) - 5] = 1;
"""
    step = write_step(tmp_path, "ordered", body, threads=32, **SOURCE)
    for seed in range(6):
        _, lse = run(step, CpuBackend(seed), num_lse=2)
        assert lse.tolist() == [1, 1]
