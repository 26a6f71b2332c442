"""Runs steps on every case and compares them with the float64 oracle.

    python verify/check.py                            all steps
    python verify/check.py steps/v03 v04 --backend cpu --cases ragged,one_hot
    python verify/check.py verify/mutants/v04_rescale_dropped.patch

Prints one line per case and one per step; exits 1 if a step fails, 2 if it was asked for something
that does not exist.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.interpreter import require_package, require_python

if __name__ == "__main__":
    require_python(__file__)
try:
    import torch
    from tqdm import tqdm
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    require_package(error, __file__)

from common.catalog import find_step, steps_to_run
from common.cli import Parser, guarded
from common.errors import NotEnoughMemoryError, UsageError
from common.operation import Operation
from common.problem import Specialization
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from common.step import Step
from verify.accuracy import MEASURED, Expected, Measure, compare, expect, repeated
from verify.case import Case
from verify.cases import all_cases, find_cases
from verify.inputs import Inputs

BACKENDS = ("auto", "gpu", "cpu")
# Besides the backends' numbers of multiprocessors: one block that computes all work tiles, or
# blocks that compute few, some of them one less than others.
OTHER_MULTIPROCESSORS = (1, 5)
# step, case, shape (batch x heads/kv_heads x seq_q x seq_k x head_dim/v_head_dim), dtype
PLACE = "{:5} {:22} {:21} {:11}"


def line(place: Sequence[str], measures: Sequence[object], verdict: str) -> str:
    """A line of the report; a measure is an error and what is allowed."""
    return "  ".join([PLACE.format(*place), *(f"{measure!s:15}" for measure in measures), verdict])


def heading(operation: Operation) -> str:
    first, *others = MEASURED[operation]
    place = ("step", "case", "b x h/kv x q x k x d", "dtype")
    return line(place, [f"{first}/allowed", *others], "verdict")


@dataclass(frozen=True)
class Runs:
    """The backends that a step runs a case with, once each; all have one name.

    A persistent step, which launches as many blocks as fit the multiprocessors, runs with one of
    other_grids, too, which the case's name decides: what it computes must not depend on the number
    of its blocks. The last bits may, where the step's file says so: such a step runs with
    same_grid, if there is one, in place of the second of always, whose grid is another.
    """

    always: tuple[Backend, ...]
    other_grids: tuple[Backend, ...] = ()
    same_grid: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The one that decides what can run."""
        return self.always[0]

    def of(self, step: Step, case: Case) -> tuple[Backend, ...]:
        if not self.other_grids:
            return self.always
        kernels = self.backend.descriptor(step, case.specialization).kernels
        if not any(kernel.blocks_per_sm for kernel in kernels):
            return self.always
        other = self.other_grids[crc32(case.name.encode()) % len(self.other_grids)]
        if step.by_multiprocessors and self.same_grid:
            return self.always[0], self.same_grid, other
        return *self.always, other


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case. errors: what is wrong besides the measures, as lines to print."""

    step: Step
    case: Case
    measures: tuple[Measure, ...] = ()
    errors: tuple[str, ...] = ()
    skipped: str | None = None  # the reason, if it was not run
    refused: bool = False  # as the case allows
    num_runs: int = 0  # that were compared

    @property
    def passed(self) -> bool:
        return (
            not self.skipped
            and not self.errors
            and all(measure.passed for measure in self.measures)
        )

    @property
    def verdict(self) -> str:
        if self.skipped:
            return f"skipped: {self.skipped}"
        if self.refused:
            return "pass: refused, as it may"
        return "pass" if self.passed else "FAIL"

    def __str__(self) -> str:
        dtype = self.case.specialization.dtype + (" causal" if self.case.causal else "")
        measures = self.measures or [""] * len(MEASURED[self.step.operation])
        place = (self.step.name, self.case.name, str(self.case.shape), dtype)
        first = line(place, measures, self.verdict)
        rest = ["    " + line for error in self.errors for line in error.splitlines()]
        return "\n".join([first, *rest])


class Prepared:
    """A case's inputs, and what is expected of them, computed when it is asked for."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self._case = case
        self.inputs = case.make(device, seed)

    @cached_property
    def expected(self) -> Expected:
        return expect(self._case, *self.inputs)


