"""The plots of a record set as SVG: the same records and matplotlib give the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from dataclasses import dataclass
from itertools import cycle

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..problem import GRID_OVER_LENGTHS, NORMAL
from ..record_schema import NUMBER
from ..text import label
from .derived import derived, peer_ratios
from .diagrams.svg import INK
from .record_set import Cells, RecordSet
from .rows import latest_steps

RULE = "#d8dee4"  # of the grid behind the data
STEP_COLOR, PEER_COLOR = "#2f6fb0", "#b6bec8"
TENSOR_COLOR, FP32_COLOR, EXP_COLOR = "#8250df", "#c4532d", "#2c7a4b"
LINE_HEIGHT = 1.35  # of a label: a factor, as the roofline's y axis is logarithmic
PEER_LINES = ((FP32_COLOR, "s"), (EXP_COLOR, "^"), (TENSOR_COLOR, "D"))  # colour and marker
LABEL_SHARE = 0.06  # of the grid's y axis, the height of a label

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "attention-worklog",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Ceilings:
    """A device's peaks by its datasheet: dense, without sparsity."""

    dram_tb_per_s: float
    fp32_tflops: float
    bf16_tensor_tflops: float


# Datasheets of the SXM modules; their 1979 BF16 TFLOP/s count sparsity.
CEILINGS = {
    "h100": Ceilings(dram_tb_per_s=3.35, fp32_tflops=67, bf16_tensor_tflops=989.5),
    "h200": Ceilings(dram_tb_per_s=4.8, fp32_tflops=67, bf16_tensor_tflops=989.5),
}

# Per SM and clock, on Hopper.
BF16_TENSOR_FLOP = 4096
EXPONENTIALS = 16


def exponential_tflops(ceilings: Ceilings, head_dim: int) -> float:
    """The bound by exponentials: each element of S takes one, and 4 head_dim FLOP of products.

    At the clock and with the SMs of the tensor cores' ceiling.
    """
    return ceilings.bf16_tensor_tflops * EXPONENTIALS * 4 * head_dim / BF16_TENSOR_FLOP


def serial_tflops(ceilings: Ceilings, head_dim: int) -> float:
    """The bound where products and exponentials never overlap."""
    return 1 / (1 / ceilings.bf16_tensor_tflops + 1 / exponential_tflops(ceilings, head_dim))


def render_plots(record_set: RecordSet) -> dict[str, str]:
    """SVG text by file name; none without a record."""
    measured, grid = record_set.measured, record_set.grid
    steps = [[name, measured.label(name), record] for name, record in measured.records.items()]
    data: dict[str, object] = {"steps.svg": steps, "roofline.svg": steps}
    if grid:
        data["grid.svg"] = [sorted(grid.stale), grid.record]
    if distributions := record_set.distributions:
        data["distributions.svg"] = [sorted(distributions.stale), distributions.record]
    return {name: _svg(plot, data[name]) for name, plot in draw_plots(record_set).items()}


def same_plot(old: str, new: str) -> bool:
    """True if two plots agree: byte by byte, or in their data if two matplotlibs drew them."""
    if _creator(old) == _creator(new):
        return old == new
    return _digest(old) == _digest(new)


def _creator(svg: str) -> str | None:
    found = re.search(r"<dc:title>(Matplotlib v[^<]*)", svg)
    return found[1] if found else None


def _digest(svg: str) -> str | None:
    found = re.search(r"<dc:description>data sha256 ([0-9a-f]{64})<", svg)
    return found[1] if found else None


def draw_plots(record_set: RecordSet) -> dict[str, Figure]:
    """The plots by the file name of their SVG; none without a record."""
    drawn = {}
    with matplotlib.rc_context(STYLE):
        if record_set.measured.records:
            drawn["steps.svg"] = _bars(record_set)
            if ceilings := CEILINGS.get(record_set.folder.name):
                drawn["roofline.svg"] = _roofline(record_set, ceilings)
        if record_set.grid:
            drawn["grid.svg"] = _grid(record_set.grid)
        if record_set.distributions and latest_steps(record_set, record_set.distributions.record):
            drawn["distributions.svg"] = _distributions(record_set, record_set.distributions)
    return drawn


