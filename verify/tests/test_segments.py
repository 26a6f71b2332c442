"""Tensors whose rows lie gigabytes apart: the SIMT runtime gets the rows and watches the gaps."""

from __future__ import annotations

import resource
import sys

import numpy as np
import pytest
import torch

from common.runtime import cpu
from common.runtime.cpu import CpuBackend, SimtError
from common.runtime.segments import LARGE_GAP, POISON, SegmentedTensor
from common.step import Step
from verify.cases import all_cases, find_cases
from verify.layouts import FAR, expanded, far, packed, padded, transposed
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

BF16 = torch.bfloat16
FAR_BYTES = FAR * BF16.itemsize
MANY_ROWS = 65  # FAR / 64 elements apart


def place(layout, shape: tuple[int, ...], dtype=BF16) -> torch.Tensor:
    """All numbers random, or where some are one in memory, all the same."""
    _, view = layout(shape, dtype=dtype, device="cpu")
    return view.fill_(3) if layout is expanded else view.copy_(torch.randn(shape))


# ---- what a tensor occupies


@pytest.mark.parametrize("layout", [transposed, padded, packed, expanded])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_dense_tensors_are_one_segment(layout, dtype):
    t = place(layout, (2, 3, 5, 8), dtype)
    own = SegmentedTensor(t)
    span = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    assert own.segments.tolist() == [[0, span * dtype.itemsize]]
    own.copy_from(t)
    copy = torch.zeros_like(t, memory_format=torch.contiguous_format)
    own.copy_to(copy)
    assert torch.equal(copy, t)
    integers = torch.from_numpy(own.elements).view(dtype)
    assert torch.equal(integers.as_strided(t.shape, t.stride()), t)
    rows = len({t[i].data_ptr() for i in np.ndindex(t.shape[:-1])})
    assert (own.elements == POISON).sum() == span - 8 * rows


def test_rows_that_overlap_are_one_segment():
    storage = torch.randn(13)
    t = storage.as_strided((1, 2, 6, 8), (0, 0, 1, 1))
    own = SegmentedTensor(t)
    assert own.segments.tolist() == [[0, 13 * 4]]
    own.copy_from(t)
    assert torch.equal(torch.from_numpy(own.elements).view(torch.float32), storage)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_far_tensors_are_a_segment_each_index(axis):
    t = place(far(axis), (3, 3, 3, 8))
    own = SegmentedTensor(t)
    starts = [i * t.stride(axis) * 2 for i in range(3)]
    assert own.segments.tolist() == [[start, 9 * 8 * 2] for start in starts]
    assert own.segments[-1][0] == FAR_BYTES
    own.copy_from(t)
    assert not (own.elements == POISON).any()
    copy = torch.zeros_like(t, memory_format=torch.contiguous_format)
    own.copy_to(copy)
    assert torch.equal(copy, t)


