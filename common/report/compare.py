"""Two steps beside each other: the diff of their sources, then what the records say of both.

A metric has the name that it has in the expressions of common/report/expressions.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..catalog import all_steps, find_step
from ..errors import UsageError
from ..metrics import OPCODES, STALL, STALL_REASONS, smem_bytes, spill_bytes
from ..records import STATIC
from ..step import Step
from ..text import markdown
from .derived import derived, static_derived
from .record_set import NOT_MEASURED, RecordSet

# One number per kernel, the whole step's under ""; None where this card does not count it. A text
# says why there are none.
Numbers = dict[str, float | None] | str


def find_two(first: str, second: str) -> tuple[Step, Step]:
    """The steps of these names. Raises UsageError where one is no step or both are the same."""
    steps = find_step(first), find_step(second)
    for name, step in zip((first, second), steps, strict=True):
        if step not in all_steps():
            raise UsageError(f"'{name}' is not in steps/: only steps are compared")
    if steps[0] == steps[1]:
        raise UsageError(f"N and M are both {steps[0].name}: name two steps, as in N=8 M=9")
    return steps


def source_diff(first: Step, second: Step) -> str:
    """A unified diff from the first step's file to the second's."""
    sources = [step.path.read_text(encoding="utf-8").splitlines() for step in (first, second)]
    names = [f"{side}/steps/{step.path.name}" for side, step in (("a", first), ("b", second))]
    return "\n".join(difflib.unified_diff(*sources, *names, lineterm=""))


@dataclass(frozen=True)
class Change:
    """The values of a metric in the records of two steps."""

    metric: str
    old: Numbers
    new: Numbers
    together: bool = True  # False: times of different runs, which are not compared


def find_changes(record_set: RecordSet, first: Step, second: Step) -> dict[str, list[Change]]:
    """By group; one that neither record has is a single change, whose two texts say why."""
    recorded = [record_set.measured.current(step.name) for step in (first, second)]
    static = [record_set.static.current(step.name) for step in (first, second)]
    together = len({record["run"] for record in recorded if isinstance(record, dict)}) <= 1
    return {
        "time": [
            replace(change, together=together) for change in _changes("time", _times, recorded)
        ],
        "resources": _changes("resources", _resources, static),
        "instructions": _changes("instructions", _instructions, static),
        "counters": _changes("counters", _counters, recorded),
        "stalls": _changes("stalls", _stalls, recorded),
    }


def change_table(record_set: RecordSet, first: Step, second: Step) -> str:
    """One row per metric: its values in both steps, and their quotient or difference."""
    groups = find_changes(record_set, first, second)
    total, *opcodes = groups["instructions"]
    opcodes = [change for change in opcodes if _differs(change)]
    shown = [
        *groups["time"],
        *groups["resources"],
        total,
        *(change for change in opcodes if change.metric in OPCODES),
        *groups["counters"],
        *(change for change in groups["stalls"] if _differs(change)),
    ]
    others = [
        f"{change.metric} {_text(change.old)} → {_text(change.new)}"
        for change in opcodes
        if change.metric not in OPCODES
        and not isinstance(change.old, str)
        and not isinstance(change.new, str)
    ]
    columns = ["Metric", f">{first.name}", f">{second.name}", ">Change"]
    rows = [
        [change.metric, _text(change.old), _text(change.new), _difference(change)]
        for change in shown
    ]
    return markdown(columns, rows) + (
        f"\n\nTimes and counters are those of profiles/{record_set.folder.name}, resources and "
        f"instructions those of profiles/{STATIC}: one number per kernel. Instructions are counted "
        "as they stand in the code. Of opcodes and reasons to stall, those that differ are shown."
        + (f" Other opcodes: {', '.join(others)}." if others else "")
    )


def _times(record: dict) -> dict[str, Numbers]:
    gain = derived(record)["gain"]
    return {
        **{name: {"": record[name]} for name in ("time_ms", "tflops")},
        "gain": {"": gain} if gain else NOT_MEASURED,
    }


def _resources(record: dict) -> dict[str, Numbers] | str:
    compiled = record["compiled"]
    if isinstance(compiled, str):
        return compiled
    return _by_metric(
        {
            name: {
                "registers": kernel["registers"],
                "smem_bytes": smem_bytes(kernel),
                "spill_bytes": spill_bytes(kernel),
                "stack_bytes": kernel["stack_bytes"],
            }
            for name, kernel in compiled["resources"].items()
        }
    )


def _instructions(record: dict) -> dict[str, Numbers] | str:
    """Their number, then that of each opcode."""
    return _by_metric(static_derived(record)["sass"])


def _counters(record: dict) -> dict[str, Numbers] | str:
    return _by_metric(derived(record)["ncu"])


def _stalls(record: dict) -> dict[str, Numbers] | str:
    counters = record["counters"]
    if isinstance(counters, str):
        return counters
    return _by_metric(
        {
            name: {
                f"stalled: {reason}": values.get(STALL.format(reason)) for reason in STALL_REASONS
            }
            for name, values in counters.items()
        }
    )


def _by_metric(kernels: dict[str, dict[str, float | None]] | str) -> dict[str, Numbers] | str:
    """From numbers by kernel and metric; an opcode that a kernel lacks counts 0."""
    if isinstance(kernels, str):
        return kernels
    names = dict.fromkeys(name for numbers in kernels.values() for name in numbers)
    return {name: {k: numbers.get(name, 0) for k, numbers in kernels.items()} for name in names}


def _changes(
    what: str, read: Callable[[dict], dict[str, Numbers] | str], records: Sequence[dict | str]
) -> list[Change]:
    """The metrics that one of the two has, or one of this name where both have none."""
    sides = [record if isinstance(record, str) else read(record) for record in records]
    known = [side for side in sides if isinstance(side, dict)]
    if not known:
        return [Change(what, *sides)]

    def numbers(side: dict[str, Numbers] | str, name: str) -> Numbers:
        if isinstance(side, str):
            return side
        return side.get(name) or dict.fromkeys(next(iter(side.values())), 0)  # an opcode

    names = dict.fromkeys(name for side in known for name in side)
    return [Change(name, *(numbers(side, name) for side in sides)) for name in names]


def _differs(change: Change) -> bool:
    """Whether the texts differ by more than the number of kernels that have 0."""
    old, new = _text(change.old), _text(change.new)
    return old != new and {*old.split(" / "), *new.split(" / ")} != {"0"}


def _text(numbers: Numbers) -> str:
    if isinstance(numbers, str):
        return numbers
    return " / ".join(
        "n/a" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
        for value in numbers.values()
    )


def _difference(change: Change) -> str:
    """Kernel by kernel; nothing between different kernels, nor between gains over different steps.

    Counts of the compiler and per cent are subtracted, and so is what was 0.
    """
    name, old, new = change.metric, change.old, change.new
    if isinstance(old, str) or isinstance(new, str) or old.keys() != new.keys() or name == "gain":
        return ""
    if not change.together:
        return "not measured together"
    return " / ".join(_one_difference(name, old[kernel], new[kernel]) for kernel in old)


def _one_difference(name: str, old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "n/a"
    if old == new:
        return "="
    if isinstance(old, int):
        return f"{new - old:+}"
    if name.endswith("_percent") or not old:
        return f"{new - old:+.3g}"
    return f"{new / old:.2f} ×"
