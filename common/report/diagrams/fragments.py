"""Which lane holds which element, and which bank: the index mathematics behind the diagrams.

Fragments as the PTX ISA defines them in "Matrix Fragments for mma.m16n8k16 with floating point
type" and in "ldmatrix", for 16-bit elements. There g = lane / 4 is called groupID and t = lane % 4
threadID_in_group; a register holds two elements, half 0 in the lower 16 bits.

Operands of wgmma as in common/runtime/device/wgmma.cuh, in tiles as v08 has TMA write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHUNK_BYTES = 16  # a row of an 8x8 matrix, 4 banks
CHUNKS = 8  # chunks in the 32 banks
ROW_BYTES = CHUNKS * CHUNK_BYTES
EIGHT_ROWS = 8 * ROW_BYTES  # the period of the swizzle
CHUNK, PANEL = CHUNK_BYTES // 2, ROW_BYTES // 2  # elements


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
    """(key, d) of the row that the lane addresses in a [16, 16] block of K.

    Matrices 0 and 1 are b0 and b1 of the first 8 keys, 2 and 3 those of the others.
    """
    return lane % 8 + lane // 16 * 8, lane // 8 % 2 * 8


def v_row(lane: int) -> tuple[int, int]:
    """(key, d) of the row that the lane addresses in a [16, 16] block of V; (row, d) of Q likewise.

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
    """Which group of 4 of the 32 banks, each 4 bytes wide, the chunk at the address fills."""
    return address // CHUNK_BYTES % CHUNKS


def wavefronts(addresses: Sequence[int]) -> list[dict[int, int]]:
    """The passes in which the banks deliver the chunks: bank group -> index of the chunk, for each.

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


def in_tile(rows: int, row: int, column: int) -> int:
    """The address of an element in a tile of swizzled panels [rows, PANEL], one after another."""
    panel, column = divmod(column, PANEL)
    chunk, byte = divmod(2 * column, CHUNK_BYTES)
    return panel * rows * ROW_BYTES + swizzled(row, chunk) + byte


@dataclass(frozen=True)
class Descriptor:
    """Where an operand of wgmma lies, in bytes; its rows are swizzled and 128 bytes long."""

    k_major: bool
    start: int
    leading: int
    stride: int

    def fields(self) -> dict[str, tuple[int, int, int]]:
        """First bit, last bit and value of each field."""
        return {
            "start": (0, 13, self.start // 16),
            "leading": (16, 29, self.leading // 16),
            "stride": (32, 45, self.stride // 16),
            "swizzle": (62, 63, 1),
        }

    def element(self, i: int, k: int) -> int:
        """The address that wgmma computes for A[i, k] or B[k, i]."""
        line, column = (i, k) if self.k_major else (k, i)
        row, eight = line % 8, line // 8
        beyond, byte = divmod(2 * column, ROW_BYTES)
        address = self.start + row * ROW_BYTES + eight * self.stride + byte + beyond * self.leading
        return address ^ address // ROW_BYTES % CHUNKS * CHUNK_BYTES


def k_major(rows: int, d: int) -> Descriptor:
    """Columns d to d + 15 of all rows of a tile of Q or K."""
    panel, column = divmod(d, PANEL)
    return Descriptor(True, panel * rows * ROW_BYTES + 2 * column, 0, EIGHT_ROWS)


def mn_major(rows: int, key: int) -> Descriptor:
    """Rows key to key + 15, all columns, of a tile of V."""
    return Descriptor(False, key * ROW_BYTES, rows * ROW_BYTES, EIGHT_ROWS)


def wgmma_d(thread: int, tile: int, register: int) -> tuple[int, int]:
    """(row, column) in D [64, N] of the float d[tile][register] of a thread of the warpgroup."""
    warp, lane = divmod(thread, 32)
    row, column = d_fragment(lane, register)
    return 16 * warp + row, 8 * tile + column


def parity(phase: int) -> int:
    """The parity to wait for with a phase of an mbarrier; phase -1 counts as complete at first."""
    return phase % 2


def full_phase(use: int) -> int:
    """The phase of the full barrier that consumers wait for in a stage's use, counted from 0."""
    return use


def empty_phase(use: int) -> int:
    """The phase of the empty barrier that the producer waits for before it fills the stage."""
    return use - 1