# A few are kept: tests check a step and its mutants on the same case, one after another.
_prepare_once = lru_cache(maxsize=4)(Prepared)


def check_case(step: Step, case: Case, runs: Sequence[Backend], seed: int = 0) -> CaseResult:
    """Runs the step on the case once with each backend of runs, on poisoned outputs.

    The first run is compared with the oracle, the others must agree with it: bit by bit but for the
    outputs that the step's file names. Where it says that bits depend on the number of
    multiprocessors, a run with another number is compared with the oracle, too. All runs are on one
    device. What does not fit into its memory is skipped.
    """
    try:
        device = runs[0].device
        prepare = _prepare_once if device.type == "cpu" else Prepared
        prepared = prepare(case, device, seed)
        results = launch_all(step, case, runs, prepared.inputs)
    except (NotEnoughMemoryError, torch.OutOfMemoryError) as reason:
        return CaseResult(step, case, skipped=str(reason).splitlines()[0])
    except UsageError as refusal:  # of these tensors
        if case.may_refuse:
            return CaseResult(step, case, refused=True)
        return CaseResult(step, case, errors=(str(refusal),))
    except RuntimeError as error:  # the SIMT runtime's report; a GPU that a kernel has brought down
        return CaseResult(step, case, errors=(str(error),))
    (outputs, errors), *others = results
    expected = prepared.expected
    measures, mismatches = compare(case, expected, outputs)
    errors += mismatches
    for backend, (others_outputs, others_errors) in zip(runs[1:], others, strict=True):
        errors += [error for error in others_errors if error not in errors]
        if step.by_multiprocessors and backend.multiprocessors != runs[0].multiprocessors:
            errors += compare(case, expected, others_outputs)[1]
            continue
        for operand, first, again in zip(
            step.operation.outputs, outputs, others_outputs, strict=True
        ):
            name = operand.name
            allowance = expected.reordered[name] if name in step.unordered else None
            errors += repeated(name, first, again, allowance)
    return CaseResult(step, case, measures, tuple(errors), num_runs=len(results))


def launch_all(
    step: Step, case: Case, runs: Sequence[Backend], inputs: Inputs
) -> list[tuple[list[torch.Tensor], list[str]]]:
    """launch() with each backend: on the CPU side by side, as some have one block."""
    if runs[0].name == "gpu":
        return [launch(step, case, backend, inputs) for backend in runs]
    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(lambda backend: launch(step, case, backend, inputs), runs))


def launch(
    step: Step, case: Case, backend: Backend, inputs: Inputs
) -> tuple[list[torch.Tensor], list[str]]:
    """The outputs, contiguous, and a list of errors: writes where a layout leaves gaps."""
    made = case.make_outputs(backend.device)
    arguments = case.arguments_on(backend.device)
    backend.launch(step, *inputs, *(view for _, view in made), **arguments)
    outputs, errors = [], []
    for operand, (storage, view) in zip(step.operation.outputs, made, strict=True):
        outputs.append(view.contiguous().clone())
        view.fill_(torch.nan)
        if written := (~storage.isnan()).sum().item():
            errors.append(f"{written} elements between the rows of {operand.name} were written")
    return outputs, errors


def make_runs(
    backend_name: str, seed: int, sanitize: bool, time_limit_s: int | None = None
) -> list[Runs]:
    """The runs of a check on each backend of that name, the preferred first.

    On the GPU the same launch twice; on the CPU two seeds, so that the threads run in two different
    orders, and persistent blocks on 2 multiprocessors, on 3 and on 1 or 5. Either way the second
    result is that of a program's second call, which must not depend on what the first one leaves
    behind. Raises UsageError where the backend is not available.
    """
    choices: list[Runs] = []
    prefer_gpu = backend_name == "auto" and torch.cuda.is_available() and not sanitize
    if backend_name == "gpu" or prefer_gpu:
        gpu, *others = (GpuBackend(poison=True) for _ in range(1 + len(OTHER_MULTIPROCESSORS)))
        choices.append(Runs((gpu, gpu), _with_other_multiprocessors(others)))
    if backend_name != "gpu":
        first, second, *others = (
            CpuBackend(seed + i, sanitize, time_limit_s)
            for i in range(2 + len(OTHER_MULTIPROCESSORS))
        )
        second.calls = 2
        same_grid = CpuBackend(seed + 2, sanitize, time_limit_s)
        same_grid.calls = 2
        choices.append(Runs((first, second), _with_other_multiprocessors(others), same_grid))
    return choices


