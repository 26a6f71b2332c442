"""The diagrams of backward: what is drawn is what the steps compute, and by whom."""

from __future__ import annotations

import math
import re
from itertools import pairwise, product

import pytest
import torch

from common.report.diagrams import backward, backward_warps, figures
from common.report.diagrams.backward import BLOCKS, GRAPH, KERNELS, LATE, Work
from common.report.diagrams.fragments import a_fragment
from common.report.diagrams.svg import ACCENT, BANK_COLORS
from verify.tests.cpp_constants import constants, evaluate, source
from verify.tests.drawings import boxes, texts

HEAD_DIM = backward.HEAD_DIM


def body(kernel: backward.Kernel) -> str:
    """From the kernel's name to the end of its function."""
    text = source(kernel.step)
    return text[text.index(f"    {kernel.name}(const ") :].split("\n}\n")[0]


# ---- what is computed from what


def test_graph_computes_the_gradients():
    seq_q, seq_k, head_dim, scale = 5, 7, 3, 0.6
    generator = torch.Generator().manual_seed(0)

    def inputs(rows: int) -> torch.Tensor:
        return torch.randn(rows, head_dim, generator=generator, dtype=torch.float64)

    q, k, v = (inputs(rows).requires_grad_() for rows in (seq_q, seq_k, seq_k))
    logits = scale * q @ k.T
    o = logits.softmax(-1) @ v
    dout = inputs(seq_q)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), dout)
    values = {"Q": q, "K": k, "V": v, "O": o, "dO": dout, "lse": logits.logsumexp(-1)}
    formulas = {
        "scale Q K^T": lambda q, k: scale * q @ k.T,
        "exp(S − lse)": lambda s, lse: (s - lse[:, None]).exp(),
        "dO V^T": lambda dout, v: dout @ v.T,
        "rowsum(dO * O)": lambda dout, o: (dout * o).sum(-1),
        "P * (dP − delta)": lambda p, dp, delta: p * (dp - delta[:, None]),
        "P^T dO": lambda p, dout: p.T @ dout,
        "scale dS^T Q": lambda ds, q: scale * ds.T @ q,
        "scale dS K": lambda ds, k: scale * ds @ k,
    }
    sizes = {"seq_q": seq_q, "seq_k": seq_k, "head_dim": head_dim}
    for name, one in GRAPH.items():
        if one.formula:
            values[name] = formulas[one.formula](*(values[other] for other in one.inputs))
        assert list(values[name].shape) == [sizes[size] for size in one.shape.split(", ")], name
    for name, expected in {"dQ": dq, "dK": dk, "dV": dv}.items():
        torch.testing.assert_close(values[name], expected)


def test_an_arrow_leads_from_each_input():
    arrows = backward.arrows()
    assert set(arrows) == {(one, name) for name in GRAPH for one in GRAPH[name].inputs}
    found = boxes(figures()["backward_dag.svg"])
    drawn = {(box.left, box.top, box.width, box.height): box for box in found}
    for (one, other), path in arrows.items():
        ends = []
        for name in (one, other):
            at = GRAPH[name]
            ends.append(drawn[at.left, at.top, at.width, at.height])
        if (one, other) in backward.AGAIN:
            left, y = backward.AGAIN_LEFT, backward.AGAIN[one, other]
            ends[0] = next(box for box in found if box.left == left and box.surrounds(left, y))
        for box, (x, y) in zip(ends, (path[0], path[-1]), strict=True):
            assert box.surrounds(x, y)
            assert x in (box.left, box.right) or y in (box.top, box.bottom)


def test_products_are_numbered_as_b04_computes_them():
    numbered = sorted((one.product, name) for name, one in GRAPH.items() if one.product)
    assert [name for _, name in numbered] == list(KERNELS[-1].products)
    assert [number for number, _ in numbered] == [1, 2, 3, 4, 5]


# ---- who owns what


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.step}_{kernel.name}")
def test_a_block_owns_and_takes_what_is_drawn(kernel):
    sizes = constants(kernel.step)
    grid = rf'\.name = "{kernel.name}",\s+\.grid = {{{{(SEQ_[QK]), (\w+)}}'
    axis, own = re.search(grid, source(kernel.step)).groups()
    assert (axis == "SEQ_Q") == kernel.owns_queries
    assert sizes[own] == kernel.own
    step_of = r"k_start \+= (\w+)" if kernel.owns_queries else r"q_start = tile \* (\w+)"
    (tile,) = re.findall(step_of, body(kernel))
    assert sizes[tile] == kernel.tile


