"""SVG text from boxes, lines, text and matrices: the same calls give the same bytes.

A color is the name of a role. Each drawing is written twice, as name.svg for a light page and as
name_dark.svg for a dark one, and the two differ in their style sheet only. A media query inside of
one file would do without the second, but inside of an image it follows the operating system,
whereas <picture> on GitHub follows the theme that the reader has chosen there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH = 830  # of the text on GitHub, so that a pixel here is one there
SMALL, NORMAL, TITLE = 11, 12, 13
INK, MUTED, PAGE, RULE = "ink", "muted", "page", "rule"
TINTS = ("tint0", "tint1", "tint2", "tint3")
ACCENT, ON_ACCENT, EMPTY = "accent", "on-accent", "empty"
RED = "red"  # of text, where ACCENT is of boxes
NONE = "none"  # nothing is filled, or stroked
BANK_COLORS = tuple(f"bank{group}" for group in range(8))
RAMP = tuple(f"ramp{n}" for n in range(8))  # from pale to strong
MARKS = ("mark0", "mark1", "mark2", "mark3")  # of dots and lines in a plot
DARKER = "-darker"
LIGHT, DARK = 0, 1  # themes
LANE = 5  # the lane whose registers are shown

# By theme.
COLORS = {
    NONE: (NONE, NONE),
    INK: ("#24292f", "#e6edf3"),
    MUTED: ("#59636e", "#9198a1"),
    PAGE: ("#ffffff", "#0d1117"),
    RULE: ("#d8dee4", "#30363d"),
    EMPTY: ("#eff2f5", "#212830"),
    ACCENT: ("#b5402c", "#c24a35"),
    ON_ACCENT: ("#ffffff", "#ffffff"),
    RED: ("#b5402c", "#ff7b72"),
    "tint0": ("#cfe2f5", "#1d4570"),
    "tint1": ("#d3ecc8", "#24552c"),
    "tint2": ("#fbe0bd", "#694312"),
    "tint3": ("#e3d7f4", "#493574"),
    "bank0": ("#a9cdec", "#225480"),
    "bank1": ("#fbc98d", "#7a4c14"),
    "bank2": ("#a5d99b", "#2b6427"),
    "bank3": ("#f3dc7a", "#665a10"),
    "bank4": ("#9dcfc8", "#1c615b"),
    "bank5": ("#f7b3ae", "#7b3733"),
    "bank6": ("#dcb8de", "#693b6e"),
    "bank7": ("#d9c3b0", "#5d4937"),
    "ramp0": ("#dbe7f4", "#1b2d42"),
    "ramp1": ("#c4d8ee", "#1f3d5f"),
    "ramp2": ("#abc8e6", "#234d7b"),
    "ramp3": ("#91b6dd", "#285e97"),
    "ramp4": ("#76a4d3", "#3070b1"),
    "ramp5": ("#5b92c8", "#3b82c8"),
    "ramp6": ("#4380bc", "#4894de"),
    "ramp7": ("#2f6fb0", "#58a6ff"),
    "mark0": ("#c4532d", "#f0883e"),
    "mark1": ("#2c7a4b", "#3fb950"),
    "mark2": ("#8250df", "#bc8cff"),
    "mark3": ("#7d6608", "#d4b106"),
}
SHADES = 15, 12  # of 16: how bright a darker shade is

# Advance widths of Helvetica and Arial, in thousandths of the size; 556 where none is given.
_ADVANCES = {
    **dict.fromkeys("'ijl|", 215),
    **dict.fromkeys(" !,./:;I[\\]ft·", 278),
    **dict.fromkeys("()-`r", 333),
    **dict.fromkeys('"*', 370),
    **dict.fromkeys("Jcksvxyz", 500),
    **dict.fromkeys("+<=>~×−≤", 584),
    **dict.fromkeys("&ABEKPSVXY", 667),
    **dict.fromkeys("CDHNRUw", 722),
    **dict.fromkeys("GOQΣ", 778),
    **dict.fromkeys("Mm¼½", 833),
    **dict.fromkeys("%", 889),
    **dict.fromkeys("W", 944),
    **dict.fromkeys("…→↓↑←", 1000),
}

Element = tuple[int, int]  # row, column
Point = tuple[float, float]


def text_width(text: str, size: int = NORMAL, *, bold: bool = False) -> float:
    """In pixels, nearly: readers have different fonts."""
    width = sum(_ADVANCES.get(character, 556) for character in text) * size / 1000
    return width * 1.08 if bold else width


def tick_distance(at_least: float) -> float:
    """The smallest number that is at least this, of 1, 2, 5, 10, 20, ... and 0.5, 0.2, 0.1, ..."""
    decade = 10.0 ** math.floor(math.log10(at_least))
    return next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= at_least)


def interval(first: int, count: int) -> str:
    """So many numbers from the first on."""
    return f"{first}–{first + count - 1}" if count > 1 else f"{first}"


def darker(color: str) -> str:
    """The role of a color's darker shade."""
    return color + DARKER


