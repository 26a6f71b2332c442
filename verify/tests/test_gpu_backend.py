"""What the GPU backend tells a driver, a fake: what it packs, where it launches."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from common.catalog import find_step
from common.errors import UsageError
from common.paths import ROOT
from common.problem import Specialization
from common.runtime import driver, gpu
from common.runtime.backend import empty_on_gpu
from common.runtime.build import Build, Resources
from common.runtime.cpu import CpuBackend
from common.runtime.launch import params_type
from common.runtime.launcher import Launcher, LoadedKernel
from common.runtime.pack import Packer, library, simt_encoder
from common.step import read_step
from verify.tests.tensor_map_fields import TensorMapFields

CONTEXT = 7 << 40  # torch's
STREAM = 5 << 40
LIMIT = 227 * 1024  # of a block's shared memory
INVALID_VALUE, NOT_FOUND = 1, 500  # of CUresult
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
V01 = find_step("v01")
# Without a workspace, whose address may change from call to call.
V11 = find_step("v11")
PARAMS = params_type(V11.operation)
SPEC = Specialization(64, "bf16", causal=False)


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, as in pack.cpp; test_launch.py compares that with cuda.h."""

    _fields_ = [("id", ctypes.c_int), ("_pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig, likewise."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class Told:
    """What cuLaunchKernelEx was told."""

    function: int
    stream: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int
    attributes: tuple[tuple[int, int], ...]  # id, value
    params: ctypes.Structure


class Driver:
    """libcuda and cuda-bindings: keeps what happened, names of calls and launches."""

    def __init__(self) -> None:
        self.events: list[str | Told] = []
        self.contexts = [CONTEXT]  # those of the thread; the last one is current
        self.fails: dict[str, int] = {}  # the status of a function, by its name
        self.params = PARAMS
        handle = ctypes.c_void_p
        types = {
            "cuCtxGetCurrent": (ctypes.POINTER(handle),),
            "cuCtxPushCurrent_v2": (handle,),
            "cuCtxPopCurrent_v2": (ctypes.POINTER(handle),),
            "cuLaunchKernelEx": (ctypes.POINTER(Config), handle, ctypes.POINTER(handle), handle),
        }
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *of)(partial(self._call, name))
            for name, of in types.items()
        }
        self.bindings = MagicMock(CUresult=CUresult)

    def address(self, name: str) -> int:
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value

    def _call(self, name: str, *arguments) -> int:
        # What is raised in a callback is lost.
        return self.fails.get(name) or getattr(self, name)(*arguments) or 0

    def cuCtxGetCurrent(self, current) -> None:
        current[0] = self.contexts[-1]

    def cuCtxPushCurrent_v2(self, context) -> None:
        self.contexts.append(context)
        self.events.append("push")

    def cuCtxPopCurrent_v2(self, popped) -> None:
        popped[0] = self.contexts.pop()
        self.events.append("pop")

    def cuLaunchKernelEx(self, config, function, params, extra) -> int | None:
        if self.contexts[-1] != CONTEXT or extra:
            return INVALID_VALUE
        config = config.contents
        attributes = config.attributes[: config.num_attributes]
        self.events.append(
            Told(
                function,
                config.stream or 0,
                tuple(config.grid),
                tuple(config.block),
                config.smem_bytes,
                tuple((attribute.id, attribute.value[0]) for attribute in attributes),
                self.params.from_buffer_copy(
                    ctypes.string_at(params[0], ctypes.sizeof(self.params))
                ),
            )
        )

    @property
    def launches(self) -> list[Told]:
        return [event for event in self.events if isinstance(event, Told)]


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = INVALID_VALUE
    CUDA_ERROR_NOT_FOUND = NOT_FOUND


