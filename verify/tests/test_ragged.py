"""Steps that take lengths: boxes whose rows end where a copy says, and what else such steps get."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from common.catalog import find_step
from common.lengths import UNLIMITED, Lengths
from common.paths import ROOT
from common.runtime.backend import specialization
from common.runtime.cpu import CpuBackend, SimtError
from common.runtime.launch import LengthsParams, params_bytes, params_type, read_plan
from common.runtime.pack import Packer, simt_encoder
from common.step import Step, read_step
from verify.layouts import contiguous, expanded, expanded_rows, packed, padded, transposed
from verify.tests.small_kernels import Fault, expect_report, run, write_faults, write_step

BF16 = torch.bfloat16

# ---- the instructions copy what a GPU copies

BATCH, HEADS, HEAD_DIM = 2, 3, 72
ROWS, COLUMNS = 12, 64  # of a box
LONG = 20  # rows of q
LAYOUTS = {  # of q and o
    "contiguous": (contiguous, contiguous),
    "transposed": (transposed, transposed),
    "packed": (packed, padded),
    "padded": (padded, transposed),
    "expanded": (expanded, contiguous),
    "expanded_rows": (expanded_rows, packed),
}


def make_places(rows: int) -> torch.Tensor:
    """d, x, head, batch and end: boxes up to the end, across it, behind it, and outside of the
    tensor in other ways. None has a row before the tensor that is in the map.
    """
    ends = sorted({0, 1, 7, ROWS, rows - 1, rows} & set(range(rows + 1)))
    places = []
    for n, end in enumerate(ends):
        firsts = {0, 1, max(end - ROWS, 0), max(end - 5, 0), max(end - 1, 0), end, end + 3, 30000}
        for m, first in enumerate(sorted(firsts)):
            place = (n + m) % HEADS, (n + m) % BATCH, end
            places += [(d, first + rows - end, *place) for d in (0, 8, HEAD_DIM - 8)]
    inside = 0, rows, 1, 1, 0  # but for its x
    for axis, outside in enumerate([(-8, HEAD_DIM), (-1, 30000), (-1, HEADS), (-1, BATCH)]):
        for at in outside:
            places.append((*(at if i == axis else inside[i] for i in range(4)), rows))
    places += [(0, rows - 1, 0, 0, -1), (0, 1, 0, 0, rows + 1), (0, 0, 0, 0, rows + 1)]
    # Before the map's first row, which is the tensor's where the end is: zeros, then rows of it.
    places += [(0, -1, 1, 1, rows), (0, 1 - ROWS, 1, 1, rows), (0, -2000, 1, 1, rows)]
    return torch.tensor(places, dtype=torch.int16)


def indices(shape: tuple[int, ...], place: np.ndarray):
    """Which elements of a box [ROWS, COLUMNS] are in the tensor; the indices of all of them."""
    rows = shape[2]
    row, col = np.indices((ROWS, COLUMNS))
    d, x, head, batch, end = (
        place[0] + col,
        place[1] + row,
        *(place[i] + 0 * row for i in (2, 3, 4)),
    )
    in_map = zip((batch, head, x, d, end), (*shape, rows + 1), strict=True)
    inside = np.logical_and.reduce([(i >= 0) & (i < size) for i, size in in_map])
    return inside, (batch, head, x + end - rows, d)


def integers(t: torch.Tensor) -> np.ndarray:
    return t.cpu().contiguous().view(torch.int16).numpy()


@pytest.mark.parametrize("rows", [LONG, 1])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_copies_end_where_they_are_told(make_backend, layouts, rows):
    """Elements of q are all different, and none of them is 0, but for those that share memory."""
    backend, (layout_of_q, layout_of_o) = make_backend(), LAYOUTS[layouts]
    shape = (BATCH, HEADS, rows, HEAD_DIM)
    numbers = torch.arange(1, 1 + BATCH * HEADS * rows * HEAD_DIM, dtype=torch.int16)
    _, q = layout_of_q(shape, dtype=BF16, device=backend.device)
    own = tuple(slice(1) if stride == 0 else slice(None) for stride in q.stride())
    q[own] = numbers.view(BF16).view(shape).to(backend.device)[own]
    places = make_places(rows)
    k = torch.zeros(len(places), HEAD_DIM, dtype=torch.int16)
    k[:, :5] = places
    k = k.view(BF16)[None, None].expand(BATCH, HEADS, -1, -1).to(backend.device)
    storage, o = layout_of_o(shape, dtype=BF16, device=backend.device)
    storage.view(torch.int16).fill_(-1)  # poison, on either backend
    words = ROWS * COLUMNS // 2
    lse = torch.full((len(places), words), torch.nan, device=backend.device)
    step = read_step(ROOT / "verify" / "instructions" / "ragged.cu")
    backend.launch(step, q, k, k, o, lse, causal=False, softmax_scale=1.0)

    row, col = np.indices((ROWS, COLUMNS))
    byte = (row * COLUMNS + col) * 2
    at = ((byte // 16 ^ byte // 128 % 8) * 16 + byte % 16) // 2  # swizzled
    elements, expected_o = integers(q), np.full(shape, -1, np.int16)
    counts = []
    found = lse.cpu().numpy().view(np.int16)
    for box, (place, in_shared) in enumerate(zip(places.numpy().astype(int), found, strict=True)):
        inside, index = indices(shape, place)
        assert (index[2][inside] >= 0).all(), "a row before the tensor"
        of_box = tuple(i[inside] for i in index)
        expected = np.zeros((ROWS, COLUMNS), np.int16)
        if inside[0, 0]:  # otherwise it must not be loaded
            expected[inside] = elements[of_box]
        np.testing.assert_array_equal(in_shared[at], expected, f"box {box} at {place}")
        counts.append(inside.sum())
        if place.min() >= 0:
            expected_o[of_box] = expected[inside] | 1 + box % 3 << 13
    np.testing.assert_array_equal(integers(o), expected_o)
    expected_storage, view = layout_of_o(shape, dtype=BF16, device="cpu")
    expected_storage.view(torch.int16).fill_(-1)
    view.copy_(torch.from_numpy(expected_o).view(BF16))
    assert np.array_equal(integers(storage), integers(expected_storage)), "written between rows"
    assert (expected_o != -1).any()
    if rows > 1:
        assert (expected_o == -1).any()
        assert sum(count == ROWS * COLUMNS for count in counts) >= 3
    assert sum(count == 0 for count in counts) > 10


# ---- misuse

INCLUDE = '#include "ragged.cuh"\n#include "cluster.cuh"'
LAYOUT = "alignas(1024) Element tiles[4][128]; Mbarrier full;"
BOXES = ".q_box = {16, 8}, .o_box = {16, 8},"
SETUP = """
    if (block || t) return;
    mbarrier_init(smem.full, 1);
    fence_mbarrier_init();
    for (Element& x : smem.tiles[0]) x = from_float<Element>(1);
    fence_proxy_async();
