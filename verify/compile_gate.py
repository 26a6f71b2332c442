"""Compiles every step with nvcc: no local memory, no tensor-core instructions that ptxas has
serialized, given wrong operands, or put exponentials behind that could run beside them, and no
copies for which it moves coordinates lane by lane."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product

from common.catalog import all_steps
from common.errors import UsageError
from common.metrics import spill_bytes
from common.problem import COUNTED, Specialization
from common.runtime.build import Build, build_cubin, headline_arch, parse_resources
from common.runtime.sass import nvdisasm
from common.step import Step
from common.text import markdown
from verify.lane_by_lane import copies_lane_by_lane
from verify.late_exponentials import late_exponentials
from verify.machine_code import machine_code
from verify.wgmma_operands import mixed_operands

HEAD_DIMS = (64, 128, 256, 512, 1024)
# Where v's may differ, of q and k, and of v. Had b13 K in registers at 256 and 64, ptxas would mix
# it up with P, and at 192 and 256 there are not enough of them.
# v15 has tiles of 80 keys at 384, and at 256 and 224 in a block that is alone, and of 96 in
# clusters at 384 and 128.
OWN_HEAD_DIMS = ((192, 128), (576, 512), (256, 64), (192, 256), (384, 384), (384, 128), (256, 224))
# The steps that have local memory, and where: a thread of v03 keeps a query row of O, 256 floats in
# 255 registers, and one of b01 up to four rows; the thread of b10 that loads has 24 registers, and
# no room for its place while it finds out which work is next; in v15 a block that sends to three
# others keeps a few numbers there, and so does one whose slice has five panels of Q.
LOCAL_MEMORY = {
    ("v03", 256),
    ("b01", 64),
    ("b01", 128),
    ("b01", 256),
    ("b10", 64),
    ("b10", 128),
    ("v15", 1024),
    ("v15", 576),
}
# And those whose exponentials wait for a product that they do not need. They are no slower so: they
# wait for memory, and release V before the softmax.
LATE_EXPONENTIALS = {
    *product(("v13", "v16", "v18"), HEAD_DIMS),
    *(("v19", head_dim) for head_dim in HEAD_DIMS if head_dim > 128),
}
# And those whose copies take coordinates lane by lane: a whole warp in v16's loop did not help.
LANE_BY_LANE = {("v16", head_dim) for head_dim in HEAD_DIMS}


def compile_all(quarter: int | None = None) -> int:
    """Prints what the kernels take for Hopper and, of one specialization, for the lowest GPU.

    With a quarter, 0 to 3, in that one of the specializations, as quarter_of() says. Returns 1 if
    one of them has local memory where it must not, or if ptxas serialized its instructions, mixed
    up their operands, made exponentials wait or copies take coordinates lane by lane. Without
    nvdisasm the last three are not known.
    """
    has_nvdisasm = _has_nvdisasm()
    jobs = [
        (step, spec, arch)
        for step in all_steps()
        for arch in dict.fromkeys((step.limits.arch, headline_arch(step)))
        for spec in (
            quarter_of(_specializations(step), quarter)
            if arch == headline_arch(step)
            else [COUNTED.specialization]
        )
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = list(pool.map(lambda job: _compile(*job, has_nvdisasm), jobs))
    rows, mistakes = [], []
    for (step, spec, arch), (build, mixed) in zip(jobs, builds, strict=True):
        name = f"{step.name} {arch} {spec}"
        mistakes += [f"{name}: {line}" for line in build.log.splitlines() if "serialized" in line]
        mistakes += [f"{name}: {line}" for line in mixed]
        for kernel, r in parse_resources(build.log).items():
            spills = spill_bytes(asdict(r))
            numbers = (r.registers, r.static_smem, r.stack_bytes, spills)
            rows.append([step.name, kernel, arch, str(spec), *map(str, numbers)])
            if (r.stack_bytes or spills) and (step.name, spec.head_dim) not in LOCAL_MEMORY:
                mistakes.append(f"{name}: local memory in {kernel}")
    columns = ["step", "kernel", "arch", "specialization"]
    columns += [">registers", ">static smem", ">stack bytes", ">spill bytes"]
    print(markdown(columns, rows))
    for mistake in mistakes:
        print(f"error: {mistake}", file=sys.stderr)
    return 1 if mistakes else 0


def _has_nvdisasm() -> bool:
    try:
        return bool(nvdisasm())
    except UsageError as reason:
        told = "neither operands of wgmma, late exponentials nor copies lane by lane"
        print(f"warning: {told} were looked for: {reason}", file=sys.stderr)
        return False


def _compile(
    step: Step, spec: Specialization, arch: str, has_nvdisasm: bool
) -> tuple[Build, list[str]]:
    """The build, and what is wrong with its machine code."""
    build = build_cubin(step, spec, arch)
    if not (arch.endswith("a") and has_nvdisasm):
        return build, []
    kernels = machine_code(build.path)
    where = (step.name, spec.head_dim)
    late = [] if where in LATE_EXPONENTIALS else late_exponentials(kernels)
    lanes = [] if where in LANE_BY_LANE else copies_lane_by_lane(kernels)
    return build, [*mixed_operands(kernels), *late, *lanes]


def quarter_of(specs: list[Specialization], quarter: int | None) -> list[Specialization]:
    """One of four quarters; all where quarter is None. Each has every pair of head_dims, in one
    dtype of two, or in two of three, and with a mask or without one.
    """
    if quarter is None:
        return specs
    dims = list(dict.fromkeys((spec.head_dim, spec.v_head_dim) for spec in specs))
    dtypes = list(dict.fromkeys(spec.dtype for spec in specs))

    def number(spec: Specialization) -> int:
        pair = dims.index((spec.head_dim, spec.v_head_dim))
        return pair + 2 * dtypes.index(spec.dtype) + spec.causal

    return [spec for spec in specs if number(spec) % 4 == quarter]


def _specializations(step: Step) -> list[Specialization]:
    head_dims = (*zip(HEAD_DIMS, HEAD_DIMS, strict=True), *OWN_HEAD_DIMS)
    specs = (
        Specialization(head_dim, dtype, causal, v_head_dim)
        for (head_dim, v_head_dim), dtype, causal in product(
            head_dims, step.limits.dtypes, (False, True)
        )
    )
    return [spec for spec in specs if not step.limits.refusal(spec)]
