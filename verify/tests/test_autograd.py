"""attention()'s gradients: what autograd asks for, in every way it can, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import autograd, func
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from common import UsageError, attention, cache
from common import operator as op
from common.catalog import all_steps, find_step
from common.operation import BACKWARD
from verify.layouts import (
    contiguous,
    expanded_rows,
    misaligned_rows,
    misaligned_start,
    padded,
    transposed,
)

# Of two calls that must have the same bits.
ordered = partial(attention, deterministic=True)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKWARD_STEPS = [step for step in all_steps() if step.operation == BACKWARD]
BF16 = torch.bfloat16
SECOND = (
    "a second derivative was asked for, and attention has only the first: take torch's "
    "scaled_dot_product_attention with SDPBackend.MATH, or detach the gradients"
)
TANGENT = "q has a tangent, and there is no forward-mode derivative: pass q.detach()"

# Of q and of k and v; rows that see no key where there are more queries than keys.
SHAPES = {
    "square": ((1, 1, 4, 8), (1, 1, 4, 8)),
    "gqa": ((2, 4, 3, 8), (2, 2, 5, 8)),
    "more queries": ((1, 2, 5, 16), (1, 1, 3, 16)),
}


def make_inputs(
    shapes=SHAPES["gqa"], dtype=torch.float32, device: str = "cpu", layout=contiguous
) -> tuple[torch.Tensor, ...]:
    """q, k and v, which require grad."""
    rng = torch.Generator().manual_seed(0)
    q_shape, kv_shape = shapes
    inputs = []
    for shape in (q_shape, kv_shape, kv_shape):
        _, t = layout(shape, dtype=dtype, device=device)
        inputs.append(t.copy_(torch.randn(shape, generator=rng)).requires_grad_())
    return tuple(inputs)


def make_gradient(o: torch.Tensor, layout=contiguous) -> torch.Tensor:
    """A gradient of o, in that layout: dout."""
    _, dout = layout(o.shape, dtype=o.dtype, device=o.device)
    if layout is expanded_rows:
        dout[0, 0, 0] = torch.randn(o.shape[-1])
        return dout
    return dout.copy_(torch.randn(o.shape, generator=torch.Generator().manual_seed(1)))


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """attention() in float64, of operators that torch can differentiate."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    logits = q.shape[-1] ** -0.5 * q @ k.mT
    seq_q, seq_k = logits.shape[-2:]
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(seq_k - seq_q)
    some = visible.any(-1, keepdim=True)
    logits = logits.masked_fill(~visible & some, -torch.inf)
    return (logits.softmax(-1) * some) @ v


def differentiate(function: Callable, inputs, dout: torch.Tensor | None = None) -> tuple:
    """The gradients of the inputs."""
    o = function(*inputs)
    return autograd.grad(o, inputs, make_gradient(o) if dout is None else dout.to(o.dtype))


def assert_close(found, expected, tolerance: float = 1e-5) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype), rtol=tolerance, atol=tolerance)