def _bars(record_set: RecordSet) -> Figure:
    """TFLOP/s as bars, one for each step and peer."""
    measured = record_set.measured
    rows = [
        (measured.label(name), record["tflops"], STEP_COLOR)
        for name, record in measured.records.items()
    ]
    rows += [
        (name, peer["tflops"], PEER_COLOR)
        for name, peer in sorted(
            record_set.newest["peers"].items(), key=lambda item: item[1].get("tflops", 0)
        )
        if "tflops" in peer
    ]
    figure = Figure(figsize=(8, 0.9 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    labels, rates, colors = zip(*rows, strict=True)
    bars = axes.barh(range(len(rows)), rates, color=colors, height=0.68)
    axes.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=4)
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(1, min(rates) / 2), 2 * max(rates))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", color=RULE)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("TFLOP/s (log scale), median of interleaved rounds")
    axes.set_title(f"{record_set.newest['device']}: {_work(record_set)}")
    return figure


def _roofline(record_set: RecordSet, ceilings: Ceilings) -> Figure:
    """Each step at the fewest bytes its design moves through global memory."""
    measured = record_set.measured
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    low, high = 1.0, 2e4
    head_dim = record_set.newest["shape"]["head_dim"]
    tensor, exponentials = ceilings.bf16_tensor_tflops, exponential_tflops(ceilings, head_dim)
    roofs = (
        ("exponentials", exponentials, EXP_COLOR, "-"),
        ("BF16 tensor cores", tensor, TENSOR_COLOR, "-"),
        ("products, then exponentials", serial_tflops(ceilings, head_dim), INK, "--"),
        ("FP32 FMA", ceilings.fp32_tflops, FP32_COLOR, "-"),
    )
    for name, peak, color, line in roofs:
        ridge = peak / ceilings.dram_tb_per_s
        axes.plot([ridge, high], [peak, peak], line, color=color, linewidth=1.6)
        text = f"{name}, {peak:.4g} TFLOP/s"
        axes.text(ridge / 1.2, peak, text, ha="right", va="center", color=color)
    top = max(tensor, exponentials)
    diagonal = [low * ceilings.dram_tb_per_s, top]
    axes.plot([low, top / ceilings.dram_tb_per_s], diagonal, color=INK, linewidth=1.6)
    x, y = 2 * low, 1.3 * low * ceilings.dram_tb_per_s
    axes.text(
        x,
        y,
        f"DRAM, {ceilings.dram_tb_per_s:g} TB/s",
        rotation=math.degrees(math.atan(y / x)),  # in data space; slope 1 in logarithmic axes
        rotation_mode="anchor",
        transform_rotates_text=True,
    )
    # A label stands left of its point if there is room, else right of it, else lower.
    lowest: dict[tuple[int, str], float] = {}  # label so far, by place on the x axis and side
    for name, record in sorted(measured.records.items(), key=lambda item: -item[1]["tflops"]):
        intensity, rate = derived(record)["flops_per_byte"], record["tflops"]
        place = round(4 * math.log10(intensity))
        label_x = {"right": intensity / 1.14, "left": intensity * 1.14}  # by the text's alignment
        label_y = {
            side: min(rate, lowest.get((place, side), math.inf) / LINE_HEIGHT) for side in label_x
        }
        side = max(label_y, key=label_y.__getitem__)
        lowest[place, side] = label_y[side]
        axes.plot(intensity, rate, "o", color=STEP_COLOR, markersize=8, markeredgecolor="white")
        text = f"{measured.label(name)}  {rate:.3g}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # before roofs and grid
        axes.text(label_x[side], label_y[side], text, ha=side, va="center", bbox=box)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(1, *(record["tflops"] / 2 for record in measured.records.values())), 2 * top)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color=RULE)
    axes.set_xlabel("FLOP per byte: inputs and outputs once, workspace written once and read once")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{record_set.newest['device']}, datasheet ceilings: {_work(record_set)}")
    return figure


