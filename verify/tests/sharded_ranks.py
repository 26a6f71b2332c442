"""What the ranks of test_sharded.py do: each is a process, whose findings the tests read.

A launch is a number of ranks that go through one list of things. So that not each of them has to
import torch, a fork server does once. torch.distributed finds what torchrun would give it: the
ranks in the environment, and a store in the process that has started them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from common import attention, sharded
from common.operation import BACKWARD
from common.problem import Shape
from common.runtime import cpu
from common.sharded import order, ring, ulysses
from verify.case import Case
from verify.inputs import Inputs, normal
from verify.layouts import (
    Layout,
    contiguous,
    misaligned_rows,
    misaligned_start,
    packed,
    padded,
    transposed,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TIMEOUT_S = 60.0  # of groups in which nobody fails: a step may have to be compiled
SHORT_S = 5.0  # of those in which somebody does
LAUNCH_S = 300  # that a launch may take, whatever happens
OUTPUTS = ("o", "lse", "dq", "dk", "dv")

Findings = dict[str, object]


@dataclass(frozen=True)
class Sharded:
    """A case of backward, whose whole inputs the ranks share out.

    lengths: of q and of k, by rank, one after the other; without, what shard() gives. layouts: of
    q, k and v on a rank, one for each rank or for all. sums: dout is that of .sum().backward().
    """

    case: Case
    ranks: int
    method: str = "ring"
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    layouts: tuple[tuple[Layout, Layout, Layout], ...] = ((contiguous,) * 3,)
    dout: Layout = contiguous
    sums: bool = False
    deterministic: bool = False
    backward: bool = True

    @property
    def name(self) -> str:
        return f"{self.method}-{self.ranks}-{self.case.name}"

    def run(self, device: str, group: sharded.Group = None) -> dict[str, Tensor]:
        """The rank's part of each output."""
        rank = dist.get_rank()
        q, k, v, _, _, dout = self.case.make(device)
        parts = [self._part(t, which, group) for t, which in ((q, 0), (k, 1), (v, 1), (dout, 0))]
        layouts = (*self.layouts[rank % len(self.layouts)], self.dout)
        placed = []
        for part, layout in zip(parts, layouts, strict=True):
            _, view = layout(part.shape, dtype=part.dtype, device=device)
            own = tuple(slice(1) if stride == 0 else slice(None) for stride in view.stride())
            view[own].copy_(part[own])
            placed.append(view.requires_grad_(len(placed) < 3 and self.backward))
        *inputs, dout = placed
        o, lse = sharded.attention(
            *inputs,
            group,
            causal=self.case.causal,
            softmax_scale=self.case.softmax_scale,
            method=self.method,
            deterministic=self.deterministic,
            return_lse=True,
        )
        assert (o.shape, o.dtype) == (inputs[0].shape, inputs[0].dtype)
        assert (lse.shape, lse.dtype, lse.requires_grad) == (o.shape[:3], FP32, False)
        if not self.backward:
            gradients = ()
        elif self.sums:
            o.sum().backward()
            gradients = [t.grad for t in inputs]
        else:
            gradients = autograd.grad(o, inputs, dout)
        outputs = (o, lse, *gradients)
        return {
            name: t.detach().cpu().contiguous() for name, t in zip(OUTPUTS, outputs, strict=False)
        }

    def _part(self, t: Tensor, which: int, group: sharded.Group) -> Tensor:
        if self.lengths is None:
            return sharded.shard(t, group, dim=2)
        return t.split(self.lengths[which], 2)[dist.get_rank()]


def far_apart(case: Case, rng: torch.Generator) -> Inputs:
    """Normal, with logits 30 times as large: most weights are 0 or 1."""
    q, k, v = normal(case, rng)
    return 30 * q, k, v


def ones(case: Case, rng: torch.Generator) -> Tensor:
    return torch.ones(case.shape.q)


def make(
    name: str,
    ranks: int,
    shape: Shape,
    dtype: torch.dtype = BF16,
    *,
    causal: bool = True,
    inputs: Callable[..., Inputs] = normal,
    softmax_scale: float | None = None,
    methods: Sequence[str] = ("ring",),
    sums: bool = False,
    **options,
) -> list[Sharded]:
    """The case by each of the methods."""
    more = {"dout": ones} if sums else {}
    case = Case(
        name,
        shape,
        dtype,
        causal=causal,
        inputs=inputs,
        softmax_scale=softmax_scale,
        operation=BACKWARD,
        **more,
    )
    return [Sharded(case, ranks, method, sums=sums, **options) for method in methods]


