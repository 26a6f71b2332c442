"""A GPU's record set: what was measured on it, and which sources have changed since."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..catalog import all_steps
from ..errors import UsageError
from ..operation import OPERATIONS, Operation, operation_of
from ..patch import Patch, read_patch
from ..record_schema import (
    DECODE_RECORD,
    DISTRIBUTIONS_RECORD,
    EXPERIMENT_RECORD,
    GRID_RECORD,
    LARGE_HEAD_DIM_RECORD,
    LATENCY_RECORD,
    LENGTHS_RECORD,
    PICTURES_RECORD,
    RECORD,
    SHARDED_RECORD,
    SHARES,
    STATIC_RECORD,
    TIMELINE_RECORD,
    TRAIN_RECORD,
    TRAINING_SPEED_RECORD,
    Form,
)
from ..records import (
    DECODE_FILE,
    DISTRIBUTIONS_FILE,
    LATENCY_FILE,
    PICTURES_FILE,
    SHARDED_FILE,
    STATIC,
    TRAIN_FILE,
    TRAINING_SPEED_FILE,
    grid_file,
    host_hashes,
    is_stale,
    large_head_dim_file,
    lengths_file,
    model_hashes,
    picture_hashes,
    previous_path,
    read_record,
    read_records,
    sharded_hashes,
)
from ..step import Step, read_step
from ..text import label

NOT_MEASURED = "not measured"
GPU_FOLDER = r"[a-z0-9_]{2,}"  # in profiles/
STALE = "stale"  # measured, but the source has changed since


@dataclass(frozen=True)
class Recorded:
    """Records of one kind by the names of their sources, and the sources changed since."""

    records: dict[str, dict]
    stale: frozenset[str]

    def current(self, name: str) -> dict | str:
        """The record of a source, or why there is none to show: STALE or NOT_MEASURED."""
        return STALE if name in self.stale else self.records.get(name, NOT_MEASURED)

    def label(self, name: str) -> str:
        return label(name, stale=name in self.stale)

    def of(self, operation: Operation) -> Recorded:
        """The records of one ladder."""
        kept = {name: r for name, r in self.records.items() if operation_of(name) == operation}
        return Recorded(kept, self.stale & kept.keys())


@dataclass(frozen=True)
class Cells:
    """A record of many cells, that of the run before, and the steps changed since."""

    record: dict
    previous: dict | None  # of the same sources
    stale: frozenset[str]


@dataclass(frozen=True)
class Whole:
    """A record of one run, which of its steps have changed since, and whether other code has whose
    hashes it has.
    """

    record: dict
    changed: frozenset[str] = frozenset()
    other_changed: bool = False

    @property
    def stale(self) -> bool:
        """Whether anything has changed: most of these records are shown as a whole."""
        return self.other_changed or bool(self.changed)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What a record set has of one operation."""

    operation: Operation
    steps: tuple[Step, ...]
    measured: Recorded  # steps
    static: Recorded  # steps and experiments, in the order of the worklog
    grid: Cells | None  # of shapes

    def taken(self, deterministic: bool = False) -> tuple[str, ...]:
        """The steps that the grid has in the order in which attention() looks for one that runs."""
        return tuple(
            step.name
            for step in reversed(self.steps)
            if self.grid
            and step.name in self.grid.record["sources"]
            and step.is_candidate(deterministic)
        )

    @property
    def newest(self) -> dict | None:
        """The step record of the latest run; of several, the highest step's."""
        records = self.measured.records
        by_run = [(record["run"], name) for name, record in records.items()]
        return records[max(by_run)[1]] if by_run else None


