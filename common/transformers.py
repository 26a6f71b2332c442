"""attention() in Hugging Face's transformers: attn_implementation="attention_worklog"."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from .errors import UsageError
from .functional import attention
from .operator import DTYPE_NAMES
from .step import HEAD_DIMS

NAME = "attention_worklog"
OLDEST = (5, 4)  # the first to give a mask's function the offset of the queries

_told: set[str] = set()  # the reasons that have had their warning


def register() -> None:
    """Makes attn_implementation="attention_worklog" known to transformers, in this process.

    A model that takes it calls attention() wherever its mask is full or causal, with padding or
    without: in prefill, in training, and in generation with a cache. Key and value keep their
    kv_heads. A padded batch is one call for each run of sequences with the same padding, on slices
    of q, k and v without a copy, and rows of padding are 0 where the mask is causal. Such a call is
    small: a batch of many different lengths takes its time from the number of calls.

    Whether a padding mask masks anything is read once per forward pass, not per layer, and for that
    the host waits for the GPU, as it does for transformers' own SDPA; without an attention_mask it
    does not. generate() always makes one.

    What attention() does not compute, transformers' SDPA does, with a warning for each reason: any
    other mask (sliding windows and chunks shorter than the sequence, packed sequences, a padding
    mask with holes, one that torch.compile traces, a decoding step on a static cache), dropout,
    a position bias, a paged cache, output_attentions (SDPA does not return them either), and
    inputs outside of its limits. Logit softcapping and attention sinks are errors, since SDPA has
    neither.

    Raises:
        UsageError: transformers is missing or older than 5.4. Later, in the model: it caps its
            logits or has sinks.
    """
    wanted = ".".join(map(str, OLDEST))
    advice = f"pip install 'transformers>={wanted}'"
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"register() needs transformers, which cannot be imported ({error}): {advice}"
        ) from None
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise UsageError(
            f"register() needs transformers {wanted} or later, not {transformers.__version__}: "
            + advice
        )
    transformers.AttentionInterface.register(NAME, attention_forward)
    transformers.AttentionMaskInterface.register(NAME, make_mask)


@dataclass(frozen=True)
class Segment:
    """Consecutive sequences of a batch, whose queries see no keys but these."""

    sequences: int
    queries: slice  # the others see no key
    keys: slice


class PaddingMask(Tensor):
    """A mask [batch, 1, seq_q, seq_k] whose values are made only where an operator reads them.

    dense() is the bool tensor that it stands for, True where a query sees a key. It is a tensor so
    that models can treat it as one. attention_forward() looks at the segments alone: in each, the
    last query sees the last key if the mask is causal, and all queries see all keys otherwise.
    """

    @staticmethod
    def __new__(cls, shape, device, segments, causal, dense):
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.segments, mask.causal, mask.dense = segments, causal, dense
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda mask: mask.dense(), (args, kwargs or {}))
        return operator(*args, **kwargs)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **options,
) -> Tensor | None:
    """What AttentionMaskInterface asks for: a mask for attention_forward().

    Args:
        q_offset, kv_offset: the positions of the first query and the first key; q_offset is a
            tensor where the cache is static.
        mask_function: tells from positions whether a query sees a key.
        attention_mask: [batch, positions], True where there is a token and no padding; positions
            beyond its end have none. None means tokens everywhere.
        local_size: of a window or a chunk that is part of mask_function.
        allow_is_causal_skip, allow_is_bidirectional_skip: mask_function is causal, or full, but
            for local_size, and None may stand for it.

    Returns:
        None where all there is to know is whether the attention is causal, with the last query at
        the last key; a PaddingMask where each sequence sees one run of keys; else a bool tensor
        [batch, 1, seq_q, seq_k] with the reason as its attribute.
    """
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )

    dense = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **options,
    )
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if local_size is None:
        causal = mask_function is causal_mask_function
        is_plain = causal or mask_function is bidirectional_mask_function
    else:  # mask_function is a closure; nothing but a window lets its mask be skipped
        causal = allow_is_causal_skip
        is_plain = may_skip
    reads = isinstance(attention_mask, Tensor) or isinstance(q_offset, Tensor)
    if torch.compiler.is_compiling() and (reads or not is_plain or not may_skip):
        return dense()
    if not is_plain:
        return _explained(dense(), "the mask is neither causal nor full")
    if q_length == 1 and not may_skip:
        # generate() makes it for a model that it has compiled, and only the GPU knows its length.
        return _explained(dense(), "transformers asks for a mask to decode on a static cache")
    offset = int(q_offset) - kv_offset
    if local_size is not None and max(offset + q_length, kv_length) + kv_offset > local_size:
        return _explained(dense(), f"a window of {local_size} is shorter than the sequence")

    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
    if padding is None or padding.all():
        if may_skip and (not causal or offset + q_length == kv_length):
            return None
        segments = _segments([(0, kv_length)] * batch_size, q_length, offset, causal)
    else:
        runs = _runs(padding)
        if runs is None:
            return _explained(dense(), "a sequence's padding mask has holes")
        segments = _segments(runs, q_length, offset, causal)
    shape = (batch_size, 1, q_length, kv_length)
    return PaddingMask(shape, device, segments, causal, cache(dense))


def _explained(mask: Tensor, reason: str) -> Tensor:
    mask.reason = reason
    return mask


def _runs(padding: Tensor) -> list[tuple[int, int]] | None:
    """Of each row of padding [batch, seq_k], the first True and the end. None if one has holes."""
    seen = padding.int()
    first, beyond = seen.argmax(-1), seen.flip(-1).argmax(-1)
    runs = []
    for start, after, count in torch.stack([first, beyond, seen.sum(-1)]).T.tolist():
        stop = padding.shape[-1] - after
        if count not in (0, stop - start):
            return None
        runs.append((start, start + count))
    return runs


def _segments(
    runs: list[tuple[int, int]], q_length: int, offset: int, causal: bool
) -> tuple[Segment, ...]:
    """offset: of the first query among the keys, which counts where the mask is causal."""
    segments = []
    for (start, stop), sequences in groupby(runs):
        first, end = 0, q_length if stop > start else 0
        if causal:
            stop = min(stop, offset + q_length)
            first, end = max(start - offset, 0), max(stop - offset, 0)
        queries = slice(first, max(first, end))
        segments.append(Segment(len(list(sequences)), queries, slice(start, stop)))
    return tuple(segments)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options,
) -> tuple[Tensor, None]:
    """What AttentionInterface asks for.

    Args:
        query: [batch, heads, seq_q, head_dim].
        key, value: [batch, kv_heads, seq_k, head_dim].
        attention_mask: from make_mask(), or the model's own.
        is_causal: module.is_causal if None. It counts where there is no mask, as in SDPA.

    Returns:
        [batch, seq_q, heads, head_dim], contiguous, and no weights.
    """
    for name, what in (("softcap", "caps its logits"), ("s_aux", "has attention sinks")):
        if options.get(name) is not None:
            raise UsageError(
                f"the model {what}, as neither {NAME} nor sdpa can: load it with "
                'attn_implementation="eager"'
            )
    reason = _refusal(query, key, value, attention_mask, dropout, options)
    if reason:
        return _fall_back(
            reason,
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **options,
        )
    if attention_mask is not None:
        return _attend_segments(query, key, value, attention_mask, scaling), None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and query.shape[2] > 1
    o = attention(query, key, value, causal=causal, softmax_scale=scaling)
    return o.transpose(1, 2).contiguous(), None


def _refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    options: dict[str, object],
) -> str | None:
    """Why attention() cannot compute this, or None."""
    if mask is not None and not isinstance(mask, PaddingMask):
        return getattr(mask, "reason", "the mask is the model's own, or torch.compile traces it")
    if mask is not None and mask.shape != (*key.shape[:1], 1, query.shape[2], key.shape[2]):
        return "the mask has not the shape of the attention"
    if dropout:
        return f"there is no dropout, and the model asks for {dropout}"
    if options.get("position_bias") is not None:
        return "there is no position bias"
    if options.get("cache") is not None:
        return "there is no paged cache"
    if options.get("output_attentions"):
        return "its weights are never stored, and the model asks for them (output_attentions)"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in DTYPE_NAMES:
        return f"all inputs must be bfloat16, float16 or float32, not {query.dtype}"
    if query.device.type not in ("cpu", "cuda", "meta"):
        return f"it runs on CUDA and the CPU, not on {query.device.type}"
    head_dims = {t.shape[3] for t in (query, key, value)}
    if len(head_dims) > 1 or query.shape[3] not in HEAD_DIMS:
        return (
            f"q, k and v must have one head_dim, {HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in multiples "
            f"of {HEAD_DIMS.step}, not {', '.join(map(str, sorted(head_dims)))}"
        )
    if key.shape != value.shape or query.shape[0] != key.shape[0]:
        return "q, k and v must have the same batch"
    if any(t.stride(3) != 1 for t in (query, key, value)):
        return "the last dimension of q, k and v must be contiguous"
    return None


def _fall_back(reason: str, module, query, key, value, mask, **options) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _warn(reason)
    if isinstance(mask, PaddingMask):
        mask = mask.dense()
    return sdpa_attention_forward(module, query, key, value, mask, **options)


@torch.compiler.assume_constant_result  # torch.compile calls it once, when it traces the call
def _warn(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        warnings.warn(f"{NAME} leaves this to transformers' SDPA: {reason}", stacklevel=2)


def _attend_segments(
    query: Tensor, key: Tensor, value: Tensor, mask: PaddingMask, scaling: float | None
) -> Tensor:
    """One call for each segment: [batch, seq_q, heads, head_dim], 0 where a query sees no key."""
    sizes = [segment.sequences for segment in mask.segments]
    split = zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    outputs = []
    for segment, (q, k, v) in zip(mask.segments, split, strict=True):
        first, end = segment.queries.start, segment.queries.stop
        if first == end:
            outputs.append(q.new_zeros(q.shape).transpose(1, 2))
            continue
        k, v = k[:, :, segment.keys], v[:, :, segment.keys]
        causal = mask.causal and end - first > 1
        o = attention(q[:, :, segment.queries], k, v, causal=causal, softmax_scale=scaling)
        outputs.append(pad(o.transpose(1, 2), (0, 0, 0, 0, first, q.shape[2] - end)))
    return torch.cat(outputs).contiguous()
