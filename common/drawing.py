"""SVG text from boxes, lines and words: the same calls, the same bytes."""

from __future__ import annotations

from html import escape

from common.plots import INK

WIDTH = 830  # of the text on GitHub, so that a pixel here is one there
SMALL, NORMAL, TITLE = 11, 12, 13
MUTED, WHITE = "#59636e", "#ffffff"


class Drawing:
    """An SVG under construction, on white; coordinates are pixels from the upper left corner."""

    def __init__(self, height: int) -> None:
        self._height = height
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = WHITE,
        thickness: int = 1,
    ) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{thickness}"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False) -> None:
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self._parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}"{end}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = NORMAL,
        color: str = INK,
        *,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line whose middle is at y."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y + 0.36 * size:g}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def cell(self, x: float, y: float, width: float, height: float, fill: str, text: str) -> None:
        """A box with a line of text in its middle."""
        self.box(x, y, width, height, fill)
        self.text(x + width / 2, y + height / 2, text, SMALL, anchor="middle")

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self._height}"'
        lines = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {self._height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>',
            f'<rect {size} rx="6" fill="{WHITE}"/>',
            *self._parts,
            "</svg>",
        )
        return "".join(f"{line}\n" for line in lines)
