"""What one would use instead: torch's SDPA pinned to each backend, and FlashAttention-3.

All align a causal mask with the last key. Torch's is_causal aligns it with the first, which is the
same where there are as many queries as keys; elsewhere torch has causal_lower_right(), which
FlashAttention takes as it is and any other backend as a matrix.

Where few queries look at many keys, q, k and v are not copied, and FlashAttention-3 chooses itself
into how many parts it splits the keys.

Where sequences have lengths or queries a window, the peers are FlashAttention-3 and torch's
varlen_attn, which is FlashAttention-2. A batch is packed to varlen_attn.

Backward is that of their own forward, which has run once, except where a function of o and lse can
be called: then it is given the operation's.

What a model is trained on, forward and backward by autograd, is one function of q, k and v.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from verify.inputs import Inputs

from ..lengths import UNLIMITED, Lengths
from ..operation import BACKWARD, FORWARD, Operation
from ..problem import Shape
from ..record_schema import FA3, FA3_DETERMINISTIC, NAIVE

Outputs = torch.Tensor | tuple[torch.Tensor, ...]  # of an operation in its order, or the first one
Attention = Callable[..., torch.Tensor]  # of q, k and v

SDPA = {
    NAIVE: SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


# What a peer raises where it is not installed, or refuses the device, the shape or the memory.
REFUSALS = (ImportError, OSError, RuntimeError, AttributeError)


@dataclass(frozen=True)
class Peer:
    """call() computes the operation it was loaded for; route says which code that runs.

    held_bytes of device memory belong to every call: what its forward has saved for it, beyond the
    operation's inputs.
    """

    call: Callable[[], Outputs]
    route: str
    held_bytes: int = 0


def load(
    operation: Operation, inputs: Inputs, *, causal: bool, without: Collection[str] = ()
) -> dict[str, Peer | str]:
    """Every peer but those named in without, ready to run on the inputs, or why it is missing."""
    names = [name for name in LOADERS[operation] if name not in without]
    return {name: load_peer(name, operation, inputs, causal=causal) for name in names}


def load_peer(name: str, operation: Operation, inputs: Inputs, *, causal: bool) -> Peer | str:
    """One peer, ready to run on the inputs, or why it is missing."""
    return _try(partial(LOADERS[operation][name], *inputs, causal=causal))


def load_splitting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Peer | str]:
    """The peers for few queries on many keys, without a mask: ready to run, or why one is missing.

    They read q, k and v where those lie.
    """
    return {name: _try(partial(load, q, k, v)) for name, load in SPLITTING_LOADERS.items()}


def load_with_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths,
    *,
    causal: bool,
    longest: tuple[int, int],
) -> dict[str, Peer | str]:
    """The peers for lengths and windows: ready to run, or why one is missing.

    q, k and v are as Backend.launch takes them and lie [batch, sequence, heads, head_dim], where
    the peers read them. longest: the most queries and the most keys of a sequence.
    """
    return {
        name: _try(partial(load, q, k, v, lengths, causal, longest))
        for name, load in LENGTHS_LOADERS.items()
    }


def _try(load: Callable[[], Peer]) -> Peer | str:
    try:
        peer = load()
        peer.call()  # some refuse the device, the shape or the memory only when they run
        torch.cuda.synchronize()
        return peer
    except REFUSALS as error:
        return reason(error)


def reason(error: Exception) -> str:
    """Why a peer is missing, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def find_differentiable(name: str, shape: Shape, *, causal: bool) -> tuple[Attention, str]:
    """One peer as a function of q, k and v of that shape, for autograd, and its route.

    torch.autocast casts its inputs. Raises one of REFUSALS where the peer is missing; the function
    may raise one only when it runs.
    """
    if name != FA3:
        backend = SDPA[name]
        return _pinned_sdpa(backend, shape.q, shape.kv, causal), _sdpa_route(backend)
    library = _find_flash_attention_3()

    def flash_attention_3(q, k, v) -> torch.Tensor:
        q, k, v = (_autocast(x).transpose(1, 2) for x in (q, k, v))
        return library.differentiable(q, k, v, causal).transpose(1, 2)

    return flash_attention_3, library.route


def _autocast(x: torch.Tensor) -> torch.Tensor:
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _sdpa(backend: SDPBackend, q, k, v, *, causal: bool) -> Peer:
    attention = _pinned_sdpa(backend, q.shape, k.shape, causal)
    return Peer(partial(attention, q, k, v), _sdpa_route(backend))


def _sdpa_backward(backend: SDPBackend, q, k, v, o, lse, dout, *, causal: bool) -> Peer:
    attention = _pinned_sdpa(backend, q.shape, k.shape, causal)
    call, held_bytes = _gradients(attention, q, k, v, o, lse, dout)
    return Peer(call, _sdpa_route(backend), held_bytes)


def _sdpa_route(backend: SDPBackend) -> str:
    cudnn = torch.backends.cudnn.version() or 0  # 91900 is 9.19.0
    what = {
        SDPBackend.MATH: "math",
        SDPBackend.FLASH_ATTENTION: "FlashAttention-2",
        SDPBackend.CUDNN_ATTENTION: f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
    }
    return f"torch {torch.__version__}, {what[backend]}"


