"""What the GPU backend tells a driver, a fake, of a call: what it packs, where it launches."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from common.catalog import find_step
from common.errors import UsageError
from common.lengths import UNLIMITED, Lengths
from common.paths import ROOT
from common.problem import Specialization
from common.runtime import driver
from common.runtime.backend import empty_on_gpu
from common.runtime.launch import Kernel, LengthsParams
from common.runtime.pack import library
from verify.tests.fake_gpu import CONTEXT, INVALID_VALUE, PARAMS, STREAM, Gpu
from verify.tests.tensor_map_fields import TensorMapFields

V01 = find_step("v01")
# Without a workspace, whose address may change from call to call.
V11 = find_step("v11")
V14 = find_step("v14")  # takes lengths
SPEC = Specialization(64, "bf16", causal=False)


@pytest.fixture
def fake(monkeypatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, ...]:
    """q, k, v, o and lse."""
    q, k, v, o = (torch.zeros(1, 2, 9, 64, dtype=torch.bfloat16) for _ in range(4))
    return q, k, v, o, torch.zeros(1, 2, 9)


def encoded(params, name: str) -> tuple[int, ...]:
    """A map's address, sizes and strides in bytes, innermost axis first."""
    fields = TensorMapFields.from_buffer_copy(getattr(params, f"{name}_map"))
    assert (fields.begin, fields.axes) == (0, 4)
    sizes, byte_strides = fields.lies()
    return fields.address, *sizes, *byte_strides


@pytest.mark.parametrize("index", range(5))
def test_another_address_is_packed(fake, tensors, index) -> None:
    call = fake.backend.prepare(V11, SPEC)
    call(tensors, [0.5])
    others = [t.clone() if place == index else t for place, t in enumerate(tensors)]
    call(others, [0.5])
    call(tensors, [0.5])
    first, second, third = (launch.params for launch in fake.driver.launches)
    name = ("q", "k", "v", "o", "lse")[index]
    assert getattr(first, name) == getattr(third, name) == tensors[index].data_ptr()
    assert getattr(second, name) == others[index].data_ptr()
    if name != "lse":
        assert encoded(first, name) == encoded(third, name)
        assert encoded(second, name)[0] == others[index].data_ptr()
        assert encoded(second, name)[1:] == encoded(first, name)[1:]


def test_another_scale_is_packed(fake, tensors) -> None:
    call = fake.backend.prepare(V11, SPEC)
    for scale in (0.5, 0.25, 0.5):
        call(tensors, [scale])
    scales = [launch.params.softmax_scale for launch in fake.driver.launches]
    assert scales == [0.5, 0.25, 0.5]


def test_a_growing_cache_is_prepared_once(fake, tensors, monkeypatch) -> None:
    """One call is good for all lengths, in one buffer and in new tensors."""
    call = fake.backend.prepare(V11, SPEC)
    q, k, v, o, lse = tensors
    monkeypatch.setattr(fake.backend, "_load", None)
    for seq_k in (7, 8, 9):
        grown = k[:, :, :seq_k], v[:, :, :seq_k].clone()
        call((q, *grown, o, lse), [0.5])
        params = fake.driver.launches[-1].params
        assert params.seq_k == seq_k
        for name, t, head in zip(("k", "v"), grown, (9, seq_k), strict=True):
            sizes, byte_strides = (64, seq_k, 2, 1), (128, 128 * head, 0)
            assert encoded(params, name) == (t.data_ptr(), *sizes, *byte_strides)
            strides = getattr(params, f"{name}_stride")
            assert (strides.batch, strides.head, strides.row) == (0, 64 * head, 64)


