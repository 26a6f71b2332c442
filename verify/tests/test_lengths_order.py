"""v14's work tiles: which there are, in which order, and that each is computed by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from common.catalog import find_step
from common.lengths import UNLIMITED, Lengths
from common.problem import Shape
from common.runtime.backend import empty_outputs
from common.runtime.cpu import CpuBackend
from verify.case import Case
from verify.cases import find_cases
from verify.lengths import CaseLengths, sequences_of

STEP = find_step("v14")
BF16, FP16 = torch.bfloat16, torch.float16

# ---- the list of a head's work tiles, the longest first


@dataclass(frozen=True)
class WorkTile:
    """struct WorkTile, before a block takes it for a head."""

    q_start: int
    q_end: int
    k_begin: int
    k_end: int
    own_key: int
    k_start: int
    num_tiles: int
    batch: int


def tile_of(head_dim: int) -> tuple[int, int]:
    """BLOCK_M and BLOCK_N."""
    sizes = {64: (192, 128), 96: (192, 96), 128: (128, 128), 192: (128, 96), 256: (128, 64)}
    return next(size for most, size in sizes.items() if head_dim <= most)


def listed(case: Case, backend: CpuBackend) -> list[WorkTile]:
    """What attention_order lists in a call of the case; and all tickets have been taken."""
    q, k, v = case.make("cpu")
    outputs = empty_outputs(STEP.operation, (q, k, v))
    workspaces = backend.launch(STEP, q, k, v, *outputs, **case.arguments)
    records, order = (workspace.view(torch.int32) for workspace in workspaces)
    count, ticket = order[:2].tolist()
    assert ticket == count * case.shape.heads
    return [WorkTile(*record[:8]) for record in records.view(-1, 10)[:count].tolist()]


def expected_of(case: Case) -> dict[WorkTile, int]:
    """Of each work tile how many tiles of keys it would have, did windows not begin anywhere.

    But no more than a window has with all keys of its BLOCK_M queries.
    """
    block_m, block_n = tile_of(case.shape.head_dim)
    lengths = case.lengths or CaseLengths()
    left, right = lengths.window_left, 0 if case.causal else lengths.window_right
    expected = {}
    for batch, queries, keys in case.sequences:
        for start in range(queries.start, queries.stop, block_m):
            own = keys.stop - (queries.stop - start)
            rows = min(block_m, queries.stop - start)
            first = max(keys.start, own - left)
            behind = min(keys.stop, own + rows + right)
            tile = WorkTile(
                start,
                queries.stop,
                keys.start,
                keys.stop,
                own,
                k_start=first,
                num_tiles=max(1, -(-(behind - first) // block_n)),
                batch=batch,
            )
            most = min(keys.stop, own + block_m + right) - keys.start
            expected[tile] = max(1, -(-min(most, left + right + block_m) // block_n))
    return expected


def length_class(tiles: int) -> tuple[int, bool]:
    """Two classes for each power of two."""
    power = tiles.bit_length() - 1
    return power, 2 * tiles >= 3 << power


def packed(seqlens_q: Sequence[int], seqlens_k: Sequence[int], **options) -> Case:
    """Few columns: the longest of these have many tiles."""
    seqlens = CaseLengths(tuple(seqlens_q), tuple(seqlens_k))
    shape = Shape(1, 1, 1, sum(seqlens_q), sum(seqlens_k), 8)
    return Case("packed", shape, BF16, lengths=seqlens, **options)


# Around all ends of classes up to 17 tiles of 128 keys, in no order.
_AROUND = [128 * tiles + more for tiles in (1, 2, 3, 4, 6, 8, 12, 16) for more in (0, 1)]
MORE = {
    "classes": packed([1] * 16, _AROUND[::3] + _AROUND[1::3] + _AROUND[2::3]),
    "causal_classes": packed([900, 5, 0, 400], [900, 1000, 300, 70], causal=True),
    # Warps look at 32 sequences at once.
    **{
        f"{count}_sequences": packed(
            [i % 32 in (0, 31) for i in range(count)], [i % 5 for i in range(count)]
        )
        for count in (31, 32, 33, 1024, 1025)
    },
    "last_has_queries": packed([0] * 40 + [200], [3] * 40 + [9]),
    "first_has_queries": packed([200] + [0] * 40, [9] + [3] * 40),
    "no_queries_no_keys": packed([0, 3, 0], [0, 0, 2]),
}
NAMES = [  # of verify/lengths_cases.py and, without lengths, of verify/cases.py
    "packed_ragged",
    "packed_causal",
    "packed_80",
    "packed_256",
    "packed_blocks",
    "packed_1100",
    "used",
    "used_causal",
    "used_packed_causal",
    "window",
    "window_left",
    "window_right",
    "window_widest",
    "window_tile_one_more",
    "window_causal_64",
    "window_long_q",
    "window_short_q",
    "packed_window",
    "packed_window_left",
    "packed_window_used",
    "ragged",
    "causal_ragged",
    "causal_short_k",
    "single_query",
    "head_dim_256",
]


@pytest.mark.parametrize("name", [*MORE, *NAMES])
def test_each_work_tile_is_listed_once_the_longest_first(name):
    if name in MORE:
        case = MORE[name]
    else:
        (case,) = find_cases([name], lengths=True)
    expected = expected_of(case)
    tiles = listed(case, CpuBackend())
    assert len(tiles) == len(set(tiles))
    assert set(tiles) == set(expected)
    classes = [length_class(expected[tile]) for tile in tiles]
    assert classes == sorted(classes, reverse=True)
    # Where no window begins it is their own length.
    if not case.lengths or case.lengths.window_left == UNLIMITED:
        assert all(tile.num_tiles == most for tile, most in expected.items())


def test_the_list_does_not_depend_on_the_grid():
    (case,) = find_cases(["packed_ragged"], lengths=True)
    lists = []
    for multiprocessors in (1, 2, 5):
        backend = CpuBackend(seed=multiprocessors)
        backend.multiprocessors = multiprocessors
        lists.append(listed(case, backend))
    assert lists[0] == lists[1] == lists[2]


# ---- a sequence by itself, among others, and in a batch

Tensors = tuple[torch.Tensor, ...]  # q, k and v, or o and lse, of a sequence: [1, heads, seq, ...]


@dataclass(frozen=True)
class Setting:
    """What the sequences of a test have in common."""

    head_dim: int
    dtype: torch.dtype
    causal: bool
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)

    def __str__(self) -> str:
        left, right = ("all" if side == UNLIMITED else side for side in self.window)
        return f"{self.head_dim}{'_causal' if self.causal else ''}_{left}_{right}"

    def make(self, seq_q: int, seq_k: int) -> Tensors:
        """Logits that rise at some keys by so much that m has to be raised."""
        rng = torch.Generator().manual_seed(1000 * seq_q + seq_k)
        q = torch.randn(1, 2, seq_q, self.head_dim, generator=rng)
        k, v = (torch.randn(1, 1, seq_k, self.head_dim, generator=rng) for _ in "kv")
        k[:, :, torch.rand(seq_k, generator=rng) < 0.02] *= 16
        return tuple(x.to(self.dtype) for x in (q, k, v))

    def launch(self, inputs: Tensors, **lengths) -> Tensors:
        outputs = empty_outputs(STEP.operation, inputs)
        for output in outputs:
            output.fill_(torch.nan)
        lengths = Lengths(**lengths)._replace(
            window_left=self.window[0], window_right=self.window[1]
        )
        CpuBackend().launch(
            STEP, *inputs, *outputs, causal=self.causal, softmax_scale=0.25, lengths=lengths
        )
        return outputs

    def packed(self, sequences: Sequence[Tensors], used: Sequence[int] | None = None) -> list:
        """Each sequence's outputs, of all packed in this order."""
        seqlens = CaseLengths(
            tuple(q.shape[2] for q, _, _ in sequences),
            tuple(k.shape[2] for _, k, _ in sequences),
            None if used is None else tuple(used),
        ).on("cpu")
        inputs = tuple(torch.cat(parts, dim=2) for parts in zip(*sequences, strict=True))
        o, lse = self.launch(inputs, **seqlens._asdict())
        places = sequences_of(seqlens, 1, inputs[0].shape[2], inputs[1].shape[2])
        return [(o[:, :, queries], lse[:, :, queries]) for _, queries, _ in places]