def _with_other_multiprocessors(backends: Sequence[Backend]) -> tuple[Backend, ...]:
    for backend, multiprocessors in zip(backends, OTHER_MULTIPROCESSORS, strict=True):
        backend.multiprocessors = multiprocessors
    return tuple(backends)


def can_run(step: Step, cases: Sequence[Case], backend: Backend) -> bool:
    """Whether the backend can run the step in any of the cases, or promises to."""
    return any(
        backend.refusal(step, case.specialization) is None
        or is_promised(step, case.specialization, backend)
        for case in cases
    )


def is_promised(step: Step, spec: Specialization, backend: Backend) -> bool:
    """Whether the step's `limits:` line says that it runs spec on the backend's device.

    The SIMT runtime stands for the architecture that the line names. A later one may lack something
    that the step needs: v04's line says that it needs more shared memory than some have.
    """
    if step.limits.refusal(spec):
        return False
    if backend.device.type == "cpu":
        return True
    major, minor = torch.cuda.get_device_capability(backend.device)
    return step.limits.arch.rstrip("a") == f"sm_{major}{minor}"


def not_run(step: Step, case: Case, backend: Backend) -> CaseResult | None:
    """The result of a case that is not run, or None: skipped, or failed where limits promise it."""
    if case.gpu_only and backend.name == "cpu":
        return CaseResult(step, case, skipped="too large for the SIMT runtime")
    reason = backend.refusal(step, case.specialization)
    if reason is None:
        return None
    if is_promised(step, case.specialization, backend):
        error = f"cannot be launched on the architecture that its limits name: it {reason}"
        return CaseResult(step, case, errors=(error,))
    return CaseResult(step, case, skipped=reason)


