"""The diagrams of backward by wgmma: what is drawn is what steps declare, multiply and order."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from common.catalog import find_step
from common.problem import COUNTED
from common.report.diagrams import (
    backward_budget,
    backward_order,
    backward_schedule,
    backward_turns,
    blocks,
    figures,
    hopper_backward,
)
from common.report.diagrams.backward_budget import B05, B06, B08, B08_TALL
from common.report.diagrams.hopper_backward import PRODUCTS, REGISTERS, SHARED
from common.report.diagrams.svg import ACCENT
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


@pytest.mark.parametrize("step", ["b05", "b06", "b08"])
def test_budget_is_of_the_steps_tiles(step):
    sizes = constants(step)
    for name in ("BLOCK_M", "BLOCK_N", "PANEL"):
        assert getattr(backward_budget, name) == sizes[name], name
    assert sizes["DOUT_STAGES" if step == "b08" else "NUM_STAGES"] == backward_budget.NUM_STAGES
    if step != "b05":
        assert sizes["CONSUMER_REGISTERS"] == backward_budget.CONSUMER_REGISTERS


@pytest.mark.parametrize(("head_dim", "of_step"), [(64, B08_TALL), (96, B08), (128, B08)])
def test_budget_is_of_the_tiles_of_b08(head_dim, of_step):
    sizes = constants("b08", head_dim)
    assert of_step.block_m == sizes["BLOCK_M"]
    assert (of_step.q_stages, of_step.ds_stages) == (sizes["Q_STAGES"], sizes["DS_STAGES"])


def declared(step: str, head_dim: int, function: str) -> dict[str, int]:
    """Registers of the arrays in a function, by name; of dQ in b08, the first warpgroup's part."""
    sizes = constants(step, head_dim)
    if step == "b08":
        (columns,) = re.findall(r"int dq_columns\(int warpgroup\) {\s+return (.+);", source(step))
        sizes["dq_columns"] = lambda warpgroup: evaluate(columns, sizes | {"warpgroup": warpgroup})
        sizes["WARPGROUP"] = 0
    arrays = re.findall(r"(\w+)_(acc|frag)\[([^]]+)\]\[4\]", body(step, function))
    names = {"s_acc": "S", "dp_acc": "dP", "p_frag": "P", "ds_frag": "dS", "dq_acc": "dQ"}
    names |= {"dk_acc": "dK", "dv_acc": "dV", "k_frag": "K", "v_frag": "V"}
    return {names[f"{name}_{kind}"]: 4 * evaluate(rows, sizes) for name, kind, rows in arrays}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("step", "function"), [("b05", "attention_backward"), ("b06", "compute"), ("b08", "compute")]
)
def test_registers_are_those_declared(step, function, head_dim):
    in_registers = step == "b06" and head_dim <= 64
    live = backward_budget.live(head_dim, kv_in_registers=in_registers)
    if step == "b08" and head_dim <= 64:
        live = backward_budget.live_tall(head_dim)
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
@pytest.mark.parametrize(("step", "of_step"), [("b05", B05), ("b06", B06), ("b08", B08)])
def test_shared_memory_is_the_steps(step, of_step, head_dim):
    spec = replace(COUNTED.specialization, head_dim=head_dim, v_head_dim=head_dim)
    kernel = CpuBackend().descriptor(find_step(step), spec).kernels[1]
    assert kernel.name == b"attention_backward"
    if step == "b08" and head_dim <= 64:
        of_step = B08_TALL
    parts = backward_budget.shared_memory(of_step, head_dim)
    assert sum(part.size for part in parts) == kernel.smem_bytes
    assert kernel.smem_bytes <= backward_budget.SHARED_KIB * 1024


@pytest.mark.parametrize("head_dim", [192, 256])
def test_shared_memory_by_roles_is_b06s(head_dim):
    spec = replace(COUNTED.specialization, head_dim=head_dim, v_head_dim=head_dim)
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
    for schedule in (backward_schedule.as_they_come(), backward_schedule.longest_first()):
        taken = [work for works in schedule for work in works]
        assert len(taken) == len(everything)
        assert set(taken) == everything
        done.append(max(map(blocks.tiles, schedule)))
    assert done[1] < done[0]


