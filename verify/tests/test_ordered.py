"""Ordered sections: blocks add in order on a GPU and on the CPU, where misuse is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.paths import ROOT
from common.runtime import cpu
from common.runtime.cpu import CpuBackend, SimtError
from common.step import read_step
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

WARPS, LANES = 2, 32


def sums(backend, blocks: int) -> torch.Tensor:
    """lse of verify/instructions/ordered.cu."""
    step = read_step(ROOT / "verify" / "instructions" / "ordered.cu")
    q = torch.zeros(1, 1, blocks, 8, dtype=torch.bfloat16, device=backend.device)
    lse = torch.full((WARPS, LANES), torch.nan, device=backend.device)
    backend.launch(step, q, q, q, q.clone(), lse, causal=False, softmax_scale=1.0)
    return lse.cpu()


def expected(places) -> torch.Tensor:
    total = torch.zeros(LANES)
    for place in places:
        total += (-1) ** place * (1 + torch.arange(LANES)) * 2.0 ** (place % 24)
    return total.expand(WARPS, LANES)


@pytest.mark.parametrize("blocks", [1, 2, 130])
def test_sums_are_those_of_the_order(make_backend, blocks):
    backend = make_backend()
    if backend.name == "cpu":
        backend.calls = 2
    for _ in range(4):
        assert torch.equal(sums(backend, blocks), expected(range(blocks)))


def test_another_order_has_other_sums():
    assert not torch.equal(expected(range(48)), expected(reversed(range(48))))


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_sums_are_those_of_the_order_with_workers(monkeypatch, workers):
    monkeypatch.setattr(cpu, "_num_cores", lambda: workers)
    for seed in range(6):
        assert torch.equal(sums(CpuBackend(seed), 48), expected(range(48)))


# ---- what the CPU reports, and what it lets happen

SOURCE = {
    "globals_": """
#include "bulk.cuh"
#include "ordered.cuh"
#include "reduce.cuh"
#include "signal.cuh"

extern "C" __global__ void front(const __grid_constant__ AttentionParams p) {
    static_cast<int*>(p.workspace[0])[blockIdx.x] = 0;
    if (blockIdx.x == 0) p.lse[0] = 0x1p24f;
}
""",
    "in_front": '{.name = "front", .grid = {{SEQ_Q, 1}}, .threads = 1},',
}
SETUP = "[[maybe_unused]] int* const counter = static_cast<int*>(p.workspace[0]);"


def additions(folder, seed: int, blocks: int, begin: str, end: str) -> float:
    """lse[0] = 2^24, to which each block has added a number of its own."""
    body = f"""
    {SETUP}
    smem.first[t] = block % 2 ? -float(1 << block) / 3 : float(1 << block) / 3;
    fence_proxy_async();
    __syncwarp();
    {begin}
    if (t == 0) {{
        cp_reduce_async_bulk_add(p.lse, smem.first, 16);
        cp_async_bulk_commit_group();
    }}
    {end}
