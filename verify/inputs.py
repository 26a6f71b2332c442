"""Inputs of cases: what q, k and v hold, each kind chosen for a mistake it would show.

A function takes the case and a seeded generator, and returns the inputs of the case's operation, in
float32; every value is exact in bf16 and fp16 where it says so. Those of DISTRIBUTIONS are what
`make bench DIST=1` measures, too: they make their tensors on the generator's device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from common.problem import NORMAL
from common.trained_inputs import TrainedInputs

if TYPE_CHECKING:
    from verify.case import Case

Inputs = tuple[torch.Tensor, ...]


def normal(case: Case, rng: torch.Generator) -> Inputs:
    return tuple(_randn(shape, rng) for shape in (case.shape.q, case.shape.kv, case.shape.v))


def _randn(shape: Sequence[int], rng: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=rng, device=rng.device)


def _rank_one(case: Case, rng: torch.Generator, x: torch.Tensor, y: torch.Tensor) -> Inputs:
    """q_i = x_i s and k_j = y_j s for one random s of +-1: logits of scale * head_dim * x_i * y_j.

    x [batch, heads, seq_q] of powers of two and y [batch, kv_heads, seq_k] of integers up to 128
    make every logit exact in bf16 and fp16 when the scale is a power of two, so that torch in the
    input's dtype is a sharp yardstick even where neighbouring bf16 numbers are 64 apart.
    """
    signs = torch.randint(2, (case.shape.head_dim,), generator=rng) * 2.0 - 1
    v = torch.randn(case.shape.v, generator=rng)
    return x[..., None] * signs, y[..., None] * signs, v


def _powers_of_two(shape: Sequence[int], low: int, high: int, rng: torch.Generator) -> torch.Tensor:
    """2^low ... 2^high."""
    return torch.exp2(torch.randint(low, high + 1, tuple(shape), generator=rng).float())


def _signs(shape: Sequence[int], rng: torch.Generator) -> torch.Tensor:
    return torch.randint(2, tuple(shape), generator=rng, device=rng.device) * 2.0 - 1


def large_logits(case: Case, rng: torch.Generator) -> Inputs:
    """Logits up to +-1024 sqrt(head_dim), where exp overflows, next to rows of moderate ones."""
    x = _powers_of_two(case.shape.q[:3], -6, 3, rng) * _signs(case.shape.q[:3], rng)
    return _rank_one(
        case, rng, x, torch.randint(-128, 129, case.shape.kv[:3], generator=rng).float()
    )


def negative_logits(case: Case, rng: torch.Generator) -> Inputs:
    """Every logit far below zero: exp underflows unless a row's own maximum is subtracted."""
    x = -_powers_of_two(case.shape.q[:3], -1, 3, rng)
    return _rank_one(case, rng, x, torch.randint(64, 129, case.shape.kv[:3], generator=rng).float())


def rising_logits(case: Case, rng: torch.Generator) -> Inputs:
    """Keys sorted so that half of the rows' logits rise from tile to tile; the others fall."""
    x = _powers_of_two(case.shape.q[:3], -6, -2, rng) * _signs(case.shape.q[:3], rng)
    y = torch.randint(-128, 129, case.shape.kv[:3], generator=rng).float().sort(dim=-1).values
    return _rank_one(case, rng, x, y)


def sudden_logits(case: Case, rng: torch.Generator) -> Inputs:
    """Normal, but for a few queries some keys, none in the first tile, exceed all before them.

    Every third head of k, counted through the batches, is left alone, so that a kernel that trusts
    a row's first tile must repair some blocks of queries, each for a few of its rows.
    """
    q, k, v = normal(case, rng)
    signs = _signs((case.shape.head_dim,), rng)
    chosen_q = torch.rand(case.shape.q[:3], generator=rng) < 1 / 48
    chosen_k = torch.rand(case.shape.kv[:3], generator=rng) < 1 / 8
    chosen_k.flatten(0, 1)[::3] = False
    chosen_k[:, :, :128] = False
    factors = _powers_of_two(case.shape.q[:3], -2, 3, rng)[..., None]
    q = torch.where(chosen_q[..., None], factors * signs, q)
    return q, torch.where(chosen_k[..., None], 4 * signs, k), v


