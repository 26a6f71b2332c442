"""The plot of what the GPUs do during a call of the ring: compute, and exchange tensors."""

from __future__ import annotations

from ..operation import OPERATIONS
from ..problem import SHARDED
from ..text import label
from .diagrams.svg import (
    ACCENT,
    BANK_COLORS,
    EMPTY,
    MARKS,
    MUTED,
    NONE,
    PAGE,
    RULE,
    SMALL,
    TITLE,
    WIDTH,
    Drawing,
    files,
    text_width,
    tick_distance,
)
from .record_set import Whole

CELL = "h16_causal_32768"  # whose timelines common/bench/sharded.py records
EXCHANGE = "exchange"  # of the kinds of kernels; all others compute
COLORS = {
    "attention": BANK_COLORS[0],
    "merge": ACCENT,
    "sum": MARKS[2],
    EXCHANGE: BANK_COLORS[1],
}
TITLES = {
    "attention": "attention",
    "merge": "merges parts of o",
    "sum": "sums gradients",
    EXCHANGE: "exchanges with its neighbours",
}
LANES = ("computes", "transfers")
LEFT, RIGHT = 138, WIDTH - 24  # of the lanes, in pixels
LANE, RANK_GAP, HEADING = 18, 8, 26
OUTLINED = 4  # pixels: narrower boxes have no outline, which would hide them


def render_ring_timeline(whole: Whole) -> dict[str, str]:
    """SVG text by file name."""
    return files({"ring_timeline": _draw(whole)})


def _draw(whole: Whole) -> Drawing:
    """Forward above backward, on one axis; of each rank a lane that computes, and one that moves
    tensors.
    """
    record = whole.record
    timelines = {each.name: record["timelines"][each.name] for each in OPERATIONS.values()}
    last = max(
        kernel["end_us"] for ranks in timelines.values() for rank in ranks for kernel in rank
    )
    scale = (RIGHT - LEFT) / last
    top = 76
    of_rank = len(LANES) * LANE + RANK_GAP
    panels = [HEADING + of_rank * len(ranks) for ranks in timelines.values()]
    bottom = top + sum(panels)
    drawing = Drawing(bottom + 70)
    shape = SHARDED[CELL].shape
    name = label("attention() by the ring", stale=whole.stale)
    title = (
        f"{record['gpus']} × {record['device']}: {name}, {shape.heads} heads, N = {shape.seq_q}, "
        f"D = {shape.head_dim}, {record['dtype']}, causal"
    )
    drawing.text(18, 22, title, TITLE, bold=True)
    _legend(drawing, 48)
    distance = tick_distance(last / 10)
    for tick in range(int(last / distance) + 1):
        x = round(LEFT + tick * distance * scale, 1)
        drawing.line(x, top, x, bottom, RULE)
        text = f"{tick * distance:g}"
        drawing.text(x, bottom + 12, text, SMALL, MUTED, anchor="middle")
    drawing.text(18, bottom + 12, "microseconds", SMALL, MUTED)
    for (operation, ranks), height in zip(timelines.items(), panels, strict=True):
        drawing.text(18, top + HEADING / 2, operation, bold=True)
        y = top + HEADING
        for rank, kernels in enumerate(ranks):
            _draw_rank(drawing, y, rank, kernels, scale)
            y += of_rank
        top += height
    note = "The GPUs' kernels in one call, by torch.profiler, from the first one of any GPU on."
    drawing.text(18, bottom + 44, note, SMALL, MUTED)
    return drawing


def _draw_rank(drawing: Drawing, y: float, rank: int, kernels: list[dict], scale: float) -> None:
    drawing.text(18, y + LANE, f"GPU {rank}")
    for n, lane in enumerate(LANES):
        top = y + n * LANE
        drawing.text(LEFT - 8, top + LANE / 2, lane, SMALL, MUTED, anchor="end")
        drawing.box(LEFT, top + LANE / 2 - 1, RIGHT - LEFT, 2, EMPTY, NONE)
    for kernel in kernels:
        top = y + LANES.index("transfers" if kernel["what"] == EXCHANGE else "computes") * LANE
        left = round(LEFT + scale * kernel["start_us"], 1)
        width = max(1.0, round(scale * (kernel["end_us"] - kernel["start_us"]), 1))
        outline = PAGE if width >= OUTLINED else NONE
        drawing.box(left, top + 1, width, LANE - 2, _color(kernel["what"]), outline)


def _color(what: str) -> str:
    return COLORS.get(what, COLORS["sum"])


def _legend(drawing: Drawing, y: float) -> None:
    x: float = 18
    for what, title in TITLES.items():
        drawing.box(x, y - 7, 22, 14, COLORS[what])
        drawing.text(x + 28, y, title, SMALL)
        x += 28 + text_width(title, SMALL) + 26
