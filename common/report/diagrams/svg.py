"""SVG text from boxes, lines, text and matrices: the same calls give the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 830  # of the text on GitHub, so that a pixel here is one there
SMALL, NORMAL, TITLE = 11, 12, 13
INK, MUTED, WHITE = "#24292f", "#59636e", "#ffffff"
TINTS = ("#cfe2f5", "#d3ecc8", "#fbe0bd", "#e3d7f4")
ACCENT, EMPTY = "#b5402c", "#eff2f5"
BANK_COLORS = (
    "#a9cdec",
    "#fbc98d",
    "#a5d99b",
    "#f3dc7a",
    "#9dcfc8",
    "#f7b3ae",
    "#dcb8de",
    "#d9c3b0",
)
LANE = 5  # the lane whose registers are shown

Element = tuple[int, int]  # row, column


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
        """A line of text centred vertically on y."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y + 0.36 * size:g}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def cell(self, x: float, y: float, width: float, height: float, fill: str, text: str) -> None:
        """A box with a centred line of text."""
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


class Matrix:
    """A matrix in a drawing, with a box for each pair of neighbours that one lane holds."""

    def __init__(
        self, drawing: Drawing, x: float, y: float, cell_width: float, cell_height: float
    ) -> None:
        self._drawing, self._x, self._y = drawing, x, y
        self._cell_width, self._cell_height = cell_width, cell_height

    def pair(self, first: Element, second: Element, fill: str, *lines: str) -> None:
        """A box around both elements with lines of text; the first element is darker."""
        x, y = self._x + first[1] * self._cell_width, self._y + first[0] * self._cell_height
        width = (second[1] - first[1] + 1) * self._cell_width
        height = (second[0] - first[0] + 1) * self._cell_height
        self._drawing.box(x, y, width, height, fill)
        self._drawing.box(
            x + 0.5, y + 0.5, self._cell_width - 0.5, self._cell_height - 0.5, _darker(fill), "none"
        )
        style = {"color": WHITE, "bold": True} if fill == ACCENT else {}
        for n, line in enumerate(lines):
            middle = y + height / 2 + 13 * (n - (len(lines) - 1) / 2)
            self._drawing.text(x + width / 2, middle, line, SMALL, anchor="middle", **style)

    def rows(self, count: int, first: int = 0) -> None:
        """Row numbers at the left."""
        for row in range(count):
            y = self._y + (row + 0.5) * self._cell_height
            self._drawing.text(self._x - 6, y, f"{first + row}", SMALL, MUTED, anchor="end")

    def columns(self, count: int, first: int = 0) -> None:
        """Column numbers above."""
        for column in range(count):
            x = self._x + (column + 0.5) * self._cell_width
            self._drawing.text(x, self._y - 9, f"{first + column}", SMALL, MUTED, anchor="middle")


def register_table(
    drawing: Drawing,
    x: float,
    y: float,
    name_width: float,
    titles: tuple[str, str],
    rows: Iterable[tuple[str, Sequence[str], str]],
) -> None:
    """A line for each pair that lane LANE holds: a name, the two elements, a note."""
    for half, title in enumerate(titles):
        left = x + name_width + 62 * half
        drawing.text(left + 31, y, title, SMALL, MUTED, anchor="middle")
    tint = TINTS[LANE % 4]
    for n, (name, elements, note) in enumerate(rows):
        top = y + 11 + 23 * n
        drawing.text(x, top + 10, name, bold=True)
        for half, (element, fill) in enumerate(zip(elements, (_darker(tint), tint), strict=True)):
            drawing.cell(x + name_width + 62 * half, top, 62, 20, fill, element)
        drawing.text(x + name_width + 131, top + 10, note, color=MUTED)


def lane_color(lane: int, tint: int) -> str:
    return ACCENT if lane == LANE else TINTS[tint]


def _darker(color: str) -> str:
    return "#" + "".join(f"{int(color[i : i + 2], 16) * 15 // 16:02x}" for i in (1, 3, 5))
