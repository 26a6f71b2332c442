"""What `make step`, `make bench`, `make profile`, `make pictures` and `make train` do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from verify.check import check_steps

from .bench.ncu import collect
from .bench.static_analysis import count_bank_conflicts, static_path, static_record
from .bench.timeline import timeline_patch, timeline_record
from .catalog import all_steps, find_step, require_well_formed, steps_to_run
from .errors import UsageError
from .operation import OPERATIONS
from .paths import BUILD_DIR, ROOT
from .problem import COUNTED
from .record_schema import EXPERIMENT_RECORD, RECORD
from .records import (
    HEADLINE_GPU,
    PICTURES_FILE,
    PROFILES_DIR,
    SHARDED_FILE,
    gpu_folder,
    gpus_folder,
    is_stale,
    read_record,
    write_atomically,
    write_record,
)
from .report import (
    decode_table,
    large_head_dim_table,
    lengths_table,
    sharded_tables,
    tables,
    terminal,
)
from .report.markdown import regenerate
from .report.plots import render_plots
from .report.record_set import RecordSet, load_record_set
from .runtime.cpu import CpuBackend
from .runtime.gpu import GpuBackend
from .step import Step


def run_steps(names: Sequence[str]) -> int:
    """Builds, checks and measures steps (without a GPU: shows their records); then the worklog."""
    steps = [find_step(name) for name in names]
    for name, step in zip(names, steps, strict=True):
        if step not in all_steps():
            raise UsageError(f"'{name}' is not in steps/: make check STEPS={name} checks it")
    right = [_run_step(step) for step in steps]
    if any(right):
        _report_regenerated()
    return 0 if all(right) else 1


def _run_step(step: Step) -> bool:
    """Checks a step; if it is correct, measures it or shows its record. Returns whether it is."""
    print(f"{step.name}: {step.title}\n\nchange: {step.change}\nwhy: {step.why}\n", flush=True)
    if not check_steps([step]):
        return False
    _print_bank_conflicts(count_bank_conflicts(step))
    obstacle = _why_not_timed(step)
    if obstacle is None:
        from .bench.headline import measure, step_candidate

        (path,) = measure([step_candidate(step)])
        print(f"\nMeasured just now, {path.relative_to(ROOT)}:")
        print(terminal.measured(read_record(path, RECORD)))
        return True
    path = PROFILES_DIR / HEADLINE_GPU / f"{step.name}.json"
    print(
        f"\nNot timed, as {obstacle}: the SIMT runtime executed the step, "
        "which says nothing about its speed."
    )
    measured = load_record_set(path.parent, ROOT).measured
    record = measured.records.get(step.name)
    if record is None:
        print(f"Not measured on the {HEADLINE_GPU.upper()}: no {path.relative_to(ROOT)}.")
    else:
        print(f"Recorded on the {HEADLINE_GPU.upper()}, {path.relative_to(ROOT)}:")
        if step.name in measured.stale:
            print("  stale: the source has changed since")
        print(terminal.measured(record))
    return True


def _why_not_timed(step: Step) -> str | None:
    """Why the step cannot be timed here; None where a GPU can run it."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return GpuBackend().refusal(step, step.operation.headline.specialization)


def _report_regenerated() -> None:
    """Regenerates tables, numbers and plots; a malformed step is no reason to fail here."""
    try:
        require_well_formed()
    except UsageError as error:
        print(f"warning: tables and plots stay as they are: {error}", file=sys.stderr)
        return
    for name in regenerate():
        print(f"regenerated {name}")


def bench(experiments: bool) -> int:
    """Measures all steps, or all experiments beside their steps, in one run for each ladder."""
    _require_gpu()
    from .bench.headline import experiment_candidates, measure, step_candidate

    candidates = (
        experiment_candidates()
        if experiments
        else [step_candidate(step) for step in steps_to_run()]
    )
    if not candidates:
        raise UsageError("no experiments/*.patch that applies")
    written = measure(candidates)
    for path in written:
        print(f"recorded {path.relative_to(ROOT)}")
    if not experiments:
        record_set = load_record_set(written[0].parent, ROOT)
        for operation in dict.fromkeys(candidate.step.operation for candidate in candidates):
            print(tables.results(record_set.of(operation)))
    _report_regenerated()
    return 0


