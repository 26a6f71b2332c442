"""The diagrams of backward by wgmma: what is drawn is what b05 and b06 declare and multiply."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from common.catalog import find_step
from common.problem import COUNTED
from common.report.diagrams import (
    backward_budget,
    backward_schedule,
    blocks,
    figures,
    hopper_backward,
)
from common.report.diagrams.backward_budget import B05_SHARED, B06_SHARED
from common.report.diagrams.hopper_backward import PRODUCTS, REGISTERS, SHARED
from common.runtime.cpu import CpuBackend
from verify.tests.cpp_constants import constants, evaluate, source
from verify.tests.drawings import boxes, texts

HEAD_DIMS = 64, 96, 128


def body(step: str, function: str = "attention_backward") -> str:
    text = source(step)
    return text[text.index(f" {function}(const ") :].split("\n}\n")[0]


# ---- where operands lie

LOOP = r"for \(int \w = 0; \w < (\w+); \w \+= 16\)\s+"
CALL = r"wgmma_m64nNk16<Element, ([^>]+)>\(\s*(\w+)_acc, (.+?)\);"


def test_constants_are_b05s():
    sizes = constants("b05", hopper_backward.HEAD_DIM)
    for name in ("BLOCK_M", "BLOCK_N", "DQ_COLUMNS"):
        assert getattr(hopper_backward, name) == sizes[name], name


def test_products_are_those_of_b05():
    """In another order: their depth, and which operands A come from registers."""
    sizes = constants("b05")
    drawn = {one.result.name.removesuffix("^T").lower(): one for one in PRODUCTS}
    columns = dict(re.findall(r"(\w+)_acc\[(\w+) / 8\]", body("b05")))
    found = re.findall(LOOP + CALL, body("b05"), re.S)
    assert len(found) == len(drawn) == 5
    for depth, majors, result, arguments in found:
        one = drawn[result]
        in_registers = "_frag" in arguments.split(",")[0]
        assert in_registers == (majors.count("MAJOR") == 1)
        assert one.a.place == (REGISTERS if in_registers else SHARED)
        assert one.a.columns == one.b.rows == sizes[depth]
        assert one.result.columns == sizes[columns[result]]
        assert one.adds == arguments.endswith("true")
        matrix = r"smem\.(\w+)"
        of_b = re.findall(matrix, arguments)[-1]
        assert one.b.name.removesuffix("^T").lower() == of_b.replace("dout", "do")


def test_what_wgmma_reads():
    by_name = {one.result.name: one.bytes_read() for one in PRODUCTS}
    kib = 1024
    assert by_name == {
        "S^T": 32 * kib,
        "dP^T": 32 * kib,
        "dV": 16 * kib,
        "dK": 16 * kib,
        "dQ": 32 * kib,
    }


def test_operands_figure_outlines_one_step():
    """Of 16 queries in the accumulators and operand A, and of 16 keys in dS and its transpose."""
    outlined = [box for box in boxes(figures()["backward_operands.svg"]) if "none" in box.roles]
    assert len(outlined) == 4
    names = [text.text for text in texts(figures()["backward_operands.svg"])]
    assert sum(name.startswith("p_frag") for name in names) == hopper_backward.BLOCK_M // 16
    for expression in (
        "store_rows(smem.ds, warp_row, 0, ds_frag)",
        "<Element, MN_MAJOR, MN_MAJOR>(dq_acc, mn_major(smem.ds, j, 0)",
    ):
        assert expression in source("b05")


# ---- registers and shared memory


@pytest.mark.parametrize("step", ["b05", "b06"])
def test_budget_is_of_the_steps_tiles(step):
    sizes = constants(step)
    for name in ("BLOCK_M", "BLOCK_N", "PANEL", "NUM_STAGES"):
        assert getattr(backward_budget, name) == sizes[name], name
    if step == "b06":
        assert sizes["CONSUMER_REGISTERS"] == backward_budget.CONSUMER_REGISTERS


def declared(step: str, head_dim: int, function: str) -> dict[str, int]:
    """Registers of the arrays in a function, by name."""
    sizes = constants(step, head_dim)
    arrays = re.findall(r"(\w+)_(acc|frag)\[([^]]+)\]\[4\]", body(step, function))
    names = {"s_acc": "S", "dp_acc": "dP", "p_frag": "P", "ds_frag": "dS", "dq_acc": "dQ"}
    names |= {"dk_acc": "dK", "dv_acc": "dV", "k_frag": "K", "v_frag": "V"}
    return {names[f"{name}_{kind}"]: 4 * evaluate(rows, sizes) for name, kind, rows in arrays}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("step", "function"), [("b05", "attention_backward"), ("b06", "compute")])
def test_registers_are_those_declared(step, function, head_dim):
    in_registers = step == "b06" and head_dim <= 64
    live = backward_budget.live(head_dim, kv_in_registers=in_registers)
    drawn = {part.name: part.size for part in (*live.softmax, *live.products)}
    found = declared(step, head_dim, function)
    if not in_registers:
        found = {name: size for name, size in found.items() if name not in ("K", "V")}
    assert drawn == found


@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("role", ["dV", "dK"])
def test_registers_by_roles(role, head_dim):
    live = backward_budget.live_by_roles(head_dim)[role]
    drawn = {part.name: part.size for part in (*live.products, *live.softmax)}
    found = declared("b06", head_dim, f"compute_{role.lower()}")
    if role == "dK":
        assert "prob[BLOCK_M / 8][4]" in body("b06", "compute_dk")
        found["P"] = backward_budget.BLOCK_M // 8 * 4
    assert drawn == found
    for parts in (live.softmax, live.products):
        assert sum(part.size for part in parts) <= backward_budget.CONSUMER_REGISTERS


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("step", "of_step"), [("b05", B05_SHARED), ("b06", B06_SHARED)])
def test_shared_memory_is_the_steps(step, of_step, head_dim):
    spec = replace(COUNTED.specialization, head_dim=head_dim)
    kernel = CpuBackend().descriptor(find_step(step), spec).kernels[1]
    assert kernel.name == b"attention_backward"
    parts = backward_budget.shared_memory(head_dim, **of_step)
    assert sum(part.size for part in parts) == kernel.smem_bytes
    assert kernel.smem_bytes <= backward_budget.SHARED_KIB * 1024


@pytest.mark.parametrize("head_dim", [192, 256])
def test_shared_memory_by_roles_is_b06s(head_dim):
    spec = replace(COUNTED.specialization, head_dim=head_dim)
    kernel = CpuBackend().descriptor(find_step("b06"), spec).kernels[1]
    parts = backward_budget.shared_memory_by_roles(head_dim)
    assert sum(part.size for part in parts) == kernel.smem_bytes


def test_a_bar_says_that_it_is_too_long():
    found = [text for text in texts(figures()["backward_registers.svg"]) if "red" in text.roles]
    live = backward_budget.live(backward_budget.WIDE)
    totals = [sum(part.size for part in parts) for parts in (live.softmax, live.products)]
    assert [int(text.text) for text in found] == totals
    assert min(totals) > backward_budget.MAX_REGISTERS


# ---- the causal schedule


def test_each_schedule_has_each_work_once():
    everything = {
        backward_schedule.Work(head, k_block)
        for head in range(backward_schedule.HEADS)
        for k_block in range(backward_schedule.K_BLOCKS)
    }
    done = []
    for schedule in (backward_schedule.as_they_come(), backward_schedule.to_and_fro()):
        taken = [work for works in schedule for work in works]
        assert len(taken) == len(everything)
        assert set(taken) == everything
        done.append(max(map(blocks.tiles, schedule)))
    assert done[1] < done[0]