@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda kernel: f"{kernel.step}_{kernel.name}")
def test_a_kernel_computes_the_drawn_products(kernel):
    calls = re.findall(r"^ +(?:multiply|add_product)<.*?>\((\w+)_acc,", body(kernel), re.M)
    names = {"s": "S", "dp": "dP", "dv": "dV", "dk": "dK", "dq": "dQ"}
    assert tuple(names[call] for call in calls) == kernel.products
    assert kernel.adds_dq == ("add_dq(" in body(kernel))
    kept = re.findall(r"\b(d[qkv])_acc(?:\[[^=]*)? = \{\}", body(kernel))
    kept = [name for name in kept if not (kernel.adds_dq and name == "dq")]
    assert ", ".join(names[name] for name in kept) == kernel.registers


# ---- three ways to dQ

WAYS = {
    "owners": backward.by_owners(),
    "any order": backward.by_reductions(in_order=False),
    "fixed order": backward.by_reductions(in_order=True),
}


@pytest.mark.parametrize("done", WAYS.values(), ids=WAYS)
def test_a_schedule_is_possible(done: list[Work]):
    """A block does one thing at a time, all of them, and a kernel begins after the one before."""
    for block in range(BLOCKS):
        mine = sorted((work for work in done if work.block == block), key=lambda one: one.start)
        assert all(one.end <= other.start for one, other in pairwise(mine))
    tiles = list(product(range(BLOCKS), repeat=2))
    products = {"dq": 3, "dk_dv": 4, "both": 5}
    for what in {work.what for work in done} - {"wait", "round"}:
        some = [work for work in done if work.what == what]
        assert sorted((work.block, work.tile) for work in some) == tiles
        for work in some:
            duration = work.end - work.start
            assert math.isclose(duration, products.get(what, backward.ADD))
    for first, second in (("dq", "dk_dv"), ("add", "round")):
        ends = [work.end for work in done if work.what == first]
        assert all(max(ends) <= work.start for work in done if ends and work.what == second)


def test_the_ways_differ_in_the_order_of_terms_only():
    by_number = [list(range(BLOCKS))] * BLOCKS
    assert backward.terms(WAYS["owners"]) == backward.terms(WAYS["fixed order"]) == by_number
    orders = backward.terms(WAYS["any order"])
    assert [sorted(order) for order in orders] == by_number
    assert all(order != by_number[0] for order in orders)
    starts = [(work.tile, work.start) for work in WAYS["any order"] if work.what == "add"]
    assert len({(tile, round(start, 6)) for tile, start in starts}) == len(starts)  # no ties


def test_a_block_waits_for_its_turn_only():
    added = {(one.block, one.tile): one for one in WAYS["fixed order"] if one.what == "add"}
    waits = [work for work in WAYS["fixed order"] if work.what == "wait"]
    assert waits
    for work in waits:
        assert work.end == added[work.block - 1, work.tile].end
    for (block, tile), work in added.items():
        assert block == 0 or work.start >= added[block - 1, tile].end


@pytest.mark.parametrize("done", WAYS.values(), ids=WAYS)
def test_delays_are_alike(done: list[Work]):
    for block, late in enumerate(LATE):
        mine = sorted((work for work in done if work.block == block), key=lambda one: one.start)
        ends = {0.0, *(work.end for work in mine)}
        for work in mine:
            if work.what in ("dq", "both"):
                before = max(end for end in ends if end <= work.start + 1e-9)
                assert math.isclose(work.start - before, late[work.tile], abs_tol=1e-9)


# ---- b03's fragments


def test_accumulators_are_the_operand():
    """As add_product of b03 takes it: pair = x[k / 8 + i / 2][i % 2 * 2] becomes a_frag[i]."""
    for lane, i in product(range(32), range(4)):
        pair = backward_warps.fragment_pair(lane, i, is_a=False)
        assert pair == backward_warps.fragment_pair(lane, i, is_a=True)
        row, column = 8 * (i % 2) + lane // 4, 8 * (i // 2) + 2 * (lane % 4)
        assert pair == [(row, column), (row, column + 1)]
        assert pair[0] == a_fragment(lane, i, 0)
    assert "&x[m][k / 8 + i / 2][i % 2 * 2]" in source("b03")
    assert constants("b03")["DKV_QUERIES"] == backward.DKV_QUERIES


