"""The GPU backend on a driver that keeps what it is told, for tests without a GPU."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import torch

from common.operation import FORWARD
from common.runtime import driver, gpu
from common.runtime.cpu import CpuBackend
from common.runtime.launch import params_type
from common.runtime.launcher import Launcher, LoadedKernel
from common.runtime.pack import Packer, simt_encoder

CONTEXT = 7 << 40  # torch's
STREAM = 5 << 40
LIMIT = 227 * 1024  # of a block's shared memory
INVALID_VALUE, NOT_FOUND = 1, 500  # of CUresult
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PARAMS = params_type(FORWARD)


class Memory(NamedTuple):
    """What CUDA says of a card's."""

    bus_width: int  # bits
    clock_rate: int  # kHz


H100, H200 = Memory(5120, 2_619_000), Memory(6144, 3_201_000)


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

    def __init__(
        self, monkeypatch, backend: type[gpu.GpuBackend] = gpu.GpuBackend, memory: Memory = H100
    ) -> None:
        self.driver = Driver()
        self.stream = 0  # torch's current one
        self.cluster = 1
        pycuda = self.pycuda = MagicMock()
        context = pycuda.Device.return_value.retain_primary_context.return_value
        context.handle, context.push = CONTEXT, lambda: self.driver.contexts.append(CONTEXT)
        pycuda.Context.pop = self.driver.contexts.pop
        attributes = {
            pycuda.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: LIMIT,
            pycuda.device_attribute.GLOBAL_MEMORY_BUS_WIDTH: memory.bus_width,
            pycuda.device_attribute.MEMORY_CLOCK_RATE: memory.clock_rate,
        }
        pycuda.Device.return_value.get_attribute = attributes.__getitem__
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
        self.backend = backend(torch.device("cuda", 1))
        monkeypatch.setattr(self.backend, "_load", self.load)

    def allocate(self, sizes, strides, dtype, index):
        assert index == 1
        return torch.empty_strided(sizes, strides, dtype=dtype)

    def load(self, step, spec, job):
        descriptor = CpuBackend().descriptor(step, spec)
        plan = gpu.read_plan(step, descriptor, self.backend.multiprocessors)
        clusters = [self.cluster] * len(plan.kernels)
        packer = Packer(step, descriptor, plan, clusters, spec, simt_encoder(spec))
        kernels = [
            LoadedKernel(index, kernel.threads, kernel.smem_bytes, starts_early=False)
            for index, kernel in enumerate(plan.kernels)
        ]
        launcher = Launcher(step.name, packer, CONTEXT, kernels)
        return gpu._Module(step, descriptor, plan, launcher, {})