"""
SOURCE = {"globals_": INCLUDE, "layout": LAYOUT, "boxes": BOXES}
FAULTS = [
    Fault(
        "four coordinates",
        "cp_async_bulk_tensor_load(smem.tiles[1], p.q_map, 0, 0, 0, 0, smem.full);",
        r"another tensor map .*, thread 0: cp_async_bulk_tensor_load @ has 4 coordinates, and the "
        r"map has 5 axes: 5 in steps that take lengths, else 4",
    ),
    Fault(
        "four coordinates of a store",
        "cp_async_bulk_tensor_store(p.o_map, 0, 0, 0, 0, smem.tiles[0]);",
        "another tensor map .*: cp_async_bulk_tensor_store @ has 4 coordinates, and .* 5 axes",
    ),
    Fault(
        "four coordinates for a cluster",
        "cp_async_bulk_tensor_load_multicast(smem.tiles[1], p.q_map, 0, 0, 0, 0, smem.full, 1);",
        "another tensor map .*: cp_async_bulk_tensor_load_multicast @ has 4 coordinates",
    ),
    Fault(
        "no map",
        "cp_async_bulk_tensor_5d_load(smem.tiles[1], p.k_map, 0, 0, 0, 0, 0, smem.full);",
        "no tensor map .*: cp_async_bulk_tensor_5d_load @ needs the map of a tensor whose box",
    ),
    Fault(
        "store before x",
        "cp_async_bulk_tensor_5d_store(p.o_map, 0, -1, 0, 0, 20, smem.tiles[0]);",
        "store before the tensor .*: cp_async_bulk_tensor_5d_store @ can start no box at d 0, row "
        "-1, head 0, batch 0, end 20",
    ),
    Fault(
        "store before end",
        "cp_async_bulk_tensor_5d_store(p.o_map, 0, 20, 0, 0, -1, smem.tiles[0]);",
        "store before the tensor .*: cp_async_bulk_tensor_5d_store @ .*, batch 0, end -1",
    ),
    # It gives zeros, but reads where the map begins.
    Fault(
        "load from a sequence's end on",
        "cp_async_bulk_tensor_5d_load(smem.tiles[1], p.q_map, 0, 20, 0, 0, 7, smem.full);",
        "load from outside of the map .*: cp_async_bulk_tensor_5d_load @ begins at d 0, row 20, "
        "head 0, batch 0, end 7, outside of the map: then a GPU reads the map's first address",
    ),
    # The map has them: a GPU copies whatever is there.
    Fault(
        "load of a row before the tensor",
        "mbarrier_arrive_expect_tx(smem.full, 256); "
        "cp_async_bulk_tensor_5d_load(smem.tiles[1], p.q_map, 0, 5, 0, 0, 14, smem.full); "
        "while (!mbarrier_try_wait_parity(smem.full, 0)) {}",
        "out-of-bounds read .*: 16 bytes before the start of q",
        seed=1,
    ),
    Fault(
        "store to a row before the tensor",
        "cp_async_bulk_tensor_5d_store(p.o_map, 0, 5, 0, 0, 14, smem.tiles[0]); "
        "cp_async_bulk_commit_group(); cp_async_bulk_wait_group<0>();",
        "out-of-bounds write .* @: 16 bytes before the start of o",
        seed=1,
    ),
]
ORDINARY = [  # of a step without lengths: its maps have four axes
    Fault(
        "five coordinates",
        "cp_async_bulk_tensor_5d_load(smem.tiles[1], p.q_map, 0, 0, 0, 0, 20, smem.full);",
        "another tensor map .*, thread 0: cp_async_bulk_tensor_5d_load @ has 5 coordinates, and "
        "the map has 4 axes: 5 in steps that take lengths, else 4",
    ),
    Fault(
        "five coordinates of a store",
        "cp_async_bulk_tensor_5d_store(p.o_map, 0, 0, 0, 0, 20, smem.tiles[0]);",
        "another tensor map .*: cp_async_bulk_tensor_5d_store @ has 5 coordinates, and .* 4 axes",
    ),
]
Q = torch.zeros(1, 1, 20, 8, dtype=torch.float16)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Step:
    folder = tmp_path_factory.mktemp("ragged")
    return write_faults(folder, FAULTS, SETUP, takes_lengths=True, **SOURCE)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory) -> Step:
    return write_faults(tmp_path_factory.mktemp("ordinary"), ORDINARY, SETUP, **SOURCE)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_misuse_is_reported(faulty, fault):
    expect_report(faulty, FAULTS, fault, q=Q)


@pytest.mark.parametrize("fault", ORDINARY, ids=lambda fault: fault.name)
def test_misuse_in_an_ordinary_step_is_reported(ordinary, fault):
    expect_report(ordinary, ORDINARY, fault, q=Q)


# ---- the parameters


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PACKED = Lengths(int32(0, 5, 5, 9), int32(0, 8, 10, 12), None, 4, UNLIMITED)
GIVEN = {
    "nothing": (None, (0, 0, 0, 2, UNLIMITED, UNLIMITED)),
    "window": (Lengths(window_left=3, window_right=0), (0, 0, 0, 2, 3, 0)),
    "seqused_k": (Lengths(seqused_k=int32(7, 0)), (0, 0, 1, 2, UNLIMITED, UNLIMITED)),
    "packed": (PACKED, (1, 1, 0, 3, 4, UNLIMITED)),
    "all": (
        PACKED._replace(seqused_k=int32(8, 1, 0), window_right=2**31 - 2),
        (1, 1, 1, 3, 4, 2**31 - 2),
    ),
}


def tensors_of(lengths: Lengths | None) -> tuple[torch.Tensor, ...]:
    """q, k, v, o and lse: packed, or a batch of two."""
    is_packed = lengths is not None and lengths.cu_seqlens_q is not None
    batch, seq_q, seq_k = (1, 9, 12) if is_packed else (2, 9, 12)
    q, k, v, o = (
        torch.zeros(batch, 4, seq, 64, dtype=BF16) for seq in (seq_q, seq_k, seq_k, seq_q)
    )
    return q, k, v, o, torch.zeros(batch, 4, seq_q)


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_packed(given):
    lengths, (*has, sequences, left, right) = GIVEN[given]
    step, tensors = find_step("v14"), tensors_of(lengths)
    spec = specialization(tensors, causal=False)
    descriptor = CpuBackend().descriptor(step, spec)
    plan = read_plan(step, descriptor, 132)
    packer = Packer(step, descriptor, plan, [1] * len(plan.kernels), spec, simt_encoder(spec))
    params, _ = packer(tensors, [0.5], lengths)
    assert len(params) == params_bytes(step)
    common = params_type(step.operation).from_buffer_copy(params)
    assert (common.q, common.lse) == (tensors[0].data_ptr(), tensors[4].data_ptr())
    assert (common.batch, common.seq_q, common.seq_k) == (len(tensors[0]), 9, 12)
    assert common.softmax_scale == 0.5
    own = LengthsParams.from_buffer_copy(params, ctypes.sizeof(common))
    addresses = own.cu_seqlens_q, own.cu_seqlens_k, own.seqused_k
    given_tensors = (lengths or Lengths())[:3]
    assert addresses == tuple(0 if t is None else t.data_ptr() for t in given_tensors)
    assert [address != 0 for address in addresses] == has
    assert (own.sequences, own.window_left, own.window_right) == (sequences, left, right)


TOLD = """
    if (block || t) return;
    float* told = p.lse;
    const auto tell = [&](const int32_t* from, int count) {
        *told++ = from != nullptr;
        for (int i = 0; i < count; ++i) *told++ = from ? from[i] : -1;
    };
    tell(p.cu_seqlens_q, p.sequences + 1);
    tell(p.cu_seqlens_k, p.sequences + 1);
    tell(p.seqused_k, p.sequences);
    *told++ = p.sequences;
    const int sides[] = {p.window_left, p.window_right};
    for (int side : sides) *told++ = side >> 16, *told++ = side & 0xffff;
    *told++ = p.softmax_scale;