def test_lengths_are_packed(fake, tensors) -> None:
    """All kernels get them, and what a call has been told does not last until the next one."""
    fake.driver.params = type(
        "Params", (PARAMS,), {"_fields_": [*LengthsParams._fields_, ("_end", ctypes.c_uint8 * 88)]}
    )
    call = fake.backend.prepare(V14, SPEC)
    starts, others, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [0, 9, 9], [1]))
    told = [
        Lengths(starts, others, None, 3, 0),
        Lengths(seqused_k=used, window_left=5),
        None,
    ]
    expected = [
        (starts.data_ptr(), others.data_ptr(), 0, 2, 3, 0),
        (0, 0, used.data_ptr(), 1, 5, UNLIMITED),
        (0, 0, 0, 1, UNLIMITED, UNLIMITED),
    ]
    for lengths, fields in zip(told, expected, strict=True):
        assert call(tensors, [0.5], lengths)
        for launch in fake.driver.launches[-2:]:
            found = [getattr(launch.params, name) for name, _ in LengthsParams._fields_]
            assert tuple(found) == fields
            assert (launch.params.q, launch.params.seq_q) == (tensors[0].data_ptr(), 9)
    assert len(fake.driver.launches) == 6  # v14 has two kernels


def test_a_new_workspace_is_packed(fake, tensors) -> None:
    call = fake.backend.prepare(V01, SPEC)
    first, second = (call(tensors, [0.5]) for _ in range(2))
    addresses = [[part.data_ptr() for part in workspace] for workspace in (first, second)]
    assert addresses[0] != addresses[1]
    launches = fake.driver.launches
    found = [list(launch.params.workspace)[: len(first)] for launch in launches]
    assert found == [addresses[0]] * 3 + [addresses[1]] * 3  # v01 has three kernels


@pytest.mark.parametrize(("heads", "is_there"), [(132, False), (133, True)])
def test_memory_that_a_step_will_not_use_is_not_allocated(fake, heads, is_there) -> None:
    """v12's blocks hand over where one has a second work tile."""
    q, k, v, o = (torch.zeros(1, heads, 9, 64, dtype=torch.bfloat16) for _ in range(4))
    call = fake.backend.prepare(find_step("v12"), SPEC)
    (workspace,) = call((q, k, v, o, torch.zeros(1, heads, 9)), [0.5])
    assert (workspace.nbytes > 0) == is_there
    params = fake.driver.launches[-1].params
    assert list(params.workspace) == [workspace.data_ptr(), 0]