def _pinned_sdpa(
    backend: SDPBackend, q_shape: Sequence[int], k_shape: Sequence[int], causal: bool
) -> Attention:
    """SDPA of q, k and v [batch, heads, seq, head_dim] of these shapes."""
    # Only what is needed: a backend may refuse it.
    options = {"enable_gqa": True} if q_shape[1] != k_shape[1] else {}
    if causal:
        seq_q, seq_k = q_shape[2], k_shape[2]
        mask = None if seq_q == seq_k else causal_lower_right(seq_q, seq_k)
        options |= {"is_causal": True} if mask is None else {"attn_mask": mask}

    def attention(q, k, v) -> torch.Tensor:
        # Entering the context costs host time only, and the timer keeps the host ahead of the
        # device.
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **options)

    return attention


def _gradients(
    attention: Attention, q, k, v, o, lse, dout
) -> tuple[Callable[[], tuple[torch.Tensor, ...]], int]:
    """A function that computes the gradients of q, k and v by autograd, and its held_bytes.

    attention has run once: what it has returned and saved is held, in place of o and lse.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    before = torch.cuda.memory_allocated()
    out = attention(*leaves)
    held_bytes = torch.cuda.memory_allocated() - before - o.nbytes - lse.nbytes

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return gradients, max(0, held_bytes)


@dataclass(frozen=True)
class _FlashAttention3:
    """FlashAttention-3 from somewhere, for tensors [batch, seq, heads, head_dim].

    forward is a function of q, k, v and causal, which also takes num_splits, the parts into which
    it splits the keys, 0 for its own choice; differentiable is the same for autograd. with_lengths
    takes Lengths and the longest ones besides; with cu_seqlens, tensors are [total, heads,
    head_dim]. backward takes the operation's inputs, causal and deterministic, and returns a
    function that computes the gradients, and its held_bytes.
    """

    forward: Attention
    with_lengths: Attention
    differentiable: Attention
    backward: Callable[..., tuple[Callable[[], tuple[torch.Tensor, ...]], int]]
    route: str


def _flash_attention_3(q, k, v, *, causal: bool) -> Peer:
    library = _find_flash_attention_3()
    q, k, v = _sequence_first(q, k, v)
    return Peer(lambda: library.forward(q, k, v, causal).transpose(1, 2), library.route)


def _flash_attention_3_splitting(q, k, v) -> Peer:
    library = _find_flash_attention_3()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Peer(
        lambda: library.forward(q, k, v, False, num_splits=0).transpose(1, 2), library.route
    )


def _flash_attention_3_backward(
    q, k, v, o, lse, dout, *, causal: bool, deterministic: bool = False
) -> Peer:
    library = _find_flash_attention_3()
    q, k, v, o, dout = _sequence_first(q, k, v, o, dout)
    gradients, held_bytes = library.backward(q, k, v, o, lse, dout, causal, deterministic)
    return Peer(lambda: tuple(x.transpose(1, 2) for x in gradients()), library.route, held_bytes)


def _flash_attention_3_with_lengths(q, k, v, lengths: Lengths, causal: bool, longest) -> Peer:
    library = _find_flash_attention_3()
    tensors = (x.transpose(1, 2) for x in (q, k, v))
    if lengths.cu_seqlens_q is None:
        attention = partial(library.with_lengths, *tensors, lengths, causal, longest)
        return Peer(lambda: attention().transpose(1, 2), library.route)
    packed = (x.squeeze(0) for x in tensors)
    attention = partial(library.with_lengths, *packed, lengths, causal, longest)
    return Peer(lambda: attention().transpose(0, 1).unsqueeze(0), library.route)


def _varlen_attn(q, k, v, lengths: Lengths, causal: bool, longest) -> Peer:
    from torch.nn.attention.varlen import varlen_attn  # from torch 2.10 on

    known = inspect.signature(varlen_attn).parameters
    options = {}  # only what is needed: older versions know less
    if (window_size := _window_size(lengths, causal)) != (-1, -1):
        options["window_size"] = window_size
    if lengths.seqused_k is not None:
        options["seqused_k"] = lengths.seqused_k
    if unknown := options.keys() - known:
        raise ImportError(f"torch {torch.__version__}'s varlen_attn has no {', '.join(unknown)}")
    if "enable_gqa" in known:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    batch = q.shape[0]
    starts = [lengths.cu_seqlens_q, lengths.cu_seqlens_k]
    if lengths.cu_seqlens_q is None:
        each = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        starts = [each * x.shape[2] for x in (q, k)]
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    attention = partial(varlen_attn, *rows, *starts, *longest, **options)
    return Peer(
        lambda: attention().unflatten(0, (batch, -1)).transpose(1, 2),
        f"torch {torch.__version__}, FlashAttention-2",
    )


def _window_size(lengths: Lengths, causal: bool) -> tuple[int, int]:
    """As flash_attn's functions have it: -1 is no limit."""
    sides = (lengths.window_left, 0 if causal else lengths.window_right)
    left, right = (-1 if side == UNLIMITED else side for side in sides)
    return left, right


