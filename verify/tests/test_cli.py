"""make and python -m common: the ways to call them and the ways to call them wrongly."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

from common import interpreter
from common.__main__ import main
from common.cli import guarded
from common.paths import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs make without the settings that an outer make has exported."""
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "N", "STEPS", "CASES", "SEED"}
    outer |= {"EXPERIMENTS", "GRID", "DIST", "DECODE", "LENGTHS", "LATENCY", "TRAIN", "M"}
    outer |= {"MUTANTS"}
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
    return shlex.split(run.stdout.replace("\\\n", "").splitlines()[-1])


def test_help_is_the_default_and_names_every_target():
    run = make()
    assert run.returncode == 0
    for target in (
        "setup",
        "step",
        "check",
        "bench",
        "profile",
        "pictures",
        "train",
        "compare",
        "worklog",
        "test",
        "lint",
        "clean",
    ):
        assert f"\n  {target} " in run.stdout


@pytest.mark.parametrize("target", ["step", "profile"])
@pytest.mark.parametrize("numbers", ["3", "03", "v03", "7 8"])
def test_step_passes_its_numbers_on(target, numbers):
    run = make("-n", target, f"N={numbers}", f"PYTHON={sys.executable}")
    assert last_command(run) == [sys.executable, "-m", "common", target, *numbers.split()]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("step", "N=7", "N=8"), "N is given twice, N=7 N=8: give it once, as in make step N="),
        (("compare", "N=7", "M=8", "M=8"), "M is given twice, M=8 M=8: give it once"),
        (("check", "STEPS=v01", "STEPS=v02"), 'as in make check STEPS="v01 v03"'),
        (("check", "CASES=gqa", "CASES=ragged"), "CASES is given twice, CASES=gqa CASES=ragged"),
    ],
)
def test_a_variable_given_twice_is_one_clear_line(arguments, told):
    run = make(*arguments)
    assert run.returncode == 2
    assert told in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert not run.stdout


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
    options = ["STEPS=v01 v03", "CASES=gqa, ragged", "SEED=7", "SANITIZE=1", "BACKEND=cpu"]
    run = make("-n", "check", f"PYTHON={sys.executable}", *options)
    assert last_command(run) == [
        sys.executable,
        "verify/check.py",
        "v01",
        "v03",
        *("--cases", "gqa, ragged", "--seed", "7", "--backend", "cpu", "--sanitize"),
    ]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["bench"], "-m common bench"),
        (["bench", "EXPERIMENTS=1"], "-m common bench --experiments"),
        (["bench", "GRID=1"], "-m common bench --grid"),
        (["bench", "DIST=1"], "-m common bench --distributions"),
        (["bench", "LARGE=1"], "-m common bench --large-head-dim"),
        (["bench", "DECODE=1"], "-m common bench --decode"),
        (["bench", "LENGTHS=1"], "-m common bench --lengths"),
        (["bench", "LATENCY=1"], "-m common bench --latency"),
        (["bench", "TRAIN=1"], "-m common bench --training"),
        (["compare", "N=8", "M=9"], "-m common compare 8 9"),
        (["worklog"], "-m common worklog"),
        (["worklog", "CHECK=1"], "-m common worklog --check"),
        (["test"], "-m pytest --mutants=sample"),
        (["test", "MUTANTS=all"], "-m pytest --mutants=all"),
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


@pytest.mark.parametrize("command", ["step", "profile", "launch"])
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
    assert "\n\n| Metric | v08 | v09 | Change |\n" in printed


