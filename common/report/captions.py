"""What captions say of any table: the inputs, what was counted, the states of the device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..operation import FORWARD, Operation
from ..text import listed
from .record_set import NOT_MEASURED


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
