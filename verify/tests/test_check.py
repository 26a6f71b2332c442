"""The checker itself: what it must accept and what it must not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from common.catalog import all_steps, step_names
from common.errors import NotEnoughMemoryError, UsageError
from common.lengths import UNLIMITED
from common.paths import ROOT
from common.problem import Shape
from common.runtime.launch import LaunchDescriptor
from verify import accuracy, check
from verify.case import Case
from verify.cases import CASES, all_cases, drawn_cases, find_cases
from verify.check import check_case, check_steps
from verify.lengths import CaseLengths
from verify.reference import attention_in_dtype, attention_reference

STEP = all_steps()[0]
CPU_CASES = [case for case in all_cases(lengths=True) if not case.gpu_only]


class TorchBackend:
    """A stand-in for a kernel: torch in float32, rounded to the input's dtype, then spoilt."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self, spoil=lambda o, lse: None):
        self.spoil = spoil

    def refusal(self, step, spec):
        return step.limits.refusal(spec)

    def build(self, step, spec):
        return step.path

    def launch(self, step, q, k, v, o, lse, **arguments):
        q, k, v = q.float(), k.float(), v.float()
        result = attention_in_dtype(q, k, v, **arguments)
        o.copy_(result[0])
        lse.copy_(result[1])
        self.spoil(o, lse)


def checked(case_name: str, *spoils):
    runs = [TorchBackend(spoil) for spoil in spoils] or [TorchBackend()] * 2
    return check_case(STEP, find_cases([case_name])[0], runs)


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_accepts_float32_accumulation(case):
    result = check_case(STEP, case, [TorchBackend()] * 2)
    assert result.passed, str(result)


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_allowance_is_sharp(case):
    """A case where torch's own error is large would let a wrong kernel pass."""
    q, k, v = case.make("cpu")
    expected = accuracy.expect(case, q, k, v)
    assert expected.allowances["o rms"] < 0.1 * accuracy.rms(expected.outputs[0])
    assert expected.allowances["lse max"] < 0.01


def test_cases_are_seeded_and_leave_the_gaps_poisoned():
    for case in CPU_CASES:
        made = [case.make("cpu", seed) for seed in (1, 1, 2)]
        first, second, other = ((q, *(case.fill_unused(x, 0) for x in kv)) for q, *kv in made)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()
        assert all(x.stride(-1) == 1 for x in made[0])
        if case.name != "constant":
            assert not torch.equal(first[2], other[2])
        assert first[0].shape == case.shape.q
        assert (first[1].shape, first[2].shape) == (case.shape.kv, case.shape.v)


def set_element(which: str, index: tuple[int, ...], value: float):
    def spoil(o, lse):
        {"o": o, "lse": lse}[which][index] = value

    return spoil


def write_after_first_row(o, lse):
    o.as_strided((1,), (1,), o.shape[-1]).fill_(0)


def move_every_other(ulps: int):
    """Moves half of o by some ulps; -1 is the effect of truncation."""

    def spoil(o, lse):
        o.view(torch.int16)[..., ::2] += ulps

    return spoil


@pytest.mark.parametrize(
    ("case", "spoil", "complaint"),
    [
        ("ragged", lambda o, lse: o.fill_(torch.nan), "o: 25216 of 25216"),
        ("ragged", set_element("o", (0, 1, 76, 63), 0.9), "o[0, 1, 76, 63] is 0.8"),
        ("ragged", set_element("o", (0, 1, 76, 63), torch.nan), "o[0, 1, 76, 63] is nan"),
        ("ragged", set_element("o", (0, 0, 0, 0), torch.inf), "o[0, 0, 0, 0] is inf"),
        ("ragged", set_element("lse", (0, 1, 76), torch.nan), "lse[0, 1, 76] is nan"),
        ("ragged", set_element("lse", (0, 0, 3), -torch.inf), "lse[0, 0, 3] is -inf"),
        ("ragged", lambda o, lse: lse.mul_(1.4426950408889634), "lse: 394 of 394"),
        ("ragged", lambda o, lse: lse.add_(1e-4), "lse: 394 of 394"),
        ("ragged", lambda o, lse: o.mul_(1.015), "no element alone is outside the allowance"),
        ("causal_short_k", set_element("lse", (0, 0, 0), -1e30), "is -1e+30, expected -inf"),
        ("causal_short_k", set_element("lse", (0, 0, 0), torch.inf), "is inf, expected -inf"),
        ("causal_short_k", set_element("o", (0, 0, 0, 0), torch.nan), "is nan, expected 0"),
        ("causal_short_k", set_element("o", (0, 0, 0, 0), -0.0), "they must be +0"),
        ("ragged", move_every_other(-1), "o: all in all nearer to zero than expected"),
        ("packed", move_every_other(-1), "o: all in all nearer to zero than expected"),
        ("tiles", move_every_other(+1), "o: all in all further from zero than expected"),
        ("padded", write_after_first_row, "between the rows of o"),
    ],
)
def test_rejects(case, spoil, complaint):
    result = checked(case, spoil, spoil)
    assert result.verdict == "FAIL"
    assert complaint in str(result)


