"""The public call: what it accepts, what it refuses, and how it behaves on a GPU's streams."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common import UsageError, attention
from common.catalog import all_steps, find_step
from common.lengths import Lengths
from common.operation import BACKWARD, FORWARD, OPERATIONS, Operation
from common.operator import highest_step
from common.runtime.cpu import CpuBackend
from common.step import FEW_HEADS, FEW_QUERIES, FEW_ROWS, FEW_WORK_TILES, FEWEST_ROWS
from verify.layouts import contiguous, transposed
from verify.reference import attention_reference

SCALE = 64**-0.5
# What attention() takes for the inputs below, whose rows are few.
NEWEST = [
    step.name
    for step in all_steps()
    if step.operation == FORWARD
    and (step.is_candidate() or step.few == FEW_ROWS)
    and not (step.takes_lengths or step.draft)
][-1]


def _inputs(device: str = "cpu", **overrides) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 37, 64), "k": (2, 2, 45, 64), "v": (2, 2, 45, 64)}
    tensors = {
        n: torch.randn(s, generator=rng).to(device, torch.bfloat16) for n, s in shapes.items()
    }
    return tensors | overrides


def _assert_right(o: torch.Tensor, inputs: dict[str, torch.Tensor], causal: bool = False) -> None:
    expected, _ = attention_reference(**inputs, causal=causal, softmax_scale=SCALE)
    assert (o.double() - expected).abs().max() < 0.02


def test_takes_the_highest_step_that_can_run() -> None:
    inputs = _inputs()
    assert torch.equal(attention(**inputs), attention(**inputs, step=NEWEST))
    # One element off a 16-byte boundary: only v01 reads element by element.
    inputs["q"] = torch.zeros(2, 4, 37, 65, dtype=torch.bfloat16)[..., 1:].copy_(inputs["q"])
    assert torch.equal(attention(**inputs), attention(**inputs, step="v01"))
    with pytest.raises(UsageError, match=f"{NEWEST} reads 16 bytes at a time"):
        attention(**inputs, step=NEWEST)


def test_a_step_of_another_ladder_is_not_taken(monkeypatch) -> None:
    monkeypatch.setitem(OPERATIONS, "x", replace(FORWARD, name="another", letter="x"))
    first = find_step("v01")
    monkeypatch.setattr("common.operator.all_steps", lambda: (first, replace(first, name="x01")))
    inputs = tuple(_inputs().values())
    assert highest_step(CpuBackend(), FORWARD, inputs, causal=False) is first


def test_a_step_for_few_is_taken_only_for_them(monkeypatch) -> None:
    first = find_step("v01")
    few = replace(first, name="v97", few=FEW_QUERIES)
    tiles = replace(first, name="v98", few=FEW_WORK_TILES)
    rows = replace(first, name="v99", few=FEW_ROWS)
    fewest = replace(first, name="v95", few=FEWEST_ROWS)
    heads = replace(first, name="v96", few=FEW_HEADS)
    steps = first, fewest, heads, few, tiles, rows
    monkeypatch.setattr("common.operator.all_steps", lambda: steps)
    own, shared = (torch.zeros(1, num, 3, 8) for num in (4, 2))
    some, many, most = (own[:, :, :1].expand(-1, -1, keys, -1) for keys in (2000, 20000, 70000))
    batched = shared.expand(40, -1, -1, -1)
    for k, seq_q, step in (
        (own, 1, fewest),
        (own, 16, fewest),
        (own, 17, rows),
        (own, 1056, rows),
        (own, 1057, first),
        (some, 32, heads),
        (some, 33, heads),
        (some, 10000, first),
        (many, 32, fewest),
        (many, 33, few),
        (most, 16, fewest),
        (most, 17, rows),
        (most, 32, rows),
        (most, 33, few),
        (many, 128, few),
        (many, 129, tiles),
        (many, 10000, first),
        (batched, 8, fewest),
        (batched, 9, rows),
        (batched, 16, rows),
        (batched, 17, few),
        (batched, 64, few),
        (batched, 65, first),
    ):
        inputs = (torch.zeros(1, 1, 1, 8).expand(k.shape[0], 4, seq_q, -1), k, k)
        for options in ({}, {"deterministic": True}):
            found = highest_step(
                CpuBackend(), FORWARD, inputs, causal=False, as_they_lie=False, **options
            )
            assert found is step
    # How many keys' heads there are is not known.
    alone = [torch.zeros(1, 1, 1, 8)]
    assert highest_step(CpuBackend(), FORWARD, alone, False, as_they_lie=False) is first
    for seq_q, step in ((16, rows), (17, few)):
        drafts = (first, replace(step, draft="not yet"))
        monkeypatch.setattr("common.operator.all_steps", lambda drafts=drafts: drafts)
        inputs = (torch.zeros(40, 4, seq_q, 8), batched, batched)
        assert highest_step(CpuBackend(), FORWARD, inputs, False, as_they_lie=False) is first


def test_what_attention_takes_for_few_rows() -> None:
    """The newest step for them, whether heads share keys or not, and whatever the mask."""
    newest = [step.name for step in all_steps() if step.few == FEW_ROWS and not step.draft][-1]
    for heads, kv_heads, seq_q, is_few in ((16, 16, 32, True), (32, 8, 8, True), (32, 8, 9, False)):
        q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(8, heads, seq_q, -1)
        k = q[:, :1, :1].expand(-1, kv_heads, 8193, -1)
        for causal in (False, True):
            assert (_newest(FORWARD, (q, k, k), causal) == newest) is is_few


def test_a_step_for_large_head_dim_is_taken_only_for_it(monkeypatch) -> None:
    first = replace(find_step("v01"), limits=find_step("v15").limits)
    large = replace(first, name="v98", only_large_head_dim=True)
    monkeypatch.setattr("common.operator.all_steps", lambda: (first, large))
    for head_dim, step in ((8, first), (256, first), (264, large), (1024, large)):
        for seq_q in (1, 300):
            q = torch.zeros(1, 1, seq_q, head_dim, dtype=torch.bfloat16)
            for deterministic in (False, True):
                assert highest_step(CpuBackend(), FORWARD, (q, q, q), False, deterministic) is step
    q = torch.zeros(1, 1, 1, 264, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="there is no step of forward for lengths"):
        highest_step(CpuBackend(), FORWARD, (q, q, q), False, lengths=Lengths())


def _large_heads(head_dim: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    shapes = (1, 2, 5, head_dim), (1, 1, 70, head_dim), (1, 1, 70, head_dim)
    return tuple(torch.randn(shape, generator=rng).to(torch.bfloat16) for shape in shapes)


def _torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    """Torch's attention, in float32."""
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return torch.nn.functional.scaled_dot_product_attention(
        *(t.float() for t in (q, k, v)),
        attn_mask=visible.tril(k.shape[2] - q.shape[2]) if causal else None,
        enable_gqa=True,
    )


