"""The structs that Python shares with C++ are laid out alike, and describe the right launches."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from common.catalog import find_step
from common.errors import UsageError
from common.lengths import Lengths
from common.operation import BACKWARD, FORWARD, Operation
from common.paths import ROOT
from common.problem import Specialization
from common.runtime import launch, launcher, pack
from common.runtime.build import host_compiler, nvcc
from common.runtime.cpu import CpuBackend, SimtError
from common.step import read_step
from verify.tests.small_kernels import run, write_step
from verify.tests.tensor_map_fields import VALID_TENSOR_MAP, TensorMapFields


def with_more(operation: Operation, more: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """All that the kernels of a step take that takes lengths, or divisors."""
    padding = ctypes.c_uint8 * (launch.PARAMS_ALIGNMENT - ctypes.sizeof(more))
    fields = [*more._fields_, ("_padding", padding)]
    return type("Params", (launch.params_type(operation),), {"_fields_": fields})


PARAMS = {
    "v12": launch.params_type(FORWARD),
    "v13": with_more(FORWARD, launch.DivisorsParams),
    "v14": with_more(FORWARD, launch.LengthsParams),
    "b10": launch.params_type(BACKWARD),
    "b11": with_more(BACKWARD, launch.LengthsParams),
}
STRUCTS = {
    "Strides": launch._Strides,
    "AttentionParams": PARAMS["v12"],
    "DivisorsParams": PARAMS["v13"],
    "LengthsParams": PARAMS["v14"],
    "Extent": launch.Extent,
    "KernelLaunch": launch._KernelLaunch,
    "Workspace": launch._Workspace,
    "Box": launch.Box,
    "LaunchDescriptor": launch.descriptor_type(FORWARD),
    "BackwardParams": PARAMS["b10"],
    "BackwardLengthsParams": PARAMS["b11"],
    "BackwardDescriptor": launch.descriptor_type(BACKWARD),
    "simt::TensorMapFields": TensorMapFields,
    "packing::Operand": pack._Operand,
    "packing::Extent": launch.Extent,
    "packing::Kernel": pack._Kernel,
    "packing::Plan": pack._Plan,
    "Lengths": launch.LengthsParams,
    "packing::Lengths": launch.LengthsParams,
    "Divisor": launch.Divisor,
    "packing::Divisor": launch.Divisor,
    "Divisors": launch.DivisorsParams,
    "packing::Divisors": launch.DivisorsParams,
    "packing::LoadedKernel": launcher.LoadedKernel,
    "packing::Launcher": launcher._Launcher,
}
PROGRAM = """
#include <stddef.h>
#include <stdio.h>
using Element = uint16_t;
#define __device__
#include "divisors.h"
#include "lengths.h"
#include "simt/tensor_map.h"
#include "pack.cpp"
int main() {{
    {statements}
    printf("%d %d\\n", MOST_TILE_ROWS, PADDED_Q);
    printf("%d %d\\n", packing::MOST_TILE_ROWS, packing::PADDED_Q);
    printf("%d %d\\n", SPLIT_KEYS, packing::SPLIT_KEYS);
    printf("%d %d\\n", simt::VALID_TENSOR_MAP, packing::MAX_PARAMS_BYTES);
}}
"""


def field_names(struct: type[ctypes.Structure]) -> list[str]:
    classes = reversed(struct.__mro__)  # a subclass has only its own fields
    fields = [field for cls in classes for field in vars(cls).get("_fields_", ())]
    return [name for name, _ in fields if name != "_padding"]


@pytest.fixture(scope="module")
def told_by_cpp(tmp_path_factory) -> list[int]:
    """Each struct's size and its fields' offsets and sizes, then the constants."""
    statements = []
    for name, struct in STRUCTS.items():
        statements.append(f'printf("%zu\\n", sizeof({name}));')
        statements += [
            f'printf("%zu %zu\\n", offsetof({name}, {field}), sizeof({name}::{field}));'
            for field in field_names(struct)
        ]
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.cpp").write_text(PROGRAM.format(statements="\n    ".join(statements)))
    command = [
        *host_compiler(),
        "-std=c++20",
        "-Wno-invalid-offsetof",  # of a struct with a base
        "-include",
        "stdint.h",
        f"-I{ROOT / 'common' / 'runtime'}",
    ]
    subprocess.run([*command, folder / "layout.cpp", "-o", folder / "layout"], check=True)
    printed = subprocess.run([folder / "layout"], check=True, capture_output=True, text=True)
    return [int(number) for number in printed.stdout.split()]


def test_structs_have_the_same_layout_in_python_and_cpp(told_by_cpp) -> None:
    numbers = iter(told_by_cpp)
    for name, struct in STRUCTS.items():
        assert next(numbers) == ctypes.sizeof(struct), name
        for field in field_names(struct):
            place = getattr(struct, field)
            assert (next(numbers), next(numbers)) == (place.offset, place.size), f"{name}.{field}"
    for _ in ("lengths.h", "pack.cpp"):
        assert (next(numbers), next(numbers)) == (launch.MOST_TILE_ROWS, SIZE_PADDED_Q)
    assert (next(numbers), next(numbers)) == (launch.SPLIT_KEYS, launch.SPLIT_KEYS)
    assert next(numbers) == VALID_TENSOR_MAP
    max_params_bytes = next(numbers)
    for step, struct in PARAMS.items():
        assert launch.params_bytes(find_step(step)) == ctypes.sizeof(struct)
        assert ctypes.sizeof(struct) % 128 == 0, "nvcc's alignas(128)"
        assert ctypes.sizeof(struct) <= max_params_bytes


LAUNCHES = """
#include <cuda.h>
#include <stddef.h>
#include "pack.cpp"
#define SAME_FIELD(Type, field, Mine, own) \\
    static_assert(offsetof(Type, field) == offsetof(packing::Mine, own), #field)
#define SAME_CONFIG(field, own) SAME_FIELD(CUlaunchConfig, field, LaunchConfig, own)
static_assert(sizeof(CUlaunchConfig) == sizeof(packing::LaunchConfig));
SAME_CONFIG(gridDimX, grid[0]);
SAME_CONFIG(gridDimY, grid[1]);
SAME_CONFIG(gridDimZ, grid[2]);
SAME_CONFIG(blockDimX, block[0]);
SAME_CONFIG(blockDimY, block[1]);
SAME_CONFIG(blockDimZ, block[2]);
SAME_CONFIG(sharedMemBytes, smem_bytes);
SAME_CONFIG(hStream, stream);
SAME_CONFIG(attrs, attributes);
SAME_CONFIG(numAttrs, num_attributes);
static_assert(sizeof(CUlaunchAttribute) == sizeof(packing::LaunchAttribute));
static_assert(alignof(CUlaunchAttribute) == alignof(packing::LaunchAttribute));
SAME_FIELD(CUlaunchAttribute, id, LaunchAttribute, id);
SAME_FIELD(CUlaunchAttribute, value.programmaticStreamSerializationAllowed, LaunchAttribute, value);
static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION ==
              packing::PROGRAMMATIC_STREAM_SERIALIZATION);
