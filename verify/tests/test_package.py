"""What `pip install .` gives: its contents, and that it works outside of the repository."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import subprocess
import sys
import typing
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import common
from common import UsageError, attention, attention_varlen, paths
from common.catalog import all_steps
from common.paths import ROOT, build_dir
from common.runtime.build import host_compiler

MADE_FROM = ("common", "steps", "pyproject.toml", "README.md", "LICENSE")
CALL = """
import sys
import attention_worklog
assert "torch" not in sys.modules, "torch is imported before it is needed"
from attention_worklog import UsageError, attention
import torch
q, k, v = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 7, 7))
o, lse = attention(q, k, v, causal=True, return_lse=True, step="v01")
mask = torch.ones(5, 7, dtype=torch.bool).tril(7 - 5)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
torch.testing.assert_close(o, expected)
try:
    attention(q, k, v, step="v99")
except UsageError as error:
    print(error)
print(attention_worklog.__version__, attention_worklog.__file__, sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Made from a copy: setuptools would take what an earlier build left in build/lib."""
    for needed in ("pip", "setuptools"):
        # Not by find_spec(): asked for pip, setuptools' finder gives up its distutils in this
        # process, and cannot be imported any more.
        try:
            version(needed)
        except PackageNotFoundError:
            pytest.skip(f"{sys.executable} has no {needed}")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in MADE_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(copy)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--no-compile", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def metadata(installed: Path) -> Message:
    (path,) = installed.glob("*.dist-info/METADATA")
    return Parser().parsestr(path.read_text(encoding="utf-8"))


def relative_files(folder: Path, *patterns: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file()
    }


def test_only_what_attention_runs_is_inside(installed: Path) -> None:
    info, package = sorted(installed.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert info.suffix == ".dist-info"
    assert package.name == "attention_worklog"
    parts = (
        "sharded/*.py",
        "runtime/*.py",
        "runtime/*.h",
        "runtime/*.cpp",
        "runtime/device/**/*",
        "runtime/simt/**/*",
    )
    expected = relative_files(ROOT / "common", "*.py", "py.typed", *parts)
    expected |= {f"steps/{step.path.name}" for step in all_steps()}
    assert relative_files(package, "**/*") == expected
    assert {"py.typed", "runtime/launch.h", "runtime/simt/nan_pattern.sh"} <= expected


def test_metadata(installed: Path) -> None:
    found = metadata(installed)
    assert found["Name"] == "attention-worklog"
    assert found["Version"] == common.__version__
    assert found["License-Expression"] == "MIT"
    needed = [line for line in found.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split(">=")[0] for line in needed) == ["numpy", "torch"]
    assert set(found.get_all("Provides-Extra")) == {"gpu", "transformers", "dev"}


def run_installed(
    installed: Path, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with what is installed and nothing of the repository."""
    kept = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
    )


def test_it_runs_outside_of_the_repository(installed: Path, tmp_path: Path, monkeypatch) -> None:
    """The first process compiles, into the user's cache only; the second finds all of it there."""
    home, compiler = tmp_path / "home", tmp_path / "quick_compiler"
    # What is compiled runs once or twice. The last -O counts.
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(host_compiler())} "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    cache = home / ".cache" / "attention-worklog"
    before = relative_files(installed, "**/*")
    ended = run_installed(installed, tmp_path, "-c", CALL, HOME=str(home))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        f"no step 'v99'; the steps are {', '.join(step.name for step in all_steps())}",
        common.__version__,
        str(installed / "attention_worklog" / "__init__.py"),
    ]
    (program,) = cache.glob("v01_naive_d8_fp32_causal_simt-*[0-9a-f]")
    assert os.access(program, os.X_OK)
    assert relative_files(installed, "**/*") == before
    assert set(tmp_path.iterdir()) == {home, compiler}

    compiled = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    elsewhere = {"HOME": str(tmp_path / "other"), "ATTENTION_WORKLOG_CACHE": str(cache)}
    assert run_installed(installed, tmp_path, "-c", CALL, **elsewhere).stdout == ended.stdout
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == compiled
    assert set(tmp_path.iterdir()) == {home, compiler}


def test_transformers_finds_it(installed: Path, tmp_path: Path) -> None:
    """A module of that name within the package does not hide the library."""
    pytest.importorskip("transformers")
    code = """
from attention_worklog.transformers import register
register()
import transformers
print("attention_worklog" in transformers.AttentionInterface().valid_keys())
"""
    ended = run_installed(installed, tmp_path, "-c", code)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_it_has_no_commands(installed: Path, tmp_path: Path) -> None:
    ended = run_installed(installed, tmp_path, "-m", "attention_worklog", "step", "4")
    message = "error: an installed package has no commands: run make in a checkout\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", message)


def test_where_what_is_compiled_goes(monkeypatch, tmp_path: Path) -> None:
    for variable in ("ATTENTION_WORKLOG_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build_dir() == ROOT / "build"
    monkeypatch.setattr(paths, "IS_INSTALLED", True)
    assert build_dir() == tmp_path / ".cache" / "attention-worklog"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert build_dir() == tmp_path / ".cache" / "attention-worklog"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build_dir() == tmp_path / "xdg" / "attention-worklog"
    monkeypatch.setenv("ATTENTION_WORKLOG_CACHE", str(tmp_path / "chosen"))
    for is_installed in (False, True):
        monkeypatch.setattr(paths, "IS_INSTALLED", is_installed)
        assert build_dir() == tmp_path / "chosen"


def test_no_home_directory(monkeypatch) -> None:
    for variable in ("ATTENTION_WORKLOG_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(paths, "IS_INSTALLED", True)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(UsageError, match="no home directory: set ATTENTION_WORKLOG_CACHE"):
        build_dir()


def test_common_needs_no_torch_until_attention_is_asked_for() -> None:
    code = """
import sys
sys.modules["torch"] = None  # its import fails
import common
from common import UsageError, __version__
import common.patch, common.records
try:
    common.missing
except AttributeError as error:
    assert "module 'common' has no attribute 'missing'" in str(error)
try:
    common.attention
except ModuleNotFoundError as error:
    print(error.name)
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "torch\n"), ended.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of Python 3.11")
@pytest.mark.parametrize("function", [attention, attention_varlen])
def test_overloads_take_what_the_function_takes(function) -> None:
    parameters = dict(inspect.signature(function).parameters)
    assert parameters.pop("unknown").kind is inspect.Parameter.VAR_KEYWORD
    overloads = typing.get_overloads(function)
    assert [function.__annotations__["return"] for function in overloads] == [
        "Tensor",
        "tuple[Tensor, Tensor]",
        "Tensor | tuple[Tensor, Tensor]",
    ]
    for overload in overloads:
        declared = inspect.signature(overload).parameters
        assert {name: p.kind for name, p in declared.items()} == {
            name: p.kind for name, p in parameters.items()
        }