def _newest(operation: Operation, inputs: tuple[torch.Tensor, ...], causal: bool) -> str:
    return highest_step(CpuBackend(), operation, inputs, causal, as_they_lie=False).name


@pytest.mark.parametrize("causal", [False, True])
def test_large_head_dim(causal: bool) -> None:
    q, k, v = (t.requires_grad_() for t in _large_heads(264))
    assert _newest(FORWARD, (q, k, v), causal) == "v15"
    assert _newest(BACKWARD, (q, k, v), causal) == "b12"
    o = attention(q, k, v, causal=causal)
    expected = _torch_attention(q, k, v, causal)
    torch.testing.assert_close(o.float(), expected, atol=2**-8, rtol=2**-7)
    dout = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype)
    gradients = torch.autograd.grad(o, (q, k, v), dout)
    of_torch = torch.autograd.grad(expected, (q, k, v), dout.float())
    torch.testing.assert_close(gradients, of_torch, atol=2**-8, rtol=2**-7)
    again = attention(q, k, v, causal=causal, step="v15", backward_step="b12")
    assert torch.equal(o, again)
    assert all(map(torch.equal, gradients, torch.autograd.grad(again, (q, k, v), dout)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("operation", [FORWARD, BACKWARD], ids=lambda operation: operation.name)
def test_up_to_256_columns_are_not_sliced(operation: Operation, deterministic: bool) -> None:
    for head_dim in (128, 256):
        inputs = _large_heads(head_dim)
        step = highest_step(
            CpuBackend(), operation, inputs, False, deterministic, as_they_lie=False
        )
        assert not step.only_large_head_dim


@pytest.mark.parametrize(
    ("dtype", "head_dim", "told"),
    [
        (torch.float32, 264, "takes bf16, fp16, not fp32"),
        (torch.bfloat16, 268, "takes head_dim 8 to 1024 in multiples of 8, not 268"),
        (torch.bfloat16, 1032, "takes head_dim 8 to 1024 in multiples of 8, not 1032"),
    ],
)
def test_large_head_dim_that_no_step_takes(dtype: torch.dtype, head_dim: int, told: str) -> None:
    inputs = tuple(t.to(dtype) for t in _large_heads(head_dim))
    refused = "^no step can run these inputs: "
    with pytest.raises(UsageError, match=f"{refused}(v19 .*256.*; )?v1[59] {told}(; v|$)"):
        attention(*inputs)
    with pytest.raises(UsageError, match=f"{refused}(b13 .*; )?b1. {told}; b"):
        _newest(BACKWARD, inputs, causal=False)


def _heads_of(head_dim: int, v_head_dim: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    shapes = (1, 2, 5, head_dim), (1, 1, 70, head_dim), (1, 1, 70, v_head_dim)
    return tuple(torch.randn(shape, generator=rng).to(torch.bfloat16) for shape in shapes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(72, 40), (264, 72)])
def test_v_has_a_head_dim_of_its_own(head_dims: tuple[int, int], causal: bool) -> None:
    """The step that takes it is chosen, and the scale is that of q and k."""
    q, k, v = _heads_of(*head_dims)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert highest_step(CpuBackend(), FORWARD, (q, k, v), causal).name == "v15"
    o, lse = attention(q, k, v, causal=causal, return_lse=True)
    assert o.shape == (1, 2, 5, head_dims[1])
    assert o.transpose(1, 2).is_contiguous()
    scale = head_dims[0] ** -0.5
    expected_o, expected_lse = attention_reference(q, k, v, causal=causal, softmax_scale=scale)
    assert (o.double() - expected_o).abs().max() < 0.02
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
    # The same head_dim again, with the same step.
    padded = torch.nn.functional.pad(v, (0, head_dims[0] - head_dims[1]))
    again = attention(q, k, padded, causal=causal, step="v15")[..., : head_dims[1]]
    assert torch.equal(o, again)


@pytest.mark.parametrize(
    ("head_dims", "step"), [((72, 40), "b13"), ((256, 248), "b13"), ((264, 72), "b12")]
)
def test_gradients_where_v_has_a_head_dim_of_its_own(head_dims: tuple[int, int], step: str) -> None:
    """They are those of the same head_dim, with zeros behind v's columns."""
    q, k, v = (t.requires_grad_() for t in _heads_of(*head_dims))
    assert _newest(BACKWARD, (q, k, v), causal=True) == step
    dout = torch.randn(1, 2, 5, head_dims[1]).to(torch.bfloat16)
    gradients = torch.autograd.grad(attention(q, k, v, causal=True), (q, k, v), dout)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    padded = torch.nn.functional.pad(v, (0, head_dims[0] - head_dims[1]))
    o = attention(q, k, padded, causal=True, step="v15", backward_step=step)[..., : head_dims[1]]
    for gradient, expected in zip(gradients, torch.autograd.grad(o, (q, k, v), dout), strict=True):
        assert torch.equal(gradient, expected)


def test_a_head_dim_of_v_decides_for_no_other() -> None:
    q, k, v = _heads_of(72, 40)
    first = attention(q, k, v)
    same = attention(q, k, k)
    assert same.shape == q.shape
    assert torch.equal(attention(q, k, v), first)
    assert torch.equal(attention(q, k, k), same)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"step": "v12"}, r"^v12 takes v of q's head_dim, 72, not of 40: pad v with zeros$"),
        (
            {"v": torch.zeros(1, 1, 70, 264, dtype=torch.bfloat16), "step": "v04"},
            r"^v04 takes head_dim 8 to 256 in multiples of 8, not 264$",
        ),
        (
            {"v": torch.zeros(1, 1, 70, 80, dtype=torch.bfloat16), "step": "v12"},
            r"^v12 takes v of q's head_dim, 72, not of 80: pad q and k with zeros and give "
            r"softmax_scale$",
        ),
        (
            {"v": torch.zeros(1, 1, 70, 44, dtype=torch.bfloat16)},
            r"^no step can run these inputs: (v20 .*; )?v15 takes head_dim 8 to 1024 in multiples "
            r"of 8, not 44",
        ),
        (
            {"v": torch.zeros(1, 1, 69, 40, dtype=torch.bfloat16)},
            r"^k and v must have the same shape but for head_dim, not \[1, 1, 70, 72\] and "
            r"\[1, 1, 69, 40\]$",
        ),
        (
            {"window": (8, 0)},
            r"^no step can run these inputs: v16 takes v of q's head_dim, 72, not of 40",
        ),
    ],
    ids=["step", "large v", "larger v", "v by 8", "keys", "window"],
)
def test_a_head_dim_of_v_that_no_step_takes_is_one_clear_line(change: dict, told: str) -> None:
    inputs = dict(zip("qkv", _heads_of(72, 40), strict=True))
    with pytest.raises(UsageError, match=told) as error:
        attention(**(inputs | change))
    assert "\n" not in str(error.value)


