"""What the GPU backend tells a driver, a fake: what it packs, where it launches."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
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
from common.runtime.pack import simt_encoder
from common.step import read_step
from verify.tests.tensor_map_fields import TensorMapFields

CONTEXT = 7  # torch's
GAP = b"gap"  # before a kernel's parameter
V01 = find_step("v01")
# Without a workspace, whose address may change from call to call.
V11 = find_step("v11")
PARAMS = params_type(V11.operation)
SPEC = Specialization(64, "bf16", causal=False)


class DriverError(Exception):
    pass


class Gpu:
    """The backend, and what happened: names of calls, launches as (stream, parameter)."""

    def __init__(self, monkeypatch) -> None:
        self.events: list = []
        self.current_context = CONTEXT
        self.stream = MagicMock(cuda_stream=0)
        self.stream.wait_stream = lambda other: self.events.append("torch waits")
        self.fails = False
        self.cluster = 1
        driver = MagicMock(Error=DriverError)
        context = driver.Device.return_value.retain_primary_context.return_value
        context.handle = CONTEXT
        context.push = lambda: self.events.append("push")
        driver.Context.pop = lambda: self.events.append("pop")
        driver.Device.return_value.get_attribute.return_value = 227 * 1024
        driver.Stream = lambda: self.events.append("new stream") or SimpleNamespace(handle=11)
        bindings = MagicMock(CUcontext=int)
        bindings.cuCtxGetCurrent = lambda: (0, self.current_context)
        beside = MagicMock()
        beside.wait_stream = lambda other: self.events.append("PyCUDA's waits")

        monkeypatch.setitem(sys.modules, "pycuda", MagicMock(driver=driver))
        monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
        monkeypatch.setattr(gpu, "bindings", lambda: bindings)
        monkeypatch.setattr(gpu, "nvcc", lambda: "nvcc")
        monkeypatch.setattr(gpu, "build_cubin", lambda *job: job)
        properties = SimpleNamespace(multi_processor_count=132)
        for name, value in {
            "is_available": lambda: True,
            "init": lambda: None,
            "get_device_capability": lambda device: (9, 0),
            "get_device_properties": lambda device: properties,
            "current_stream": self.current_stream,
            "ExternalStream": lambda handle, device: beside,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: {0: self.stream.cuda_stream}[index],
            raising=False,  # a torch for the CPU has none
        )
        monkeypatch.setattr(gpu, "empty_on_gpu", self.allocate)
        self.backend = gpu.GpuBackend(torch.device("cuda", 0))
        monkeypatch.setattr(self.backend, "_load", self.load)

    def allocate(self, sizes, strides, dtype, index):
        assert index == 0
        return torch.empty_strided(sizes, strides, dtype=dtype)

    def current_stream(self, index):
        assert self.stream.cuda_stream, "made an object for the default stream"
        return self.stream

    def load(self, step, spec, job):
        descriptor = CpuBackend().descriptor(step, spec)
        plan = gpu.read_plan(descriptor, self.backend.multiprocessors)
        clusters = [self.cluster] * len(plan.kernels)
        packer = gpu.Packer(step, descriptor, plan, clusters, spec, simt_encoder(spec))
        launches = tuple(
            gpu._Launch(self.launch, GAP, (kernel.threads, 1, 1), kernel.smem_bytes)
            for kernel in plan.kernels
        )
        return gpu._Module(step, descriptor, plan, packer, launches, {})

    def launch(self, grid, block, parameters, smem_bytes, stream):
        if self.fails:
            raise DriverError("cuLaunchKernel failed: invalid argument")
        gap, params = parameters[: len(GAP)], parameters[len(GAP) :]
        assert (gap, len(params)) == (GAP, ctypes.sizeof(PARAMS))
        self.grid = grid
        self.events.append((stream and stream.handle, PARAMS.from_buffer_copy(params)))

    def take(self) -> list:
        """What has happened since; of a launch, the stream."""
        events, self.events = self.events, []
        return [event if isinstance(event, str) else event[0] for event in events]


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
    first, second, third = (event[1] for event in fake.events)
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
    scales = [event[1].softmax_scale for event in fake.events if isinstance(event, tuple)]
    assert scales == [0.5, 0.25, 0.5]


def test_a_growing_cache_is_prepared_once(fake, tensors, monkeypatch) -> None:
    """One call is good for all lengths, in one buffer and in new tensors."""
    call = fake.backend.prepare(V11, SPEC)
    q, k, v, o, lse = tensors
    monkeypatch.setattr(fake.backend, "_load", None)
    for seq_k in (7, 8, 9):
        grown = k[:, :, :seq_k], v[:, :, :seq_k].clone()
        call((q, *grown, o, lse), [0.5])
        (_, params) = fake.events[-1]
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
    launches = [event[1] for event in fake.events if isinstance(event, tuple)]
    found = [list(params.workspace)[: len(first)] for params in launches]
    assert found == [addresses[0]] * 3 + [addresses[1]] * 3  # v01 has three kernels


@pytest.mark.parametrize(("heads", "is_there"), [(132, False), (133, True)])
def test_memory_that_a_step_will_not_use_is_not_allocated(fake, heads, is_there) -> None:
    """v12's blocks hand over where one has a second work tile."""
    q, k, v, o = (torch.zeros(1, heads, 9, 64, dtype=torch.bfloat16) for _ in range(4))
    call = fake.backend.prepare(find_step("v12"), SPEC)
    (workspace,) = call((q, k, v, o, torch.zeros(1, heads, 9)), [0.5])
    assert (workspace.nbytes > 0) == is_there
    (_, params) = fake.events[-1]
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


