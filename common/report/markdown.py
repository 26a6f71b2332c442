"""profiles/ -> tables and numbers of worklog.md and README.md, plots, timelines; and the diagrams.

Generated text stands between HTML comments, which render invisibly:

    <!-- table: results -->…<!-- end -->          or memory, peers, grid, utilisation,
                                                  utilisation_counted, sass, banks: those of the
                                                  forward ladder
    <!-- table: results b -->…<!-- end -->        any of these, of the ladder with this letter
    <!-- table: latency -->…<!-- end -->          or decoding, decode, large_head_dim, lengths,
                                                  lengths_backward, pictures, distributions,
                                                  training_speed, sharded, sharded_model: the last
                                                  two of the records of several such GPUs
    <!-- table: counters v04 -->…<!-- end -->     or resources, experiments: those of a step
    <!-- table: grid b h100 -->…<!-- end -->      results, memory, peers, grid, utilisation and
                                                  utilisation_counted of any ladder,
                                                  distributions, latency, decode, large_head_dim,
                                                  lengths, lengths_backward, training_speed, sharded
                                                  and sharded_model, of the records in
                                                  profiles/h100, which need not be there
    <!-- = v04.tflops : .1f -->19.3<!-- end -->   an expression of common/report/expressions.py

They show the H200's records and the static ones unless told. In the results table those of any
other GPU follow that has no such table of its own in the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..catalog import require_well_formed
from ..errors import UsageError
from ..operation import FORWARD, OPERATIONS, Operation
from ..paths import ROOT
from ..records import HEADLINE_GPU, STATIC, write_atomically
from . import (
    decode_table,
    diagrams,
    large_head_dim_table,
    lengths_table,
    sharded_tables,
    tables,
    utilisation_table,
)
from .expressions import evaluate
from .page import render_page
from .plots import render_plots
from .record_set import (
    GPU_FOLDER,
    NOT_MEASURED,
    Ladder,
    RecordSet,
    in_folder,
    load_record_set,
    single_gpus,
)
from .ring_timeline import render_ring_timeline
from .timeline_plot import render_timelines

PAGE = "docs/index.html"

REQUIRED_TABLES = {
    "README.md": ("results", "grid", "results b", "training_speed"),
    "worklog.md": (
        "results",
        "memory",
        "peers",
        "sass",
        "banks",
        "grid",
        "distributions",
        "latency",
        "decoding",
        "decode",
        "pictures",
        "results b",
        "memory b",
        "peers b",
        "grid b",
        "utilisation",
        "utilisation b",
        "utilisation_counted",
        "utilisation_counted b",
        "training_speed",
        "sharded",
        "sharded_model",
    ),
}

_OPENING = r"<!-- (?:table:|=)"
_MARKER = re.compile(
    rf"(?P<open><!-- (?:table: (?P<table>[^>]*?)|= (?P<expression>[^>]*?)) -->)"
    rf"(?P<body>(?:(?!{_OPENING}).)*?)<!-- end -->",
    re.DOTALL,
)


def regenerate(root: Path = ROOT, *, check: bool = False) -> list[str]:
    """Rewrites what differs from the records, or with check only looks; returns the paths.

    Raises UsageError naming a malformed record or step, whose rows would be lost, and then changes
    nothing; or each file with a marker missing or wrong, which is left as it is while the others
    are done.
    """
    require_well_formed()
    profiles_dir = root / "profiles"
    folders = single_gpus(path for path in profiles_dir.glob("*") if path.is_dir()) - {
        profiles_dir / HEADLINE_GPU,
        profiles_dir / STATIC,
    }
    headline, *others = (
        load_record_set(path, root) for path in (profiles_dir / HEADLINE_GPU, *sorted(folders))
    )
    contents: dict[Path, str] = {}
    errors = []
    for name in REQUIRED_TABLES:
        try:
            contents[root / name] = render(root / name, headline, others)
        except UsageError as error:
            errors.append(str(error))
    for one in (headline, *others):
        contents |= {one.folder / name: svg for name, svg in render_plots(one).items()}
        timelines = render_timelines(one.timelines)
        contents |= {one.folder / "timelines" / name: svg for name, svg in timelines.items()}
        for gpus, whole in one.sharded.items():
            of_ranks = render_ring_timeline(whole)
            contents |= {one.folder_of(gpus) / name: svg for name, svg in of_ranks.items()}
    figures = diagrams.figures()
    contents |= {root / "figures" / name: svg for name, svg in figures.items()}
    if worklog := contents.get(root / "worklog.md"):
        contents[root / PAGE] = render_page((headline, *others), worklog, figures)
    different = [path for path, content in contents.items() if not _same(path, content)]
    if not check:
        for path in different:
            write_atomically(path, contents[path])
    if errors:
        raise UsageError("; ".join(errors))
    return [path.relative_to(root).as_posix() for path in different]


def render(path: Path, record_set: RecordSet, others: list[RecordSet]) -> str:
    """The file's text with every marker filled in. Raises UsageError naming file and marker."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} cannot be read: {error}") from None

    present = {_parse(marker["table"]) for marker in _MARKER.finditer(text) if marker["table"]}

    def fill(marker: re.Match) -> str:
        try:
            if marker["table"] is None:
                body = evaluate(marker["expression"], record_set, others)
            else:
                body = f"\n\n{_table(marker['table'], record_set, others, present)}\n\n"
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
    of_any_gpu = {replace(asked, folder=None) for asked in present}
    for table in _required_tables(path.name, record_set):
        if _parse(table) not in of_any_gpu:
            raise UsageError(f"{path.name}: missing marker <!-- table: {table} --> … <!-- end -->")
    return filled