SETTINGS = [
    Setting(64, BF16, causal=False),
    Setting(64, BF16, causal=True),
    Setting(64, BF16, causal=False, window=(60, 90)),
    Setting(128, BF16, causal=True, window=(100, UNLIMITED)),
    Setting(256, FP16, causal=True),
]


def same_bits(one: Tensors, other: Tensors) -> bool:
    """Of finite numbers, and -inf in lse."""
    assert not any(x.isnan().any() for x in one)
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_packed_sequence_has_the_bits_that_it_has_alone(setting):
    sizes = [(150, 290), (3, 130), (0, 40), (200, 64), (1, 1), (70, 0), (65, 257)]
    sequences = [setting.make(*size) for size in sizes]
    alone = {i: setting.launch(sequences[i]) for i, size in enumerate(sizes) if all(size)}
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 3, 5, 1, 4, 0, 2], [2, 4, 0, 0, 3, 6, 1]):
        outputs = setting.packed([sequences[i] for i in order])
        for i, (o, lse) in zip(order, outputs, strict=True):
            if i in alone:
                assert same_bits((o, lse), alone[i]), f"sequence {i} of {order}"
            else:
                assert not o.any()
                assert (lse == -torch.inf).all()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_sequence_of_a_batch_has_the_bits_that_it_has_alone(setting):
    """What lies behind its keys is NaN, infinite, or so large that it would raise any m."""
    seqlens = [260, 1, 129, 300, 64]
    sequences = [setting.make(140, seq_k) for seq_k in seqlens]
    alone = [setting.launch(inputs) for inputs in sequences]
    for value in (torch.nan, torch.inf, 30000.0):
        batch = [
            (q, *(torch.nn.functional.pad(x, (0, 0, 0, 300 - x.shape[2]), value=value) for x in kv))
            for q, *kv in sequences
        ]
        used = torch.tensor(seqlens, dtype=torch.int32)
        inputs = tuple(torch.cat(parts) for parts in zip(*batch, strict=True))
        o, lse = setting.launch(inputs, seqused_k=used)
        for i, output in enumerate(alone):
            assert same_bits((o[i : i + 1], lse[i : i + 1]), output), f"sequence {i}, {value}"
        for i, output in enumerate(setting.packed(batch, seqlens)):
            assert same_bits(output, alone[i]), f"packed sequence {i}, {value}"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_neighbours_may_hold_anything(setting):
    sizes = [(150, 290), (3, 130), (200, 64)]
    sequences = [setting.make(*size) for size in sizes]
    alone = [setting.launch(inputs) for inputs in sequences]
    neighbour = setting.make(90, 100)
    for value in (torch.nan, torch.inf, 30000.0):
        others = tuple(torch.full_like(x, value) for x in neighbour)
        packed = [others, sequences[0], others, sequences[1], sequences[2], others]
        outputs = setting.packed(packed)
        for output, own in zip((outputs[1], *outputs[3:5]), alone, strict=True):
            assert same_bits(output, own), value


def test_an_ordinary_call_is_one_of_sequences_of_a_batch():
    setting = SETTINGS[1]
    q, k, v = (torch.cat((x, x.flip(2))) for x in setting.make(140, 290))
    outputs = empty_outputs(STEP.operation, (q, k, v))
    CpuBackend().launch(STEP, q, k, v, *outputs, causal=True, softmax_scale=0.25)
    assert same_bits(outputs, setting.launch((q, k, v)))
