"""Variants of a step, kept as patches: wrong kernels that the checker must reject, experiments.

A patch is a unified diff of one step, after a header of `key: value` lines. It is applied by
content: the line numbers do not matter, but each hunk's old lines must occur in the step exactly
once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError, explain
from .paths import BUILD_DIR, ROOT
from .records import write_atomically
from .step import Step, read_step

EXPERIMENTS_DIR = ROOT / "experiments"


@dataclass(frozen=True)
class Hunk:
    old: str  # whole lines
    new: str


@dataclass(frozen=True)
class Patch:
    """name is the file's stem; header has the lines before the diff, e.g. header["breaks"].

    folder is the name of the file's: a step may have a patch of one name in several.
    """

    name: str
    folder: str
    step: Step
    header: dict[str, str]
    hunks: tuple[Hunk, ...]

    def apply(self) -> str:
        """The source of the patched step, named as the patch.

        Raises UsageError where the patch does not apply.
        """
        source = "\n" + self.step.path.read_text(encoding="utf-8")
        for hunk in self.hunks:
            count = source.count("\n" + hunk.old)
            if count != 1:
                first = hunk.old.splitlines()[0].strip()
                raise UsageError(
                    f"{self.name}.patch no longer applies: its hunk starting with '{first}' "
                    f"matches {count} places in {self.step.path.name}, not one"
                )
            source = source.replace("\n" + hunk.old, "\n" + hunk.new)
        return re.sub(r"^\n// \w+ --", f"// {self.name} --", source)

    def write(self) -> Path:
        """Writes the patched step and returns its path.

        Raises UsageError where the patch does not apply or the file cannot be written.
        """
        source = self.apply()
        path = BUILD_DIR / "patched" / self.folder / f"{self.name}.cu"
        try:
            if not path.exists() or path.read_bytes() != source.encode():
                write_atomically(path, source)
        except OSError as error:
            raise UsageError(
                f"{self.name}.patch cannot be applied: {explain(error, path) or error}"
            ) from None
        return path


def read_patch(path: Path) -> Patch:
    """Parses a .patch file, taken from the working directory, then from the project's root.

    Raises UsageError where there is none or where it is not a patch of a step.
    """
    if not path.is_file():
        path = ROOT / path
    if not path.is_file():
        raise UsageError(f"no file '{path}'")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    head, *parts = re.split(r"^@@.*\n", text, flags=re.MULTILINE)
    step = re.search(r"^--- (?:a/)?(\S+)", head, re.MULTILINE)
    hunks = tuple(Hunk(_side(part, "-"), _side(part, "+")) for part in parts)
    if not step or not hunks or not all(hunk.old for hunk in hunks):
        raise UsageError(f"{path}: not a unified diff of a step")
    header = dict(re.findall(r"^(\w+): *(.+)$", head[: step.start()], re.MULTILINE))
    return Patch(path.stem, path.absolute().parent.name, read_step(ROOT / step[1]), header, hunks)


def _side(hunk: str, sign: str) -> str:
    """The hunk's text before (sign "-") or after (sign "+"); an empty line is context."""
    lines = (line or " " for line in hunk.splitlines())
    return "".join(line[1:] + "\n" for line in lines if line[0] in (" ", sign))