def _required_tables(name: str, record_set: RecordSet) -> list[str]:
    """Include the experiments of every step that has any: what did not work is not left out."""
    if name != "worklog.md":
        return list(REQUIRED_TABLES[name])
    tried = sorted({patch.step.name for patch in record_set.patches})
    return [*REQUIRED_TABLES[name], *(f"experiments {step}" for step in tried)]


@dataclass(frozen=True)
class _Asked:
    """What a table's name says: its kind, and whose records it shows."""

    kind: str
    operation: Operation = FORWARD
    folder: str | None = None  # of a GPU; without one, the headline GPU's
    words: tuple[str, ...] = ()  # the rest of the name


def _parse(name: str) -> _Asked:
    kind, *words = name.split() or [""]
    operation, folder = FORWARD, None
    if kind in LADDER_TABLES | STATIC_TABLES and words and words[0] in OPERATIONS:
        operation = OPERATIONS[words.pop(0)]
    if kind in LADDER_TABLES | GPU_TABLES and words and re.fullmatch(GPU_FOLDER, words[0]):
        folder = words.pop(0)
    return _Asked(kind, operation, folder, tuple(words))


def _table(
    name: str, record_set: RecordSet, others: list[RecordSet], present: Collection[_Asked]
) -> str:
    """others are the record sets of other GPUs, present are all tables of the file."""
    asked = _parse(name)
    kind, operation, words = asked.kind, asked.operation, list(asked.words)
    if kind in STEP_TABLES and words in [[step.name] for step in record_set.steps]:
        return STEP_TABLES[kind](record_set, *words)
    if words or kind not in LADDER_TABLES | STATIC_TABLES | GPU_TABLES:
        raise UsageError(
            f"there are the tables {', '.join(LADDER_TABLES | STATIC_TABLES)}, each also with the "
            f"letter of a ladder: {', '.join(OPERATIONS)}; {', '.join(GPU_TABLES)}; of these, "
            f"{', '.join(LADDER_TABLES | GPU_TABLES)} also with the name of a folder of profiles/; "
            f"with the name of a step, {', '.join(STEP_TABLES)}"
        )
    if kind == "results" and not asked.folder:
        own = {
            table.folder for table in present if (table.kind, table.operation) == (kind, operation)
        }
        following = [other for other in others if other.folder.name not in own]
        return _results(operation, record_set, following)
    chosen = in_folder(asked.folder, record_set, others) if asked.folder else record_set
    if kind in GPU_TABLES:
        return GPU_TABLES[kind](chosen)
    return (LADDER_TABLES | STATIC_TABLES)[kind](chosen.of(operation))


def _results(operation: Operation, record_set: RecordSet, others: list[RecordSet]) -> str:
    """The results of one ladder, then those on other GPUs."""
    parts = [tables.results(record_set.of(operation))]
    for other in (each.of(operation) for each in others):
        if other.newest:
            parts.append(f"On the {other.newest['device']}:\n\n{tables.results(other)}")
    return "\n\n".join(parts)


def _results_of_a_gpu(ladder: Ladder) -> str:
    return tables.results(ladder) if ladder.newest else NOT_MEASURED


# Of a ladder: of what was measured on a GPU, and of what is known without one.
LADDER_TABLES = {
    "results": _results_of_a_gpu,
    "memory": tables.memory,
    "peers": tables.peers,
    "grid": tables.grid,
    "utilisation": utilisation_table.utilisation,
    "utilisation_counted": utilisation_table.utilisation_counted,
}
STATIC_TABLES = {"sass": tables.sass, "banks": tables.banks}
# Of what was measured on a GPU and is of no ladder's own: attention() as it picks its steps, or the
# forward ladder.
GPU_TABLES = {
    "distributions": tables.distributions,
    "latency": tables.latency,
    "decoding": tables.decoding,
    "decode": decode_table.decode,
    **{
        operation.named("large_head_dim"): partial(
            large_head_dim_table.large_head_dim, operation=operation
        )
        for operation in OPERATIONS.values()
    },
    **{
        operation.named("lengths"): partial(lengths_table.lengths, operation=operation)
        for operation in OPERATIONS.values()
    },
    "pictures": tables.pictures,
    "training_speed": tables.training_speed,
    "sharded": sharded_tables.sharded,
    "sharded_model": sharded_tables.sharded_model,
}
STEP_TABLES = {
    "resources": tables.resources,
    "counters": tables.counters,
    "experiments": tables.experiments,
}


def _same(path: Path, content: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == content
    except (OSError, UnicodeDecodeError):
        return False