def test_prints_at_most_five_mismatches():
    report = str(checked("ragged", lambda o, lse: o.fill_(torch.nan)))
    assert report.count("expected") == 5


@pytest.mark.parametrize("which", ["o", "lse"])
def test_rejects_runs_that_differ_in_the_last_bit(which):
    def next_number(o, lse):
        x = {"o": o, "lse": lse}[which]
        x.view(torch.int16 if which == "o" else torch.int32)[0, 0, 0] += 1

    result = checked("ragged", lambda o, lse: None, next_number)
    assert all(measure.passed for measure in result.measures)
    assert result.verdict == "FAIL"
    assert f"{which}: " in result.errors[0]
    assert "differ between runs" in result.errors[0]


def test_reports_a_launch_that_fails():
    def fail(o, lse):
        raise RuntimeError("attention_forward: block 3, thread 7\nreads past the end of k")

    result = checked("ragged", fail)
    assert result.verdict == "FAIL"
    assert "    reads past the end of k" in str(result).splitlines()


def test_a_refusal_is_skipped_and_nothing_but_skips_fails(monkeypatch, capsys):
    picky = replace(STEP, limits=replace(STEP.limits, dtypes=("bf16",)))
    monkeypatch.setattr(check, "make_runs", lambda *_: [check.Runs((TorchBackend(),) * 2)])
    assert check_steps([picky], case_names=["ragged", "gqa"])
    assert "skipped: takes bf16, not fp32" in capsys.readouterr().out
    assert not check_steps([picky], case_names=["gqa"])
    assert "0 passed, 0 failed, 1 skipped: FAIL: nothing ran" in capsys.readouterr().out

    def no_memory(o, lse):
        raise NotEnoughMemoryError("needs 8 GiB of workspace, 1 GiB free")

    assert checked("ragged", no_memory).verdict == "skipped: needs 8 GiB of workspace, 1 GiB free"

    def picky_about_strides(o, lse):
        raise UsageError("q is not aligned")

    assert checked("ragged", picky_about_strides).verdict == "FAIL"


def assert_keys_without_queries(case: Case, visible: torch.Tensor):
    """visible: bool [batch, 1, seq_q, seq_k]"""
    rng = torch.Generator().manual_seed(0)
    for hidden in (0, 0.5, 0.9, 1):
        sees_no_key = torch.rand(case.shape.q[:3], generator=rng) < hidden
        sees_no_key |= ~visible.any(-1)
        sees = visible & ~sees_no_key[..., None]
        expected = ~sees.unflatten(1, (2, 2)).any(2).any(2)
        assert torch.equal(accuracy.keys_without_queries(case, sees_no_key), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 5), (3, 6), (6, 3), (1, 4)])
def test_keys_without_queries(seq_q, seq_k, causal):
    case = Case("keys", Shape(2, 4, 2, seq_q, seq_k, 8), torch.bfloat16, causal)
    visible = torch.ones(2, 1, seq_q, seq_k, dtype=torch.bool)
    assert_keys_without_queries(case, visible.tril(seq_k - seq_q) if causal else visible)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (1, 2), (3, 0), (UNLIMITED, 1), (UNLIMITED,) * 2])
@pytest.mark.parametrize("is_packed", [False, True])
def test_keys_without_queries_of_lengths(is_packed, window, causal):
    batch, total_q, total_k = (1, 9, 21) if is_packed else (3, 5, 7)
    seqlens = ((5, 0, 1, 3), (7, 4, 8, 2)) if is_packed else (None, None)
    lengths = CaseLengths(*seqlens, (6, 4, 0, 2) if is_packed else (7, 0, 4), *window)
    shape = Shape(batch, 4, 2, total_q, total_k, 8)
    case = Case("keys", shape, torch.bfloat16, causal, lengths=lengths)
    visible = torch.zeros(batch, 1, total_q, total_k, dtype=torch.bool)
    left, right = window[0], 0 if causal else window[1]
    for i, queries, keys in case.sequences:
        for n, j in product(range(queries.start, queries.stop), range(keys.start, keys.stop)):
            to_end = (keys.stop - j) - (queries.stop - n)  # own key - j
            visible[i, 0, n, j] = -right <= to_end <= left
    assert_keys_without_queries(case, visible)


