"""The peer over several GPUs: torch's context_parallel of scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

# By a peer's name: how K and V come to the other ranks. "allgather" is torch's default.
ROTATIONS = {
    "context_parallel_allgather": "allgather",
    "context_parallel_alltoall": "alltoall",
}
ROUTE = f"torch {torch.__version__}, context_parallel, cuDNN"


@contextmanager
def context_parallel(mesh: DeviceMesh, *, causal: bool) -> Iterator[None]:
    """Within it, sdpa() takes a rank's part of q, k and v.

    With a causal mask torch has the same zigzag order as ours, which it calls load balancing and
    refuses without one. Raises ImportError or AttributeError where torch has moved what this needs.
    """
    from torch.distributed.tensor.experimental import _attention

    _attention._cp_options.enable_load_balance = causal
    # It shards these buffers, which nobody needs, and replaces torch's function.
    unused = torch.zeros(2 * mesh.size(), device=mesh.device_type)
    with _attention.context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0]):
        yield


def use_rotation(name: str) -> None:
    """Of the peer with this name: forward and backward read it when they are called."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(ROTATIONS[name])


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        # By its name in the module: context_parallel() has put another function there.
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