class Drawing:
    """An SVG under construction; coordinates are pixels from the upper left corner."""

    def __init__(self, height: int) -> None:
        self._height = height
        self._parts: list[str] = []
        self._fills: dict[str, None] = {}  # in the order of their first use
        self._strokes: dict[str, None] = {}

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = PAGE,
        thickness: int = 1,
    ) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f"<rect {place}{self._style(fill, stroke, PAGE, thickness)}/>")

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        color: str = INK,
        thickness: float = 1,
        *,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        style = self._style("", color, INK, thickness)
        style += ' stroke-dasharray="4 3"' if dashed else ""
        style += ' marker-end="url(#arrow)"' if arrow else ""
        self._parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{style}/>')

    def curve(
        self,
        points: Sequence[Point],
        color: str = INK,
        thickness: float = 1,
        *,
        arrow: bool = False,
    ) -> None:
        """Straight lines from point to point."""
        self._fills[NONE] = None
        self._strokes[color] = None
        style = f' class="none stroke-{color}" stroke-width="{thickness:g}"'
        style += ' marker-end="url(#arrow)"' if arrow else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}"{style}/>')

    def polygon(self, corners: Sequence[Point], fill: str) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self._parts.append(f'<polygon points="{path}"{self._style(fill, PAGE, PAGE, 1)}/>')

    def dot(self, x: float, y: float, radius: float, fill: str, stroke: str = PAGE) -> None:
        style = self._style(fill, stroke, PAGE, 1)
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}"{style}/>')

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
        style = "" if size == NORMAL else f' font-size="{size}"'
        style += "" if anchor == "start" else f' text-anchor="{anchor}"'
        style += ' font-weight="bold"' if bold else ""
        if color != INK:
            self._fills[color] = None
            style += f' class="{color}"'
        self._parts.append(f'<text x="{x:g}" y="{y + 0.36 * size:g}"{style}>{escape(text)}</text>')

    def notes(self, y: float, *lines: str) -> None:
        """What a reader should know, line by line, below a drawing."""
        for n, line in enumerate(lines):
            self.text(18, y + 20 * n, line, color=MUTED)

    def cell(self, x: float, y: float, width: float, height: float, fill: str, text: str) -> None:
        """A box with a centred line of text."""
        self.box(x, y, width, height, fill)
        color = ON_ACCENT if fill == ACCENT else INK
        self.text(x + width / 2, y + height / 2, text, SMALL, color, anchor="middle")

    def _style(self, fill: str, stroke: str, default: str, thickness: float) -> str:
        classes = []
        if fill:
            self._fills[fill] = None
            classes.append(fill)
        if stroke != default:
            self._strokes[stroke] = None
            classes.append(f"stroke-{stroke}")
        style = f' class="{" ".join(classes)}"' if classes else ""
        return style + (f' stroke-width="{thickness:g}"' if thickness != 1 else "")

    def svg(self, theme: int) -> str:
        size = f'width="{WIDTH}" height="{self._height}"'
        ink, page = _color(INK, theme), _color(PAGE, theme)
        view = f'viewBox="0 0 {WIDTH} {self._height}"'
        rules = (
            f"text,path{{fill:{ink}}}",
            f"rect,circle{{stroke:{page}}}",
            f"line{{stroke:{ink}}}",
            *(f".{role}{{fill:{_color(role, theme)}}}" for role in self._fills),
            *(f".stroke-{role}{{stroke:{_color(role, theme)}}}" for role in self._strokes),
        )
        lines = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} '
            f'font-family="Helvetica, Arial, sans-serif" font-size="{NORMAL}">',
            f"<style>{''.join(rules)}</style>",
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z"/></marker>',
            f'<rect {size} rx="6" fill="{page}"/>',
            *self._parts,
            "</svg>",
        )
        return "".join(f"{line}\n" for line in lines)


def _color(role: str, theme: int) -> str:
    if not role.endswith(DARKER):
        return COLORS[role][theme]
    color = COLORS[role.removesuffix(DARKER)][theme]
    shades = (int(color[i : i + 2], 16) * SHADES[theme] // 16 for i in (1, 3, 5))
    return "#" + "".join(f"{shade:02x}" for shade in shades)


def files(drawings: Mapping[str, Drawing]) -> dict[str, str]:
    """SVG text by file name: each drawing for a light and for a dark page."""
    contents = {}
    for name, drawing in drawings.items():
        contents[f"{name}.svg"] = drawing.svg(LIGHT)
        contents[f"{name}_dark.svg"] = drawing.svg(DARK)
    return contents


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
            x + 0.5,
            y + 0.5,
            self._cell_width - 0.5,
            self._cell_height - 0.5,
            darker(fill),
            NONE,
        )
        accented = fill == ACCENT
        for n, line in enumerate(lines):
            middle = y + height / 2 + 13 * (n - (len(lines) - 1) / 2)
            self._drawing.text(
                x + width / 2,
                middle,
                line,
                SMALL,
                ON_ACCENT if accented else INK,
                anchor="middle",
                bold=accented,
            )

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
        for half, (element, fill) in enumerate(zip(elements, (darker(tint), tint), strict=True)):
            drawing.cell(x + name_width + 62 * half, top, 62, 20, fill, element)
        drawing.text(x + name_width + 131, top + 10, note, color=MUTED)


def lane_color(lane: int, tint: int) -> str:
    return ACCENT if lane == LANE else TINTS[tint]
