"""The cases with lengths: that they tell a mask that is off by one, and whose cases they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from common.catalog import all_steps
from common.errors import UsageError
from common.lengths import UNLIMITED, Lengths
from common.operation import BACKWARD, FORWARD, Operation
from common.problem import Shape
from verify import accuracy, check, reference
from verify.case import Case
from verify.cases import CASES, all_cases, find_cases
from verify.check import check_case, check_steps
from verify.gradients import sequences_of_all_sizes
from verify.inputs import one_hot_at_edges
from verify.lengths import CaseLengths, sequences_of, window_of
from verify.lengths_cases import lengths_cases
from verify.reference import backward_rows, gradient_factors, yardstick_of
from verify.tests.patch_samples import chosen

STEPS = {
    operation: replace(
        next(step for step in all_steps() if step.operation == operation), takes_lengths=True
    )
    for operation in (FORWARD, BACKWARD)
}
STEP = STEPS[FORWARD]


def cases_with_lengths(operation: Operation, seed: int = 0) -> list[Case]:
    return [case for case in all_cases(operation, seed, lengths=True) if case.lengths]


CPU_CASES = {
    operation: [case for case in cases_with_lengths(operation) if not case.gpu_only]
    for operation in STEPS
}


class CpuBackend:
    """A stand-in for a kernel."""

    name = "cpu"
    device = torch.device("cpu")

    def refusal(self, step, spec):
        return step.limits.refusal(spec)

    def build(self, step, spec):
        return step.path

    def launch(self, step, *tensors, **arguments):
        count = len(step.operation.inputs)
        outputs = self.compute(step.operation, tensors[:count], **arguments)
        for output, computed in zip(tensors[count:], outputs, strict=True):
            output.copy_(computed + 0.0)  # no -0

    def compute(self, operation, inputs, **arguments) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError


class WrongBackend(CpuBackend):
    """Torch in float32, with other lengths than it is told."""

    def __init__(self, wrong: Callable[[Lengths], Lengths] = lambda lengths: lengths):
        self.wrong = wrong

    def compute(self, operation, inputs, *, lengths=None, causal, softmax_scale):
        if lengths:
            if causal:
                lengths = lengths._replace(window_right=min(lengths.window_right, 0))
            lengths = self.wrong(lengths)
        arguments = {"causal": causal and not lengths, "softmax_scale": softmax_scale}
        return yardstick_of(operation)(*(x.float() for x in inputs), **arguments, lengths=lengths)


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Starts of sequences, all but the first and the end of the last one moved."""
    moved = x.clone()
    moved[1:-1] += by
    return moved.clamp(0, int(x[-1]))


# What a step may take for the lengths that it is given.
WRONG: dict[str, Callable[[Lengths], Lengths]] = {
    "left one more": lambda x: x._replace(window_left=x.window_left + 1),
    "left one less": lambda x: x._replace(window_left=x.window_left - 1),
    "left unlimited": lambda x: x._replace(window_left=UNLIMITED),
    "right one more": lambda x: x._replace(window_right=x.window_right + 1),
    "right one less": lambda x: x._replace(window_right=x.window_right - 1),
    "right unlimited": lambda x: x._replace(window_right=UNLIMITED),
    "queries one later": lambda x: x._replace(cu_seqlens_q=shifted(x.cu_seqlens_q, 1)),
    "queries one earlier": lambda x: x._replace(cu_seqlens_q=shifted(x.cu_seqlens_q, -1)),
    "keys one later": lambda x: x._replace(cu_seqlens_k=shifted(x.cu_seqlens_k, 1)),
    "keys one earlier": lambda x: x._replace(cu_seqlens_k=shifted(x.cu_seqlens_k, -1)),
    "used one less": lambda x: x._replace(seqused_k=(x.seqused_k - 1).clamp(min=0)),
    # Not of the longest, which may have no more.
    "used one more": lambda x: x._replace(
        seqused_k=x.seqused_k + (x.seqused_k < x.seqused_k.max()).int()
    ),
    "used all": lambda x: x._replace(seqused_k=None),
}


def is_wrong_of(mistake: str, case: Case) -> bool:
    """Whether it makes a difference: the window has such a side, or there are such lengths."""
    lengths = case.lengths
    what = mistake.split()[0]
    if what == "left":
        return lengths.window_left < case.most_keys
    if what == "right":
        return case.causal or lengths.window_right < case.most_keys
    if what == "used":
        return lengths.seqused_k is not None
    # A sequence whose start has moved may not have as many keys as are used of it.
    return bool(lengths.seqlens_q) and len(lengths.seqlens_q) > 1 and not lengths.seqused_k


