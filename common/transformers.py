"""attention() in Hugging Face's transformers: attn_implementation="attention_worklog"."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from inspect import getclosurevars
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import UsageError
from .functional import attention, attention_varlen
from .lengths import UNLIMITED, Lengths
from .masks import CAUSAL, FULL, CacheMask, LazyMask, Segment, SegmentMask, Window
from .operation import BACKWARD, FORWARD
from .operator import backend_of, highest_step
from .runtime.backend import DTYPE_NAMES
from .step import HEAD_DIMS, is_large

NAME = "attention_worklog"
OLDEST = (5, 4)  # the first to give a mask's function the offset of the queries
HOLES = "a sequence's padding mask has holes"

_told: set[str] = set()  # the reasons that have had their warning


def register() -> None:
    """Makes attn_implementation="attention_worklog" known to transformers, in this process.

    A model that takes it calls attention() wherever its mask is full or causal, or a sliding window
    of either, with padding or without: in prefill, in training, and in generation with a cache. Key
    and value keep their kv_heads. Rows of padding are 0 where the mask is causal or has a window.

    A batch whose sequences all have the same padding is one call, on slices of q, k and v without a
    copy; one with several paddings is one call of attention_varlen(), where what cannot be viewed
    as packed is copied: no keys in decoding. Where no step takes lengths of these inputs, or has
    their gradients where those are needed, it is a call of attention() for each run of sequences
    with the same padding: such a call is small, and a batch of many different lengths takes its
    time from the number of calls.

    On a static cache it is one call that is given all of the cache, and seqused_k: only the GPU
    knows how much is written. What generate() compiles has the same graph for all lengths, and so
    has a model that is compiled as a whole, where there is neither padding nor a window. Where no
    step takes lengths, several queries are a call on slices, for which the host waits.

    Whether a padding mask masks anything is read once per forward pass, not per layer (twice where
    only some layers have a window), and for that the host waits for the GPU, as it does for
    transformers' own SDPA; without an attention_mask it does not. Older versions' generate()
    always makes one, newer ones' where there is padding.

    What attention() does not compute, transformers' SDPA does, with a warning for each reason: any
    other mask (chunks shorter than the sequence, packed sequences, a padding mask with holes, one
    that torch.compile traces, or a window on a static cache whose mask it traces), a window shorter
    than the sequence where no step takes it or has its gradients, one query on a static cache where
    no step takes lengths (float32, large heads), dropout, a position bias, a paged cache,
    output_attentions (SDPA does not return them either), and inputs outside of its limits.
    Logit softcapping and attention sinks are errors, since SDPA has neither.

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
        the last key; a SegmentMask where each sequence sees one run of keys, or a window of it; a
        CacheMask likewise where the host is not to know how long the cache is; else a bool tensor
        [batch, 1, seq_q, seq_k] with the reason as its attribute, or without where torch.compile
        traces it.
    """
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

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
    shape = (batch_size, 1, q_length, kv_length)
    on_gpu = isinstance(q_offset, Tensor)  # and only there, is how long the cache is
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if torch.compiler.is_compiling():  # which can neither read a tensor nor look into a closure
        causal = allow_is_causal_skip or mask_function is causal_mask_function
        end_q, end_k = q_offset + q_length, kv_offset + kv_length
        longest = end_k if on_gpu else max(end_q, end_k)
        is_short = local_size is None or longest <= local_size
        if not is_short or isinstance(attention_mask, Tensor):
            return dense()
        if may_skip and not on_gpu and (end_q == end_k or not causal):
            return None
        if causal and (on_gpu or end_q <= end_k):
            return _cache_mask(shape, end_q - kv_offset, CAUSAL, device)
        return dense()
    window = _window(mask_function, kv_offset + kv_length)
    if window is None:
        return _explained(dense(), "the mask is neither causal nor full, nor a window")
    # generate() makes it outside of what it compiles: a decoding step, or a part of the prompt.
    if window[1] == 0 and (on_gpu or (q_length == 1 and not may_skip)):
        idle = _without_idle_sides(window, kv_length, 0, kv_length)
        mask = _cache_mask(shape, q_offset + q_length - kv_offset, idle, device)
        if attention_mask is None:
            return mask
        if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return _explained(dense(), "no padding mask can be read while a CUDA graph is captured")
        mask = _with_padding(mask, attention_mask, kv_offset)
        if mask is not None:
            return mask
    offset = int(q_offset) - kv_offset
    window = _without_idle_sides(window, kv_length, offset, offset + q_length)
    ends_together = offset + q_length == kv_length
    if window != FULL and window[1] and not ends_together:
        return _explained(dense(), "a window of keys on both sides does not end at the last key")

    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
    if padding is None or padding.all():
        if may_skip and (window == FULL or (window == CAUSAL and ends_together)):
            return None
        runs = [(0, kv_length)] * batch_size
    else:
        runs = _runs(padding)
        if runs is None:
            return _explained(dense(), HOLES)
    segments = _segments(runs, q_length, offset, window)
    return SegmentMask(shape, device, segments, window, cache(dense))


@torch.compiler.allow_in_graph  # which cannot trace how a tensor's subclass is made
def _cache_mask(
    shape: tuple[int, ...], stop: int | Tensor, window: Window, device: torch.device | str
) -> CacheMask:
    """Of sequences that have all keys before stop, a tensor of one element where it is on a GPU."""
    batch = shape[:1]
    if isinstance(stop, Tensor):
        stop = stop.int().expand(batch).contiguous()
    else:
        stop = torch.full(batch, stop, dtype=torch.int32, device=device)
    return CacheMask(shape, stop, None, window)


def _with_padding(mask: CacheMask, padding: Tensor, kv_offset: int) -> CacheMask | None:
    """The mask without keys that are padding. None if a row of padding has holes, or ends before
    the last of several queries.

    padding: make_mask()'s attention_mask. The host waits for what it has to know of it.
    """
    from transformers.masking_utils import prepare_padding_mask

    _, _, q_length, kv_length = mask.shape
    seen = prepare_padding_mask(padding, kv_length, kv_offset)
    first, stop, count = _ends(seen[:, kv_offset : kv_offset + kv_length])
    has_last = first + count >= mask.stop
    is_run = (count == stop - first) & (has_last | (q_length == 1))
    all_runs, hides_none = torch.stack([(is_run | (count == 0)).all(), padding.all()]).tolist()
    if not all_runs:
        return None
    stop = torch.where(has_last, mask.stop, 0)  # a query that is padding sees no key
    # By all of the padding: which keys have slid out of a window must not change what is compiled.
    start = None if hides_none else torch.minimum(first, stop).int()
    return CacheMask(mask.shape, stop, start, mask.window)


def _window(mask_function: Callable, end: int) -> Window | None:
    """The window that one of transformers' mask functions shows. None if it shows anything else.

    end: the positions of all keys are below it.
    """
    from transformers import masking_utils as known

    if mask_function is known.causal_mask_function:
        return CAUSAL
    if mask_function is known.bidirectional_mask_function:
        return FULL
    # All others are closures: each kind has its code, and what it has been made of.
    code = getattr(mask_function, "__code__", None)
    if code is known.and_masks().__code__:
        windows = [_window(part, end) for part in _made_of(mask_function, "mask_functions")]
        return None if None in windows else tuple(map(min, zip(*windows, strict=True)))
    if code is known.sliding_window_overlay(1).__code__:
        size = _made_of(mask_function, "sliding_window")
        return (size - 1, UNLIMITED) if size > 0 else None
    if code is known.sliding_window_bidirectional_overlay(1).__code__:
        size = _made_of(mask_function, "sliding_window")
        return size, size
    if code is known.chunked_overlay(1, None).__code__:
        return FULL if _made_of(mask_function, "chunk_size") >= end else None
    return None


def _made_of(closure: Callable, name: str):
    return getclosurevars(closure).nonlocals[name]


def _without_idle_sides(window: Window, kv_length: int, offset: int, end: int) -> Window:
    """The window, unlimited on sides where no query from offset to end has a key beyond them."""
    left, right = window
    if left >= end - 1:
        left = UNLIMITED
    if right and right >= kv_length - 1 - offset:
        right = UNLIMITED
    return left, right


def _explained(mask: Tensor, reason: str) -> Tensor:
    mask.reason = reason
    return mask


def _runs(padding: Tensor) -> list[tuple[int, int]] | None:
    """Of each row of padding [batch, seq_k], the first True and the end. None if one has holes."""
    runs = []
    for start, stop, count in torch.stack(_ends(padding)).T.tolist():
        if count not in (0, stop - start):
            return None
        runs.append((start, start + count))
    return runs


def _ends(padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of padding [batch, seq_k]: the first True, the end of the last, how many."""
    seen = padding.int()
    stop = padding.shape[-1] - seen.flip(-1).argmax(-1)
    return seen.argmax(-1), stop, seen.sum(-1)


