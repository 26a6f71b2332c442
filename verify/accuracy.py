"""How far a step's result may be from the oracle's, and where it is further."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.operation import BACKWARD, FORWARD
from verify.bias import UNIT_ROUNDOFF_FP32, bias, bias_allowance, gradient_bias_allowances
from verify.case import Case
from verify.reference import gradient_factors, gradient_terms, oracle_of, yardstick_of


@dataclass(frozen=True)
class Measure:
    """One error and its allowance."""

    name: str  # an output and a key of MEASURES: "o max"
    error: float
    allowance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowance  # False for NaN

    def __str__(self) -> str:
        return f"{self.error:7.1e}{'/' if self.passed else '>'}{self.allowance:7.1e}"


@dataclass(frozen=True)
class Expected:
    """The oracle's outputs, and how far from them a step may be.

    allowances: by measure, an output's name and a key of MEASURES. zeros: of some outputs, the rows
    that must be 0, and +0 bit for bit unless the scale, by which a gradient is multiplied, is
    negative. reordered: of an output, how far each sum may be, before it is rounded, from that of a
    repeated call, where the step says that it adds in another order. weights: of an output, what
    its errors are multiplied by before they are measured, but for the bias.
    """

    outputs: tuple[torch.Tensor, ...]
    allowances: dict[str, float]
    zeros: dict[str, torch.Tensor]
    reordered: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def expect(case: Case, *inputs: torch.Tensor) -> Expected:
    """What the case's operation expects of a step."""
    expected = EXPECT[case.operation](case, *inputs)
    unbounded = [name for name, most in expected.allowances.items() if not math.isfinite(most)]
    assert not unbounded, f"nothing could fail in {unbounded}: the yardstick is not finite"
    return expected


