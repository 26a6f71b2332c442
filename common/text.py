"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def kib(size: int) -> str:
    return f"{size / 1024:.4g} KiB" if size >= 1024 else f"{size} B"


def megabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def listed(names: Iterable[str]) -> str:
    """As in a sentence: "q, k and v"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def label(name: str, *, stale: bool) -> str:
    """The name of what was measured; stale: its source has changed since."""
    return f"{name} (stale)" if stale else name


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a column whose title starts with ">" is aligned to the right."""
    titles = [title.removeprefix(">") for title in columns]
    rules = ["---:" if title.startswith(">") else "---" for title in columns]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, rules, *cells))
