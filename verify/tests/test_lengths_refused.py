"""Lengths and windows that no call takes: bad input gets one clear line."""

from __future__ import annotations

import pytest

from common import UsageError, attention, attention_varlen, cache
from common import operator as op
from verify.tests.lengths_calls import (
    BACKWARD_STEP,
    BACKWARD_STEPS,
    STEP,
    STEPS,
    backward_arguments,
    batched,
    int32,
    normal,
    packed,
)

# What is given to attention() beside or instead of batched().
BAD_BATCH = {
    "a number": ({"window": 4}, r"window must be a pair \(left, right\), not int"),
    "one side": ({"window": (4,)}, r"window must be a pair \(left, right\), not 1 numbers"),
    "a float": ({"window": (4.0, 0)}, "window must be two ints, not one of type float"),
    "a bool": ({"window": (4, True)}, "window must be two ints, not one of type bool"),
    "a low side": (
        {"window": (-2, 0)},
        r"window must be two ints from -1 \(no limit\) up, not -2",
    ),
    "a list": ({"seqused_k": [1, 2]}, "seqused_k must be a torch tensor, not list"),
    "dtype": (
        {"seqused_k": int32(1, 2).long()},
        r"seqused_k must be int32, not torch.int64: pass seqused_k.int\(\)",
    ),
    "axes": (
        {"seqused_k": int32(1, 2)[None]},
        r"seqused_k must be \[sequences\], not of shape \[1, 2\]",
    ),
    "stride": (
        {"seqused_k": int32(1, 2, 3)[::2]},
        r"seqused_k must be contiguous, its stride is 2: pass seqused_k.contiguous\(\)",
    ),
    "device": (
        {"seqused_k": int32(1, 2).to("meta")},
        "seqused_k must be on the device of q, cpu, not on meta",
    ),
    "size": (
        {"seqused_k": int32(1, 2, 3)},
        r"seqused_k must be of shape \[2\], a length for each sequence, not \[3\]",
    ),
    "too many keys": (
        {"seqused_k": int32(70, 71)},
        r"seqused_k must be from 0 to the keys of a sequence: seqused_k\[1\] is 71, and "
        "sequence 1 has 70",
    ),
    "less than none": ({"seqused_k": int32(-1, 3)}, r"seqused_k\[0\] is -1, and sequence 0 has 70"),
    "heads": (
        {"window": (1, 1), "q": normal(2, 3, 21, 64)},
        r"heads \(3\) must be a multiple of kv_heads \(2\)",
    ),
    "batch": (
        {"seqused_k": int32(1), "q": normal(1, 4, 21, 64)},
        "must have the same batch and head_dim",
    ),
    "q's axes": (
        {"window": (1, 1), "q": normal(4, 21, 64)},
        r"q must be \[batch, heads, seq, head_dim\], not of shape \[4, 21, 64\]",
    ),
    "float32": (
        {"window": (1, 1), **{name: t.float() for name, t in batched().items()}},
        f"no step can run these inputs: {STEP} takes bf16, fp16, not fp32",
    ),
    "an older step": (
        {"window": (1, 1), "step": "v07"},
        f"v07 takes no window: the steps that do are {', '.join(STEPS)}",
    ),
    "an older step, of lengths": (
        {"seqused_k": int32(1, 2), "window": (-1, 1), "step": "v07"},
        f"v07 takes no seqused_k and no window: the steps that do are {', '.join(STEPS)}",
    ),
    "no step": ({"window": (1, 1), "step": "v99"}, "no step 'v99'; the steps are v01, v02"),
    "an older backward step": (
        {"window": (1, 1), "backward_step": "b01"},
        f"b01 takes no window: the steps that do are {', '.join(BACKWARD_STEPS)}",
    ),
    "a forward step as a backward step": (
        {"seqused_k": int32(1, 2), "backward_step": STEP},
        f"{STEP} computes forward, not backward: the steps of backward are b01",
    ),
    "a backward step that repeats no bits": (
        {"window": (1, 1), "backward_step": BACKWARD_STEP, "deterministic": True},
        f"{BACKWARD_STEP} does not repeat the bits of dq, and deterministic=True or",
    ),
    "packed": ({"cu_seqlens_q": int32(0, 2)}, "no cu_seqlens_q: attention_varlen.. takes packed"),
    "flash_attn's window": ({"window_size": (1, 1)}, "no window_size: say window=, likewise"),
    "flash_attn's cache": ({"cache_seqlens": int32(1, 2)}, "no cache_seqlens: say seqused_k="),
    "flash_attn's softcap": ({"softcap": 0.0}, "no softcap: logits are not capped"),
    "flash_attn's biases": ({"alibi_slopes": None}, "no alibi_slopes: there are no biases"),
    "flash_attn's lse": ({"return_attn_probs": True}, "no return_attn_probs: say return_lse="),
}

