"""TMA copies and stmatrix: the CPU twins copy what a GPU does.

Where a swizzle puts an element is written down here once more, from the PTX ISA.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from common.paths import ROOT
from common.step import read_step

BF16 = torch.bfloat16

BATCH, HEADS, SEQ, ROWS = 2, 3, 20, 12  # of q; of a box
HEAD_DIMS = {"none": 64, "32B": 72, "64B": 80, "128B": 88}
COLUMNS = {"none": 24, "32B": 16, "64B": 32, "128B": 64}
CHUNKS = {"none": 1, "32B": 2, "64B": 4, "128B": 8}  # of 16 bytes, that change places


@dataclass(frozen=True)
class Copied:
    """Inputs and results of verify/instructions/tma.cu, as 16-bit integers."""

    swizzle: str
    q: np.ndarray  # [batch, heads, seq, head_dim]
    o: np.ndarray
    places: np.ndarray  # [boxes, 4]: d, row, head, batch of each box's first element
    in_shared: np.ndarray  # [boxes, ROWS * columns]
    matrices: np.ndarray  # [boxes, 32, 8]
    missing: np.ndarray  # [boxes]: elements that are not in o once the box has been stored


def make_places(columns: int, head_dim: int) -> torch.Tensor:
    """Boxes inside, across each edge and each corner, and outside."""
    ends = [
        [-columns, -8, 0, 8, head_dim - 8, head_dim],
        [-ROWS, -ROWS + 1, 0, 2, SEQ - 1, SEQ],
        [-1, 0, 1, HEADS],
        [-1, 0, 1, BATCH],
    ]
    inside = [0, 0, 1, 1]
    places = [
        [at if axis == i else inside[i] for i in range(4)] for axis in range(4) for at in ends[axis]
    ]
    rng = np.random.default_rng(0)
    places += [[int(rng.choice(end)) for end in ends] for _ in range(30)]
    places += [[0, -2000, 0, 0], [30000, 30000, 30000, 30000]]
    return torch.tensor(places, dtype=torch.int16)


@pytest.fixture(scope="module", params=HEAD_DIMS)
def copied(make_backend, request) -> Copied:
    backend, swizzle = make_backend(), request.param
    head_dim, columns = HEAD_DIMS[swizzle], COLUMNS[swizzle]
    # Stored as [batch, seq, heads, head_dim], all elements different and none of them 0.
    numbers = torch.arange(1, 1 + BATCH * SEQ * HEADS * head_dim).to(torch.int16).view(BF16)
    q = numbers.view(BATCH, SEQ, HEADS, head_dim).transpose(1, 2).to(backend.device)
    places = make_places(columns, head_dim)
    k = torch.zeros(len(places), head_dim, dtype=torch.int16)
    k[:, :4] = places
    k = k.view(BF16)[None, None].expand(BATCH, HEADS, -1, -1).to(backend.device)
    o = torch.full_like(q.view(torch.int16), -1).view(BF16)  # poison, on either backend
    box, matrices = ROWS * columns, 32 * 8
    lse = torch.full((len(places), (box + matrices) // 2 + 1), torch.nan, device=backend.device)
    step = read_step(ROOT / "verify" / "instructions" / "tma.cu")
    backend.launch(step, q, k, k, o, lse, causal=False, softmax_scale=1.0)
    in_shared, matrices, _ = np.split(
        lse.cpu().numpy().view(np.int16), [box, box + matrices], axis=1
    )
    q, o = (t.cpu().contiguous().view(torch.int16).numpy() for t in (q, o))
    return Copied(
        swizzle,
        q,
        o,
        places.numpy(),
        in_shared,
        matrices.reshape(-1, 32, 8),
        lse[:, -1].cpu().numpy(),
    )


def indices(copied: Copied, place: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Which elements of a box [ROWS, columns] are in the tensor; the indices of all of them."""
    row, col = np.indices((ROWS, COLUMNS[copied.swizzle]))
    d, r, head, batch = place[0] + col, place[1] + row, place[2] + 0 * row, place[3] + 0 * row
    index = (batch, head, r, d)
    inside = np.logical_and.reduce(
        [(i >= 0) & (i < size) for i, size in zip(index, copied.q.shape, strict=True)]
    )
    return inside, index


def test_load(copied):
    columns, chunks = COLUMNS[copied.swizzle], CHUNKS[copied.swizzle]
    row, col = np.indices((ROWS, columns))
    byte = (row * columns + col) * 2
    chunk = byte // 16 ^ byte // 128 % chunks  # of 16 bytes; changes with the 128 bytes it is in
    at = (16 * chunk + byte % 16) // 2
    boxes_with_zeros = 0
    for place, in_shared in zip(copied.places.astype(int), copied.in_shared, strict=True):
        inside, index = indices(copied, place)
        expected = np.zeros((ROWS, columns), np.int16)
        expected[inside] = copied.q[tuple(i[inside] for i in index)]
        np.testing.assert_array_equal(in_shared[at], expected)
        boxes_with_zeros += not inside.all()
    assert 20 < boxes_with_zeros < len(copied.places)


def test_store(copied):
    """Each box is stored where it was loaded from, and nothing else changes."""
    expected = np.full_like(copied.q, -1)  # poison
    for place in copied.places.astype(int):
        if place.min() < 0:
            continue
        inside, index = indices(copied, place)
        at = tuple(i[inside] for i in index)
        expected[at] = copied.q[at]
    assert 0.05 < (expected != -1).mean() < 0.95
    np.testing.assert_array_equal(copied.o, expected)
    assert (copied.missing == 0).all()


def test_stmatrix(copied):
    lane = np.arange(32)
    # Lane i names row i % 8 of matrix i / 8.
    for matrices in copied.matrices:
        np.testing.assert_array_equal(matrices[(5 * lane + 3) % 32], np.arange(256).reshape(32, 8))
