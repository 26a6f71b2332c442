"""Pictures of what heads look at, and of what attention() errs: profiles/<gpu>/pictures.json.

The record's keys are those of headline.py, but for these:

sources    the hashes of the step of each ladder that was run
made_by    the hashes of the code that makes the pictures, by path in common/
trained    the run of `make train` that the trained heads are of, or null
cells      how many groups the positions are pooled into: of as many neighbours each
heads      name, causal, seq and head_dim of each; and
    map        [cells][cells]: of WHOLE, the weight that a query of a group gives the keys of a
               group, on average; exp(softmax_scale q k^T - lse) with lse of the step
    errors     of each output, of the step and of torch: median and maximum of the absolute
               differences from float64's, nrmse, their root mean square over that of the output,
               and groups, the nrmse within each group of positions
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verify.reference import attention_reference

from ..catalog import find_step
from ..errors import UsageError
from ..operation import BACKWARD, FORWARD
from ..operator import highest_step
from ..problem import TRAINED, TRAINED_SHAPE
from ..record_schema import OURS, SDPA
from ..records import (
    PICTURES_FILE,
    PROFILES_DIR,
    SCHEMA,
    TRAINED_FILE,
    gpu_folder,
    picture_hashes,
    write_record,
)
from ..runtime.backend import Backend, run
from ..step import Step
from ..trained_inputs import read_trained
from .device_state import git_state, versions
from .trial import new_run

SEQ, HEAD_DIM, CELLS = 256, 64, 32
WHOLE = 10_000  # all of a query's weight
PERIOD, BLOCK, ANCHORS = 32, 64, 4  # of keys: between strides, in a block, at the start
SHARPNESS = 14  # logits of what a head looks for over those of all else
OUTPUTS = ("o", "dq", "dk", "dv")
DTYPE = torch.bfloat16

Inputs = tuple[Tensor, Tensor, Tensor]  # q, k and v [heads, SEQ, HEAD_DIM]


def made_up() -> dict[str, Inputs]:
    """q, k and v of one head each, by what it looks at; the same numbers on every device."""
    rng = torch.Generator().manual_seed(0)
    place = torch.arange(SEQ)[:, None].double()
    # cos(w (i - j)) is a product of features of i and of j.
    slow = math.pi / 8 * (torch.rand(HEAD_DIM // 2, generator=rng).double() + 0.1)
    harmonics = 2 * math.pi / PERIOD * torch.arange(1, HEAD_DIM // 2 + 1).double()
    waves = {
        name: torch.cat([(place * w).cos(), (place * w).sin()], dim=-1)
        for name, w in (("local", slow), ("strided", harmonics))
    }
    directions = torch.randn(SEQ // BLOCK, HEAD_DIM, generator=rng).double()
    blocks = directions.repeat_interleave(BLOCK, dim=0)
    anchor = torch.randn(HEAD_DIM, generator=rng).double()
    anchored = torch.zeros(SEQ, HEAD_DIM).double()
    anchored[:ANCHORS] = anchor
    found = {
        "local": (waves["local"], waves["local"]),
        "strided": (waves["strided"], waves["strided"]),
        "anchor": (anchor.expand(SEQ, -1), anchored),
        "blocks": (blocks, blocks),
    }
    return {name: _head(*pair, rng) for name, pair in found.items()}


def _head(q: Tensor, k: Tensor, rng: torch.Generator) -> Inputs:
    """With logits of SHARPNESS where q and k agree, a little noise, and random values."""
    scale = math.sqrt(SHARPNESS * HEAD_DIM**0.5)
    q, k = (x * scale / x.norm(dim=-1).max() for x in (q, k))
    noise = [0.1 * torch.randn(SEQ, HEAD_DIM, generator=rng) for _ in range(2)]
    v = torch.randn(SEQ, HEAD_DIM, generator=rng)
    return tuple(x[None].to(DTYPE) for x in (q + noise[0], k + noise[1], v))


def trained_heads() -> tuple[dict[str, Inputs], str | None]:
    """One head of each layer of the GPU's trained model, and the run: nothing without a GPU's.

    Its first SEQ positions: with a causal mask the later ones make no difference to them.
    """
    for path in sorted(PROFILES_DIR.glob(f"*/{TRAINED_FILE}"), key=_is_elsewhere):
        kept = read_trained(path)
        q, k, v = (x[:, :SEQ] for x in kept.tensors)
        heads = {
            f"layer {n}": (q[n : n + 1], k[n : n + 1], v[n : n + 1])
            for n in range(TRAINED_SHAPE.heads)
        }
        return heads, kept.run
    return {}, None


def _is_elsewhere(path: Path) -> bool:
    """Whether a file in profiles/ is of another GPU than this machine's."""
    here = torch.cuda.is_available() and gpu_folder(torch.cuda.get_device_name())
    return path.parent.name != here