def bench_grid() -> int:
    """Measures the steps of each ladder and their peers over its grid of shapes."""
    _require_gpu()
    from .bench.grid import measure_grid

    for operation in OPERATIONS.values():
        record_set = _after_recording(measure_grid(operation))
        print(tables.grid(record_set.of(operation)))
    _report_regenerated()
    return 0


def bench_distributions() -> int:
    """Measures the latest steps and their peers on many kinds of inputs."""
    _require_gpu()
    from .bench.distributions import measure_distributions

    print(tables.distributions(_after_recording(measure_distributions())))
    _report_regenerated()
    return 0


def bench_large_head_dim() -> int:
    """Measures each ladder's step for large head_dim and the peers there, and at head_dim 256."""
    _require_gpu()
    from .bench.large_head_dim import measure_large_head_dim

    for operation in OPERATIONS.values():
        record_set = _after_recording(measure_large_head_dim(operation))
        print(large_head_dim_table.large_head_dim(record_set, operation))
    _report_regenerated()
    return 0


def bench_decode() -> int:
    """Measures the newest step of the forward ladder and the peers where queries are few."""
    _require_gpu()
    from .bench.decode import measure_decode

    print(decode_table.decode(_after_recording(measure_decode())))
    _report_regenerated()
    return 0


def bench_lengths() -> int:
    """Measures the steps of each ladder that take lengths and their peers on packed sequences and
    with windows.
    """
    _require_gpu()
    from .bench.lengths import measure_lengths

    for operation in OPERATIONS.values():
        record_set = _after_recording(measure_lengths(operation))
        print(lengths_table.lengths(record_set, operation))
    _report_regenerated()
    return 0


def bench_latency() -> int:
    """Measures the latency of small calls of attention() and of the peers."""
    _require_gpu()
    from .bench.latency import measure_latency

    print(tables.latency(_after_recording(measure_latency())))
    _report_regenerated()
    return 0


def bench_training() -> int:
    """Measures what training takes on attention() and on the peers."""
    _require_gpu()
    from .bench.training_speed import measure_training_speed

    print(tables.training_speed(_after_recording(measure_training_speed())))
    _report_regenerated()
    return 0


def pictures(names: Sequence[str]) -> int:
    """Records what heads look at and what attention() errs there.

    Without a GPU, or of other steps than attention() takes, it goes into build/pictures/ instead.
    """
    from .bench.pictures import chosen_steps, measure_pictures, record_pictures

    on_gpu = torch.cuda.is_available()
    backend = GpuBackend() if on_gpu else CpuBackend()
    steps = chosen_steps(backend, names)
    if on_gpu and steps == chosen_steps(backend, []):
        print(tables.pictures(_after_recording(record_pictures(backend, steps))))
        _report_regenerated()
        return 0
    device = torch.cuda.get_device_name() if on_gpu else "SIMT runtime"
    folder = BUILD_DIR / "pictures"
    write_record(folder / PICTURES_FILE, {"device": device, **measure_pictures(backend, steps)})
    record_set = load_record_set(folder, ROOT)
    for name, svg in render_plots(record_set).items():
        write_atomically(folder / name, svg)
        print(f"drew {(folder / name).relative_to(ROOT)}")
    obstacle = "attention() takes other steps here" if on_gpu else "there is no CUDA device"
    print(f"{tables.pictures(record_set)}\n\nNothing is recorded in profiles/, as {obstacle}.")
    return 0


