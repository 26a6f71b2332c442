"""All steps: the folder is the only list of them.

A malformed file is an error only for a caller that asks for that step, or that needs every step.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import UsageError
from .patch import read_patch
from .paths import ROOT
from .step import LETTERS, Step, predecessor, read_step

STEPS_DIR = ROOT / "steps"

_FILE = re.compile(rf"(?P<name>(?P<letter>[{LETTERS}])\d\d)_\w+\.cu")
_WANTED = re.compile(
    rf"(?:(?:.*/)?steps/)?(?P<letter>[{LETTERS}]?)(?P<number>\d{{1,2}})(?P<rest>_\w+)?"
)


@dataclass(frozen=True)
class _Catalog:
    steps: tuple[Step, ...]
    errors: dict[Path, str]  # by malformed file


@cache
def _catalog() -> _Catalog:
    paths = sorted(path for path in STEPS_DIR.glob("*.cu") if not path.name.startswith("."))
    steps: list[Step] = []
    errors: dict[Path, str] = {}
    for path in paths:
        try:
            steps.append(_read(path, paths))
        except UsageError as error:
            errors[path] = str(error)
    steps.sort(key=lambda step: (LETTERS.index(step.name[0]), step.name))
    return _Catalog(tuple(steps), errors)


def _read(path: Path, paths: list[Path]) -> Step:
    """The step in one of paths. Raises UsageError unless its name is unique."""
    file = _FILE.fullmatch(path.name)
    if not file:
        raise UsageError(
            f"{path}: name a step's file like {LETTERS[0]}04_register_tiles.cu: a letter "
            f"({', '.join(LETTERS)}), two digits, then words joined by _"
        )
    for other in paths:
        if other != path and other.name.startswith(f"{file['name']}_"):
            raise UsageError(f"{path}: {other.name} is {file['name']} too: rename one of them")
    step = read_step(path)
    if step.name != file["name"]:
        raise UsageError(f"{path}: the first line calls it {step.name}, not {file['name']}")
    return step


def all_steps() -> tuple[Step, ...]:
    """The steps of the worklog, ladder by ladder, in order; malformed files are left out."""
    return _catalog().steps


def steps_to_run() -> tuple[Step, ...]:
    """All steps, for a command that loops over them; each malformed file is named on stderr.

    Raises UsageError where no step is left.
    """
    for error in _catalog().errors.values():
        print(f"warning: skipped {error}", file=sys.stderr)
    if not all_steps():
        raise UsageError(f"no steps in {STEPS_DIR}: name a file there like {LETTERS[0]}04_what.cu")
    return all_steps()


def require_well_formed() -> None:
    """Raises UsageError where a file is malformed, for results that would lack its step."""
    if errors := _catalog().errors:
        raise UsageError("; ".join(errors.values()))


def step_before(step: Step) -> Step | None:
    """The step of the same ladder that this one changes. None where that file is malformed."""
    before = predecessor(step, all_steps())
    names = [p.name for p in _catalog().errors if p.name[0] == step.name[0]]
    between = [name for name in names if name < step.path.name]
    return None if before is None or max(between, default="") > before.path.name else before


def find_step(name: str | Path) -> Step:
    """The step called "4", "04", "v04", "steps/v04" or "steps/v04_register_tiles.cu".

    Also any other .cu file, and a .patch of a step. Paths are taken from the working directory,
    then from the project's root. Raises UsageError with what is wrong with the step's file, or
    listing the steps.
    """
    text = str(name)
    if text.endswith(".patch"):
        return read_step(read_patch(Path(text)).write())
    if text.endswith(".cu"):
        for path in (Path(text), ROOT / text):
            if path.is_file():
                return _find_file(path.resolve())
        raise UsageError(f"no file '{text}'; the steps are {step_names()}")
    if wanted := _WANTED.fullmatch(text):
        short = f"{wanted['letter'] or LETTERS[0]}{int(wanted['number']):02d}"
        stem = f"{short}{wanted['rest'] or ''}"
        for step in all_steps():
            if stem in (step.name, step.path.stem):
                return step
        for path, error in _catalog().errors.items():
            if stem in (path.name[:3], path.stem):
                raise UsageError(error)
    raise UsageError(f"no step '{text}'; the steps are {step_names()}")


def _find_file(path: Path) -> Step:
    if error := _catalog().errors.get(path):
        raise UsageError(error)
    return next((step for step in all_steps() if step.path == path), None) or read_step(path)


def step_names() -> str:
    return ", ".join(step.name for step in all_steps())
