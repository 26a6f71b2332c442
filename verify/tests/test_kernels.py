"""Kernels that are launched by themselves, with workspaces that live on between their launches; and
steps whose products are launched for one part of the keys after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from common.catalog import all_steps, find_step
from common.errors import UsageError
from common.operation import BACKWARD
from common.paths import ROOT
from common.problem import Shape, Specialization
from common.runtime import gpu_kernels
from common.runtime.backend import run, specialization
from common.runtime.cpu import CpuBackend, SimtError
from common.runtime.gpu_kernels import KernelsGpuBackend
from common.runtime.kernels import KernelsBackend
from common.runtime.launch import params_type, read_plan
from common.runtime.pack import simt_encoder
from common.step import Step, read_step
from verify.accuracy import compare, expect, repeated
from verify.case import Case
from verify.gradients import rows_of_all_sizes
from verify.tests.fake_gpu import Gpu
from verify.tests.small_kernels import write_step
from verify.tests.test_dependent_launch import THREADS, expected, make_q
from verify.tests.test_gpu_loading import LIMIT, Cubin

BF16, FP16 = torch.bfloat16, torch.float16
PASSES_ON = read_step(ROOT / "verify" / "instructions" / "dependent_launch.cu")
IN_PARTS = [step for step in all_steps() if step.parts]
SPECS = [
    Specialization(head_dim, dtype, causal=False)
    for head_dim, dtype in ((8, "bf16"), (64, "fp16"), (72, "bf16"), (128, "fp16"))
]


@pytest.fixture(
    scope="module",
    params=[
        lambda: CpuBackend(),
        lambda: CpuBackend(seed=1, sanitize=True),
        pytest.param(lambda: KernelsGpuBackend(poison=True), marks=pytest.mark.gpu),
    ],
    ids=["cpu", "sanitized", "gpu"],
)
def backend(request) -> KernelsBackend:
    return request.param()


def test_numbers_pass_through_kernels_by_themselves(backend) -> None:
    """And through one of them twice: it changes the workspaces that it is given."""
    q = make_q(backend, 40, seed=0)
    spec = specialization([q], causal=False)
    lse = torch.full((40, THREADS), torch.nan, device=backend.device)
    o = torch.full_like(q, torch.nan)
    workspaces = ()
    for name in ("first", "second", "second", "third"):
        call = backend.prepare_kernel(PASSES_ON, spec, name)
        given, workspaces = workspaces, call((q, q, q, o, lse), (1.0,), workspaces)
        assert len(workspaces) == 2
        assert not given or all(a is b for a, b in zip(given, workspaces, strict=True))
        assert lse.isnan().all() == (name != "third")
        assert o.isnan().all()
    assert torch.equal(lse.cpu(), expected(q))


def test_an_unknown_kernel_is_one_clear_line(backend) -> None:
    spec = Specialization(8, "bf16", causal=False)
    message = "^dependent_launch has no kernel fourth: it has first, second, third$"
    with pytest.raises(UsageError, match=message):
        backend.prepare_kernel(PASSES_ON, spec, "fourth")


def test_a_step_that_is_refused(backend) -> None:
    with pytest.raises(UsageError, match="dependent_launch takes head_dim 8 to 8"):
        backend.prepare_kernel(PASSES_ON, Specialization(16, "bf16", causal=False), "first")


@pytest.mark.parametrize("is_kept", [False, True])
def test_races_in_a_workspace_are_found(tmp_path, is_kept) -> None:
    step = write_step(tmp_path, "racing", "if (p.softmax_scale > 0.0f) scores[0] = block;")
    q, lse = torch.zeros(1, 1, 2, 8), torch.zeros(1)
    call = CpuBackend().prepare_kernel(step, specialization([q], causal=False), "test_kernel")
    tensors = (q, q, q, torch.zeros_like(q), lse)
    workspaces = call(tensors, (0.0,), ()) if is_kept else ()
    with pytest.raises(SimtError, match=r"data race between blocks .* of workspace\[0\]"):
        call(tensors, (1.0,), workspaces)


# ---- on a fake driver


def test_no_kernel_starts_early(monkeypatch) -> None:
    fake = Gpu(monkeypatch, KernelsGpuBackend)
    cubin = Cubin(fake, monkeypatch)
    cubin.symbols["kernels_start_early"] = b"\1\0\0\0"
    monkeypatch.setattr(gpu_kernels, "driver_encoder", simt_encoder)
    monkeypatch.setattr(fake.backend, "_smem_limit", LIMIT + 1)  # of which one asks for all
    spec = Specialization(8, "bf16", causal=False)
    fake.backend._modules[PASSES_ON, spec] = cubin.load()
    q = torch.zeros(1, 1, 9, 8, dtype=BF16)
    for name in ("first", "second", "third"):
        fake.backend.prepare_kernel(PASSES_ON, spec, name)([q] * 5, (0.5,), ())
    launches = fake.driver.launches
    assert [launch.function or 0 for launch in launches] == [0, 1, 2]
    assert [launch.attributes for launch in launches] == 3 * [()]
    assert [launch.smem_bytes for launch in launches] == [0, LIMIT, LIMIT + 1]
    assert {launch.grid for launch in launches} == {(10, 1, 1)}  # in clusters of 2
    assert {launch.block for launch in launches} == {(64, 1, 1)}


@pytest.mark.parametrize("causal", [False, True])
def test_workspaces_with_axes_are_those_that_live_on(monkeypatch, causal) -> None:
    """In the other one, which b10 has without a mask, the blocks of one launch hand over."""
    fake = Gpu(monkeypatch, KernelsGpuBackend)
    fake.driver.params = params_type(BACKWARD)
    monkeypatch.setattr(gpu_kernels, "driver_encoder", simt_encoder)
    fake.backend.multiprocessors -= 3
    step, heads = find_step("b10"), 130
    q = torch.zeros(1, heads, 9, 64, dtype=BF16)
    tensors = (q, q, q, q, torch.zeros(1, heads, 9), q, q, q, q)
    spec = specialization([q], causal)
    workspaces = ()
    for name in (step.parts.begin, step.parts.products, step.parts.products, step.parts.finish):
        call = fake.backend.prepare_kernel(step, spec, name)
        workspaces = call(tensors, (0.5,), workspaces)
    launches = fake.driver.launches
    assert [launch.function or 0 for launch in launches] == [0, 1, 1, 2]
    assert [launch.grid[0] for launch in launches] == [heads, 129, 129, heads]
    lasting = [t.data_ptr() for t in workspaces]
    assert len(lasting) == 2
    for launch in launches:
        *first, last = launch.params.workspace
        assert first == lasting
        assert (last == 0) == causal
        assert last not in lasting
    other_heads = (q, q[:, :3], *tensors[2:])
    assert call(other_heads, (0.5,), workspaces) is None


# ---- steps in parts


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("step", IN_PARTS, ids=lambda step: step.name)
def test_what_a_step_in_parts_promises(step: Step, spec: Specialization) -> None:
    """Its kernels are those three; the mask changes nothing in the workspaces that live on, and
    neither do the keys.
    """
    plans = [
        read_plan(step, CpuBackend().descriptor(step, replace(spec, causal=causal)), 132)
        for causal in (False, True)
    ]
    begin, _, finish = plans[0].kernels
    names = [step.parts.begin, step.parts.products, step.parts.finish]
    lasting = []
    for plan in plans:
        assert [kernel.name for kernel in plan.kernels] == names
        assert (plan.kernels[0], plan.kernels[2]) == (begin, finish)
        lasting.append([workspace for workspace in plan.workspaces if workspace.axes])
        assert len(lasting[-1]) > step.parts.sums
    assert lasting[0] == lasting[1]
    few_keys, many_keys = (1, 2, 2, 300, 1), (1, 2, 2, 300, 700)
    for workspace in lasting[0]:
        assert workspace.num_bytes(few_keys) == workspace.num_bytes(many_keys)


Ends = Sequence[tuple[int, bool]]  # of parts: behind which key, and whether there is a mask


def by_parts(
    backend: KernelsBackend,
    step: Step,
    inputs: Sequence[torch.Tensor],
    scale: float,
    ends: Ends,
    copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv."""
    q, k, v, *rows = inputs
    dq, dk, dv = (torch.full_like(t, torch.nan) for t in (q, k, v))

    def launch(name: str, causal: bool, keys: slice, workspaces: Sequence[torch.Tensor]):
        call = backend.prepare_kernel(step, specialization([q], causal), name)
        k_part, v_part, dk_part, dv_part = (t[:, :, keys] for t in (k, v, dk, dv))
        return call((q, k_part, v_part, *rows, dq, dk_part, dv_part), (scale,), workspaces)

    workspaces = launch(step.parts.begin, False, slice(1), ())
    start = 0
    for end, causal in ends:
        assert all(t.isnan().all() for t in (dq, dk[:, :, start:], dv[:, :, start:]))
        its = [t if i == step.parts.sums else copy(t) for i, t in enumerate(workspaces)]
        launch(step.parts.products, causal, slice(start, end), its)
        start = end
    assert dq.isnan().all()
    launch(step.parts.finish, False, slice(1), workspaces)
    return dq, dk, dv


