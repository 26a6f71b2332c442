"""What stands where in a generated SVG."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from xml.etree import ElementTree

from common.report.diagrams.svg import NORMAL, text_width

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    width: float
    height: float
    roles: tuple[str, ...]  # its colors
    text: str = ""

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def surrounds(self, x: float, y: float) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom


def boxes(svg: str) -> list[Box]:
    """All but the background."""
    return [
        Box(*(float(rect.get(key)) for key in ("x", "y", "width", "height")), _roles(rect))
        for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if rect.get("x")
    ]


def texts(svg: str) -> list[Box]:
    """From the top of the capitals to the base line, as wide as in Helvetica."""
    found = []
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        size = int(text.get("font-size", NORMAL))
        width = text_width(text.text or "", size, bold=text.get("font-weight") == "bold")
        before = {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
        x, y, height = float(text.get("x")), float(text.get("y")), 0.72 * size
        found.append(Box(x - before, y - height, width, height, _roles(text), text.text or ""))
    return found


def dots(svg: str) -> list[tuple[float, float, str]]:
    """Center and color of each."""
    return [
        (float(dot.get("cx")), float(dot.get("cy")), _roles(dot)[0])
        for dot in ElementTree.fromstring(svg).iter(f"{SVG}circle")
    ]


def clashes(svg: str) -> list[tuple[str, str]]:
    """Texts that overlap."""
    rows: dict[int, list[Box]] = {}
    for text in texts(svg):
        for row in {int(text.top) // 16, int(text.bottom) // 16}:
            rows.setdefault(row, []).append(text)
    return [
        (one.text, other.text)
        for row in rows.values()
        for one, other in combinations(row, 2)
        if one.overlaps(other)
    ]


def _roles(element: ElementTree.Element) -> tuple[str, ...]:
    return tuple((element.get("class") or "").split())
