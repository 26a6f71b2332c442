"""What one would use instead: torch's SDPA pinned to each backend, and FlashAttention-3.

All align a causal mask with the last key. Torch's is_causal aligns it with the first, which is the
same where there are as many queries as keys; elsewhere torch has causal_lower_right(), which
FlashAttention takes as it is and any other backend as a matrix.

Where few queries look at many keys, q, k and v are not copied, and FlashAttention-3 chooses itself
into how many parts it splits the keys.

Where head_dim is large, the peers are those of SDPA that take it, and cuDNN and FlashAttention-3,
which end at 256.

Where sequences have lengths or queries a window, the peers are FlashAttention-3 and torch's
varlen_attn, which is FlashAttention-2, forward and backward. A batch is packed to varlen_attn.

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
from ..record_schema import EFFICIENT, FA3, FA3_DETERMINISTIC, NAIVE

Outputs = torch.Tensor | tuple[torch.Tensor, ...]  # of an operation in its order, or the first one
Attention = Callable[..., torch.Tensor]  # of q, k and v

SDPA = {
    NAIVE: SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


VARLEN_ROUTE = f"torch {torch.__version__}, FlashAttention-2"

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


def load_for_large_head_dim(
    operation: Operation, inputs: Inputs, *, causal: bool
) -> dict[str, Peer | str]:
    """The peers for large head_dim: ready to run, or why one is missing."""
    return {
        name: _try(partial(load, *inputs, causal=causal))
        for name, load in LARGE_HEAD_DIM_LOADERS[operation].items()
    }


def load_with_lengths(
    operation: Operation,
    inputs: Inputs,
    lengths: Lengths,
    *,
    causal: bool,
    longest: tuple[int, int],
) -> dict[str, Peer | str]:
    """The peers for lengths and windows: ready to run, or why one is missing.

    The inputs are as Backend.launch takes them and, but for lse, lie [batch, sequence, heads,
    head_dim], where the peers read them. longest: the most queries and the most keys of a sequence.
    """
    options = _WithLengths(lengths, causal, longest)
    return {
        name: _try(partial(load, *inputs, options))
        for name, load in LENGTHS_LOADERS[operation].items()
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
        SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
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
    it splits the keys, 0 for its own choice; differentiable is the same for autograd. backward
    takes the operation's inputs, causal and deterministic, and returns a function that computes the
    gradients, and its held_bytes. with_lengths and backward_with_lengths take options in place of
    causal and deterministic; with cu_seqlens, tensors are [total, heads, head_dim] and lse is
    [heads, total].
    """

    forward: Attention
    with_lengths: Attention
    differentiable: Attention
    backward: Callable[..., tuple[Callable[[], tuple[torch.Tensor, ...]], int]]
    backward_with_lengths: Callable[..., tuple[Callable[[], tuple[torch.Tensor, ...]], int]]
    route: str


@dataclass(frozen=True)
class _WithLengths:
    """What a call with lengths takes beside its tensors: longest as load_with_lengths() has it."""

    lengths: Lengths
    causal: bool
    longest: tuple[int, int]

    @property
    def packed(self) -> bool:
        return self.lengths.cu_seqlens_q is not None

    @property
    def window_size(self) -> tuple[int, int]:
        """As flash_attn's functions have it: -1 is no limit."""
        lengths = self.lengths
        sides = (lengths.window_left, 0 if self.causal else lengths.window_right)
        left, right = (-1 if side == UNLIMITED else side for side in sides)
        return left, right

    @property
    def of_packed(self) -> dict:
        """What flash_attn's functions take for packed sequences; nothing for a batch."""
        if not self.packed:
            return {}
        return {
            "cu_seqlens_q": self.lengths.cu_seqlens_q,
            "cu_seqlens_k": self.lengths.cu_seqlens_k,
            **dict(zip(("max_seqlen_q", "max_seqlen_k"), self.longest, strict=True)),
        }

    @property
    def of_operators(self) -> dict:
        """What FlashAttention-3's operators take, forward and backward."""
        left, right = self.window_size
        window = {"window_size_left": left, "window_size_right": right}
        return {**self.of_packed, "is_causal": self.causal, **window}


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
    options = {"causal": causal, "deterministic": deterministic}
    gradients, held_bytes = library.backward(q, k, v, o, lse, dout, **options)
    return Peer(lambda: tuple(x.transpose(1, 2) for x in gradients()), library.route, held_bytes)


def _flash_attention_3_with_lengths(q, k, v, options: _WithLengths) -> Peer:
    library = _find_flash_attention_3()
    attention = partial(library.with_lengths, *_as_lengths_say(options, q, k, v), options)
    return Peer(lambda: _as_batch(options, attention()), library.route)


def _flash_attention_3_backward_with_lengths(q, k, v, o, lse, dout, options: _WithLengths) -> Peer:
    library = _find_flash_attention_3()
    q, k, v, o, dout = _as_lengths_say(options, q, k, v, o, dout)
    lse = lse.squeeze(0) if options.packed else lse
    gradients, held_bytes = library.backward_with_lengths(q, k, v, o, lse, dout, options=options)
    return Peer(
        lambda: tuple(_as_batch(options, x) for x in gradients()), library.route, held_bytes
    )