def _grid(grid: Cells) -> Figure:
    """TFLOP/s over the sequence length, in a panel for each mask and head dimension."""
    cells = [cell for cell in grid.record["cells"] if cell["name"] in GRID_OVER_LENGTHS]
    columns = list(dict.fromkeys(_heads(cell) for cell in cells))
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(2, len(columns), sharex=True, sharey=True, squeeze=False)
    panels[0][0].set_ylim(0, 1.1 * _highest(grid.record))
    lines: dict[str, Line2D] = {}
    for row, mask in enumerate(("no mask", "causal mask")):
        panels[row][0].set_ylabel(f"TFLOP/s, {mask}")
        for axes, heads in zip(panels[row], columns, strict=True):
            shown = [cell for cell in cells if (cell["causal"], _heads(cell)) == (bool(row), heads)]
            lines |= _grid_panel(axes, grid, shown)
    seqs = sorted({cell["seq"] for cell in cells})
    for axes, heads in zip(panels[0], columns, strict=True):
        axes.set_title(heads)
    for axes in panels[1]:
        axes.set_xlabel("N")
    panels[0][0].set_xscale("log", base=2)
    panels[0][0].set_xlim(seqs[0] / 1.6, 4 * seqs[-1])  # with room for labels
    panels[0][0].set_xticks(seqs, [str(seq) for seq in seqs])
    figure.suptitle(
        f"{grid.record['device']}, {grid.record['dtype']}: steps in blue, medians of interleaved "
        "rounds",
        fontsize=11,
    )
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines))
    return figure


def _heads(cell: dict) -> str:
    shared = f", heads {cell['heads']}/{cell['kv_heads']}"
    return f"head_dim {cell['head_dim']}{shared if cell['heads'] != cell['kv_heads'] else ''}"


def _highest(grid: dict) -> float:
    """The highest of all rates and the ceiling."""
    rates = [rate for cell in grid["cells"] for rate in cell["tflops"].values()]
    rates.append(grid["ceiling"]["tflops"])
    return max(rate for rate in rates if isinstance(rate, NUMBER))


def _grid_panel(axes: Axes, grid: Cells, cells: list[dict]) -> dict[str, Line2D]:
    """Draws cells that differ in seq only; returns the lines that the legend explains, by label."""
    steps = list(grid.record["sources"])
    peers = [name for name in grid.record["cells"][0]["tflops"] if name not in steps]
    styles = {
        **{step: (STEP_COLOR, "o", 2.4 if step == steps[-1] else 1.2) for step in steps},
        **{peer: (*style, 1.2) for peer, style in zip(peers, cycle(PEER_LINES))},
    }
    drawn: dict[str, Line2D] = {}
    for name, (color, marker, width) in styles.items():
        points = [
            (cell["seq"], cell["tflops"][name])
            for cell in cells
            if isinstance(cell["tflops"].get(name), NUMBER)
        ]
        if points:
            x, y = zip(*points, strict=True)
            (drawn[name],) = axes.plot(
                x, y, color=color, marker=marker, linewidth=width, markersize=4
            )
    _label_ends(axes, {name: drawn[name] for name in steps if name in drawn}, grid.stale)
    ceiling = grid.record["ceiling"]
    drawn[f"measured ceiling: product of {ceiling['matmul']}"] = axes.axhline(
        ceiling["tflops"], color=INK, linestyle="--", linewidth=1.2
    )
    axes.grid(color=RULE)
    return {name: line for name, line in drawn.items() if name not in steps}