def test_whoever_reads_the_output_may_stop():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        command = [sys.executable, "-m", "common", "compare", "8", "9"]
        run = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    "options",
    [
        (),
        *(
            (f"--{what}",)
            for what in (
                *("experiments", "grid", "distributions", "decode", "lengths", "latency"),
                *("large-head-dim", "training"),
            )
        ),
    ],
)
def test_bench_without_a_gpu_is_one_clear_line(capsys, monkeypatch, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = complaint(capsys, "bench", *options)
    assert told == "error: nothing can be timed: there is no CUDA device"


def test_launch_without_a_gpu_is_one_clear_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert complaint(capsys, "launch", "v01").startswith("error: no CUDA device")


def test_no_step_is_measured_where_one_is_unknown(capsys):
    assert complaint(capsys, "step", "1", "99").startswith("error: no step '99'")


def test_grid_of_experiments_is_one_clear_line(capsys):
    told = complaint(capsys, "bench", "--grid", "--experiments")
    assert told.startswith("error: argument --experiments: not allowed with argument --grid")


def test_lint_looks_at_the_steps_too():
    run = make("-n", "lint", f"PYTHON={sys.executable}")
    assert f"{sys.executable} -m common lint\n" in run.stdout


@pytest.fixture
def without_nvcc():
    path = "/usr/bin:/bin"
    if shutil.which("nvcc", path=path) or not shutil.which("python3", path=path):
        pytest.skip("nvcc beside the system's programs, or no python3 there")
    return {"PATH": path}


def setup(*variables: str, **environment: str) -> str:
    """What `make setup` would do; -B as if nothing had been made."""
    run = make("-nB", "setup", *variables, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_setup_without_a_driver_is_for_the_cpu():
    commands = setup("DRIVER=")
    assert "pip install -r requirements.txt\n" in commands
    assert commands.endswith("touch .venv/.ready\n")


def test_setup_with_a_toolkit_builds_against_it(tmp_path, without_nvcc):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(0o755)
    variables = ("DRIVER=/lib/libcuda.so.1", "HEADERS=/dev/null", f"CUDA_HOME={tmp_path}")
    commands = setup(*variables, **without_nvcc)
    assert f'PATH="{tmp_path}/bin:$PATH" .venv/bin/python -m pip install -r req' in commands
    assert "-r requirements.txt -r requirements-gpu.txt\ntouch .venv/.ready-gpu" in commands
    assert "requirements-cuda.txt" not in commands


def test_setup_without_a_toolkit_takes_nvcc_from_pypi(without_nvcc):
    variables = ("DRIVER=/lib/libcuda.so.1", "HEADERS=/dev/null", "CUDA_HOME=/none")
    commands = setup(*variables, **without_nvcc)
    toolkit = commands.index("pip install -r requirements-cuda.txt")
    links = commands.index("ln -s /lib/libcuda.so.1 .venv/cuda/lib/libcuda.so")
    pycuda = commands.index("pip install -r requirements.txt -r requirements-gpu.txt")
    assert toolkit < links < pycuda
    assert '.venv/cuda/bin:$PATH"' in commands[links:]


def test_setup_without_pythons_headers_says_so_and_goes_on(without_nvcc):
    commands = setup("DRIVER=/lib/libcuda.so.1", "HEADERS=/none/Python.h", **without_nvcc)
    assert "there is no /none/Python.h. Install it" in commands
    assert "pip install -r requirements.txt\n" in commands
    assert "touch .venv/.ready\n" in commands


@pytest.fixture
def checkout(tmp_path):
    """What the programs need until they import a package, without a .venv."""
    shutil.copytree(
        ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__", "simt")
    )
    (tmp_path / "verify").mkdir()
    shutil.copy(ROOT / "verify" / "check.py", tmp_path / "verify")
    return tmp_path


def make_venv(checkout, script: str) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


PROGRAMS = [["verify/check.py", "steps/v01", "--seed", "3"], ["-m", "common", "profile", "v01"]]


def run_without_packages(checkout, program: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-S", *program], cwd=checkout, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=["check", "common"])
def test_python_without_torch_goes_on_in_the_environment(checkout, program):
    make_venv(checkout, 'echo "$@"')
    run = run_without_packages(checkout, program)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split()[-len(program) + 1 :] == program[1:]
    assert run.stdout.split()[0].endswith(program[0])


@pytest.mark.parametrize("program", PROGRAMS, ids=["check", "common"])
def test_python_without_torch_or_environment_is_one_clear_line(checkout, program):
    run = run_without_packages(checkout, program)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} (")
    assert line.endswith("lacks the package torch, and there is no .venv: make setup")


@pytest.mark.parametrize("program", PROGRAMS, ids=["check", "common"])
def test_an_environment_without_torch_is_tried_once(checkout, program):
    make_venv(checkout, f'exec {sys.executable} -S "$@"')
    run = run_without_packages(checkout, program)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.endswith("lacks the package torch, and so does .venv: make setup")


def test_an_old_python_is_one_clear_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(interpreter, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit) as ended:
        interpreter.require_python("verify/check.py")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(3.9.18) lacks Python 3.10 or newer, and there is no .venv: make setup" in line


def test_a_module_of_our_own_that_is_missing_is_no_missing_package():
    error = ModuleNotFoundError("No module named 'common.lost'", name="common.lost")
    with pytest.raises(ModuleNotFoundError, match=r"common\.lost"):
        interpreter.require_package(error, "-m", "common")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "error: No space left on device: free some space on that disk",
        ),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "profiles/h200/v01.json"),
            "error: profiles/h200/v01.json: Permission denied: change its permissions, or work in "
            "a copy of your own",
        ),
    ],
)
def test_what_the_file_system_refuses_is_one_clear_line(capsys, error, told):
    def fail() -> int:
        raise error

    assert guarded(fail) == 2
    assert capsys.readouterr().err.splitlines() == [told]


def test_a_missing_file_of_ours_is_not_the_users_mistake():
    def fail() -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "common/lost")

    with pytest.raises(FileNotFoundError):
        guarded(fail)
