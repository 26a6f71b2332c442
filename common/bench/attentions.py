"""What a model can be trained on: attention(), and its peers where autograd differentiates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .. import attention
from ..operation import BACKWARD, FORWARD
from ..operator import highest_step
from ..problem import Problem
from ..record_schema import FA3, NAIVE, OURS
from ..runtime.backend import DTYPES, Backend, empty_outputs
from ..step import Step
from ..text import listed
from .gpt import Attention
from .peers import REFUSALS, SDPA, find_differentiable, reason

WITHOUT = (NAIVE,)  # holds all scores: nobody would choose it for these lengths


@dataclass(frozen=True)
class Differentiable:
    """call is for autograd; route says which code that runs."""

    call: Attention
    route: str


def load_attentions(backend: Backend, problem: Problem) -> dict[str, Differentiable | str]:
    """attention() and every peer but those in WITHOUT, or why it is missing, by name.

    Raises UsageError where no step runs.
    """
    route = listed(step.name for step in steps_for(backend, problem))
    ours = Differentiable(partial(attention, causal=problem.causal), route)
    names = [name for name in (*SDPA, FA3) if name not in WITHOUT]
    return {OURS: ours} | {name: _load_peer(name, backend, problem) for name in names}


def _load_peer(name: str, backend: Backend, problem: Problem) -> Differentiable | str:
    try:
        call, route = find_differentiable(name, problem.shape, causal=problem.causal)
        q, k, v = zeros_for(backend, problem)
        forward_and_backward(call, q, k, v, torch.zeros_like(q))
        torch.cuda.synchronize()
    except REFUSALS as error:
        return reason(error)
    return Differentiable(call, route)


def steps_for(backend: Backend, problem: Problem) -> list[Step]:
    """The forward and the backward step that attention() takes where none is given."""
    q, k, v = zeros_for(backend, problem)
    o, lse = empty_outputs(FORWARD, (q, k, v))
    inputs = {FORWARD: (q, k, v), BACKWARD: (q, k, v, o, lse, o)}
    return [
        highest_step(backend, operation, tensors, causal=problem.causal)
        for operation, tensors in inputs.items()
    ]


def zeros_for(backend: Backend, problem: Problem) -> tuple[torch.Tensor, ...]:
    """q, k and v of a problem, which lie as a model's do: stored [batch, seq, heads, head_dim]."""

    def zeros(shape: Sequence[int]) -> torch.Tensor:
        batch, heads, seq, head_dim = shape
        options = {"dtype": DTYPES[problem.dtype], "device": backend.device}
        return torch.zeros(batch, seq, heads, head_dim, **options).transpose(1, 2)

    shape = problem.shape
    return zeros(shape.q), zeros(shape.kv), zeros(shape.kv)


def forward_and_backward(
    call: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """o, dq, dk and dv by autograd, where dout is the gradient of o."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = call(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, dout)