class OtherGrid(TorchBackend):
    """Its results depend on the number of multiprocessors, unless told how they are spoilt."""

    def __init__(self, multiprocessors, spoil=None):
        super().__init__(spoil or (lambda o, lse: lse.add_(1e-6 * (multiprocessors == 5))))
        self.multiprocessors = multiprocessors


def descriptor_of(blocks_per_sm):
    descriptor = LaunchDescriptor()
    descriptor.kernels[0].blocks_per_sm = blocks_per_sm
    return lambda step, spec: descriptor


def test_what_a_persistent_step_computes_depends_on_no_number_of_blocks():
    # The cases' names decide on one block and on five.
    one, five = find_cases(["ragged", "many_blocks"])
    runs = check.Runs((OtherGrid(2), OtherGrid(3)), (OtherGrid(1), OtherGrid(5)))
    runs.backend.descriptor = descriptor_of(0)
    assert check_case(STEP, five, runs.of(STEP, five)).passed
    runs.backend.descriptor = descriptor_of(1)
    assert [runs.of(STEP, case)[2:] for case in (one, five)] == [
        (backend,) for backend in runs.other_grids
    ]
    result = check_case(STEP, five, runs.of(STEP, five))
    assert result.num_runs == 3
    assert "elements differ between runs" in str(result)


BY_MULTIPROCESSORS = replace(STEP, by_multiprocessors=True)


def test_a_step_whose_bits_depend_on_the_grid_runs_twice_on_the_same():
    (case,) = find_cases(["many_blocks"])  # whose name decides on five
    always, others = (OtherGrid(2), OtherGrid(3)), (OtherGrid(1), OtherGrid(5))
    runs = check.Runs(always, others, same_grid=OtherGrid(2))
    runs.backend.descriptor = descriptor_of(1)
    assert runs.of(BY_MULTIPROCESSORS, case) == (always[0], runs.same_grid, others[1])
    assert runs.of(STEP, case) == (*always, others[1])
    on_a_gpu = replace(runs, same_grid=None)
    assert on_a_gpu.of(BY_MULTIPROCESSORS, case) == (*always, others[1])
    assert check_case(BY_MULTIPROCESSORS, case, runs.of(BY_MULTIPROCESSORS, case)).passed
    runs.backend.descriptor = descriptor_of(0)
    assert runs.of(BY_MULTIPROCESSORS, case) == always


def right(o, lse):
    pass


def next_numbers(o, lse):
    lse.view(torch.int32).add_(1)


@pytest.mark.parametrize(
    ("step", "same", "other", "complaint"),
    [
        (BY_MULTIPROCESSORS, right, next_numbers, None),
        (BY_MULTIPROCESSORS, next_numbers, right, "lse: 394 of 394 elements differ between runs"),
        (BY_MULTIPROCESSORS, right, lambda o, lse: lse.add_(1e-4), "lse: 394 of 394 elements outs"),
        (BY_MULTIPROCESSORS, right, lambda o, lse: o.fill_(torch.nan), "o: 25216 of 25216"),
        (STEP, right, next_numbers, "lse: 394 of 394 elements differ between runs"),
    ],
)
def test_last_bits_may_depend_on_the_grid(step, same, other, complaint):
    (case,) = find_cases(["ragged"])
    result = check_case(step, case, [OtherGrid(2, right), OtherGrid(2, same), OtherGrid(5, other)])
    assert all(measure.passed for measure in result.measures)  # those of the first run
    assert (result.passed, result.num_runs) == (complaint is None, 3)
    assert (complaint or "pass") in str(result)


def test_runs_on_the_cpu_differ_in_seed_grid_and_call():
    (runs,) = check.make_runs("cpu", seed=4, sanitize=False)
    backends = *runs.always, *runs.other_grids, runs.same_grid
    assert [backend.seed for backend in backends] == [4, 5, 6, 7, 6]
    assert [backend.multiprocessors for backend in backends] == [2, 3, 1, 5, 2]
    assert [backend.calls for backend in backends] == [1, 2, 1, 1, 2]


def test_a_refusal_that_a_case_allows(capsys):
    def refuse(o, lse):
        raise UsageError("k is not aligned")

    result = checked("misaligned_rows", refuse)
    assert result.passed
    assert result.verdict == "pass: refused, as it may"
    assert checked("misaligned_rows").passed
    assert checked("misaligned_rows", lambda o, lse: o.zero_()).verdict == "FAIL"