def expect_forward(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Expected:
    """o and lse by the oracle, and the allowances: twice the yardstick's error plus a floor.

    The yardstick of o is torch in the input's dtype. lse is float32 whatever the inputs are, so its
    yardstick is torch in float32, and that is what makes the check of the mask and of every
    exponential sharp.

    The floor stands for roundings that the yardstick may be spared by luck. u = 2^-24 in float32:
    - a logit is wrong by about u * L for the sum of products and as much again for the scale and
      the subtraction of the maximum, with L = |scale| max|q_i| max|k_j| >= the largest logit;
    - exp and log on a GPU are wrong by about 2^-22 = 4 u each, hence 8 u;
    - a sum of seq_k terms adds sqrt(seq_k) u, as roundings go both ways; seq_k is that of the
      longest sequence.
    Together a relative error, delta, of each weight and so of the sum of weights: an absolute error
    delta of lse and, as o is a mean of rows of v, delta max|v| of o. Rounding o itself adds the
    unit roundoff of its dtype, or half of the smallest subnormal.
    """
    oracle, yardstick = oracle_of(case.operation), yardstick_of(case.operation)
    arguments = case.arguments_on(q.device)
    # v and a column of random numbers: that of o tells rows of different weights apart.
    rng = torch.Generator(v.device).manual_seed(0)
    column = torch.rand(case.shape.seq_k, 1, generator=rng, device=v.device)
    wider = torch.cat((v, column.expand(*v.shape[:-1], 1)), -1)  # in float32, where few are equal
    o, lse = oracle(q, k, wider, **arguments)
    o, mark = o[..., :-1].contiguous(), o[..., -1]
    o_error = difference(yardstick(q, k, v, **arguments)[0], o)
    in_fp32 = yardstick(q.float(), k.float(), v.float(), **arguments)
    lse_error = difference(in_fp32[1], lse)

    largest_logit = abs(case.scale) * largest_norm(q) * largest_norm(case.fill_unused(k, 0))
    largest_value = case.fill_unused(v, 0).abs().max().item()
    delta = UNIT_ROUNDOFF_FP32 * (2 * largest_logit + 8 + math.sqrt(case.most_keys))
    dtype = torch.finfo(case.dtype)
    half_subnormal = dtype.smallest_normal * dtype.eps / 2

    def floor(magnitude: float) -> float:
        return max(dtype.eps / 2 * magnitude, half_subnormal) + delta * largest_value

    allowances = {
        "o max": 2 * o_error.max().item() + floor(o.abs().max().item()),
        "o rms": 2 * rms(o_error) + floor(rms(o)),
        "o bias": bias_allowance(case, o, mark, delta),
        "lse max": 2 * lse_error.max().item() + delta,
    }
    return Expected((o, lse), allowances, {"o": lse.isneginf()}, {})


def expect_backward(case: Case, *inputs: torch.Tensor) -> Expected:
    """dq, dk and dv by the oracle, and the allowances: twice the yardstick's error plus a floor.

    The floor, as forward's, stands for roundings that the yardstick may be spared by luck. With L
    the largest logit and u = 2^-24:
    - a logit is wrong by about 2 u L, its difference to lse by u L more, exp by 8 u: together a
      relative error of P;
    - dP and delta, sums of v_head_dim products, are each wrong by up to (2 + sqrt(v_head_dim)) u
      times the norms of their vectors, which is what remains where they cancel;
    - a sum of n terms adds sqrt(n) u of their magnitudes;
    - rounding the gradient itself adds the unit roundoff of its dtype.

    A sum in another order, of up to one term for every 8 keys, differs by 2 u for each of them, of
    the terms as they were computed.

    That difference and the errors of the floor, had all elements the same sign, would be a bias; so
    is what the yardstick loses below its dtype's range. bias.py adds what roundings do by chance.

    With lengths, errors are measured as if the largest |dout| of each sequence and head of k and v
    were that of the largest one: how exact a sequence's gradients are, no other one decides.
    """
    q, k, *_, dout = inputs
    shape = case.shape
    arguments = case.arguments_on(q.device)
    outputs = oracle_of(case.operation)(*inputs, **arguments)
    measured = yardstick_of(case.operation)(*inputs, **arguments)
    largest_logit = abs(case.scale) * largest_norm(q) * largest_norm(case.fill_unused(k, 0))
    terms, errors = gradient_terms(
        *inputs,
        **arguments,
        p_error=UNIT_ROUNDOFF_FP32 * (3 * largest_logit + 8),
        dp_error=UNIT_ROUNDOFF_FP32 * (2 + math.sqrt(shape.v_head_dim)),
    )
    queries = case.most_queries * (shape.heads // shape.kv_heads)
    added = {"dq": case.most_keys, "dk": queries, "dv": queries}  # terms of a sum
    factors = gradient_factors(dout, k, arguments.get("lengths"))
    of_queries, of_keys = (factor / factors[0].min() for factor in factors)
    weights = {"dq": of_queries, "dk": of_keys, "dv": of_keys}
    dtype = torch.finfo(case.dtype)
    half_subnormal = dtype.smallest_normal * dtype.eps / 2
    allowances, reordered, systematic = {}, {}, {}
    for operand, wanted, yardstick, term, error in zip(
        case.operation.outputs, outputs, measured, terms, errors, strict=True
    ):
        name = operand.name
        of_sum = UNIT_ROUNDOFF_FP32 * math.sqrt(added[name]) * term
        floor = error + of_sum + (dtype.eps / 2 * wanted.abs()).clamp(min=half_subnormal)
        yardstick_error = weights[name] * difference(yardstick, wanted)
        weighted = weights[name] * floor
        allowances[f"{name} max"] = 2 * yardstick_error.max().item() + weighted.max().item()
        allowances[f"{name} rms"] = 2 * rms(yardstick_error) + rms(weighted)
        in_any_order = 2 * UNIT_ROUNDOFF_FP32 * math.ceil(added[name] / 8) * (term + error)
        reordered[name] = in_any_order
        yardstick_bias = abs(bias(yardstick, wanted)) * wanted.abs().sum().item()
        systematic[name] = (error + in_any_order).sum().item() + 2 * yardstick_bias
    allowances |= gradient_bias_allowances(case, inputs, outputs, systematic)
    sees_no_key = inputs[4].isneginf()
    unseen = keys_without_queries(case, sees_no_key)
    zeros = {"dq": sees_no_key, "dk": unseen, "dv": unseen}
    return Expected(outputs, allowances, zeros, reordered, weights)


def keys_without_queries(case: Case, sees_no_key: torch.Tensor) -> torch.Tensor:
    """The keys that no query sees, as some queries see none. Bool [batch, kv_heads, seq_k].

    sees_no_key: bool [batch, heads, seq_q].
    """
    shape, (left, right) = case.shape, case.window
    unseen = torch.ones(shape.kv[:3], dtype=torch.bool, device=sees_no_key.device)
    sees = ~sees_no_key.unflatten(1, (shape.kv_heads, -1)).all(2)  # any query head of a group
    for sequence in case.sequences:
        own = sequence.own_keys(sees.device)
        first, end = ((own + n).clamp(0, sequence.seq_k) for n in (-left, right + 1))
        # Of each key: how many windows begin with it, less those that end before it.
        sees_one = sees[sequence.batch, :, sequence.queries].long()
        changes = sees_one.new_zeros(shape.kv_heads, sequence.seq_k + 1)
        changes.index_add_(1, first, sees_one).index_add_(1, end, -sees_one)
        unseen[sequence.batch, :, sequence.keys] = changes.cumsum(1)[:, :-1] == 0
    return unseen


EXPECT = {FORWARD: expect_forward, BACKWARD: expect_backward}
# What is measured: an output and a key of MEASURES each.
MEASURED = {
    FORWARD: ("o max", "o rms", "o bias", "lse max"),
    BACKWARD: tuple(f"{d} {kind}" for d in ("dq", "dk", "dv") for kind in ("max", "rms", "bias")),
}


def largest_norm(x: torch.Tensor) -> float:
    """The largest Euclidean length of a row."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).max().item()


def difference(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|got - expected|, float64: 0 for equal infinities, inf or NaN for other non-finite pairs."""
    got = got.double()
    return (got - expected).abs().masked_fill(got == expected, 0)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


# Each a function of a step's output, the expected one and their difference().
MEASURES = {
    "max": lambda got, expected, error: error.max().item(),
    "rms": lambda got, expected, error: rms(error),
    "bias": lambda got, expected, error: abs(bias(got, expected)),
}


def compare(
    case: Case, expected: Expected, outputs: Sequence[torch.Tensor]
) -> tuple[tuple[Measure, ...], list[str]]:
    """Measures the outputs of a step and describes what is outside the allowances."""
    measures: list[Measure] = []
    errors: list[str] = []
    for operand, got, wanted in zip(case.operation.outputs, outputs, expected.outputs, strict=True):
        name = operand.name
        difference_ = difference(got, wanted) * expected.weights.get(name, 1)
        of_output = {
            kind: Measure(
                f"{name} {kind}",
                measure(got, wanted, difference_),
                expected.allowances[f"{name} {kind}"],
            )
            for kind, measure in MEASURES.items()
            if f"{name} {kind}" in MEASURED[case.operation]
        }
        measures += of_output.values()
        failed = [kind for kind, measure in of_output.items() if not measure.passed]
        if failed == ["bias"]:
            where = "further from zero" if bias(got, wanted) > 0 else "nearer to zero"
            errors += [f"{name}: all in all {where} than expected (truncated instead of rounded?)"]
        elif failed:
            errors += mismatches(name, got, wanted, difference_, of_output["max"].allowance)
        zeros = got[expected.zeros[name]] if name in expected.zeros else got[:0]
        unseen = "that see no key" if "seq_q" in operand.axes else "that no query sees"
        if (zeros != 0).any():  # as for NaN
            errors += [f"{name}: rows {unseen} have elements that are not 0"]
        elif case.scale >= 0 and zeros.signbit().any():
            errors += [f"{name}: rows {unseen} have elements of -0: they must be +0"]
    return tuple(measures), errors


def mismatches(
    name: str, got: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, allowance: float
) -> list[str]:
    """Names the first five elements outside the allowance; where none is, the five worst."""
    outside = (~(error <= allowance)).nonzero()
    where = outside[:5]
    text = f"{name}: {len(outside)} of {error.numel()} elements outside the allowance"
    if not len(outside):
        worst = error.flatten().topk(min(5, error.numel())).indices
        where = torch.stack(torch.unravel_index(worst, error.shape), dim=-1)
        text = f"{name}: no element alone is outside the allowance; the worst"
    where = [tuple(index) for index in where.tolist()]
    return [text] + [
        f"  {name}{[*i]} is {got[i].item():.6g}, expected {expected[i].item():.6g}" for i in where
    ]


def repeated(
    name: str, first: torch.Tensor, second: torch.Tensor, allowance: torch.Tensor | None = None
) -> list[str]:
    """An error where two runs on the same inputs differ in any bit, or by more than allowed.

    allowance: how far the unrounded elements may be from one another. Each may then be wrong by
    half the distance of its neighbours: eps / 2 of what was computed, which may be far from the
    expected value.
    """
    if allowance is None:
        bits = {2: torch.int16, 4: torch.int32}[first.element_size()]
        differs = first.view(bits) != second.view(bits)
    else:
        dtype = torch.finfo(first.dtype)
        magnitudes = first.double().abs() + second.double().abs()
        rounding = dtype.eps / 2 * magnitudes.clamp(min=2 * dtype.smallest_normal)
        # An infinity is near to nothing but itself: inf - inf is NaN, and no NaN is within a bound.
        differs = ~(difference(first, second.double()) - rounding <= allowance)
    where = differs.nonzero()
    if not len(where):
        return []
    index = tuple(where[0].tolist())
    values = f"{first[index].item():.9g}, then {second[index].item():.9g}"
    if allowance is not None:
        values += f", where a difference of {(allowance + rounding)[index].item():.2g} is allowed"
    return [
        f"{name}: {len(where)} of {first.numel()} elements differ between runs (a race?), "
        f"first {name}{[*index]}: {values}"
    ]