def test_a_thread_in_another_context(fake, tensors) -> None:
    call = fake.backend.prepare(V11, SPEC)
    call(tensors, [0.5])
    fake.take()
    for fake.current_context in (0, CONTEXT + 1):
        call(tensors, [0.5])
        assert fake.take() == ["push", None, "pop"]


def test_another_stream(fake, tensors) -> None:
    call = fake.backend.prepare(V11, SPEC)
    call(tensors, [0.5])
    fake.take()
    fake.stream.cuda_stream = 5
    call(tensors, [0.5])
    assert fake.take() == ["push", "new stream", "pop", "PyCUDA's waits", 11, "torch waits"]
    call(tensors, [0.5])
    assert fake.take() == ["PyCUDA's waits", 11, "torch waits"]


def test_a_launch_that_fails_is_one_clear_line(fake, tensors) -> None:
    fake.fails, fake.stream.cuda_stream = True, 5
    call = fake.backend.prepare(V11, SPEC)
    with pytest.raises(RuntimeError, match=rf"^{V11.name} cannot be launched: cuLaunchKernel"):
        call(tensors, [0.5])
    assert fake.take()[-1] == "torch waits"


def test_a_grid_is_filled_up_to_whole_clusters(fake, tensors) -> None:
    """Which are known when the step is loaded."""
    q, k, v, *_ = tensors
    tensors = [t[:, :1].expand(-1, 3, -1, -1) for t in (q, k, v)]
    outputs = [torch.empty_like(tensors[0]), torch.empty(1, 3, 9)]
    for step, fake.cluster, blocks in (("v08", 1, 3), ("v09", 2, 4)):
        fake.backend.launch(find_step(step), *tensors, *outputs, causal=False, softmax_scale=0.5)
        assert fake.grid == (blocks, 1, 1)


def test_a_step_reads_no_rows_off_its_alignment(fake, tensors) -> None:
    q, *others = tensors
    off = torch.zeros(1, 2, 9, 65, dtype=q.dtype)[..., :64]
    with pytest.raises(UsageError, match="v11 reads 16 bytes at a time, and the stride 585 of"):
        fake.backend.launch(V11, off, *others, causal=False, softmax_scale=0.5)
    assert not fake.events


@pytest.fixture
def load(fake, monkeypatch) -> Callable[[bytes | None], gpu._Module]:
    """Loads three kernels whose kernels_start_early is these bytes; None: they have none."""
    step = read_step(ROOT / "verify" / "instructions" / "dependent_launch.cu")
    descriptor = CpuBackend().descriptor(step, Specialization(8, "bf16", False))
    resources = dict.fromkeys(("first", "second", "third"), Resources(*[0] * 6))
    monkeypatch.setattr(gpu, "driver_encoder", simt_encoder)
    monkeypatch.setattr(gpu, "parse_resources", lambda log: resources)
    monkeypatch.setattr(gpu, "_inspect", lambda cubin, kernel, params_bytes, device: (16, 2))
    monkeypatch.setattr(gpu, "EarlyLaunch", lambda cubin, name, smem_bytes: f"early {name}")

    def load(start_early: bytes | None) -> gpu._Module:
        symbols = {"launch_descriptor": bytes(descriptor)}
        if start_early is not None:
            symbols["kernels_start_early"] = start_early

        def get_global(name):
            if name not in symbols:
                raise DriverError("cuModuleGetGlobal failed: named symbol not found")
            return name, len(symbols[name])

        def memcpy_dtoh(to, name):
            ctypes.memmove(ctypes.addressof(to), symbols[name], ctypes.sizeof(to))

        pycuda = fake.backend._driver
        pycuda.LogicError = DriverError
        pycuda.module_from_file.return_value.get_global = get_global
        pycuda.memcpy_dtoh = memcpy_dtoh
        spec = Specialization(8, "bf16", causal=False)
        return gpu.GpuBackend._load(fake.backend, step, spec, Build(Path("step.cubin"), ""))

    return load


