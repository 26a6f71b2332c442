"""The playground of fragments: which thread holds which element of a matrix, in which register.

The script has no formula of its own: it looks up what diagrams/fragments.py computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from ..diagrams.fragments import (
    a_fragment,
    b_fragment,
    d_fragment,
    k_row,
    ldmatrix,
    ldmatrix_trans,
    v_row,
    wgmma_d,
)
from .section import Section, read_markup

WARP, WARPGROUP = 32, 128  # threads
N = 32  # columns of wgmma's D

Element = tuple[int, int]  # row, column
# Of each value that a thread holds, in order: its register, in words and in a cell, the register's
# color, and the element by the thread.
Value = tuple[str, str, int, Callable[[int], Element]]


def section() -> Section:
    return Section("fragments", "fragments", "Fragments", read_markup("fragments"), views())


def views() -> list[dict]:
    """What there is to choose; the first one is shown at first."""
    return [
        {
            "title": "mma.m16n8k16: D += A B",
            "text": "The tensor cores of one warp. With g = lane / 4 and t = lane % 4, g is a row "
            "of A and D and a column of B, and t chooses pairs. A register holds two 16-bit "
            "elements of A or B, or one float of D.",
            "threads": WARP,
            "grids": [
                _grid("A", 16, 16, WARP, _packed("a", 4, a_fragment)),
                _grid("B", 16, 8, WARP, _packed("b", 2, b_fragment)),
                _grid("D", 16, 8, WARP, _floats("d", d_fragment)),
            ],
        },
        {
            "title": "ldmatrix.x4: K from shared memory",
            "text": "Four matrices of 8 × 8. Each lane gives the address of one row of 8 "
            "elements, at the edge of the block, and receives two elements of a row of each "
            "matrix. r0 and r1 are B's b0 and b1 in S = Q Kᵀ for the first 8 keys, r2 and r3 "
            "those for the next.",
            "threads": WARP,
            "grids": [_loaded("K", k_row, ldmatrix)],
        },
        {
            "title": "ldmatrix.x4.trans: V from shared memory",
            "text": "The same with each matrix transposed: a lane receives two elements of a "
            "column, as B of O += P V needs them, since k runs down V's rows. r0 and r1 are b0 "
            "and b1 for the first 8 columns of V, r2 and r3 those for the next.",
            "threads": WARP,
            "grids": [_loaded("V", v_row, ldmatrix_trans)],
        },
        {
            "title": f"wgmma.m64n{N}k16: D, and A from registers",
            "text": "Four warps, each with 16 of the 64 rows: those of the chosen thread's warp "
            "are shown. D repeats mma's D for every 8 columns, A is laid out like mma's. B lies "
            "in shared memory.",
            "threads": WARPGROUP,
            "grids": [
                _grid("D", 64, N, WARPGROUP, _accumulators("d", range(N // 8), wgmma_d)),
                _grid("A", 64, 16, WARPGROUP, _packed("a", 4, _wgmma_a)),
            ],
        },
        {
            "title": "S becomes A: no value moves",
            "text": "Two accumulators of S = Q Kᵀ, side by side, are laid out like one operand A "
            "of O += P V. Each lane turns its own elements of S into those of P and rounds them in "
            "pairs to 16 bits: registers of one color.",
            "threads": WARP,
            "linked": True,
            "grids": [
                _grid("S", 16, 16, WARP, _accumulators("s", range(2), _mma_tile)),
                _grid("P", 16, 16, WARP, _packed("a", 4, a_fragment)),
            ],
        },
    ]


def _wgmma_a(thread: int, register: int, half: int) -> Element:
    warp, lane = divmod(thread, WARP)
    row, column = a_fragment(lane, register, half)
    return 16 * warp + row, column


def _mma_tile(lane: int, tile: int, register: int) -> Element:
    row, column = d_fragment(lane, register)
    return row, 8 * tile + column


def _packed(
    letter: str, registers: int, element: Callable[[int, int, int], Element]
) -> Iterator[Value]:
    for register, half in product(range(registers), range(2)):
        name = f"{letter}{register}"
        words = f"the {('lower', 'upper')[half]} half of {name}"
        yield words, name, register, lambda t, r=register, h=half: element(t, r, h)


def _floats(letter: str, element: Callable[[int, int], Element]) -> Iterator[Value]:
    for register in range(4):
        name = f"{letter}{register}"
        yield name, name, register // 2, lambda t, r=register: element(t, r)


def _accumulators(
    letter: str, tiles: Sequence[int], element: Callable[[int, int, int], Element]
) -> Iterator[Value]:
    for tile, register in product(tiles, range(4)):
        color = tile % 2 * 2 + register // 2  # the register of A that the pair becomes
        words = f"{letter}[{tile}][{register}]"
        yield words, f"[{register}]", color, lambda t, j=tile, r=register: element(t, j, r)


def _loaded(
    name: str, row_of: Callable[[int], Element], element_of: Callable[[int, int], Element]
) -> dict:
    """A block [16, 16] in shared memory, with the lanes' rows."""

    def element(lane: int, matrix: int, half: int) -> Element:
        (row, column), (i, j) = row_of(8 * matrix), element_of(lane, half)
        return row + i, column + j

    grid = _grid(name, 16, 16, WARP, _packed("r", 4, element))
    return grid | {"addresses": [row_of(lane) for lane in range(WARP)]}


def _grid(name: str, rows: int, columns: int, threads: int, held: Iterator[Value]) -> dict:
    """Each element's holder, row by row, as thread * values + value."""
    values = list(held)
    holders = {
        element(thread): thread * len(values) + n
        for thread in range(threads)
        for n, (*_, element) in enumerate(values)
    }
    words, cells, colors, _ = zip(*values, strict=True)
    return {
        "name": name,
        "rows": rows,
        "columns": columns,
        "words": words,
        "cells": cells,
        "colors": colors,
        "holders": [holders[place] for place in product(range(rows), range(columns))],
    }