def square(batch: int, heads: int, kv_heads: int, seq: int, head_dim: int = 64) -> Shape:
    return Shape(batch, heads, kv_heads, seq, seq, head_dim)


BOTH = ("ring", "ulysses")
ALL_TRANSPOSED = ((transposed,) * 3,)
# On one rank k and v travel as they lie; on another they are copied.
DIFFERENT_LAYOUTS = ((transposed,) * 3, (packed, padded, transposed))

CASES_OF_2 = [
    *make("causal_67", 2, square(1, 4, 2, 67), methods=BOTH),
    *make("full_90_fp16", 2, square(2, 2, 2, 90), FP16, causal=False, methods=BOTH),
    *make("causal_90_one_kv_head", 2, square(1, 4, 1, 90), FP16),
    *make("causal_67_one_kv_head_batch_2", 2, square(2, 2, 1, 67)),
    *make("causal_odd_kv_heads", 2, square(1, 6, 3, 37)),
    *make("causal_2", 2, square(1, 2, 2, 2), methods=BOTH),
    *make("causal_3", 2, square(1, 2, 2, 3), methods=BOTH),
    *make("causal_3_one_head", 2, square(1, 1, 1, 3)),
    *make(
        *("full_uneven", 2, Shape(1, 4, 2, 67, 91, 64)),
        causal=False,
        lengths=((50, 17), (30, 61)),
        methods=BOTH,
    ),
    *make(
        *("full_one_on_a_rank", 2, Shape(2, 2, 1, 6, 10, 64)),
        causal=False,
        lengths=((1, 5), (9, 1)),
    ),
    *make("causal_transposed", 2, square(2, 4, 2, 67), layouts=ALL_TRANSPOSED, methods=BOTH),
    *make(
        "full_different_layouts", 2, square(2, 4, 2, 66), causal=False, layouts=DIFFERENT_LAYOUTS
    ),
    *make(
        *("causal_padded", 2, square(2, 2, 2, 67)),
        layouts=((padded,) * 3,),
        dout=transposed,
        methods=BOTH,
    ),
    *make("causal_misaligned", 2, square(1, 2, 2, 37), layouts=((misaligned_start,) * 3,)),
    *make(
        *("causal_misaligned_rows", 2, square(1, 2, 2, 37)),
        layouts=((misaligned_rows, transposed, misaligned_rows),),
    ),
    *make("causal_sum", 2, square(1, 2, 2, 67), sums=True, methods=BOTH),
    *make("causal_far_apart", 2, square(1, 2, 2, 90), inputs=far_apart),
    *make("full_far_apart_fp16", 2, square(1, 2, 2, 90), FP16, inputs=far_apart, causal=False),
    *make("causal_scale", 2, square(1, 2, 2, 67), softmax_scale=0.31, methods=BOTH),
    *make("full_negative_scale", 2, square(1, 2, 2, 40), softmax_scale=-0.2, causal=False),
    *make("causal_deterministic", 2, square(1, 2, 2, 67), deterministic=True, methods=BOTH),
    *make("causal_fp32", 2, square(1, 2, 1, 67, 8), FP32),
    *make("causal_head_dim_128", 2, square(1, 2, 2, 140, 128)),
    *make("forward_only", 2, square(1, 2, 2, 67), backward=False, methods=BOTH),
]
CASES_OF_4 = [
    *make("causal_67", 4, square(1, 8, 4, 67), methods=BOTH),
    *make("causal_90_transposed", 4, square(2, 2, 1, 90), FP16, layouts=ALL_TRANSPOSED),
    *make("causal_4", 4, square(1, 2, 2, 4)),
    *make("causal_5", 4, square(1, 4, 4, 5), methods=BOTH),
    *make("full_90", 4, square(1, 2, 2, 90), causal=False),
    *make(
        *("full_uneven", 4, Shape(1, 4, 4, 70, 55, 64)),
        causal=False,
        lengths=((20, 1, 40, 9), (3, 30, 1, 21)),
        layouts=DIFFERENT_LAYOUTS,
        methods=BOTH,
    ),
    *make("causal_far_apart", 4, square(1, 2, 2, 90), inputs=far_apart),
    *make("causal_sum_fp32", 4, square(1, 2, 1, 67, 8), FP32, sums=True),
]