def assert_equal(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_agrees_with_the_formula(name: str, causal: bool, device: str) -> None:
    inputs = make_inputs(SHAPES[name], device=device)
    found = differentiate(partial(attention, causal=causal), inputs)
    expected = differentiate(partial(formula, causal=causal), inputs)
    assert_close(found, expected)
    half = make_inputs(SHAPES[name], BF16, device)
    found = differentiate(partial(attention, causal=causal), half)
    expected = differentiate(partial(formula, causal=causal), half)
    assert all(gradient.dtype == BF16 for gradient in found)
    assert_close(found, expected, 0.05)


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_gradcheck(name: str, causal: bool) -> None:
    """fp32: a step of 2^-7 turns an error of 2^-24 in o into 2^-18 in the quotient, and its own
    error is some 2^-14 of the third derivative."""
    torch.manual_seed(0)
    autograd.gradcheck(
        partial(attention, causal=causal),
        make_inputs(SHAPES[name]),
        eps=2**-7,
        atol=1e-4,
        rtol=1e-3,
        fast_mode=True,  # a few directions: each evaluation is a program of the SIMT runtime
        check_batched_grad=True,
    )


@pytest.mark.parametrize("layout", [contiguous, transposed])
def test_gradients_lie_like_their_inputs(layout) -> None:
    inputs = make_inputs(layout=layout)
    for gradient, t in zip(differentiate(attention, inputs), inputs, strict=True):
        assert (gradient.stride(), gradient.dtype) == (t.stride(), t.dtype)


@pytest.mark.parametrize("names", ["q", "k", "v", "kv", "qv"])
def test_only_what_requires_grad_gets_a_gradient(names: str) -> None:
    expected = dict(zip("qkv", differentiate(ordered, make_inputs()), strict=True))
    inputs = {name: t.detach() for name, t in zip("qkv", make_inputs(), strict=True)}
    for name in names:
        inputs[name].requires_grad_()
    o = ordered(**inputs)
    o.backward(make_gradient(o))
    for name, t in inputs.items():
        assert (t.grad is not None) == (name in names)
        assert t.grad is None or torch.equal(t.grad, expected[name])


@pytest.mark.parametrize("layout", [contiguous, transposed])
def test_meta_and_fake_tensors_have_gradients(layout) -> None:
    inputs = make_inputs(layout=layout)
    metas = [t.detach().to("meta").requires_grad_() for t in inputs]
    found = [(metas, autograd.grad(attention(*metas).sum(), metas))]
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs]
        found.append((inputs, autograd.grad(attention(*fakes).sum(), fakes)))
    for like, gradients in found:
        for gradient, t in zip(gradients, like, strict=True):
            assert (gradient.shape, gradient.stride()) == (t.shape, t.stride())
            assert (gradient.dtype, gradient.device) == (t.dtype, t.device)


def test_one_tensor_for_all() -> None:
    x, _, _ = make_inputs(SHAPES["square"])
    (found,) = differentiate(lambda x: attention(x, x, x, causal=True), (x,))
    (expected,) = differentiate(lambda x: formula(x, x, x, causal=True), (x,))
    assert_close([found], [expected])


def test_lse_has_no_gradient() -> None:
    inputs = make_inputs()
    o, lse = ordered(*inputs, return_lse=True)
    assert o.requires_grad
    assert not lse.requires_grad
    expected = differentiate(ordered, inputs)
    assert_equal(autograd.grad((o + lse[..., None]), inputs, make_gradient(o)), expected)


