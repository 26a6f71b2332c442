"""The masks that transformers is given show what SDPA's do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import common.transformers as integration
from verify.tests import transformers_fixtures as fixtures
from verify.tests.transformers_models import TOKENS, padding_mask, ragged_batch, transformers

registered = fixtures.registered


def in_segments(mask) -> Tensor:
    """Which keys a query sees [batch, seq_q, seq_k], by one call for each segment."""
    shown = torch.zeros(mask.shape[0], *mask.shape[2:], dtype=torch.bool)
    begin = 0
    for segment in mask.segments:
        part = shown[begin : begin + segment.sequences, segment.queries, segment.keys]
        part[:] = window_of(*part.shape[1:], *segment.limits(mask.window))
        begin += segment.sequences
    return shown


def in_lengths(mask, groups: int) -> Tensor:
    """Likewise by one call for all: [groups * batch, seq_q, seq_k]."""
    batch, _, seq_q, seq_k = mask.shape
    batch *= groups
    shown = torch.zeros(batch * seq_q, batch * seq_k, dtype=torch.bool)
    ends_q, ends_k, used = (t.tolist() for t in mask.lengths(torch.device("cpu"), groups))
    for q, k, n in zip(pairwise(ends_q), pairwise(ends_k), used, strict=True):
        part = shown[slice(*q), k[0] : k[0] + n]
        part[:] = window_of(*part.shape, *mask.window)
    blocks = shown.view(batch, seq_q, batch, seq_k)
    assert blocks.sum() == blocks.diagonal(dim1=0, dim2=2).sum()
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)


def window_of(seq_q: int, seq_k: int, left: int, right: int) -> Tensor:
    """As attention() defines it."""
    distance = torch.arange(seq_k) - (torch.arange(seq_q)[:, None] + seq_k - seq_q)
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def mask_functions() -> dict[str, Callable]:
    known = transformers.masking_utils
    causal = {f"causal {n}": known.sliding_window_causal_mask_function(n) for n in (1, 5, 16, 20)}
    both = {f"both {n}": known.sliding_window_bidirectional_mask_function(n) for n in (0, 3, 25)}
    left = known.and_masks(known.bidirectional_mask_function, known.sliding_window_overlay(4))
    return {
        "causal": known.causal_mask_function,
        "full": known.bidirectional_mask_function,
        "left": left,
        "chunk": known.chunked_causal_mask_function(20, torch.zeros(4, dtype=torch.int64)),
        **causal,
        **both,
    }


@pytest.mark.parametrize("side", ["no padding", "left", "right"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [(20, 20, 0, 0), (1, 20, 19, 0), (4, 20, 16, 0), (1, 5, 19, 15), (4, 8, 16, 12), (9, 20, 0, 0)],
    ids=["prefill", "decode", "go on", "decode in a window", "go on in a window", "static prefill"],
)
@pytest.mark.parametrize("name", mask_functions())
def test_what_a_mask_shows(
    name: str, q_length: int, kv_length: int, q_offset: int, kv_offset: int, side: str
) -> None:
    """To all queries that are no padding, by both ways to compute it, what SDPA's mask shows."""
    tokens = ragged_batch(side)["attention_mask"].bool() if side != "no padding" else None
    options = {"batch_size": 4, "q_length": q_length, "kv_length": kv_length}
    options |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": tokens}
    options |= {"mask_function": mask_functions()[name]}
    expected = transformers.masking_utils.sdpa_mask(**options, allow_is_causal_skip=False)[:, 0]
    mask = integration.make_mask(**options)
    if mask is None:
        causal = (-1, 0) if "causal" in name or name == "chunk" else (-1, -1)
        assert torch.equal(expected[0], window_of(q_length, kv_length, *causal))
        return
    if not isinstance(mask, integration.SegmentMask):
        assert name.startswith(("left", "both"))
        assert q_offset + q_length != kv_offset + kv_length
        assert torch.equal(mask[:, 0], expected)
        return
    rows = slice(q_offset, q_offset + q_length)
    is_token = torch.ones(4, q_length, dtype=torch.bool) if tokens is None else tokens[:, rows]
    twice = in_lengths(mask, 2).unflatten(0, (4, 2)).unbind(1)
    for shown in (in_segments(mask), in_lengths(mask, 1), *twice):
        assert torch.equal(shown[is_token], expected[is_token])
        if mask.window == integration.FULL:
            assert torch.equal(shown, expected)
        else:
            assert not shown[~is_token].any()


@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [(1, 28, 19, 0), (4, 28, 16, 0), (20, 28, 0, 0), (1, 5, 19, 15), (1, 8, 4, 0)],
    ids=["decode", "go on", "prefill", "full window", "window"],
)
@pytest.mark.parametrize("name", ["causal", "causal 5", "chunk"])
def test_what_a_static_mask_shows(
    name: str, q_length: int, kv_length: int, q_offset: int, kv_offset: int, side: str
) -> None:
    """Likewise where a tensor says how long the cache is, whatever its shape."""
    tokens = None
    if side == "left":
        tokens = ragged_batch(side)["attention_mask"].bool()[:, : q_offset + q_length]
    options = {"batch_size": 4, "q_length": q_length, "kv_length": kv_length}
    options |= {"kv_offset": kv_offset, "attention_mask": tokens}
    function = mask_functions()[name]
    if name == "chunk":
        function = transformers.masking_utils.chunked_causal_mask_function(28, torch.zeros(4).int())
    options |= {"mask_function": function, "allow_is_causal_skip": False}
    expected = transformers.masking_utils.sdpa_mask(**options, q_offset=q_offset)[:, 0]
    rows = slice(q_offset, q_offset + q_length)
    is_token = torch.ones(4, q_length, dtype=torch.bool) if tokens is None else tokens[:, rows]
    for offset in (torch.tensor(q_offset), torch.tensor([q_offset])):
        mask = integration.make_mask(**options, q_offset=offset)
        assert isinstance(mask, integration.CacheMask)
        assert {t.dtype for t in (mask.stop, mask.start) if t is not None} == {torch.int32}
        found = [mask.dense()[:, 0], integration._in_segments(mask).dense()[:, 0]]
        found.append(in_segments(integration._in_segments(mask)))
        if tokens is None:
            assert mask.start is None
            assert mask.stop.tolist() == [q_offset + q_length - kv_offset] * 4
        else:
            found += [in_lengths(mask, 1), *in_lengths(mask, 2).unflatten(0, (4, 2)).unbind(1)]
        for shown in found:
            assert torch.equal(shown[is_token], expected[is_token])


def test_a_mask_is_the_tensor_that_it_stands_for() -> None:
    """Whatever operator reads it, it has the values of SDPA's mask."""
    given = {"batch_size": 3, "q_length": TOKENS, "kv_length": TOKENS}
    given |= {"attention_mask": padding_mask("left").bool()}
    given |= {"mask_function": transformers.masking_utils.causal_mask_function}
    mask = integration.make_mask(**given)
    expected = transformers.masking_utils.sdpa_mask(**given)
    assert isinstance(mask, integration.SegmentMask)
    assert (mask.shape, mask.dtype, mask.device) == (expected.shape, torch.bool, expected.device)
    assert mask.contiguous() is mask
    for found in (mask & True, mask[:, :, :, :5].clone(), mask.float()):
        assert type(found) is Tensor
    assert torch.equal(mask, expected)
    assert torch.equal(mask[:, :, 3:, :5], expected[:, :, 3:, :5])
