"""Where the repository's files are, in a checkout and installed, and where compiled files go."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UsageError

_PACKAGE = Path(__file__).resolve().parent
IS_INSTALLED = (_PACKAGE / "steps").is_dir()  # a wheel has the steps inside; else a checkout
ROOT = _PACKAGE if IS_INSTALLED else _PACKAGE.parent  # has steps/
DEVICE_DIR = _PACKAGE / "runtime" / "device"  # the headers for nvcc


def build_dir() -> Path:
    """The folder of compiled files: build/ in a checkout, else one in the user's cache.

    ATTENTION_WORKLOG_CACHE overrides both.
    """
    if chosen := os.environ.get("ATTENTION_WORKLOG_CACHE"):
        return Path(chosen).absolute()
    if not IS_INSTALLED:
        return ROOT / "build"
    user_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not user_cache.is_absolute():  # XDG's specification says to ignore a relative path
        try:
            user_cache = Path.home() / ".cache"
        except RuntimeError:
            raise UsageError(
                "there is no home directory: set ATTENTION_WORKLOG_CACHE to a folder for "
                "compiled files"
            ) from None
    return user_cache / "attention-worklog"


BUILD_DIR = build_dir()
