"""Runs steps on every case and compares them with the float64 oracle.

    python verify/check.py                            all steps
    python verify/check.py steps/v03 v04 --backend cpu --cases ragged,one_hot
    python verify/check.py verify/mutants/v04_rescale_dropped.patch

Prints one line a case; exits 1 if a step fails, 2 if it was asked for something that does not
exist.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

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
from common.runtime.backend import Backend
from common.runtime.cpu import CpuBackend
from common.runtime.gpu import GpuBackend
from common.step import Step
from verify.accuracy import Measure, compare, repeated
from verify.cases import CASES, Case, find_cases

BACKENDS = ("auto", "gpu", "cpu")
# step, case, shape (batch x heads/kv_heads x seq_q x seq_k x head_dim), dtype, error/allowance of
# each measure, verdict
LINE = "{:5} {:22} {:20} {:11}  {:15}  {:15}  {:15}  {:15}  {}"
HEADING = LINE.format(
    *("step", "case", "b x h/kv x q x k x d", "dtype"),
    *("o max/allowed", "o rms", "o bias", "lse max", "verdict"),
)


@dataclass(frozen=True)
class CaseResult:
    """What came of one case. problems holds what else is wrong than a measure: lines to print."""

    step: Step
    case: Case
    measures: tuple[Measure, ...] = ()
    problems: tuple[str, ...] = ()
    skipped: str | None = None  # why it was not run
    refused: bool = False  # as the case allows

    @property
    def passed(self) -> bool:
        return (
            not self.skipped
            and not self.problems
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
        measures = [str(measure) for measure in self.measures] or [""] * 4
        first = LINE.format(
            self.step.name, self.case.name, str(self.case.shape), dtype, *measures, self.verdict
        )
        rest = ["    " + line for problem in self.problems for line in problem.splitlines()]
        return "\n".join([first, *rest])


def check_case(step: Step, case: Case, runs: Sequence[Backend], seed: int = 0) -> CaseResult:
    """Runs the step on the case once with each backend of runs, on poisoned outputs.

    The first run is compared with the oracle, the others must agree with it bit by bit. All runs
    are on one device. What does not fit into its memory is skipped.
    """
    try:
        q, k, v = case.make(runs[0].device, seed)
        outputs = [run(step, case, backend, q, k, v) for backend in runs]
    except (NotEnoughMemoryError, torch.OutOfMemoryError) as reason:
        return CaseResult(step, case, skipped=str(reason).splitlines()[0])
    except UsageError as refusal:  # of these tensors
        if case.may_refuse:
            return CaseResult(step, case, refused=True)
        return CaseResult(step, case, problems=(str(refusal),))
    except RuntimeError as error:  # the SIMT runtime's report; a GPU that a kernel has brought down
        return CaseResult(step, case, problems=(str(error),))
    (o, lse, problems), *others = outputs
    measures, mismatches = compare(case, q, k, v, o, lse)
    problems += mismatches
    for again_o, again_lse, _ in others:
        problems += repeated("o", o, again_o) + repeated("lse", lse, again_lse)
    return CaseResult(step, case, measures, tuple(problems))


def run(
    step: Step, case: Case, backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
):
    """o (contiguous), lse and a list of problems: writes beside o where its layout leaves gaps."""
    storage, view = case.make_output(backend.device)
    lse = torch.full(q.shape[:3], torch.nan, device=backend.device)
    backend.launch(step, q, k, v, view, lse, **case.arguments)
    o = view.contiguous().clone()
    view.fill_(torch.nan)
    written = (~storage.isnan()).sum().item()
    return o, lse, [f"{written} elements between the rows of o were written"] if written else []


def make_runs(backend_name: str, seed: int, sanitize: bool) -> list[tuple[Backend, ...]]:
    """The runs of a check on each backend of that name, the preferred first.

    On the GPU the same launch twice; on the CPU two seeds, so that the threads run in two different
    orders. Raises UsageError where the backend is not to be had.
    """
    choices: list[tuple[Backend, ...]] = []
    prefer_gpu = backend_name == "auto" and torch.cuda.is_available() and not sanitize
    if backend_name == "gpu" or prefer_gpu:
        choices.append((GpuBackend(poison=True),) * 2)
    if backend_name != "gpu":
        choices.append((CpuBackend(seed, sanitize), CpuBackend(seed + 1, sanitize)))
    return choices


def can_run(step: Step, cases: Sequence[Case], backend: Backend) -> bool:
    """Whether the backend can run the step in any of the cases."""
    return any(backend.refusal(step, case.specialization) is None for case in cases)


def refusal(step: Step, case: Case, backend: Backend) -> str | None:
    """Why the case is skipped, or None."""
    if case.gpu_only and backend.name == "cpu":
        return "too large for the SIMT runtime"
    return backend.refusal(step, case.specialization)


def build_all(plan: Sequence[tuple[Step, Sequence[Case], tuple[Backend, ...]]]) -> None:
    """Compiles what the plan needs, in parallel. Raises UsageError for what does not compile.

    The GPU backend compiles before it can say whether shared memory suffices, so only the limits
    that the step itself states are looked at here.
    """
    jobs = {
        (step, case.specialization): runs[0]
        for step, cases, runs in plan
        if can_run(step, cases, runs[0])
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


def check_step(
    step: Step, cases: Sequence[Case], runs: Sequence[Backend], seed: int = 0
) -> list[CaseResult]:
    """Checks the step on the cases; prints their lines as they come, then one for the step."""
    results = []
    for case in cases:
        if reason := refusal(step, case, runs[0]):
            results.append(CaseResult(step, case, skipped=reason))
        else:
            results.append(check_case(step, case, runs, seed))
        print(results[-1], flush=True)
    skipped = sum(result.skipped is not None for result in results)
    passed = sum(result.passed for result in results)
    failed = len(results) - passed - skipped
    verdict = "FAIL: nothing ran" if not passed + failed else "FAIL" if failed else "pass"
    counts = f"{passed} passed, {failed} failed, {skipped} skipped"
    print(f"{step.name} on {runs[0].name}: {counts}: {verdict}", flush=True)
    return results


def check_steps(
    steps: Sequence[Step],
    backend_name: str = "auto",
    seed: int = 0,
    case_names: Sequence[str] | None = None,
    sanitize: bool = False,
) -> bool:
    """Builds and checks steps, prints a line a case; whether all pass, each in at least one case.

    backend_name is "auto" (the GPU where there is one that can run the step), "gpu" or "cpu";
    case_names None means all cases that the backend has time for; sanitize builds for the CPU with
    AddressSanitizer and UndefinedBehaviorSanitizer. Raises UsageError for an unknown case, a
    missing compiler or a missing backend.
    """
    cases = CASES if case_names is None else find_cases(case_names)
    plan = []
    choices = make_runs(backend_name, seed, sanitize)
    for step in steps:
        runs = next((runs for runs in choices if can_run(step, cases, runs[0])), choices[0])
        all_here = case_names is not None or runs[0].name == "gpu"
        plan.append((step, [case for case in cases if all_here or not case.gpu_only], runs))
    build_all(plan)
    print(HEADING)
    good = True
    for step, cases, runs in plan:
        results = check_step(step, cases, runs, seed)
        good &= any(result.passed for result in results)
        good &= all(result.passed or result.skipped is not None for result in results)
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="check.py", description="Check steps against the float64 oracle.")
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help="v03, steps/v03, a .cu or .patch file"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and thread order")
    parser.add_argument("--cases", metavar="NAME[,NAME...]", help="default: all")
    parser.add_argument("--sanitize", action="store_true", help="CPU build with ASan and UBSan")
    options = parser.parse_args(arguments)
    if options.sanitize and options.backend == "gpu":
        raise UsageError("--sanitize is for the CPU build; on a GPU run compute-sanitizer")
    good = check_steps(
        [find_step(name) for name in options.steps] or steps_to_run(),
        options.backend,
        options.seed,
        options.cases.split(",") if options.cases is not None else None,
        options.sanitize,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
