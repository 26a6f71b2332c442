"""v19 has a team of a cluster's blocks share a work tile's keys: which blocks those are, what each
has, and what comes of it.

The more work tiles, the smaller the teams, and the more blocks leave at once. The checker's cases
have few of the sizes where that changes, and no columns that smaller teams cannot share equally.
Calls with these are here, with the mutants that only they reject: verify/mutants/cluster_merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import torch

from common.catalog import find_step
from common.problem import Shape
from common.runtime.cpu import CpuBackend
from common.step import MULTIPROCESSORS, Step
from verify.case import Case
from verify.check import launch
from verify.inputs import walks
from verify.layouts import packed, padded, transposed
from verify.tests.more_multiprocessors import (
    Call,
    OnMoreMultiprocessors,
    ask_schedule,
    write_schedule,
)
from verify.tests.test_cluster import in_clusters

STEP = find_step("v19")
BF16, FP16 = torch.bfloat16, torch.float16

# ---- what each block has

CLUSTER, BLOCK_M = 8, 64
HEAD_DIMS = 8, 40, 256  # 1, 5 and 32 eights of columns
MOST_KEYS = 2**31 - 128  # in whole tiles, of a seq_k of 32 bits


@dataclass(frozen=True)
class WorkTile:
    batch: int
    kv_head: int
    rows: list[tuple[int, int]]  # the head and query of each


@dataclass(frozen=True)
class Sizes:
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1
    seq_q: int = 1
    seq_k: int = 1000
    causal: bool = False

    @property
    def blocks(self) -> int:
        return CLUSTER * len(self.work_tiles)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def work_tiles(self) -> list[WorkTile]:
        """In order."""
        rows = self.group * self.seq_q
        return [
            WorkTile(
                batch,
                kv_head,
                [
                    (kv_head * self.group + row % self.group, row // self.group)
                    for row in range(first, min(first + BLOCK_M, rows))
                ],
            )
            for batch in range(self.batch)
            for kv_head in range(self.kv_heads)
            for first in range(0, rows, BLOCK_M)
        ]

    def visible_keys(self, query: int) -> int:
        if not self.causal:
            return self.seq_k
        return max(0, min(self.seq_k, query + self.seq_k - self.seq_q + 1))

    def __str__(self) -> str:
        mask = "_causal" if self.causal else ""
        return f"{self.batch}x{self.heads}of{self.kv_heads}x{self.seq_q}x{self.seq_k}{mask}"


# Sizes, and how many blocks share a work tile: fewer where not all would run at once, in 14
# clusters.
TEAMS = [
    (Sizes(), 8),
    (Sizes(seq_k=1), 8),
    (Sizes(seq_q=64, seq_k=1024), 8),
    (Sizes(seq_q=65, seq_k=1025), 8),
    (Sizes(seq_k=MOST_KEYS), 8),
    (Sizes(14, 14), 8),
    (Sizes(15, 15), 4),  # half of the last cluster's blocks leave
    (Sizes(16, 16, seq_k=200), 4),
    (Sizes(17, 17), 4),
    (Sizes(7, 7, 4), 4),
    (Sizes(29, 29), 2),  # six of them
    (Sizes(10, 10, 3, seq_k=100), 2),
    (Sizes(31, 31, seq_k=MOST_KEYS), 2),
    (Sizes(56, 56), 2),
    (Sizes(57, 57), 2),  # in two rounds
    # Groups of heads, in which work tiles begin and end.
    (Sizes(6, 2, 3, 39, 500), 8),
    (Sizes(6, 2, 3, 62, 500), 4),
    (Sizes(700, 7, 1, 1, 300), 8),
    (Sizes(20, 4, 3, 30, 300), 2),
    # The first rows see fewer keys, down to none.
    (Sizes(2, 2, 1, 256, 256, causal=True), 8),
    (Sizes(2, 1, 1, 135, 350, causal=True), 8),
    (Sizes(3, 1, 1, 310, 190, causal=True), 4),
    (Sizes(2, 2, 3, 300, 270, causal=True), 2),
]
CALLED = [sizes for sizes, _ in TEAMS]

# Each block leaves whether it leaves at once, its team, batch, tiles of keys and columns, the
# blocks that it takes for its team's, and its rows' number, heads and queries.
WIDTH = 9 + CLUSTER + 2 * BLOCK_M
SCHEDULE = f"""
    float* to = p.lse + {WIDTH} * block;
    if (block >= num_works() << log_team_size()) {{
        *to = 1;
        return;
    }}
    const Work work(shape);
    *to++ = 0, *to++ = work.team, *to++ = work.batch, *to++ = work.kv_head;
    *to++ = work.first, *to++ = work.end;
    *to++ = work.rank * work.merged(), *to++ = work.merged_here(), *to++ = work.num_rows;
    for (int n = 0; n < CLUSTER; ++n) *to++ = n < work.team ? work.in_cluster(n) : 0;
    for (int row = 0; row < work.num_rows; ++row)
        *to++ = work.head(row), *to++ = work.query(row);