# ---- b04's warps


def expression(name: str, before: str = "") -> str:
    """What b04 computes it as."""
    return re.search(rf"{before}{name} ?= ?(threadIdx\.x [^;]+);", source("b04"))[1]


def returned(function: str) -> str:
    return re.search(rf"int {function}\(\) {{ return ([^;]+); }}", source("b04"))[1]


def of_thread(cpp: str, thread: int, names: dict[str, int]) -> int:
    return evaluate(cpp.replace("threadIdx.x", str(thread)), names)


def spaced(first: int, spacing: int) -> list[int]:
    return list(range(first, HEAD_DIM, spacing))


def test_constants_are_b04s():
    sizes = constants("b04")
    for name in ("BLOCK_M", "BLOCK_N"):
        assert getattr(backward, name) == sizes[name], name
    for name in ("NUM_WARPS", "FRAGS", "WARP_QUERIES", "DKV_SPACING", "DQ_SPACING"):
        assert getattr(backward_warps, name) == sizes[name], name


def test_a_warp_computes_the_parts_that_b04_gives_it():
    sizes = constants("b04")
    rows = 16 * sizes["FRAGS"]
    row, col, d = (expression(name, "const int ") for name in ("warp_row", "warp_col", "warp_d"))
    for thread in range(32 * sizes["NUM_WARPS"]):
        warp = thread // 32
        warp_row, warp_col, warp_d = (of_thread(cpp, thread, sizes) for cpp in (row, col, d))
        dq_row, dq_column = (
            of_thread(returned(name), thread, sizes) for name in ("dq_row", "dq_column")
        )
        assert backward_warps.s_part(warp) == [(warp_row, warp_col, rows, sizes["WARP_QUERIES"])]
        columns = spaced(warp_d, sizes["DKV_SPACING"])
        assert backward_warps.dkv_parts(warp) == [(warp_row, at, rows, 16) for at in columns]
        columns = spaced(dq_column, sizes["DQ_SPACING"])
        assert backward_warps.dq_parts(warp) == [(dq_row, at, rows, 16) for at in columns]
        assert backward_warps.operand_of_keys(warp) == (warp_row, 0, rows, sizes["BLOCK_M"])
        assert backward_warps.operand_of_queries(warp) == (dq_row, 0, rows, sizes["BLOCK_N"])


@pytest.mark.parametrize(
    ("parts_of", "rows", "columns"),
    [
        (backward_warps.s_part, backward.BLOCK_N, backward.BLOCK_M),
        (backward_warps.dkv_parts, backward.BLOCK_N, HEAD_DIM),
        (backward_warps.dq_parts, backward.BLOCK_M, HEAD_DIM),
    ],
)
def test_each_element_is_one_warps(parts_of, rows, columns):
    computed = torch.zeros(rows, columns, dtype=torch.int32)
    for warp in range(backward_warps.NUM_WARPS):
        for row, column, height, width in parts_of(warp):
            computed[row : row + height, column : column + width] += 1
    assert (computed == 1).all()


# ---- how they are drawn


def test_warps_figure_gives_each_warp_equal_areas():
    """Of S^T, of what is stored, of dK and dV, of dS and of dQ."""
    areas: dict[str, float] = {}
    for box in boxes(figures()["backward_warps.svg"]):
        color = box.roles[0]
        areas[color] = areas.get(color, 0) + box.width * box.height
    colors = [ACCENT if n == backward_warps.WARP else color for n, color in enumerate(BANK_COLORS)]
    elements = 3 * backward.BLOCK_M * backward.BLOCK_N
    elements += (backward.BLOCK_N + backward.BLOCK_M) * HEAD_DIM
    of_a_warp = elements * backward_warps.PIXELS**2 / backward_warps.NUM_WARPS
    for color in colors:
        assert math.isclose(areas[color], of_a_warp)


def test_three_ways_figure_lists_the_terms():
    found = texts(figures()["dq_three_ways.svg"])
    numbers = [int(text.text) for text in found if text.text.isdigit()]
    assert numbers == [
        term for done in WAYS.values() for order in backward.terms(done) for term in order
    ]