@pytest.fixture(
    scope="module",
    params=[
        lambda: CpuBackend(),
        lambda: CpuBackend(seed=1),  # which has a multiprocessor more
        pytest.param(lambda: KernelsGpuBackend(poison=True), marks=pytest.mark.gpu),
    ],
    ids=["2 SMs", "3 SMs", "gpu"],
)
def of_steps(request) -> KernelsBackend:
    return request.param()


def of_shape(name: str, shape: Shape, dtype: torch.dtype = BF16, **options) -> Case:
    return Case(name, shape, dtype, operation=BACKWARD, **options)


ALL, MASKED_END = ((100, False), (356, False), (500, False)), ((310, False), (450, True))
CASES = [
    (of_shape("parts", Shape(1, 2, 2, 140, 500, 64)), ALL),
    (of_shape("parts_fp16", Shape(1, 2, 1, 140, 500, 64), FP16, dout=rows_of_all_sizes), ALL),
    (of_shape("parts_causal", Shape(1, 4, 2, 140, 450, 64), causal=True), MASKED_END),
    (of_shape("parts_causal_128", Shape(2, 1, 1, 140, 450, 128), FP16, causal=True), MASKED_END),
    # More works than a GPU has multiprocessors.
    (
        of_shape("parts_gpu", Shape(1, 64, 64, 1000, 2000, 64), gpu_only=True),
        ((900, False), (1500, False), (2000, False)),
    ),
    (
        of_shape("parts_gpu_128", Shape(2, 32, 16, 1000, 2500, 128), causal=True, gpu_only=True),
        ((1500, False), (2500, True)),
    ),
]
EACH_CASE = pytest.mark.parametrize(("case", "ends"), CASES, ids=[case.name for case, _ in CASES])
EACH_STEP = pytest.mark.parametrize("step", IN_PARTS, ids=lambda step: step.name)


