"""A section of the page."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

WEB = Path(__file__).parent / "web"


@dataclass(frozen=True)
class Section:
    """Its markup, and the data for the script web/KIND.js, which finds them by the id."""

    id: str
    kind: str
    title: str
    markup: str
    data: object

    @property
    def html(self) -> str:
        return (
            f'<section id="{self.id}" data-kind="{self.kind}" aria-labelledby="{self.id}-title">\n'
            f'<h2 id="{self.id}-title">{escape(self.title)}</h2>\n{self.markup}</section>'
        )


def read_markup(kind: str) -> str:
    """web/KIND.html, for a section whose markup does not depend on the records."""
    return (WEB / f"{kind}.html").read_text(encoding="utf-8")
