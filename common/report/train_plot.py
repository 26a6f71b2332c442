"""The plot of two trainings: their losses, and how far apart those are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from ..record_schema import TRAININGS
from ..text import label
from .diagrams.svg import (
    INK,
    MARKS,
    MUTED,
    RAMP,
    RULE,
    SMALL,
    TITLE,
    WIDTH,
    Drawing,
    text_width,
    tick_distance,
)
from .record_set import Whole

LEFT, RIGHT = 62, WIDTH - 92  # of both panels, in pixels
LOSSES = (96, 340)  # top and bottom
APART = (386, 466)
HELD_OUT = RIGHT + 40  # the column of its dots
POINTS = 400  # of a curve, at most
TICKS = (1, 1.5, 2, 3, 4, 5, 7)  # of a decade
# What is drawn first is wider: where the curves agree it is seen on both sides of the other.
CURVES = {"sdpa": (MARKS[0], 4.0), "ours": (RAMP[-1], 1.5)}


def draw_training(training: Whole) -> Drawing:
    """Losses on a logarithmic axis and, at its end, those of held-out text; below the difference.

    A point of a curve is the mean of some steps, as few as POINTS allows.
    """
    record = training.record
    drawing = Drawing(APART[1] + 48)
    _heading(drawing, training)
    every = -(-record["config"]["steps"] // POINTS)
    curves = {name: _means(record["losses"][name], every) for name in TRAININGS}
    held_out = {name: record[name]["held_out_loss"] for name in TRAININGS}
    ours, sdpa = (curves[name] for name in TRAININGS)
    apart = [100 * (a / b - 1) for a, b in zip(ours, sdpa, strict=True)]
    _steps(drawing, record["config"], every)
    _losses(drawing, curves, held_out)
    _apart(drawing, apart)
    return drawing


def _means(losses: Sequence[float], every: int) -> list[float]:
    return [fmean(losses[first : first + every]) for first in range(0, len(losses), every)]


def _heading(drawing: Drawing, training: Whole) -> None:
    """The title, then a line of a legend for each training, with its numbers."""
    record, config = training.record, training.record["config"]
    title = (
        f"{record['device']}: a byte-level GPT of {config['parameters'] / 1e6:.1f} M parameters, "
        f"{config['layers']} layers, context {config['context']}"
    )
    drawing.text(18, 22, title, TITLE, bold=True)
    for row, name in enumerate(TRAININGS):
        y, numbers = 46 + 18 * row, record[name]
        color, width = CURVES[name]
        drawing.line(18, y, 40, y, color, width)
        text = label(name, stale=training.stale and name == "ours")
        drawing.text(48, y, text, SMALL, bold=True)
        told = (
            f"{numbers['route']}: loss {numbers['loss']:.4f} in the last {config['window']} steps, "
            f"{numbers['held_out_loss']:.4f} held out, {numbers['ms_per_step']:.1f} ms a step"
        )
        drawing.text(48 + text_width(text, SMALL, bold=True) + 8, y, told, SMALL)


def _x_of(place: float, places: int) -> float:
    """From LEFT for 0 to RIGHT for as many as there are."""
    return round(LEFT + (RIGHT - LEFT) * place / places, 1)


def _curve(drawing: Drawing, ys: Sequence[float], color: str, width: float) -> None:
    points = [(_x_of(n + 0.5, len(ys)), y) for n, y in enumerate(ys)]
    drawing.curve(points, color, width)


def _losses(drawing: Drawing, curves: dict[str, list[float]], held_out: dict[str, float]) -> None:
    top, bottom = LOSSES
    everything = [*held_out.values(), *(loss for curve in curves.values() for loss in curve)]
    low, high = 0.95 * min(everything), 1.05 * max(everything)

    def y_of(loss: float) -> float:
        return round(bottom - (bottom - top) * math.log(loss / low) / math.log(high / low), 1)

    drawing.text(18, top - 10, "nats a byte, logarithmic", SMALL, MUTED)
    drawing.text(HELD_OUT, top - 10, "held out", SMALL, MUTED, anchor="middle")
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    for tick in (digit * 10.0**decade for decade in decades for digit in TICKS):
        if low <= tick <= high:
            drawing.line(LEFT, y_of(tick), HELD_OUT + 20, y_of(tick), RULE)
            drawing.text(LEFT - 8, y_of(tick), f"{tick:g}", SMALL, MUTED, anchor="end")
    for name, (color, width) in CURVES.items():
        _curve(drawing, [y_of(loss) for loss in curves[name]], color, width)
        drawing.dot(HELD_OUT, y_of(held_out[name]), 3 + width, color)


def _apart(drawing: Drawing, percents: list[float]) -> None:
    """Ours over torch's, on an axis that is as long on both sides of zero."""
    top, bottom = APART
    limit = tick_distance(max(map(abs, percents)) or 1.0)

    def y_of(percent: float) -> float:
        return round((top + bottom) / 2 - (bottom - top) / 2 * percent / limit, 1)

    drawing.text(18, top - 16, "ours over sdpa, %", SMALL, MUTED)
    for tick in (-limit, 0, limit):
        drawing.line(LEFT, y_of(tick), RIGHT, y_of(tick), RULE)
        text = f"{tick:+g}" if tick else "0"
        drawing.text(LEFT - 8, y_of(tick), text, SMALL, MUTED, anchor="end")
    _curve(drawing, [y_of(percent) for percent in percents], INK, 1)


def _steps(drawing: Drawing, config: dict, every: int) -> None:
    """The axis that both panels share."""
    steps = config["steps"]
    distance = int(tick_distance(max(1, steps / 8)))
    for step in range(0, steps + 1, distance):
        x = _x_of(step, steps)
        for top, bottom in (LOSSES, APART):
            drawing.line(x, top, x, bottom, RULE)
        drawing.text(x, APART[1] + 12, f"{step}", SMALL, MUTED, anchor="middle")
    note = f"steps of {config['batch']} × {config['context']} bytes"
    note += f"; a point is the mean of {every}" if every > 1 else ""
    drawing.text(RIGHT, APART[1] + 30, note, SMALL, MUTED, anchor="end")
