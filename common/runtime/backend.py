"""The interface that both backends, common/runtime/gpu.py and common/runtime/cpu.py, offer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from ..step import Specialization, Step
from .launch import LaunchDescriptor

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Backend(Protocol):
    """Runs steps on torch tensors of one kind of device."""

    name: str  # "gpu" or "cpu"
    device: torch.device  # where its tensors live

    def refusal(self, step: Step, spec: Specialization) -> str | None:
        """Why this backend cannot run the step (limits, architecture, shared memory), or None."""

    def build(self, step: Step, spec: Specialization) -> Path:
        """Compiles, or finds in the cache. May be called from several threads."""

    def descriptor(self, step: Step, spec: Specialization) -> LaunchDescriptor:
        """The launch descriptor in the compiled module."""

    def forward(
        self,
        step: Step,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> list[torch.Tensor]:
        """Launches the step into o and lse; returns the bytes of its workspaces.

        q [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k, head_dim], o like q:
        bf16, fp16 or fp32, last dimension contiguous; lse float32 [batch, heads, seq_q],
        contiguous. The arguments agree with each other (common.attention and verify/ see to that).
        Raises UsageError where the step cannot run them.
        """

    def prepare(
        self, step: Step, q: torch.Tensor, k: torch.Tensor, *, causal: bool
    ) -> Callable[..., list[torch.Tensor]]:
        """forward() of that step, without the arguments step and causal.

        For calls that are repeated: all tensors of such a call must lie as in the first one, and q
        and k like these; only the addresses may differ. Raises UsageError as forward() does.
        """


def run(
    backend: Backend,
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backend.forward into new outputs: o and lse."""
    o, lse = empty_outputs(q)
    backend.forward(step, q, k, v, o, lse, causal=causal, softmax_scale=softmax_scale)
    return o, lse


def empty_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A new o, laid out like q where that leaves its rows whole, and a new lse."""
    o = torch.empty_like(q)
    if o.stride(-1) != 1:  # q's axes overlap
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
    # torch.empty takes numbers faster than a shape.
    batch, heads, seq_q, _ = q.shape
    return o, torch.empty(batch, heads, seq_q, dtype=torch.float32, device=q.device)