class Gpu:
    """The backend on a fake driver."""

    def __init__(self, monkeypatch) -> None:
        self.driver = Driver()
        self.stream = 0  # torch's current one
        self.cluster = 1
        pycuda = self.pycuda = MagicMock()
        context = pycuda.Device.return_value.retain_primary_context.return_value
        context.handle, context.push = CONTEXT, lambda: self.driver.contexts.append(CONTEXT)
        pycuda.Context.pop = self.driver.contexts.pop
        pycuda.Device.return_value.get_attribute.return_value = LIMIT
        monkeypatch.setitem(sys.modules, "pycuda", MagicMock(driver=pycuda))
        monkeypatch.setitem(sys.modules, "pycuda.driver", pycuda)
        monkeypatch.setattr(driver, "address", self.driver.address)
        for module in (driver, gpu):
            monkeypatch.setattr(module, "bindings", lambda: self.driver.bindings)
        monkeypatch.setattr(gpu, "nvcc", lambda: "nvcc")
        monkeypatch.setattr(gpu, "build_cubin", lambda *job: job)
        properties = SimpleNamespace(multi_processor_count=132)
        for name, value in {
            "is_available": lambda: True,
            "init": lambda: None,
            "get_device_capability": lambda device: (9, 0),
            "get_device_properties": lambda device: properties,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: {1: self.stream}[index],
            raising=False,  # a torch for the CPU has none
        )
        monkeypatch.setattr(gpu, "empty_on_gpu", self.allocate)
        self.backend = gpu.GpuBackend(torch.device("cuda", 1))
        monkeypatch.setattr(self.backend, "_load", self.load)

    def allocate(self, sizes, strides, dtype, index):
        assert index == 1
        return torch.empty_strided(sizes, strides, dtype=dtype)

    def load(self, step, spec, job):
        descriptor = CpuBackend().descriptor(step, spec)
        plan = gpu.read_plan(descriptor, self.backend.multiprocessors)
        clusters = [self.cluster] * len(plan.kernels)
        packer = Packer(step, descriptor, plan, clusters, spec, simt_encoder(spec))
        kernels = [
            LoadedKernel(index, kernel.threads, kernel.smem_bytes, starts_early=False)
            for index, kernel in enumerate(plan.kernels)
        ]
        launcher = Launcher(step.name, packer, CONTEXT, kernels)
        return gpu._Module(step, descriptor, plan, launcher, {})


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
    return fields.address, *fields.sizes, *fields.strides


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


def test_a_step_reads_no_rows_off_its_alignment(fake, tensors) -> None:
    q, *others = tensors
    off = torch.zeros(1, 2, 9, 65, dtype=q.dtype)[..., :64]
    with pytest.raises(UsageError, match="v11 reads 16 bytes at a time, and the stride 585 of"):
        fake.backend.launch(V11, off, *others, causal=False, softmax_scale=0.5)
    assert not fake.driver.events


SMEM_BYTES = {"first": 0, "second": LIMIT, "third": LIMIT + 1}


STEP = read_step(ROOT / "verify" / "instructions" / "dependent_launch.cu")
STEP_SPEC = Specialization(8, "bf16", causal=False)


class Cubin:
    """A cubin of three kernels, loaded into the fake driver."""

    def __init__(self, fake: Gpu, monkeypatch) -> None:
        self.fake = fake
        self.params_bytes, self.cluster = ctypes.sizeof(PARAMS), 2
        self.descriptor = CpuBackend().descriptor(STEP, STEP_SPEC)
        for kernel in self.descriptor.kernels:
            kernel.smem_bytes = SMEM_BYTES[kernel.name.decode()]
        self.symbols = {"launch_descriptor": bytes(self.descriptor)}
        self.names = [kernel.name for kernel in self.descriptor.kernels]
        self.get_global_status = 0
        resources = dict.fromkeys(SMEM_BYTES, Resources(*[0] * 6))
        monkeypatch.setattr(gpu, "driver_encoder", simt_encoder)
        monkeypatch.setattr(gpu, "parse_resources", lambda log: dict(resources))
        bindings = fake.driver.bindings
        bindings.cuModuleLoad = self.load_module
        bindings.cuModuleGetGlobal = self.get_global
        bindings.cuModuleGetFunction = lambda module, name: (0, self.names.index(name))
        bindings.cuFuncGetParamInfo = lambda function, index: (0, 16, self.params_bytes)
        bindings.cuFuncGetAttribute = lambda width, function: (0, self.cluster)
        bindings.cuFuncSetAttribute = MagicMock(return_value=(0,))
        fake.pycuda.memcpy_dtoh = lambda to, address: ctypes.memmove(
            ctypes.addressof(to), address, ctypes.sizeof(to)
        )

    def load_module(self, path: bytes) -> tuple:
        here = self.fake.driver.contexts[-1] == CONTEXT
        return (0, f"module of {path.decode()}") if here else (CUresult(INVALID_VALUE), None)

    def get_global(self, module: str, name: bytes) -> tuple:
        assert module == "module of step.cubin"
        found = self.symbols.get(name.decode())
        if self.get_global_status or found is None:
            return CUresult(self.get_global_status or NOT_FOUND), None, None
        self.kept = ctypes.create_string_buffer(found)
        return CUresult(0), ctypes.addressof(self.kept), len(found)

    def load(self) -> gpu._Module:
        build = Build(Path("step.cubin"), "")
        return gpu.GpuBackend._load(self.fake.backend, STEP, STEP_SPEC, build)


