"""The plots of a record set as SVG: the same records give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product

from ..operation import FORWARD, OPERATIONS, Operation
from ..problem import NORMAL
from ..record_schema import NUMBER
from ..text import label
from .derived import LIMITS, first_that_run, limits, peer_ratios
from .diagrams.svg import (
    ACCENT,
    EMPTY,
    INK,
    MARKS,
    MUTED,
    PAGE,
    RAMP,
    RED,
    RULE,
    SMALL,
    TITLE,
    WIDTH,
    Drawing,
    files,
    text_width,
)
from .pictures_plot import draw_pictures
from .record_set import Cells, Ladder, RecordSet
from .rows import latest_steps
from .train_plot import draw_training

LEFT, RIGHT = 18, WIDTH - 18  # of a plot, in pixels
ROW = 26
STRONGEST = RAMP[-1]
MASKS = ("no mask", "causal mask")
GRID_ROW, GRID_GAP, PANEL = 20, 8, 250
PANEL_LEFTS = (196, 514)


def render_plots(record_set: RecordSet) -> dict[str, str]:
    """SVG text by file name; none without a record."""
    drawings = {}
    for operation in OPERATIONS.values():
        ladder = record_set.of(operation)
        if ladder.measured.records:
            drawings[operation.named("steps")] = _steps(ladder)
        if drawing := _limits(ladder):
            drawings[operation.named("limits")] = drawing
        if ladder.grid:
            drawings[operation.named("grid")] = _grid(ladder)
    if record_set.distributions and latest_steps(record_set, record_set.distributions.record):
        drawings["distributions"] = _distributions(record_set, record_set.distributions)
    if record_set.pictures:
        drawings["pictures"] = draw_pictures(record_set.pictures)
    if record_set.training:
        drawings["train"] = draw_training(record_set.training)
    return files(drawings)


def _steps(ladder: Ladder) -> Drawing:
    """TFLOP/s as dots on a logarithmic axis, one for each step; the peers as lines."""
    records = ladder.measured.records
    newest = ladder.newest
    assert newest is not None
    rates = {name: peer["tflops"] for name, peer in newest["peers"].items() if "tflops" in peer}
    colors = _peer_colors(newest["peers"])
    # The highest first: its label ends at its line and crosses none of the others, which begin
    # below.
    peers = sorted(rates, key=rates.__getitem__, reverse=True)

    everything = [*rates.values(), *(record["tflops"] for record in records.values())]
    left, top = 196, 52 + 17 * len(peers)
    bottom = top + ROW * len(records)
    low = 10 ** math.floor(math.log10(min(everything)))
    scale = (RIGHT - 40 - left) / math.log10(max(everything) / low)

    def x_of(rate: float) -> float:
        return round(left + scale * math.log10(rate / low), 1)

    drawing = Drawing(bottom + 44)
    title = f"{_device(newest, ladder.operation)}: {_work(newest)}"
    drawing.text(LEFT, 22, title, TITLE, bold=True)
    decades = range(round(math.log10(low)), math.ceil(math.log10(max(everything))) + 1)
    for rate in (digit * 10.0**decade for decade in decades for digit in (1, 2, 5)):
        if x_of(rate) > RIGHT:
            break
        drawing.line(x_of(rate), top, x_of(rate), bottom, RULE)
        drawing.text(x_of(rate), bottom + 12, f"{rate:g}", SMALL, MUTED, anchor="middle")
    note = "TFLOP/s, logarithmic: medians of rounds in which each step and each peer ran once"
    drawing.text(RIGHT, bottom + 30, note, SMALL, MUTED, anchor="end")
    for level, name in enumerate(peers):
        x, y = x_of(rates[name]), 52 + 17 * level
        drawing.line(x, y - 7, x, bottom, colors[name], 1.5)
        text = f"{name}  {rates[name]:.3g}"
        drawing.text(x - 6, y, text, SMALL, colors[name], anchor="end", bold=True)
    for row, (name, record) in enumerate(records.items()):
        y = top + ROW * (row + 0.5)
        x = x_of(record["tflops"])
        idea = record["source"].rpartition("/")[2].removesuffix(".cu").partition("_")[2]
        _name(drawing, y, ladder.measured.label(name), idea.replace("_", " "))
        _label(drawing, x - 10, y, f"{record['tflops']:.3g}")
        drawing.dot(x, y, 6, STRONGEST)
    return drawing


def _name(drawing: Drawing, y: float, name: str, what: str = "") -> None:
    drawing.text(LEFT, y, name, bold=True)
    drawing.text(LEFT + text_width(name, bold=True) + 8, y, what, color=MUTED)


def _label(drawing: Drawing, x: float, y: float, text: str) -> None:
    """Bold text that ends at x, before what is behind."""
    width = text_width(text, bold=True)
    drawing.box(x - width - 2, y - 8, width + 4, 16, PAGE)
    drawing.text(x, y, text, anchor="end", bold=True)


def _peer_colors(names: Iterable[str]) -> dict[str, str]:
    """From the last peer on, so that the fastest have the same colors in every plot."""
    return {name: MARKS[n % len(MARKS)] for n, name in enumerate(reversed([*names]))}


def _limits(ladder: Ladder) -> Drawing | None:
    """A row for each step: how close it comes to each limit, the closest one marked.

    Of a step with several kernels the one that takes longest stands for it. None where nothing was
    counted.
    """
    measured = ladder.measured
    counted = {
        name: found for name, record in measured.records.items() if (found := limits(record))
    }
    if not counted:
        return None
    left, top = 216, 66
    column = (RIGHT - left) / len(LIMITS)
    track = column - 46
    drawing = Drawing(top + ROW * len(measured.records) + 46)
    title = (
        f"{_device(ladder.newest, ladder.operation)}: what each step is limited by, % of the peak"
    )
    drawing.text(LEFT, 22, title, TITLE, bold=True)
    for n, limit in enumerate(LIMITS):
        drawing.text(left + n * column, top - 14, limit, bold=True)
    for row, name in enumerate(measured.records):
        y = top + ROW * (row + 0.5)
        if name not in counted:
            _name(drawing, y, measured.label(name))
            drawing.text(left, y, "not collected", color=MUTED)
            continue
        kernel, shares = counted[name]
        several = len(measured.records[name]["counters"]) > 1
        _name(drawing, y, measured.label(name), kernel * several)
        for n, share in enumerate(shares.values()):
            x = left + n * column
            closest = share == max(shares.values())
            drawing.box(x, y - 8, track, 16, EMPTY)
            drawing.box(x, y - 8, round(track * share / 100, 1), 16, ACCENT if closest else RAMP[3])
            text = f"{share:.0f}"
            drawing.text(x + track + 5, y, text, color=INK if closest else MUTED, bold=closest)
    y = top + ROW * len(measured.records) + 16
    for n, note in enumerate(
        (
            "Red: the highest of the row. Of a step's several kernels, the one that takes longest.",
            "L1 data: of all cycles; the others: of those in which the SM is active.",
        )
    ):
        drawing.text(LEFT, y + 17 * n, note, SMALL, MUTED)
    return drawing


def _grid(ladder: Ladder) -> Drawing:
    """A row for each shape, a panel for each mask: steps as dots, peers as ticks."""
    grid = ladder.grid
    assert grid is not None
    record = grid.record
    steps = list(record["sources"])
    cells = sorted(record["cells"], key=lambda cell: cell["head_dim"])
    peers = [name for name in cells[0]["tflops"] if name not in steps]
    step_colors = {name: RAMP[max(0, n)] for n, name in enumerate(steps, len(RAMP) - len(steps))}
    peer_colors = _peer_colors(peers)
    taken = ladder.taken()
    first = first_that_run(record, taken)
    ratios = peer_ratios(record, *taken)
    highest = max(_rates(cells))
    ceiling = record["ceiling"]["tflops"]

    shapes = _row_tops(cells)
    bottom = max(shapes.values()) + GRID_ROW + 4
    scale = PANEL / max(highest, ceiling)
    drawing = Drawing(bottom + 34)
    title = (
        f"{_device(record, ladder.operation)}, {record['dtype']}: TFLOP/s, "
        "medians of interleaved rounds"
    )
    drawing.text(LEFT, 22, title, TITLE, bold=True)
    _grid_legend(drawing, 46, grid, step_colors, peer_colors)
    text = "batch × heads × N"
    drawing.text(PANEL_LEFTS[0] - 12, 86, text, SMALL, MUTED, anchor="end")
    for mask, left in enumerate(PANEL_LEFTS):
        drawing.text(left, 86, MASKS[mask], bold=True)
        drawing.text(
            left + PANEL + 50, 86, f"{', '.join(first)} / fastest", SMALL, MUTED, anchor="end"
        )
        for rate in range(0, int(max(highest, ceiling)) + 1, 200):
            x = round(left + scale * rate, 1)
            drawing.line(x, 100, x, bottom, RULE)
            drawing.text(x, bottom + 12, f"{rate}", SMALL, MUTED, anchor="middle")
        x = round(left + scale * ceiling, 1)
        drawing.line(x, 100, x, bottom, dashed=True)
    head_dim = None
    for shape, top in shapes.items():
        y = top + GRID_ROW / 2
        if shape[0] != head_dim:
            head_dim = shape[0]
            drawing.text(LEFT, y, f"D {head_dim}", bold=True)
        drawing.text(PANEL_LEFTS[0] - 12, y, _batch_heads_seq(*shape[1:]), SMALL, anchor="end")
    for cell in cells:
        y, left = shapes[_shape(cell)] + GRID_ROW / 2, PANEL_LEFTS[bool(cell["causal"])]
        rates = {name: rate for name, rate in cell["tflops"].items() if isinstance(rate, NUMBER)}
        x_of = {name: round(left + scale * rate, 1) for name, rate in rates.items()}
        for name in peers:
            if name in x_of:
                drawing.line(x_of[name], y - 8, x_of[name], y + 8, peer_colors[name], 2.5)
        for name in steps:
            if name in x_of:
                radius = 5.5 if name in first else 4
                drawing.dot(x_of[name], y, radius, step_colors[name])
        if ratio := ratios.get(cell["name"]):
            below = ratio < 1
            text = f"{ratio:.2f} ×"
            color = RED if below else INK
            drawing.text(left + PANEL + 50, y, text, SMALL, color, anchor="end", bold=below)
    return drawing


def _row_tops(cells: Iterable[dict]) -> dict[tuple, int]:
    """Where the row of each shape is, with a gap between head dimensions."""
    tops: dict[tuple, int] = {}
    top, head_dim = 100, None
    for cell in cells:
        shape = _shape(cell)
        if shape not in tops:
            top += GRID_GAP * (head_dim != cell["head_dim"])
            head_dim = cell["head_dim"]
            tops[shape] = top
            top += GRID_ROW
    return tops


def _grid_legend(
    drawing: Drawing,
    y: float,
    grid: Cells,
    step_colors: dict[str, str],
    peer_colors: dict[str, str],
) -> None:
    x: float = LEFT + 4
    for name in grid.record["sources"]:
        drawing.dot(x, y, 5, step_colors[name])
        text = label(name, stale=name in grid.stale)
        drawing.text(x + 9, y, text, SMALL)
        x += text_width(text, SMALL) + 26
    x, y = LEFT + 4, y + 20
    for name, color in peer_colors.items():
        drawing.line(x, y - 7, x, y + 7, color, 2.5)
        drawing.text(x + 7, y, name, SMALL, color)
        x += text_width(name, SMALL) + 26
    drawing.line(x, y - 7, x, y + 7, dashed=True)
    text = f"measured ceiling: product of {grid.record['ceiling']['matmul']}"
    drawing.text(x + 7, y, text, SMALL)


def _batch_heads_seq(batch: int, heads: int, kv_heads: int, seq: int, seq_k: int) -> str:
    shared = heads if heads == kv_heads else f"{heads}/{kv_heads}"
    return f"{batch} × {shared} × {seq if seq == seq_k else f'{seq} on {seq_k}'}"


def _distributions(record_set: RecordSet, measured: Cells) -> Drawing:
    """The last two steps over the fastest peer, in a panel for each dtype and head dimension.

    A row for each kind of inputs: with a line through those that differ in the logits' deviation.
    """
    record = measured.record
    cells = record["cells"]
    dtypes, head_dims, inputs = (
        list(dict.fromkeys(cell[key] for cell in cells)) for key in ("dtype", "head_dim", "inputs")
    )
    lengths = {cell["inputs"]: cell["seq"] for cell in cells}
    steps = dict(zip(latest_steps(record_set, record), (STRONGEST, MARKS[0]), strict=False))
    ratios = {name: peer_ratios(record, name) for name in steps}
    highest = max((ratio for found in ratios.values() for ratio in found.values()), default=1.0)
    left, gap = 158, 26
    width = (RIGHT - left + gap) / len(head_dims) - gap
    scale = width / (math.ceil(highest * 4) / 4)
    block = GRID_ROW * len(inputs) + 66

    drawing = Drawing(62 + block * len(dtypes))
    title = f"{record['device']}, N = {cells[0]['seq']}: rate over the fastest peer's"
    drawing.text(LEFT, 22, title, TITLE, bold=True)
    x: float = LEFT + 4
    for name, color in steps.items():
        for causal in (False, True):
            drawing.dot(x, 46, 4.5, PAGE if causal else color, color)
            text = f"{label(name, stale=name in measured.stale)}, {MASKS[causal]}"
            drawing.text(x + 9, 46, text, SMALL)
            x += text_width(text, SMALL) + 30
    for n, dtype in enumerate(dtypes):
        top = 96 + block * n
        bottom = top + GRID_ROW * len(inputs)
        tops = {name: top + GRID_ROW * (row + 0.5) for row, name in enumerate(inputs)}
        drawing.text(LEFT, top - 14, dtype, bold=True)
        for name, y in tops.items():
            text = f"logits of std {NORMAL[name]}" if name in NORMAL else name.replace("_", " ")
            text += f", N = {lengths[name]}" * (lengths[name] != cells[0]["seq"])
            drawing.text(left - 12, y, text, SMALL, anchor="end")
        for column, head_dim in enumerate(head_dims):
            at = left + column * (width + gap)
            drawing.text(at, top - 14, f"D {head_dim}", bold=True)
            for tick in range(int(width / scale * 2) + 1):
                x = round(at + scale * tick / 2, 1)
                color = INK if tick == 2 else RULE
                drawing.line(x, top, x, bottom, color, dashed=tick == 2)
                drawing.text(x, bottom + 12, f"{tick / 2:g}", SMALL, MUTED, anchor="middle")
            shown = [
                cell for cell in cells if (cell["dtype"], cell["head_dim"]) == (dtype, head_dim)
            ]
            for (name, color), causal in product(reversed(steps.items()), (True, False)):
                points = {
                    cell["inputs"]: (round(at + scale * ratio, 1), tops[cell["inputs"]])
                    for cell in shown
                    if cell["causal"] == causal and (ratio := ratios[name].get(cell["name"]))
                }
                drawing.curve([points[key] for key in NORMAL if key in points], color, 1.5)
                for point in points.values():
                    drawing.dot(*point, 4, PAGE if causal else color, color)
    return drawing


def _shape(cell: dict) -> tuple:
    keys = ("head_dim", "batch", "heads", "kv_heads", "seq")
    return *(cell[key] for key in keys), cell.get("seq_k", cell["seq"])


def _rates(cells: Iterable[dict]) -> list[float]:
    rates = [rate for cell in cells for rate in cell["tflops"].values()]
    return [rate for rate in rates if isinstance(rate, NUMBER)]


def _device(record: dict, operation: Operation) -> str:
    """The device, and what else than forward it computed."""
    device = record["device"]
    return device if operation == FORWARD else f"{device}, {operation.name}"


def _work(record: dict) -> str:
    shape = record["shape"]
    return (
        f"batch {shape['batch']}, heads {shape['heads']}, N = {shape['seq_q']}, "
        f"D = {shape['head_dim']}, {shape['dtype']}"
    )
