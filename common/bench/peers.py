"""What one would use instead: torch's SDPA pinned to each backend, and FlashAttention-3.

All align a causal mask with the last key. Torch's is_causal aligns it with the first, which is the
same where there are as many queries as keys; elsewhere torch has causal_lower_right(), which
FlashAttention takes as it is and any other backend as a matrix.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Peer:
    """forward() computes the attention it was loaded for; route says which code that runs."""

    forward: Callable[[], torch.Tensor]  # -> o [batch, heads, seq_q, head_dim]
    route: str


def load(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    without: Collection[str] = (),
) -> dict[str, Peer | str]:
    """Every peer but those named in without, ready to run on q, k, v, or why it is missing.

    q [batch, heads, seq, head_dim], k and v [batch, kv_heads, seq, head_dim].
    """
    cudnn = torch.backends.cudnn.version() or 0  # 91900 is 9.19.0
    loaders = {
        "sdpa_math": functools.partial(_sdpa, SDPBackend.MATH, "math"),
        "sdpa_flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION, "FlashAttention-2"),
        "sdpa_cudnn": functools.partial(
            _sdpa,
            SDPBackend.CUDNN_ATTENTION,
            f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        ),
        "flash_attention_3": _flash_attention_3,
    }
    peers: dict[str, Peer | str] = {}
    for name, loader in loaders.items():
        if name in without:
            continue
        try:
            peer = loader(q, k, v, causal)
            peer.forward()  # some refuse the device, the shape or the memory only when they run
            torch.cuda.synchronize()
            peers[name] = peer
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            peers[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return peers


def _sdpa(backend: SDPBackend, what: str, q, k, v, causal: bool) -> Peer:
    # Only what is needed: a backend may refuse it.
    options = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if causal:
        seq_q, seq_k = q.shape[2], k.shape[2]
        mask = None if seq_q == seq_k else causal_lower_right(seq_q, seq_k)
        options |= {"is_causal": True} if mask is None else {"attn_mask": mask}

    def forward() -> torch.Tensor:
        # Entering the context costs host time only, and the timer keeps the host ahead of the
        # device.
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **options)

    return Peer(forward, f"torch {torch.__version__}, {what}")


def _flash_attention_3(q, k, v, causal: bool) -> Peer:
    call, route = _flash_attention_3_call()
    # The layout it was written for, so that no stride is held against it.
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return Peer(lambda: call(q, k, v, causal).transpose(1, 2), route)


def _flash_attention_3_call() -> tuple[Callable[..., torch.Tensor], str]:
    """A function of q, k, v [batch, seq, heads, head_dim] and causal, and its origin.

    Raises ImportError or OSError.
    """
    if library := os.environ.get("FLASH_ATTN_3_LIB"):
        torch.ops.load_library(library)
        return _registered_op, "library at $FLASH_ATTN_3_LIB"
    try:
        import flash_attn_interface
    except ImportError:
        pass
    else:

        def call(q, k, v, causal):
            result = flash_attn_interface.flash_attn_func(q, k, v, causal=causal)
            return result[0] if isinstance(result, tuple) else result  # older ones return lse, too

        return call, "flash_attn_interface"
    try:
        import xformers
        import xformers.flash_attn_3._C  # registers the operators
    except ImportError:
        raise ImportError(
            "no flash_attn_interface, no xformers with FlashAttention-3, and "
            "FLASH_ATTN_3_LIB is not set"
        ) from None
    return _registered_op, f"xformers {xformers.__version__}"


def _registered_op(q, k, v, causal: bool) -> torch.Tensor:
    return torch.ops.flash_attn_3.fwd(q, k, v, is_causal=causal)[0]