LAYOUTS = {
    "transposed": transposed,
    "padded": padded,
    "expanded rows": expanded_rows,
    "rows at odd multiples of 8 bytes": misaligned_rows,
    "starts at 8 bytes": misaligned_start,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_o_may_lie_anyhow(layout: str, device: str) -> None:
    """And that does not choose the step: with the same numbers come the same bits."""
    inputs = make_inputs(dtype=BF16, device=device)
    o = ordered(*inputs, causal=True)
    dout = make_gradient(o, LAYOUTS[layout])
    expected = autograd.grad(o, inputs, dout.contiguous().clone(), retain_graph=True)
    assert_equal(autograd.grad(o, inputs, dout), expected)


def test_the_gradient_of_o_without_a_contiguous_axis() -> None:
    inputs = make_inputs()
    o = ordered(*inputs)
    expected = autograd.grad(o, inputs, torch.ones_like(o), retain_graph=True)
    assert_equal(autograd.grad(o.sum(), inputs, retain_graph=True), expected)  # all strides are 0
    dout = make_gradient(o)
    expected = autograd.grad(o, inputs, dout, retain_graph=True)
    assert_equal(autograd.grad(o.mT, inputs, dout.mT.contiguous()), expected)


def test_misaligned_inputs_fall_back_as_in_forward() -> None:
    plain = make_inputs(dtype=BF16)
    odd = make_inputs(dtype=BF16, layout=misaligned_start)
    pinned = partial(attention, step="v01", backward_step="b01")
    assert_equal(differentiate(attention, odd), differentiate(pinned, plain))


def test_a_graph_may_be_kept() -> None:
    inputs = make_inputs()
    o = ordered(*inputs)
    dout = make_gradient(o)
    first, second = (autograd.grad(o, inputs, dout, retain_graph=True) for _ in range(2))
    assert_equal(first, second)
    autograd.grad(o, inputs, dout)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        autograd.grad(o, inputs, dout)


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_what_is_kept_must_stay_as_it_is(name: str) -> None:
    tensors = dict(zip("qkv", make_inputs(), strict=True))
    tensors["o"] = attention(**tensors)
    total = tensors["o"].sum()
    with torch.no_grad():
        tensors[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_no_gradient_of_o_no_gradients() -> None:
    class Nothing(autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return None

    inputs = make_inputs()
    Nothing.apply(attention(*inputs)).sum().backward()
    assert all(t.grad is None for t in inputs)


def square_of(function: Callable) -> tuple[Callable, torch.Tensor]:
    """A function of q that returns a number, and q."""
    q, k, v = (t.detach() for t in make_inputs())
    return lambda x: function(x, k, v).square().sum(), q


def from_graph(number: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    (gradient,) = autograd.grad(number, q)
    return gradient


def through_a_checkpoint(function: Callable, q: torch.Tensor, *, use_reentrant: bool):
    q = q.clone().requires_grad_()
    checkpoint(function, q, use_reentrant=use_reentrant).backward()
    return q.grad


# The gradient of a function of q that returns a number, at q.
GRADIENTS = {
    "backward": lambda f, q: from_graph(f(q := q.clone().requires_grad_()), q),
    "intermediate": lambda f, q: from_graph(f(q * (x := torch.ones((), requires_grad=True))), x),
    "checkpoint": lambda f, q: through_a_checkpoint(f, q, use_reentrant=False),
    "reentrant checkpoint": lambda f, q: through_a_checkpoint(f, q, use_reentrant=True),
    "functional.vjp": lambda f, q: autograd.functional.vjp(f, q)[1],
    "functional.jacobian": autograd.functional.jacobian,
    "functional.jacobian vectorized": lambda f, q: autograd.functional.jacobian(
        lambda x: torch.stack([f(x), f(2 * x)]), q, vectorize=True
    ),
    "grad": lambda f, q: func.grad(f)(q),
    "grad_and_value": lambda f, q: func.grad_and_value(f)(q)[0],
    "vjp": lambda f, q: func.vjp(f, q)[1](torch.ones(()))[0],
    "jacrev": lambda f, q: func.jacrev(lambda x: torch.stack([f(x), f(2 * x)]))(q),
    "jacrev in chunks": lambda f, q: func.jacrev(
        lambda x: torch.stack([f(x), f(2 * x)]), chunk_size=1
    )(q),
    "vmap of grad": lambda f, q: torch.vmap(func.grad(f))(torch.stack([q, -q])),
    "grad of vmap": lambda f, q: func.grad(lambda x: torch.vmap(f)(x).sum())(torch.stack([q, -q])),
    "vmap of vmap of grad": lambda f, q: torch.vmap(torch.vmap(func.grad(f)))(q[None, None]),
    "grad of what grad does not see": lambda f, q: func.grad(
        lambda x: func.grad(lambda y: f(x) * y.sum())(q).sum()
    )(q),
}
# What says that there is no such derivative; likewise of a function and q.
REFUSED = {
    "functional.vhp": (SECOND, lambda f, q: autograd.functional.vhp(f, q, q)),
    "functional.jvp": (SECOND, lambda f, q: autograd.functional.jvp(f, q, q)),
    "functional.hvp": (SECOND, lambda f, q: autograd.functional.hvp(f, q, q)),
    "functional.hessian": (SECOND, autograd.functional.hessian),
    "grad of grad": (SECOND, lambda f, q: func.grad(lambda x: func.grad(f)(x).sum())(q)),
    "jacrev of jacrev": (SECOND, lambda f, q: func.jacrev(func.jacrev(f))(q)),
    "functional.jacobian forward": (
        TANGENT,
        lambda f, q: autograd.functional.jacobian(f, q, strategy="forward-mode", vectorize=True),
    ),
    "dual": (TANGENT, lambda f, q: dual(f, q)),
    "jacfwd": (TANGENT, lambda f, q: func.jacfwd(f)(q)),
    "jvp": (TANGENT, lambda f, q: func.jvp(f, (q,), (q,))),
    "hessian": (TANGENT, lambda f, q: func.hessian(f)(q)),
    "jacrev of jacfwd": (TANGENT, lambda f, q: func.jacrev(func.jacfwd(f))(q)),
    "linearize": (TANGENT, func.linearize),
}


def dual(function: Callable, q: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(q, torch.ones_like(q)))


@pytest.mark.parametrize("way", GRADIENTS)
def test_every_way_to_a_gradient(way: str) -> None:
    found, expected = (GRADIENTS[way](*square_of(each)) for each in (attention, formula))
    assert_close([found], [expected], 1e-4)


@pytest.mark.parametrize("way", REFUSED)
def test_every_way_to_another_derivative_is_refused(way: str) -> None:
    message, differentiate = REFUSED[way]
    with pytest.raises(UsageError) as error:
        differentiate(*square_of(attention))
    assert str(error.value) == message


# The tensors of each: the first has a tangent.
@pytest.mark.parametrize("name", ["k", "lse", "dout"])
def test_a_tangent_of_what_backward_takes_is_refused(name: str) -> None:
    q, k, v = (t.detach() for t in make_inputs())
    o, lse = attention(q, k, v, return_lse=True)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "dout": o}
    with pytest.raises(UsageError, match=f"^{name} has a tangent"):
        dual(
            lambda t: op.backward(*(tensors | {name: t}).values(), False, None, None, False),
            tensors[name],
        )


def test_a_graph_of_the_gradients_is_no_error_until_it_is_used() -> None:
    inputs = make_inputs()
    o = attention(*inputs)
    gradients = autograd.grad(o, inputs, make_gradient(o), create_graph=True)
    assert all(gradient.requires_grad for gradient in gradients)
    assert_close(gradients, differentiate(formula, inputs))
    with pytest.raises(UsageError, match=r"^a second derivative was asked for"):
        sum(gradient.sum() for gradient in gradients).backward()


def test_where_no_derivative_is_computed() -> None:
    function, q = square_of(attention)
    expected = function(q)
    required = q.clone().requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = function(required)
        assert found == expected
        assert not found.requires_grad
    assert not function(required.detach()).requires_grad
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager")
    with torch.no_grad():
        assert compiled(required) == expected
    # In a differentiated function, a factor that does not depend on what it is differentiated by.
    for constant in (
        lambda x: function(q),
        lambda x: function(x.detach()),
        torch.no_grad()(function),
    ):
        gradient = func.grad(lambda x, constant=constant: constant(x) * x.sum())(q)
        assert torch.equal(gradient, expected.expand_as(q))
    value, tangent = func.jvp(lambda x: function(x.detach()) * x.sum(), (q,), (q,))
    assert (value, tangent) == (expected * q.sum(), expected * q.sum())


def test_a_subclass_that_requires_grad() -> None:
    """The tensor that it wraps does not require grad."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, wrapped: torch.Tensor) -> Wrapper:
            self = torch.Tensor._make_wrapper_subclass(
                cls, wrapped.shape, dtype=wrapped.dtype, requires_grad=wrapped.requires_grad
            )
            self.wrapped = wrapped.detach()
            return self

        @classmethod
        def __torch_dispatch__(cls, function, types, args, kwargs=None):
            return function(*(t.wrapped if isinstance(t, cls) else t for t in args))

    q, k, v = make_inputs()
    wrapped = Wrapper(q)
    assert torch.equal(ordered(wrapped, k, v), ordered(q, k, v))
    expected = differentiate(ordered, (q, k, v))
    assert_equal(differentiate(ordered, (wrapped, k, v)), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("compiler", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_compiles_without_a_graph_break(compiler: str, dynamic: bool, device: str) -> None:
    def model(q, k, v):
        o, lse = ordered(2 * q, k, v, causal=True, return_lse=True)
        return o.transpose(1, 2).flatten(2).relu(), lse

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=compiler, dynamic=dynamic)
    for layout in (contiguous, transposed):
        inputs = make_inputs(dtype=BF16, device=device, layout=layout)
        (o, lse), (expected_o, expected_lse) = compiled(*inputs), model(*inputs)
        assert_equal((o, lse), (expected_o, expected_lse))
        assert not lse.requires_grad
        dout = torch.randn_like(o)
        found, expected = (autograd.grad(x, inputs, dout) for x in (o, expected_o))
        assert_equal(found, expected)
        assert [t.stride() for t in found] == [t.stride() for t in expected]


def test_compiles_for_other_sizes() -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for shapes in SHAPES.values():
        inputs = make_inputs(shapes)
        found = differentiate(partial(compiled, causal=True), inputs)
        assert_close(found, differentiate(partial(formula, causal=True), inputs))


@pytest.mark.parametrize("step", [BACKWARD_STEPS[0].name, BACKWARD_STEPS[0].path])
def test_compiles_with_a_backward_step(step) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = make_inputs()
    found = differentiate(partial(compiled, backward_step=step), inputs)
    assert_equal(found, differentiate(partial(attention, backward_step="b01"), inputs))


def test_a_compiled_backward_pass() -> None:
    inputs = make_inputs()
    expected = differentiate(ordered, inputs, torch.ones_like(inputs[0]))

    def train() -> None:
        ordered(*inputs).sum().backward()

    torch.compiler.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(train, backend="aot_eager")()
    assert_equal([t.grad for t in inputs], expected)


def test_checkpoints_within_what_is_compiled() -> None:
    torch.compiler.reset()

    def model(q, k, v):
        return checkpoint(attention, 2 * q, k, v, use_reentrant=False)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = make_inputs()
    assert_close(differentiate(compiled, inputs), differentiate(model, inputs))


@pytest.mark.parametrize("way", ["grad", "vjp", "vmap of grad", "grad of vmap"])
def test_a_compiled_gradient(way: str) -> None:
    function, q = square_of(attention)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: GRADIENTS[way](function, x), backend="aot_eager")
    assert_close([compiled(q)], [GRADIENTS[way](*square_of(formula))])


@pytest.mark.parametrize("way", ["jvp", "jacfwd", "hessian", "grad of grad"])
def test_a_compiled_derivative_is_refused(way: str) -> None:
    message, differentiate = REFUSED[way]
    function, q = square_of(attention)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: differentiate(function, x), backend="aot_eager")
    with pytest.raises((UsageError, TorchRuntimeError), match=re.escape(message)):
        compiled(q)


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("way", [way for way in REFUSED if REFUSED[way][0] == TANGENT])
def test_a_tangent_of_what_is_compiled_is_refused(way: str, is_warm: bool) -> None:
    """Where torch.compile notices first, its error contains our message."""
    if way == "linearize":
        pytest.skip("torch.compile itself refuses that")
    message, differentiate = REFUSED[way]
    function, q = square_of(attention)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager")
    if is_warm:
        compiled(q)
    with pytest.raises((UsageError, TorchRuntimeError), match=re.escape(message)):
        differentiate(compiled, q)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_the_gradients_back(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs(device=device)

    def cast(*inputs):
        return ordered(*(t.to(dtype) for t in inputs))

    def autocast(*inputs):
        with torch.autocast(device, dtype=dtype):
            return ordered(*inputs)

    torch.compiler.reset()
    compiled = torch.compile(autocast, backend="aot_eager", fullgraph=True)
    expected = differentiate(cast, inputs)
    assert all(gradient.dtype == torch.float32 for gradient in expected)
    for function in (autocast, compiled):
        assert_equal(differentiate(function, inputs), expected)
    o = autocast(*inputs)
    with torch.autocast(device, dtype=dtype):  # a mistake, but not one of ours
        assert_equal(autograd.grad(o, inputs, make_gradient(o)), expected)


@pytest.fixture
def found(monkeypatch) -> Iterator[list]:
    """The steps that are chosen in turn: their names."""
    names: list[str] = []
    monkeypatch.setattr(op, "_calls", cache.Cache())
    for name, get in (("highest_step", op.highest_step), ("_find", op._find)):

        def spy(*given, get=get):
            step = get(*given)
            names.append(step.name)
            return step

        monkeypatch.setattr(op, name, spy)
    return names


def go_back(o: torch.Tensor) -> None:
    """From a gradient that any step can read, as models have it, and sum()'s is not."""
    o.backward(torch.ones_like(o))


@pytest.fixture
def unordered(monkeypatch) -> str:
    """The name of a step above all others of the backward ladder, whose dq does not repeat."""
    highest = replace(BACKWARD_STEPS[0], name="b99", unordered=("dq",))
    steps = (*all_steps(), highest)
    find = find_step
    monkeypatch.setattr(op, "all_steps", lambda: steps)
    monkeypatch.setattr(op, "find_step", lambda name: highest if name == "b99" else find(name))
    return highest.name


ORDERED = [step.name for step in BACKWARD_STEPS if step.is_candidate(deterministic=True)][-1]


def test_deterministic_takes_a_step_that_repeats_its_bits(found, unordered) -> None:
    inputs = make_inputs(dtype=BF16)
    go_back(attention(*inputs))
    assert found[1:] == [unordered]
    go_back(attention(*inputs, deterministic=True))
    assert found[3:] == [ORDERED]
    torch.use_deterministic_algorithms(True)
    try:
        o = attention(*inputs, causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    go_back(o)  # as it was in the forward pass
    assert found[5:] == [ORDERED]


def test_a_step_that_repeats_no_bits_is_not_deterministic(unordered) -> None:
    inputs = make_inputs(dtype=BF16)
    go_back(attention(*inputs, backward_step=unordered))
    message = "^b99 does not repeat the bits of dq, and deterministic=True or torch.use_determi"
    for _ in range(2):
        with pytest.raises(UsageError, match=message):
            attention(*inputs, backward_step=unordered, deterministic=True)


def test_a_draft_is_taken_by_its_name_only(found, monkeypatch) -> None:
    draft = replace(BACKWARD_STEPS[0], name="b98", draft="no GPU has run it")
    steps, find = (*all_steps(), draft), find_step
    monkeypatch.setattr(op, "all_steps", lambda: steps)
    monkeypatch.setattr(op, "find_step", lambda name: draft if name == "b98" else find(name))
    inputs = make_inputs()
    go_back(attention(*inputs))
    assert "b98" not in found
    go_back(attention(*inputs, backward_step="b98"))
    assert "b98" in found


def test_a_step_for_repeated_bits_is_taken_only_for_them(found, monkeypatch) -> None:
    steps = (*all_steps(), replace(BACKWARD_STEPS[0], name="b98", only_deterministic=True))
    monkeypatch.setattr(op, "all_steps", lambda: steps)
    inputs = make_inputs()
    go_back(attention(*inputs))
    assert "b98" not in found
    go_back(attention(*inputs, deterministic=True))
    assert "b98" in found


def test_where_no_step_repeats_its_bits(monkeypatch) -> None:
    monkeypatch.setattr(op, "_calls", cache.Cache())
    inputs = make_inputs()
    o = attention(*inputs, deterministic=True)
    steps = [replace(step, unordered=("dq", "dk")) for step in BACKWARD_STEPS]
    monkeypatch.setattr(op, "all_steps", lambda: steps)
    with pytest.raises(
        UsageError,
        match=r"^no step can run these inputs: b.. does not repeat the "
        "bits of dq, dk$",
    ):
        go_back(o)


def test_a_pinned_step_is_taken(found) -> None:
    inputs = make_inputs()
    go_back(attention(*inputs, backward_step="b01"))
    assert found[::2] == ["b01", "b01"]  # found in the forward pass; in between, forward's step


def test_a_pinned_step_that_cannot_take_the_inputs(monkeypatch) -> None:
    step = BACKWARD_STEPS[0]
    limited = replace(step, limits=replace(step.limits, dtypes=("bf16",)))
    monkeypatch.setattr(op, "_calls", cache.Cache())
    monkeypatch.setattr(op, "find_step", lambda name: limited)
    o = attention(*make_inputs(), backward_step="b01")
    with pytest.raises(UsageError, match=r"^b01 takes bf16, not fp32$"):
        go_back(o)


def test_a_repeated_backward_looks_nothing_up(found, monkeypatch) -> None:
    inputs = make_inputs()
    for _ in range(2):
        go_back(attention(*inputs))
        go_back(attention(*inputs, softmax_scale=2.0))
    assert len(found) == 2


def assert_equal_but_for_order(found, expected) -> None:
    """As assert_equal, but numbers of bf16 may be neighbours."""
    assert_close(found, expected, torch.finfo(BF16).eps)


# attention() itself takes a step whose dq is a sum in any order.
both_ways = pytest.mark.parametrize(
    ("attend", "assert_same"),
    [(ordered, assert_equal), (attention, assert_equal_but_for_order)],
    ids=["deterministic", "default"],
)


@pytest.mark.gpu
@both_ways
def test_can_be_captured_in_a_cuda_graph(attend, assert_same) -> None:
    inputs = make_inputs(((2, 4, 200, 64), (2, 2, 300, 64)), BF16, "cuda")
    static = [torch.zeros_like(t).requires_grad_() for t in inputs]
    dout = make_gradient(inputs[0])

    def step(inputs) -> tuple[torch.Tensor, ...]:
        o = attend(*inputs, causal=True)
        return o, *autograd.grad(o, inputs, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as torch asks for: its warm-up is on a side stream
        step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(static)
    with torch.no_grad():
        for to, t in zip(static, inputs, strict=True):
            to.copy_(t)
    for _ in range(2):
        for output in outputs:
            output.detach().zero_()
        graph.replay()
        assert_same(outputs, step(inputs))


@pytest.mark.gpu
@both_ways
def test_runs_on_the_stream_of_the_forward_pass_without_waiting(attend, assert_same) -> None:
    inputs = make_inputs(((2, 4, 200, 64), (2, 2, 300, 64)), BF16, "cuda")
    expected = differentiate(attend, inputs)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            o = attend(*inputs)
            dout = make_gradient(o)
            autograd.grad(o, inputs, dout, retain_graph=True)  # allocates the stream's memory
            torch.cuda.synchronize()
            late = torch.zeros_like(dout)
            torch.cuda._sleep(200_000_000)  # about a tenth of a second
            late.copy_(dout)
            gradients = autograd.grad(o, inputs, late)
            assert not stream.query(), "the backward pass waited for the device"
            copies = [gradient.clone() for gradient in gradients]
        stream.synchronize()
        assert_same(copies, expected)


@pytest.mark.gpu
@both_ways
def test_compiles_into_cuda_graphs(attend, assert_same) -> None:
    def model(*inputs):
        return 2 * attend(*inputs)

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    inputs = make_inputs(((2, 4, 200, 64), (2, 2, 300, 64)), BF16, "cuda")
    expected = differentiate(model, inputs)  # a step is not compiled while a graph is captured
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same([t.clone() for t in differentiate(compiled, inputs)], expected)