def _label_ends(axes: Axes, lines: dict[str, Line2D], stale: frozenset[str]) -> None:
    """Labels each line at its right end, or lower where another label is."""
    ends = {name: (line.get_xdata()[-1], line.get_ydata()[-1]) for name, line in lines.items()}
    height = axes.get_ylim()[1] * LABEL_SHARE
    lowest = math.inf
    for name, (x, y) in sorted(ends.items(), key=lambda end: -end[1][1]):
        lowest = min(y, lowest - height)
        text = label(name, stale=name in stale)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # before the ceiling
        axes.text(1.2 * x, lowest, text, color=STEP_COLOR, fontsize=8, va="center", bbox=box)


def _distributions(record_set: RecordSet, measured: Cells) -> Figure:
    """The last two steps over the fastest peer, in a panel for each dtype and head dimension.

    Over the logits' standard deviation, then at the inputs that have none.
    """
    record = measured.record
    dtypes, head_dims, inputs = (
        list(dict.fromkeys(cell[key] for cell in record["cells"]))
        for key in ("dtype", "head_dim", "inputs")
    )
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    panels = figure.subplots(len(dtypes), len(head_dims), sharex=True, sharey=True, squeeze=False)
    lines: dict[str, Line2D] = {}
    for row, dtype in zip(panels, dtypes, strict=True):
        row[0].set_ylabel(f"{dtype}: over the fastest peer")
        for axes, head_dim in zip(row, head_dims, strict=True):
            shown = [
                cell
                for cell in record["cells"]
                if (cell["dtype"], cell["head_dim"]) == (dtype, head_dim)
            ]
            axes.axhline(1, color=INK, linestyle="--", linewidth=1.2)
            axes.grid(color=RULE)
            for name, color in zip(
                latest_steps(record_set, record), (STEP_COLOR, FP32_COLOR), strict=False
            ):
                ratios = peer_ratios(record, name)
                for causal in (False, True):
                    points = {
                        cell["inputs"]: ratios[cell["name"]]
                        for cell in shown
                        if cell["causal"] == causal and cell["name"] in ratios
                    }
                    what = label(name, stale=name in measured.stale)
                    key = f"{what}, {'causal' if causal else 'no mask'}"
                    for line in _curve(axes, inputs, points, color, hollow=causal):
                        lines[key] = line
    for axes, head_dim in zip(panels[0], head_dims, strict=True):
        axes.set_title(f"head_dim {head_dim}")
    ticks = [f"std {NORMAL[name]}" if name in NORMAL else name.replace("_", " ") for name in inputs]
    for axes in panels[-1]:
        axes.set_xticks(range(len(inputs)), ticks, rotation=60, ha="right", rotation_mode="anchor")
    panels[0][0].set_ylim(bottom=0)
    figure.suptitle(
        f"{record['device']}, N = {record['cells'][0]['seq']}: rate over the fastest peer's, by "
        "the inputs; std is that of normally distributed logits",
        fontsize=11,
    )
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines))
    return figure


def _curve(
    axes: Axes, inputs: list[str], points: dict[str, float], color: str, *, hollow: bool
) -> list[Line2D]:
    """A line through the points of normally distributed inputs, the others by themselves."""
    style = {
        "color": color,
        "marker": "o",
        "markersize": 4.5,
        "markerfacecolor": "white" if hollow else color,
        "linewidth": 1.4,
    }
    drawn = []
    for normal, line in ((False, "none"), (True, ":" if hollow else "-")):
        chosen = [name for name in points if (name in NORMAL) == normal]
        if chosen:
            x, y = [inputs.index(name) for name in chosen], [points[name] for name in chosen]
            drawn += axes.plot(x, y, linestyle=line, **style)
    return drawn


def _work(record_set: RecordSet) -> str:
    shape = record_set.newest["shape"]
    return (
        f"batch {shape['batch']}, heads {shape['heads']}, N = {shape['seq_q']}, "
        f"D = {shape['head_dim']}, {shape['dtype']}"
    )


def _svg(figure: Figure, data: object) -> str:
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None, "Description": f"data sha256 {digest}"}
        FigureCanvasSVG(figure).print_svg(buffer, metadata=metadata)
    return buffer.getvalue()
