"""The page, docs/index.html: the worklog told by scrolling, in one file that needs no network.

Each module of this package makes one kind of section: its markup, and the data that the script
web/KIND.js needs to bring it to life. web/ has the page's own scripts and style sheets, vendor/
the libraries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from ...errors import UsageError
from ...operation import OPERATIONS
from .. import rows
from ..diagrams.svg import COLORS, DARK, LIGHT, NONE
from ..record_set import RecordSet
from . import banks, bet, explorer, fragments, ladder, pictures, pipelines, softmax, tiles
from .section import WEB

VENDOR = Path(__file__).parent / "vendor"
LIBRARIES = ("d3", "plot", "prism")  # plot needs d3
FIRST, LAST = "page", "start"  # of the scripts and style sheets in web/
MAX_BYTES = 2_750_000


def render_page(record_sets: Sequence[RecordSet], worklog: str, figures: Mapping[str, str]) -> str:
    """The page's HTML. The first record set is the headline GPU's.

    worklog is the text of worklog.md; figures are the diagrams by their files' names.

    Raises UsageError where it would be larger than MAX_BYTES.
    """
    sections = [
        *(
            ladder.section(record_sets[0].of(operation), worklog, figures)
            for operation in OPERATIONS.values()
        ),
        softmax.section(),
        banks.section(),
        fragments.section(),
        tiles.section(),
        bet.section(record_sets[0]),
        pipelines.section(record_sets[0]),
        pictures.section(record_sets[0]),
        explorer.section(record_sets),
    ]
    page = _fill(
        (WEB / "page.html").read_text(encoding="utf-8"),
        styles="\n".join([_palette(), *_texts("css")]),
        summary=_summary(record_sets[0]),
        contents="\n".join(f'<li><a href="#{each.id}">{each.title}</a></li>' for each in sections),
        sections="\n".join(each.html for each in sections),
        data=_embedded_json({each.id: each.data for each in sections}),
        libraries="\n".join(map(_library, LIBRARIES)),
        scripts=_script("\n".join(['"use strict";', *_texts("js")])),
    )
    if (size := len(page.encode())) > MAX_BYTES:
        raise UsageError(f"docs/index.html would have {size} bytes: it may have {MAX_BYTES}")
    return page


def _summary(record_set: RecordSet) -> str:
    """The fastest step of each ladder, beside FlashAttention-3."""
    terms = []
    for operation in OPERATIONS.values():
        ladder_ = record_set.of(operation)
        measured = [row for row in rows.steps(ladder_) if "tflops" in row]
        if not measured:
            continue
        fastest = max(measured, key=itemgetter("tflops"))
        share = fastest["fa3_share"]
        told = f", {share:.2f} × FlashAttention-3" if share else ""
        stale = ", of an earlier source" if fastest["stale"] else ""
        terms.append(
            f"<div><dt>{operation.name}, {fastest['name']} on the {ladder_.newest['device']}{stale}"
            f"</dt><dd>{fastest['tflops']:.0f} TFLOP/s{told}</dd></div>"
        )
    return f'<dl class="numbers">{"".join(terms)}</dl>' if terms else ""


def _fill(template: str, **parts: str) -> str:
    """Puts each part in the place of its <!-- name -->, which the template must have once."""
    for name, part in parts.items():
        before, after = template.split(f"<!-- {name} -->")
        template = before + part + after
    return template


def _texts(suffix: str) -> list[str]:
    """The files in web/ with that suffix: the one that all others need, those, and the last."""
    paths = {path.stem: path for path in sorted(WEB.glob(f"*.{suffix}"))}
    names = sorted(paths, key=lambda name: (name != FIRST, name == LAST))
    return [paths[name].read_text(encoding="utf-8") for name in names]


def _library(name: str) -> str:
    return _script((VENDOR / f"{name}.js").read_text(encoding="utf-8"))


def _script(text: str) -> str:
    return f"<script>\n{text}</script>"


def _palette() -> str:
    """The diagrams' colors as custom properties: --ink, --tint0, ..."""
    rules = [
        "".join(f"--{role}:{pair[theme]};" for role, pair in COLORS.items() if role != NONE)
        for theme in (LIGHT, DARK)
    ]
    return f":root{{{rules[0]}}}\n@media (prefers-color-scheme: dark){{:root{{{rules[1]}}}}}"


def _embedded_json(data: object) -> str:
    """JSON that cannot end the <script> that it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