@dataclass(frozen=True, kw_only=True)
class RecordSet:
    """The records in a GPU's folder of profiles/ and the static ones, beside their sources."""

    folder: Path
    steps: tuple[Step, ...]
    patches: tuple[Patch, ...]  # the experiments
    measured: Recorded  # steps
    experiments: Recorded
    static: Recorded  # steps and experiments, in the order of the worklog
    timelines: Recorded
    # "grid", of shapes, and "large_head_dim", each also "_backward"; "distributions", of inputs
    cells: dict[str, Cells]
    decode: Whole | None  # of few queries on many keys
    lengths: dict[str, Whole]  # "lengths" and "lengths_backward", of packed sequences and windows
    latency: Whole | None  # of small calls
    pictures: Whole | None
    training: Whole | None
    training_speed: Whole | None
    sharded: dict[int, Whole]  # by how many GPUs, in the folders of so many

    def folder_of(self, gpus: int) -> Path:
        """That of several GPUs of this kind."""
        return self.folder.with_name(f"{self.folder.name}x{gpus}")

    @property
    def distributions(self) -> Cells | None:
        return self.cells.get("distributions")

    def of(self, operation: Operation) -> Ladder:
        """What there is of an operation."""
        return Ladder(
            operation=operation,
            steps=tuple(step for step in self.steps if step.operation == operation),
            measured=self.measured.of(operation),
            static=self.static.of(operation),
            grid=self.cells.get(operation.named("grid")),
        )


def load_record_set(folder: Path, root: Path) -> RecordSet:
    """The record set in a folder, which need not exist, with the experiments in root.

    Raises UsageError where a record is malformed.
    """
    steps = all_steps()
    patches = _patches(root / "experiments")
    steps_records = read_records(folder, RECORD)
    for record in steps_records.values():
        if not _baseline_is_current(record["baseline"], steps):
            record["baseline"] = None
    static = _recorded(
        read_records(root / "profiles" / STATIC, STATIC_RECORD),
        [
            source
            for step in steps
            for source in (step, *(patch for patch in patches if patch.step == step))
        ],
    )
    cells = {
        operation.named("grid"): _load_cells(folder / grid_file(operation), GRID_RECORD, steps)
        for operation in OPERATIONS.values()
    }
    cells |= {
        operation.named("large_head_dim"): _load_cells(
            folder / large_head_dim_file(operation), LARGE_HEAD_DIM_RECORD, steps
        )
        for operation in OPERATIONS.values()
    }
    lengths = {
        operation.named("lengths"): _load_whole(
            folder / lengths_file(operation), LENGTHS_RECORD, steps
        )
        for operation in OPERATIONS.values()
    }
    repairs = _patches(root / "common" / "bench" / "repairs")
    cells["distributions"] = _load_distributions(folder, steps, repairs)
    return RecordSet(
        folder=folder,
        steps=steps,
        patches=patches,
        measured=_recorded(steps_records, steps),
        experiments=_recorded(read_records(folder / "experiments", EXPERIMENT_RECORD), patches),
        static=static,
        timelines=_recorded(
            read_records(folder / "timelines", TIMELINE_RECORD),
            _patches(root / "common" / "bench" / "timelines"),
        ),
        cells={name: record for name, record in cells.items() if record},
        decode=_load_whole(folder / DECODE_FILE, DECODE_RECORD, steps),
        lengths={name: record for name, record in lengths.items() if record},
        latency=_load_whole(folder / LATENCY_FILE, LATENCY_RECORD, steps, host=host_hashes()),
        pictures=_load_whole(
            folder / PICTURES_FILE, PICTURES_RECORD, steps, made_by=picture_hashes()
        ),
        training=_load_whole(folder / TRAIN_FILE, TRAIN_RECORD, steps),
        training_speed=_load_whole(
            folder / TRAINING_SPEED_FILE, TRAINING_SPEED_RECORD, steps, models=model_hashes()
        ),
        sharded=_load_sharded(folder, steps),
    )


def in_folder(name: str, record_set: RecordSet, others: Sequence[RecordSet]) -> RecordSet:
    """Of these the one in that folder of profiles/; an empty one if there is no such folder."""
    found = {one.folder.name: one for one in (record_set, *others)}
    folder = record_set.folder.with_name(name)
    return found.get(name) or load_record_set(folder, folder.parent.parent)