@pytest.fixture
def cubin(fake, monkeypatch) -> Cubin:
    return Cubin(fake, monkeypatch)


@pytest.mark.parametrize(
    ("start_early", "attributes"),
    [(None, ()), (bytes(4), ()), (b"\1\0\0\0", ((EARLY, 1),))],
)
def test_kernels_but_the_first_start_early(fake, cubin, start_early, attributes) -> None:
    if start_early is not None:
        cubin.symbols["kernels_start_early"] = start_early
    q = torch.zeros(1, 3, 9, 8, dtype=torch.bfloat16)
    assert cubin.load().launcher([q] * 5, [0.5], [], STREAM)
    launches = fake.driver.launches
    assert [launch.attributes for launch in launches] == [(), attributes, attributes]
    assert [launch.function or 0 for launch in launches] == [0, 1, 2]
    assert [launch.smem_bytes for launch in launches] == [*SMEM_BYTES.values()]
    assert {(launch.stream, launch.block) for launch in launches} == {(STREAM, (64, 1, 1))}


@pytest.mark.parametrize(("cluster", "blocks"), [(0, 9), (1, 9), (2, 10)])
def test_a_kernel_without_clusters_has_a_width_of_0(fake, cubin, cluster, blocks) -> None:
    cubin.cluster = cluster
    q = torch.zeros(1, 3, 9, 8, dtype=torch.bfloat16)
    cubin.load().launcher([q] * 5, [0.5], [], STREAM)
    assert {launch.grid for launch in fake.driver.launches} == {(blocks, 1, 1)}


def test_a_kernel_may_take_the_shared_memory_that_it_asks_for(fake, cubin) -> None:
    """And one that asks for more than there is does not run."""
    module = fake.backend._modules[STEP, STEP_SPEC] = cubin.load()
    attributes = fake.driver.bindings.CUfunction_attribute
    limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    told = [call.args for call in fake.driver.bindings.cuFuncSetAttribute.call_args_list]
    assert told == [(0, limit, 0), (1, limit, LIMIT), (2, limit, LIMIT)]
    assert {name: r.dynamic_smem for name, r in module.resources.items()} == SMEM_BYTES
    with pytest.raises(UsageError, match=f"needs {LIMIT + 1} bytes .* this device has {LIMIT}$"):
        fake.backend.prepare(STEP, STEP_SPEC)


@pytest.mark.parametrize("current", [None, CONTEXT + 1])
def test_loading_leaves_a_thread_in_its_context(fake, cubin, current) -> None:
    fake.driver.contexts[:] = [current]
    cubin.load()
    assert fake.driver.contexts == [current]


@pytest.mark.parametrize(
    ("start_early", "error"),
    [
        (b"\2\0\0\0", "kernels_start_early is 2: make it 0 or 1"),
        (b"\xff\xff\xff\xff", "kernels_start_early is -1: make it 0 or 1"),
        (b"\1", "kernels_start_early has 1 bytes: make it int32_t"),
        (bytes(8), "kernels_start_early has 8 bytes: make it int32_t"),
    ],
)
def test_a_wrong_kernels_start_early_is_one_clear_line(cubin, start_early, error) -> None:
    cubin.symbols["kernels_start_early"] = start_early
    with pytest.raises(UsageError, match=f"^dependent_launch: {error}$"):
        cubin.load()


def test_a_variable_that_cannot_be_read_is_not_taken_for_none(cubin) -> None:
    cubin.get_global_status = INVALID_VALUE
    with pytest.raises(RuntimeError, match="cuModuleGetGlobal returned CUDA_ERROR_INVALID_VALUE"):
        cubin.load()


def test_structs_of_another_size_are_not_used(cubin) -> None:
    descriptor = cubin.symbols["launch_descriptor"]
    for descriptor_bytes, params_bytes in ((-1, 0), (0, 128)):
        cubin.symbols["launch_descriptor"] = descriptor[: len(descriptor) + descriptor_bytes]
        cubin.params_bytes = ctypes.sizeof(PARAMS) + params_bytes
        with pytest.raises(AssertionError, match=r"launch\.py and launch\.h differ"):
            cubin.load()
