"""What is known of a step without a GPU: its record profiles/static/vNN.json.

    compiled    for the architecture of the headline GPU: resources of each kernel, as ptxas reports
                them, and its instructions, as common/runtime/sass.py counts them
    banks       accesses to shared memory that the SIMT runtime counted (simt/banks.h), an entry
                for each place in the source
    shape       of the problem they were counted on

The specialization is that of the headline problem.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path

from verify.case import Case

from ..catalog import all_steps
from ..errors import UsageError
from ..patch import EXPERIMENTS_DIR
from ..paths import ROOT
from ..problem import COUNTED
from ..record_schema import STATIC_RECORD
from ..records import PROFILES_DIR, SCHEMA, STATIC, is_stale, read_replaced
from ..runtime.build import (
    build_cubin,
    cubin_flags,
    headline_arch,
    nvcc,
    parse_resources,
    toolkit_version,
)
from ..runtime.cpu import CpuBackend, SimtError
from ..runtime.sass import count_instructions
from ..step import Step
from .device_state import NOT_COLLECTED


def static_record(step: Step) -> dict:
    """The record of a step or an experiment.

    What is missing for want of a tool is named on stderr. Raises UsageError where a compiler
    refuses the step or where it does not run.
    """
    return {
        "schema": SCHEMA,
        "step": step.name,
        "title": step.title,
        "source": _source(step).relative_to(ROOT).as_posix(),
        "code_sha256": step.code_sha256,
        "shape": COUNTED.as_record(),
        "compiled": _compiled(step),
        "banks": count_bank_conflicts(step),
    }


def static_path(step: Step) -> Path:
    """Where the record of a step or an experiment belongs."""
    return PROFILES_DIR / STATIC / f"{step.name}.json"


def count_bank_conflicts(step: Step) -> list[dict]:
    """The record's banks. Raises UsageError where the step does not run."""
    case = Case.of("headline", COUNTED, step.operation)  # seeded by its name
    try:
        accesses = CpuBackend().count_shared_accesses(step, *case.make("cpu"), **case.arguments)
    except SimtError as error:
        raise UsageError(str(error).splitlines()[0]) from None
    lines = step.path.read_text(encoding="utf-8").splitlines()
    return [
        {
            "operation": access.operation,
            "code": called(access.operation, lines[access.line - 1]),
            "accesses": access.accesses,
            "ideal": access.ideal,
            "wavefronts": access.wavefronts,
        }
        for access in accesses
    ]


def called(operation: str, line: str) -> str:
    """The call of an operation in a source line. Line numbers would change with any comment."""
    code = line.partition("//")[0].strip()
    start = code.find(operation)
    depth = 0
    for end in range(max(start, 0), len(code)):
        depth += (code[end] == "(") - (code[end] == ")")
        if code[end] == ")" and not depth:
            return code[start : end + 1]
    return f"{code[max(start, 0) :]} …"  # it goes on in the next line


def _source(step: Step) -> Path:
    """The step's file or the experiment's patch. Raises UsageError for anything else."""
    if step in all_steps():
        return step.path
    patch = EXPERIMENTS_DIR / f"{step.name}.patch"
    if not patch.is_file():
        raise UsageError(f"{step.name} is neither in steps/ nor in experiments/")
    return patch


def _compiled(step: Step) -> dict | str:
    """Without nvcc: that of an earlier record of the same source, else "not collected"."""
    try:
        nvcc()
    except UsageError as reason:
        _warn("registers and instructions", reason)
        before = read_replaced(static_path(step), STATIC_RECORD)
        return before["compiled"] if before and not is_stale(before, step) else NOT_COLLECTED
    spec, arch = COUNTED.specialization, headline_arch(step)
    build = build_cubin(step, spec, arch)
    resources = parse_resources(build.log)
    smem_bytes = {
        kernel.name.decode(): kernel.smem_bytes
        for kernel in CpuBackend().descriptor(step, spec).kernels
        if kernel.name
    }
    try:
        counts = count_instructions(build.path)
        sass = {name: counts[name] for name in smem_bytes}
    except UsageError as reason:
        _warn("instructions", reason)
        sass = NOT_COLLECTED
    return {
        "compile": ["nvcc", *cubin_flags(spec, arch)],
        "toolkit": toolkit_version(),
        "arch": arch,
        "resources": {
            name: asdict(replace(resources[name], dynamic_smem=size))
            for name, size in smem_bytes.items()
        },
        "sass": sass,
    }


def _warn(what: str, reason: UsageError) -> None:
    print(f"warning: {what} were {NOT_COLLECTED}: {reason}", file=sys.stderr)