def mistakes_in(operation: Operation) -> list[tuple[Case, str]]:
    """Each case with each mistake that it is to tell."""
    return [
        (case, mistake)
        for case in CPU_CASES[operation]
        for mistake in WRONG
        if is_wrong_of(mistake, case) and not case.name.startswith("drawn_")
    ]


# Both choose as mutants are chosen.
@pytest.mark.parametrize("operation", STEPS, ids=lambda operation: operation.name)
def test_every_case_accepts_float32(operation, request):
    for case in chosen(CPU_CASES[operation], request.config.getoption("mutants")):
        result = check_case(STEPS[operation], case, [WrongBackend()] * 2)
        assert result.passed, str(result)


@pytest.mark.parametrize("operation", STEPS, ids=lambda operation: operation.name)
def test_every_case_tells_lengths_that_are_off_by_one(operation, request):
    mistakes = mistakes_in(operation)
    assert {mistake for case, mistake in mistakes if case.inputs == one_hot_at_edges} == set(WRONG)
    for case, mistake in chosen(mistakes, request.config.getoption("mutants")):
        result = check_case(STEPS[operation], case, [WrongBackend(WRONG[mistake])])
        assert result.verdict == "FAIL", f"{mistake} not rejected: {result}"


class WrongTiles(CpuBackend):
    """Backward in float32, where a query may see other keys: by sees(i, j, first, last).

    Those are the query's and the key's numbers in the sequence, and those of the first and the last
    key in the query's window. The keys are at most one past it.
    """

    def __init__(self, sees: Callable[..., torch.Tensor]):
        self.sees = sees

    def compute(self, operation, inputs, *, lengths, causal, softmax_scale):
        left, right = window_of(lengths, causal)
        q, k, v, *_ = inputs = [x.float() for x in inputs]
        wider = lengths._replace(
            window_left=min(left, UNLIMITED - 1) + 1, window_right=min(right, UNLIMITED - 1) + 1
        )
        sequences = sequences_of(lengths, q.shape[0], q.shape[2], k.shape[2])
        dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
        for rows in backward_rows(*inputs, torch.float32, False, softmax_scale, wider):
            (sequence,) = (x for x in sequences if (x.batch, x.queries) == (rows.at[0], rows.at[2]))
            own = sequence.own_keys("cpu")[:, None]
            i, j = torch.arange(sequence.seq_q)[:, None], torch.arange(sequence.seq_k)
            sees = self.sees(i, j, own - left, own + right)
            p, ds = rows.p.where(sees, 0), rows.ds.where(sees, 0)
            dq[rows.at] = softmax_scale * ds @ rows.k
            dk[rows.kv] += ds.mT @ rows.q
            dv[rows.kv] += p.mT @ rows.dout
        return dq, dk, dv


def in_window(i, j, first, last):
    return (j >= first) & (j <= last)


# By the queries of a tile.
WRONG_TILES = {
    "first tile left out": lambda tile: (
        lambda i, j, first, last: (
            in_window(i, j, first, last) & ~((i % tile == tile - 1) & (j % 128 == 0) & (j == last))
        )
    ),
    "last tile left out": lambda tile: (
        lambda i, j, first, last: (
            in_window(i, j, first, last) & ~((i % tile == 0) & (j % 128 == 127) & (j == first))
        )
    ),
    "not masked on the right": lambda tile: (
        lambda i, j, first, last: (
            in_window(i, j, first, last) | ((i % tile == 0) & (j % 16 == 15) & (j == last + 1))
        )
    ),
    "not masked on the left": lambda tile: (
        lambda i, j, first, last: (
            in_window(i, j, first, last)
            | ((i % tile == tile - 1) & (j % 16 == 0) & (j == first - 1))
        )
    ),
}


@pytest.mark.parametrize(
    ("name", "mistakes"),
    [
        ("tiles_in_window", ("first tile left out", "last tile left out")),
        ("tiles_in_window_128", ("first tile left out", "last tile left out")),
        ("tiles_in_window_causal", ("first tile left out", "last tile left out")),
        ("warps_in_window", ("not masked on the right", "not masked on the left")),
        ("warps_in_window_128", ("not masked on the right", "not masked on the left")),
        ("warps_causal", ("not masked on the right",)),
    ],
)
def test_backward_cases_tell_tiles_that_are_wrong_in_one_key(name, mistakes):
    (case,) = find_cases([name], BACKWARD, lengths=True)
    tile = 128 if case.shape.head_dim <= 64 else 64
    assert check_case(STEPS[BACKWARD], case, [WrongTiles(in_window)] * 2).passed
    for mistake in mistakes:
        result = check_case(STEPS[BACKWARD], case, [WrongTiles(WRONG_TILES[mistake](tile))])
        assert result.verdict == "FAIL", f"{mistake} not rejected: {result}"