def build_all(plan: Sequence[tuple[Step, Sequence[Case], Runs]]) -> None:
    """Compiles what the plan needs, in parallel. Raises UsageError for what does not compile.

    The GPU backend compiles before it can say whether shared memory suffices, so only the limits
    that the step itself states are looked at here.
    """
    jobs = {
        (step, case.specialization): runs.backend
        for step, cases, runs in plan
        if can_run(step, cases, runs.backend)
        for case in cases
        if not step.limits.refusal(case.specialization)
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = [pool.submit(backend.build, step, spec) for (step, spec), backend in jobs.items()]
        try:
            # disable=None: no progress bar where stderr is not a terminal.
            progress = tqdm(as_completed(builds), "compile", len(builds), leave=False, disable=None)
            for build in progress:
                build.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step's cases."""

    step: Step
    backend: str
    cases: tuple[CaseResult, ...]
    seconds: float

    @property
    def num_skipped(self) -> int:
        return sum(case.skipped is not None for case in self.cases)

    @property
    def num_passed(self) -> int:
        return sum(case.passed for case in self.cases)

    @property
    def num_failed(self) -> int:
        return len(self.cases) - self.num_passed - self.num_skipped

    @property
    def num_runs(self) -> int:
        return sum(case.num_runs for case in self.cases)

    @property
    def passed(self) -> bool:
        return self.num_passed > 0 and not self.num_failed

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL" if self.num_failed else "FAIL: nothing ran"
        counts = f"{self.num_passed} passed, {self.num_failed} failed, {self.num_skipped} skipped"
        return f"{self.step.name} on {self.backend}: {counts}: {verdict}"


def check_step(step: Step, cases: Sequence[Case], runs: Runs, seed: int = 0) -> StepResult:
    """Checks the step on the cases; prints their lines as they come, then one for the step."""
    start = time.monotonic()
    results = []
    for case in cases:
        result = not_run(step, case, runs.backend)
        if result is None:
            result = check_case(step, case, runs.of(step, case), seed)
        results.append(result)
        print(result, flush=True)
    seconds = time.monotonic() - start
    result = StepResult(step, runs.backend.name, tuple(results), seconds)
    print(result, flush=True)
    return result


def summary(results: Sequence[StepResult], seconds: float) -> str:
    """A table of the steps, and a verdict. seconds: of all of it, compilation included."""
    line = "{:22} {:7} {:>6} {:>6} {:>7} {:>6} {:>7}"
    lines = [line.format("step", "backend", "passed", "failed", "skipped", "runs", "seconds")]
    for r in results:
        counts = (r.num_passed, r.num_failed, r.num_skipped, r.num_runs, f"{r.seconds:.1f}")
        lines.append(line.format(r.step.name, r.backend, *counts))
    passed, failed, skipped, runs = (
        sum(getattr(r, f"num_{what}") for r in results)
        for what in ("passed", "failed", "skipped", "runs")
    )
    lines.append(line.format("all", "", passed, failed, skipped, runs, f"{seconds:.1f}"))
    failures = [r.step.name for r in results if not r.passed]
    verdict = f"FAIL: {', '.join(failures)}" if failures else "pass"
    cases = f"{passed + failed} case{'' if passed + failed == 1 else 's'}"
    lines.append(f"{cases} in {runs} runs (thread orders, grids): {verdict}")
    return "\n".join(lines)


def check_steps(
    steps: Sequence[Step],
    backend_name: str = "auto",
    seed: int = 0,
    case_names: Sequence[str] | None = None,
    sanitize: bool = False,
    time_limit_s: int | None = None,
) -> bool:
    """Builds and checks steps, one line per case; whether all pass, each in at least one case.

    backend_name is "auto" (the GPU where there is one that can run the step), "gpu" or "cpu";
    case_names None means all cases that the backend has time for; sanitize builds for the CPU with
    AddressSanitizer and UndefinedBehaviorSanitizer, blind to data races; time_limit_s is that of a
    launch on the CPU. Raises UsageError for an unknown case, a missing compiler or a missing
    backend.
    """
    start = time.monotonic()
    plan = []
    choices = make_runs(backend_name, seed, sanitize, time_limit_s)
    for step in steps:
        of_step = {"operation": step.operation, "seed": seed, "lengths": step.takes_lengths}
        own = all_cases(**of_step) if case_names is None else find_cases(case_names, **of_step)
        runs = next((runs for runs in choices if can_run(step, own, runs.backend)), choices[0])
        all_here = case_names is not None or runs.backend.name == "gpu"
        plan.append((step, [case for case in own if all_here or not case.gpu_only], runs))
    build_all(plan)
    results = []
    for step, cases, runs in plan:
        if not results or results[-1].step.operation != step.operation:
            print(heading(step.operation))
        results.append(check_step(step, cases, runs, seed))
    print(f"\n{summary(results, time.monotonic() - start)}", flush=True)
    return all(result.passed for result in results)


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="check.py", description="Check steps against the float64 oracle.")
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help="v03, steps/v03, a .cu or .patch file"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and thread order")
    parser.add_argument("--cases", metavar="NAME[,NAME...]", help="default: all; or spaces between")
    parser.add_argument(
        "--sanitize", action="store_true", help="CPU build with ASan and UBSan, blind to data races"
    )
    parser.add_argument(
        "--time-limit", type=int, metavar="SECONDS", help="of a launch on the CPU; default: by size"
    )
    options = parser.parse_args(arguments)
    if options.time_limit is not None and options.time_limit < 1:
        raise UsageError(f"--time-limit takes 1 or more seconds, not {options.time_limit}")
    if options.sanitize and options.backend == "gpu":
        raise UsageError("--sanitize is for the CPU build; on a GPU run compute-sanitizer")
    torch.set_num_threads(1)  # the oracle's matrices are small: threads wait more than they compute
    good = check_steps(
        [find_step(name) for name in options.steps] or steps_to_run(),
        options.backend,
        options.seed,
        re.findall(r"[^\s,]+", options.cases) if options.cases is not None else None,
        options.sanitize,
        options.time_limit,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
