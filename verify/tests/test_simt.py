"""The SIMT runtime: what it computes is right, and memory that nobody has written is poison."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from common.errors import UsageError
from common.runtime import cpu
from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step, read_step
from verify.tests.small_kernels import run, write_step

# ---- order


@pytest.fixture(scope="module")
def order_step(tmp_path_factory) -> Step:
    """lse [2, blocks, 64]: the order in which a block's threads reach two barriers.

    They count in global memory: in shared memory that would be reported as a race.
    """
    return write_step(
        tmp_path_factory.mktemp("order"),
        "order",
        """
    float& counter = p.o[block * HEAD_DIM + 1];
    if (t == 0) counter = 0;
    __syncthreads();
    for (int round = 0; round < 2; ++round) {
        p.lse[(round * gridDim.x + block) * blockDim.x + t] = counter++;
        __syncthreads();
    }
    // And in which order the blocks run, where they run one at a time.
    if (t == 0) p.o[block * HEAD_DIM] = num_begun++;
""",
        threads=64,
        globals_="__device__ int num_begun = 0;",
    )


def thread_orders(step: Step, seed: int) -> np.ndarray:
    _, lse = run(step, CpuBackend(seed), torch.zeros(1, 1, 6, 8), num_lse=2 * 6 * 64)
    return lse.view(12, 64).numpy()


def test_thread_order_follows_the_seed(order_step, monkeypatch):
    orders = {}
    for seed in range(4):
        orders[seed] = thread_orders(order_step, seed)
        monkeypatch.setattr(cpu, "_num_cores", lambda: 1)
        np.testing.assert_array_equal(thread_orders(order_step, seed), orders[seed])
        monkeypatch.undo()
    for order in orders.values():
        assert (np.sort(order, axis=1) % 64 == np.arange(64)).all()
    distinct = {tuple(row % 64) for order in orders.values() for row in order}
    assert len(distinct) == 4 * 12, "an order repeats between seeds, blocks or rounds"


def test_block_order_follows_the_seed(order_step, monkeypatch):
    monkeypatch.setattr(cpu, "_num_cores", lambda: 1)
    orders = set()
    for seed in range(4):
        o, _ = run(order_step, CpuBackend(seed), torch.zeros(1, 1, 6, 8), num_lse=2 * 6 * 64)
        order = o[0, 0, :, 0].tolist()
        assert sorted(order) == [0, 1, 2, 3, 4, 5]
        orders.add(tuple(order))
    assert len(orders) > 1


# ---- elements


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions(tmp_path, dtype):
    """All values to float; values, their neighbours in float and halfway points back."""
    step = write_step(
        tmp_path,
        "convert",
        """
    if (block) return;
    const int n = p.seq_q * HEAD_DIM;
    for (int i = t; i < n; i += blockDim.x) p.lse[i] = to_float(p.q[i]);
    for (int i = t; i < n / 2; i += blockDim.x) {
        float x;  // the elements of q are the halves of floats, too
        memcpy(&x, p.q + 2 * i, sizeof(x));
        p.o[i] = from_float<Element>(x);
    }
""",
    )
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    _, floats = run(step, CpuBackend(), every.view(1, 1, -1, 8), num_lse=every.numel())
    torch.testing.assert_close(floats, every.float(), rtol=0, atol=0, equal_nan=True)

    bits = every.float().view(torch.int32)
    half = 2**15 if dtype == torch.bfloat16 else 2**12
    tiny = torch.arange(-300, 300) * 2.0**-26  # around fp16's subnormals
    random = torch.randint(-(2**31), 2**31, (2**18,), generator=torch.Generator().manual_seed(0))
    candidates = [bits, bits - 1, bits + 1, bits + half, bits + half - 1, bits + half + 1]
    candidates += [tiny.view(torch.int32), random.int()]
    x = torch.cat(candidates).view(torch.float32)
    x = x[: x.numel() // 4 * 4]
    o, _ = run(step, CpuBackend(), x.view(dtype).view(1, 1, -1, 8), num_lse=2 * x.numel())
    rounded = o.flatten()[: x.numel()]
    expected = x.to(dtype)
    assert (rounded.isnan() == expected.isnan()).all()
    number = ~expected.isnan()
    assert torch.equal(rounded.view(torch.int16)[number], expected.view(torch.int16)[number])


def test_mathematics(tmp_path):
    """C's functions take floats as in CUDA: without a float version abs() would take integers."""
    step = write_step(
        tmp_path,
        "mathematics",
        """
    static_assert(std::is_same_v<decltype(exp(p.softmax_scale)), float>);
    const float nan = p.lse[1] * NAN;
    p.lse[0] = abs(p.softmax_scale - 1.5f);
    p.lse[1] = min(nan, 2.0f) + max(3.0f, nan);
    p.lse[2] = exp2f(p.softmax_scale) + log2(p.softmax_scale + 8);
    p.lse[3] = isinf(-INFINITY) + isnan(nan);
""",
        threads=1,
    )
    _, lse = run(step, CpuBackend(), torch.zeros(1, 1, 1, 8), num_lse=4)
    assert lse.tolist() == [1.5, 5, 4, 2]


