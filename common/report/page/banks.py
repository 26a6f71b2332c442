"""The playground of bank conflicts: which lane of a warp meets which bank of shared memory.

The script computes wavefronts as simt/banks.h does; what a warp accesses, and the tiles of some
steps to start from, are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..diagrams.fragments import CHUNK, CHUNK_BYTES, CHUNKS, ROW_BYTES, d_fragment, k_row, v_row
from .section import Section, read_markup

LANES = range(32)
FLOAT, HALF = 4, 2  # bytes
VEC = 8  # 16-bit elements that a lane loads at once
HEAD_DIM, KEYS = 128, 64  # of the tiles of K, V, S and P
V02_TILE_D = 32

Place = tuple[int, int]  # row, byte in it


@dataclass(frozen=True)
class Access:
    """What a warp does: each lane accesses so many bytes at a place, or None if it stays away."""

    title: str
    lane_bytes: int
    place: Callable[[int], Place | None]  # lane ->


def _elements(place: Callable[[int], Place], size: int) -> Callable[[int], Place]:
    """From (row, column) of elements of so many bytes."""
    return lambda lane: (place(lane)[0], place(lane)[1] * size)


ACCESSES = {
    "word_row": Access("4 bytes a lane, along a row", 4, lambda t: (0, 4 * t)),
    "word_column": Access("4 bytes a lane, down a column", 4, lambda t: (t, 0)),
    "word_pairs": Access(
        "4 bytes a lane, pairs of an accumulator [8, 8]",
        4,
        _elements(lambda t: d_fragment(t, 0), HALF),
    ),
    "word_same": Access("4 bytes, the same for all lanes", 4, lambda t: (0, 0)),
    "double_row": Access("8 bytes a lane, along a row", 8, lambda t: (0, 8 * t)),
    "double_column": Access("8 bytes a lane, down a column", 8, lambda t: (t, 0)),
    "double_halves": Access("8 bytes a lane, two lanes a row", 8, lambda t: (t // 2, t % 2 * 8)),
    "quad_row": Access(
        "16 bytes a lane, eight lanes a row", 16, lambda t: (t // 8, t % 8 * CHUNK_BYTES)
    ),
    "quad_column": Access("16 bytes a lane, down a column", 16, lambda t: (t, 0)),
    "quad_alternate": Access(
        "16 of every 32 bytes, 16 lanes a row", 16, lambda t: (t // 16, t % 16 * FLOAT * VEC)
    ),
    "quad_halves": Access(
        "16 of every 32 bytes, two lanes a row", 16, lambda t: (t // 2, t % 2 * FLOAT * VEC)
    ),
    "quad_same": Access("16 bytes, the same for all lanes", 16, lambda t: (0, 0)),
    "matrix": Access("ldmatrix.x1: 8 rows", 16, lambda t: (t, 0) if t < CHUNKS else None),
    "matrices_q": Access(
        "ldmatrix.x4 or stmatrix.x4: [16, 16] of Q, V or O", 16, _elements(v_row, HALF)
    ),
    "matrices_k": Access("ldmatrix.x4: [16, 16] of K", 16, _elements(k_row, HALF)),
}


@dataclass(frozen=True)
class Swizzle:
    """Permutes chunks: XORs the lowest three bits of a chunk's number by bits of another number.

    That is the row's (by_row, in the steps' own swizzle) or that of the 128 bytes of memory which
    the chunk would lie in (in TMA's). It is meant for rows of a multiple of row_bytes, or of just
    as many.
    """

    title: str
    by_row: bool
    mask: int
    row_bytes: int


SWIZZLES = {
    "none": Swizzle("none", False, 0, 0),
    "row": Swizzle("chunk ^ row % 8, in the kernel", True, CHUNKS - 1, ROW_BYTES),
    **{
        f"{size}B": Swizzle(f"{size} bytes, as TMA writes", False, size // CHUNK_BYTES - 1, size)
        for size in (ROW_BYTES // 4, ROW_BYTES // 2, ROW_BYTES)
    },
}


@dataclass(frozen=True)
class Tile:
    """A tile of a step or experiment, and an access that its static record counts.

    code is the beginning of that access in the source.
    """

    name: str
    code: str
    title: str
    pitch: int  # bytes
    swizzle: str
    access: str


K_PITCH = HALF * HEAD_DIM
TILES = (
    Tile(
        "v02",
        "load_float4(&tile.k",
        "K, rows of 32 floats and 4 more",
        FLOAT * (V02_TILE_D + 4),
        "none",
        "quad_column",
    ),
    Tile(
        "v03",
        "store_float4(&tile[r][d + i]",
        "writes K or V as floats",
        FLOAT * HEAD_DIM,
        "none",
        "quad_alternate",
    ),
    Tile(
        "v05",
        "store_float4(&warp.s",
        "writes the factors for O",
        FLOAT * (KEYS + CHUNK),
        "none",
        "quad_halves",
    ),
    Tile("v05", "store_float4(&warp.p", "writes P", HALF * (KEYS + CHUNK), "none", "double_halves"),
    Tile(
        "v06_no_padding",
        "ldmatrix_x4(k_frag",
        "reads K",
        K_PITCH,
        "none",
        "matrices_k",
    ),
    Tile(
        "v06",
        "ldmatrix_x4(k_frag",
        "reads K, rows longer by 16 bytes",
        K_PITCH + CHUNK_BYTES,
        "none",
        "matrices_k",
    ),
    Tile("v07", "ldmatrix_x4(k_frag", "reads K, swizzled", K_PITCH, "row", "matrices_k"),
    Tile("v07", "ldmatrix_x4_trans(v_frag", "reads V, swizzled", K_PITCH, "row", "matrices_q"),
    Tile("v08", "stmatrix_x4(", "writes O for TMA", ROW_BYTES, "128B", "matrices_q"),
)
START = "v06_no_padding"


def section() -> Section:
    data = {
        "accesses": [
            {
                "name": name,
                "title": access.title,
                "laneBytes": access.lane_bytes,
                "places": [access.place(lane) for lane in LANES],
            }
            for name, access in ACCESSES.items()
        ],
        "swizzles": [
            {
                "name": name,
                "title": one.title,
                "byRow": one.by_row,
                "mask": one.mask,
                "rowBytes": one.row_bytes,
            }
            for name, one in SWIZZLES.items()
        ],
        "tiles": [
            {
                "title": f"{tile.name.replace('_', ' ')}: {tile.title}",
                "pitch": tile.pitch,
                "swizzle": tile.swizzle,
                "access": tile.access,
            }
            for tile in TILES
        ],
        "start": [tile.name for tile in TILES].index(START),
    }
    return Section("banks", "banks", "Banks of shared memory", read_markup("banks"), data)