def test_only_large_gaps_are_left_out():
    for gap, num_segments in ((LARGE_GAP, 1), (LARGE_GAP + 4, 2)):
        t = torch.zeros(gap // 4 + 16).as_strided((1, 1, 2, 8), (0, 0, gap // 4 + 8, 1))
        own = SegmentedTensor(t)
        assert len(own.segments) == num_segments
        assert own.segments.sum(axis=-1)[-1] == gap + 64


def test_axes_of_which_both_split_in_any_order():
    """Rows at 0, 1, 2, 3 times 2^30 elements: the heads' stride is the smaller one."""
    _, storage = far(2)((1, 1, 2, 8), dtype=BF16, device="cpu")
    t = storage.as_strided((1, 2, 2, 8), (0, 2**30, 2**31, 1))
    t.copy_(torch.randn(t.shape))
    own = SegmentedTensor(t)
    assert own.segments.tolist() == [[i * 2**31, 16] for i in range(4)]
    own.copy_from(t)
    expected = t.transpose(1, 2).contiguous().view(torch.int16).flatten()
    assert torch.equal(torch.from_numpy(own.elements), expected)


def test_written_gaps_are_counted_from_the_start():
    _, storage = far(2)((1, 1, 2, 16), dtype=BF16, device="cpu")
    t = storage.as_strided((1, 2, 2, 8), (0, 16, FAR - 64, 1))  # gaps of 8 between the heads
    own = SegmentedTensor(t)
    own.copy_from(t.fill_(0))
    assert own.elements.size == 2 * 24
    assert not own.written_gaps().size
    own.elements[[9, 24 + 15]] = 0
    assert own.written_gaps().tolist() == [9, FAR - 64 + 15]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_layouts_lie_alike_on_every_device(axis):
    """The same shapes and strides, although on a GPU the gaps are part of the storage."""
    shape, options = (2, 3, 5, 64), {"dtype": BF16}
    storage, view = far(axis)(shape, device="meta", **options)
    _, on_cpu = far(axis)(shape, device="cpu", **options)
    assert view.stride() == on_cpu.stride()
    last = sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    assert storage.numel() == last + 1
    assert on_cpu.isnan().all()


# ---- what a kernel may do with it

COPY = """
    for (int d = t; d < HEAD_DIM; d += blockDim.x)
        p.o[block * p.o_stride.row + d] = p.q[block * p.q_stride.row + d];
"""
# The second row of q and o begins FAR elements after the first, and ends the buffer.
FAULTS = (
    Fault(
        "read_gap",
        f"p.lse[0] = to_float(p.q[{FAR // 2}]);",
        rf"bounds read .* @: between the rows of q \({FAR_BYTES + 16} bytes\), at byte {FAR}$",
    ),
    Fault(
        "write_gap",
        f"if (t == 5) p.o[{FAR // 2}] = p.q[0];",
        rf"out-of-bounds write .*thread 5 @: between the rows of o .* at byte {FAR}$",
    ),
    Fault(
        "write_gap_of_input",
        f"const_cast<Element*>(p.q)[{FAR // 2}] = p.q[0];",
        rf"out-of-bounds write .* @: between the rows of q .* at byte {FAR}$",
    ),
    Fault(
        "write_far_input",
        f"const_cast<Element*>(p.q)[{FAR}ll] = p.q[0];",
        rf"write to an input .* @: at byte {FAR_BYTES} of q",
    ),
    Fault(
        "read_past_end",
        f"p.lse[0] = to_float(p.q[{FAR + 8}ll]);",
        rf"read .* @: past the end of q .*, at byte {FAR_BYTES + 16}$",
    ),
    Fault(
        "read_before_start",
        "p.lse[0] = to_float(p.q[INT32_MIN]);",
        rf"read .* @: {2**32} bytes before the start of q",
    ),
    # With an odd seed the first row ends within a page, with an even one the last begins within
    # one: what is written to the rest of that page shows after the kernel.
    Fault(
        "write_after_row",
        "p.o[8] = p.q[0];",
        "write in kernel test_kernel: between the rows of o; an even seed may find the line",
        1,
    ),
    Fault(
        "write_before_row",
        f"p.o[{FAR - 1}ll] = p.q[0];",
        "write in kernel test_kernel: between the rows of o; an odd seed may find the line",
    ),
)


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    return write_faults(tmp_path_factory.mktemp("faults"), FAULTS)


def far_rows(rows: int = 2) -> torch.Tensor:
    return place(far(2), (1, 1, rows, 8))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_gaps_are_watched(faults_step, fault):
    expect_report(faults_step, FAULTS, fault, q=far_rows(), o=far_rows())


def test_write_to_a_small_gap_beside_a_large_one(tmp_path):
    step = write_step(tmp_path, "small_gap", f"if (block == 0) p.o[{FAR + 9}ll] = p.q[0];")
    _, storage = far(2)((1, 1, 2, 24), dtype=BF16, device="cpu")
    o = storage.as_strided((1, 2, 2, 8), (0, 16, FAR, 1))
    with pytest.raises(SimtError, match=rf"1 elements .* rows of o .* first {FAR + 9} elements"):
        run(step, CpuBackend(), o.clone(), o=o)


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_outputs_far_apart_come_back(tmp_path, seed, sanitize):
    step = write_step(tmp_path, "copy", COPY)
    q, o = far_rows(MANY_ROWS), far_rows(MANY_ROWS)
    backend = CpuBackend(seed, sanitize)
    run(step, backend, q, o=o)
    assert torch.equal(o, q)
    backend.calls = 2  # poisons the output once more
    run(step, backend, q, o=o.zero_())
    assert torch.equal(o, q)


def test_gaps_take_no_memory(tmp_path, monkeypatch):
    """They take none in this process, in the request and in the program."""
    step = write_step(tmp_path, "copy", COPY)
    run(step, CpuBackend())
    unit = 1 if sys.platform == "darwin" else 1024

    def peaks() -> np.ndarray:
        who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return np.array([resource.getrusage(each).ru_maxrss * unit for each in who])

    requests = []
    run_program = cpu._run
    monkeypatch.setattr(cpu, "_run", lambda *args: requests.append(args[-1]) or run_program(*args))
    before = peaks()
    q, o = far_rows(MANY_ROWS), far_rows(MANY_ROWS)
    run(step, CpuBackend(), q, o=o)
    assert torch.equal(o, q)
    assert len(requests[0]) < 20_000
    assert (peaks() - before < 2**27).all()


def test_far_cases_are_further_apart_than_32_bits_count():
    cases = find_cases([case.name for case in all_cases() if case.name.startswith("far_")])
    assert cases
    for case in cases:
        assert not case.gpu_only
        for t in (*case.make("cpu"), *(view for _, view in case.make_outputs("cpu")[:1])):
            (axis,) = (i for i in range(3) if t.stride(i) * (t.shape[i] - 1) >= 2**32)
            assert t.shape[axis] > 1