def inputs_of(case: Case, backend: KernelsBackend) -> tuple[torch.Tensor, ...]:
    if case.gpu_only and backend.name == "cpu":
        pytest.skip("too large for the SIMT runtime")
    return case.make(backend.device)


@EACH_CASE
@EACH_STEP
def test_parts_are_as_exact_as_a_whole_call(of_steps, step, case, ends) -> None:
    inputs = inputs_of(case, of_steps)
    outputs = by_parts(of_steps, step, inputs, case.scale, ends)
    measures, errors = compare(case, expect(case, *inputs), outputs)
    assert errors + [f"{each.name} {each}" for each in measures if not each.passed] == []


@EACH_CASE
@EACH_STEP
def test_one_part_is_a_whole_call(of_steps, step, case, ends) -> None:
    """dk and dv have its bits; dq, which blocks add to in any order, all but the last ones."""
    inputs = inputs_of(case, of_steps)
    whole = run(of_steps, step, *inputs, **case.arguments)
    outputs = by_parts(of_steps, step, inputs, case.scale, [(case.shape.seq_k, case.causal)])
    allowances = {"dq": expect(case, *inputs).reordered["dq"]}
    for operand, a, b in zip(BACKWARD.outputs, whole, outputs, strict=True):
        assert not repeated(operand.name, a, b, allowances.get(operand.name))


@EACH_STEP
def test_each_part_needs_a_counter_of_its_own(of_steps, step) -> None:
    """Without, blocks find that others have taken all works: here of a part with a mask, in which
    none waits for another one to hand over.
    """
    case, ends = CASES[2 if of_steps.name == "cpu" else 5]
    assert ends[-1][1]
    inputs = case.make(of_steps.device)
    *_, dv = by_parts(of_steps, step, inputs, case.scale, ends, copy=lambda t: t)
    assert dv.isnan().any()