# ---- warps


def test_warp_collectives(tmp_path):
    """lse [10, 64]: what each lane of two warps gets from every operation."""
    step = write_step(
        tmp_path,
        "warp",
        """
    if (block) return;
    const uint32_t all = 0xffffffff;
    const int lane = t % 32;
    float* result = p.lse + t;
    *result = __shfl_xor_sync(all, float(t), 5);
    *(result += 64) = __shfl_down_sync(all, t, 3);
    *(result += 64) = __shfl_up_sync(all, uint32_t(t), 3);
    *(result += 64) = __shfl_sync(all, double(t), lane + 34);
    *(result += 64) = __shfl_sync(all, int64_t(t) << 40, 7) >> 40;
    *(result += 64) = __ballot_sync(all, lane % 5 == 0) == 0x42108421u;
    *(result += 64) = __any_sync(all, t == 40);
    *(result += 64) = __all_sync(all, t != 40);
    // Two halves of a warp in different places.
    if (lane < 16) {
        *(result += 64) = __shfl_xor_sync(0xffffu, t, 1);
    } else {
        *(result += 64) = __shfl_xor_sync(0xffff0000u, t, 2);
    }
    __syncwarp();
    float sum = t;
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(all, sum, offset);
    *(result += 64) = sum;
""",
        threads=64,
    )
    t = np.arange(64)
    lane, warp = t % 32, t // 32 * 32
    expected = [
        t ^ 5,
        np.where(lane + 3 < 32, t + 3, t),
        np.where(lane >= 3, t - 3, t),
        warp + (lane + 2) % 32,
        warp + 7,
        t >= 0,
        t >= 32,
        t < 32,
        np.where(lane < 16, t ^ 1, t ^ 2),
        warp * 32 + 31 * 16,
    ]
    for seed in range(3):
        _, lse = run(step, CpuBackend(seed), num_lse=640)
        np.testing.assert_array_equal(lse.view(10, 64).numpy(), expected)


# ---- poison