class ScaledBackend(CpuBackend):
    """Backward in fp16, dout scaled by factors of dout, k and the lengths."""

    def __init__(self, factors: Callable[..., tuple[torch.Tensor, torch.Tensor]]):
        self.factors = factors

    def compute(self, operation, inputs, *, lengths, causal, softmax_scale):
        *others, dout = inputs
        of_queries, of_keys = (x / 16 for x in self.factors(dout, inputs[1], lengths))
        scaled = (dout.float() * of_queries).half()
        arguments = (torch.float16, causal, softmax_scale, lengths)
        dq, dk, dv = reference._gradients(*others, scaled, *arguments)
        return dq.float() / of_queries, dk.float() / of_keys, dv.float() / of_keys


def factors_of_smallest(dout, k, lengths):
    return tuple(x.max().expand(1, 1, 1, 1) for x in gradient_factors(dout, k, lengths))


WRONG_FACTORS = {
    "of all sequences": lambda dout, k, lengths: gradient_factors(dout, k, None),
    "of the smallest": factors_of_smallest,
    "of all heads": lambda dout, k, lengths: gradient_factors(dout, k[:, :1], lengths),
}


@pytest.mark.parametrize("name", ["dout_of_sequences", "dout_of_batches", "packed_gqa_4"])
def test_each_sequence_is_as_exact_as_by_itself(name):
    """What fits the gradients of one sequence, or of one head, into fp16, does not fit others'."""
    (case,) = find_cases([name], BACKWARD, lengths=True)
    assert case.dout is sequences_of_all_sizes
    assert check_case(STEPS[BACKWARD], case, [ScaledBackend(gradient_factors)] * 2).passed
    for mistake, factors in WRONG_FACTORS.items():
        if mistake != "of all heads" or case.shape.kv_heads > 1:
            result = check_case(STEPS[BACKWARD], case, [ScaledBackend(factors)])
            assert result.verdict == "FAIL", f"{mistake} not rejected: {result}"


def written(case: Case, outputs: Sequence[torch.Tensor]) -> str:
    expected = accuracy.expect(case, *case.make("cpu"))
    return "\n".join(accuracy.compare(case, expected, outputs)[1])


def test_gradients_of_keys_that_no_query_sees_are_zero():
    (case,) = find_cases(["keys_before_window"], BACKWARD, lengths=True)
    expected = accuracy.expect(case, *case.make("cpu"))
    # The first three sequences see their last keys, the fourth has no queries.
    unseen = torch.ones(1, 1, case.shape.seq_k, dtype=torch.bool)
    for start, first, end in ((0, 127, 140), (140, 128, 141), (281, 129, 142), (683, 388, 400)):
        unseen[..., start + first : start + end] = False
    assert torch.equal(expected.zeros["dk"], unseen)
    dq, dk, dv = expected.outputs
    assert (dk[unseen] == 0).all()
    assert (dv[unseen] == 0).all()
    assert not written(case, expected.outputs)
    assert (dv[~unseen] != 0).any(-1).all()
    for wrong, complaint in (
        (1e-30, "that are not 0"),
        (torch.nan, "that are not 0"),
        (-0.0, "of -0"),
    ):
        spoilt = dv.clone()
        spoilt[..., 126, 3] = wrong
        assert f"dv: rows that no query sees have elements {complaint}" in written(
            case, (dq, dk, spoilt)
        )


def test_keys_that_are_not_there_are_nan():
    cases = [case for case in CPU_CASES[FORWARD] if case.lengths.seqused_k]
    assert {case.lengths.seqlens_k is None for case in cases} == {True, False}
    for case in cases:
        _, k, v, *_ = case.make("cpu")
        there = torch.zeros(case.shape.kv[:3], dtype=torch.bool)
        for batch, _, keys in case.sequences:
            there[batch, :, keys] = True
        for x in (k, v):
            assert torch.equal(x.isfinite().all(-1), there)
            assert torch.equal(~x.isnan().any(-1), there)


