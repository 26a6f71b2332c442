"""Runs the project's programs with a Python that has their packages: if need be, .venv's."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from .paths import ROOT

OLDEST = (3, 10)
_OURS = ("common", "verify")
_TRIED = "ATTENTION_WORKLOG_IN_VENV"  # in the environment of a program started here


def require_python(*program: str) -> None:
    """Restarts in .venv where this Python is too old for the project's code."""
    if sys.version_info < OLDEST:
        _go_on_in_venv("Python {}.{} or newer".format(*OLDEST), *program)


def require_package(error: ModuleNotFoundError, *program: str) -> NoReturn:
    """Restarts in .venv where an import failed because a package is missing."""
    if error.name is None or error.name.partition(".")[0] in _OURS:
        raise error
    _go_on_in_venv(f"the package {error.name}", *program)


def _go_on_in_venv(lack: str, *program: str) -> NoReturn:
    """Restarts `python program arguments…` with .venv's Python, which has what this one lacks.

    Without a .venv, or where that has been tried already, exits with an error of one line.
    """
    python = ROOT / ".venv" / "bin" / "python"
    if python.is_file() and _TRIED not in os.environ:
        os.environ[_TRIED] = "1"
        sys.stdout.flush()
        os.execv(python, [str(python), *program, *sys.argv[1:]])
    version = ".".join(map(str, sys.version_info[:3]))
    found = "so does .venv" if python.is_file() else "there is no .venv"
    print(
        f"error: {sys.executable} ({version}) lacks {lack}, and {found}: make setup",
        file=sys.stderr,
    )
    raise SystemExit(2)