"""
    layout = {"layout": "alignas(16) float first[32];"}
    step = write_step(folder, f"additions_{seed}", body, threads=32, **SOURCE, **layout)
    q = torch.zeros(1, 1, blocks, 8)
    lse = torch.zeros(4)
    CpuBackend(seed).launch(step, q, q, q, q.clone(), lse, causal=False, softmax_scale=1.0)
    return lse[0].item()


BEGIN, END = "begin_ordered(*counter, block);", "end_ordered(*counter, block);"
WAIT = "if (t == 0) cp_async_bulk_wait_group<0>();"
WAIT_READ = "if (t == 0) cp_async_bulk_wait_group_read<0>();"


@pytest.mark.parametrize(
    ("begin", "end", "ordered"),
    [(BEGIN, WAIT + END, True), (BEGIN + END, WAIT, False), ("", WAIT, False)],
    ids=["right", "outside", "no_section"],
)
def test_additions_are_in_order(tmp_path, begin, end, ordered):
    found = {additions(tmp_path, seed, 12, begin, end) for seed in range(6)}
    total = torch.tensor(2.0**24)
    for block in range(12):
        total += torch.tensor((-2.0) ** block) / 3
    assert (found == {total.item()}) == ordered


@pytest.mark.parametrize(
    ("begin", "end", "what"),
    [
        (BEGIN, END + WAIT, "end"),
        (BEGIN, WAIT_READ + END + WAIT, "end"),
        ("", BEGIN + END, "begin"),
    ],
    ids=["late", "read", "early"],
)
def test_additions_must_be_waited_for(tmp_path, begin, end, what):
    """In half of the blocks they land as late as they may."""
    told = (
        rf"^\S+ \(d8_fp32\): section {what[:3]}\w* with a store in flight in kernel test_kernel, "
        rf"block \d+, thread \d+: {what}_ordered \(\S+\): of thread 0, cp_reduce_async_bulk_add "
        r"\(\S+\) may not come in the order of the places: call cp_async_bulk_commit_group, then "
        "cp_async_bulk_wait_group$"
    )
    for seed in range(4):
        with pytest.raises(SimtError, match=told):
            additions(tmp_path, seed, 12, begin, end)


RACE = r"data race between blocks in kernel test_kernel, block \d, thread \d+ @: "
COUNTER = r"at byte 0 of workspace\[0\] \(8 bytes\)"
SET = "a kernel in front must set the counter to 0, and each place is one warp's"

# What two blocks of 64 threads execute.
FAULTS = [
    Fault(
        "shared",
        "begin_ordered(smem.counter, 0);",
        r"access outside global memory .*begin_ordered @",
    ),
    Fault(
        "misaligned",
        "begin_ordered(*reinterpret_cast<int*>(reinterpret_cast<char*>(counter) + 2), 0);",
        r"misaligned access .*begin_ordered @ needs a multiple of 4 bytes",
    ),
    Fault("out of bounds", "begin_ordered(counter[1 << 20], 0);", r"out-of-bounds read .* @"),
    Fault(
        "half a warp",
        "if (t < 16) begin_ordered(*counter, 0);",
        r"lane that has exited .*\n.* wait at begin_ordered @ with mask 0xffffffff",
    ),
    Fault(
        "lanes of different places",
        "if (t < 32) begin_ordered(*counter, t == 5);",
        rf"threads disagree .*: begin_ordered @ .*\n  thread 0: place 0 of the counter {COUNTER}\n"
        rf"  thread 5: place 1 of the counter {COUNTER}",
    ),
    Fault(
        "a counter that nobody has set",
        "begin_ordered(reinterpret_cast<int&>(p.lse[1]), 0);",
        r"counter not set in kernel test_kernel, block \d, thread \d+: begin_ordered @ waits for "
        rf"place 0 and finds -1 at byte 4 of lse \(8 bytes\); {SET}",
    ),
    Fault(
        "a place twice",
        "if (t < 32) { begin_ordered(*counter, 0); end_ordered(*counter, 0); }",
        rf"{RACE}|counter overwritten|place of an ended section in kernel test_kernel, block \d, "
        rf"thread \d+: begin_ordered @ waits for place 0 and finds 1 {COUNTER}; {SET}",
    ),
    Fault(
        "a place that nobody has",
        "if (t < 32) { begin_ordered(*counter, 2 * block); end_ordered(*counter, 2 * block); }",
        r"deadlock between blocks in kernel test_kernel: no block can go on\nblock 1: (.|\n)*"
        r"nobody has ended the section of place 1 of the counter "
        rf"{COUNTER}, and the wait is for place 2",
    ),
    Fault(
        "never ended",
        "if (t < 32) begin_ordered(*counter, block);",
        r"deadlock between blocks (.|\n)*nobody has ended the section of place 0 of the counter",
    ),
    Fault(
        "never begun",
        "if (t < 32) end_ordered(*counter, block);",
        r"section not begun in kernel test_kernel, .*: end_ordered @: the warp is not in the "
        rf"section of the counter {COUNTER}",
    ),
    Fault(
        "within a section",
        "if (t < 32 && block == 0) { begin_ordered(*counter, 0); begin_ordered(counter[1], 0); }",
        rf"section within a section in kernel test_kernel, .*: begin_ordered @: the warp is in the "
        rf"section of the counter {COUNTER}",
    ),
    Fault(
        "another place's end",
        "if (t < 32 && block == 0) { begin_ordered(*counter, 0); end_ordered(*counter, 1); }",
        r"counter overwritten in kernel test_kernel, .*: end_ordered @ ends the section of place "
        rf"1 and finds 0 {COUNTER}",
    ),
    Fault(
        "one block sets the counter",
        "if (t < 32) { if (block == 0) { begin_ordered(*counter, 0); end_ordered(*counter, 0); } "
        "else if (t == 0) *counter = 0; }",
        rf"{RACE}(reads|writes) what block \d has written @, {COUNTER}, and no signal orders",
    ),
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return write_faults(tmp_path_factory.mktemp("faults"), FAULTS, SETUP, threads=64, **SOURCE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_report(faults, fault, seed):
    expect_report(faults, FAULTS, replace(fault, seed=seed), num_lse=2)


@pytest.mark.parametrize("seed", range(6))
def test_a_section_sees_what_those_before_have_written(tmp_path, seed):
    body = f"""
    {SETUP}
    begin_ordered(*counter, block);
    const float before = block == 0 ? 0 : p.lse[31 - t];
    __syncwarp();
    p.lse[t] = before + 1;
    end_ordered(*counter, block);
"""
    step = write_step(tmp_path, "chain", body, threads=32, **SOURCE)
    _, lse = run(step, CpuBackend(seed), torch.zeros(1, 1, 20, 8), num_lse=32)
    assert (lse == 20).all()
