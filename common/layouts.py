"""Which lane holds which element, and which bank: the index mathematics behind the diagrams.

Fragments as the PTX ISA defines them in "Matrix Fragments for mma.m16n8k16 with floating point
type" and in "ldmatrix", for 16-bit elements. There g = lane / 4 is called groupID and t = lane % 4
threadID_in_group; a register holds two elements, half 0 in the lower 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

CHUNK_BYTES = 16  # a row of an 8x8 matrix, 4 banks
CHUNKS = 8  # chunks in the 32 banks
ROW_BYTES = CHUNKS * CHUNK_BYTES


def a_fragment(lane: int, register: int, half: int) -> tuple[int, int]:
    """(row, column) in A [16, 16] of a[register], 0 to 3."""
    g, t = divmod(lane, 4)
    return g + 8 * (register % 2), 2 * t + half + 8 * (register // 2)


def b_fragment(lane: int, register: int, half: int) -> tuple[int, int]:
    """(row, column) in B [16, 8] of b0 or b1."""
    g, t = divmod(lane, 4)
    return 2 * t + half + 8 * register, g


def d_fragment(lane: int, register: int) -> tuple[int, int]:
    """(row, column) in D [16, 8] of the float d[register], 0 to 3."""
    g, t = divmod(lane, 4)
    return g + 8 * (register // 2), 2 * t + register % 2


def ldmatrix(lane: int, half: int) -> tuple[int, int]:
    """(row, column) in an 8x8 matrix of what ldmatrix gives the lane."""
    g, t = divmod(lane, 4)
    return g, 2 * t + half


def ldmatrix_trans(lane: int, half: int) -> tuple[int, int]:
    """(row, column) in an 8x8 matrix of what ldmatrix.trans gives the lane."""
    row, column = ldmatrix(lane, half)
    return column, row


def k_row(lane: int) -> tuple[int, int]:
    """(key, d) of the row that the lane names in a [16, 16] block of K.

    Matrices 0 and 1 are b0 and b1 of the first 8 keys, 2 and 3 those of the others.
    """
    return lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8


def v_row(lane: int) -> tuple[int, int]:
    """(key, d) of the row that the lane names in a [16, 16] block of V; so for (row, d) of Q.

    Matrices 0 and 1 are b0 and b1 of the first 8 columns of V, 2 and 3 those of the others.
    """
    return lane % 16, lane // 16 * 8


def plain(row: int, chunk: int) -> int:
    """The address of a chunk in a tile whose rows lie end to end."""
    return row * ROW_BYTES + chunk * CHUNK_BYTES


def padded(row: int, chunk: int) -> int:
    """The address of a chunk in a tile with a chunk of padding after each row."""
    return row * (ROW_BYTES + CHUNK_BYTES) + chunk * CHUNK_BYTES


def swizzled(row: int, chunk: int) -> int:
    """The address of a chunk in a tile whose rows each permute their chunks."""
    return plain(row, chunk ^ row % CHUNKS)


def bank_group(address: int) -> int:
    """Which 4 of the 32 banks, 4 bytes wide each, the chunk at the address fills."""
    return address // CHUNK_BYTES % CHUNKS


def wavefronts(addresses: Sequence[int]) -> list[dict[int, int]]:
    """The passes in which the banks deliver different chunks: bank group -> index of the chunk.

    A bank delivers one word a pass.
    """
    passes: list[dict[int, int]] = []
    for index, address in enumerate(addresses):
        group = bank_group(address)
        free = next((one for one in passes if group not in one), None)
        if free is None:
            passes.append(free := {})
        free[group] = index
    return passes
