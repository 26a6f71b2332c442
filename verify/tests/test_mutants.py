"""Kernels with one thing wrong: the checker must reject each, and accept what they were made from.

Each verify/mutants/vNN_what.patch says what it `breaks:` and in which `cases:` that must show: in
every one of them. patch_samples.py says which of them run.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from common.catalog import all_steps, find_step
from common.errors import UsageError
from common.operation import Operation
from common.patch import Patch, read_patch
from common.paths import ROOT
from common.runtime import cpu
from common.runtime.cpu import CpuBackend
from common.step import Step, read_step
from verify import turn
from verify.case import Case
from verify.cases import find_cases
from verify.check import check_case
from verify.tests import patch_samples
from verify.tests.on_cpu import on_cpu
from verify.tests.patch_samples import SAMPLES, chosen, parse_mutants

PATCHES = sorted((ROOT / "verify" / "mutants").glob("*.patch"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    paths = chosen(PATCHES, metafunc.config.getoption("mutants"))
    if metafunc.function is test_accepted:
        metafunc.parametrize(("name", "case"), originals(paths))
    if metafunc.function is test_rejected:
        metafunc.parametrize("path", paths, ids=[path.stem for path in paths])


def originals(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Each step with each case in which one of its mutants is to show something wrong."""
    patches = map(read_patch, paths)
    return sorted({(patch.step.name, case) for patch in patches for case in named_cases(patch)})


def named_cases(patch: Patch) -> list[str]:
    return patch.header.get("cases", "").split()


@cache
def cases_named(names: str, operation: Operation, lengths: bool) -> tuple[Case, ...]:
    """Many mutants have the same ones, and find_cases() makes all there are."""
    return find_cases(names.split(), operation, lengths=lengths)


def flags_of_mutant(step: Step) -> tuple[str, str]:
    """A mutant runs once or twice: optimizing it takes longer than it saves, but where threads
    compute all products themselves. And nobody reads which line a report names.
    """
    on_tensor_cores = 'mma.cuh"' in step.path.read_text(encoding="utf-8")  # or wmma, or wgmma
    return "-O0" if on_tensor_cores else "-O1", "-g0"


def test_accepted(name, case):
    step = find_step(name)
    result = on_cpu(step, *cases_named(case, step.operation, step.takes_lengths))
    assert result.passed, str(result)


def test_rejected(path, monkeypatch):
    patch = read_patch(path)
    mutant = read_step(patch.write())
    assert mutant.name == path.stem
    monkeypatch.setattr(cpu, "STEP_FLAGS", flags_of_mutant(mutant))
    names = patch.header["cases"]
    for case in cases_named(names, mutant.operation, mutant.takes_lengths):
        backend = CpuBackend(0)
        backend.build(mutant, case.specialization)  # what does not compile is not rejected
        result = check_case(mutant, case, [backend])
        if result.passed:
            result = on_cpu(mutant, case)
        assert result.verdict == "FAIL", f"not rejected: {result}"


def test_every_patch_applies_and_names_cases():
    """Of all mutants, also of those whose turn it is not."""
    wrong = []
    for path in PATCHES:
        patch = read_patch(path)
        try:
            assert patch.header.get("breaks"), "it does not say what it breaks"
            assert named_cases(patch), "it names no case"
            patch.apply()
            step = patch.step
            cases_named(patch.header["cases"], step.operation, step.takes_lengths)
        except (AssertionError, UsageError) as error:
            wrong.append(f"{path.name}: {error}")
    assert not wrong, "\n".join(wrong)


# ---- samples


def test_the_samples_are_all_mutants():
    samples = [chosen(PATCHES, sample) for sample in range(SAMPLES)]
    assert sorted(chain(*samples)) == chosen(PATCHES, None) == PATCHES
    sizes = {len(sample) for sample in samples}
    assert max(sizes) - min(sizes) <= 1


def test_every_sample_has_mutants_of_most_steps():
    for sample in range(SAMPLES):
        names = {name for name, _ in originals(chosen(PATCHES, sample))}
        assert len(names) > 0.7 * len(all_steps())


def test_every_step_has_mutants():
    assert {name for name, _ in originals(PATCHES)} == {step.name for step in all_steps()}


def test_the_number_of_commits_chooses_the_sample(monkeypatch):
    commits = turn.number_of_commits()
    assert commits == turn.number_of_commits() >= 0
    numbers = []
    for number in range(commits, commits + SAMPLES):
        monkeypatch.setattr(patch_samples, "number_of_commits", lambda number=number: number)
        numbers.append(parse_mutants("sample"))
    assert sorted(numbers) == list(range(SAMPLES))


def test_without_git_it_is_sample_0(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert parse_mutants("sample") == 0


def test_outside_of_a_clone_it_is_sample_0(monkeypatch, tmp_path):
    monkeypatch.setattr(turn, "ROOT", tmp_path)
    assert parse_mutants("sample") == 0


@pytest.mark.parametrize(("value", "sample"), [("all", None), ("3", 3), (str(SAMPLES + 3), 3)])
def test_a_sample_can_be_chosen(value, sample):
    assert parse_mutants(value) == sample


@pytest.mark.parametrize("value", ["", "none", "-1"])
def test_what_is_no_sample_is_refused(value):
    with pytest.raises(ArgumentTypeError, match="takes all, sample or the number of a sample"):
        parse_mutants(value)


# ---- patches


PATCH = """\
breaks: nothing
cases: ragged

--- a/steps/v01_naive.cu
+++ b/steps/v01_naive.cu
@@ -1,3 +1,3 @@
 #include "attention.cuh"

-{old}
+{new}
"""


def write_patch(folder, old, new):
    path = folder / "v01_example.patch"
    path.write_text(PATCH.format(old=old, new=new))
    return path


def test_patch_is_applied_by_content(tmp_path):
    source = (ROOT / "steps" / "v01_naive.cu").read_text()
    first_line = source.split('#include "attention.cuh"\n\n')[1].splitlines()[0]
    patch = read_patch(write_patch(tmp_path, first_line, "// replaced"))
    assert patch.header == {"breaks": "nothing", "cases": "ragged"}
    path = patch.write()
    source = path.read_text()
    assert source.startswith("// v01_example -- ")
    assert "// replaced\n" in source
    assert first_line not in source
    written = path.stat().st_mtime_ns
    assert patch.write() == path
    assert path.stat().st_mtime_ns == written  # the same text is not written again
    path.unlink()


def test_patch_that_does_not_apply(tmp_path):
    with pytest.raises(UsageError, match=r"example.patch no longer applies: .* matches 0 places"):
        read_patch(write_patch(tmp_path, "not in the step", "x")).write()


def test_patch_that_is_ambiguous(tmp_path):
    path = tmp_path / "v01_example.patch"
    path.write_text("--- a/steps/v01_naive.cu\n+++ b/steps/v01_naive.cu\n@@ -1 +1 @@\n-}\n+\n")
    with pytest.raises(UsageError, match=r"no longer applies: .* matches \d+ places"):
        read_patch(path).write()


@pytest.mark.parametrize("text", ["", "breaks: all\n", "--- a/steps/v01_naive.cu\n+++ b\n"])
def test_not_a_patch(tmp_path, text):
    path = tmp_path / "v01_example.patch"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a unified diff"):
        read_patch(path)