def test_poison(tmp_path):
    """Workspace, output and the gaps between strided rows are NaN at first. Shared memory is in one
    of a check's two runs, and in the other large numbers, of which two are not equal.
    """
    step = write_step(
        tmp_path,
        "poison",
        """
    if (t == 0) {
        float* result = p.lse + 6 * block;
        result[0] = smem.first[0] + 1;
        result[1] = smem.second[31] + 1;
        result[2] = scores[block] + 1;
        result[3] = to_float(p.o[block * p.o_stride.row]) + 1;
        result[4] = to_float(p.q[block / 2 * p.q_stride.row + HEAD_DIM]) + 1;
        result[5] = to_float(p.q[block * p.q_stride.row]) + 1;
    }
    __syncthreads();
    if (t < 32) smem.first[t] = smem.second[t] = 0;  // must not be seen by the next block
    p.o[block * p.o_stride.row] = p.q[block * p.q_stride.row];
    if (p.softmax_scale == 1.0f && block == 1) p.o[HEAD_DIM] = p.q[0];  // a write to a gap
""",
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q = torch.zeros(1, 1, 3, 24, dtype=dtype)[..., :8]
        o = torch.ones(1, 1, 3, 24, dtype=dtype)
        found = []
        for seed in (0, 1):
            _, lse = run(step, CpuBackend(seed), q, o=o[..., :8], num_lse=18)
            found.append(lse.view(3, 6))
            assert found[-1][:, 2:5].isnan().all()
            assert (found[-1][:, 5] == 1).all()
        first, second = (each[:, :2] for each in found)
        assert (first.isnan() != second.isnan()).all()
        large = torch.fmax(first, second)
        assert (large > 1.7e38).all()
        assert (large[:, 0] != large[:, 1]).all()
        assert (o[..., :8:8] == 0).all()
        assert (o[..., 8:] == 1).all()
    with pytest.raises(SimtError, match=r"outside the output view: 1 .* first 8 elements"):
        run(step, CpuBackend(), q, o=o[..., :8], num_lse=18, scenario=1)
    assert (o[..., 8:] == 1).all()


# Writes to lse 0 times what is in variables that may not have been initialized.
UNINITIALIZED = """
    if (t || block) return;
    float* lse = p.lse;
    struct Row { float max; int index; float sum; };
    float scalar, other, few[3], array[4][4], large[4000];
    float4 vector;
    Row row, rows[5];
    Element element, elements[3];
    uint32_t pair, pairs[3], tile[4][4];
    if (p.softmax_scale > 0) {  // the compiler must not know
        scalar = few[0] = few[1] = few[2] = large[0] = large[3999] = 1;
        other = 2 * p.softmax_scale;
        vector = {1, 1, 1, 1};
        row = rows[0] = rows[4] = {1, 1, 1};
        element = elements[0] = elements[2] = from_float<Element>(1);
        pair = pairs[0] = pairs[2] = tile[3][3] = 0;
        for (int i = 0; i < 16; ++i) array[i / 4][i % 4] = 1;
    }
    const float zero = p.softmax_scale;
    const auto half = [](uint32_t word, int i) {
        return to_float(Element{uint16_t(word >> 16 * i)});
    };
    const float found[] = {
        scalar, other, few[0], few[2], array[1][0], array[3][3], large[0], large[3999],
        vector.x, vector.w, row.max, row.sum, rows[0].max, rows[4].sum,
        to_float(element), to_float(elements[0]), to_float(elements[2]),
        half(pair, 0), half(pair, 1), half(pairs[0], 0), half(pairs[2], 1), half(tile[3][3], 1)};
    for (float x : found) *lse++ = zero * x;
    for (int i = 0; i < 3; ++i) {
        float inner;  // a new one each time
        float accumulators[2][4];
        if (zero > i) inner = accumulators[0][0] = 1;
        *lse++ = zero * inner;
        *lse++ = zero * accumulators[0][0];
        inner = accumulators[0][0] = 1;
    }
"""


@pytest.mark.parametrize("sanitize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_initialized_is_nan(tmp_path, dtype, sanitize):
    """Scalars, arrays, structs and packed pairs; a product with 0 does not hide it."""
    step = write_step(tmp_path, "uninitialized", UNINITIALIZED)
    q = torch.zeros(1, 1, 2, 8, dtype=dtype)
    _, lse = run(step, CpuBackend(sanitize=sanitize), q, num_lse=28)
    assert lse.isnan().all(), lse


# ---- the backend


def test_printf_goes_to_stderr(tmp_path, capsys):
    """It needs no #include, as on a GPU."""
    step = write_step(
        tmp_path, "print", 'if (t == 0) printf("block %d\\n", block), p.o[block * HEAD_DIM] = 5;'
    )
    o, _ = run(step, CpuBackend())
    assert (o[..., 0] == 5).all()
    assert sorted(capsys.readouterr().err.split("\n")) == ["", "block 0", "block 1"]


def test_what_was_printed_precedes_a_report(tmp_path):
    step = write_step(tmp_path, "print", 'if (t == 0) printf("here\\n"), p.o[16] = 5;')
    with pytest.raises(SimtError, match=r"here\n(here\n)?out-of-bounds write"):
        run(step, CpuBackend())


def test_gold_links_only_where_it_can(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *gold*) exit 1 ;; esac\n')
    compiler.chmod(0o755)
    assert cpu._link_flags(str(compiler)) == ()
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    assert cpu._link_flags("a compiler that is not asked") == ()


@pytest.mark.parametrize("sanitize", [False, True])
def test_headers_are_compiled_once(tmp_path, sanitize):
    """As g++ says with -H; where other flags do not allow it, it compiles them again."""
    code_flags = (*cpu._flags(sanitize), "-O1")
    precompiled = cpu._precompiled(code_flags)
    if not precompiled:
        pytest.skip("only with g++")
    source = tmp_path / "step.cu"
    source.write_text('#include "cuda.h"\nuint3 a;\n')

    def included(*flags: str) -> str:
        more = ["-DHEAD_DIM=8", "-fsyntax-only", "-H", f"-I{cpu.SIMT_DIR}", str(source)]
        command = [*cpu.host_compiler(), *flags, *precompiled, *more]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    assert re.search(r"^! .*language-\w+\.h\.gch$", included(*code_flags), re.MULTILINE)
    assert "cuda.h" not in included(*code_flags)
    assert "cuda.h" in included(*code_flags, "-O0")


def test_changed_headers_are_compiled_again(tmp_path, monkeypatch):
    """Also while a process lives: those of before would define everything twice."""
    headers = tmp_path / "simt"
    shutil.copytree(cpu.SIMT_DIR, headers)
    monkeypatch.setattr(cpu, "SIMT_DIR", headers)
    before = cpu._precompiled(cpu.COMMON_FLAGS)
    if not before:
        pytest.skip("only with g++")
    assert cpu._precompiled(cpu.COMMON_FLAGS) == before
    (headers / "site.h").write_text((headers / "site.h").read_text() + "// changed\n")
    assert cpu._precompiled(cpu.COMMON_FLAGS) != before


def test_compile_errors(tmp_path):
    step = write_step(tmp_path, "static", "__shared__ float tile[32]; tile[t] = 0;")
    with pytest.raises(UsageError, match=r"shared_memory<Layout>\(\)"):
        run(step, CpuBackend())


def test_kernel_name_and_size_are_checked(tmp_path):
    step = write_step(tmp_path, "threads", "", threads=2000)
    with pytest.raises(
        SimtError, match="test_kernel has 2 blocks of 2000 threads; at most 2147483647 of 1024"
    ):
        run(step, CpuBackend())
    step.path.write_text(step.path.read_text().replace("void test_kernel", "void other_kernel"))
    with pytest.raises(SimtError, match='no kernel "test_kernel"'):
        run(step, CpuBackend())


BOUNDED = "__launch_bounds__({}) test_kernel("
# Larger bounds of other kernels, before and after: each kernel has its own.
OTHERS = """
extern "C" __global__ void __launch_bounds__(512) first(AttentionParams p) {}
extern "C" {
__global__ void __launch_bounds__(1024, 2) second(AttentionParams p) {}
}
"""


@pytest.mark.parametrize("bounds", ["32", "THREADS - 1, 4", "THREADS", "64"])
def test_launch_bounds(tmp_path, bounds):
    """48 threads are launched."""
    step = write_step(
        tmp_path,
        "bounds",
        "",
        globals_="constexpr int THREADS = 48;" + OTHERS.replace("first", "a"),
    )
    source = step.path.read_text().replace("test_kernel(", BOUNDED.format(bounds))
    step.path.write_text(source + OTHERS.replace("second", "b"))
    if bounds in ("THREADS", "64"):
        run(step, CpuBackend())
    else:
        allowed = 32 if bounds == "32" else 47
        with pytest.raises(
            SimtError,
            match=rf"kernel test_kernel is launched with 48 threads; its __launch_bounds__ allow "
            rf"{allowed}$",
        ):
            run(step, CpuBackend())


NEEDS_MORE = "more than 99 KiB of shared memory from head_dim {} on"


@pytest.mark.parametrize(
    ("limits", "kib", "told"),
    [
        (
            "sm_75",
            64,
            "not all GPUs for sm_75 have more than 65536: .* let 'limits:' say '; more than 64 KiB",
        ),
        ("sm_80", 99, "not all GPUs for sm_80 have more than 101376: .* from head_dim 8 on', or"),
        (f"sm_80; {NEEDS_MORE.format(16)}", 99, "not all GPUs for sm_80 have more than 101376"),
        (f"sm_80; {NEEDS_MORE.format(8)}", 227, "the most that a GPU for sm_80 has is 232448"),
        ("sm_90a", 227, "the most that a GPU for sm_90a has is 232448"),
    ],
)
def test_shared_memory_is_limited(tmp_path, limits, kib, told):
    """The limit is what all GPUs have, or what Hopper has where the step asks for more."""
    for size in (kib * 1024, kib * 1024 + 16):
        step = write_step(tmp_path, f"large_{size}", "smem.x[0] = 0;", layout=f"char x[{size}];")
        step.path.write_text(step.path.read_text().replace("sm_75", limits))
        step = read_step(step.path)
        if size % 1024 == 0:
            run(step, CpuBackend())
        else:
            with pytest.raises(SimtError, match=f"kernel test_kernel asks for {size} .* {told}"):
                run(step, CpuBackend())


def test_shared_memory_of_architectures():
    """Code for sm_86 also runs on an H100; no GPU that runs code for sm_120 has more."""
    archs = ("sm_80", "sm_120a", "sm_120", "sm_86", "sm_100a")
    kib = {arch: tuple(limit // 1024 for limit in cpu._smem_limits(arch)) for arch in archs}
    assert kib == {
        "sm_80": (99, 227),
        "sm_120a": (99, 99),
        "sm_120": (99, 99),
        "sm_86": (99, 227),
        "sm_100a": (227, 227),
    }
