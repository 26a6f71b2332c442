"""Kernels with one thing wrong: the checker must reject each, and accept what they were made from.

Each verify/mutants/vNN_what.patch says what it `breaks:` and in which `cases:` that must show: in
every one of them.
"""

from __future__ import annotations

from functools import cache

import pytest

from common.catalog import all_steps, find_step
from common.errors import UsageError
from common.operation import Operation
from common.patch import read_patch
from common.paths import ROOT
from common.runtime import cpu
from common.runtime.cpu import CpuBackend
from common.step import Step, read_step
from verify.case import Case
from verify.cases import find_cases
from verify.check import check_case
from verify.tests.on_cpu import on_cpu

PATCHES = sorted((ROOT / "verify" / "mutants").glob("*.patch"))
# Each step with each case that is to show something wrong.
ORIGINALS = sorted(
    {
        (patch.step.name, case)
        for patch in map(read_patch, PATCHES)
        for case in patch.header["cases"].split()
    }
)


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


@pytest.mark.parametrize(("name", "case"), ORIGINALS)
def test_accepted(name, case):
    step = find_step(name)
    result = on_cpu(step, *cases_named(case, step.operation, step.takes_lengths))
    assert result.passed, str(result)


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_rejected(path, monkeypatch):
    patch = read_patch(path)
    assert patch.header["breaks"]
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


def test_every_step_has_mutants():
    assert {name for name, _ in ORIGINALS} == {step.name for step in all_steps()}


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
