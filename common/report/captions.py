"""What captions say of any table: the inputs, what was counted, the states of the device."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..operation import FORWARD, Operation
from ..text import listed
from .record_set import NOT_MEASURED, Cells


def inputs(operation: Operation) -> str:
    """What is drawn of a call's inputs; o and lse follow from it."""
    drawn = listed(each.name for each in operation.inputs if each not in FORWARD.outputs)
    return f"{drawn} normally distributed with variance 1 (logits of standard deviation 1)"


def unless_forward(operation: Operation, text: str) -> str:
    """What goes without saying of the forward ladder."""
    return "" if operation == FORWARD else text


def flops(operation: Operation) -> str:
    ratio = operation.products / FORWARD.products
    return unless_forward(operation, f"FLOPs are {ratio:g} times forward's. ")


def peak_memory(operation: Operation) -> str:
    beyond = listed(each.name for each in operation.inputs)
    saved = "; of a peer that differentiates its own forward, also what that has saved"
    return f"what one call takes beyond {beyond}{unless_forward(operation, saved)}. "


def max_error(operation: Operation) -> str:
    """Of all outputs the records have one; the tables have the first's."""
    return unless_forward(operation, f"of {operation.outputs[0].name}, ") + "against float64"


def summary(ratios: dict[str, float]) -> str:
    """The ratios by cell in a few words."""
    if not ratios:
        return NOT_MEASURED
    smallest = min(ratios, key=ratios.__getitem__)
    mean = statistics.geometric_mean(ratios.values())
    return (
        f"geometric mean of {len(ratios)} cells {mean:.3f} ×, "
        f"smallest {ratios[smallest]:.3f} × ({smallest})"
    )


def missing(cells: Sequence[dict]) -> str:
    """A sentence on whose attention is missing in how many cells, and why in most of those."""
    reasons: dict[str, Counter[str]] = {}
    for cell in cells:
        outcomes = cell["attentions"] if "attentions" in cell else cell["tflops"]
        for name, each in outcomes.items():
            if isinstance(each, dict) and "missing" in each:
                reasons.setdefault(name, Counter())[each["missing"]] += 1
    told = "; ".join(
        f"{name} in {why.total()} of {len(cells)} cells{', mostly' if len(why) > 1 else ''}: "
        f"{why.most_common(1)[0][0]}"
        for name, why in reasons.items()
    )
    return f"Missing: {told.rstrip('.')}. " if told else ""


def skipped(names: dict[str, str]) -> str:
    return f"{len(names)} cells do not fit into the device's memory. " if names else ""


def routes(cells: Iterable[dict]) -> str:
    """Which code the peers run."""
    by_name = {name: route for cell in cells for name, route in cell["routes"].items()}
    return "; ".join(f"{name}: {route}" for name, route in by_name.items()) or "all missing"


def rounds(cells: Iterable[dict]) -> str:
    """How many of them an attention's median is of."""
    counts = {
        len(each["samples_ms"])
        for cell in cells
        for each in cell["attentions"].values()
        if "samples_ms" in each
    }
    return _rounds(counts)


def _rounds(counts: set[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{most if least == most else f'{least} to {most}'} interleaved rounds per cell"


def how_measured(measured: Cells, ratios: Callable[[dict], dict[str, float]]) -> str:
    """The end of the caption of a table of cells; ratios by cell follow from a record."""
    cells = measured.record["cells"]
    counts = {len(samples) for cell in cells for samples in cell["samples_ms"].values()}
    apart = ", the slow ones apart" if any(cell.get("slow") for cell in cells) else ""
    text = (
        f"Median of {_rounds(counts)}{apart}, L2 flushed before each call. In bold: no slower than "
        f"the fastest peer. {states_of(cells)}"
    )
    if measured.previous:
        before = summary(ratios(measured.previous))
        text += f" In the run before, of the same sources: {before}."
    return text


def states_of(cells: Sequence[dict]) -> str:
    """device_states() from in front of the first cell on."""
    states = [cells[0]["environment"]["before"], *(cell["environment"]["after"] for cell in cells)]
    return device_states(states)


def device_states(states: Sequence[dict | str]) -> str:
    """The device's states in the order of time; what throttled it in any but the first."""
    if not all(isinstance(state, dict) for state in states):
        return "Clocks, power and temperature: not collected."

    reasons = dict.fromkeys(
        reason for state in states[1:] for reason in state["throttle_reasons"] or ()
    ) or ["none"]

    def pair(key: str, unit: str) -> str:
        ends = (states[0][key], states[-1][key])
        return " → ".join("?" if end is None else f"{end:.0f}" for end in ends) + f" {unit}"

    return (
        f"Before and after: SM clock {pair('sm_clock_mhz', 'MHz')}, {pair('power_w', 'W')}, "
        f"{pair('temperature_c', '°C')}; throttle reasons after: {', '.join(reasons)}."
    )