def test_kernels_that_start_early_are_launched_by_cuda_bindings(fake, load) -> None:
    module = fake.backend._driver.module_from_file.return_value
    by_pycuda = module.get_function.return_value._launch_kernel, bytes(16)

    def launches(start_early: bytes | None) -> list[tuple]:
        return [(launch.start, launch.gap) for launch in load(start_early).launches]

    assert launches(b"\1\0\0\0") == [by_pycuda, ("early second", b""), ("early third", b"")]
    for absent_or_0 in (None, bytes(4)):
        assert launches(absent_or_0) == [by_pycuda] * 3


@pytest.mark.parametrize(
    ("start_early", "error"),
    [
        (b"\2\0\0\0", "kernels_start_early is 2: make it 0 or 1"),
        (b"\xff\xff\xff\xff", "kernels_start_early is -1: make it 0 or 1"),
        (b"\1", "kernels_start_early has 1 bytes: make it int32_t"),
        (bytes(8), "kernels_start_early has 8 bytes: make it int32_t"),
    ],
)
def test_a_wrong_kernels_start_early_is_one_clear_line(load, start_early, error) -> None:
    with pytest.raises(UsageError, match=f"^dependent_launch: {error}$"):
        load(start_early)


@pytest.fixture
def early(monkeypatch) -> SimpleNamespace:
    """cuda-bindings: keeps what is launched, as (config, function, the parameter's 4 bytes)."""
    driver._early_config.cache_clear()
    fake = MagicMock(CUlaunchConfig=SimpleNamespace, CUstream=int, launched=[], status=0)
    fake.CUresult.CUDA_SUCCESS = 0
    fake.CUlaunchAttribute = lambda: SimpleNamespace(value=SimpleNamespace())
    fake.cuDriverGetVersion.return_value = 0, driver.MIN_VERSION
    fake.cuLibraryLoadFromFile.return_value = 0, "library"
    fake.cuLibraryGetKernel = lambda library, name: (0, f"{name.decode()} of {library}")
    fake.cuKernelGetFunction = lambda kernel: (0, f"function {kernel}")
    fake.cuFuncSetAttribute.return_value = (0,)

    def launch(config, function, parameters, extra):
        fake.launched.append((config, function, ctypes.string_at(parameters, 4)))
        assert extra == 0
        return (fake.status,)

    fake.cuLaunchKernelEx = launch
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    yield fake
    driver._early_config.cache_clear()


def test_what_an_early_launch_tells_the_driver(early) -> None:
    launch = driver.EarlyLaunch(Path("step.cubin"), "second", 64)
    stream = SimpleNamespace(handle=11)
    for on in (None, stream, stream):
        launch((5, 1, 1), (96, 1, 1), b"\0\1\2\3", 32, on)
    for _, function, parameter in early.launched:
        assert (function, parameter) == ("function second of library", b"\0\1\2\3")
    default, first, again = (config for config, *_ in early.launched)
    assert first is again, "made the same once more"
    assert [default.hStream, first.hStream] == [0, 11]
    for config in (default, first):
        (attribute,) = config.attrs
        ids = early.CUlaunchAttributeID
        assert attribute.id is ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert attribute.value.programmaticStreamSerializationAllowed == config.numAttrs == 1
        assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (5, 1, 1)
        assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (96, 1, 1)
        assert config.sharedMemBytes == 32


def test_an_early_launch_that_fails_is_one_clear_line(early) -> None:
    launch = driver.EarlyLaunch(Path("step.cubin"), "second", 64)
    early.status = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(RuntimeError, match="second cannot be launched: CUDA_ERROR_INVALID"):
        launch((5, 1, 1), (96, 1, 1), b"\0\1\2\3", 32, None)