"""


@pytest.fixture(scope="module")
def teller(tmp_path_factory) -> Step:
    return write_step(tmp_path_factory.mktemp("told"), "told", TOLD, takes_lengths=True)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("given", GIVEN)
def test_what_a_kernel_is_told(teller, given, seed):
    lengths, (*_, sequences, left, right) = GIVEN[given]
    q = tensors_of(lengths)[0]
    counts = (sequences + 1, sequences + 1, sequences)
    expected = []
    for t, count in zip((lengths or Lengths())[:3], counts, strict=True):
        expected += [0] + [-1] * count if t is None else [1, *t.tolist()]
    expected += [sequences, left >> 16, left & 0xFFFF, right >> 16, right & 0xFFFF, 7]
    backend = CpuBackend(seed)
    _, lse = run(teller, backend, q, num_lse=len(expected), scenario=7, lengths=lengths)
    assert lse.tolist() == expected


def write_access(folder, name: str, statement: str) -> Step:
    return write_step(folder, name, f"if (block == 0 && t == 0) {statement};", takes_lengths=True)


@pytest.mark.parametrize("name", Lengths._fields[:3])
@pytest.mark.parametrize(("place", "seed"), [("past the end", 0), ("before the start", 1)])
def test_a_read_outside_of_the_lengths_is_reported(tmp_path, name, place, seed):
    """They end at guard pages for an even seed, and begin there for an odd one."""
    lengths, _ = GIVEN["all"]
    q, size = tensors_of(lengths)[0], getattr(lengths, name).numel()
    inside, outside = (size - 1, size) if place == "past the end" else (0, -1)
    last = write_access(tmp_path, "inside", f"p.lse[0] = p.{name}[{inside}]")
    step = write_access(tmp_path, "outside", f"p.lse[0] = p.{name}[{outside}]")
    _, lse = run(last, CpuBackend(seed), q, lengths=lengths)
    assert lse == getattr(lengths, name)[inside]
    with pytest.raises(SimtError, match=rf"out-of-bounds read .* {place} of {name} \({4 * size} b"):
        run(step, CpuBackend(seed), q, lengths=lengths)


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (
            "const_cast<int32_t*>(p.cu_seqlens_q)[1] = 4",
            "write to an input .*: at byte 4 of cu_seqlens_q",
        ),
        ("p.lse[0] = p.seqused_k[0]", "read .* through a null pointer"),
    ],
    ids=["write", "not given"],
)
def test_misuse_of_the_lengths_is_reported(tmp_path, statement, told):
    step = write_access(tmp_path, "misuse", statement)
    with pytest.raises(SimtError, match=told):
        run(step, CpuBackend(), tensors_of(PACKED)[0], lengths=PACKED)