def test_output_lies_like_q_and_lse_comes_on_request() -> None:
    inputs = _inputs()
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    o, lse = attention(**inputs, causal=True, return_lse=True)
    assert o.stride() == inputs["q"].stride()
    _assert_right(o, inputs, causal=True)
    _, expected = attention_reference(**inputs, causal=True, softmax_scale=SCALE)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_that_begins_with_infinite_logits(dtype: torch.dtype) -> None:
    """A whole tile of logits -inf counts for nothing, however low the finite ones that follow."""
    # Logits -inf where q meets an infinite k; the others are about -150: 2^(S - 0) would be 0.
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 64, generator=rng) for n in (37, 300, 300))
    q[..., 0], k[..., 0] = 1.0, -150.0 / SCALE
    k[:, :, :128, 0] = -torch.inf
    q, k, v = (x.to(dtype) for x in (q, k, v))
    o, lse = attention(q, k, v, return_lse=True)
    finite = {"q": q, "k": k[:, :, 128:], "v": v[:, :, 128:]}
    _assert_right(o, finite)
    _, expected = attention_reference(**finite, causal=False, softmax_scale=SCALE)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=1e-4)


def test_scale_defaults_to_the_root_of_head_dim() -> None:
    inputs = _inputs()
    assert torch.equal(attention(**inputs), attention(**inputs, softmax_scale=SCALE))


