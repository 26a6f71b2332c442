"""The columns of a table: what shows a row's values as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..text import label, markdown, megabytes
from .rows import Row

Cell = Callable[[Row], str]  # the text of one column in a row
Show = Callable[[Any], str]  # the text of one value


def table_of(columns: dict[str, Cell], found: Sequence[Row]) -> str:
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in found])


def milliseconds(time: float) -> str:
    return f"{time:.4g}" if time < 1e4 else f"{time:.0f}"


def shown(key: str, show: Show = str, none: str = "") -> Cell:
    """Shows row[key]; nothing where the row lacks it, `none` where it is None."""

    def cell(row: Row) -> str:
        if key not in row:
            return ""
        return none if row[key] is None else show(row[key])

    return cell


def shown_of(key: str, name: str, show: Show, none: str = "") -> Cell:
    """Shows row[key][name], `none` where it is None."""
    return lambda row: none if row[key][name] is None else show(row[key][name])


def shown_each(key: str, show: Show) -> Cell:
    """Shows the values of a list."""
    return lambda row: " / ".join(show(value) for value in row.get(key, ()))


def first_shown(*cells: Cell) -> Cell:
    """The first that shows something."""
    return lambda row: next((text for cell in cells if (text := cell(row))), "")


def quartiles(row: Row) -> str:
    return f"{row['time_p25_ms']:.4g}–{row['time_p75_ms']:.4g}" if "time_p25_ms" in row else ""


def status_in(title: str, columns: dict[str, Cell]) -> dict[str, Cell]:
    """The columns, where that of this title shows the status of a row without numbers."""
    return columns | {title: first_shown(columns[title], shown("status"))}


def linked(row: Row) -> str:
    """The name, linked to its source where it has one."""
    name = f"[{row['name']}]({row['path']})" if "path" in row else row["name"]
    return label(name, stale=row.get("stale", False))


def kernel_name(row: Row) -> str:
    return f"{row['step']} {code(row['kernel'])}" if "kernel" in row else row["step"]


def mask(row: Row) -> str:
    return "causal" if row["causal"] else "none"


def heads(row: Row) -> str:
    of_queries, of_keys = row["heads"], row["kv_heads"]
    return str(of_queries) if of_queries == of_keys else f"{of_queries}/{of_keys}"


def percent(share: float) -> str:
    """0 % only for none, and 100 % only for all."""
    if 0 < share < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < share < 1 else f"{share:.0%}".replace("%", " %")


def bold_from_one(ratio: float) -> str:
    return f"**{ratio:.3f} ×**" if ratio >= 1 else f"{ratio:.3f} ×"


def code(text: str) -> str:
    return f"`{text}`"


TIME_MS = shown("time_ms", milliseconds)
TFLOPS = shown("tflops", "{:.4g}".format)
PEAK_MEMORY = shown("peak_memory_bytes", megabytes)
ERROR = shown("error", "{:.1e}".format)