def single_gpus(folders: Iterable[Path]) -> set[Path]:
    """The folders of record sets: in the place of one of several GPUs, that of one of them."""
    return {
        folder.with_name(several["gpu"]) if (several := _of_several(folder)) else folder
        for folder in folders
    }


def _patches(folder: Path) -> tuple[Patch, ...]:
    return tuple(read_patch(path) for path in sorted(folder.glob("*.patch")))


def _recorded(records: dict[str, dict], sources: Sequence[Step | Patch]) -> Recorded:
    """The records of the sources, in their order; a record whose source is gone is left out."""
    kept = {source.name: records[source.name] for source in sources if source.name in records}
    return Recorded(kept, _stale(kept, sources))


def _load_cells(path: Path, form: Form, steps: Sequence[Step]) -> Cells | None:
    record, previous = read_record(path, form), read_record(previous_path(path), form)
    if not record:
        return None
    if previous and previous["sources"] != record["sources"]:
        previous = None
    return Cells(record, previous, _stale(record["sources"], steps))


def _load_distributions(
    folder: Path, steps: Sequence[Step], patches: Sequence[Patch]
) -> Cells | None:
    """Without the shares where they are those of another patch than there is now."""
    loaded = _load_cells(folder / DISTRIBUTIONS_FILE, DISTRIBUTIONS_RECORD, steps)
    if loaded and (repairs := loaded.record["repairs"]):
        of_now = _recorded({repairs["step"]: repairs}, patches)
        if repairs["step"] in of_now.stale or not of_now.records:
            for cell in loaded.record["cells"]:
                cell |= dict.fromkeys(SHARES)
    return loaded


def _load_whole(
    path: Path, form: Form, steps: Sequence[Step], **of_now: dict[str, str]
) -> Whole | None:
    """A record; of_now has other code's hashes, by the record's key of them."""
    record = read_record(path, form)
    if not record:
        return None
    changed = any(record[key] != hashes for key, hashes in of_now.items())
    return Whole(record, _stale(record["sources"], steps), other_changed=changed)


def _load_sharded(folder: Path, steps: Sequence[Step]) -> dict[int, Whole]:
    """By how many GPUs, in order; those of a GPU whose folder is this one, which need not exist."""
    found = {}
    for path in folder.parent.glob(f"{folder.name}x*"):
        several = _of_several(path)
        if several and several["gpu"] == folder.name:
            found[int(several["gpus"])] = _load_whole(
                path / SHARDED_FILE, SHARDED_RECORD, steps, sharded=sharded_hashes()
            )
    return dict(sorted(found.items()))


def _of_several(folder: Path) -> re.Match | None:
    """The name of a folder with a record of several GPUs, as records.gpus_folder() makes it."""
    has_record = (folder / SHARDED_FILE).is_file()
    return re.fullmatch(r"(?P<gpu>.+)x(?P<gpus>\d+)", folder.name) if has_record else None


def _baseline_is_current(baseline: dict | None, steps: Sequence[Step]) -> bool:
    """A gain over a step that has changed since says nothing."""
    now = {step.name: step for step in steps}
    return bool(
        baseline and baseline["step"] in now and not is_stale(baseline, now[baseline["step"]])
    )


def _stale(records: dict[str, dict], sources: Sequence[Step | Patch]) -> frozenset[str]:
    """The names of the sources that have changed since their record."""
    return frozenset(
        source.name
        for source in sources
        if source.name in records and _has_changed(records[source.name], source)
    )


def _has_changed(record: dict, source: Step | Patch) -> bool:
    if isinstance(source, Step):
        return is_stale(record, source)
    try:
        source.apply()
    except UsageError:  # the step has changed so much that the patch no longer applies
        return True
    return is_stale(record, read_step(source.write()))