BAD = {
    "a list": (lambda x: {"q": [1.0]}, "q must be a torch tensor, not list"),
    "three axes": (lambda x: {"k": x["k"][0]}, r"k must be \[batch, heads, seq, head_dim\]"),
    "empty": (lambda x: {"v": x["v"][:, :, :0]}, r"v is empty: shape \[2, 2, 0, 64\]"),
    "float64": (lambda x: {"q": x["q"].double()}, "not torch.float64"),
    "meta": (lambda x: {"q": x["q"].to("meta")}, "same device: q meta, k cpu, v cpu"),
    "last axis": (
        lambda x: {"q": x["q"].transpose(2, 3).contiguous().transpose(2, 3)},
        r"the last dimension of q must be contiguous, its stride is 37: pass q.contiguous\(\)",
    ),
    "dtypes": (lambda x: {"k": x["k"].half()}, "same dtype: q torch.bfloat16, k torch.float16"),
    "k and v": (lambda x: {"v": x["v"][:, :, 1:]}, "k and v must have the same shape"),
    "batch": (lambda x: {"q": x["q"][:1]}, "must have the same batch and head_dim"),
    "heads": (lambda x: {"q": x["q"][:, :3]}, r"heads \(3\) must be a multiple of kv_heads \(2\)"),
    "head_dim": (
        lambda x: {n: t[..., :60].contiguous() for n, t in x.items()},
        f"{NEWEST} takes head_dim 8 to 256 in multiples of 8, not 60",
    ),
    "causal": (lambda x: {"causal": "no"}, "causal must be True or False, not of type str"),
    "causal as a number": (
        lambda x: {"causal": 1},
        "causal must be True or False, not of type int",
    ),
    "scale": (lambda x: {"softmax_scale": "1"}, "softmax_scale must be a number, not str"),
    "large scale": (
        lambda x: {"softmax_scale": 1e39},
        r"softmax_scale must be a float32, not 1e\+39",
    ),
    "sdpa's is_causal": (
        lambda x: {"is_causal": True},
        r"takes no is_causal: say causal=, whose mask ends at the last query and the last key "
        r"\(query i sees keys j <= i \+ seq_k - seq_q\), where torch's begins at the first",
    ),
    "sdpa's scale": (lambda x: {"scale": 1.0}, "takes no scale: say softmax_scale="),
    "sdpa's mask": (lambda x: {"attn_mask": None}, "takes no attn_mask: causal=True is the only"),
    "sdpa's dropout": (lambda x: {"dropout_p": 0.0}, "takes no dropout_p: there is no dropout"),
    "sdpa's gqa": (lambda x: {"enable_gqa": True}, "takes no enable_gqa: leave it out"),
    "step": (lambda x: {"step": "v99"}, "no step 'v99'; the steps are v01, v02"),
    "step as a number": (lambda x: {"step": 4}, "step must be a step's name or a path, not int"),
    "a backward step": (
        lambda x: {"step": "b01"},
        "b01 computes backward, not forward: the steps of forward are v01, v02",
    ),
    "deterministic": (
        lambda x: {"deterministic": "no"},
        "deterministic must be True or False, not of type str",
    ),
    "backward_step": (lambda x: {"backward_step": "b99"}, "no step 'b99'; the steps are v01, v02"),
    "backward_step as a number": (
        lambda x: {"backward_step": 1},
        "backward_step must be a step's name or a path, not int",
    ),
    "a forward step": (
        lambda x: {"backward_step": "v04"},
        "v04 computes forward, not backward: the steps of backward are b01",
    ),
    "a backward step that is nowhere": (
        lambda x: {"backward_step": "b01.cu"},
        "no file 'b01.cu'; the steps are v01, v02",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_line(name: str) -> None:
    change, message = BAD[name]
    inputs = _inputs()
    with pytest.raises(UsageError, match=message) as error:
        attention(**(inputs | change(inputs)))
    assert "\n" not in str(error.value)


def test_a_numpy_bool_is_a_bool() -> None:
    inputs = _inputs()
    for causal in (False, True):
        expected = attention(**inputs, causal=causal)
        assert torch.equal(attention(**inputs, causal=np.bool_(causal)), expected)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk'"):
        attention(**_inputs(), chunk=4)


@pytest.mark.gpu
def test_runs_on_the_current_stream_without_waiting() -> None:
    inputs = _inputs("cuda")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            attention(**inputs)  # compiles, and allocates the stream's memory
            torch.cuda.synchronize()
            late = {name: torch.zeros_like(t) for name, t in inputs.items()}
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            for name, t in inputs.items():
                late[name].copy_(t)
            o = attention(**late)
            assert not stream.query(), "attention waited for the device"
            copy = o.clone()
        stream.synchronize()
        _assert_right(copy, inputs)


@pytest.mark.gpu
def test_can_be_captured_in_a_cuda_graph() -> None:
    inputs = _inputs("cuda")
    static = {name: torch.zeros_like(t) for name, t in inputs.items()}
    attention(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(**static)
    for name, t in inputs.items():
        static[name].copy_(t)
    for _ in range(2):
        o.zero_()
        graph.replay()
        assert torch.equal(o, attention(**inputs))
    _assert_right(o, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [8, 40, 72, 136, 248])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dims_that_fill_no_panel(head_dim: int, causal: bool) -> None:
    shapes = {"q": (2, 6, 300, head_dim), "k": (2, 2, 333, head_dim), "v": (2, 2, 333, head_dim)}
    inputs = {
        name: torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for name, shape in shapes.items()
    }
    expected, _ = attention_reference(**inputs, causal=causal, softmax_scale=head_dim**-0.5)
    assert (attention(**inputs, causal=causal) - expected).abs().max() < 0.05


@pytest.mark.gpu
def test_transposed_storage_is_not_copied() -> None:
    shape = (2, 2048, 8, 128)  # [batch, seq, heads, head_dim]
    q, k, v = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(3)
    )
    attention(q, k, v, causal=True)  # no step takes a workspace then
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert o.stride() == q.stride()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < o.nbytes + lse.nbytes + q.nbytes / 2  # the allocator rounds up
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(o, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [None, "v07"])
@pytest.mark.parametrize("long", ["q", "k"])
@pytest.mark.parametrize("layout", [contiguous, transposed])
def test_more_than_2_to_the_31_elements(layout, long: str, step: str | None) -> None:
    """In q and o, or in k and v: the last queries must find the last keys, in the last head."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("less than 40 GB are free")
    many, few = 2**20 + 72, 72
    seq_q, seq_k = (many, few) if long == "q" else (few, many)

    def make(seq: int) -> torch.Tensor:
        return layout((1, 16, seq, 128), dtype=torch.bfloat16, device="cuda")[1]

    q, k, v = make(seq_q).normal_(), make(seq_k).zero_(), make(seq_k).normal_()
    k[:, :, -few:].normal_().mul_(16)  # only these count
    assert max(q.numel(), k.numel()) > 2**31
    o, lse = attention(q, k, v, step=step, return_lse=True)
    last = slice(-1, None), slice(-few, None)  # head, queries
    expected_o, expected_lse = attention_reference(
        q[:, last[0], last[1]], k[:, last[0]], v[:, last[0]], causal=False, softmax_scale=128**-0.5
    )
    assert (o[:, last[0], last[1]] - expected_o).abs().max() < 0.1
    assert (lse[:, last[0], last[1]] - expected_lse).abs().max() < 1e-3


@pytest.mark.gpu
def test_devices_must_agree() -> None:
    with pytest.raises(UsageError, match="same device"):
        attention(**_inputs("cuda", k=_inputs()["k"]))


@pytest.mark.gpu
def test_workspace_that_does_not_fit() -> None:
    q = torch.zeros(1, 1, 1 << 20, 8, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UsageError, match=r"v02 needs a workspace of \d+ bytes, and \d+ are free"):
        attention(q, q, q, step="v02")
