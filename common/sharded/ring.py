"""Ring attention: each rank keeps its queries, and the keys and values travel.

A rank's O is a weighted mean of the parts that its queries have of each rank's keys, by the parts'
lse. Its dQ is a sum of such parts, and so are dK and dV, which travel behind K and V and come home
with all other ranks' parts. In each of the P steps of the ring a rank computes one part, while the
keys arrive that it needs next. The backward pass takes the steps in reverse: it begins with the
keys that came last, and ends with the rank's own, while its sums of dK and dV come home.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from ..operation import BACKWARD, FORWARD, Operation
from ..operator import highest_step
from ..runtime.backend import Call, empty_outputs, specialization
from ..runtime.kernels import KernelCall, KernelsBackend
from .order import held_lengths
from .sums import add, merge
from .transport import Lane, Transport

ALL = slice(None)
ONWARD, BACK = 1, -1  # from a step to the next one: how the ring turns


@dataclass(frozen=True)
class Options:
    """Of a call: as for attention()."""

    causal: bool
    softmax_scale: float
    deterministic: bool


@dataclass(frozen=True)
class Shard:
    """What a rank has told of its q, k and v."""

    seq_q: int
    seq_k: int
    transposed: bool  # k and v are stored [batch, seq, heads, head_dim]

    def dense(self, t: Tensor) -> Tensor:
        """k or v, or what lies like them, as it travels: a contiguous view of the same elements."""
        return t.transpose(1, 2) if self.transposed else t

    def empty_like(self, t: Tensor, seq: int) -> Tensor:
        """What lies like this shard's keys, seq of them, where t is another one's."""
        batch, heads, _, head_dim = t.shape
        axes = (seq, heads) if self.transposed else (heads, seq)
        return self.dense(t.new_empty(batch, *axes, head_dim))


@dataclass(frozen=True)
class Part:
    """What a rank computes in a step of the ring: some of its queries on some of a rank's keys."""

    first_query: int
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Ring:
    """The shards of a call, by rank, and the way from rank to rank."""

    call: int  # a number of its own, which is the same on all ranks
    transport: Transport
    shards: tuple[Shard, ...]
    options: Options

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def origin(self, step: int) -> int:
        """Whose keys the rank has in a step: its own in step 0, in the last the next rank's."""
        return (self.rank - step) % self.size

    def first_chunk(self, rank: int) -> int:
        """How long the first of a rank's two chunks is."""
        seq = sum(shard.seq_k for shard in self.shards)
        return held_lengths(seq, self.size, rank)[0]

    def seq_seen(self, rank: int) -> int:
        """How many of a rank's keys, from its first one on, are seen by others' queries.

        With a causal mask the first rank's second chunk, which is the sequence's last, is not.
        """
        hides = self.options.causal and rank == 0
        return self.first_chunk(rank) if hides else self.shards[rank].seq_k

    def part(self, step: int) -> Part:
        """With a causal mask, of the rank's chunks r and 2 P - 1 - r, and the keys' o and
        2 P - 1 - o: where o < r, both see chunk o only; where o > r, the second sees both.
        """
        origin = self.origin(step)
        if not self.options.causal or origin == self.rank:
            return Part(0, ALL, self.options.causal)
        if origin < self.rank:
            return Part(0, slice(self.first_chunk(origin)), causal=False)
        return Part(self.first_chunk(self.rank), ALL, causal=False)

    def query_chunks(self) -> list[tuple[slice, int]]:
        """The rank's queries, and of how many parts their O is the mean."""
        seq = self.shards[self.rank].seq_q
        if not self.options.causal:
            return [(slice(0, seq), self.size)]
        first = self.first_chunk(self.rank)
        return [(slice(0, first), 1 + self.rank), (slice(first, seq), self.size)]

    def lane(
        self, turn: int, operation: Operation, q: Tensor, k: Tensor, messages: int, itemsize: int
    ) -> Lane:
        """For so many tensors like k, with elements of so many bytes, beside a part's products."""
        seq_q = max(shard.seq_q for shard in self.shards)
        seq_k = max(shard.seq_k for shard in self.shards)
        batch, heads, _, head_dim = q.shape
        flops = operation.products * 2 * batch * heads * seq_q * seq_k * head_dim
        message_bytes = batch * k.shape[1] * seq_k * head_dim * itemsize
        flops = flops / 2 if self.options.causal else flops
        return self.transport.lane(turn, messages, message_bytes, flops)

    def pass_on(
        self, lane: Lane, step: int, keys: Sequence[Tensor], sums: Sequence[Tensor] = ()
    ) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        """Starts to send the keys of a step, and the sums of the step before, as the lane turns.

        The function that it returns waits, on the current stream, for what arrives: the keys of the
        next step, and the sums that belong to the keys of this one.
        """
        before, here, following = (self.origin(step + i * lane.turn) for i in (-1, 0, 1))
        of_before, of_here, of_following = (self.shards[i] for i in (before, here, following))
        arriving_keys = [of_following.empty_like(t, of_following.seq_k) for t in keys]
        arriving_sums = [of_here.empty_like(t, self.seq_seen(here)) for t in sums]
        # Copied only where a hook that saves tensors elsewhere has given the keys other strides.
        sent = [of_here.dense(t).contiguous() for t in keys]
        sent += [of_before.dense(t).contiguous() for t in sums]
        wait = lane.pass_on(
            sent,
            [of_following.dense(t) for t in arriving_keys]
            + [of_here.dense(t) for t in arriving_sums],
        )

        def arrive() -> tuple[list[Tensor], list[Tensor]]:
            wait()
            return arriving_keys, arriving_sums

        return arrive


