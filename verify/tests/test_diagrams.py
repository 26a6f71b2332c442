"""The diagrams: who holds what, as the PTX ISA and the SIMT runtime have it; how they are drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain, pairwise, product
from random import Random
from xml.etree import ElementTree

import pytest
import torch

from common.catalog import find_step
from common.problem import COUNTED, Specialization
from common.report.diagrams import blocks, cluster_merge, figures, own_keys, ragged_map
from common.report.diagrams.fragments import (
    CHUNKS,
    a_fragment,
    b_fragment,
    d_fragment,
    empty_phase,
    full_phase,
    in_tile,
    k_major,
    k_row,
    ldmatrix,
    ldmatrix_trans,
    mn_major,
    padded,
    parity,
    plain,
    swizzled,
    v_row,
    wavefronts,
    wgmma_d,
)
from common.report.diagrams.softmax import BOUND, LOGITS, VALUES, online, shifted
from common.report.diagrams.svg import (
    ACCENT,
    BANK_COLORS,
    COLORS,
    DARK,
    EMPTY,
    INK,
    LIGHT,
    MARKS,
    MUTED,
    ON_ACCENT,
    PAGE,
    RED,
    TINTS,
    WIDTH,
)
from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step
from verify.tests.cpp_constants import constants, source
from verify.tests.drawings import SVG, boxes, clashes, texts
from verify.tests.small_kernels import run, write_scenarios, write_step

LANES, HALVES = range(32), range(2)


def test_fragments_are_those_of_the_isa():
    """It numbers a lane's elements a0 to a7, b0 to b3 and c0 to c3, two 16-bit ones a register."""
    for lane in LANES:
        group, thread = lane >> 2, lane % 4
        for i in range(8):
            row = group if i in (0, 1, 4, 5) else group + 8
            column = thread * 2 + (i & 1) + (8 if i >= 4 else 0)
            assert a_fragment(lane, i // 2, i % 2) == (row, column)
        for i in range(4):
            row = thread * 2 + (i & 1) + (8 if i >= 2 else 0)
            assert b_fragment(lane, i // 2, i % 2) == (row, group)
            row = group if i < 2 else group + 8
            assert d_fragment(lane, i) == (row, thread * 2 + (i & 1))


@pytest.mark.parametrize(
    ("held", "shape"),
    [
        ([a_fragment(*place) for place in product(LANES, range(4), HALVES)], (16, 16)),
        ([b_fragment(*place) for place in product(LANES, range(2), HALVES)], (16, 8)),
        ([d_fragment(*place) for place in product(LANES, range(4))], (16, 8)),
        ([ldmatrix(*place) for place in product(LANES, HALVES)], (8, 8)),
        ([ldmatrix_trans(*place) for place in product(LANES, HALVES)], (8, 8)),
    ],
)
def test_each_element_is_held_once(held, shape):
    rows, columns = shape
    assert sorted(held) == list(product(range(rows), range(columns)))


def test_two_accumulators_are_an_a_fragment():
    for lane, register, half in product(LANES, range(4), HALVES):
        row, column = d_fragment(lane, 2 * (register % 2) + half)
        tile = register // 2
        assert a_fragment(lane, register, half) == (row, 8 * tile + column)


@pytest.mark.parametrize("row_of", [k_row, v_row])
def test_each_row_is_named_once(row_of):
    assert sorted(map(row_of, LANES)) == list(product(range(16), (0, 8)))
    for lane in LANES:
        first_row, first_column = row_of(lane // 8 * 8)
        assert row_of(lane) == (first_row + lane % 8, first_column)


def test_ldmatrix_gives_the_fragments_of_mma():
    for lane, m, half in product(LANES, range(4), HALVES):
        register, tile = m % 2, m // 2
        row, column = ldmatrix(lane, half)
        q = v_row(8 * m)[0] + row, v_row(8 * m)[1] + column
        assert a_fragment(lane, m, half) == q
        key, d = k_row(8 * m)[0] + row, k_row(8 * m)[1] + column
        assert b_fragment(lane, register, half) == (d, key - 8 * tile)
        row, column = ldmatrix_trans(lane, half)
        key, d = v_row(8 * m)[0] + row, v_row(8 * m)[1] + column
        assert b_fragment(lane, register, half) == (key, d - 8 * tile)


def words_in_busiest_bank(addresses):
    words = {address // 4 + i for address in addresses for i in range(4)}
    banks = [word % 32 for word in words]
    return max(map(banks.count, banks))


@pytest.mark.parametrize(("address_of", "count"), [(plain, 8), (padded, 1), (swizzled, 1)])
def test_wavefronts(address_of, count):
    for chunk in range(CHUNKS):
        addresses = [address_of(row, chunk) for row in range(8)]
        assert len(wavefronts(addresses)) == words_in_busiest_bank(addresses) == count
    for row in range(8):  # written by 8 lanes side by side
        assert len(wavefronts([address_of(row, chunk) for chunk in range(CHUNKS)])) == 1


def test_a_swizzle_moves_a_chunk_within_its_row():
    for row in range(16):
        chunks = [swizzled(row, chunk) for chunk in range(CHUNKS)]
        assert sorted(chunks) == [plain(row, chunk) for chunk in range(CHUNKS)]


# ---- Hopper: what the SIMT runtime does is what is drawn

ROWS, STEPS = 128, 8  # of a tile [128, 128], so that K and V have as many steps of 16


def test_wgmma_reads_what_tma_writes():
    for at, i, k in product(range(0, 128, 16), range(ROWS), range(16)):
        assert k_major(ROWS, at).element(i, k) == in_tile(ROWS, i, at + k)
        assert mn_major(ROWS, at).element(i, k) == in_tile(ROWS, at + k, i)


def test_two_tiles_of_wgmma_are_an_a_fragment():
    for thread, step, register, half in product(range(128), range(8), range(4), HALVES):
        row, column = a_fragment(thread % 32, register, half)
        place = 2 * step + register // 2, 2 * (register % 2) + half
        assert wgmma_d(thread, *place) == (16 * (thread // 32) + row, 16 * step + column)


MULTIPLY = """
#include "mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

template <Major MAJOR>
__device__ void multiply(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    wgmma_fence(d, a);
    wgmma_m64nNk16<Element, MAJOR>(d, a, b, false);
    wgmma_commit_group();
    wgmma_wait_group<0>(d, a);
}
"""

# Warp w multiplies w + 1 times the identity by each step of 16, first along d and then along keys.
PRODUCTS = """
    if (block) return;
    if (t == 0) {
        mbarrier_init(smem.full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(smem.full, sizeof(smem.tile));
        for (int panel = 0; panel < 2; ++panel)
            cp_async_bulk_tensor_load(smem.tile[panel][0], p.k_map, 64 * panel, 0, 0, 0, smem.full);
    }
    __syncthreads();
    while (!mbarrier_try_wait_parity(smem.full, 0)) {
    }
    for (int row = t, panel = 0; panel < 2; ++panel)
        for (int i = 0; i < 64; ++i) p.o[(128 * panel + row) * 64 + i] = smem.tile[panel][row][i];
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
        const int row = t % 32 / 4 + i % 2 * 8, k = t % 4 * 2 + i / 2 * 8, x = 1 + t / 32;
        a[i] = cvt_rn_x2<Element>(row == k ? x : 0, row == k + 1 ? x : 0);
    }
    for (int step = 0; step < 16; ++step) {
        const int at = 16 * (step % 8);
        uint64_t b;
        float d[16][4];
        if (step < 8) {
            b = matrix_descriptor<SWIZZLE_128B>(&smem.tile[at / 64][0][at % 64], 0, 1024);
            multiply<K_MAJOR>(d, a, b);
        } else {
            b = matrix_descriptor<SWIZZLE_128B>(smem.tile[0][at], sizeof(smem.tile[0]), 1024);
            multiply<MN_MAJOR>(d, a, b);
        }
        float* result = p.lse + step * (2 + 64 * 128);
        memcpy(result, &b, sizeof(b));
        memcpy(result + 2 + 64 * t, d, sizeof(d));
    }
"""


@dataclass(frozen=True)
class Computed:
    """Of PRODUCTS, for the steps of 16 d and then of 16 keys."""

    tile: torch.Tensor  # [128, 128]
    memory: torch.Tensor  # [128 * 128]
    descriptors: list[int]
    registers: torch.Tensor  # [steps, thread, tile, register]


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> Computed:
    step = write_step(
        tmp_path_factory.mktemp("products"),
        "products",
        PRODUCTS,
        threads=128,
        globals_=MULTIPLY,
        layout="alignas(1024) Element tile[2][128][64]; Mbarrier full;",
        boxes=".k_box = {128, 64, SWIZZLE_128B},",
    )
    numbers = torch.randint(0, 2048, (128, 128), generator=torch.Generator().manual_seed(0))
    tile = numbers.to(torch.float16)  # exactly
    size = 2 + 64 * 128
    o, lse = run(step, CpuBackend(), tile[None, None], num_lse=2 * STEPS * size)
    results = lse.view(2 * STEPS, size)
    bits = results[:, :2].contiguous().view(torch.int64)[:, 0].tolist()
    descriptors = [number % 2**64 for number in bits]
    registers = results[:, 2:].reshape(2 * STEPS, 128, 16, 4)
    return Computed(tile, o.flatten(), descriptors, registers)


def test_tile_is_as_tma_writes_it(computed):
    for row, column in product(range(ROWS), range(128)):
        assert computed.memory[in_tile(ROWS, row, column) // 2] == computed.tile[row, column]


def test_descriptors_are_the_runtimes(computed):
    drawn = [k_major(ROWS, 16 * step) for step in range(STEPS)]
    drawn += [mn_major(ROWS, 16 * step) for step in range(STEPS)]
    for descriptor, bits in zip(drawn, computed.descriptors, strict=True):
        fields = descriptor.fields().values()
        assert sum(value << first for first, _, value in fields) == bits
        assert all(value < 1 << last - first + 1 for first, last, value in fields)


def test_wgmma_gives_the_drawn_elements_to_the_drawn_threads(computed):
    places = list(product(range(128), range(16), range(4)))
    rows, columns = torch.tensor([wgmma_d(*place) for place in places]).T
    for step in range(STEPS):
        b = computed.tile[:, 16 * step : 16 * step + 16].T, computed.tile[16 * step :][:16]
        for operand, registers in zip(b, computed.registers[step::STEPS], strict=True):
            expected = operand.float()[rows % 16, columns] * (1 + rows // 16)
            assert torch.equal(registers.flatten(), expected)


# A producer and two consumers of one stage: the parities are those of the waits for full and empty.
STAGE = """
    if (t == 0) {
        mbarrier_init(smem.full, 1);
        mbarrier_init(smem.empty, 2);
    }
    __syncthreads();
    const auto wait_for = [](Mbarrier& barrier, int parity) {
        while (!mbarrier_try_wait_parity(barrier, parity)) {
        }
    };
    const auto use_stage = [&](std::array<int, 6> parities) {
        if (t % 32) return;
        float seen = 0;
        for (int use = 0; use < 3; ++use) {
            if (t == 0) {
                wait_for(smem.empty, parities[3 + use]);
                smem.tile = use + 1;
                mbarrier_arrive(smem.full);
            } else {
                wait_for(smem.full, parities[use]);
                seen = 10 * seen + smem.tile;
                mbarrier_arrive(smem.empty);
            }
        }
        if (t > 0) p.lse[t / 32 - 1] = seen;
    };
"""
DRAWN = [parity(phase(use)) for phase in (full_phase, empty_phase) for use in range(3)]
WRONG = [[p ^ (i == n) for i, p in enumerate(DRAWN)] for n in range(6)]  # one of them


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Step:
    calls = [f"use_stage({{{str(parities)[1:-1]}}});" for parities in (DRAWN, *WRONG)]
    return write_scenarios(
        tmp_path_factory.mktemp("stage"),
        "stage",
        calls,
        STAGE,
        threads=96,
        globals_='#include "mbarrier.cuh"\n#include <array>',
        layout="Mbarrier full, empty; float tile;",
    )


def passes(stage: Step, scenario: int, seed: int) -> bool:
    """Whether both consumers have seen the tiles 1, 2 and 3."""
    q = torch.zeros(1, 1, 1, 8)
    try:
        _, lse = run(stage, CpuBackend(seed), q, num_lse=2, scenario=scenario)
    except SimtError:
        return False
    return lse.tolist() == [123.0, 123.0]


def test_drawn_parities_are_those_to_wait_for(stage):
    assert all(passes(stage, 0, seed) for seed in range(8))
    for scenario in range(1, 1 + len(WRONG)):
        assert not all(passes(stage, scenario, seed) for seed in range(8)), WRONG[scenario - 1]


# ---- what is worked out for a diagram


def rows_of_logits(count: int = 50) -> Iterator[tuple[list, list]]:
    """Logits and values in tiles of three, with jumps upwards and downwards."""
    random = Random(0)
    for _ in range(count):
        tiles = random.randint(1, 5)
        yield tuple(
            [[random.randint(-low, 9) for _ in range(3)] for _ in range(tiles)] for low in (20, 0)
        )


@pytest.mark.parametrize("steps_of", [online, partial(shifted, bound=BOUND)])
def test_a_row_comes_out_as_by_one_softmax(steps_of):
    """Exactly: for O / l, and for 2^lse = l 2^m."""
    for logits, values in rows_of_logits():
        weights = [Fraction(2) ** s for tile in logits for s in tile]
        row = steps_of(logits, values)[-1].after
        assert row.l * Fraction(2) ** row.m == sum(weights)
        flat = [v for tile in values for v in tile]
        expected = sum(w * v for w, v in zip(weights, flat, strict=True)) / sum(weights)
        assert row.o / row.l == expected


def test_online_softmax_has_no_p_above_one():
    for logits, values in rows_of_logits():
        steps = online(logits, values)
        assert [step.after.m for step in steps] == [
            max(s for tile in logits[: n + 1] for s in tile) for n in range(len(steps))
        ]
        assert all(max(step.p) <= 1 for step in steps)


def test_a_shift_is_raised_only_beyond_the_bound():
    """To the tile's maximum, so that no P is above 1 any more."""
    raised = 0
    for logits, values in rows_of_logits():
        m = max(logits[0])
        for step, s in zip(shifted(logits, values, BOUND), logits, strict=True):
            high = sum(Fraction(2) ** (one - m) for one in s) > BOUND
            assert bool(step.high) == (step.raised > 0) == high
            assert not high or max(step.p) == 1
            m += step.raised
            assert step.after.m == m
            raised += high
    assert raised


def test_the_shift_figure_shows_a_tile_of_each_kind():
    kinds = [(bool(step.high), max(step.p) > 1) for step in shifted(LOGITS, VALUES, BOUND)]
    assert kinds == [(False, False), (False, True), (True, False)]


def test_the_memory_map_is_v08s():
    descriptor = CpuBackend().descriptor(find_step("v08"), COUNTED.specialization)
    assert blocks.shared_memory_bytes() == descriptor.kernels[0].smem_bytes
    ends = [place.start + place.size for place in blocks.shared_memory()]
    assert [place.start for place in blocks.shared_memory()] == [0, *ends[:-1]]


def test_ping_pong_is_possible():
    """Nothing starts before what it needs is there, and the tensor cores do one after another."""
    consumers = blocks.consumers()
    products = sorted(
        (span.start, span.end) for consumer in consumers for span in (*consumer.s, *consumer.pv)
    )
    assert all(one[1] == other[0] for one, other in pairwise(products))
    for consumer in consumers:
        s, softmax, pv = (
            {span.tile: span for span in spans}
            for spans in (consumer.s, consumer.softmax, consumer.pv)
        )
        for tile in softmax:
            assert softmax[tile].start >= s[tile].end
            if tile + 1 in s:  # S is in registers, of which P takes some
                assert softmax[tile].end <= s[tile + 1].start
            if tile in pv:
                assert softmax[tile].end <= pv[tile].start
    for copied, used in zip(blocks.copies(), ("s", "pv"), strict=True):
        for copy in copied:
            spans = [span for consumer in consumers for span in getattr(consumer, used)]
            assert all(copy.end <= span.start for span in spans if span.tile == copy.tile)
            before = [span for span in spans if span.tile == copy.tile - blocks.NUM_STAGES]
            assert all(span.end <= copy.start for span in before)


def test_each_schedule_has_each_work_tile_once():
    by_sm = [list(taken) for taken in zip(*blocks.rounds(), strict=True)]
    everything = {
        blocks.WorkTile(head, q_block)
        for head, q_block in product(range(blocks.HEADS), range(blocks.Q_BLOCKS))
    }
    for schedule in (by_sm, blocks.as_they_come()):
        taken = [work for work_tiles in schedule for work in work_tiles]
        assert len(taken) == len(everything)
        assert set(taken) == everything
    assert len({blocks.tiles(work_tiles) for work_tiles in by_sm}) == 1  # all are done at once
    assert max(map(blocks.tiles, blocks.as_they_come())) > blocks.tiles(by_sm[0])


def test_the_tiles_of_a_window_are_masked_where_they_must_be():
    """By the keys that each query sees, of the work tiles of v14."""
    descriptor = CpuBackend().descriptor(find_step("v14"), Specialization(128, "bf16", True))
    tile_keys, rows = ragged_map.BLOCK_N, ragged_map.WARP_ROWS
    assert (ragged_map.BLOCK_M, tile_keys) == (descriptor.q_box.rows, descriptor.k_box.rows)
    assert ragged_map.WARPS * rows == ragged_map.BLOCK_M

    def sees(row: int, key: int) -> bool:  # from k_start on
        return row <= key <= row + ragged_map.WINDOW_LEFT

    tiles = ragged_map.num_tiles()
    last = ragged_map.BLOCK_M - 1
    assert any(sees(last, key) for key in range((tiles - 1) * tile_keys, tiles * tile_keys))
    assert not sees(last, tiles * tile_keys)
    for warp in range(ragged_map.WARPS):
        group = warp // 4 * 64
        for tile in range(tiles):
            keys = range(tile * tile_keys, (tile + 1) * tile_keys)
            of_warp = product(range(warp * rows, (warp + 1) * rows), keys)
            of_group = product(range(group, group + 64), keys)
            is_clear = all(sees(*place) for place in of_warp)
            assert (tile in ragged_map.clear_tiles(warp)) == is_clear
            assert (tile < ragged_map.group_tiles(warp)) == any(sees(*place) for place in of_group)


def test_a_ragged_map_begins_a_tensor_before_it():
    rows, end, first = ragged_map.ROWS, ragged_map.END, ragged_map.FIRST
    assert ragged_map.row_of(0, 0) == -rows
    assert ragged_map.row_of(ragged_map.coordinate(first, end), end) == first
    assert ragged_map.coordinate(end, end) == rows
    assert ragged_map.STARTS[1] <= first < end < first + ragged_map.TILE < ragged_map.STARTS[3]


def test_teams_are_v19s():
    names = constants("v19", cluster_merge.COLUMNS)
    drawn = cluster_merge.CLUSTER, cluster_merge.CLUSTERS, cluster_merge.ROWS
    assert drawn == tuple(names[name] for name in ("CLUSTER", "CLUSTERS", "BLOCK_M"))
    # Each block of a whole cluster has as many tiles of keys, and as many eights of columns.
    assert cluster_merge.KEYS % (cluster_merge.CLUSTER * names["BLOCK_N"]) == 0
    assert names["MERGED"] * cluster_merge.CLUSTER == names["COLUMNS_OF_O"]
    halve = "while (log_team > 1 && num_works() << log_team > CLUSTERS * CLUSTER) --log_team;"
    assert halve in source("v19")
    assert cluster_merge.SMALLEST == 2
    by_team = {}
    for work_tiles in range(1, cluster_merge.at_once(cluster_merge.SMALLEST) + 1):
        by_team.setdefault(cluster_merge.team_size(work_tiles), []).append(work_tiles)
    found = [text.text for text in texts(figures()["cluster_merge.svg"])]
    assert [text for text in found if text.endswith("blocks for each")] == [
        f"{work_tiles[0]}–{work_tiles[-1]} work tiles: {team} blocks for each"
        for team, work_tiles in by_team.items()
    ]


def test_own_keys_are_v20s():
    names = constants("v20", 64)
    assert (names["COMPUTING"], names["TILE_ROWS"]) == (own_keys.WARPS, own_keys.WARP_ROWS)
    assert names["BLOCK_N"] == own_keys.KEYS
    assert [len(own_keys.keys_of(warp)) for warp in range(4)] == 4 * [names["WARP_N"]]
    assert [*chain(*map(own_keys.keys_of, range(4)))] == [*range(own_keys.KEYS)]


# ---- how they are drawn


@pytest.fixture(scope="module")
def drawn():
    return figures()


def test_figures_fit_the_page_and_can_be_read(drawn):
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        height = float(root.get("height"))
        assert float(root.get("width")) == WIDTH
        for box in boxes(svg):
            assert 0 <= box.left <= box.right <= WIDTH, (name, box)
            assert 0 <= box.top <= box.bottom <= height, (name, box)
        for text in texts(svg):
            assert 8 <= text.left <= text.right <= WIDTH - 8, (name, text)
            assert 0 < text.top <= text.bottom < height - 4, (name, text)
        assert all(int(text.get("font-size", 12)) >= 11 for text in root.iter(f"{SVG}text"))


def test_texts_do_not_overlap(drawn):
    for name, svg in drawn.items():
        assert not clashes(svg), name


def test_text_in_a_box_fits(drawn):
    """What is centred in a box is as narrow as the smallest box around its middle."""
    for name, svg in drawn.items():
        all_boxes = boxes(svg)
        for text in texts(svg):
            x, y = text.left + text.width / 2, text.top + text.height / 2
            around = [box for box in all_boxes if box.surrounds(x, y)]
            centred = [box for box in around if abs(box.left + box.width / 2 - x) < 0.1]
            if centred:
                assert text.width <= min(box.width for box in centred), (name, text)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_stands_out(theme):
    """The contrast that WCAG 2 wants of text, 4.5, on the page and on every fill."""

    def luminance(role: str) -> float:
        color = COLORS[role][theme]
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(c * weight for c, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    def contrast(*roles: str) -> float:
        darker, lighter = sorted(luminance(role) for role in roles)
        return (lighter + 0.05) / (darker + 0.05)

    assert contrast(ON_ACCENT, ACCENT) >= 4.5
    for fill in (PAGE, EMPTY, *TINTS, *BANK_COLORS):
        assert contrast(INK, fill) >= 4.5, fill
    for color in (MUTED, RED, *MARKS):
        assert contrast(color, PAGE) >= 4.5, color


def test_a_dark_figure_differs_in_its_colors_only(drawn):
    def without_colors(svg: str) -> str:
        return re.sub("#[0-9a-f]{6}", "", svg)

    light = {name for name in drawn if not name.endswith("_dark.svg")}
    assert {name.replace(".svg", "_dark.svg") for name in light} == drawn.keys() - light
    for name in light:
        dark = drawn[name.replace(".svg", "_dark.svg")]
        assert dark != drawn[name]
        assert without_colors(dark) == without_colors(drawn[name])


def test_tiles_figure_numbers_what_is_computed(drawn):
    numbers = [text.text for text in texts(drawn["tiles_of_s.svg"]) if text.text.isdigit()]
    n = blocks.BLOCKS
    assert len(numbers) == 2 * n + n * n + n * (n + 1) // 2  # above, without and with a mask


def test_swizzle_figure_shows_the_computed_wavefronts(drawn):
    found = [text.text for text in texts(drawn["swizzle_banks.svg"])]
    assert [text for text in found if "wavefront" in text] == [
        "8 wavefronts",
        "1 wavefront",
        "1 wavefront",
    ]


def test_descriptor_figure_colours_what_is_read(drawn):
    fills = [box.roles[0] for box in boxes(drawn["wgmma_descriptor.svg"])]
    in_k = [0, 0, 16, 16, 0, 0, 0, 0]  # rows, of the chunks with d 16 to 31
    in_v, in_legend = 2 * 16, 1
    assert [fills.count(color) for color in BANK_COLORS] == [n + in_v + in_legend for n in in_k]
    found = [text.text for text in texts(drawn["wgmma_descriptor.svg"])]
    assert [text for text in found if text.startswith("The next")] == [
        "The next 8 keys: stride, + 1024 bytes",
        "The next 16 d: start + 32 bytes",
        "The next 64 d: start + 16384 bytes",
        "The next 8 keys: stride, + 1024 bytes",
        "The next 64 d: leading, + 16384 bytes",
        "The next 16 keys: start + 2048 bytes",
    ]


def test_mbarrier_figure_shows_alternating_parities(drawn):
    found = [text.text for text in texts(drawn["mbarrier_phases.svg"])]
    for name, parities in (("full", "010"), ("empty", "01")):
        waits = [text for text in found if text.startswith(f"try_wait({name}")]
        assert waits == [f"try_wait({name}, {parity})" for parity in parities]
    phases = [text for text in found if text.startswith("phase ")]
    assert phases == [f"phase {n}: parity {n % 2}" for n in (0, 1, 2, 3, 0, 1, 2)]
