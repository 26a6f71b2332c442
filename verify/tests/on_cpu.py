"""What the checker says of a step in a case, on the CPU."""

from __future__ import annotations

from common.step import Step
from verify.case import Case
from verify.check import CaseResult, check_case, make_runs


def on_cpu(step: Step, case: Case) -> CaseResult:
    """The result of all thread orders and grids, without sanitizers."""
    (runs,) = make_runs("cpu", seed=0, sanitize=False)
    return check_case(step, case, runs.of(step, case))
