"""Whose turn it is: what takes too long for every commit is done in parts, one part a commit."""

from __future__ import annotations

import subprocess

from common.paths import ROOT


def number_of_commits() -> int:
    """Those that led to the one checked out; 0 where that is not known, as without git."""
    command = ["git", "-C", str(ROOT), "rev-list", "--count", "HEAD"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return 0
    return int(ended.stdout) if ended.returncode == 0 else 0