def cases_on_gpus(ranks: int) -> list[Sharded]:
    return [
        *make("causal_1000", ranks, square(1, 8, 4, 1000, 128), methods=BOTH),
        *make("causal_4096", ranks, square(1, 8, 2, 4096, 128), layouts=ALL_TRANSPOSED),
        *make("full_4096_fp16", ranks, square(2, 4, 4, 4096), FP16, causal=False, methods=BOTH),
        *make("causal_1000_one_kv_head", ranks, square(2, 4, 1, 1000)),
        *make("causal_1000_sum", ranks, square(1, 4, 2, 1000, 128), sums=True, methods=BOTH),
        *make("causal_1000_head_dim_72", ranks, square(1, 2, 2, 1000, 72), FP16),
        *make(
            *("full_different_layouts", ranks, square(2, 4, 2, 1001, 128)),
            causal=False,
            layouts=DIFFERENT_LAYOUTS,
        ),
        *make("causal_few", ranks, square(1, 2, 2, ranks + 1)),
        *make("causal_1000_far_apart", ranks, square(1, 4, 4, 1000), inputs=far_apart),
        *make("causal_1000_deterministic", ranks, square(1, 4, 4, 1000), deterministic=True),
    ]


def run_cases(cases: Sequence[Sharded], device: str) -> Findings:
    return {case.name: case.run(device) for case in cases}


def run_on_gpus(device: str) -> Findings:
    late = {"late": run_late(device), "late, out of order": run_late(device, in_order=False)}
    return late | {"memory": run_memory(device)} | run_cases(cases_on_gpus(2), device)


def run_late(device: str, in_order: bool = True) -> Findings:
    """On a stream that makes the inputs a while after the call, and overwrites them at its end; or,
    out of order, on another one.
    """
    rng = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (1, 4, 2048, 64)
    on_time = [torch.randn(shape, generator=rng, device=device).to(BF16) for _ in range(4)]

    def differentiate(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs[:3]]
        o = sharded.attention(*leaves, causal=True, deterministic=True)
        return autograd.grad(o, leaves, inputs[3])

    expected = differentiate(*on_time)
    torch.cuda.synchronize()
    late = [torch.zeros_like(t) for t in on_time]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        differentiate(*late)  # allocates the stream's memory
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # about a fifth of a second
        for t, its in zip(late, on_time, strict=True):
            t.copy_(its)
        with torch.cuda.stream(stream if in_order else torch.cuda.Stream()):
            gradients = differentiate(*late)
        host_waited = stream.query()
        found = [t.clone() for t in gradients]
        for t in (*late, *gradients):
            t.fill_(torch.nan)
    torch.cuda.synchronize()
    equal = [t.equal(its) for t, its in zip(found, expected, strict=True)]
    return {"host waited": host_waited, "equal": equal}