def _segments(
    runs: list[tuple[int, int]], q_length: int, offset: int, window: Window
) -> tuple[Segment, ...]:
    """offset: of the first query among the keys, which counts unless the window is FULL."""
    spans = []
    for start, stop in runs:
        first, end = 0, q_length if stop > start else 0
        if window != FULL:
            stop = min(stop, offset + q_length)
            first, end = max(start - offset, 0), max(stop - offset, 0)
            start = max(start, first + offset - window[0])
        spans.append((slice(first, max(first, end)), slice(start, max(start, stop))))
    return tuple(
        Segment(len(list(sequences)), queries, keys)
        for (queries, keys), sequences in groupby(spans)
    )


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
        key: [batch, kv_heads, seq_k, head_dim].
        value: [batch, kv_heads, seq_k, v_head_dim].
        attention_mask: from make_mask(), or the model's own.
        is_causal: module.is_causal if None. It counts where there is no mask, as in SDPA.

    Returns:
        [batch, seq_q, heads, v_head_dim], contiguous, and no weights.
    """
    for name, what in (("softcap", "caps its logits"), ("s_aux", "has attention sinks")):
        if options.get(name) is not None:
            raise UsageError(
                f"the model {what}, as neither {NAME} nor sdpa can: load it with "
                'attn_implementation="eager"'
            )
    reason = _refusal(query, key, value, attention_mask, dropout, options)
    # A decoding step may be one of many that the host has ahead of the GPU, or captures.
    can_wait = query.shape[2] > 1 and not torch.compiler.is_compiling()
    if reason and can_wait and isinstance(attention_mask, CacheMask):
        attention_mask = _in_segments(attention_mask)
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
        if isinstance(attention_mask, CacheMask):
            attend = _attend_cache if attention_mask.start is None else _attend_packed
        else:
            many = len(attention_mask.segments) > 1
            packs = many and _refusal_of_lengths(query, key, value) is None
            attend = _attend_packed if packs else _attend_segments
        return attend(query, key, value, attention_mask, scaling), None
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
    if mask is not None and not isinstance(mask, LazyMask):
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
    head_dims = [t.shape[3] for t in (query, key, value)]
    if head_dims[0] != head_dims[1] or not all(d in HEAD_DIMS for d in head_dims):
        return (
            f"q and k must have one head_dim, and v may have another, each {HEAD_DIMS[0]} to "
            f"{HEAD_DIMS[-1]} in multiples of {HEAD_DIMS.step}, not "
            f"{', '.join(map(str, head_dims))}"
        )
    if is_large(*head_dims[1:]):  # not every dtype, device or gradient has a step then
        reason = _refusal_of_steps(*_conditions(query, key, value), False)
        if reason:
            return reason
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0]:
        return "q, k and v must have the same batch"
    if any(t.stride(3) != 1 for t in (query, key, value)):
        return "the last dimension of q, k and v must be contiguous"
    if isinstance(mask, CacheMask):
        why = "only the GPU knows how long a static cache is"
    elif mask is not None and mask.is_window:
        why = "the window is shorter than the sequence"
    else:
        return None
    reason = _refusal_of_lengths(query, key, value)
    return reason and f"{why}, and {reason}"


def _refusal_of_lengths(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why no step can take lengths or a window of these inputs, or None."""
    return _refusal_of_steps(*_conditions(query, key, value), True)