# What is given to attention_varlen() beside or instead of packed().
BAD_PACK = {
    "a list": ({"cu_seqlens_q": [0, 45]}, "cu_seqlens_q must be a torch tensor, not list"),
    "none": ({"cu_seqlens_k": None}, "cu_seqlens_k must be a torch tensor, not NoneType"),
    "q as a list": ({"q": [1.0]}, "q must be a torch tensor, not list"),
    "seqused_k as a list": ({"seqused_k": [1]}, "seqused_k must be a torch tensor, not list"),
    "causal": ({"causal": 1}, "causal must be True or False, not of type int"),
    "deterministic": ({"deterministic": "no"}, "deterministic must be True or False, not of type"),
    "scale": ({"softmax_scale": "1"}, "softmax_scale must be a number, not str"),
    "step": ({"step": 4}, "step must be a step's name or a path, not int"),
    "window": ({"window": "all"}, r"window must be a pair \(left, right\), not str"),
    "dtype": (
        {"cu_seqlens_q": int32(0, 37, 42, 42, 45).long()},
        r"cu_seqlens_q must be int32, not torch.int64: pass cu_seqlens_q.int\(\)",
    ),
    "axes": (
        {"cu_seqlens_k": int32(0, 83)[None]},
        r"cu_seqlens_k must be \[sequences \+ 1\], not of shape \[1, 2\]",
    ),
    "stride": (
        {"cu_seqlens_q": int32(0, 0, 45)[::2], "cu_seqlens_k": int32(0, 83)},
        r"cu_seqlens_q must be contiguous, its stride is 2",
    ),
    "device": (
        {"cu_seqlens_q": int32(0, 45).to("meta")},
        "cu_seqlens_q must be on the device of q, cpu, not on meta",
    ),
    "sizes": (
        {"cu_seqlens_q": int32(0, 45)},
        r"cu_seqlens_q and cu_seqlens_k must have the same shape, \[sequences \+ 1\], not \[2\] "
        r"and \[5\]",
    ),
    "no sequences": (
        {"cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)},
        r"cu_seqlens_q must be \[sequences \+ 1\], not of shape \[1\]: there are no sequences",
    ),
    "seqused_k's size": (
        {"seqused_k": int32(1, 2, 3)},
        r"seqused_k must be of shape \[4\], a length for each sequence, not \[3\]",
    ),
    "begin": (
        {"cu_seqlens_q": int32(1, 37, 42, 42, 45)},
        "cu_seqlens_q must begin with 0, not with 1",
    ),
    "end": (
        {"cu_seqlens_k": int32(0, 70, 79, 83, 84)},
        "cu_seqlens_k must end with 83, as k has rows, not with 84",
    ),
    "falls": (
        {"cu_seqlens_q": int32(0, 37, 43, 42, 45)},
        r"cu_seqlens_q must never fall: cu_seqlens_q\[2\] is 43, and cu_seqlens_q\[3\] is 42",
    ),
    "too many keys": (
        {"seqused_k": int32(70, 9, 5, 0)},
        r"seqused_k\[2\] is 5, and sequence 2 has 4",
    ),
    "a batch": (
        {"q": normal(1, 4, 45, 64)},
        r"q must be \[total, heads, head_dim\], not of shape \[1, 4, 45, 64\]",
    ),
    "no queries": (
        {"q": normal(0, 4, 64), "cu_seqlens_q": int32(0, 0, 0, 0, 0)},
        r"q is empty: shape \[0, 4, 64\]",
    ),
    "no keys": (
        {
            "k": normal(0, 2, 64),
            "v": normal(0, 2, 64),
            "cu_seqlens_k": int32(0, 0, 0, 0, 0),
        },
        r"k is empty: shape \[0, 2, 64\]",
    ),
    "k and v": (
        {"v": normal(82, 2, 64)},
        r"k and v must have the same shape but for head_dim, not \[83, 2, 64\] and \[82, 2, 64\]",
    ),
    "head_dim": (
        {"q": normal(45, 4, 32)},
        r"q \[45, 4, 32\] and k \[83, 2, 64\] must have the same head_dim",
    ),
    "heads": ({"q": normal(45, 3, 64)}, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
    "dtypes": ({"k": normal(83, 2, 64).half()}, "same dtype: q torch.bfloat16, k torch.float16"),
    "devices": ({"k": normal(83, 2, 64).to("meta")}, "same device: q cpu, k meta, v cpu"),
    "last axis": (
        {"q": normal(45, 64, 4).mT},
        r"the last dimension of q must be contiguous, its stride is 4: pass q.contiguous\(\)",
    ),
    "alignment": (
        {"q": normal(45, 4, 65)[..., 1:]},
        f"no step can run these inputs: {STEP} reads 16 bytes at a time, and the",
    ),
    "alignment, for a step": (
        {"q": normal(45, 4, 65)[..., 1:], "step": STEP},
        f"{STEP} reads 16 bytes at a time, and the address of q is not a multiple of 16",
    ),
    "an older step": (
        {"step": "v12", "causal": True},
        f"v12 takes no cu_seqlens_q and no cu_seqlens_k: the steps that do are {', '.join(STEPS)}",
    ),
    "the longest": ({"max_seqlen_q": 37}, "no max_seqlen_q: leave it out, no step needs it"),
    "the longest keys": ({"max_seqlen_k": 70}, "no max_seqlen_k: leave it out, no step needs it"),
    "dropout": ({"dropout_p": 0.0}, r"attention_varlen\(\) takes no dropout_p: there is no drop"),
    "window_size": ({"window_size": (1, 1)}, "takes no window_size: say window=, likewise"),
    "pages": ({"block_table": None}, "takes no block_table: there is no paged cache"),
    "backward_step": (
        {"backward_step": 4},
        "backward_step must be a step's name or a path, not int",
    ),
    "an older backward step": (
        {"backward_step": "b01"},
        "b01 takes no cu_seqlens_q and no cu_seqlens_k: the steps that do are "
        + ", ".join(BACKWARD_STEPS),
    ),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("function", "make", "name"),
    [(attention, batched, name) for name in BAD_BATCH]
    + [(attention_varlen, packed, name) for name in BAD_PACK],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_bad_input_gets_one_clear_line(function, make, name, seen, monkeypatch) -> None:
    """Also after a good call, whose choice the same kind of inputs share."""
    bad, message = (BAD_BATCH if make is batched else BAD_PACK)[name]
    monkeypatch.setattr(op, "_calls", cache.Cache())
    if seen:
        good = {"window": (1, 1)} if make is batched else {}
        function(**make(), **good)
    with pytest.raises(UsageError, match=message) as error:
        function(**(make() | bad))
    assert "\n" not in str(error.value)


def test_what_torch_reports_of_the_operator() -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k = packed().values()
    options = (None, -1, -1, False, None, None, None, False)
    for given, told in (
        ((cu_seqlens_q, None), "^cu_seqlens_q is given without cu_seqlens_k"),
        ((None, cu_seqlens_k), "^cu_seqlens_k is given without cu_seqlens_q"),
    ):
        with pytest.raises(UsageError, match=told):
            op.forward_lengths(q, k, v, *given, *options)
    with pytest.raises(UsageError, match="v07 takes no lengths or window: the steps that do are"):
        op.forward_lengths(*batched().values(), None, None, *options[:-3], "v07", None, False)


@pytest.mark.parametrize("function", [attention, attention_varlen])
def test_an_unknown_keyword_is_a_type_error(function) -> None:
    inputs = batched() if function is attention else packed()
    told = rf"{function.__name__}\(\) got an unexpected keyword argument 'chunk'"
    with pytest.raises(TypeError, match=told):
        function(**inputs, chunk=4)


BAD_FOR_BACKWARD = {
    "lse's dtype": ("lse", lambda t: t.bfloat16(), "lse must be float32, not torch.bfloat16"),
    "lse's shape": ("lse", lambda t: t.T, r"lse must be of shape \[4, 45\], not \[45, 4\]"),
    "o's shape": ("o", lambda t: t[1:], r"o must be of shape \[45, 4, 64\], not \[44, 4, 64\]"),
    "o's axes": ("o", lambda t: t[None], r"o must be of shape \[45, 4, 64\], not \[1, 45"),
    "dout's axes": ("dout", lambda t: t[0], r"dout must be of shape \[45, 4, 64\], not \[4, 64\]"),
    "o's last axis": ("o", lambda t: t.mT.contiguous().mT, "the last dimension of o must be"),
    "dout's dtype": (
        "dout",
        lambda t: t.half(),
        r"q, k, v, o and dout must have the same dtype: q torch\.bfloat16, .*dout torch\.float16",
    ),
    "devices": ("lse", lambda t: t.to("meta"), "q, k, v, o, lse and dout must have the same dev"),
    "k's axes": ("k", lambda t: t[None], r"k must be \[total, heads, head_dim\], not of shape"),
    "lengths": ("cu_seqlens_k", lambda t: t.long(), "cu_seqlens_k must be int32, not torch.int64"),
    "lengths' values": ("cu_seqlens_q", lambda t: t - 1, "cu_seqlens_q must begin with 0, not wi"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", BAD_FOR_BACKWARD)
def test_what_cannot_be_of_one_forward_pass(name: str, seen: bool, monkeypatch) -> None:
    changed, change, message = BAD_FOR_BACKWARD[name]
    monkeypatch.setattr(op, "_calls", cache.Cache())
    arguments, _ = backward_arguments("cpu")
    names = ("q", "k", "v", "o", "lse", "dout", "cu_seqlens_q", "cu_seqlens_k")
    inputs = dict(zip(names, arguments, strict=False))
    options = arguments[len(names) :]
    if seen:
        op.backward_lengths(*inputs.values(), *options)
    inputs[changed] = change(inputs[changed])
    with pytest.raises(UsageError, match=message):
        op.backward_lengths(*inputs.values(), *options)
