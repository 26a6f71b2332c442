"""The commands behind `make step`, `make bench` and .ci/run: python -m common COMMAND."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch

from common.build import build_cubin, parse_resources
from common.command_line import Parser, guarded
from common.counters import collect
from common.errors import UsageError
from common.gpu import GpuBackend
from common.profile import load_profile
from common.record import PROFILES_DIR, gpu_folder, is_stale, read_records, write_record
from common.step import ROOT, Specialization, Step, all_steps, find_step
from common.tables import markdown, results, summary
from common.worklog import HEADLINE_GPU, regenerate
from verify.cases import find_cases
from verify.check import check_steps

HOPPER = "sm_90"
# From the register tiles on, a spill or an array in local memory is a mistake.
FIRST_WITHOUT_LOCAL_MEMORY = "v04"


def run_step(name: str) -> int:
    """Builds, checks and measures one step, or without a GPU shows its record; then the worklog."""
    step = find_step(name)
    if step not in all_steps():
        raise UsageError(f"'{name}' is not in steps/: make check STEPS={name} checks it")
    print(f"{step.name}: {step.title}\n\nchange: {step.change}\nwhy: {step.why}\n", flush=True)
    if not check_steps([step]):
        return 1
    obstacle = _why_not_timed(step)
    if obstacle is None:
        from common.measure import measure, step_candidate

        (path,) = measure([step_candidate(step)])
        print(f"\nMeasured just now, {path.relative_to(ROOT)}:")
    else:
        path = PROFILES_DIR / HEADLINE_GPU / f"{step.name}.json"
        print(
            f"\nNot timed, as {obstacle}: the SIMT runtime executed the step, "
            "which says nothing of its speed."
        )
        print(f"Recorded on the {HEADLINE_GPU.upper()}, {path.relative_to(ROOT)}:")
    recorded = load_profile(path.parent, ROOT)
    record = recorded.records.get(step.name)
    if record is None:
        print("  not measured")
    else:
        if step.name in recorded.stale:
            print("  stale: the source has changed since")
        print(summary(record))
    _report_regenerated()
    return 0


def _why_not_timed(step: Step) -> str | None:
    """None where there is a GPU that runs the step."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return GpuBackend().refusal(step, find_cases(["headline"])[0].specialization)


def _report_regenerated() -> None:
    for name in regenerate():
        print(f"regenerated {name}")


def bench(experiments: bool) -> int:
    """Measures all steps, or all experiments beside their steps, in one run."""
    if not torch.cuda.is_available():
        raise UsageError("nothing can be timed: there is no CUDA device")
    from common.measure import experiment_candidates, measure, step_candidate

    candidates = (
        experiment_candidates() if experiments else [step_candidate(step) for step in all_steps()]
    )
    if not candidates:
        raise UsageError("no experiments/*.patch that applies")
    written = measure(candidates)
    for path in written:
        print(f"recorded {path.relative_to(ROOT)}")
    if not experiments:
        print(results(load_profile(written[0].parent, ROOT)))
    _report_regenerated()
    return 0


def profile(name: str) -> int:
    """Adds ncu's counters to the record of one step."""
    step = find_step(name)
    if not torch.cuda.is_available():
        raise UsageError("nothing can be profiled: there is no CUDA device")
    path = PROFILES_DIR / gpu_folder(torch.cuda.get_device_name()) / f"{step.name}.json"
    record = read_records(path.parent).get(step.name)
    if record is None or is_stale(record, step):
        raise UsageError(f"{step.name} has no record of its present source: make step N={name}")
    print(f"{step.name}: profiling", flush=True)
    write_record(path, {**record, "counters": collect(step)})
    print(f"recorded {path.relative_to(ROOT)}")
    _report_regenerated()
    return 0


def compile_all() -> int:
    """Compiles every step for its lowest architecture and Hopper; fails on local memory."""
    jobs = [
        (step, Specialization(head_dim, dtype, causal), arch)
        for step in all_steps()
        for arch in dict.fromkeys((step.limits.arch, HOPPER))
        if not (step.limits.arch.endswith("a") and arch == HOPPER)
        for head_dim, dtype, causal in product((64, 128, 256), ("bf16", "fp32"), (False, True))
        if arch == HOPPER or (head_dim, dtype, causal) == (128, "bf16", False)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = list(pool.map(lambda job: build_cubin(*job), jobs))
    rows, offenders = [], []
    for (step, spec, arch), build in zip(jobs, builds, strict=True):
        for kernel, r in parse_resources(build.log).items():
            spills = r.spill_store_bytes + r.spill_load_bytes
            row = (
                step.name,
                kernel,
                arch,
                spec,
                r.registers,
                r.static_smem,
                r.stack_bytes,
                spills,
            )
            rows.append([str(cell) for cell in row])
            if step.name >= FIRST_WITHOUT_LOCAL_MEMORY and (r.stack_bytes or spills):
                offenders.append(f"{step.name} {kernel} {arch} {spec}")
    columns = [
        "step",
        "kernel",
        "arch",
        "specialization",
        ">registers",
        ">static smem",
        ">stack bytes",
        ">spill bytes",
    ]
    print(markdown(columns, rows))
    for offender in offenders:
        print(f"error: local memory in {offender}", file=sys.stderr)
    return 1 if offenders else 0


def main(arguments: list[str] | None = None) -> int:
    return guarded(lambda: _main(arguments))


def _main(arguments: list[str] | None) -> int:
    parser = Parser(prog="python -m common")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("step", help="build, check and measure one step").add_argument("name")
    commands.add_parser("profile", help="ncu's counters of one step").add_argument("name")
    commands.add_parser("bench", help="measure all steps").add_argument(
        "--experiments", action="store_true"
    )
    commands.add_parser("compile", help="compile all steps with nvcc and report their resources")
    options = parser.parse_args(arguments)
    if options.command == "step":
        return run_step(options.name)
    if options.command == "bench":
        return bench(options.experiments)
    if options.command == "profile":
        return profile(options.name)
    return compile_all()


if __name__ == "__main__":
    sys.exit(main())
