"""The diagrams of the softmax of a row, tile by tile: by running maxima, and by the first one.

The numbers are worked out here, exactly. Logits are in units of log2, so P is a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .svg import ACCENT, EMPTY, MUTED, TINTS, TITLE, WIDTH, Drawing, text_width

LOGITS = ((1, 3, 2), (5, 4, 3), (9, 8, 7))  # a row of S, in tiles of three keys
VALUES = ((4, 2, 6), (1, 8, 4), (3, 6, 4))  # of V, one column
BOUND = 16  # of the sum of a tile's P, in the diagram
LEFT, RIGHT = 124, WIDTH - 18
ROW, LINE = 26, 36  # a cell's height, and the way to the next one
S_COLOR, P_COLOR, V_COLOR, STATE_COLOR = TINTS


@dataclass(frozen=True)
class State:
    """Of a row, after some tiles: P = 2^(S - m), l = sum of P, O = P V, not divided by l."""

    m: int
    l: Fraction  # noqa: E741 -- its name in the text
    o: Fraction

    def scaled(self, exponent: int) -> State:
        """The same row by a shift that is larger by the exponent: exact in floating point."""
        factor = Fraction(2) ** -exponent
        return State(self.m + exponent, self.l * factor, self.o * factor)


@dataclass(frozen=True)
class Step:
    """What a tile does to a row."""

    before: State | None
    p: tuple[Fraction, ...]
    after: State
    high: tuple[Fraction, ...] = ()  # P by the shift before, where that has been raised

    @property
    def raised(self) -> int:
        """By how much the tile has raised the shift."""
        return self.after.m - self.before.m if self.before else 0


def online(logits: Sequence[Sequence[int]], values: Sequence[Sequence[int]]) -> list[Step]:
    """Online softmax: m is the maximum so far."""
    steps: list[Step] = []
    for s, v in zip(logits, values, strict=True):
        before = steps[-1].after if steps else None
        m = max(before.m, *s) if before else max(s)
        carried = before.scaled(m - before.m) if before else State(m, Fraction(0), Fraction(0))
        p = _exponentials(s, m)
        steps.append(Step(before, p, State(m, carried.l + sum(p), carried.o + _dot(p, v))))
    return steps


def shifted(
    logits: Sequence[Sequence[int]], values: Sequence[Sequence[int]], bound: int
) -> list[Step]:
    """m is the first tile's maximum, until the sum of a tile's P exceeds the bound."""
    steps: list[Step] = []
    for s, v in zip(logits, values, strict=True):
        before = steps[-1].after if steps else None
        now = before or State(max(s), Fraction(0), Fraction(0))
        p, high = _exponentials(s, now.m), ()
        if sum(p) > bound:
            now, high = now.scaled(max(s) - now.m), p
            p = _exponentials(s, now.m)
        steps.append(Step(before, p, State(now.m, now.l + sum(p), now.o + _dot(p, v)), high))
    return steps


def _exponentials(s: Sequence[int], m: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(2) ** (one - m) for one in s)


def _dot(p: Sequence[Fraction], v: Sequence[int]) -> Fraction:
    return sum((one * other for one, other in zip(p, v, strict=True)), Fraction(0))


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {"online_softmax": _online_softmax(), "first_maximum": _first_maximum()}


def _number(x: Fraction | int) -> str:
    glyphs = {Fraction(1, 4): "¼", Fraction(1, 2): "½"}
    return glyphs.get(Fraction(x), f"{float(x):.5g}")


def _sum(terms: Sequence[object]) -> str:
    return " + ".join(terms if isinstance(terms[0], str) else map(_number, terms))


def _products(p: Sequence[Fraction], v: Sequence[int]) -> str:
    return _sum([f"{_number(one)} · {other}" for one, other in zip(p, v, strict=True)])


class _Rows:
    """Lines with a name at the left, and in each line a strip of cells for every tile."""

    def __init__(self, drawing: Drawing, strips: int, gap: float) -> None:
        self._drawing = drawing
        self.width = (RIGHT - LEFT - gap * (strips - 1)) / strips
        self.lefts = [LEFT + n * (self.width + gap) for n in range(strips)]

    def name(self, y: float, text: str) -> None:
        self._drawing.text(18, y + ROW / 2, text, bold=True)

    def cells(self, y: float, strip: int, color: str, texts: Sequence[str]) -> None:
        """Side by side, equally wide."""
        width = self.width / len(texts)
        for n, text in enumerate(texts):
            self._drawing.cell(self.lefts[strip] + n * width, y, width, ROW, color, text)


def _online_softmax() -> Drawing:
    """Six numbers in two tiles of three: what is found in the first is rescaled in the second."""
    steps = online(LOGITS[:2], VALUES[:2])
    drawing = Drawing(318)
    rows = _Rows(drawing, len(steps), 136)
    title = "Online softmax: a row of S with six keys, in two tiles of three"
    drawing.text(18, 22, title, TITLE, bold=True)
    top = 64
    names = ("S", "m = max S", "P = 2^(S − m)", "l = Σ P", "V", "O = P V")
    tops = {name: top + LINE * n for n, name in enumerate(names)}
    for name, y in tops.items():
        rows.name(y, name)
    for n, (s, v, step) in enumerate(zip(LOGITS, VALUES, steps, strict=False)):
        middle = rows.lefts[n] + rows.width / 2
        drawing.text(middle, top - 14, f"tile {n}", color=MUTED, anchor="middle")
        rows.cells(tops["S"], n, S_COLOR, [_number(one) for one in s])
        rows.cells(tops["P = 2^(S − m)"], n, P_COLOR, [_number(one) for one in step.p])
        rows.cells(tops["V"], n, V_COLOR, [_number(one) for one in v])
        m = f"max({', '.join(map(_number, [*([step.before.m] if step.before else []), *s]))})"
        total, product = _sum(step.p), _products(step.p, v)
        if step.before:
            alpha = Fraction(2) ** (step.before.m - step.after.m)
            total = f"{_number(alpha)} · {_number(step.before.l)} + {total}"
            product = f"{_number(alpha)} · {_number(step.before.o)} + {product}"
        for name, formula, value in (
            ("m = max S", m, step.after.m),
            ("l = Σ P", total, step.after.l),
            ("O = P V", product, step.after.o),
        ):
            rows.cells(tops[name], n, STATE_COLOR, [f"{formula} = {_number(value)}"])
    first, last = steps
    left, right = rows.lefts[0] + rows.width + 4, rows.lefts[1] - 4
    alpha = Fraction(2) ** (first.after.m - last.after.m)
    how = f"α = 2^({first.after.m} − {last.after.m}) = {_number(alpha)}"
    for name, text in (("m = max S", how), ("l = Σ P", "× α"), ("O = P V", "× α")):
        y = tops[name] + ROW / 2
        drawing.line(left, y, right, y, arrow=True)
        drawing.text((left + right) / 2, y - 11, text, anchor="middle")
    y = tops["O = P V"] + 52
    end = _result(drawing, y, last.after)
    text = (
        f"as if m had been {last.after.m} from the beginning; "
        f"lse = {last.after.m} + log2 {_number(last.after.l)}, in units of log2 like S"
    )
    drawing.text(end + 12, y, text, color=MUTED)
    return drawing


def _first_maximum() -> Drawing:
    """Nine numbers in three tiles, by the first one's maximum; the third exceeds the bound."""
    steps = shifted(LOGITS, VALUES, BOUND)
    drawing = Drawing(506)
    rows = _Rows(drawing, len(steps), 14)
    title = "No running maximum: that of the first tile shifts the whole row"
    drawing.text(18, 22, title, TITLE, bold=True)
    names = ("S", "m", "P = 2^(S − m)", "Σ P", "repair", "P · 2^−e", "l, O · 2^−e", "m + e")
    tops = {name: 64 + LINE * n for n, name in enumerate((*names, "l", "V", "O = P V"))}
    for name, y in tops.items():
        rows.name(y, name)
    for n, (s, v, step) in enumerate(zip(LOGITS, VALUES, steps, strict=True)):
        middle = rows.lefts[n] + rows.width / 2
        drawing.text(middle, 50, f"tile {n}", color=MUTED, anchor="middle")
        rows.cells(tops["S"], n, S_COLOR, [_number(one) for one in s])
        rows.cells(tops["V"], n, V_COLOR, [_number(one) for one in v])
        m = f"max({', '.join(map(_number, s))}) = {step.after.m}"
        rows.cells(tops["m"], n, STATE_COLOR, [_number(step.before.m) if step.before else m])
        p = step.high or step.p
        color = ACCENT if step.high else P_COLOR
        rows.cells(tops["P = 2^(S − m)"], n, color, [_number(one) for one in p])
        compared = f" > {BOUND}" if step.high else ""
        rows.cells(tops["Σ P"], n, color, [f"{_sum(p)} = {_number(sum(p))}{compared}"])
        carried = step.before
        if step.before and step.high:
            e = step.raised
            carried = step.before.scaled(e)
            text = f"e = {e}, as the largest P is 2^{e}"
            rows.cells(tops["repair"], n, EMPTY, [text])
            rows.cells(tops["P · 2^−e"], n, P_COLOR, [_number(one) for one in step.p])
            both = [f"l = {_number(carried.l)}", f"O = {_number(carried.o)}"]
            rows.cells(tops["l, O · 2^−e"], n, STATE_COLOR, both)
            text = f"{step.before.m} + {e} = {carried.m}"
            rows.cells(tops["m + e"], n, STATE_COLOR, [text])
        else:
            height = tops["m + e"] + ROW - tops["repair"]
            text = f"Σ P ≤ {BOUND}: nothing to do"
            drawing.cell(rows.lefts[n], tops["repair"], rows.width, height, EMPTY, text)
        total, product = _number(sum(step.p)), _products(step.p, v)
        if carried:
            total = f"{_number(carried.l)} + {total} = {_number(step.after.l)}"
            product = f"{_number(carried.o)} + {product}"
        rows.cells(tops["l"], n, STATE_COLOR, [total])
        rows.cells(tops["O = P V"], n, STATE_COLOR, [f"{product} = {_number(step.after.o)}"])
    y = tops["O = P V"] + 52
    end = _result(drawing, y, steps[-1].after)
    text = "Powers of two change exponents only: nothing is rounded, and no S is needed again."
    drawing.text(end + 12, y, text, color=MUTED)
    return drawing


def _result(drawing: Drawing, y: float, row: State) -> float:
    """Returns where its text ends."""
    text = f"O / l = {_number(row.o)} / {_number(row.l)} = {float(row.o / row.l):.3f}"
    drawing.text(18, y, text, bold=True)
    return 18 + text_width(text, bold=True)