def test_sequences():
    lengths = CaseLengths((2, 0, 3), (4, 1, 0), (3, 1, 0)).on("cpu")
    assert lengths.cu_seqlens_q.dtype == torch.int32
    sequences = sequences_of(lengths, 1, 5, 5)
    places = [(x.batch, x.queries.start, x.seq_q, x.keys.start, x.seq_k) for x in sequences]
    assert places == [(0, 0, 2, 0, 3), (0, 2, 0, 4, 1), (0, 2, 3, 5, 0)]
    assert [x.own_keys("cpu").tolist() for x in sequences] == [[1, 2], [], [-3, -2, -1]]
    padded = sequences_of(CaseLengths(seqused_k=(0, 7)).on("cpu"), 2, 3, 7)
    assert [tuple(x) for x in padded] == [
        (0, slice(0, 3), slice(0, 0)),
        (1, slice(0, 3), slice(0, 7)),
    ]


def test_queries_are_at_the_edges_of_what_they_see():
    """Of four targets two are seen: a query's own weight is nearly 1 there, and nearly 0 else."""
    shape = Shape(1, 2, 1, 60, 90, 128)
    lengths = CaseLengths((20, 40), (30, 60), window_left=7, window_right=3)
    case = Case("edges", shape, torch.bfloat16, inputs=one_hot_at_edges, lengths=lengths)
    q, k, _ = case.make("cpu")
    target = (q.float() @ k.float().mT).argmax(-1)[0]  # [heads, total_q]
    for start_q, seq_q, start_k, seq_k in ((0, 20, 0, 30), (20, 40, 30, 60)):
        own = start_k + torch.arange(seq_q) + seq_k - seq_q
        first, last = own - 7, (own + 3).clamp(max=start_k + seq_k - 1)
        edges = torch.stack((first - 1, first, last, (last + 1).clamp(max=89)))
        found = target[:, start_q : start_q + seq_q]
        assert all((found == edge).any() for edge in edges)
        assert (found == edges[:, None]).any(0).all()


@pytest.mark.parametrize("operation", STEPS, ids=lambda operation: operation.name)
def test_names_and_specializations(operation):
    cases = cases_with_lengths(operation)
    assert all(case.operation == operation for case in cases)
    others = {case.name for case in (*all_cases(), *all_cases(BACKWARD))}
    assert len({case.name for case in cases} - others) == len(cases)
    assert all(len(case.name) <= 22 for case in cases)
    assert {case.specialization for case in cases} <= {case.specialization for case in CASES}


def test_drawn_cases_depend_on_the_seed():
    shapes = set()
    for seed in range(10):
        cases = [case for case in lengths_cases(seed) if case.name.startswith("drawn_")]
        assert cases == [case for case in lengths_cases(seed) if case.name.startswith("drawn_")]
        for case in cases:
            inputs = case.make("cpu", seed)
            expected = accuracy.expect(case, *inputs)
            assert expected.allowances["o rms"] < 0.1 * accuracy.rms(expected.outputs[0])
        shapes |= {case.shape for case in cases}
    assert len(shapes) == 10 * len(cases)


def test_backward_has_all_drawn_ones():
    names = {case.name for case in lengths_cases() if case.name.startswith("drawn_")}
    for seed in range(5):
        cases = [case for case in cases_with_lengths(BACKWARD, seed) if case.name in names]
        assert len(cases) == len(names)
        for case in cases:
            result = check_case(STEPS[BACKWARD], case, [WrongBackend()] * 2, seed)
            assert result.passed, str(result)


def test_only_steps_that_take_lengths_have_these_cases(monkeypatch, capsys):
    assert all(case.lengths is None for case in (*all_cases(), *all_cases(BACKWARD)))
    assert find_cases(["ragged", "window"]) == find_cases(["ragged"])
    assert find_cases(["window"], BACKWARD) == ()
    (backward,) = find_cases(["window"], BACKWARD, lengths=True)
    assert (backward.operation, backward.lengths) == (
        BACKWARD,
        find_cases(["window"], lengths=True)[0].lengths,
    )
    assert [case.name for case in find_cases(["window", "ragged"], lengths=True)] == [
        "ragged",
        "window",
    ]
    with pytest.raises(UsageError, match=r"no case 'windows'; the cases are tiles, .*window_left"):
        find_cases(["windows"])
    monkeypatch.setattr(check, "make_runs", lambda *_: [check.Runs((WrongBackend(),) * 2)])
    assert check_steps([replace(STEP, takes_lengths=False)], case_names=["ragged", "window"])
    assert "1 passed, 0 failed, 0 skipped" in capsys.readouterr().out
    assert check_steps([STEP], case_names=["ragged", "window", "used"])
    assert "3 passed, 0 failed, 0 skipped" in capsys.readouterr().out
