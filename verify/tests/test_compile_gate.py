"""The compile gate, on what ptxas would say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from common.catalog import all_steps
from common.errors import UsageError
from common.problem import Specialization
from common.runtime.build import Build, headline_arch
from common.step import Step
from verify import compile_gate
from verify.compile_gate import compile_all

LOG = """ptxas info    : Compiling entry function 'attention_forward' for 'sm_90'
    {stack} bytes stack frame, 0 bytes spill stores, {spills} bytes spill loads
ptxas info    : Used 99 registers, used 1 barriers
"""
OPERANDS = "wgmma at 0f80 reads R184, written by F2FP and LDSM"
LATE = "54 exponentials wait at 6080 for a product under way, and 10 do not"
LANES = "the copy at 0d50 moves 5 registers of each lane to uniform ones"
Job = tuple[Step, Specialization, str]
SERIALIZED = "ptxas info    : wgmma.mma_async instructions are serialized\n"


@pytest.fixture
def gate(monkeypatch):
    """Runs the gate; ptxas says the log for a step at a head_dim, and nothing bad otherwise.

    Of the step named by mixed, it finds the operands of wgmma mixed up, of that named by late, late
    exponentials, and of that named by lanes copies lane by lane.
    """

    monkeypatch.setattr(compile_gate, "nvdisasm", lambda: "nvdisasm")

    def run(
        name: str = "",
        head_dim: int = 0,
        log: str = "",
        mixed: str = "",
        late: str = "",
        lanes: str = "",
        quarter: int | None = None,
    ) -> tuple[int, list[Job]]:
        compiled = []

        def build(step, spec, arch) -> Build:
            assert not step.limits.refusal(spec)
            compiled.append((step, spec, arch))
            said = log if (step.name, spec.head_dim) == (name, head_dim) else ""
            return Build(Path(f"{step.name}.cubin"), said or LOG.format(stack=0, spills=0))

        def finding(name: str, mistake: str) -> Callable[[str], list[str]]:
            return lambda code: [f"kernel: {mistake}"] if code == name else []

        monkeypatch.setattr(compile_gate, "build_cubin", build)
        monkeypatch.setattr(compile_gate, "machine_code", lambda cubin: cubin.stem)
        monkeypatch.setattr(compile_gate, "mixed_operands", finding(mixed, OPERANDS))
        monkeypatch.setattr(compile_gate, "late_exponentials", finding(late, LATE))
        monkeypatch.setattr(compile_gate, "copies_lane_by_lane", finding(lanes, LANES))
        return compile_all(quarter), compiled

    return run


def test_every_step_is_compiled_in_its_own_dtypes(gate):
    status, compiled = gate()
    assert status == 0
    for step in all_steps():
        specs = [spec for compiled_step, spec, _ in compiled if compiled_step == step]
        assert {spec.dtype for spec in specs} == set(step.limits.dtypes)
        dims = {(dim, dim) for dim in compile_gate.HEAD_DIMS}
        if step.limits.v_may_differ:
            dims |= {*compile_gate.OWN_HEAD_DIMS}
        dims = {pair for pair in dims if max(pair) <= step.limits.highest_head_dim}
        assert {(spec.head_dim, spec.v_head_dim) for spec in specs} == dims
        assert {spec.causal for spec in specs} == {False, True}
        assert step.limits.arch in {
            arch for compiled_step, _, arch in compiled if compiled_step == step
        }


def test_four_quarters_are_all(gate):
    quarters = [gate(quarter=quarter)[1] for quarter in range(4)]
    _, compiled = gate()
    assert set().union(*quarters) == set(compiled)
    for one, other in combinations(quarters, 2):
        both = set(one) & set(other)
        assert all(arch != headline_arch(step) for step, _, arch in both)
    for quarter in quarters:
        assert len(quarter) == len(set(quarter))
        assert head_dims(quarter) == head_dims(compiled)


def head_dims(compiled: list[Job]) -> set[tuple]:
    return {(step, arch, spec.head_dim, spec.v_head_dim) for step, spec, arch in compiled}


@pytest.mark.parametrize(
    ("name", "head_dim", "log", "status"),
    [
        ("v04", 128, LOG.format(stack=8, spills=0), 1),
        ("v04", 64, LOG.format(stack=0, spills=4), 1),
        ("v04", 256, LOG.format(stack=8, spills=4), 1),
        ("v04", 256, LOG.format(stack=0, spills=0) + SERIALIZED, 1),
        ("v03", 128, LOG.format(stack=8, spills=4), 1),
        ("v03", 256, LOG.format(stack=8, spills=4), 0),  # known
        ("v03", 256, LOG.format(stack=8, spills=4) + SERIALIZED, 1),
    ],
)
def test_local_memory_and_serialized_instructions_fail(gate, capsys, name, head_dim, log, status):
    assert gate(name, head_dim, log)[0] == status
    told = capsys.readouterr().err.splitlines()
    assert bool(told) == bool(status)
    assert all(line.startswith(f"error: {name} sm_") for line in told)


def test_mixed_operands_fail(gate, capsys):
    assert gate(mixed="b07")[0] == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"error: b07 sm_90a d64_bf16: kernel: {OPERANDS}"
    assert all(line.endswith(OPERANDS) for line in told)


def test_late_exponentials_fail(gate, capsys):
    assert gate(late="v12")[0] == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"error: v12 sm_90a d64_bf16: kernel: {LATE}"
    assert all(line.endswith(LATE) for line in told)


def test_known_late_exponentials_pass(gate, capsys):
    assert ("v19", 256) in compile_gate.LATE_EXPONENTIALS
    assert gate(late="v19")[0] == 1
    told = capsys.readouterr().err
    assert "d64_" in told
    assert "d256_" not in told


def test_copies_lane_by_lane_fail(gate, capsys):
    assert gate(lanes="v14")[0] == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"error: v14 sm_90a d64_bf16: kernel: {LANES}"
    assert all(line.endswith(LANES) for line in told)
    assert gate(lanes="v16")[0] == 0


def test_without_nvdisasm_machine_code_is_not_looked_at(gate, capsys, monkeypatch):
    def nvdisasm() -> str:
        raise UsageError("no nvdisasm")

    monkeypatch.setattr(compile_gate, "nvdisasm", nvdisasm)
    assert gate(mixed="b07", late="v12", lanes="v14")[0] == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told == (
        "warning: neither operands of wgmma, late exponentials nor copies lane by lane were looked"
        " for: no nvdisasm"
    )