def _packed_options(lengths: Lengths, longest: tuple[int, int]) -> dict:
    """What flash_attn's functions take for packed sequences; nothing for a batch."""
    if lengths.cu_seqlens_q is None:
        return {}
    return {
        "cu_seqlens_q": lengths.cu_seqlens_q,
        "cu_seqlens_k": lengths.cu_seqlens_k,
        **dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True)),
    }


def _sequence_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the layout that FlashAttention was written for, so that no stride is held against it."""
    return tuple(x.transpose(1, 2).contiguous() for x in tensors)


def _find_flash_attention_3() -> _FlashAttention3:
    """Raises ImportError or OSError."""
    if library := os.environ.get("FLASH_ATTN_3_LIB"):
        torch.ops.load_library(library)
        return _registered_ops("library at $FLASH_ATTN_3_LIB")
    try:
        import flash_attn_interface
    except ImportError:
        pass
    else:

        def forward(q, k, v, causal: bool, **options) -> torch.Tensor:
            result = flash_attn_interface.flash_attn_func(q, k, v, causal=causal, **options)
            return result[0] if isinstance(result, tuple) else result  # older ones return lse, too

        def with_lengths(q, k, v, lengths: Lengths, causal: bool, longest) -> torch.Tensor:
            options = {"causal": causal, "window_size": _window_size(lengths, causal)}
            if lengths.cu_seqlens_q is not None:
                attention = flash_attn_interface.flash_attn_varlen_func
                options |= {"seqused_k": lengths.seqused_k, **_packed_options(lengths, longest)}
            elif lengths.seqused_k is not None:
                attention = flash_attn_interface.flash_attn_with_kvcache
                options["cache_seqlens"] = lengths.seqused_k
            else:
                attention = flash_attn_interface.flash_attn_func
            result = attention(q, k, v, **options)
            return result[0] if isinstance(result, tuple) else result

        def backward(q, k, v, o, lse, dout, causal: bool, deterministic: bool):
            attention = partial(forward, causal=causal, deterministic=deterministic)
            return _gradients(attention, q, k, v, o, lse, dout)

        return _FlashAttention3(forward, with_lengths, forward, backward, "flash_attn_interface")
    try:
        import xformers
        import xformers.flash_attn_3._C  # registers the operators
    except ImportError:
        raise ImportError(
            "no flash_attn_interface, no xformers with FlashAttention-3, and "
            "FLASH_ATTN_3_LIB is not set"
        ) from None
    return _registered_ops(f"xformers {xformers.__version__}")


def _registered_ops(route: str) -> _FlashAttention3:
    def forward(q, k, v, causal: bool, **options) -> torch.Tensor:
        return torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal, **options)[0]

    def with_lengths(q, k, v, lengths: Lengths, causal: bool, longest) -> torch.Tensor:
        left, right = _window_size(lengths, causal)
        return torch.ops.flash_attn_3.fwd(
            q,
            k,
            v,
            **_packed_options(lengths, longest),
            seqused_k=lengths.seqused_k,
            is_causal=causal,
            window_size_left=left,
            window_size_right=right,
        )[0]

    def backward(*inputs_and_options):
        return partial(_registered_gradients, *inputs_and_options), 0

    return _FlashAttention3(forward, with_lengths, _RegisteredOps.apply, backward, route)


def _registered_gradients(
    q, k, v, o, lse, dout, causal: bool, deterministic: bool = False
) -> tuple[torch.Tensor, ...]:
    # Given, as versions differ in whether they return them.
    dq, dk, dv = outputs = tuple(torch.empty_like(x) for x in (q, k, v))
    options = {"is_causal": causal, "deterministic": deterministic}
    torch.ops.flash_attn_3.bwd(dout, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, **options)
    return outputs


class _RegisteredOps(torch.autograd.Function):
    """The operators, which have no gradients of their own; arguments are q, k, v and causal."""

    @staticmethod
    def forward(ctx, q, k, v, causal: bool) -> torch.Tensor:
        o, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx, dout):
        return *_registered_gradients(*ctx.saved_tensors, dout, ctx.causal), None


# What loads each peer, by operation and name, from the operation's inputs.
LOADERS = {
    FORWARD: {
        **{name: partial(_sdpa, backend) for name, backend in SDPA.items()},
        FA3: _flash_attention_3,
    },
    BACKWARD: {
        **{name: partial(_sdpa_backward, backend) for name, backend in SDPA.items()},
        FA3: _flash_attention_3_backward,
        FA3_DETERMINISTIC: partial(_flash_attention_3_backward, deterministic=True),
    },
}
# Likewise those for few queries on many keys, of forward, by name.
SPLITTING_LOADERS = {
    "sdpa_cudnn": partial(_sdpa, SDPA["sdpa_cudnn"], causal=False),
    FA3: _flash_attention_3_splitting,
}
# And those for lengths and windows.
LENGTHS_LOADERS = {FA3: _flash_attention_3_with_lengths, "varlen_attn": _varlen_attn}