def _conditions(query: Tensor, key: Tensor, value: Tensor) -> tuple:
    """What it depends on, beside lengths, whether there is a step: see _find_refusal()."""
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    deterministic = torch.are_deterministic_algorithms_enabled()
    head_dims = query.shape[3], value.shape[3]
    return needs_grad, deterministic, query.device, query.dtype, *head_dims


@torch.compiler.assume_constant_result  # torch.compile would look into the cache
def _refusal_of_steps(*conditions) -> str | None:
    return _find_refusal(*conditions)


@cache
def _find_refusal(
    needs_grad: bool,
    deterministic: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    with_lengths: bool,
) -> str | None:
    q, v = (torch.empty(1, 1, 1, d, dtype=dtype, device="meta") for d in (head_dim, v_head_dim))
    try:
        for operation in (FORWARD, BACKWARD) if needs_grad else (FORWARD,):
            highest_step(
                backend_of(device),
                operation,
                [q, q, v],
                causal=False,
                deterministic=deterministic,
                as_they_lie=False,
                lengths=Lengths() if with_lengths else None,
            )
    except UsageError as error:
        return str(error)
    return None


def _fall_back(reason: str, module, query, key, value, mask, **options) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _warn(reason)
    if isinstance(mask, LazyMask):
        mask = mask.dense()
    return sdpa_attention_forward(module, query, key, value, mask, **options)


