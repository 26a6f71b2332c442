"""A step's sizes, read from its text."""

from __future__ import annotations

import re

from common.catalog import find_step


def source(step: str) -> str:
    return find_step(step).path.read_text(encoding="utf-8")


def evaluate(expression: str, names: dict[str, int]) -> int:
    """Of C++: integers, and at most one conditional."""
    condition, question, rest = expression.partition("?")
    if question:
        yes, _, no = rest.partition(":")
        return evaluate(yes if evaluate(condition, names) else no, names)
    return eval(expression.replace("/", "//"), {}, names)


def constants(step: str, head_dim: int = 128) -> dict[str, int]:
    """Each `constexpr int` or `bool` whose value follows from head_dim and those before it."""
    names = {"HEAD_DIM": head_dim}
    for names_and_values in re.findall(
        r"^constexpr (?:int|bool) (.+?);", source(step), re.M | re.S
    ):
        for one in re.split(r", (?=\w+ =)", names_and_values):
            name, value = re.split(r" =\s+", one, maxsplit=1)
            if set(re.findall(r"[A-Za-z_]\w*", value)) <= names.keys():
                names[name] = evaluate(value, names)
    return names
