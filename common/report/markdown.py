"""profiles/ -> tables and numbers of worklog.md and README.md, plots, timelines; and the diagrams.

    python -m common.report.markdown            regenerate what differs
    python -m common.report.markdown --check    name what differs, exit 1

Generated text stands between HTML comments, which render invisibly:

    <!-- table: results -->…<!-- end -->          or memory, peers, grid, latency, counters,
                                                  sass, banks, resources v04, experiments v04
    <!-- = v04.tflops : .1f -->19.3<!-- end -->   an expression of common/report/expressions.py

They show the H200's records and the static ones; in the results table those of any other GPU
follow.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ..catalog import require_well_formed
from ..cli import Parser, guarded
from ..errors import UsageError
from ..records import STATIC, write_atomically
from ..source import ROOT
from . import plots, tables
from .diagrams import ampere as figures
from .expressions import evaluate
from .record_set import Profile, load_profile
from .timeline_plot import timeline_figure

HEADLINE_GPU = "h200"
REQUIRED_TABLES = {
    "README.md": ("results", "grid"),
    "worklog.md": ("results", "memory", "peers", "counters", "sass", "banks", "grid", "latency"),
}

_OPENING = r"<!-- (?:table:|=)"
_MARKER = re.compile(
    rf"(?P<open><!-- (?:table: (?P<table>[^>]*?)|= (?P<expression>[^>]*?)) -->)"
    rf"(?P<body>(?:(?!{_OPENING}).)*?)<!-- end -->",
    re.DOTALL,
)


def regenerate(root: Path = ROOT, *, check: bool = False) -> list[str]:
    """Rewrites what differs from the records, or with check only looks; returns the paths.

    Raises UsageError naming each file with a marker missing or wrong; such a file is left as it is,
    the others are done. Where a step's file is malformed, nothing is: its rows would be lost.
    """
    require_well_formed()
    profiles_dir = root / "profiles"
    folders = {path for path in profiles_dir.glob("*") if path.is_dir()} - {
        profiles_dir / HEADLINE_GPU,
        profiles_dir / STATIC,
    }
    profile, *others = (
        load_profile(path, root) for path in (profiles_dir / HEADLINE_GPU, *sorted(folders))
    )
    others = [other for other in others if other.records]
    contents: dict[Path, str] = {}
    problems = []
    for name in REQUIRED_TABLES:
        try:
            contents[root / name] = render(root / name, profile, others)
        except UsageError as error:
            problems.append(str(error))
    for one in (profile, *others):
        for name, svg in plots.plots(one).items():
            contents[one.folder / name] = svg
        for name, record in one.timelines.items():
            svg = timeline_figure(record, stale=name in one.timelines_stale)
            contents[one.folder / "timelines" / f"{name}.svg"] = svg
    contents |= {root / "figures" / name: svg for name, svg in figures.figures().items()}
    different = [path for path, content in contents.items() if not _same(path, content)]
    if not check:
        for path in different:
            write_atomically(path, contents[path])
    if problems:
        raise UsageError("; ".join(problems))
    return [path.relative_to(root).as_posix() for path in different]


def render(path: Path, profile: Profile, others: list[Profile]) -> str:
    """The file's text with every marker filled in. Raises UsageError naming file and marker."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} cannot be read: {error}") from None

    def fill(marker: re.Match) -> str:
        try:
            if marker["table"] is None:
                body = evaluate(marker["expression"], profile)
            else:
                body = f"\n\n{_table(marker['table'], profile, others)}\n\n"
        except UsageError as error:
            raise UsageError(f"{path.name}: marker {marker['open']}: {error}") from None
        return f"{marker['open']}{body}<!-- end -->"

    filled = _MARKER.sub(fill, text)
    complete = _MARKER.findall(text)
    if len(complete) != len(re.findall(_OPENING, text)):
        rest = _MARKER.sub("", text)
        opening = re.search(rf"{_OPENING}.*", rest)
        raise UsageError(
            f"{path.name}: marker {opening[0][:60] if opening else ''} has no <!-- end -->"
        )
    present = {marker["table"] for marker in _MARKER.finditer(text)}
    for table in _required_tables(path.name, profile):
        if table not in present:
            raise UsageError(f"{path.name}: missing marker <!-- table: {table} --> … <!-- end -->")
    return filled


def _required_tables(name: str, profile: Profile) -> list[str]:
    """Among them the experiments of every step that has some: what did not work is not left out."""
    tried = sorted({patch.step.name for patch in profile.patches}) if name == "worklog.md" else []
    return [*REQUIRED_TABLES[name], *(f"experiments {step}" for step in tried)]


def _table(name: str, profile: Profile, others: list[Profile]) -> str:
    kind, _, argument = name.partition(" ")
    if name == "results":
        parts = [tables.results(profile)]
        parts += [
            f"On the {other.newest['device']}:\n\n{tables.results(other)}" for other in others
        ]
        return "\n\n".join(parts)
    if name in ("memory", "peers", "grid", "latency", "counters", "sass", "banks"):
        return getattr(tables, name)(profile)
    if kind in ("resources", "experiments") and argument in {step.name for step in profile.steps}:
        return getattr(tables, kind)(profile, argument)
    raise UsageError(
        "there are the tables results, memory, peers, grid, latency, counters, sass, banks, "
        "resources vNN and experiments vNN"
    )


def _same(path: Path, content: str) -> bool:
    try:
        old = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return plots.same_plot(old, content) if path.suffix == ".svg" else old == content


def main(arguments: list[str] | None = None) -> int:
    return guarded(lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    parser = Parser(prog="python -m common.report.markdown", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if something differs"
    )
    options = parser.parse_args(arguments)
    different = regenerate(check=options.check)
    for name in different:
        print(f"{name} differs: run make worklog" if options.check else f"wrote {name}")
    return 1 if options.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
