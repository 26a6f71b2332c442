"""The section of a ladder: each step with its idea, its time, its limits and its diff."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from urllib.parse import quote

from ...record_schema import NUMBER
from ...step import Step, predecessor
from ...text import kib
from .. import rows
from ..compare import source_diff
from ..derived import limits
from ..record_set import Ladder
from ..rows import Row
from .section import Section

# Larger diagrams show single elements or banks: the page has playgrounds for those.
MOST_DIAGRAM_BYTES = 16_000

_HEADING = re.compile(r"^## (?P<title>(?P<name>[a-z]\d\d): .*)$", re.MULTILINE)
_SIZE = re.compile(r'width="\d+" height="\d+"')  # an SVG's, and an image's
_DIAGRAM = re.compile(r'<img alt="(?P<alt>[^"]*)" src="figures/(?P<name>\w+)\.svg">')


def section(ladder: Ladder, worklog: str, figures: Mapping[str, str]) -> Section:
    """worklog is the text of worklog.md; figures are the diagrams by their files' names."""
    operation = ladder.operation
    found = {row["name"]: row for row in rows.steps(ladder)}
    chapters = _chapters(worklog)
    articles = [
        _article(
            step,
            predecessor(step, ladder.steps),
            found[step.name],
            chapters.get(step.name),
            figures,
        )
        for step in ladder.steps
    ]
    shape = operation.headline.shape
    work = (
        f"batch {shape.batch}, heads {shape.heads}, N = {shape.seq_q}, D = {shape.head_dim}, "
        f"{operation.headline.dtype}"
    )
    device = ladder.newest["device"] if ladder.newest else "not measured"
    markup = (
        f'<p class="note">{escape(device)}; {work}. The axis of the chart is logarithmic, its '
        "lines are what one would use instead. The bars of a step say how close the kernel that "
        "takes longest comes to each limit of the card.</p>\n"
        '<div class="ladder">\n<div class="chart"></div>\n<div class="steps">\n'
        + "\n".join(articles)
        + "\n</div>\n</div>\n"
    )
    return Section(operation.name, "ladder", f"The {operation.name} ladder", markup, _data(ladder))


def _data(ladder: Ladder) -> dict:
    """Rates of steps and peers in TFLOP/s, and each step's shares of its limits in per cent."""
    records = ladder.measured.records
    return {
        "steps": [
            {
                "name": name,
                "tflops": record["tflops"],
                "stale": name in ladder.measured.stale,
                "limits": (found := limits(record)) and found[1],
                "kernel": found and len(record["counters"]) > 1 and found[0],
            }
            for name, record in records.items()
        ],
        "peers": [
            {"name": row["name"], "tflops": row["tflops"]}
            for row in rows.peers(ladder)
            if isinstance(row.get("tflops"), NUMBER)
        ],
    }


def _article(
    step: Step,
    previous: Step | None,
    row: Row,
    chapter: tuple[str, str] | None,
    figures: Mapping[str, str],
) -> str:
    name, links = escape(step.name), [f'<a href="../{escape(row["path"])}">Source</a>']
    diagrams = ""
    if chapter:
        anchor, text = chapter
        links.append(f'<a href="../worklog.md#{anchor}">Chapter</a>')
        diagrams = "".join(
            _diagram(shown["name"], shown["alt"], figures) for shown in _DIAGRAM.finditer(text)
        )
    return (
        f'<article class="step" id="{name}" data-step="{name}">\n'
        f"<h3>{name}: {escape(step.title)}</h3>\n{_numbers(row)}"
        f"<p>{_sentence(step.change)}</p>\n<p><b>Why.</b> {_sentence(step.why)}</p>\n"
        f'<div class="limits"></div>\n{diagrams}{_listing(step, previous)}'
        f'<p class="links">{" · ".join(links)}</p>\n</article>'
    )


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:].rstrip(".")) + "."


def _numbers(row: Row) -> str:
    """The step's row in the table of results, as terms and values."""
    if status := row.get("status"):
        return f'<p class="note">{status}</p>\n'
    pairs = [
        ("Time", f"{row['time_ms']:.4g} ms"),
        ("TFLOP/s", f"{row['tflops']:.4g}"),
        ("of FlashAttention-3", row["fa3_share"] and f"{row['fa3_share']:.1%}"),
        ("over the step that it changes", row["gain"] and f"{row['gain']:.2f} ×"),
        ("Registers", " / ".join(map(str, row["registers"]))),
        ("Shared memory", " / ".join(map(kib, row["smem_bytes"]))),
    ]
    shown = "".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>" for term, value in pairs if value)
    stale = '<p class="note">Stale: the source has changed since.</p>\n' if row["stale"] else ""
    return f'<dl class="numbers">{shown}</dl>\n{stale}'


def _listing(step: Step, previous: Step | None) -> str:
    """What changed from the step that it changes, or the whole of the first one."""
    if previous is None:
        text, title = step.path.read_text(encoding="utf-8"), "All of it"
    else:
        text = "\n".join(source_diff(previous, step).splitlines()[2:])
        changed = sum(line[:1] in ("+", "-") for line in text.splitlines())
        title = f"What changes from {previous.name}: {changed} lines"
    kind = "source" if previous is None else "diff"
    return (
        f'<details class="listing"><summary>{title}</summary>\n'
        f'<pre class="{kind}" tabindex="0" role="region" aria-label="{step.name}: {title}">'
        f"{escape(text)}</pre></details>\n"
    )


def _diagram(name: str, alt: str, figures: Mapping[str, str]) -> str:
    light, dark = figures.get(f"{name}.svg"), figures.get(f"{name}_dark.svg")
    if not light or not dark or len(light) > MOST_DIAGRAM_BYTES:
        return ""
    # Lazy: the page opens sooner without those that are far down, or of the other scheme of colors.
    # Their sizes keep their places.
    images = "".join(
        f'<img class="{theme}" alt="{alt}" {_SIZE.search(svg)[0]} loading="lazy" '
        f'src="data:image/svg+xml,{quote(svg, safe=_SAFE)}">'
        for theme, svg in (("light", light), ("dark", dark))
    )
    return f'<div class="wide" tabindex="0" role="region" aria-label="Diagram">{images}</div>\n'


_SAFE = " =:/;,'()<>"  # what a data URI between double quotes can have as it is


def _chapters(worklog: str) -> dict[str, tuple[str, str]]:
    """By step: the anchor that GitHub gives its chapter, and the chapter's text."""
    headings = list(_HEADING.finditer(worklog))
    starts = [heading.start() for heading in headings]
    return {
        heading["name"]: (_anchor(heading["title"]), worklog[heading.start() : end])
        for heading, end in zip(headings, [*starts[1:], None], strict=False)
    }


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
