"""A step is one .cu file that describes itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError
from .operation import Operation, operation_of
from .problem import Specialization
from .source import code_sha256

_LIMITS = re.compile(
    r"(?P<dtypes>[a-z0-9]+(?:, [a-z0-9]+)*); "
    r"head_dim (?P<lowest>\d+)-(?P<highest>\d+) by (?P<multiple>\d+); (?P<arch>sm_\d+a?)"
)


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
    code_sha256: str  # of its code and its headers', without comments

    @property
    def operation(self) -> Operation:
        """What the step computes, by the letter of its name."""
        return operation_of(self.name)

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
        code_sha256=code_sha256(path),
        limits=Limits(
            dtypes=tuple(limits["dtypes"].split(", ")),
            lowest_head_dim=int(limits["lowest"]),
            highest_head_dim=int(limits["highest"]),
            head_dim_multiple=int(limits["multiple"]),
            arch=limits["arch"],
        ),
    )