@pytest.mark.parametrize(("heads", "kernels"), [(118, 2), (119, 1)])
def test_a_kernel_without_blocks_is_not_launched(fake, heads, kernels) -> None:
    """v13's second one merges. Work tiles for nine tenths of 132 multiprocessors stay whole, two
    rounds of them as one.
    """
    q, o = (torch.zeros(2, heads, 9, 64, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.zeros(2, heads, 200, 64, dtype=torch.bfloat16) for _ in range(2))
    call = fake.backend.prepare(find_step("v13"), SPEC)
    assert call((q, k, v, o, torch.zeros(2, heads, 9)), [0.5])
    assert len(fake.driver.launches) == kernels


@pytest.mark.parametrize(("current", "index"), [(0, 0), (1, 0)])
def test_memory_is_that_of_the_gpu(monkeypatch, current, index) -> None:
    """Not of torch's current one, which can be another."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    guards = SimpleNamespace(_empty_strided_cuda=lambda *given: (*given, f"cuda:{current}"))
    monkeypatch.setattr(torch._C._dynamo, "guards", guards)
    monkeypatch.setattr(
        torch,
        "empty_strided",
        lambda sizes, strides, dtype, device: (sizes, strides, dtype, str(device)),
    )
    found = empty_on_gpu((2, 3), (3, 1), torch.float32, index)
    assert found == ((2, 3), (3, 1), torch.float32, "cuda:0")


SECOND_GPU = """
import torch
from common import attention
q, k, v = (torch.randn(1, 2, 300, 64, dtype=torch.bfloat16, device="cuda:1") for _ in range(3))
o = attention(q, k, v, step="v01")  # which needs a workspace
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
torch.testing.assert_close(o, expected, atol=2e-2, rtol=2e-2)
assert torch.cuda.max_memory_allocated(0) == 0
"""


@pytest.mark.gpu
def test_the_second_gpu() -> None:
    """In a process that has used no other."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    ended = subprocess.run([sys.executable, "-c", SECOND_GPU], cwd=ROOT, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()


@pytest.mark.parametrize("current", [None, CONTEXT + 1])
def test_a_thread_in_another_context(fake, tensors, current) -> None:
    """And back in that one afterwards, also where nothing was launched."""
    call = fake.backend.prepare(V11, SPEC)
    fake.driver.contexts = [current]
    call(tensors, [0.5])
    push, launch, pop = fake.driver.events
    assert (push, launch.grid, pop) == ("push", (2, 1, 1), "pop")
    fake.driver.events.clear()
    assert call([t[:, :1] if t is tensors[1] else t for t in tensors], [0.5]) is None
    assert fake.driver.events == ["push", "pop"]
    assert fake.driver.contexts == [current]


@pytest.mark.parametrize("step", [V01, V11], ids=lambda step: step.name)
def test_kernels_are_launched_as_the_descriptor_says(fake, tensors, step) -> None:
    fake.backend.prepare(step, SPEC)(tensors, [0.5])
    kernels = fake.backend.descriptor(step, SPEC).kernels
    for launch, kernel in zip(fake.driver.events, kernels, strict=False):
        assert launch.block == (kernel.threads, 1, 1)
        assert launch.smem_bytes == kernel.smem_bytes
    # The tiles of v01's kernels: 8 keys by 32 queries, a query, 4 queries. 2 heads, 9 of both.
    grids = {"v01": [2 * 2, 9 * 2, 3 * 2], "v11": [2]}[step.name]
    assert [launch.grid for launch in fake.driver.events] == [(grid, 1, 1) for grid in grids]


def test_a_map_that_a_step_does_not_ask_for_is_zero(fake, tensors) -> None:
    fake.backend.prepare(V01, SPEC)(tensors, [0.5])
    for launch in fake.driver.launches:
        assert bytes(launch.params.q_map) == bytes(launch.params.o_map) == bytes(128)


def test_a_launch_goes_to_torchs_current_stream(fake, tensors) -> None:
    call = fake.backend.prepare(V11, SPEC)
    for fake.stream in (0, STREAM, 0):
        call(tensors, [0.5])
    assert [launch.stream for launch in fake.driver.events] == [0, STREAM, 0]


@pytest.mark.parametrize(
    ("name", "happened"),
    [
        ("cuCtxGetCurrent", []),
        ("cuCtxPushCurrent_v2", []),
        ("cuLaunchKernelEx", ["push", "pop"]),
    ],
)
def test_a_launch_that_fails_is_one_clear_line(fake, tensors, name, happened) -> None:
    call = fake.backend.prepare(V11, SPEC)
    fake.driver.contexts, fake.driver.fails = [None], {name: INVALID_VALUE}
    with pytest.raises(RuntimeError, match=rf"^{V11.name} cannot be .*: CUDA_ERROR_INVALID_VALUE$"):
        call(tensors, [0.5])
    assert fake.driver.events == happened


def test_after_a_kernel_that_fails_none_is_launched(fake, tensors) -> None:
    call = fake.backend.prepare(V01, SPEC)
    functions = []

    def fail_second(config, function, params, extra):
        functions.append(function or 0)
        return INVALID_VALUE if len(functions) == 2 else 0

    fake.driver.cuLaunchKernelEx = fail_second
    with pytest.raises(RuntimeError, match="cannot be launched: CUDA_ERROR_INVALID_VALUE"):
        call(tensors, [0.5])
    assert functions == [0, 1]


def test_a_status_that_the_bindings_do_not_know_is_told_by_its_number(fake, tensors) -> None:
    call = fake.backend.prepare(V11, SPEC)
    fake.driver.fails = {"cuLaunchKernelEx": 987}
    with pytest.raises(RuntimeError, match=f"^{V11.name} cannot be launched: 987$"):
        call(tensors, [0.5])


def test_a_tensor_without_a_map_is_named(fake, tensors) -> None:
    q, k, *others = tensors
    far = torch.empty(0, dtype=k.dtype, device="meta")
    far = far.as_strided((1, 2, 9, 64), (0, 1 << 39, 64, 1))
    call = fake.backend.prepare(V11, SPEC)
    with pytest.raises(UsageError, match="k has one of 1099511627776: pass"):
        call((q, far, *others), [0.5])
    assert not fake.driver.events


def test_another_thread_can_work_while_a_launch_waits() -> None:
    """For room in the stream's queue: a PyDLL would hold the GIL."""
    assert not isinstance(library(), ctypes.PyDLL)


def test_addresses_are_those_of_the_functions(monkeypatch) -> None:
    monkeypatch.setattr(driver, "_library", library)
    for name in ("pack", "launch"):
        expected = ctypes.cast(getattr(library(), name), ctypes.c_void_p).value
        assert driver.address(name) == expected


def test_poison_fills_the_workspace(fake, tensors) -> None:
    fake.backend._poison = True
    for part in fake.backend.prepare(V01, SPEC)(tensors, [0.5]):
        assert part.eq(0xFF).all()


def test_a_grid_beyond_32_bits_is_not_cut_off(fake, tensors) -> None:
    """The driver rejects what it is told instead."""
    *strided, lse = tensors
    many = [t[:, :1].expand(1 << 16, (1 << 16) + 1, -1, -1) for t in strided]
    fake.backend.prepare(find_step("v08"), SPEC)((*many, lse), [0.5])
    assert fake.driver.launches[-1].grid == ((1 << 32) - 1, 1, 1)


def test_a_grid_is_filled_up_to_whole_clusters(fake, tensors) -> None:
    """Which are known when the step is loaded."""
    q, k, v, *_ = tensors
    tensors = [t[:, :1].expand(-1, 3, -1, -1) for t in (q, k, v)]
    outputs = [torch.empty_like(tensors[0]), torch.empty(1, 3, 9)]
    for step, fake.cluster, blocks in (("v08", 1, 3), ("v09", 2, 4)):
        fake.backend.launch(find_step(step), *tensors, *outputs, causal=False, softmax_scale=0.5)
        assert fake.driver.launches[-1].grid == (blocks, 1, 1)


@pytest.mark.parametrize(
    ("persistent", "cluster", "clusters", "blocks"),
    [(132, 4, 30, 120), (132, 2, 66, 132), (132, 2, 70, 132), (132, 1, 0, 132), (0, 4, 30, 0)],
)
def test_clusters_of_persistent_blocks_fit(fake, persistent, cluster, clusters, blocks) -> None:
    """At a time: of 132 multiprocessors some may have too few neighbours."""

    def fitting(function: int, config) -> tuple[int, int]:
        assert (function, config.gridDimX, config.blockDimX) == (3, cluster, 384)
        assert config.sharedMemBytes == 1000
        return 0, clusters

    fake.driver.bindings.cuOccupancyMaxActiveClusters = fitting
    kernel = Kernel("attention_forward", (), 384, 1000, persistent)
    assert fake.backend._that_fits(kernel, 3, cluster).most_blocks == blocks


def test_a_step_reads_no_rows_off_its_alignment(fake, tensors) -> None:
    q, *others = tensors
    off = torch.zeros(1, 2, 9, 65, dtype=q.dtype)[..., :64]
    with pytest.raises(UsageError, match="v11 reads 16 bytes at a time, and the stride 585 of"):
        fake.backend.launch(V11, off, *others, causal=False, softmax_scale=0.5)
    assert not fake.driver.events
