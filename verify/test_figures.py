"""The diagrams: who holds what, as the PTX ISA says it, and how they are drawn."""

from __future__ import annotations

from itertools import product
from xml.etree import ElementTree

import pytest

from common.drawing import WIDTH
from common.figures import figures
from common.layouts import (
    CHUNKS,
    a_fragment,
    b_fragment,
    d_fragment,
    k_row,
    ldmatrix,
    ldmatrix_trans,
    padded,
    plain,
    swizzled,
    v_row,
    wavefronts,
)

LANES, HALVES = range(32), range(2)
SVG = "{http://www.w3.org/2000/svg}"


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


@pytest.fixture(scope="module")
def drawn():
    return {name: ElementTree.fromstring(svg) for name, svg in figures().items()}


def test_figures_fit_the_page_and_can_be_read(drawn):
    for svg in drawn.values():
        height = float(svg.get("height"))
        assert float(svg.get("width")) == WIDTH
        for box in svg.iter(f"{SVG}rect"):
            assert 0 <= float(box.get("x", 0)) <= WIDTH - float(box.get("width"))
            assert 0 <= float(box.get("y", 0)) <= height - float(box.get("height"))
        for text in svg.iter(f"{SVG}text"):
            assert int(text.get("font-size")) >= 11
            assert 0 < float(text.get("y")) < height


def test_swizzle_figure_shows_the_computed_wavefronts(drawn):
    texts = [text.text for text in drawn["swizzle_banks.svg"].iter(f"{SVG}text")]
    assert [text for text in texts if "wavefront" in text] == [
        "8 wavefronts",
        "1 wavefront",
        "1 wavefront",
    ]
