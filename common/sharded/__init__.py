"""Attention over a sequence that is sharded over the ranks of a torch.distributed group."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import functional
from ..errors import UsageError
from .agreement import PeerError, agreement_of
from .order import held_lengths, join_shards, take_shard
from .ring import Options, Ring, RingAttention, Shard
from .transport import transport_of
from .ulysses import HeadExchange, Ulysses, UlyssesAttention

__all__ = ["PeerError", "attention", "shard", "unshard"]

Group = dist.ProcessGroup | DeviceMesh | None
METHODS = ("ring", "ulysses")


@torch.compiler.disable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    method: Literal["ring", "ulysses"] = "ring",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """attention() of a sequence whose positions are sharded over ranks, and its gradients.

    Collective: every rank of the group calls it with its part, in the same order as all its other
    calls of this module; where q, k or v requires grad, every rank runs the backward pass.

    Args:
        q: [batch, heads, the rank's queries, head_dim]; bf16, fp16 or fp32; last dimension
            contiguous. Within torch.autocast all three are cast to its dtype.
        k, v: [batch, kv_heads, the rank's keys, head_dim]; heads % kv_heads == 0. Those that are
            contiguous, or stored [batch, seq, heads, head_dim], travel without a copy.
            v may have a head_dim of its own. Nobody checks that it is the same one on all ranks.
        group: a process group, a DeviceMesh of one dimension, or None for all ranks. NCCL for CUDA
            tensors, Gloo for those of a CPU. Its time-out is that of every exchange.
        causal: each query sees the keys up to its own position. Each rank then holds what shard()
            gives it of q, k and v, which have as many keys as queries; otherwise the ranks may hold
            any parts, in any order.
        softmax_scale, deterministic: as in attention_worklog.attention.
        method: "ring": k and v, and their gradients, travel from rank to rank while a rank
            computes. "ulysses": the ranks exchange positions for heads, compute, and exchange
            back, without any overlap; heads and kv_heads must be multiples of the ranks.
        return_lse: also return log sum exp of each row of scaled scores over all ranks' keys,
            float32 [batch, heads, the rank's queries], which has no gradient.

    Returns:
        o like q, or (o, lse): of the rank's queries. Up to rounding, what attention() gives for the
        whole sequence. CUDA tensors: computed on torch's current stream; the host waits for the
        other ranks' hosts, and for a GPU only where it loads a kernel for the first time. CPU
        tensors: executed by the SIMT runtime.

    Raises:
        UsageError: the inputs are inconsistent or not supported; on all ranks, where they disagree.
            Where one rank alone has invalid inputs, the others raise PeerError.
        PeerError: another rank has failed, and how, or gave no answer within the time-out. Also in
            the backward pass. After a failure while tensors travelled the group cannot be used
            again. What NCCL has begun then waits on the GPU, until its watchdog ends the process.

    torch.compile leaves it out of its graphs. Beside its results the ring takes the memory of two
    other ranks' k and v, one at hand and one arriving, and of a part of o. For the backward pass it
    keeps, beside q, k, v, o and lse, another rank's k and v; that pass takes the memory of dq in
    float32, if the step has such a workspace, and under a causal mask of dq of half of the queries;
    of a part of dk and dv; and of the sums of dk and dv, leaving and arriving. With three ranks or
    more o and the sums are in float32, and two other ranks' k and v are there again, one at hand
    and one arriving. Where parts are whole calls of a step, dq of one and their sum are there, too.
    """
    group = _process_group(group)
    agreement = agreement_of(group)
    with agreement.telling():
        if method not in METHODS:
            raise UsageError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
        q, k, v = _autocast(q, k, v)
        _validate(q, k, v, causal, softmax_scale, deterministic)
        options = Options(
            causal=bool(causal),
            softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else float(softmax_scale),
            deterministic=bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
        )
        transposed = all(t.transpose(1, 2).is_contiguous() for t in (k, v))
        own = Shard(q.shape[2], k.shape[2], transposed)
        terms = {
            "pass": "forward",
            "device": q.device.type,
            "dtype": str(q.dtype),
            "batch": q.shape[0],
            "heads": q.shape[1],
            "kv_heads": k.shape[1],
            "head_dim": q.shape[3],
            "requires_grad": torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)),
            "method": method,
            **asdict(options),
        }
    all_terms = agreement.require_same(terms, shard=asdict(own))
    call = agreement.count
    shards = tuple(Shard(**theirs["shard"]) for theirs in all_terms)
    if causal:
        _require_zigzag(shards)
    if method == "ulysses":
        _require_divisible(group.size(), heads=q.shape[1], kv_heads=k.shape[1])
    if group.size() == 1:
        return functional.attention(q, k, v, **asdict(options), return_lse=return_lse)
    transport = transport_of(group, q.device.type)
    if method == "ring":
        k, v = (t if transposed else t.contiguous() for t in (k, v))
        ring = Ring(call, transport, shards, options)
        o, lse = RingAttention.apply(ring, q, k, v)
    else:
        lengths = zip(*((held.seq_q, held.seq_k) for held in shards), strict=True)
        exchanges = [HeadExchange(transport, each, options.causal) for each in lengths]
        ulysses = Ulysses(call, *exchanges, options)
        o, lse = UlyssesAttention.apply(ulysses, return_lse, q, k, v)
    return (o, lse) if return_lse else o


def shard(x: Tensor, group: Group = None, *, dim: int) -> Tensor:
    """This rank's part of a tensor that is the same on all ranks, for a causal mask.

    Its positions along dim are cut into 2 P chunks, for P ranks, as torch.tensor_split does; rank r
    is given chunks r and 2 P - 1 - r. So position ids are shard(torch.arange(seq), dim=0), and
    tokens [batch, seq] shard(tokens, dim=1). It moves nothing between ranks, and has gradients.
    """
    group = _process_group(group)
    if not -x.dim() <= dim < x.dim():
        raise UsageError(f"dim must be one of the {x.dim()} dimensions of x, not {dim}")
    if x.shape[dim] < group.size():
        raise UsageError(
            f"a sequence of {x.shape[dim]} cannot be sharded over {group.size()} ranks: some would "
            "have no position"
        )
    return take_shard(x, group.size(), group.rank(), dim)


def unshard(x: Tensor, group: Group = None, *, dim: int) -> Tensor:
    """The whole tensor, on every rank, of the parts that shard() has given the ranks. Collective.

    On the way each rank holds it twice, and its own part as often as there are ranks. It has no
    gradient. Raises UsageError where x requires one, and, on all ranks, where the parts
    are not those of one tensor; PeerError as attention() does.
    """
    group = _process_group(group)
    agreement = agreement_of(group)
    with agreement.telling():
        if torch.is_grad_enabled() and x.requires_grad:
            raise UsageError(
                "unshard() has no gradient: pass x.detach(), or sum up each rank's loss"
            )
        if not -x.dim() <= dim < x.dim():
            raise UsageError(f"dim must be one of the {x.dim()} dimensions of x, not {dim}")
        dim %= x.dim()
        rest = [size for axis, size in enumerate(x.shape) if axis != dim]
        terms = {
            "pass": "unshard",
            "device": x.device.type,
            "dtype": str(x.dtype),
            "dim": dim,
            "shape but for dim": rest,
        }
    all_terms = agreement.require_same(terms, seq=x.shape[dim])
    lengths = [theirs["seq"] for theirs in all_terms]
    _require_held("unshard()", lengths)
    transport = transport_of(group, x.device.type)
    with agreement.telling():
        shapes = [(*x.shape[:dim], seq, *x.shape[dim + 1 :]) for seq in lengths]
        return join_shards(transport.all_to_all([x] * group.size(), shapes), dim)


def _process_group(group: Group) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "there are no ranks: call torch.distributed.init_process_group() first, under torchrun"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                f"the DeviceMesh must have one dimension, not {group.ndim}: pass one of it, as in "
                f"mesh[{(group.mesh_dim_names or ('cp',))[-1]!r}]"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            "group must be a process group of this rank, a DeviceMesh or None, not "
            f"{type(group).__name__}"
        )
    return group


def _autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    """As attention() casts them."""
    device_type = inputs[0].device.type if isinstance(inputs[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return inputs
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t.to(dtype) if _is_cast(t) else t for t in inputs)


def _is_cast(t: object) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64


def _validate(q: Tensor, k: Tensor, v: Tensor, *options) -> None:
    """Raises UsageError for what attention() would refuse, of this rank's inputs alone."""
    inputs = {"q": q, "k": k, "v": v}
    for name, t in inputs.items():
        if not isinstance(t, Tensor):
            raise UsageError(f"{name} must be a torch tensor, not {type(t).__name__}")
        if t.device.type not in ("cpu", "cuda"):
            raise UsageError(f"{name} must be a CPU or CUDA tensor, not one on {t.device}")
    if len({t.device for t in inputs.values()}) > 1:
        found = ", ".join(f"{name} {t.device}" for name, t in inputs.items())
        raise UsageError(f"q, k and v must have the same device: {found}")
    _validate_layouts(*((t.shape, t.stride(), t.dtype) for t in inputs.values()), *options)


@lru_cache(maxsize=128, typed=True)
def _validate_layouts(q, k, v, causal, softmax_scale, deterministic) -> None:
    """Of tensors with these shapes, strides and dtypes."""
    functional.attention(
        *(torch.empty_strided(*layout, dtype=dtype, device="meta") for *layout, dtype in (q, k, v)),
        causal=causal,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
    )


def _require_zigzag(shards: tuple[Shard, ...]) -> None:
    for rank, held in enumerate(shards):
        if held.seq_q != held.seq_k:
            raise UsageError(
                "with a causal mask each rank must have as many keys as queries, not "
                f"{held.seq_q} queries and {held.seq_k} keys as rank {rank}"
            )
    _require_held("causal=True", [held.seq_q for held in shards])


def _require_held(what: str, lengths: list[int]) -> None:
    """Raises UsageError unless the ranks have as many positions as shard() gives them."""
    seq, ranks = sum(lengths), len(lengths)
    given = [sum(held_lengths(seq, ranks, rank)) for rank in range(ranks)]
    if lengths != given:
        raise UsageError(
            f"{what} takes parts as shard() makes them, of {seq} positions {given} on the ranks, "
            f"not {lengths}"
        )


def _require_divisible(ranks: int, **heads: int) -> None:
    for name, count in heads.items():
        if count % ranks:
            raise UsageError(
                f'method="ulysses" shares out the heads: {name} must be a multiple of {ranks} '
                f'ranks, not {count}. Take method="ring"'
            )