def test_walks_are_those_of_b08():
    """Once around the tiles of a block, a step behind the neighbour; the second half upward."""
    for expression in (
        "upward = CAUSAL && place >= heads * k_blocks / 2;",
        "steps = k_block % work.num_tiles;",
        "work.step = upward ? 1 : -1;",
        "(upward ? work.first_tile : work.end_tile - 1) + work.step * (steps / work.group);",
        "if (tile == work.end_tile) tile = work.first_tile;",
        "if (tile < work.first_tile) tile = work.end_tile - 1;",
    ):
        assert expression in source("b08")
    walks = [backward_schedule.walk(k_block) for k_block in range(backward_schedule.K_BLOCKS)]
    assert walks == [[5, 4, 3, 2, 1, 0], [4, 3, 2, 1, 5], [3, 2, 5, 4], [3, 4, 5], [4, 5], [5]]


# ---- the order of b09

ORDERS = {
    last_keys_first: backward_order.schedule(last_keys_first=last_keys_first)
    for last_keys_first in (False, True)
}


def of_b09(expression: str, **names: object) -> int:
    """An expression of its text, of one head; at head_dim 64, where a tile has as many queries as a
    block has keys.
    """
    assert expression in source("b09")
    sizes = constants("b09", 64)
    assert sizes["BLOCK_M"] == sizes["BLOCK_N"]
    seq = sizes["BLOCK_N"] * backward_order.BLOCKS
    p = SimpleNamespace(seq_q=seq, seq_k=seq)
    return evaluate(expression, sizes | {"p": p, "CAUSAL": True} | names)


@pytest.mark.parametrize("last_keys_first", ORDERS)
def test_blocks_come_in_the_order_of_b09(last_keys_first):
    expression = "work.last_keys_first ? k_blocks - 1 - place / heads : place / heads"
    names = {"work": SimpleNamespace(last_keys_first=last_keys_first), "heads": 1}
    names["k_blocks"] = backward_order.BLOCKS
    taken = [of_b09(expression, place=place, **names) for place in range(backward_order.BLOCKS)]
    assert taken == backward_order.in_order(last_keys_first=last_keys_first)


@pytest.mark.parametrize("last_keys_first", ORDERS)
def test_walks_are_those_of_b09(last_keys_first):
    for block, starts in ORDERS[last_keys_first].items():
        work = SimpleNamespace(last_keys_first=last_keys_first)
        work.first_key = of_b09("k_block * BLOCK_N", k_block=block)
        first_tile = "CAUSAL ? max(0, work.first_key + p.seq_q - p.seq_k) / BLOCK_M : 0"
        work.first_tile = of_b09(first_tile, work=work)
        work.end_tile = of_b09("(p.seq_q + BLOCK_M - 1) / BLOCK_M")
        start = "work.last_keys_first ? work.first_tile : work.end_tile - 1"
        walked = [of_b09(start, work=work)]
        assert "tile += work.last_keys_first ? 1 : -1;" in source("b09")
        step = of_b09("work.last_keys_first ? 1 : -1", work=work)
        for _ in range(work.first_tile + 1, work.end_tile):
            walked.append(walked[-1] + step)
        assert list(starts) == sorted(starts, key=starts.get) == walked


@pytest.mark.parametrize("last_keys_first", ORDERS)
def test_a_tile_takes_one_term_after_another_in_the_order_of_b09(last_keys_first):
    by_block = ORDERS[last_keys_first]
    assert "if (!work.last_keys_first) return work.first_key / BLOCK_N;" in source("b09")
    for tile in range(backward_order.TILES):
        terms = {starts[tile]: block for block, starts in by_block.items() if tile in starts}
        assert len(terms) == tile + 1  # no two at the same time
        places = []
        for _, block in sorted(terms.items()):
            work = SimpleNamespace(first_key=of_b09("k_block * BLOCK_N", k_block=block))
            place = "work.first_key / BLOCK_N"
            names = {"work": work}
            if last_keys_first:
                last_key = "min(p.seq_k, BLOCK_M * (tile + 1) + p.seq_k - p.seq_q) - 1"
                names["last_key"] = of_b09(last_key, tile=tile)
                place = "last_key / BLOCK_N - work.first_key / BLOCK_N"
            places.append(of_b09(place, **names))
        assert places == list(range(tile + 1))


