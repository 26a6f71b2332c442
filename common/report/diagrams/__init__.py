"""The diagrams of worklog.md, as SVG: drawn from the index mathematics of fragments.py."""

from __future__ import annotations

from . import ampere, blocks, hopper, softmax
from .svg import files


def figures() -> dict[str, str]:
    """SVG text by the file name in figures/."""
    return files(softmax.figures() | blocks.figures() | ampere.figures() | hopper.figures())
