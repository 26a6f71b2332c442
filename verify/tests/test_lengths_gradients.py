"""Gradients of calls with lengths and windows: in every way to them, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import autograd, func
from torch.utils.checkpoint import checkpoint

from common import UsageError, attention, attention_varlen, cache
from common import operator as op
from verify.tests.lengths_calls import (
    BACKWARD_STEP,
    BACKWARD_STEPS,
    BF16,
    LEFT_OVER_STEP,
    assert_close,
    assert_equal_but_for_order,
    batched,
    batched_reference,
    differentiable,
    differentiate,
    int32,
    normal,
    packed,
    packed_reference,
)

# A call of each kind; what it is given, and what it computes in float64.
CALLS = {
    "packed": (
        partial(attention_varlen, causal=True),
        packed(),
        packed_reference,
        {"causal": True},
    ),
    "window": (partial(attention, window=(3, 3)), batched(), batched_reference, {"window": (3, 3)}),
    "seqused_k": (attention, batched(seqused_k=int32(70, 33)), batched_reference, {}),
}
calls = pytest.mark.parametrize("kind", CALLS)


@calls
def test_where_no_derivative_is_computed(kind: str) -> None:
    function, inputs, _, _ = CALLS[kind]
    expected = function(**inputs)
    assert not expected.requires_grad
    leaves = differentiable(inputs)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = function(**leaves)
        assert torch.equal(found, expected)
        assert not found.requires_grad
    q = leaves.pop("q").detach()
    with pytest.raises(UsageError, match=r"^q has a tangent, and there is no forward-mode deriv"):
        func.jvp(lambda q: function(q=q, **leaves), (q,), (q,))
    # What is not differentiated may be computed within it.
    scale = torch.tensor(2.0)
    found = func.grad(lambda scale: scale * function(**inputs).float().sum())(scale)
    assert torch.equal(found, expected.float().sum())


@pytest.mark.parametrize(
    ("kind", "names"), [("packed", "q"), ("packed", "kv"), ("window", "k"), ("seqused_k", "v")]
)
def test_only_what_requires_grad_gets_a_gradient(kind: str, names: str) -> None:
    function, inputs, _, _ = CALLS[kind]
    expected = dict(zip("qkv", differentiate(function, differentiable(inputs)), strict=True))
    inputs = differentiable(inputs, names)
    o = function(**inputs)
    with torch.no_grad():  # which is of what is recorded, and not of what was
        o.backward(normal(*o.shape, seed=3))
    found = {name: inputs[name].grad for name in "qkv"}
    for name in set("qkv") - set(names):
        assert found[name] is None
        found[name] = expected[name]
    assert_equal_but_for_order(list(found.values()), list(expected.values()))


def checkpointed(function: Callable, q: torch.Tensor) -> torch.Tensor:
    q = q.clone().requires_grad_()
    checkpoint(function, q, use_reentrant=False).backward()
    return q.grad


# The gradient of a function of q that returns a number, at q.
WAYS = {
    "grad": lambda f, q: func.grad(f)(q),
    "vjp": lambda f, q: func.vjp(f, q)[1](torch.ones((), dtype=torch.float64))[0],
    "functional.vjp": lambda f, q: autograd.functional.vjp(f, q)[1],
    "checkpoint": checkpointed,
    "grad of what grad does not see": lambda f, q: func.grad(
        lambda x: func.grad(lambda y: f(x) * y.double().mean())(q).double().sum()
    )(q),
}
# Ways that map over the call, which lengths do not allow.
MAPPED = {
    "jacrev": lambda f, q: func.jacrev(lambda x: torch.stack([f(x), f(2 * x)]))(q),
    "vmap of grad": lambda f, q: torch.vmap(func.grad(f))(torch.stack([q, -q])),
    "grad of vmap": lambda f, q: func.grad(lambda x: torch.vmap(f)(x).sum())(torch.stack([q, -q])),
}


def square_of(function: Callable, inputs: dict[str, torch.Tensor]) -> tuple[Callable, torch.Tensor]:
    """A function of q that returns a number, and q."""
    others = dict(inputs)
    q = others.pop("q")

    def square(q: torch.Tensor) -> torch.Tensor:
        o = function(q=q, **others)
        return (o[0] if isinstance(o, tuple) else o).double().square().sum()

    return square, q


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for kind in ("packed", "seqused_k") for way in WAYS]
    + [("window", way) for way in MAPPED],
)
def test_every_way_to_a_gradient(kind: str, way: str) -> None:
    function, inputs, formula, mask = CALLS[kind]
    differentiate = (WAYS | MAPPED)[way]
    found, expected = (
        differentiate(*square_of(each, inputs)) for each in (function, partial(formula, **mask))
    )
    assert found.dtype == BF16
    assert_close([found], [expected])


@pytest.mark.parametrize("way", ["grad", "vjp"])
def test_a_compiled_gradient(way: str) -> None:
    function, inputs, _, _ = CALLS["packed"]
    square, q = square_of(function, inputs)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: WAYS[way](square, x), backend="aot_eager")
    assert_close([compiled(q)], [WAYS[way](square, q)])


@pytest.mark.parametrize("way", MAPPED)
def test_torch_vmap_does_not_map_over_lengths_in_a_backward_pass(way: str) -> None:
    function, inputs, _, _ = CALLS["packed"]
    with pytest.raises(UsageError, match="no call with cu_seqlens_q and cu_seqlens_k: put all"):
        MAPPED[way](*square_of(function, inputs))


@calls
def test_a_second_derivative_is_refused_where_it_is_used(kind: str) -> None:
    function, inputs, _, _ = CALLS[kind]
    leaves = differentiable(inputs)
    o = function(**leaves)
    gradients = autograd.grad(
        o, [leaves[name] for name in "qkv"], normal(*o.shape, seed=3), create_graph=True
    )
    assert all(gradient.requires_grad for gradient in gradients)
    assert_equal_but_for_order(gradients, differentiate(function, leaves))
    with pytest.raises(UsageError, match=r"^a second derivative was asked for"):
        sum(gradient.sum() for gradient in gradients).backward()
    square, q = square_of(function, inputs)
    with pytest.raises(UsageError, match=r"^a second derivative was asked for"):
        func.grad(lambda q: func.grad(square)(q).sum())(q)


def test_lse_has_no_gradient() -> None:
    o, lse = attention_varlen(**differentiable(packed()), return_lse=True)
    assert o.requires_grad
    assert not lse.requires_grad


def test_lengths_must_stay_as_they_are_until_the_backward_pass() -> None:
    for name, inputs, function in (
        ("cu_seqlens_k", differentiable(packed()), attention_varlen),
        ("seqused_k", differentiable(batched(seqused_k=int32(3, 4))), attention),
    ):
        o = function(**inputs)
        inputs[name].add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


@pytest.mark.parametrize(
    ("function", "make", "mask"),
    [(attention_varlen, packed, {}), (attention, batched, {"window": (3, 3)})],
)
def test_gradients_of_the_same_bits_each_time(
    function, make, mask, chosen_steps, monkeypatch
) -> None:
    """Whether the call asks for them, or torch is told to, another step computes them."""

    def gradients(**options) -> tuple:
        monkeypatch.setattr(op, "_calls", cache.Cache())  # nothing is chosen yet
        return differentiate(partial(function, **mask, **options), inputs)

    inputs = differentiable(make())
    any_bits, asked = gradients(), gradients(deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        told = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    taken = [name for name, _ in chosen_steps if name in BACKWARD_STEPS]
    assert taken == [BACKWARD_STEP, LEFT_OVER_STEP, LEFT_OVER_STEP]
    assert all(torch.equal(x, y) for x, y in zip(asked, told, strict=True))
    assert_close(any_bits, [x.double() for x in asked])


GRADIENT_LAYOUTS = {
    "expanded": lambda t: t[:1, :1].expand(t.shape),
    "all strides 0": lambda t: t[:1, :1, :1].expand(t.shape),
    "padded": lambda t: torch.cat([t, t], dim=-1)[..., : t.shape[-1]],
    "by heads": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "by columns": lambda t: t.mT.contiguous().mT,
    "rows at odd addresses": lambda t: torch.cat([t, t[..., :1]], dim=-1)[..., : t.shape[-1]],
    "starts at 2 bytes": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
def test_the_gradient_of_o_may_lie_anyhow(layout: str) -> None:
    inputs = differentiable(packed())
    dout = GRADIENT_LAYOUTS[layout](normal(*inputs["q"].shape, seed=3))
    plain = dout.contiguous().clone()
    found, expected = (differentiate(attention_varlen, inputs, each) for each in (dout, plain))
    assert_equal_but_for_order(found, expected)


def test_outputs_computed_without_gradients_may_change_in_place() -> None:
    """Which autograd refuses of a view that was made so."""
    weight = torch.ones((), requires_grad=True)
    with torch.no_grad():
        outputs = attention_varlen(**packed(), return_lse=True)
    for t in outputs:
        t.mul_(weight)
        assert t.requires_grad
