"""What was recorded on one GPU and without one, beside steps and experiments as they are now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..bench.ncu import readable
from ..bench.sass import OPCODES
from ..catalog import all_steps
from ..errors import UsageError
from ..patch import Patch, read_patch
from ..record_schema import NUMBER, STATIC_RECORD, TIMELINE_RECORD
from ..records import (
    GRID_PREVIOUS,
    STATIC,
    host_hashes,
    is_stale,
    read_grid,
    read_latency,
    read_records,
)
from ..step import Step, read_step

FA3 = "flash_attention_3"
BANK_COUNTS = ("accesses", "ideal", "wavefronts")


@dataclass(frozen=True)
class Profile:
    """The records in one folder of profiles/, of steps and of experiments, and the static ones."""

    folder: Path
    steps: tuple[Step, ...]
    patches: tuple[Patch, ...]
    records: dict[str, dict]
    experiments: dict[str, dict]
    stale: frozenset[str]  # steps and experiments whose source has changed since their record
    grid: dict | None  # the record of many shapes
    grid_previous: dict | None  # that of the run before, of the same sources
    grid_stale: frozenset[str]  # steps
    static: dict[str, dict]  # of steps and experiments, in the order of the worklog
    static_stale: frozenset[str]
    timelines: dict[str, dict]  # of steps
    timelines_stale: frozenset[str]
    latency: dict | None  # the record of small calls
    latency_stale: bool

    @property
    def newest(self) -> dict | None:
        """The step record of the latest run; of several, the highest step's."""
        by_run = [(record["run"], name) for name, record in self.records.items()]
        return self.records[max(by_run)[1]] if by_run else None


def load_profile(folder: Path, root: Path) -> Profile:
    """The profile in a folder, which need not exist, with the experiments in root."""
    steps = all_steps()
    patches = tuple(read_patch(path) for path in sorted((root / "experiments").glob("*.patch")))
    records = {
        name: _without_changed_baseline(record, steps)
        for name, record in _of(steps, read_records(folder)).items()
    }
    experiments = _of(patches, read_records(folder / "experiments"))
    timeline_patches = [
        read_patch(path)
        for path in sorted((root / "common" / "bench" / "timelines").glob("*.patch"))
    ]
    timelines = _of(timeline_patches, read_records(folder / "timelines", TIMELINE_RECORD))
    grid, previous = read_grid(folder), read_grid(folder, GRID_PREVIOUS)
    if not (grid and previous and previous["sources"] == grid["sources"]):
        previous = None
    latency = read_latency(folder)
    static = read_records(root / "profiles" / STATIC, STATIC_RECORD)
    order = [
        name
        for step in steps
        for name in (step.name, *(patch.name for patch in patches if patch.step == step))
    ]
    return Profile(
        folder,
        steps,
        patches,
        records,
        experiments,
        _stale(records, steps) | _stale(experiments, patches),
        grid,
        previous,
        _stale(grid["sources"], steps) if grid else frozenset(),
        {name: static[name] for name in order if name in static},
        _stale(static, (*steps, *patches)),
        timelines,
        _stale(timelines, timeline_patches),
        latency,
        bool(latency and (_stale(latency["sources"], steps) or latency["host"] != host_hashes())),
    )


def _of(sources: Sequence[Step | Patch], records: dict[str, dict]) -> dict[str, dict]:
    """The records of what there still is."""
    names = {source.name for source in sources}
    return {name: record for name, record in records.items() if name in names}


def _without_changed_baseline(record: dict, steps: tuple[Step, ...]) -> dict:
    """A gain over a step that has changed since says nothing."""
    baseline = record["baseline"]
    now = {step.name: step for step in steps}
    if baseline and (baseline["step"] not in now or is_stale(baseline, now[baseline["step"]])):
        return record | {"baseline": None}
    return record


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
        return is_stale(record, read_step(source.write()))
    except UsageError:  # the step has changed so much that the patch no longer applies
        return True


def figures(record: dict) -> dict:
    """Numbers that follow from a record. Shares and gains are ratios of times of one run."""
    kernels = record["resources"].values()
    baseline, fa3 = record["baseline"], record["peers"].get(FA3, {})
    return {
        "gain": baseline and baseline["time_ms"] / record["time_ms"],
        "fa3_share": fa3["time_ms"] / record["time_ms"] if "time_ms" in fa3 else None,
        "registers": max(kernel["registers"] for kernel in kernels),
        "smem_bytes": max(smem_bytes(kernel) for kernel in kernels),
        "spill_bytes": sum(spill_bytes(kernel) for kernel in kernels),
        "stack_bytes": max(kernel["stack_bytes"] for kernel in kernels),
        "error": record["errors"]["o"],
        "lse_error": record["errors"]["lse"],
        "torch_error": record["torch_errors"]["o"],
        "peak_memory_gb": record["peak_memory_bytes"] / 1e9,
        "least_gb": record["least_bytes"] / 1e9,
        "flops_per_byte": record["flops"] / record["least_bytes"],
        "ncu": record["counters"]
        if isinstance(record["counters"], str)  # "not collected"
        else readable(record["counters"]),
        "memory_gb": {
            str(entry["seq"]): None if entry["bytes"] is None else entry["bytes"] / 1e9
            for entry in record["memory"]
        },
    }


def smem_bytes(kernel: dict) -> int:
    return kernel["static_smem"] + kernel["dynamic_smem"]


def spill_bytes(kernel: dict) -> int:
    return kernel["spill_store_bytes"] + kernel["spill_load_bytes"]


def grid_ratios(grid: dict, step: str) -> dict[str, float]:
    """By cell: the step's rate over that of the fastest peer, where there are both."""
    ratios = {}
    for cell in grid["cells"]:
        rates = {name: rate for name, rate in cell["tflops"].items() if isinstance(rate, NUMBER)}
        peers = [rate for name, rate in rates.items() if name not in grid["sources"]]
        if step in rates and peers:
            ratios[cell["name"]] = rates[step] / max(peers)
    return ratios


def static_figures(record: dict) -> dict:
    """Numbers that follow from a static record: instructions by kernel, accesses by operation."""
    compiled = record["compiled"]
    sass = compiled if isinstance(compiled, str) else compiled["sass"]  # "not collected"
    banks: dict[str, dict[str, int]] = {}
    for place in record["banks"]:
        total = banks.setdefault(place["operation"], dict.fromkeys(BANK_COUNTS, 0))
        for key in BANK_COUNTS:
            total[key] += place[key]
    for total in banks.values():
        total["conflicts"] = total["wavefronts"] - total["ideal"]
    return {
        "sass": sass
        if isinstance(sass, str)
        else {
            kernel: {"instructions": sum(counts.values()), **dict.fromkeys(OPCODES, 0), **counts}
            for kernel, counts in sass.items()
        },
        "banks": banks,
    }