@pytest.mark.parametrize(("arch", "verdict"), [("sm_80", "FAIL"), ("sm_75", "skipped")])
def test_a_step_that_its_own_architecture_cannot_launch_fails(monkeypatch, capsys, arch, verdict):
    """The device is an sm_80: what a step for sm_80 promises must run there."""

    class Small(TorchBackend):
        name = "gpu"
        device = torch.device("cuda")

        def refusal(self, step, spec):
            return step.limits.refusal(spec) or "needs more shared memory than there is"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(check, "make_runs", lambda *_: [check.Runs((Small(),) * 2)])
    limits = replace(STEP.limits, arch=arch, dtypes=("bf16",))
    assert not check_steps([replace(STEP, limits=limits)], case_names=["ragged", "gqa"])
    printed = capsys.readouterr().out
    assert verdict in printed.splitlines()[1]
    assert "needs more shared memory than there is" in printed
    assert "skipped: takes bf16, not fp32" in printed


def test_summary(monkeypatch, capsys):
    picky = replace(STEP, name="v99", limits=replace(STEP.limits, dtypes=("bf16",)))
    monkeypatch.setattr(check, "make_runs", lambda *_: [check.Runs((TorchBackend(),) * 2)])
    assert check_steps([STEP, picky], case_names=["ragged", "gqa", "causal"])
    *_, heading, first, second, everything, verdict = capsys.readouterr().out.splitlines()
    assert heading.split() == ["step", "backend", "passed", "failed", "skipped", "runs", "seconds"]
    assert first.split()[:-1] == ["v01", "cpu", "3", "0", "0", "6"]
    assert second.split()[:-1] == ["v99", "cpu", "2", "0", "1", "4"]
    assert everything.split()[:-1] == ["all", "5", "0", "1", "10"]
    assert verdict.endswith("pass")


@pytest.mark.parametrize("names", ["single_token,single_key", "single_token, single_key", " x "])
def test_names_of_cases_are_separated_by_commas_or_spaces(capsys, monkeypatch, names):
    monkeypatch.setattr(check, "make_runs", lambda *_: [check.Runs((TorchBackend(),) * 2)])
    assert check.main(["v01", "--cases", names]) == (2 if "x" in names else 0)
    if "x" not in names:
        assert "v01 on cpu: 2 passed, 0 failed" in capsys.readouterr().out


def test_drawn_cases_depend_on_the_seed_and_need_no_other_specialization():
    known = {case.specialization for case in CASES}
    shapes = set()
    for seed in range(20):
        cases = drawn_cases(seed)
        assert cases == drawn_cases(seed)
        assert {case.specialization for case in cases} <= known
        assert all(case.shape.heads % case.shape.kv_heads == 0 for case in cases)
        shapes |= {case.shape for case in cases}
    assert len(shapes) == 20 * len(cases)


def test_oracle_is_not_what_is_checked():
    """The float64 result itself passes, rounded: the allowance covers one rounding."""
    case = find_cases(["ragged"])[0]

    def exact(o, lse):
        q, k, v = case.make("cpu")
        result = attention_reference(q, k, v, causal=False, softmax_scale=case.scale)
        o.copy_(result[0])
        lse.copy_(result[1])

    assert checked("ragged", exact).passed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["v99"], f"no step 'v99'; the steps are {step_names()}"),
        (["steps/v99_nothing.cu"], "no file 'steps/v99_nothing.cu'"),
        (["verify/mutants/nothing.patch"], "nothing.patch"),
        (["v01", "--cases", "raged"], "no case 'raged'; the cases are tiles, ragged"),
        (["v01", "--backend", "tpu"], "invalid choice: 'tpu'"),
        (["v01", "--seed", "x"], "invalid int value: 'x'"),
        (["--sanitize", "--backend", "gpu"], "compute-sanitizer"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, complaint):
    assert check.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line


def test_runs_from_another_directory(tmp_path):
    cases = "single_token,causal_one_key"
    arguments = ["steps/v01", "v04", "--backend", "cpu", "--cases", cases]
    command = [sys.executable, ROOT / "verify" / "check.py", *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "v01 on cpu: 2 passed, 0 failed, 0 skipped: pass" in result.stdout
    assert "v04 on cpu: 2 passed, 0 failed, 0 skipped: pass" in result.stdout


@pytest.mark.gpu
def test_every_step_passes_on_the_gpu():
    assert check_steps(all_steps(), "gpu")
