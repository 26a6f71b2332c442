"""What ranks compute in test_sharded.py: problems whose inputs they share out, and of calls how
they end.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, autograd

from common import sharded
from common.operation import BACKWARD
from common.problem import Shape
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
SHORT_S = 15.0  # of those in which somebody does
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
        q, _, v = inputs
        assert (o.shape, o.dtype) == ((*q.shape[:3], v.shape[3]), q.dtype)
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
    *make(
        *("full_misaligned_keys", 2, square(1, 2, 2, 67)),
        causal=False,
        layouts=((contiguous, misaligned_start, contiguous),),
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
    *make("v_head_dim", 2, Shape(1, 2, 2, 67, 67, 72, 40), methods=BOTH),
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
    *make("causal_deterministic", 4, square(1, 2, 2, 67), deterministic=True),
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


def attempt(call: Callable[..., object], *arguments) -> object:
    """What it returns, or how it has failed."""
    try:
        return call(*arguments)
    except Exception:
        return traceback.format_exc()
