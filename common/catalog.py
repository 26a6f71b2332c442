"""All steps: the folder is the only list of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from .errors import UsageError
from .source import ROOT
from .step import Step, read_step

STEPS_DIR = ROOT / "steps"


@cache
def all_steps() -> tuple[Step, ...]:
    """The steps of the worklog, in order. Raises UsageError unless each has a name of its own."""
    steps: dict[str, Step] = {}
    for path in sorted(STEPS_DIR.glob("v[0-9][0-9]_*.cu")):
        step = read_step(path)
        if step.name != path.name[:3]:
            raise UsageError(f"{path}: the first line calls it {step.name}, not {path.name[:3]}")
        if step.name in steps:
            raise UsageError(f"{path}: {steps[step.name].path.name} is {step.name} already")
        steps[step.name] = step
    return tuple(steps.values())


def find_step(name: str | Path) -> Step:
    """The step called "4", "04", "v04", "steps/v04" or "steps/v04_register_tiles.cu".

    Also any other .cu file, and a .patch of a step. Paths are taken from the working directory,
    then from the project's root. Raises UsageError listing the steps.
    """
    text = str(name)
    if text.endswith(".patch"):
        from .patch import read_patch  # which looks up the patched step here

        return read_step(read_patch(Path(text)).write())
    if text.endswith(".cu"):
        for path in (Path(text), ROOT / text):
            if path.is_file():
                path = path.resolve()
                return next((step for step in all_steps() if step.path == path), None) or read_step(
                    path
                )
        raise UsageError(f"no file '{text}'; the steps are {step_names()}")
    if number := re.fullmatch(r"(?:(?:.*/)?steps/)?v?(\d{1,2})(_\w+)?", text):
        wanted = f"v{int(number[1]):02d}{number[2] or ''}"
        for step in all_steps():
            if wanted in (step.name, step.path.stem):
                return step
    raise UsageError(f"no step '{text}'; the steps are {step_names()}")


def step_names() -> str:
    return ", ".join(step.name for step in all_steps())
