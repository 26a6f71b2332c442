"""Two steps beside each other: the diff of their sources, then what the records say of both.

A metric has the name that it has in the expressions of common/report/expressions.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from ..catalog import all_steps, find_step
from ..errors import UsageError
from ..metrics import OPCODES, STALL, STALL_REASONS, smem_bytes, spill_bytes
from ..records import STATIC
from ..step import Step
from ..text import markdown
from .derived import derived, static_derived
from .record_set import NOT_MEASURED, RecordSet

# A number a kernel, the whole step's under ""; None where this card does not count it. A text says
# why there are none.
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
    """What makes the second step's file of the first's: a unified diff."""
    sources = [step.path.read_text(encoding="utf-8").splitlines() for step in (first, second)]
    names = [f"{side}/steps/{step.path.name}" for side, step in (("a", first), ("b", second))]
    return "\n".join(difflib.unified_diff(*sources, *names, lineterm=""))


def change_table(record_set: RecordSet, first: Step, second: Step) -> str:
    """A row a metric: of the first step, of the second, and their quotient or difference."""
    names = (first.name, second.name)
    recorded = [record_set.measured.current(name) for name in names]
    static = [record_set.static.current(name) for name in names]
    times = _rows("time", _times, recorded)
    if len({record["run"] for record in recorded if isinstance(record, dict)}) > 1:
        times = [[*row[:3], row[3] and "not measured together"] for row in times]
    instructions = _rows("instructions", _instructions, static)
    opcodes = _different(instructions[1:])
    rows = [
        *times,
        *_rows("resources", _resources, static),
        *instructions[:1],
        *(row for row in opcodes if row[0] in OPCODES),
        *_rows("counters", _counters, recorded),
        *_different(_rows("stalls", _stalls, recorded)),
    ]
    others = [
        f"{name} {old} → {new}"
        for name, old, new, _ in opcodes
        if name not in OPCODES and all(isinstance(record, dict) for record in static)
    ]
    return markdown(["Metric", *(f">{name}" for name in names), ">Change"], rows) + (
        f"\n\nTimes and counters of profiles/{record_set.folder.name}, the others of "
        f"profiles/{STATIC}; one number a kernel. Of the opcodes, as they stand in the code, and "
        "of the reasons why warps stall, those that differ."
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
    """From numbers by kernel and metric; an opcode that one kernel lacks stands there no times."""
    if isinstance(kernels, str):
        return kernels
    names = dict.fromkeys(name for numbers in kernels.values() for name in numbers)
    return {name: {k: numbers.get(name, 0) for k, numbers in kernels.items()} for name in names}


def _rows(
    what: str, read: Callable[[dict], dict[str, Numbers] | str], records: Sequence[dict | str]
) -> list[list[str]]:
    """A row a metric that one of the two has, or one row where both have none."""
    sides = [record if isinstance(record, str) else read(record) for record in records]
    known = [side for side in sides if isinstance(side, dict)]
    if not known:
        return [[what, *sides, ""]]

    def numbers(side: dict[str, Numbers] | str, name: str) -> Numbers:
        if isinstance(side, str):
            return side
        return side.get(name) or dict.fromkeys(next(iter(side.values())), 0)  # an opcode

    rows = []
    for name in dict.fromkeys(name for side in known for name in side):
        old, new = (numbers(side, name) for side in sides)
        rows.append([name, _text(old), _text(new), _change(name, old, new)])
    return rows


def _different(rows: list[list[str]]) -> list[list[str]]:
    """Without those that are equal, or 0 in however many kernels."""
    return [
        row
        for row in rows
        if row[1] != row[2] and {*row[1].split(" / "), *row[2].split(" / ")} != {"0"}
    ]


def _text(numbers: Numbers) -> str:
    if isinstance(numbers, str):
        return numbers
    return " / ".join(
        "n/a" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
        for value in numbers.values()
    )


def _change(name: str, old: Numbers, new: Numbers) -> str:
    """Kernel by kernel; nothing between different kernels, nor between gains over different steps.

    Counts of the compiler and per cent are subtracted, and so is what was 0.
    """
    if isinstance(old, str) or isinstance(new, str) or old.keys() != new.keys() or name == "gain":
        return ""
    return " / ".join(_one_change(name, old[kernel], new[kernel]) for kernel in old)


def _one_change(name: str, old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return "n/a"
    if old == new:
        return "="
    if isinstance(old, int):
        return f"{new - old:+}"
    if name.endswith("_percent") or not old:
        return f"{new - old:+.3g}"
    return f"{new / old:.2f} ×"
