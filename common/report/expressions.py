"""The expressions behind the inline numbers of worklog.md and README.md.

    v04.tflops : .1f                     a number of a record, formatted as by Python's format()
    v04.tflops / v02.tflops : .1f        quotients and products, from left to right
    v04.fa3_share : .0%                  one of derived.derived
    peers.sdpa_cudnn.time_ms : .3f       of the latest run
    experiments.v04_no_padding.gain : .2f
    grid.d64_causal_4096.v07 : .1f       TFLOP/s of a step or a peer in a cell of the grid
    v06.sass.attention_forward.HMMA      one of derived.static_derived
    v06.banks.ldmatrix_x4.conflicts

A dotted path walks through the record's JSON and the numbers derived from it; "sass" and "banks"
lead to the static record of the step or experiment. What has no record, or one whose source has
changed, reads "not measured"; a quotient of times of different runs "not measured together".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError
from ..problem import GRID
from .derived import derived, static_derived
from .record_set import CHANGED, NOT_MEASURED, RecordSet

_OPERAND = r"[a-z_][\w.]*|\d+(?:\.\d+)?"
_EXPRESSION = re.compile(
    rf"\s*(?P<first>{_OPERAND})(?P<rest>(?:\s*[*/]\s*(?:{_OPERAND}))*)"
    r"\s*(?::\s*(?P<format>\S+)\s*)?"
)
_STATIC = {"sass", "banks"}
_TIMES = {"time_ms", "time_p25_ms", "time_p75_ms", "tflops"}


class _Unavailable(Exception):
    """Its message stands where the number would."""


@dataclass(frozen=True)
class _Value:
    number: float | str
    run: str | None = None  # of a time


def evaluate(expression: str, record_set: RecordSet) -> str:
    """The text of an inline number. Raises UsageError for an expression that means nothing."""
    match = _EXPRESSION.fullmatch(expression)
    if not match:
        raise UsageError(
            f"'{expression.strip()}' does not read like 'v04.tflops / v02.tflops : .1f'"
        )
    try:
        format(1.0, match["format"] or "")  # before anything is measured, too
    except ValueError as error:
        raise UsageError(f"'{expression.strip()}': {error}") from None
    try:
        value = _operand(match["first"], record_set)
        for operator, name in re.findall(rf"([*/])\s*({_OPERAND})", match["rest"]):
            value = _combine(value, operator, _operand(name, record_set))
    except _Unavailable as reason:
        return str(reason)
    try:
        return format(value.number, match["format"] or "")
    except ValueError as error:
        raise UsageError(f"'{expression.strip()}': {error}") from None


def _combine(left: _Value, operator: str, right: _Value) -> _Value:
    for value in (left, right):
        if isinstance(value.number, str):
            raise _Unavailable(value.number)
    if left.run and right.run and left.run != right.run:
        raise _Unavailable("not measured together")
    if operator == "/" and right.number == 0:
        raise _Unavailable("undefined: a division by zero")
    number = left.number * right.number if operator == "*" else left.number / right.number
    return _Value(number, left.run or right.run)


def _operand(text: str, record_set: RecordSet) -> _Value:
    if text[0].isdigit():
        return _Value(float(text))
    name, *keys = text.split(".")
    if name == "grid":
        return _cell_rate(record_set, keys, text)
    if name == "peers":
        return _walk(record_set.newest, derived, ["peers", *keys], text)
    sources, recorded, derive = record_set.steps, record_set.measured, derived
    if name == "experiments" and keys:
        name = keys.pop(0)
        sources, recorded = record_set.patches, record_set.experiments
    _require(name, [source.name for source in sources], text)
    if keys and keys[0] in _STATIC:
        recorded, derive = record_set.static, static_derived
    if name in recorded.stale:
        raise _Unavailable(CHANGED)
    return _walk(recorded.records.get(name), derive, keys, text)


def _cell_rate(record_set: RecordSet, keys: list[str], text: str) -> _Value:
    if len(keys) != 2:
        raise UsageError(f"'{text}' does not read like 'grid.d128_causal_4096.v07'")
    cell_name, name = keys
    _require(cell_name, list(GRID), text)
    grid = record_set.grid
    cells = {cell["name"]: cell for cell in grid.record["cells"]} if grid else {}
    if grid is None or cell_name not in cells:
        raise _Unavailable(NOT_MEASURED)
    cell = cells[cell_name]
    if name in grid.stale:
        raise _Unavailable(CHANGED)
    if name not in cell["tflops"] and name in [step.name for step in record_set.steps]:
        raise _Unavailable(NOT_MEASURED)
    _require(name, list(cell["tflops"]), text)
    rate = cell["tflops"][name]
    if isinstance(rate, dict):
        raise _Unavailable("missing")
    return _Value(rate, cell["run"])


def _walk(
    record: dict | None, derive: Callable[[dict], dict], keys: list[str], text: str
) -> _Value:
    if record is None:
        raise _Unavailable(NOT_MEASURED)
    node: object = record | derive(record)
    for key in keys:
        if isinstance(node, str):  # "not collected"
            raise _Unavailable(node)
        if node is None:
            raise _Unavailable(NOT_MEASURED)
        if not isinstance(node, dict):
            raise UsageError(f"'{text}': nothing is called '{key}' there")
        if "missing" in node:
            raise _Unavailable("missing")
        _require(key, list(node), text)
        node = node[key]
    if node is None:
        raise _Unavailable(NOT_MEASURED)
    if isinstance(node, (dict, list)):
        raise UsageError(f"'{text}' is not a number")
    return _Value(node, record["run"] if keys and keys[-1] in _TIMES else None)


def _require(name: str, known: list[str], text: str) -> None:
    if name not in known:
        raise UsageError(f"'{text}': no '{name}'; there are {', '.join(known) or 'none'}")
