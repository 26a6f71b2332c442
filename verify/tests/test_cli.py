"""make and python -m common: the ways to call them and the ways to call them wrongly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

from common.__main__ import main
from common.source import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs make without the settings that an outer make has exported."""
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "N", "STEPS", "CASES", "SEED"}
    outer |= {"EXPERIMENTS", "GRID", "LATENCY", "M"}
    variables = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory", *arguments],
        capture_output=True,
        text=True,
        env=variables | environment,
        check=False,
    )


def last_command(run: subprocess.CompletedProcess) -> list[str]:
    """What `make -n` would run at last; before that it looks for the packages."""
    return run.stdout.replace("\\\n", "").splitlines()[-1].split()


def test_help_is_the_default_and_names_every_target():
    run = make()
    assert run.returncode == 0
    for target in (
        "setup",
        "step",
        "check",
        "bench",
        "profile",
        "compare",
        "worklog",
        "test",
        "lint",
        "clean",
    ):
        assert f"\n  {target} " in run.stdout


@pytest.mark.parametrize("number", ["3", "03", "v03"])
def test_step_passes_its_number_on(number):
    run = make("-n", "step", f"N={number}", f"PYTHON={sys.executable}")
    assert last_command(run) == [sys.executable, "-m", "common", "step", number]


def test_profile_takes_an_experiment():
    run = make("-n", "profile", "N=experiments/v04_no_padding.patch", f"PYTHON={sys.executable}")
    assert last_command(run)[1:] == [
        *("-m", "common", "profile"),
        "experiments/v04_no_padding.patch",
    ]


@pytest.mark.parametrize("target", ["step", "profile"])
def test_step_without_a_number_is_one_clear_line(target):
    run = make(target)
    assert run.returncode == 2
    assert f"which step? For example: make {target} N=4" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not run.stdout  # not even an environment was made


@pytest.mark.parametrize("numbers", [(), ("N=8",), ("M=8",)])
def test_compare_without_two_numbers_is_one_clear_line(numbers):
    run = make("compare", *numbers)
    assert run.returncode == 2
    assert "which two steps? For example: make compare N=8 M=9" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not run.stdout


def test_options_of_check():
    options = ["STEPS=v01 v03", "CASES=gqa,ragged", "SEED=7", "SANITIZE=1", "BACKEND=cpu"]
    run = make("-n", "check", f"PYTHON={sys.executable}", *options)
    assert last_command(run) == [
        sys.executable,
        "verify/check.py",
        "v01",
        "v03",
        *("--cases", "gqa,ragged", "--seed", "7", "--backend", "cpu", "--sanitize"),
    ]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["bench"], "-m common bench"),
        (["bench", "EXPERIMENTS=1"], "-m common bench --experiments"),
        (["bench", "GRID=1"], "-m common bench --grid"),
        (["bench", "LATENCY=1"], "-m common bench --latency"),
        (["compare", "N=8", "M=9"], "-m common compare 8 9"),
        (["worklog"], "-m common.report.markdown"),
        (["worklog", "CHECK=1"], "-m common.report.markdown --check"),
        (["test"], "-m pytest"),
    ],
)
def test_python_makes_no_environment(arguments, command):
    run = make("-n", *arguments, f"PYTHON={sys.executable}")
    assert last_command(run) == [sys.executable, *command.split()]


def complaint(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """What `python -m common` says of wrong arguments: one line."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize("command", ["step", "profile"])
@pytest.mark.parametrize("name", ["99", "v4x", "steps/none.cu", "none.patch"])
def test_unknown_step_is_one_clear_line(capsys, command, name):
    assert complaint(capsys, command, name).startswith("error: no ")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("1", "99"), "error: no step '99'; the steps are v01"),
        (("99", "1"), "error: no step '99'; the steps are v01"),
        (("9", "v09"), "error: N and M are both v09"),
        (("9",), "error: the following arguments are required: second"),
    ],
)
def test_wrong_comparison_is_one_clear_line(capsys, names, told):
    assert complaint(capsys, "compare", *names).startswith(told)


def test_comparison_ends_with_its_table(capsys):
    assert main(["compare", "8", "9"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--- a/steps/v08_wgmma.cu\n+++ b/steps/v09_warp_specialized.cu\n@@")
    assert "\n\n| Figure | v08 | v09 | Change |\n" in printed


def test_whoever_reads_the_output_may_stop():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        command = [sys.executable, "-m", "common", "compare", "8", "9"]
        run = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("options", [(), ("--experiments",), ("--grid",), ("--latency",)])
def test_bench_without_a_gpu_is_one_clear_line(capsys, monkeypatch, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = complaint(capsys, "bench", *options)
    assert told == "error: nothing can be timed: there is no CUDA device"


def test_grid_of_experiments_is_one_clear_line(capsys):
    told = complaint(capsys, "bench", "--grid", "--experiments")
    assert told.startswith("error: argument --experiments: not allowed with argument --grid")