def train() -> int:
    """Trains a GPT on attention() and on torch's; without a GPU a tiny one, for some steps."""
    from .bench.train import TINY_PLAN, measure_training, try_training
    from .bench.trainer import require_agreement

    if torch.cuda.is_available():
        record_set = _after_recording(measure_training())
        print(terminal.training(record_set.training.record))
        _report_regenerated()
        return 0
    losses = try_training()
    print(f"{terminal.losses(losses)}\n\nNothing is recorded, as there is no CUDA device.")
    require_agreement(TINY_PLAN, losses)
    return 0


def bench_sharded(gpus: int) -> int:
    """Measures attention over several GPUs of this host, by a process for each under torchrun."""
    _require_gpu()
    if not 2 <= gpus <= torch.cuda.device_count():
        raise UsageError(
            f"GPUS={gpus}: give a number of GPUs from 2 to {torch.cuda.device_count()}, "
            "those that are here"
        )
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus))
    # The largest cells fill a GPU of 80 GB, where blocks that cannot grow leave gaps.
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    command = [sys.executable, "-m", *launcher, "-m", "common.bench.sharded"]
    ended = subprocess.run(command, env=environment)
    if ended.returncode:
        return 1
    device = torch.cuda.get_device_name()
    path = PROFILES_DIR / gpus_folder(device, gpus) / SHARDED_FILE
    print(f"recorded {path.relative_to(ROOT)}")
    print(sharded_tables.sharded(load_record_set(PROFILES_DIR / gpu_folder(device), ROOT)))
    _report_regenerated()
    return 0


def _after_recording(path: Path) -> RecordSet:
    """The record set with a new record, which it names."""
    print(f"recorded {path.relative_to(ROOT)}")
    return load_record_set(path.parent, ROOT)


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise UsageError("nothing can be timed: there is no CUDA device")


def profile(names: Sequence[str]) -> int:
    """Records what can be known of steps or experiments without a GPU.

    With one, also ncu's counters and, for a step that has a patch for it, the timeline.
    """
    for step in [find_step(name) for name in names]:
        _profile(step)
    _report_regenerated()
    return 0


def _profile(step: Step) -> None:
    record = static_record(step)
    print(f"{step.name}: {step.title}\n\n{terminal.compiled(record)}")
    _print_bank_conflicts(record["banks"])
    _write(static_path(step), record)
    if torch.cuda.is_available():
        _add_counters(step)
        if step in all_steps() and timeline_patch(step).is_file():
            _write(_gpu_folder() / "timelines" / f"{step.name}.json", timeline_record(step))
    else:
        print("No counters of Nsight Compute and no timeline, as there is no CUDA device.")


def _add_counters(step: Step) -> None:
    """Adds ncu's counters to what was measured here. Raises UsageError where nothing was."""
    path, form, remedy = _gpu_folder() / f"{step.name}.json", RECORD, f"make step N={step.name}"
    if step not in all_steps():
        path = path.parent / "experiments" / path.name
        form, remedy = EXPERIMENT_RECORD, "make bench EXPERIMENTS=1"
    record = read_record(path, form)
    if record is None or is_stale(record, step):
        raise UsageError(f"{step.name} has no record of its present source: {remedy}")
    print(f"{step.name}: profiling", flush=True)
    counters = collect(step)
    if isinstance(counters, str):
        print(f"warning: Nsight Compute's counters are {counters}", file=sys.stderr)
        if not isinstance(record["counters"], str):
            return  # the counters of a run that was permitted are kept
    _write(path, record | {"counters": counters})


def _gpu_folder() -> Path:
    return PROFILES_DIR / gpu_folder(torch.cuda.get_device_name())


def _write(path: Path, record: dict) -> None:
    write_record(path, record)
    print(f"recorded {path.relative_to(ROOT)}")


def _print_bank_conflicts(places: list[dict]) -> None:
    problem = f"{COUNTED.shape.seq_q} queries and {COUNTED.shape.seq_k} keys"
    print(f"\nShared memory, counted by the SIMT runtime on {problem}:\n")
    print(terminal.bank_conflicts(places), flush=True)
