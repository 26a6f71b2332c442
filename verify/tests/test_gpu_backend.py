"""What the GPU backend tells a driver, a fake: when it packs, where it launches."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from common.catalog import find_step
from common.runtime import gpu
from common.runtime.cpu import CpuBackend
from common.runtime.launch import params_type

CONTEXT = 7  # torch's
GAP = b"gap"  # before a kernel's parameter
V01 = find_step("v01")
# Without a workspace, whose address may change from call to call.
V11 = find_step("v11")
PARAMS = params_type(V11.operation)


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
        monkeypatch.setattr(gpu, "encode_for_gpu", self.encode)
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
        self.backend = gpu.GpuBackend(torch.device("cuda", 0))
        self.backend.device = torch.device("cpu", 0)  # of the workspaces
        monkeypatch.setattr(self.backend, "_load", self.load)

    def current_stream(self, index):
        assert self.stream.cuda_stream, "made an object for the default stream"
        return self.stream

    def encode(self, step_name, maps):
        self.events.append("encode")
        return {name: bytes(128) for name in maps}

    def load(self, operation, job):
        step, spec, _ = job
        descriptor = CpuBackend().descriptor(step, spec)
        functions = {
            kernel.name.decode(): (SimpleNamespace(_launch_kernel=self.launch), GAP)
            for kernel in descriptor.kernels
            if kernel.name
        }
        return gpu._Module(descriptor, functions, {})

    def launch(self, grid, block, parameters, smem_bytes, stream):
        if self.fails:
            raise DriverError("cuLaunchKernel failed: invalid argument")
        gap, params = parameters[: len(GAP)], parameters[len(GAP) :]
        assert (gap, len(params)) == (GAP, ctypes.sizeof(PARAMS))
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


def test_a_repeated_call_packs_nothing(fake, tensors) -> None:
    call = fake.backend.prepare(V11, tensors, causal=False)
    call(*tensors, 0.5)
    assert fake.take() == ["push", "encode", "pop", None]
    call(*tensors, 0.5)
    assert fake.take() == [None]


@pytest.mark.parametrize("index", range(5))
def test_another_address_is_packed(fake, tensors, index) -> None:
    call = fake.backend.prepare(V11, tensors, causal=False)
    call(*tensors, 0.5)
    others = [t.clone() if place == index else t for place, t in enumerate(tensors)]
    call(*others, 0.5)
    call(*tensors, 0.5)
    first, second, third = (event[1] for event in fake.events if isinstance(event, tuple))
    name = ("q", "k", "v", "o", "lse")[index]
    assert getattr(first, name) == getattr(third, name) == tensors[index].data_ptr()
    assert getattr(second, name) == others[index].data_ptr()
    assert fake.take().count("encode") == 2


def test_another_scale_is_packed(fake, tensors) -> None:
    call = fake.backend.prepare(V11, tensors, causal=False)
    for scale in (0.5, 0.25, 0.5):
        call(*tensors, scale)
    scales = [event[1].softmax_scale for event in fake.events if isinstance(event, tuple)]
    assert scales == [0.5, 0.25, 0.5]
    assert fake.take().count("encode") == 2


def test_a_new_workspace_is_packed(fake, tensors) -> None:
    call = fake.backend.prepare(V01, tensors, causal=False)
    first, second = (call(*tensors, 0.5) for _ in range(2))
    addresses = [[part.data_ptr() for part in workspace] for workspace in (first, second)]
    assert addresses[0] != addresses[1]
    launches = [event[1] for event in fake.events if isinstance(event, tuple)]
    found = [list(params.workspace)[: len(first)] for params in launches]
    assert found == [addresses[0]] * 3 + [addresses[1]] * 3  # v01 has three kernels


def test_a_thread_in_another_context(fake, tensors) -> None:
    call = fake.backend.prepare(V11, tensors, causal=False)
    call(*tensors, 0.5)
    fake.take()
    for fake.current_context in (0, CONTEXT + 1):
        call(*tensors, 0.5)
        assert fake.take() == ["push", None, "pop"]


def test_another_stream(fake, tensors) -> None:
    call = fake.backend.prepare(V11, tensors, causal=False)
    call(*tensors, 0.5)
    fake.take()
    fake.stream.cuda_stream = 5
    call(*tensors, 0.5)
    assert fake.take() == ["push", "new stream", "pop", "PyCUDA's waits", 11, "torch waits"]
    call(*tensors, 0.5)
    assert fake.take() == ["PyCUDA's waits", 11, "torch waits"]


def test_a_launch_that_fails_is_one_clear_line(fake, tensors) -> None:
    fake.fails, fake.stream.cuda_stream = True, 5
    call = fake.backend.prepare(V11, tensors, causal=False)
    with pytest.raises(RuntimeError, match=rf"^{V11.name} cannot be launched: cuLaunchKernel"):
        call(*tensors, 0.5)
    assert fake.take()[-1] == "torch waits"


def test_what_lies_alike_is_prepared_once(fake, tensors) -> None:
    first, second = (
        fake.backend.launch(V11, *tensors, causal=False, softmax_scale=0.5) for _ in "ab"
    )
    assert first == second == []
    assert fake.take().count("encode") == 1
    fake.backend.launch(V11, *tensors, causal=True, softmax_scale=0.5)
    q, *others = tensors
    wide = torch.zeros(1, 2, 9, 72, dtype=q.dtype)[..., :64]
    fake.backend.launch(V11, wide, *others, causal=False, softmax_scale=0.5)
    assert fake.take().count("encode") == 2