def test_only_with_the_last_keys_first_nobody_waits():
    blocks_of_keys = range(backward_order.BLOCKS)
    for block in blocks_of_keys:
        steps = len(backward_order.walk(block, last_keys_first=True))
        assert list(ORDERS[True][block].values()) == list(range(steps))
        assert list(ORDERS[False][block].values()) == list(range(block, block + steps))
        assert not backward_order.waits(ORDERS[True][block])
        assert backward_order.waits(ORDERS[False][block]) == ([(0, block)] if block else [])


def test_order_figure_follows_a_tile_from_block_to_block():
    """A row and a column further each time: down with the first keys first, else up."""
    svg = figures()["backward_order.svg"]
    found = sorted((one for one in boxes(svg) if ACCENT in one.roles), key=lambda one: one.left)
    terms = backward_order.FOLLOWED + 1
    assert len(found) == 2 * terms
    for panel, sign in ((found[:terms], 1), (found[terms:], -1)):
        for one, other in pairwise(panel):
            assert other.left == one.right
            assert other.top - one.top == sign * one.height


# ---- in step and in turn

NAMES = {"s": "S", "dp": "dP", "dv": "dV", "dq": "dQ", "dk": "dK"}
SCHEDULES = {"b06": backward_turns.in_step(), "b08": backward_turns.in_turn()}


def test_products_are_in_the_steps_order():
    started = re.findall(r"multiply\w*\((\w+)_acc", body("b06", "compute"))
    by_tile = [span.what for span in SCHEDULES["b06"][0].products]
    assert by_tile[:5] == list(dict.fromkeys(NAMES[name] for name in started))

    text = body("b08", "compute")
    tile_step = text[text.index("const auto tile_step") : text.index("++i;")]
    found = re.findall(r"multiply\w*\((\w+)_acc|start_(dq)\(i - 1\)|(\w+_turn)\(\)", tile_step)
    order = [NAMES.get(one, one) for one in map("".join, found)]
    end = order.index("pass_turn")
    assert order[end + 1] == "wait_for_turn"
    turn = [*order[end + 2 :], *order[:end]]
    for consumer in SCHEDULES["b08"]:
        assert [span.what for span in consumer.products] == turn * (backward_turns.TILES + 1)


@pytest.mark.parametrize("consumers", SCHEDULES.values(), ids=SCHEDULES)
def test_tensor_cores_are_not_asked_for_more_than_they_have(consumers):
    """A product of one unit that takes two has half of them."""
    products = [span for consumer in consumers for span in consumer.products]
    for time in {(span.start + span.end) / 2 for span in products}:
        shares = [1 / (one.end - one.start) for one in products if one.start <= time < one.end]
        assert sum(shares) <= 1 + 1e-9


@pytest.mark.parametrize("consumers", SCHEDULES.values(), ids=SCHEDULES)
def test_nothing_starts_before_what_it_needs(consumers):
    done = [
        {(span.what, span.tile): span.end for span in (*one.products, *one.others)}
        for one in consumers
    ]
    needs = {"P": ("S",), "dS": ("P", "dP"), "dV": ("P",), "dK": ("dS",)}
    for mine, consumer in zip(done, consumers, strict=True):
        for row in (consumer.products, consumer.others):
            in_time = sorted(row, key=lambda span: span.start)
            assert all(one.end <= other.start + 1e-9 for one, other in pairwise(in_time))
            for span in (span for span in row if span.start >= 0):
                ends = [mine[what, span.tile] for what in needs.get(span.what, ())]
                if span.what == "dQ":
                    ends = [of_each.get(("dS", span.tile), 0.0) for of_each in done]
                assert all(end <= span.start + 1e-9 for end in ends)
