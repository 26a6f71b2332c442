"""What calls with lengths and windows take, what must come of them, and which steps take them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import autograd

from common import operator as op
from common.catalog import all_steps, find_step
from common.operation import BACKWARD, FORWARD

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS, BACKWARD_STEPS = (
    [step.name for step in all_steps() if step.takes_lengths and step.operation == operation]
    for operation in (FORWARD, BACKWARD)
)
# Those that are taken where nothing else is asked for.
STEP = STEPS[-1]
BACKWARD_STEP = [name for name in BACKWARD_STEPS if not find_step(name).only_left_over][-1]
LEFT_OVER_STEP = BACKWARD_STEPS[-1]


def int32(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(device, BF16)


def packed(device: str = "cpu", **overrides) -> dict[str, torch.Tensor]:
    """What attention_varlen() takes, of four sequences: the third one has no queries, the last one
    no keys.
    """
    tensors = {
        "q": normal(45, 4, 64, device=device),
        "k": normal(83, 2, 64, device=device, seed=1),
        "v": normal(83, 2, 64, device=device, seed=2),
        "cu_seqlens_q": int32(0, 37, 42, 42, 45, device=device),
        "cu_seqlens_k": int32(0, 70, 79, 83, 83, device=device),
    }
    return tensors | overrides


def batched(device: str = "cpu", **overrides) -> dict[str, torch.Tensor]:
    """What attention() takes."""
    tensors = {
        "q": normal(2, 4, 21, 64, device=device),
        "k": normal(2, 2, 70, 64, device=device, seed=1),
        "v": normal(2, 2, 70, 64, device=device, seed=2),
    }
    return tensors | overrides


def differentiable(inputs: dict[str, torch.Tensor], names: str = "qkv") -> dict[str, torch.Tensor]:
    """The same, of which these require grad."""
    return inputs | {name: inputs[name].detach().requires_grad_() for name in names}


def differentiate(function: Callable, inputs: dict[str, torch.Tensor], dout=None) -> tuple:
    """The gradients of q, k and v, which require grad."""
    o = function(**inputs)
    dout = normal(*o.shape, device=o.device, seed=3) if dout is None else dout
    return autograd.grad(o, [inputs[name] for name in "qkv"], dout.to(o.dtype))


def reference(q, k, v, causal: bool = False, window: tuple[int, int] | None = None):
    """o and lse of one sequence, [seq, heads, head_dim], in float64, with all scores at once."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
    seq_q, seq_k = q.shape[1], k.shape[1]
    left, right = window or (-1, -1)
    after = torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + seq_k - seq_q)
    hidden = torch.zeros(seq_q, seq_k, dtype=torch.bool)
    if left >= 0:
        hidden |= after < -left
    if causal or right >= 0:
        hidden |= after > (0 if causal else right)
    some = (~hidden).any(-1, keepdim=True)
    scores = q @ k.mT * q.shape[2] ** -0.5
    # Where all is hidden, nothing is masked: of a softmax of none there are no derivatives.
    o = (scores.masked_fill(hidden & some, -torch.inf).softmax(-1) * some) @ v
    return o.transpose(0, 1), scores.masked_fill(hidden, -torch.inf).logsumexp(-1)


def packed_reference(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k=None, **mask):
    """What attention_varlen() returns, on the CPU."""
    q, k, v = q.cpu(), k.cpu(), v.cpu()
    outputs = []
    for i, (queries, keys) in enumerate(zip(cut(cu_seqlens_q), cut(cu_seqlens_k), strict=True)):
        if seqused_k is not None:
            keys = slice(keys.start, keys.start + int(seqused_k[i]))
        outputs.append(reference(q[queries], k[keys], v[keys], **mask))
    o, lse = zip(*outputs, strict=True)
    return torch.cat(o), torch.cat(lse, dim=1)


def batched_reference(q, k, v, seqused_k=None, **mask):
    """What attention() returns, on the CPU."""
    q, k, v = (t.cpu().transpose(1, 2) for t in (q, k, v))
    used = [k.shape[1]] * q.shape[0] if seqused_k is None else seqused_k.tolist()
    outputs = [reference(q[i], k[i, :n], v[i, :n], **mask) for i, n in enumerate(used)]
    o, lse = zip(*outputs, strict=True)
    return torch.stack(o).transpose(1, 2), torch.stack(lse)


def cut(starts: torch.Tensor) -> list[slice]:
    return [slice(*pair) for pair in pairwise(starts.tolist())]


def assert_close(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=0.05, atol=0.05)


def assert_equal_but_for_order(found, expected) -> None:
    """Of gradients by a step whose sum of dq is in any order."""
    torch.testing.assert_close(found[0], expected[0], rtol=2**-6, atol=2**-8)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


def operator_arguments(device: str) -> list[tuple]:
    """For op.forward_lengths: packed with all there is, and a batch with a window."""
    inputs = packed(device)
    used = int32(64, 9, 0, 0, device=device)
    return [
        (*inputs.values(), used, 5, -1, True, 0.5, STEP, None, False),
        (*batched(device).values(), None, None, None, 7, 3, False, None, None, None, True),
    ]


def backward_arguments(device: str) -> list[tuple]:
    """Likewise, for op.backward_lengths."""
    arguments = []
    for q, k, v, *options in operator_arguments(device):
        o, lse = op.forward_lengths(q, k, v, *options)
        *options, _, _, _ = options
        dout = normal(*o.shape, device=device, seed=3)
        arguments.append((q, k, v, o, lse, dout, *options, None, False))
    return arguments