def chosen_steps(backend: Backend, names: Sequence[str]) -> tuple[Step, Step]:
    """Of forward and of backward: the named ones, for the others those that attention() takes."""
    named = {step.operation: step for step in map(find_step, names)}
    if len(named) < len(names):
        raise UsageError(f"N={' '.join(names)!r} has two steps of one ladder: name one of each")
    tensors = next(iter(made_up().values()))
    q, k, v = (x[None].to(backend.device) for x in tensors)
    lse = torch.zeros(1, 1, SEQ, device=q.device)
    inputs = {FORWARD: (q, k, v), BACKWARD: (q, k, v, q, lse, q)}
    found = (
        named.get(operation) or highest_step(backend, operation, inputs[operation], False)
        for operation in (FORWARD, BACKWARD)
    )
    return tuple(found)


def measure_pictures(backend: Backend, steps: tuple[Step, Step]) -> dict:
    """The record, of which only what heads says does not depend on the machine."""
    trained, of_run = trained_heads()
    heads = [
        measure_head(backend, steps, name, inputs, causal=causal)
        for group, causal in ((made_up(), False), (trained, True))
        for name, inputs in group.items()
    ]
    return {
        "schema": SCHEMA,
        "run": new_run(),
        "dtype": "bf16",
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in steps},
        "made_by": picture_hashes(),
        TRAINED: of_run,
        "cells": CELLS,
        "heads": heads,
    }


def record_pictures(backend: Backend, steps: tuple[Step, Step]) -> Path:
    """Writes the record of this GPU; returns its path."""
    record = {"git": git_state(), **versions(), **measure_pictures(backend, steps)}
    path = PROFILES_DIR / gpu_folder(record["device"]) / PICTURES_FILE
    write_record(path, record)
    return path


def measure_head(
    backend: Backend, steps: tuple[Step, Step], name: str, inputs: Inputs, *, causal: bool
) -> dict:
    """An entry of the record's heads. q, k and v are [1, SEQ, HEAD_DIM].

    Raises UsageError where a step gives what is not finite: of that there is no picture.
    """
    q, k, v = (x[None].to(backend.device) for x in inputs)
    rng = torch.Generator().manual_seed(1)
    dout = torch.randn(q.shape, generator=rng).to(backend.device, DTYPE)
    options = {"causal": causal, "softmax_scale": q.shape[-1] ** -0.5}
    forward, backward = steps
    o, lse = run(backend, forward, q, k, v, **options)
    gradients = run(backend, backward, q, k, v, o, lse, dout, **options)
    for step, given in ((forward, (o, lse)), (backward, gradients)):
        if not all(x.isfinite().all() for x in given):
            raise UsageError(
                f"{step.name} gives values that are not finite on the head '{name}': "
                f"make check STEPS={step.name} tells more"
            )
    ours = (o, *gradients)
    peer = with_gradients(
        lambda *x: scaled_dot_product_attention(*x, is_causal=causal), q, k, v, dout
    )
    exact = with_gradients(
        lambda *x: attention_reference(*x, **options)[0], *(x.double() for x in (q, k, v, dout))
    )
    return {
        "name": name,
        "causal": causal,
        "seq": SEQ,
        "head_dim": HEAD_DIM,
        "map": attention_map(q, k, lse, **options),
        "errors": {
            output: {OURS: errors(a, c), SDPA: errors(b, c)}
            for output, a, b, c in zip(OUTPUTS, ours, peer, exact, strict=True)
        },
    }


def with_gradients(attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """o, dq, dk and dv, by autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        o = attention(q, k, v)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), dout))


def attention_map(
    q: Tensor, k: Tensor, lse: Tensor, *, causal: bool, softmax_scale: float
) -> list[list[int]]:
    """What the keys of each group get of the weight of a query of each group, on average."""
    scores = softmax_scale * q[0, 0].double() @ k[0, 0].double().mT
    p = (scores - lse[0, 0].double()[:, None]).exp()  # [SEQ, SEQ]
    if causal:
        p = p.tril()
    pooled = p.view(CELLS, SEQ // CELLS, CELLS, SEQ // CELLS).sum(3).mean(1)
    return (WHOLE * pooled).round().long().tolist()


def errors(got: Tensor, expected: Tensor) -> dict:
    """Of [1, 1, SEQ, HEAD_DIM] beside float64."""
    difference = (got.double() - expected).abs()[0, 0]
    whole = expected.square().mean().sqrt()
    groups = difference.view(CELLS, -1).square().mean(1).sqrt() / whole

    def digits(x: Tensor) -> float:
        return float(f"{x.item():.4g}")

    return {
        "median": digits(difference.median()),
        "maximum": digits(difference.max()),
        "nrmse": digits(difference.square().mean().sqrt() / whole),
        "groups": [digits(group) for group in groups],
    }