"""


def test_the_drivers_structs_are_as_in_its_header(tmp_path) -> None:
    try:
        compiler = nvcc()
    except UsageError:
        pytest.skip("no nvcc, so no cuda.h")
    (tmp_path / "launches.cpp").write_text(LAUNCHES)
    command = [compiler, "-std=c++20", f"-I{ROOT / 'common' / 'runtime'}", "-c", "launches.cpp"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def descriptor(blocks_per_sm: int) -> launch.LaunchDescriptor:
    """The descriptor of a kernel with one block per 64 queries of a head."""
    descriptor = launch.descriptor_type(FORWARD)(alignment=16)
    kernel = descriptor.kernels[0]
    kernel.name = b"kernel"
    kernel.grid[0] = launch.Extent(SIZE_SEQ_Q, 64)
    kernel.grid[1] = launch.Extent(SIZE_HEADS, 1)
    kernel.blocks_per_sm = blocks_per_sm
    return descriptor


SIZE_BATCH, SIZE_HEADS, SIZE_SEQ_Q, SIZE_SEQ_K = 0, 1, 3, 4  # of enum Size
SIZE_PADDED_Q = 5  # of lengths.h
SIZES = (2, 3, 1, 200, 100)  # in their order; 3 heads x 4 tiles of 64 queries


@pytest.mark.parametrize(
    ("blocks_per_sm", "multiprocessors", "blocks"),
    [
        (0, 1, 12),  # no limit
        (1, 5, 5),
        (2, 5, 10),
        (3, 5, 12),  # fewer than there is room for
        (1, 12, 12),
        (1, 132, 12),
    ],
)
def test_grid_is_limited(blocks_per_sm, multiprocessors, blocks):
    assert count_blocks(descriptor(blocks_per_sm), multiprocessors) == [blocks]


def count_blocks(descriptor: launch.LaunchDescriptor, multiprocessors: int, cluster: int = 1):
    """Of a call of SIZES."""
    batch, heads, kv_heads, seq_q, seq_k = SIZES
    spec = Specialization(8, "bf16", causal=False)
    step = find_step("v01")
    plan = launch.read_plan(step, descriptor, multiprocessors)
    clusters, encoder = [cluster] * len(plan.kernels), pack.simt_encoder(spec)
    packer = pack.Packer(step, descriptor, plan, clusters, spec, encoder)
    q, k = (
        torch.zeros(batch, *sizes, 8, dtype=torch.bfloat16)
        for sizes in ((heads, seq_q), (kv_heads, seq_k))
    )
    _, blocks = packer((q, k, k, q, torch.zeros(batch, heads, seq_q)), [1.0])
    return blocks


def test_a_grid_is_filled_up_to_whole_clusters():
    assert count_blocks(descriptor(0), 1, cluster=5) == [15]
    assert count_blocks(descriptor(1), 7, cluster=4) == [8]


@pytest.mark.parametrize(("tile", "slices"), [(8, 1), (3, 3), (1, 8), (256, 1)])
def test_slices_of_columns(tile, slices):
    """head_dim is 8, and the other axes have 12 tiles."""
    sliced = descriptor(0)
    sliced.kernels[0].grid[2] = launch.Extent(launch.COLUMNS, tile)
    assert count_blocks(sliced, 1) == [12 * slices]
    assert count_blocks(sliced, 1, cluster=slices) == [12 * slices]
    plan = launch.read_plan(find_step("v01"), sliced, 1)
    assert plan.kernels[0].num_tiles((*SIZES, 0, 8)) == 12 * slices


def test_columns_is_the_same_number_everywhere():
    """In Python, in pack.cpp, and in both slices.cuh, whose SEQ_K + 2 leaves PADDED_Q out."""
    assert launch.COLUMNS == SIZE_SEQ_K + 2 == SIZE_PADDED_Q + 1
    for twin in ("device", "simt"):
        text = (ROOT / "common" / "runtime" / twin / "slices.cuh").read_text()
        assert "constexpr Size COLUMNS = Size(SEQ_K + 2);" in text


def test_grids_of_as_many_tiles_as_there_can_be():
    many = descriptor(0)
    many.kernels[0].grid[2] = launch.Extent(SIZE_SEQ_K, 1)
    many.kernels[0].grid[3] = launch.Extent(SIZE_BATCH, 1)
    assert count_blocks(many, 1) == [12 * 100 * 2]


BF16 = torch.bfloat16


@pytest.mark.parametrize("head_dims", [(64, 192), (192, 64), (192, 192)])
def test_columns_are_those_of_q_or_of_v(head_dims):
    """The larger number counts; and each tensor has its own."""
    head_dim, v_head_dim = head_dims
    by_columns = descriptor(0)
    by_columns.kernels[0].grid[0] = launch.Extent(launch.COLUMNS, 64)
    q, v = (torch.zeros(1, 2, 5, d, dtype=BF16) for d in head_dims)
    tensors = (q, q, v, v, q[..., 0].float())
    step, spec = find_step("v15"), Specialization(head_dim, "bf16", False, v_head_dim)
    plan = launch.read_plan(step, by_columns, 1)
    packer = pack.Packer(step, by_columns, plan, [1], spec, pack.simt_encoder(spec))
    _, blocks = packer(tensors, [1.0])
    assert blocks == [2 * 3]
    assert launch.sizes_of(tensors) == (1, 2, 2, 5, 5, 0, 192, 5, 1)
    if head_dim != v_head_dim:
        for wrong in ((v, v, v, v), (q, q, q, q), (q, q, v, q), (q, v, v, v)):
            assert packer((*wrong, tensors[4]), [1.0]) is None


def test_rows_that_share_keys():
    """One block for 64 queries of all heads that share their keys."""
    by_rows = descriptor(0)
    by_rows.kernels[0].grid[0] = launch.Extent(launch.GROUP_ROWS, 64)
    step, spec = find_step("v12"), Specialization(64, "bf16", causal=False)
    plan = launch.read_plan(step, by_rows, 1)
    packer = pack.Packer(step, by_rows, plan, [1], spec, pack.simt_encoder(spec))
    for heads, seq_q, rows in ((6, 21, 63), (6, 22, 66), (2, 64, 64), (2, 65, 65)):
        q = torch.zeros(1, heads, seq_q, 64, dtype=BF16)
        k = q[:, :2, :9]
        tensors = (q, k, k, q, q[..., 0].float())
        assert launch.sizes_of(tensors)[launch.GROUP_ROWS] == rows
        assert packer(tensors, [1.0])[1] == [heads * -(-rows // 64)]
    # As many as 32 bits cannot count: a call for another step.
    q = torch.zeros(1, 2**7, 1, 64, dtype=BF16).expand(-1, -1, 2**24, -1)
    k, lse = q[:, :1, :9], torch.zeros(1).expand(1, 2**7, 2**24)
    assert packer((q, k, k, q, lse), [1.0]) is None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "seq_q", "seq_k", "multiprocessors"),
    [
        (6, 2, 30, 1000, 132),  # 2 work tiles of 90 rows
        (6, 2, 50, 1000, 132),  # 4 of 150
        (9, 9, 1, 100, 5),  # 9 tiles, 18 work tiles in 4 rounds of 5
        (8, 8, 1, 100, 6),  # 16, in 3 rounds of 6
        (9, 9, 1, 100, 10),  # 18, in 2 rounds of 10: nine tenths of them
        (17, 17, 1, 200, 19),  # 34 of 38 are not
        (17, 17, 1, 128, 19),  # but of one tile each
        (9, 9, 1, 1000, 20),  # 18 of 20 blocks
        (9, 9, 1, 1000, 21),
        (3, 3, 1, 200, 14),  # no more blocks than tiles
        (3, 3, 1, 100, 14),
    ],
)
def test_what_the_host_divides(heads, kv_heads, seq_q, seq_k, multiprocessors):
    """What v13's kernels divide by; and where no keys are split there is no second kernel."""
    step, spec, batch = find_step("v13"), Specialization(64, "bf16", causal=False), 2
    descriptor = CpuBackend().descriptor(step, spec)
    plan = launch.read_plan(step, descriptor, multiprocessors)
    packer = pack.Packer(step, descriptor, plan, [1, 1], spec, pack.simt_encoder(spec))
    q = torch.zeros(batch, heads, seq_q, 64, dtype=BF16)
    k = torch.zeros(batch, kv_heads, seq_k, 64, dtype=BF16)
    params, blocks = packer((q, k, k, q, torch.zeros(batch, heads, seq_q)), [1.0])
    found = PARAMS["v13"].from_buffer_copy(params)

    group = heads // kv_heads
    tiles = [-(-seq_k // 128), -(-group * seq_q // 128), kv_heads, batch]
    works = tiles[1] * tiles[2] * tiles[3]
    busy = min(multiprocessors, works * tiles[0])
    for divisor, value in (
        *zip(found.tiles, tiles, strict=True),
        (found.works, works),
        (found.blocks, busy),
        (found.group, group),
    ):
        assert (divisor.value, divisor.inverse) == (value, (2**32 - 1) // value)
    rounds = -(-works // busy)
    is_whole = 10 * works >= 9 * rounds * busy or tiles[0] == 1
    assert found.split_keys == (not is_whole)
    rows = batch * heads * seq_q
    assert blocks == [busy, 0 if is_whole else min(rows, 4 * multiprocessors)]


@pytest.mark.parametrize("sequences", [None, 3])
def test_queries_with_whole_tiles_for_each_sequence(sequences):
    """One block for 64 of them, and some bytes of a workspace: each batch is a sequence, if none
    are packed.
    """
    padded = descriptor(0)
    padded.kernels[0].grid[0] = launch.Extent(SIZE_PADDED_Q, 64)
    padded.workspace[0].element_bytes = 24
    padded.workspace[0].shape[0] = launch.Extent(SIZE_PADDED_Q, 64)
    batch, lengths, rows = 2, Lengths(), 400 + 2 * 128
    if sequences:
        starts = torch.tensor([0, 50, 50, 200], dtype=torch.int32)
        batch, lengths, rows = 1, Lengths(starts, starts), 200 + 3 * 128
    q = torch.zeros(batch, 3, 200, 64, dtype=BF16)
    tensors = (q, q, q, q, q[..., 0].float())
    step, spec = find_step("v14"), Specialization(64, "bf16", causal=False)
    plan = launch.read_plan(step, padded, 132)
    packer = pack.Packer(step, padded, plan, [1], spec, pack.simt_encoder(spec))
    _, blocks = packer(tensors, [1.0], lengths)
    assert blocks == [3 * -(-rows // 64)]
    sizes = launch.sizes_of(tensors, lengths)
    assert sizes == (batch, 3, 3, 200, 200, rows, 64, 200, 1)
    assert plan.workspace_bytes(sizes) == [24 * -(-rows // 64) * 64]
    if batch == 2:
        assert packer(tensors, [1.0]) == packer(tensors, [1.0], lengths)
    too_many = torch.zeros(1, dtype=torch.int32).expand(2**24 + 1)  # 128 rows of each
    assert packer(tensors, [1.0], Lengths(too_many, too_many)) is None
    with pytest.raises(UsageError, match=r"axis of size 5 in .* one of 0, 1, 2, 3, 4, 6 and 7,"):
        launch.read_plan(find_step("v12"), padded, 132)
    padded.kernels[1].name = b"merge"
    padded.kernels[1].grid[0] = launch.Extent(launch.SPLIT_KEYS, 1)
    with pytest.raises(UsageError, match=r"size 8 in .* one of 0, 1, 2, 3, 4, 5, 6 and 7,"):
        launch.read_plan(step, padded, 132)
    padded.kernels[0].grid[0] = launch.Extent(SIZE_PADDED_Q, 64)
    with pytest.raises(UsageError, match=r"size 5 in .* one of 0, 1, 2, 3, 4, 6, 7 and 8,"):
        launch.read_plan(find_step("v13"), padded, 132)


def test_the_first_kernel_does_not_depend_on_what_it_decides():
    wrong = descriptor(0)
    wrong.kernels[0].grid[3] = launch.Extent(launch.SPLIT_KEYS, 1)
    with pytest.raises(UsageError, match="first kernel has an axis of size 8, SPLIT_KEYS"):
        launch.read_plan(find_step("v13"), wrong, 132)


@pytest.mark.parametrize("alignment", [-16, 0, 12])
def test_an_alignment_that_no_gpu_has_is_refused(alignment):
    wrong = descriptor(0)
    wrong.alignment = alignment
    with pytest.raises(UsageError, match="an alignment that is a power of 2"):
        launch.read_plan(find_step("v01"), wrong, 132)


@pytest.mark.parametrize(("size", "tile"), [(-1, 64), (5, 64), (SIZE_SEQ_Q, -64)])
def test_an_axis_that_there_is_not_is_refused(size, tile):
    wrong = descriptor(0)
    wrong.kernels[0].grid[1] = launch.Extent(size, tile)
    with pytest.raises(UsageError, match=f"axis of size {size} in tiles of {tile}: a size is one"):
        launch.read_plan(find_step("v01"), wrong, 132)


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ([(SIZE_SEQ_Q, 64)], 24 * 256),
        ([(SIZE_HEADS, 1), (SIZE_SEQ_Q, 64)], 24 * 3 * 256),
    ],
)
def test_workspace_bytes(shape, num_bytes):
    needs_workspace = descriptor(0)
    needs_workspace.workspace[0].element_bytes = 24
    for axis, (size, tile) in enumerate(shape):
        needs_workspace.workspace[0].shape[axis] = launch.Extent(size, tile)
    assert launch.read_plan(find_step("v01"), needs_workspace, 132).workspace_bytes(SIZES) == [
        num_bytes
    ]


@pytest.mark.parametrize(
    ("blocks_per_sm", "multiprocessors", "num_bytes"),
    [
        (1, 11, 24),  # 12 tiles: a block has two
        (1, 12, 0),
        (4, 3, 0),
        (0, 1, 24),  # not persistent: there is no telling what it is for
    ],
)
def test_a_workspace_for_what_blocks_hand_over(blocks_per_sm, multiprocessors, num_bytes):
    needs_workspace = descriptor(blocks_per_sm)
    needs_workspace.workspace[0].element_bytes = 24
    plan = launch.read_plan(find_step("v01"), needs_workspace, multiprocessors)
    assert plan.workspace_bytes(SIZES) == [num_bytes]


def test_without_a_second_tile_the_workspace_is_a_null_pointer(tmp_path):
    body = "if (t == 0) p.lse[block] = 0, scores[block] = 1;"
    path = write_step(tmp_path, "turns", body).path
    source = path.read_text().replace("sizeof(Layout)}", "sizeof(Layout), .blocks_per_sm = 2}")
    path.write_text(source.replace("= 4, .shape = {{SEQ_Q, 1}}", "= 4 * 4"))
    step, backend = read_step(path), CpuBackend()
    run(step, backend, torch.zeros(1, 1, 5, 8), num_lse=5)
    with pytest.raises(SimtError, match="through a null pointer"):
        run(step, backend, torch.zeros(1, 1, 4, 8), num_lse=4)


def test_seeds_differ_in_the_number_of_multiprocessors(tmp_path):
    """Odd seeds have one more, so that no result of a check depends on their number."""
    path = write_step(tmp_path, "grid", "if (t == 0) p.lse[block] = gridDim.x;").path
    source = path.read_text()
    path.write_text(source.replace("sizeof(Layout)}", "sizeof(Layout), .blocks_per_sm = 2}"))
    blocks = []
    for seed in range(4):
        _, lse = run(read_step(path), CpuBackend(seed), torch.zeros(1, 1, 10, 8), num_lse=10)
        blocks.append(int(lse[0]))
        assert torch.equal(lse.isnan().sum(), torch.tensor(10 - blocks[-1]))
    assert blocks == [4, 6, 4, 6]