def run_memory(device: str) -> Findings:
    """The most that a pass takes, with its results, in bytes of the rank's q."""
    q, k, v, dout = (torch.randn(1, 16, 16384, 128, device=device).to(BF16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def peak(call: Callable[[], object]) -> tuple[object, float]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        return result, (torch.cuda.max_memory_allocated() - before) / q.nbytes

    def both_passes() -> Findings:
        o, forward = peak(lambda: sharded.attention(*leaves, causal=True))
        _, backward = peak(lambda: autograd.grad(o, leaves, dout))
        return {"forward": forward, "backward": backward}

    both_passes()  # NCCL and the kernels take memory of their own
    return both_passes()


# Mistakes, each in one place. A mutant is made in a context, in which a case then runs.

Patch = pytest.MonkeyPatch


def weights_swapped(patch: Patch) -> None:
    def merge(o, lse, part, part_lse, out):
        weight = torch.sigmoid(lse - part_lse).unsqueeze(-1)
        out.copy_(torch.lerp(o.float(), part.float(), weight))
        lse.copy_(torch.logaddexp(lse, part_lse))

    patch.setattr(ring, "merge", merge)


def lse_not_updated(patch: Patch) -> None:
    merge = ring.merge
    patch.setattr(ring, "merge", lambda o, lse, *rest, out: merge(o, lse.clone(), *rest, out=out))


def part_lost(patch: Patch) -> None:
    """A rank's first part of other keys."""
    add, seen = ring._Mean.add, []

    def add_but_the_first(self, *part):
        seen.append(self)
        if seen.count(self) > 1:
            add(self, *part)

    patch.setattr(ring._Mean, "add", add_but_the_first)


def keys_of_the_wrong_chunk(patch: Patch) -> None:
    def part(self, step):
        its = PART(self, step)
        if its.keys.stop is None:
            return its
        return replace(its, keys=slice(its.keys.stop, 2 * its.keys.stop))

    patch.setattr(ring.Ring, "part", part)


def queries_of_the_wrong_chunk(patch: Patch) -> None:
    """The first chunk's last row is taken for one of the second; forward's mean leaves it out."""

    def part(self, step):
        its = PART(self, step)
        return replace(its, first_query=max(its.first_query - 1, 0))

    patch.setattr(ring.Ring, "part", part)


def keys_taken_for_those_of_another_rank(patch: Patch) -> None:
    origin = ring.Ring.origin
    patch.setattr(ring.Ring, "origin", lambda self, step: origin(self, self.size - step))


def causal_lost_on_own_keys(patch: Patch) -> None:
    patch.setattr(ring.Ring, "part", lambda self, step: replace(PART(self, step), causal=False))


def contiguous_shards(patch: Patch) -> None:
    patch.setattr(
        sharded, "take_shard", lambda x, ranks, rank, dim: x.tensor_split(ranks, dim)[rank]
    )


def key_sums_not_added(patch: Patch) -> None:
    patch.setattr(ring, "_add_part", lambda arrived, of_keys, part: of_keys)


def key_sums_swapped(patch: Patch) -> None:
    add = ring._add_part
    patch.setattr(ring, "_add_part", lambda arrived, *rest: add(arrived[::-1], *rest))


def key_sums_lost_at_home(patch: Patch) -> None:
    pass_on = ring.Ring.pass_on

    def forget(self, lane, step, *sent):
        arrive = pass_on(self, lane, step, *sent)

        def arrive_at_home():
            keys, sums = arrive()
            return keys, [t.zero_() for t in sums] if step == 0 else sums

        return arrive_at_home

    patch.setattr(ring.Ring, "pass_on", forget)


def query_sums_not_added(patch: Patch) -> None:
    patch.setattr(ring._QuerySum, "add_to", lambda self, dq: None)


def query_sums_of_one_part(patch: Patch) -> None:
    add = ring._QuerySum.add

    def first(self, *part):
        if self._sum is None:
            add(self, *part)

    patch.setattr(ring._QuerySum, "add", first)


def sums_wait_for_all_queries(patch: Patch) -> None:
    """Those of the second chunk's queries are forgotten where a part of all comes after them."""
    add = ring._QuerySum.add

    def add_or_begin(self, first_query, part):
        if self._sum is not None and first_query < self._first_query:
            self._sum = None
        add(self, first_query, part)

    patch.setattr(ring._QuerySum, "add", add_or_begin)


def heads_in_another_order(patch: Patch) -> None:
    to_heads = ulysses.HeadExchange.to_heads
    patch.setattr(
        ulysses.HeadExchange, "to_heads", lambda self, x: to_heads(self, x.roll(1, dims=1))
    )


def positions_in_the_ranks_order(patch: Patch) -> None:
    patch.setattr(ulysses, "join_shards", lambda shards, dim: torch.cat(shards, dim))


def positions_not_given_back(patch: Patch) -> None:
    def in_order(x, ranks, to, dim):
        lengths = [sum(order.held_lengths(x.shape[dim], ranks, rank)) for rank in range(ranks)]
        return x.split(lengths, dim)[to]

    patch.setattr(ulysses, "take_shard", in_order)


PART = ring.Ring.part
# By the outputs that each makes wrong, and whether backward must be run to see it.
MUTANTS: dict[str, list[Callable[[Patch], None]]] = {
    "ring forward": [
        weights_swapped,
        lse_not_updated,
        part_lost,
        keys_of_the_wrong_chunk,
        keys_taken_for_those_of_another_rank,
        causal_lost_on_own_keys,
        contiguous_shards,
    ],
    "ring backward": [
        queries_of_the_wrong_chunk,
        key_sums_not_added,
        key_sums_swapped,
        key_sums_lost_at_home,
        query_sums_not_added,
        query_sums_of_one_part,
        sums_wait_for_all_queries,
    ],
    "ulysses forward": [
        heads_in_another_order,
        positions_in_the_ranks_order,
        positions_not_given_back,
    ],
}
MUTATED = {method: make("mutated", 3, square(1, 6, 3, 96), methods=[method])[0] for method in BOTH}


def run_mutants(device: str) -> Findings:
    findings = {}
    for kind, mutants in MUTANTS.items():
        method, which = kind.split()
        case = replace(MUTATED[method], backward=which == "backward")
        findings[kind] = case.run(device)
        for mutant in mutants:
            with pytest.MonkeyPatch.context() as patch:
                mutant(patch)
                findings[mutant.__name__] = case.run(device)
    return findings


# Failures.


def outcome(call: Callable[[], object]) -> dict:
    """How a call ends."""
    start = time.monotonic()
    try:
        call()
        error = {"type": None, "message": ""}
    except Exception as raised:
        error = {"type": type(raised).__name__, "message": str(raised)}
    return {**error, "seconds": time.monotonic() - start}


def short_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Made by all ranks at the same time, however long each took for what was before."""
    dist.barrier()
    return dist.new_group(ranks, timeout=timedelta(seconds=SHORT_S))


def tensors(
    seq: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    *,
    batch: int = 1,
    seq_k: int | None = None,
    dtype: torch.dtype = FP32,
    requires_grad: bool = False,
) -> list[Tensor]:
    """q, k and v of a rank: cheap ones."""
    rng = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, seq, head_dim)] + 2 * [(batch, kv_heads, seq_k or seq, head_dim)]
    return [
        torch.randn(shape, generator=rng).to(dtype).requires_grad_(requires_grad)
        for shape in shapes
    ]


# What rank 1 does another way than the others: arguments of tensors() and of attention().
DISAGREEMENTS: dict[str, tuple[dict, dict]] = {
    "head_dim": ({"head_dim": 16}, {}),
    "heads": ({"heads": 2}, {}),
    "kv_heads": ({"kv_heads": 1}, {}),
    "batch": ({"batch": 2}, {}),
    "dtype": ({"dtype": BF16}, {}),
    "requires_grad": ({"requires_grad": True}, {}),
    "causal": ({}, {"causal": True}),
    "method": ({}, {"method": "ulysses"}),
    "softmax_scale": ({}, {"softmax_scale": 0.5}),
    "deterministic": ({}, {"deterministic": True}),
}


def wrong_head_dim() -> list[Tensor]:
    q, k, v = tensors()
    return [q, k[..., :4], v]


def no_tensor() -> list:
    return [tensors()[0], [1.0], tensors()[2]]


def with_long_names() -> list[Tensor]:
    """Refused in a message that is longer than what fits, and not in ASCII."""

    class Wrong:
        pass

    Wrong.__name__ = "Ä" * 3000
    return [*tensors()[:2], Wrong()]


# What is wrong with rank 1's inputs alone.
INVALID = {
    "k's head_dim": wrong_head_dim,
    "no tensor": no_tensor,
    "float64": lambda: [t.double() for t in tensors()],
    "a long message": with_long_names,
}


def run_failures(device: str) -> Findings:
    """In groups of all 3 ranks. The last call of a group in which all may go on works."""
    rank, findings = dist.get_rank(), {}

    def play(name: str, call: Callable[[], object]) -> None:
        dist.barrier()
        findings[name] = outcome(call)

    attend = partial(sharded.attention, group=short_group())
    for name, (inputs, options) in DISAGREEMENTS.items():
        own = (inputs, options) if rank == 1 else ({}, {})
        play(name, partial(attend, *tensors(**own[0]), **own[1]))
    for name, inputs in INVALID.items():
        play(name, partial(attend, *(inputs() if rank == 1 else tensors())))
    play("an unknown method", partial(attend, *tensors(), method="rings"))
    play("another call", lambda: unshard_or(partial(attend, *tensors()), rank == 1, attend))
    play("not shard()'s lengths", partial(attend, *tensors(4 + (rank == 1)), causal=True))
    play("keys and queries", partial(attend, *tensors(4, seq_k=5), causal=True))
    play("heads that do not divide", partial(attend, *tensors(heads=4), method="ulysses"))
    play("kv_heads that do not divide", partial(attend, *tensors(heads=6), method="ulysses"))
    play("a right call", partial(attend, *tensors()))

    return findings


def unshard_or(call: Callable[[], object], unshards: bool, attend: partial) -> object:
    if unshards:
        return sharded.unshard(torch.ones(2), attend.keywords["group"], dim=0)
    return call()


def run_end(device: str) -> Findings:
    """That of the rank's world."""
    name = list(ENDS)[WORLD]
    if name != "silent at first":
        sharded.unshard(torch.ones(2), dim=0)
    return {"end": outcome(ENDS[name])}


def inputs_of_end() -> list[Tensor]:
    return tensors(heads=6, kv_heads=3, requires_grad=True)


def silent() -> None:
    """Rank 1 is there, but never calls."""
    if RANK == 1:
        time.sleep(SHORT_S + 2)
    else:
        sharded.attention(*inputs_of_end())


def silent_unshard() -> None:
    if RANK == 1:
        time.sleep(SHORT_S + 2)
    else:
        sharded.unshard(torch.ones(2), dim=0)


def no_backward(method: str) -> None:
    o = sharded.attention(*inputs_of_end(), method=method)
    if RANK == 1:
        time.sleep(SHORT_S + 2)
    else:
        o.sum().backward()


def another_pass() -> None:
    """Rank 1 goes on where the others go back."""
    o = sharded.attention(*inputs_of_end())
    if RANK == 1:
        sharded.attention(*inputs_of_end())
    else:
        o.sum().backward()


def another_order() -> None:
    """Rank 1 differentiates the second of two calls first."""
    calls = [sharded.attention(*inputs_of_end()) for _ in range(2)]
    for o in reversed(calls) if RANK == 1 else calls:
        o.sum().backward()


def fail(*_, **__) -> None:
    raise RuntimeError("a kernel has failed")


def leave(*_, **__) -> None:
    os._exit(0)


def end_in(how: Callable, module, name: str, after: int, **options) -> None:
    """In rank 1 a function ends like that, after so many calls. All others may go on."""
    real, seen = getattr(module, name), []

    def spoiled(*arguments, **keywords):
        seen.append(name)
        return (how if len(seen) > after else real)(*arguments, **keywords)

    if RANK == 1:
        setattr(module, name, spoiled)
    sharded.attention(*inputs_of_end(), **options).sum().backward()
    sharded.attention(*inputs_of_end(), **options)


def exit_before() -> None:
    if RANK == 1:
        leave()
    sharded.attention(*inputs_of_end())


# How three ranks end where rank 1 does not do its part. A rank launches 3 kernels in forward and 4
# in backward.
ENDS: dict[str, Callable[[], None]] = {
    "silent": silent,
    "silent at first": silent,
    "silent unshard": silent_unshard,
    "no backward (ring)": partial(no_backward, "ring"),
    "no backward (ulysses)": partial(no_backward, "ulysses"),
    "another pass": another_pass,
    "another order": another_order,
    "raises at once": partial(end_in, fail, ring, "_launch", 0),
    "raises in forward": partial(end_in, fail, ring, "_launch", 1),
    "raises in backward": partial(end_in, fail, ring, "_launch", 4),
    "raises at the end": partial(end_in, fail, ring, "_launch", 6),
    "raises in ulysses": partial(end_in, fail, ulysses, "attention_forward", 0, method="ulysses"),
    "raises in ulysses' backward": partial(
        end_in, fail, ulysses, "attention_backward", 0, method="ulysses"
    ),
    "exits before": exit_before,
    "exits in forward": partial(end_in, leave, ring, "_launch", 1),
    "exits in backward": partial(end_in, leave, ring, "_launch", 4),
    "exits in ulysses": partial(end_in, leave, ulysses, "attention_forward", 0, method="ulysses"),
}


# Groups, shard() and unshard(): 4 ranks.


def run_groups(device: str) -> Findings:
    rank = dist.get_rank()
    case = make("group", 2, square(1, 4, 2, 21, 8), FP32)[0]
    of_all = make("group", 4, square(1, 4, 2, 21, 8), FP32)[0]
    findings: Findings = {"shards": try_shards(rank), "errors": try_errors()}
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    backwards = [dist.new_group(ranks, sort_ranks=False) for ranks in ([2, 0], [3, 1])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    findings["None"] = of_all.run(device)
    findings["WORLD"] = of_all.run(device, dist.group.WORLD)
    findings["subgroup"] = case.run(device, pairs[rank % 2])
    findings["mesh of all"] = of_all.run(device, DeviceMesh("cpu", [0, 1, 2, 3]))
    findings["mesh['cp']"] = case.run(device, mesh["cp"])
    findings["mesh['dp']"] = case.run(device, mesh["dp"])
    findings["mesh of two"] = outcome(lambda: sharded.attention(*tensors(), mesh))
    findings["no group"] = outcome(lambda: sharded.attention(*tensors(), "cp"))
    not_mine = dist.new_group([rank ^ 1])  # of another rank alone: torch gives no group
    findings["another's group"] = outcome(lambda: sharded.attention(*tensors(), not_mine))
    findings["group backwards"] = attempt(case.run, device, backwards[rank % 2])
    return findings


def run_lopsided(device: str) -> Findings:
    """3 ranks, of which two have made a group more than the third."""
    case = make("group", 3, square(1, 4, 2, 21, 8), FP32)[0]
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=SHORT_S))
    whole = short_group()
    if dist.get_rank():
        sharded.attention(*tensors(), pair)
    return {"lopsided": attempt(case.run, device, whole)}


def attempt(call: Callable[..., object], *arguments) -> object:
    """What it returns, or how it has failed."""
    try:
        return call(*arguments)
    except Exception:
        return traceback.format_exc()


SHARDED_SHAPES = [
    ((4,), 0),
    ((5,), 0),
    ((90, 3), 0),
    ((2, 67), 1),
    ((2, 3, 8, 2), -2),
    ((2, 9), -1),
]


def try_shards(rank: int) -> list[str]:
    """What is wrong."""
    wrong = []
    for shape, dim in SHARDED_SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
        part = sharded.shard(whole, dim=dim)
        if not torch.equal(sharded.unshard(part.detach(), dim=dim), whole):
            wrong.append(f"unshard of shard: {shape}, {dim}")
        positions = sharded.shard(torch.arange(shape[dim]), dim=0)
        if not torch.equal(part, whole.index_select(dim, positions)):
            wrong.append(f"positions: {shape}, {dim}")
        weights = torch.randn(part.shape)
        part.backward(weights)
        expected = torch.zeros(shape).index_add_(dim, positions, weights)
        if not torch.equal(whole.grad, expected):
            wrong.append(f"gradient: {shape}, {dim}")
        if not torch.equal(sharded.shard(whole[:], dist.group.WORLD, dim=dim), part):
            wrong.append(f"group: {shape}, {dim}")
    for dtype in (torch.int64, BF16, torch.bool):  # not contiguous, with nothing to differentiate
        whole = torch.arange(2 * 21).view(21, 2).t().to(dtype)
        if not torch.equal(sharded.unshard(sharded.shard(whole, dim=1), dim=1), whole):
            wrong.append(f"dtype {dtype}")
    with torch.no_grad():
        sharded.unshard(torch.ones(2, requires_grad=True), dim=0)
    return wrong


def try_errors() -> dict[str, dict]:
    rank = dist.get_rank()
    x = torch.ones(3, 8)
    return {
        "too short": outcome(lambda: sharded.shard(x, dim=0)),
        "shard's dim": outcome(lambda: sharded.shard(x, dim=2)),
        "shard's dim -3": outcome(lambda: sharded.shard(x, dim=-3)),
        "unshard's dim": outcome(lambda: sharded.unshard(x, dim=2)),
        "unshard's gradient": outcome(lambda: sharded.unshard(x.clone().requires_grad_(), dim=1)),
        "unshard's parts": outcome(lambda: sharded.unshard(x[:, : 3 + (rank == 1)], dim=1)),
        "unshard's shape": outcome(lambda: sharded.unshard(x[: 2 + (rank == 1)], dim=1)),
        "unshard's dtype": outcome(lambda: sharded.unshard(x.to([FP32, BF16][rank % 2]), dim=1)),
        "unshard's dims": outcome(lambda: sharded.unshard(x, dim=rank % 2)),
        "unshard works": outcome(lambda: sharded.unshard(x, dim=1)),
    }


# With the rest of torch: 2 ranks.


class Block(nn.Module):
    """Attention between two linear maps; the same on all ranks."""

    def __init__(self, method: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(16, 3 * 16), nn.Linear(16, 16)
        self.method = method

    def attend(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return sharded.attention(q, k, v, causal=True, method=self.method)

    def forward(self, x: Tensor) -> Tensor:
        o = self.attend(self.before(x).relu())
        return self.after(o.transpose(1, 2).flatten(2).sin())


class Checkpointed(Block):
    def attend(self, qkv: Tensor) -> Tensor:
        return checkpoint(super().attend, qkv, use_reentrant=False)


def train(model: nn.Module) -> list[Tensor]:
    """The output and the gradients."""
    x = sharded.shard(torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(1)), dim=1)
    x.requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def run_torch(device: str) -> Findings:
    findings: Findings = {}
    for method in BOTH:
        expected = train(Block(method))
        findings[f"checkpoint {method}"] = (train(Checkpointed(method)), expected)
        compiled = torch.compile(
            Block(method), backend="eager" if method == "ring" else "aot_eager"
        )
        findings[f"compile {method}"] = (train(compiled), expected)
        findings[f"autocast {method}"] = autocast(method)
    findings["autocast of float64"] = autocast_of_float64()
    findings["backward twice"] = backward_twice()
    findings["second derivative"] = outcome(second_derivative)
    case = make("again", 2, square(1, 2, 2, 21, 8), FP32)[0]
    findings["before"] = case.run(device)
    dist.destroy_process_group()
    findings["without ranks"] = outcome(lambda: sharded.attention(*tensors()))
    store = dist.PrefixStore("again", connect())
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=RANKS)
    findings["after"] = case.run(device)
    return findings


def autocast(method: str) -> tuple[list[Tensor], list[Tensor]]:
    def run(cast: Callable, context: Callable) -> list[Tensor]:
        inputs = tensors(requires_grad=True)
        with context():
            o = sharded.attention(*map(cast, inputs), method=method, deterministic=True)
        return [o.detach(), *autograd.grad(o, inputs, torch.ones_like(o))]

    with_it = run(lambda t: t, lambda: torch.autocast("cpu", dtype=BF16))
    return with_it, run(lambda t: t.to(BF16), torch.enable_grad)


def autocast_of_float64() -> list[dict]:
    """Of one GPU and of several."""
    inputs = [t.double() for t in tensors()]
    with torch.autocast("cpu", dtype=BF16):
        return [outcome(partial(each, *inputs)) for each in (attention, sharded.attention)]


def backward_twice() -> tuple[list[Tensor], list[Tensor]]:
    inputs = tensors(requires_grad=True)
    o = sharded.attention(*inputs)
    first = autograd.grad(o, inputs, torch.ones_like(o), retain_graph=True)
    return list(autograd.grad(o, inputs, torch.ones_like(o))), list(first)


def second_derivative() -> None:
    inputs = tensors(requires_grad=True)
    o = sharded.attention(*inputs)
    (dq,) = autograd.grad(o.square().sum(), inputs[:1], create_graph=True)
    dq.sum().backward()


@dataclass(frozen=True)
class Launch:
    """worlds: how many sets of ranks do so at the same time."""

    ranks: int
    play: Callable[[str], Findings]  # of a device type
    device: str = "cpu"
    worlds: int = 1
    timeout_s: float = TIMEOUT_S


LAUNCHES = {
    "cases of 2": Launch(2, partial(run_cases, CASES_OF_2)),
    "cases of 4": Launch(4, partial(run_cases, CASES_OF_4)),
    "mutants": Launch(3, run_mutants),
    "failures": Launch(3, run_failures),
    "ends": Launch(3, run_end, worlds=len(ENDS), timeout_s=SHORT_S),
    "groups": Launch(4, run_groups),
    "lopsided": Launch(3, run_lopsided),
    "torch": Launch(2, run_torch),
    "1 GPU": Launch(1, partial(run_cases, cases_on_gpus(1)), "cuda"),
    "2 GPUs": Launch(2, run_on_gpus, "cuda"),
}

WORLD = RANK = RANKS = 0  # of this process


def connect() -> dist.Store:
    """The store of the process that has started the ranks."""
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


def be_rank(name: str, world: int, rank: int, port: int, path: Path) -> None:
    """Goes through a launch, and writes what it finds."""
    global WORLD, RANK, RANKS
    launch = LAUNCHES[name]
    WORLD, RANK, RANKS = world, rank, launch.ranks
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    cpu._num_cores = lambda: 1  # of the SIMT runtime: each core has a rank
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(launch.ranks)}
    os.environ.update({**address, **place, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    if launch.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if launch.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=launch.timeout_s))
    try:
        torch.save(launch.play(launch.device), path)
    except BaseException:
        traceback.print_exc()
        raise
    if name != "ends":  # where not all are left
        dist.destroy_process_group()


def start(name: str, folder: Path) -> None:
    """Runs a launch, until all its ranks have ended."""
    folder.mkdir()
    launch = LAUNCHES[name]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    stores, processes = [], []
    for world in range(launch.worlds):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores.append(store)
        for rank in range(launch.ranks):
            path = folder / f"{world * launch.ranks + rank}.pt"
            process = context.Process(target=be_rank, args=(name, world, rank, store.port, path))
            process.start()
            processes.append(process)
    deadline = time.monotonic() + LAUNCH_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()


def read(name: str, folder: Path) -> list[Findings]:
    """By rank, one world after the other: empty for one that has not lived to write any."""
    launch = LAUNCHES[name]
    paths = [folder / f"{i}.pt" for i in range(launch.worlds * launch.ranks)]
    return [torch.load(path) if path.exists() else {} for path in paths]