"""


def write(folder: Path, step: Step) -> Step:
    return in_clusters(
        write_schedule(folder, step, SCHEDULE, CALLED), f"__cluster_dims__({CLUSTER})"
    )


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    return write(tmp_path_factory.mktemp("schedule"), STEP)


@pytest.mark.parametrize(("sizes", "team"), TEAMS, ids=str)
def test_shares(schedule, sizes, team):
    check_shares(schedule, sizes, team, HEAD_DIMS[0])


@pytest.mark.parametrize("head_dim", HEAD_DIMS[1:])
def test_shares_of_columns(schedule, head_dim):
    for sizes, team in TEAMS:
        check_shares(schedule, sizes, team, head_dim)


def check_schedule(step: Step) -> None:
    with TemporaryDirectory() as folder:
        schedule = write(Path(folder), step)
        for sizes, team in TEAMS:
            check_shares(schedule, sizes, team, HEAD_DIMS[0])


def check_shares(schedule: Step, sizes: Sizes, team: int, head_dim: int) -> None:
    work_tiles = sizes.work_tiles
    blocks = ask_schedule(schedule, sizes, CALLED.index(sizes), WIDTH, head_dim)
    stay = [number for number, (leaves, *_) in enumerate(blocks) if not leaves]
    assert stay == list(range(team * len(work_tiles)))

    for number in range(0, len(stay), team):
        work = work_tiles[number // team]
        last_query = work.rows[-1][1]
        tiles = -(-sizes.visible_keys(last_query) // (128 if head_dim <= 128 else 64))
        # Each has as many tiles, or one more, from where those of the one before end; and columns
        # likewise, but the last ones may have fewer, or none.
        cuts = [rank * tiles // team for rank in range(team + 1)]
        next_column = 0
        for rank in range(team):
            _, of, batch, kv_head, first, end, column, columns, *rest = blocks[number + rank]
            assert (of, batch, kv_head) == (team, work.batch, work.kv_head)
            assert [first, end] == cuts[rank : rank + 2]
            assert column == next_column or columns == 0
            next_column += columns
            num_rows, peers, rows = rest[0], rest[1 : team + 1], rest[CLUSTER + 1 :]
            assert peers == [(number + n) % CLUSTER for n in range(team)]
            assert num_rows == len(work.rows)
            assert list(zip(rows[0::2], rows[1::2], strict=True))[:num_rows] == work.rows
        assert next_column == head_dim // 8


# ---- what comes of it


def call(name: str, shape: Shape, dtype: torch.dtype, **options) -> Call:
    """The number of multiprocessors is nothing that v19 depends on."""
    return Call(Case(name, shape, dtype, **options), MULTIPROCESSORS)


CALLS = {
    call.case.name: call
    for call in (
        # One work tile more than there are teams of 8: teams of 4, in half of the last cluster.
        # They have more blocks than tiles of keys.
        call("works_15", Shape(3, 5, 5, 5, 300, 64), BF16, inputs=walks(2, 25)),
        # As many of groups of 3 heads, in which work tiles begin and end, and the first rows of
        # which see no key.
        call("groups_of_3", Shape(1, 3, 1, 310, 190, 64), BF16, causal=True),
        # Of 9 eights of columns the blocks of a team of 4 merge 3, 3, 3 and 0.
        call(
            "columns_72",
            Shape(1, 17, 17, 3, 560, 72),
            FP16,
            inputs=walks(2, 25),
            layouts=(transposed, padded, packed, padded),
        ),
        # One more than there are teams of 4: teams of 2, in a quarter of the last cluster.
        call("works_29", Shape(1, 29, 29, 2, 1, 8), FP16),
        # In three quarters. Each block has more tiles than stages, and some rows fall from one to
        # the next by more than a float's exponents go.
        call("works_31", Shape(1, 31, 31, 1, 330, 256), FP16, inputs=walks(-300, 300)),
        # Work tiles that see no key, and rows.
        call("hidden_keys", Shape(3, 1, 1, 600, 270, 64), BF16, causal=True),
    )
}


@pytest.mark.parametrize("kv_heads", [9, 19])  # in teams of 4 and of 2
def test_a_row_does_not_depend_on_those_beside_it(kv_heads):
    """Where its batch and its head are in the call, and what the others are, changes no bit."""
    case = Case("turned", Shape(2, 2 * kv_heads, kv_heads, 2, 200, 64), BF16)
    inputs = case.make("cpu")
    first, _ = launch(STEP, case, CpuBackend(0), inputs)
    turned, _ = launch(STEP, case, CpuBackend(1), tuple(x.flip(0, 1).contiguous() for x in inputs))
    for x, y in zip(first, turned, strict=True):
        assert torch.equal(x, y.flip(0, 1))
    others = tuple(torch.cat([x[:1], 3 * x[1:]]) for x in inputs)
    beside, _ = launch(STEP, case, CpuBackend(0), others)
    for x, y in zip(first, beside, strict=True):
        assert torch.equal(x[0], y[0])
        assert not torch.equal(x[1], y[1])


# ---- the calls, and with one thing wrong


class TestCalls(OnMoreMultiprocessors):
    step = STEP
    calls = CALLS
    tests: ClassVar = {"schedule": check_schedule}
    folder = "cluster_merge"