class RingAttention(Function):
    """o and lse of the rank's queries. k and v lie as its Shard says."""

    @staticmethod
    def forward(ctx, ring: Ring, q: Tensor, k: Tensor, v: Tensor):
        with ring.transport.agreement.telling(travelling=True):
            o, lse, last_keys = _forward(ring, q, k, v)
        ctx.save_for_backward(q, k, v, o, lse, *last_keys)
        ctx.ring = ring
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # of lse they would be zeros that nobody reads
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, _):
        q, k, v, o, lse, *last_keys = ctx.saved_tensors
        agreement = ctx.ring.transport.agreement
        agreement.require_same({"pass": "backward", "call": ctx.ring.call})
        with agreement.telling(travelling=True):
            if dout is None:  # the other ranks' may not be
                dout = torch.zeros_like(o)
            elif dout.stride() != o.stride():
                dout = torch.empty_like(o).copy_(dout)
            return None, *_backward(ctx.ring, (q, k, v, o, lse, dout), last_keys)


def _forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o and lse, and the keys and values of the last step."""
    mean = _Mean(ring.query_chunks(), *empty_outputs(FORWARD, (q, k, v)))
    lane = ring.lane(ONWARD, FORWARD, q, k, messages=2, itemsize=k.itemsize)
    keys = [k, v]
    for step in range(ring.size):
        arrive = ring.pass_on(lane, step, keys) if step < ring.size - 1 else None
        part = ring.part(step)
        inputs = (q[:, :, part.first_query :], *(t[:, :, part.keys] for t in keys))
        if inputs[0].shape[2]:
            outputs = (mean.o, mean.lse) if step == 0 else empty_outputs(FORWARD, inputs)
            _launch(ring, FORWARD, inputs, outputs, part.causal, lane.sms if arrive else 0)
            if step > 0:
                mean.add(part.first_query, *outputs)
            del outputs
        del inputs  # so that no keys live on in the next step
        if arrive:
            keys, _ = arrive()
    return mean.o, mean.lse, keys


class _Mean:
    """Of a rank's parts, by lse. o and lse are at first those of one part; o is complete when all
    parts have been added, and until then the mean is kept in float32.
    """

    def __init__(self, chunks: list[tuple[slice, int]], o: Tensor, lse: Tensor) -> None:
        self.o, self.lse = o, lse
        self._chunks = chunks
        self._added = [1] * len(chunks)
        is_kept = any(parts > 2 for _, parts in chunks)
        self._kept = torch.empty_like(o, dtype=torch.float32) if is_kept else o

    def add(self, first_query: int, o: Tensor, lse: Tensor) -> None:
        """A part, which has the queries from that one on."""
        for i, (rows, parts) in enumerate(self._chunks):
            if rows.start < first_query or rows.start == rows.stop:
                continue
            self._added[i] += 1
            its_rows = slice(rows.start - first_query, rows.stop - first_query)
            merge(
                (self.o if self._added[i] == 2 else self._kept)[:, :, rows],
                self.lse[:, :, rows],
                o[:, :, its_rows],
                lse[:, :, its_rows],
                out=(self.o if self._added[i] == parts else self._kept)[:, :, rows],
            )


def _backward(
    ring: Ring, inputs: tuple[Tensor, ...], last_keys: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """dq, dk and dv, of backward's inputs as the rank has them.

    It takes forward's steps in reverse, and the ring turns back: from the keys that forward has
    ended with to the rank's own, beside which the sums of their gradients come home.
    """
    q, *own_keys = inputs[:3]
    dq, *of_own_keys = gradients = empty_outputs(BACKWARD, inputs)
    # dK and dV; of more ranks those in float32, and K and V: four messages, of their mean size.
    messages, itemsize = 2, q.itemsize
    if ring.size > 2:
        messages, itemsize = 4, (q.itemsize + torch.float32.itemsize) // 2
    lane = ring.lane(BACK, BACKWARD, q, own_keys[0], messages, itemsize)
    # By their first query: parts of the second chunk's come before those of all queries.
    parts = Counter(ring.part(step).first_query for step in range(ring.size))
    query_sums: dict[int, _SharedSums | _SumOfCalls] = {}
    keys, sums = last_keys, []  # of dk and dv, of those keys' ranks so far
    for step in reversed(range(ring.size)):
        sent_keys = keys if step > 1 else []  # in step 0 the keys are the rank's own
        arrive = ring.pass_on(lane, step, sent_keys, sums) if sent_keys or sums else None
        part = ring.part(step)
        busy_sms = lane.sms if arrive and not part.causal else 0
        keys = [t[:, :, part.keys] for t in (keys if step > 0 else own_keys)]
        of_keys = [torch.empty_like(t) for t in keys] if step > 0 else of_own_keys
        first = part.first_query
        if first not in query_sums:
            query_sums[first] = _begin_sum(ring, inputs, gradients, first, parts[first], busy_sms)
        query_sums[first].add(keys, of_keys, part.causal, busy_sms)
        keys, arrived = arrive() if arrive else ([], [])
        del arrive, sent_keys  # which hold what has been sent
        if step > 0:
            sums = _add_part(arrived, of_keys, part)
            del of_keys, arrived
    for first, query_sum in query_sums.items():
        if first > 0:
            add(dq[:, :, first:], query_sum.dq)
    for gradient, total in zip(of_own_keys, arrived, strict=True):
        add(gradient[:, :, : total.shape[2]], total)
    return gradients


def _add_part(arrived: Sequence[Tensor], of_keys: list[Tensor], part: Part) -> list[Tensor]:
    """The sums of dk and dv with another part's, in float32 as soon as there are two.

    The first part is of all keys that any part is of.
    """
    if not arrived:
        return of_keys
    sums = [t.float() for t in arrived]
    for total, t in zip(sums, of_keys, strict=True):
        add(total[:, :, part.keys], t)
    return sums


@dataclass(frozen=True)
class _Queries:
    """Some of the rank's, with their gradient, which is a sum of so many parts."""

    ring: Ring
    q: Tensor
    o: Tensor
    lse: Tensor
    dout: Tensor
    dq: Tensor
    parts: int

    def inputs(self, keys: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Backward's."""
        return (self.q, *keys, self.o, self.lse, self.dout)


def _begin_sum(
    ring: Ring,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_query: int,
    parts: int,
    busy_sms: int,
) -> _SharedSums | _SumOfCalls:
    """The sum of so many parts' dq, of the queries from that one on: of all, the rank's dq."""
    q, _, _, o, lse, dout = (t[:, :, first_query:] for t in inputs)
    dq, *of_keys = gradients
    dq = torch.empty_like(q) if first_query > 0 else dq
    queries = _Queries(ring, q, o, lse.contiguous(), dout, dq, parts)
    # Of one part a whole call is faster: its kernels start before the ones in front have ended.
    if parts > 1 and q.shape[2] and (kernels := _prepared_parts(ring, q, False, busy_sms)):
        # It reads and writes no keys, but its parameter has some: here those that are to come.
        tensors = (*queries.inputs(of_keys), dq, *of_keys)
        workspaces = kernels.begin(tensors, (ring.options.softmax_scale,), ())
        if workspaces is not None:  # or the step cannot read these rows
            return _SharedSums(queries, of_keys, kernels.finish, workspaces)
    return _SumOfCalls(queries)


class _SharedSums:
    """dq, where the step's kernels are launched by themselves, as its line `parts:` says.

    Delta is computed before the first part, each part's products add to the same sums, which are
    float32, in a workspace, and those are rounded once, behind the last part: dq is then complete.
    """

    def __init__(
        self,
        queries: _Queries,
        any_keys: Sequence[Tensor],
        finish: KernelCall,
        workspaces: list[Tensor],
    ) -> None:
        self.dq = queries.dq
        self._queries, self._any_keys, self._finish = queries, any_keys, finish
        self._workspaces = workspaces
        self._to_come = queries.parts

    def add(
        self, keys: Sequence[Tensor], of_keys: Sequence[Tensor], causal: bool, busy_sms: int
    ) -> None:
        """A part, of these keys; writes dk and dv of it."""
        queries, scalars = self._queries, (self._queries.ring.options.softmax_scale,)
        kernels = _prepared_parts(queries.ring, queries.q, causal, busy_sms)
        # In another one blocks count the works that they have taken, from what begin has set: each
        # part has a copy of what was there then: 12 or 16 bytes for each query and head.
        workspaces = [t if i == kernels.sums else t.clone() for i, t in enumerate(self._workspaces)]
        outputs = (self.dq, *of_keys)
        launched = kernels.products((*queries.inputs(keys), *outputs), scalars, workspaces)
        if launched is None:  # the rank's own keys may begin where the step cannot read them
            keys = [t.clone() for t in keys]
            launched = kernels.products((*queries.inputs(keys), *outputs), scalars, workspaces)
            assert launched is not None, "others' keys lie as all steps can read them"
        self._to_come -= 1
        if self._to_come == 0:
            tensors = (*queries.inputs(self._any_keys), self.dq, *self._any_keys)
            self._finish(tensors, scalars, self._workspaces)
            self._workspaces = []


class _SumOfCalls:
    """dq, where each part is a call of the step: their sum, of three or more in float32."""

    def __init__(self, queries: _Queries) -> None:
        self.dq = queries.dq
        self._queries = queries
        self._sum: Tensor | None = None
        self._to_come = queries.parts

    def add(
        self, keys: Sequence[Tensor], of_keys: Sequence[Tensor], causal: bool, busy_sms: int
    ) -> None:
        """A part, of these keys; writes dk and dv of it. dq is complete behind the last one."""
        queries = self._queries
        of_queries = self.dq if self._sum is None else torch.empty_like(self.dq)
        if self.dq.shape[2]:
            inputs, outputs = queries.inputs(keys), (of_queries, *of_keys)
            _launch(queries.ring, BACKWARD, inputs, outputs, causal, busy_sms)
        else:
            for t in of_keys:
                t.zero_()
        if self._sum is None:
            self._sum = self.dq.float() if queries.parts > 2 else self.dq
        else:
            add(self._sum, of_queries)
        self._to_come -= 1
        if self._to_come == 0 and self._sum is not self.dq:
            self.dq.copy_(self._sum)
            self._sum = None


def _launch(
    ring: Ring,
    operation: Operation,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    causal: bool,
    busy_sms: int,
) -> None:
    """The step that attention() takes, on all SMs but busy_sms of them.

    Forward's steps, and b10 without a mask, share work out among their blocks beforehand: of these
    one that had to wait for an SM, while tensors travel, would end as much later than all others.
    With a mask b10 takes it from a counter, and b09 always does: such a block takes less.
    """
    options, q = ring.options, inputs[0]
    call = _prepared(
        operation, q.device, busy_sms, q.shape[3], q.dtype, causal, options.deterministic
    )
    if call((*inputs, *outputs), (options.softmax_scale,)) is None:  # because of how rows lie
        backend = _backend(q.device, busy_sms)
        step = highest_step(backend, operation, inputs, causal, options.deterministic)
        backend.launch(step, *inputs, *outputs, causal=causal, softmax_scale=options.softmax_scale)


@cache
def _prepared(
    operation: Operation,
    device: torch.device,
    busy_sms: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    deterministic: bool,
) -> Call:
    """The highest step that runs such inputs, if their rows lie as it asks for."""
    backend = _backend(device, busy_sms)
    like = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
    step = highest_step(backend, operation, [like], causal, deterministic, as_they_lie=False)
    return backend.prepare(step, specialization([like], causal))


class _PartKernels(NamedTuple):
    """A step's, by its Parts."""

    begin: KernelCall
    products: KernelCall
    finish: KernelCall
    sums: int


def _prepared_parts(ring: Ring, q: Tensor, causal: bool, busy_sms: int) -> _PartKernels | None:
    """Of the step that attention() takes; None where that must be launched as a whole."""
    options = ring.options
    return _find_parts(q.device, busy_sms, q.shape[3], q.dtype, causal, options.deterministic)


@cache
def _find_parts(
    device: torch.device,
    busy_sms: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    deterministic: bool,
) -> _PartKernels | None:
    """With a mask of the step without one: parts of both kinds share a sum."""
    backend = _backend(device, busy_sms)
    like = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
    step = highest_step(backend, BACKWARD, [like], False, deterministic, as_they_lie=False)
    if step.parts is None:
        return None
    names = (step.parts.begin, step.parts.products, step.parts.finish)
    spec = specialization([like], causal)
    kernels = (backend.prepare_kernel(step, spec, name) for name in names)
    return _PartKernels(*kernels, step.parts.sums)


@cache
def _backend(device: torch.device, busy_sms: int) -> KernelsBackend:
    if device.type == "cpu":
        from ..runtime.cpu import CpuBackend

        return CpuBackend()
    from ..runtime.gpu_kernels import KernelsGpuBackend

    backend = KernelsGpuBackend(device)
    backend.multiprocessors -= busy_sms
    return backend
