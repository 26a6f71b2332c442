"""A step is one .cu file that describes itself; the only list of steps is the folder."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
STEPS_DIR = ROOT / "steps"

_LIMITS = re.compile(
    r"(?P<dtypes>[a-z0-9]+(?:, [a-z0-9]+)*); "
    r"head_dim (?P<lowest>\d+)-(?P<highest>\d+) by (?P<multiple>\d+); (?P<arch>sm_\d+a?)"
)


@dataclass(frozen=True)
class Specialization:
    """What a step is compiled for. dtype is "bf16", "fp16" or "fp32"."""

    head_dim: int
    dtype: str
    causal: bool

    def __str__(self) -> str:
        return f"d{self.head_dim}_{self.dtype}{'_causal' if self.causal else ''}"


@dataclass(frozen=True)
class Limits:
    """The step's `limits:` line, e.g. `bf16, fp16, fp32; head_dim 8-256 by 8; sm_75`."""

    dtypes: tuple[str, ...]
    lowest_head_dim: int
    highest_head_dim: int
    head_dim_multiple: int
    arch: str  # lowest architecture; a trailing "a" means exactly that one

    def refusal(self, spec: Specialization) -> str | None:
        """Why these limits exclude spec, or None."""
        if spec.dtype not in self.dtypes:
            return f"takes {', '.join(self.dtypes)}, not {spec.dtype}"
        low, high, by = self.lowest_head_dim, self.highest_head_dim, self.head_dim_multiple
        if not low <= spec.head_dim <= high or spec.head_dim % by:
            return f"takes head_dim {low} to {high} in multiples of {by}, not {spec.head_dim}"
        return None

    def arch_refusal(self, capability: tuple[int, int]) -> str | None:
        """Why these limits exclude a device of that compute capability, or None."""
        major, minor = capability
        number = int(self.arch[3:].rstrip("a"))
        exact = self.arch.endswith("a")
        if (exact and number != 10 * major + minor) or number > 10 * major + minor:
            return (
                f"needs {'exactly ' if exact else ''}{self.arch}; this device is sm_{major}{minor}"
            )
        return None


@dataclass(frozen=True)
class Step:
    """One .cu file: name "v04", its path, and what the file's first lines say of it."""

    name: str
    path: Path
    title: str
    change: str
    why: str
    limits: Limits
    source_sha256: str

    def require(self, spec: Specialization) -> None:
        """Raises UsageError where the step cannot run spec."""
        if reason := self.limits.refusal(spec):
            raise UsageError(f"{self.name} {reason}")


def read_step(path: Path) -> Step:
    """Parses the header comment of a step's file: title line, change:, why:, limits:."""
    header: list[str] = []
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from None
    for line in source.splitlines():
        if not line.startswith("//"):
            break
        header.append(line[2:].strip())
    title = re.fullmatch(r"(\w+) -- (.+)", header[0]) if header else None
    if not title:
        raise UsageError(f"{path}: the first line must read '// vNN -- title'")
    fields: dict[str, str] = {}
    key = None
    for line in header[1:]:
        if found := re.match(r"(change|why|limits): *(.*)", line):
            key = found[1]
            fields[key] = found[2]
        elif line and key:
            fields[key] += " " + line
        else:
            key = None
    for name in ("change", "why", "limits"):
        if name not in fields:
            raise UsageError(f"{path}: no '// {name}:' line in the header comment")
    limits = _LIMITS.match(fields["limits"])
    if not limits:
        raise UsageError(
            f"{path}: 'limits:' must read like 'bf16, fp16; head_dim 8-256 by 8; sm_80', "
            f"not '{fields['limits']}'"
        )
    return Step(
        name=title[1],
        path=path,
        title=title[2],
        change=fields["change"],
        why=fields["why"],
        source_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        limits=Limits(
            dtypes=tuple(limits["dtypes"].split(", ")),
            lowest_head_dim=int(limits["lowest"]),
            highest_head_dim=int(limits["highest"]),
            head_dim_multiple=int(limits["multiple"]),
            arch=limits["arch"],
        ),
    )


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
        from common.patch import read_patch  # which looks up the patched step here

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