@torch.compiler.assume_constant_result  # torch.compile calls it once, when it traces the call
def _warn(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        warnings.warn(f"{NAME} leaves this to transformers' SDPA: {reason}", stacklevel=2)


def _attend_cache(
    query: Tensor, key: Tensor, value: Tensor, mask: CacheMask, scaling: float | None
) -> Tensor:
    """One call: [batch, seq_q, heads, v_head_dim]."""
    stop = mask.stop.to(query.device)
    o = attention(query, key, value, window=mask.window, seqused_k=stop, softmax_scale=scaling)
    return o.transpose(1, 2).contiguous()


def _in_segments(mask: CacheMask) -> SegmentMask:
    """The same mask of several queries. The host waits for it once, and not in each layer."""
    if mask.in_segments is None:
        start = torch.zeros_like(mask.stop) if mask.start is None else mask.start
        runs = torch.stack([start, mask.stop]).T.tolist()
        q_length = mask.shape[2]
        offset = max(stop for _, stop in runs) - q_length
        segments = _segments(runs, q_length, offset, mask.window)
        mask.in_segments = SegmentMask(
            mask.shape, mask.device, segments, mask.window, cache(mask.dense)
        )
    return mask.in_segments


def _attend_segments(
    query: Tensor, key: Tensor, value: Tensor, mask: SegmentMask, scaling: float | None
) -> Tensor:
    """One call for each segment: [batch, seq_q, heads, v_head_dim], 0 where a query sees no key."""
    sizes = [segment.sequences for segment in mask.segments]
    split = zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    outputs = []
    for segment, (q, k, v) in zip(mask.segments, split, strict=True):
        first, end = segment.queries.start, segment.queries.stop
        if first == end:
            outputs.append(q.new_zeros(*q.shape[:3], v.shape[3]).transpose(1, 2))
            continue
        q_seen, k, v = q[:, :, segment.queries], k[:, :, segment.keys], v[:, :, segment.keys]
        limits = segment.limits(mask.window)
        o = attention(q_seen, k, v, window=limits, softmax_scale=scaling)
        outputs.append(pad(o.transpose(1, 2), (0, 0, 0, 0, first, q.shape[2] - end)))
    return torch.cat(outputs).contiguous()


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, mask: SegmentMask | CacheMask, scaling: float | None
) -> Tensor:
    """The same in one call."""
    batch, heads, seq_q, _ = query.shape
    _, kv_heads, seq_k, _ = key.shape
    # Where queries are few, a cache has the keys, by head: it is viewed and they are copied.
    groups = kv_heads if heads * seq_q < kv_heads * seq_k else 1
    q, k, v = (_pack(t, groups) for t in (query, key, value))
    cu_seqlens_q, cu_seqlens_k, seqused_k = mask.lengths(query.device, groups)
    o = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k=seqused_k,
        window=mask.window,
        softmax_scale=scaling,
    )
    return o.unflatten(0, (batch, groups, seq_q)).transpose(1, 2).flatten(2, 3).contiguous()


def _pack(t: Tensor, groups: int) -> Tensor:
    """[batch, heads, seq, head_dim] as rows of sequences [batch * groups * seq, ...]: each group of
    heads has sequences of its own. A copy where that is no view.
    """
    return t.unflatten(1, (groups, -1)).transpose(2, 3).flatten(0, 2)