def sudden_in_late_heads(case: Case, rng: torch.Generator) -> Inputs:
    """Normal, but in the last 2 of every 66 heads a late key exceeds the first tile by 2^130.

    Each of two persistent blocks has computed 32 work tiles before it gets there. Which rows a step
    repairs must not depend on the number of blocks: their last bits differ.
    """
    q, k, v = normal(case, rng)
    signs = _signs((case.shape.head_dim,), rng)
    x = 180 * math.log(2) / (case.scale * case.shape.head_dim * 4)  # the first tile's reach 2^40
    q[:, case.shape.heads * 64 // 66 :] = x * signs
    k[:, case.shape.kv_heads * 64 // 66 :, 3 * case.shape.seq_k // 4] = 4 * signs
    return q, k, v


def sink(case: Case, rng: torch.Generator) -> Inputs:
    """One key leads all others by 8 nats, and some 4,000 others together outweigh it.

    It is the first key of the even heads and the last one of the odd heads.
    """
    signs = _signs((case.shape.head_dim,), rng)
    q, k, v = normal(case, rng)
    q, k = signs + q / 2, k / 2
    leader = 8 / (case.scale * case.shape.head_dim) * signs
    k[:, ::2, 0] = leader
    k[:, 1::2, -1] = leader
    return q, k, v


def graded(
    low: float, high: float, v_factor: float = 1
) -> Callable[[Case, torch.Generator], Inputs]:
    """The last key exceeds all others, by 2^low in the first head up to 2^high in the last one.

    The key in the middle goes half as far. So P relative to the maximum of the first tile takes the
    magnitudes between, and much the same one in all rows of a block: whether a block computes its
    rows again does not depend on one extreme row.
    """

    def inputs(case: Case, rng: torch.Generator) -> Inputs:
        shape = case.shape
        signs = _signs((shape.head_dim,), rng)
        leads = torch.linspace(low, high, shape.heads) * math.log(2)
        q = (leads / (case.scale * shape.head_dim))[:, None, None] * signs
        _, k, v = normal(case, rng)
        k /= 16
        k[:, :, shape.seq_k // 2] = signs / 2
        k[:, :, -1] = signs
        return q.expand(shape.q), k, v_factor * v

    return inputs


def end_of_fp16(case: Case, rng: torch.Generator) -> Inputs:
    """The last key outdoes the first one by 2^15.9998, the others lie 2^16 below the first.

    Relative to the maximum of the first tile, the last key's P is less than 2^16, but in fp16 it
    rounds to infinity; the rest of P adds next to nothing to it. scale * head_dim is 16 ln 2.
    """
    shape = case.shape
    signs = _signs((shape.head_dim,), rng)
    k = (-signs).expand(shape.kv).clone()
    k[:, :, 0] = 0
    k[:, :, -1] = signs
    k[:, :, -1, 0] *= 1 - 2.0**-10
    return signs.expand(shape.q), k, torch.randn(shape.v, generator=rng)


def walks(
    low: int, high: int, start: int = 0, v_factor: float = 1
) -> Callable[[Case, torch.Generator], Inputs]:
    """Each row's logits take steps of low to high at keys of their own, one in 100, from start on.

    So some rows of a tile rise, at different keys and by different amounts, where others fall or
    stay. q picks out a column of k, which holds the logits: integers from -256 to 256, exact in
    bf16 and fp16 when the scale is a power of two.
    """

    def inputs(case: Case, rng: torch.Generator) -> Inputs:
        shape = case.shape
        steps = torch.randint(low, high + 1, shape.kv, generator=rng)
        steps *= torch.rand(shape.kv, generator=rng) < 0.01
        noise = torch.randint(4, shape.kv, generator=rng)
        k = (start + steps.cumsum(2) - noise).clamp(-256, 256).float()
        columns = torch.randint(shape.head_dim, shape.q[:3], generator=rng)
        q = torch.nn.functional.one_hot(columns, shape.head_dim) / case.scale
        return q, k, v_factor * torch.randn(shape.v, generator=rng)

    return inputs


def staircase(case: Case, rng: torch.Generator) -> Inputs:
    """Logits rise by scale * head_dim every 128 keys, v is about 1.

    Where that is little, the maximum grows tile after tile by factors near 1, and what is lost of
    one of them is lost of all that has been summed up so far.
    """
    signs = _signs((case.shape.head_dim,), rng)
    step = torch.arange(case.shape.seq_k) // 128
    v = 1 + torch.randn(case.shape.v, generator=rng) / 4
    return signs.expand(case.shape.q), (step[:, None] * signs).expand(case.shape.kv), v


def deep_logits(case: Case, rng: torch.Generator) -> Inputs:
    """Every logit is below -16000: what stands for -inf in a mask must be lower."""
    y = torch.randint(64, 129, case.shape.kv[:3], generator=rng).float()
    return _rank_one(case, rng, torch.full(case.shape.q[:3], -32.0), y)


def one_hot(case: Case, rng: torch.Generator) -> Inputs:
    """Each query picks out one key, so that o is that key's row of v. Exact in bf16 and fp16.

    Causal: the key is the last visible one or the first hidden one, where a mask off by one shows.
    """
    shape = case.shape
    k = _signs(shape.kv, rng)
    if case.causal:
        diagonal = torch.arange(shape.seq_q) + shape.seq_k - shape.seq_q
        target = diagonal + torch.randint(2, shape.q[:3], generator=rng)
    else:
        target = torch.randint(shape.seq_k, shape.q[:3], generator=rng)
    return _pick(case, rng, k, target)


def one_hot_at_edges(case: Case, rng: torch.Generator) -> Inputs:
    """As one_hot, the key is at an end of what the query sees: the last one there, or the next one.

    At a sequence's end that is another one's key, or one that is not there.
    """
    return _pick_edges(case, rng)


def one_hot_at_first_tiles(case: Case, rng: torch.Generator) -> Inputs:
    """The same, but of 64 queries the first one has its first key, and the last one its last key.

    These are the keys that a tile of queries has in common with the farthest tile of keys.
    """
    return _pick_edges(case, rng, (1, 2))


def one_hot_next_to_tiles(case: Case, rng: torch.Generator) -> Inputs:
    """The same, but of 64 queries the first one has the key after its last one, and the last one
    that before its first one: the only hidden ones of a tile whose mask is left out wrongly.
    """
    return _pick_edges(case, rng, (3, 0))


def _pick_edges(case: Case, rng: torch.Generator, of_tile: tuple[int, int] | None = None) -> Inputs:
    """Queries that pick out the key before the first one that they see, that one, the last one or
    the one after it: 0 to 3, drawn, or given for the first and the last one of 64.
    """
    shape, (left, right) = case.shape, case.window
    target = torch.empty(shape.q[:3], dtype=torch.int64)
    for sequence in case.sequences:
        own = sequence.keys.start + sequence.own_keys("cpu")
        first = (own - left).clamp(min=sequence.keys.start)
        last = (own + right).clamp(max=sequence.keys.stop - 1)
        edges = torch.stack((first - 1, first, last, last + 1), dim=1)  # [seq_q, 4]
        chosen = torch.randint(4, (shape.heads, sequence.seq_q, 1), generator=rng)
        if of_tile:
            chosen[:, ::64], chosen[:, 63::64] = of_tile
        of_heads = edges.expand(shape.heads, -1, -1).gather(2, chosen)[..., 0]
        target[sequence.batch, :, sequence.queries] = of_heads
    return _pick(case, rng, _signs(shape.kv, rng), target)


def _pick(case: Case, rng: torch.Generator, k: torch.Tensor, target: torch.Tensor) -> Inputs:
    """Queries that pick out the target among k's rows of +-1: its index [batch, heads, seq_q]."""
    shape = case.shape
    target = target.clamp(0, shape.seq_k - 1)[..., None].expand(shape.q)
    keys = k.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
    return 4 * keys.gather(2, target), k, torch.randn(shape.v, generator=rng)


def constant(case: Case, rng: torch.Generator) -> Inputs:
    """All logits equal: softmax is uniform and o the mean of the visible rows of v."""
    q, k, v = normal(case, rng)
    return torch.full_like(q, 0.5), torch.full_like(k, 0.5), v


def equal_logits_near_1000(case: Case, rng: torch.Generator) -> Inputs:
    """All logits equal, v near 1000: a sum of 66 of them overflows in fp16, their mean does not."""
    q, k, v = constant(case, rng)
    return q, k, 1000 + 8 * v


def large_values(case: Case, rng: torch.Generator) -> Inputs:
    q, k, v = normal(case, rng)
    return q, k, 4096 * v


def subnormal_values(case: Case, rng: torch.Generator) -> Inputs:
    """v and o are subnormal in fp16, every third v is -0."""
    q, k, v = normal(case, rng)
    v *= 2.0**-18
    v.view(-1)[::3] = -0.0
    return q, k, v


def normal_logits(std: float) -> Callable[[Case, torch.Generator], Inputs]:
    """Normally distributed q, k and v; std is the standard deviation of the logits."""

    def inputs(case: Case, rng: torch.Generator) -> Inputs:
        q, k, v = normal(case, rng)
        return std / (case.scale * math.sqrt(case.shape.head_dim)) * q, k, v

    return inputs


def later_keys_larger(case: Case, rng: torch.Generator) -> Inputs:
    """Logits of standard deviation 2, and 8 from key 256 on: a row's first tiles foretell little.

    Every row finds its maximum after them.
    """
    q, k, v = normal_logits(2)(case, rng)
    k[:, :, 256:] *= 4
    return q, k, v


def own_key(case: Case, rng: torch.Generator) -> Inputs:
    """Each query lies near one key, its own, as tokens do that attend to themselves.

    With the same d added to both, q = 2 (g + d) and k = h + d, a query's own logit is about
    2 sqrt(head_dim) and the others' standard deviation 4. With as many queries as keys the own key
    of query i is key i; in general it is the last one that a causal mask leaves.
    """
    shape = case.shape
    q, k, v = normal_logits(2)(case, rng)
    d = _randn(shape.kv, rng)
    own = (torch.arange(shape.seq_q, device=rng.device) + shape.seq_k - shape.seq_q).clamp(min=0)
    d_of_q = d[:, :, own].repeat_interleave(shape.heads // shape.kv_heads, dim=1)
    return q + 2 / (case.scale * math.sqrt(shape.head_dim)) * d_of_q, k + d, v


def first_key_sink(case: Case, rng: torch.Generator) -> Inputs:
    """The first key takes nearly all of every query's weight, as the first token often does.

    Its logit is 20, by a channel that is large in all queries; those of the others have a standard
    deviation of about 1, so that it leads the largest of some thousand by about 16.
    """
    q, k, v = normal(case, rng)
    k /= case.scale * math.sqrt(case.shape.head_dim)
    q[..., -1] = 4
    k[:, :, 0], k[..., -1] = 0, 0
    k[:, :, 0, -1] = 20 / (4 * case.scale)
    return q, k, v


def equal_keys(case: Case, rng: torch.Generator) -> Inputs:
    """All keys of a head are equal: o is the mean of the visible rows of v, whatever the query."""
    q, k, v = normal(case, rng)
    return q, k[:, :, :1].expand(case.shape.kv), v


def trained(kept: TrainedInputs) -> Callable[[Case, torch.Generator], Inputs]:
    """What `make train` has kept, in each sequence of the batch the same; the rest of the shape is
    common.problem.TRAINED_SHAPE.
    """

    def inputs(case: Case, rng: torch.Generator) -> Inputs:
        return tuple(x.to(rng.device).float().expand(case.shape.q) for x in kept.tensors)

    return inputs


# What common.problem.INPUTS names.
DISTRIBUTIONS: dict[str, Callable[[Case, torch.Generator], Inputs]] = {
    **{name: normal_logits(std) for name, std in NORMAL.items()},
    "later_keys_larger": later_keys_larger,
    "own_key": own_key,
    "first_key_sink": first_key_sink,
    "equal_keys": equal_keys,
}