def _as_lengths_say(options: _WithLengths, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[batch, sequence, heads, head_dim] or, packed, [total, heads, head_dim]; nothing is moved."""
    sequence_first = (x.transpose(1, 2) for x in tensors)
    return tuple(x.squeeze(0) if options.packed else x for x in sequence_first)


def _as_batch(options: _WithLengths, x: torch.Tensor) -> torch.Tensor:
    """The way back."""
    return (x.unsqueeze(0) if options.packed else x).transpose(1, 2)


def _varlen_attn(q, k, v, options: _WithLengths) -> Peer:
    attention = _packing_varlen_attn(q, k, options)
    return Peer(partial(attention, q, k, v), VARLEN_ROUTE)


def _varlen_attn_backward(q, k, v, o, lse, dout, options: _WithLengths) -> Peer:
    attention = _packing_varlen_attn(q, k, options)
    call, held_bytes = _gradients(attention, q, k, v, o, lse, dout)
    return Peer(call, VARLEN_ROUTE, held_bytes)


def _packing_varlen_attn(q, k, with_lengths: _WithLengths) -> Attention:
    """varlen_attn of q, k and v like these."""
    from torch.nn.attention.varlen import varlen_attn  # from torch 2.10 on

    lengths = with_lengths.lengths
    known = inspect.signature(varlen_attn).parameters
    options = {}  # only what is needed: older versions know less
    if with_lengths.window_size != (-1, -1):
        options["window_size"] = with_lengths.window_size
    if lengths.seqused_k is not None:
        options["seqused_k"] = lengths.seqused_k
    if unknown := options.keys() - known:
        raise ImportError(f"torch {torch.__version__}'s varlen_attn has no {', '.join(unknown)}")
    if "enable_gqa" in known:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    batch = q.shape[0]
    starts = [lengths.cu_seqlens_q, lengths.cu_seqlens_k]
    if not with_lengths.packed:
        each = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        starts = [each * x.shape[2] for x in (q, k)]

    def attention(q, k, v) -> torch.Tensor:
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        o = varlen_attn(*rows, *starts, *with_lengths.longest, **options)
        return o.unflatten(0, (batch, -1)).transpose(1, 2)

    return attention


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

        def with_lengths(q, k, v, options: _WithLengths) -> torch.Tensor:
            given = {"causal": options.causal, "window_size": options.window_size}
            seqused_k = options.lengths.seqused_k
            if options.packed:
                attention = flash_attn_interface.flash_attn_varlen_func
                given |= {"seqused_k": seqused_k, **options.of_packed}
            elif seqused_k is not None:
                attention = flash_attn_interface.flash_attn_with_kvcache
                given["cache_seqlens"] = seqused_k
            else:
                attention = flash_attn_interface.flash_attn_func
            result = attention(q, k, v, **given)
            return result[0] if isinstance(result, tuple) else result

        def backward(q, k, v, o, lse, dout, causal: bool, deterministic: bool):
            attention = partial(forward, causal=causal, deterministic=deterministic)
            return _gradients(attention, q, k, v, o, lse, dout)

        def backward_with_lengths(q, k, v, o, lse, dout, *, options: _WithLengths):
            attention = partial(with_lengths, options=options)
            return _gradients(attention, q, k, v, o, lse, dout)

        return _FlashAttention3(
            forward,
            with_lengths,
            forward,
            backward,
            backward_with_lengths,
            "flash_attn_interface",
        )
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

    def with_lengths(q, k, v, options: _WithLengths) -> torch.Tensor:
        given = options.of_operators
        if (seqused_k := options.lengths.seqused_k) is not None:
            # Its own choice of splits, as flash_attn_with_kvcache leaves it.
            given |= {"seqused_k": seqused_k, "num_splits": 0}
        return torch.ops.flash_attn_3.fwd(q, k, v, **given)[0]

    def backward(*inputs, causal: bool, deterministic: bool):
        options = {"is_causal": causal, "deterministic": deterministic}
        return partial(_registered_gradients, *inputs, **options), 0

    def backward_with_lengths(*inputs, options: _WithLengths):
        return partial(_registered_gradients, *inputs, **options.of_operators), 0

    return _FlashAttention3(
        forward, with_lengths, _RegisteredOps.apply, backward, backward_with_lengths, route
    )


def _registered_gradients(
    q, k, v, o, lse, dout, *, is_causal: bool, deterministic: bool = False, **lengths
) -> tuple[torch.Tensor, ...]:
    options = {"is_causal": is_causal, "deterministic": deterministic, **lengths}
    # Given, as versions differ in whether they return them.
    dq, dk, dv = outputs = tuple(torch.empty_like(x) for x in (q, k, v))
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
        return *_registered_gradients(*ctx.saved_tensors, dout, is_causal=ctx.causal), None


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
# Those for large head_dim, by operation and name.
LARGE_HEAD_DIM_LOADERS = {
    operation: {
        NAIVE: LOADERS[operation][NAIVE],
        EFFICIENT: partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
        **{name: LOADERS[operation][name] for name in ("sdpa_cudnn", FA3)},
    }
    for operation, sdpa in ((FORWARD, _sdpa), (BACKWARD, _sdpa_backward))
}
# And those for lengths and windows, by operation.
LENGTHS_LOADERS = {
    FORWARD: {FA3: _flash_attention_3_with_lengths, "varlen_attn": _varlen_attn},
    BACKWARD: {
        FA3: _flash_attention_3_backward_with_lengths,
        "varlen_attn": _varlen_attn_backward,
    },
}
