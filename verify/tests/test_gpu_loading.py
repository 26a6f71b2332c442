"""How the GPU backend loads a cubin into a driver, a fake."""

from __future__ import annotations

import ctypes
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from common.errors import UsageError
from common.paths import ROOT
from common.problem import Specialization
from common.runtime import gpu
from common.runtime.build import Build, Resources
from common.runtime.cpu import CpuBackend
from common.runtime.pack import simt_encoder
from common.runtime.tensor_map import MapEncoder
from common.step import read_step
from verify.tests.fake_gpu import (
    CONTEXT,
    EARLY,
    H100,
    H200,
    INVALID_VALUE,
    LIMIT,
    NOT_FOUND,
    PARAMS,
    STREAM,
    CUresult,
    Gpu,
)

SMEM_BYTES = {"first": 0, "second": LIMIT, "third": LIMIT + 1}
STEP = read_step(ROOT / "verify" / "instructions" / "dependent_launch.cu")
SPEC = Specialization(8, "bf16", causal=False)


class Cubin:
    """A cubin of three kernels, loaded into the fake driver."""

    def __init__(self, fake: Gpu, monkeypatch) -> None:
        self.fake = fake
        self.params_bytes, self.cluster = ctypes.sizeof(PARAMS), 2
        descriptor = CpuBackend().descriptor(STEP, SPEC)
        self.descriptor = type(descriptor).from_buffer_copy(descriptor)  # others have that one
        for kernel in self.descriptor.kernels:
            kernel.smem_bytes = SMEM_BYTES[kernel.name.decode()]
        self.symbols = {"launch_descriptor": bytes(self.descriptor)}
        self.names = [kernel.name for kernel in self.descriptor.kernels]
        self.get_global_status = 0
        resources = dict.fromkeys(SMEM_BYTES, Resources(*[0] * 6))
        monkeypatch.setattr(gpu, "driver_encoder", self.encoder)
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

    def encoder(self, spec: Specialization, *l2_fetch_bytes: int) -> MapEncoder:
        self.l2_fetch_bytes = l2_fetch_bytes
        return simt_encoder(spec)

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
        return gpu.GpuBackend._load(self.fake.backend, STEP, SPEC, build)


@pytest.fixture
def fake(monkeypatch) -> Gpu:
    return Gpu(monkeypatch)


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
    module = fake.backend._modules[STEP, SPEC] = cubin.load()
    attributes = fake.driver.bindings.CUfunction_attribute
    limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    told = [call.args for call in fake.driver.bindings.cuFuncSetAttribute.call_args_list]
    assert told == [(0, limit, 0), (1, limit, LIMIT), (2, limit, LIMIT)]
    assert {name: r.dynamic_smem for name, r in module.resources.items()} == SMEM_BYTES
    with pytest.raises(UsageError, match=f"needs {LIMIT + 1} bytes .* this device has {LIMIT}$"):
        fake.backend.prepare(STEP, SPEC)


@pytest.mark.parametrize("current", [None, CONTEXT + 1])
def test_loading_leaves_a_thread_in_its_context(fake, cubin, current) -> None:
    fake.driver.contexts[:] = [current]
    cubin.load()
    assert fake.driver.contexts == [current]


@pytest.mark.parametrize(
    ("memory", "num_bytes", "often", "once"),
    [
        *((H100, told, told or 256, told or 256) for told in (None, 64, 128, 256)),
        *((H200, None, 256, 128), (H200, 64, 64, 64), (H200, 128, 128, 128)),
        (H200, 256, 128, 128),
    ],
)
def test_l2_fetches_what_the_step_says(monkeypatch, memory, num_bytes, often, once) -> None:
    """But of fast memory no more than is fetched fast, unless the step says nothing and keys are
    read often.
    """
    cubin = Cubin(Gpu(monkeypatch, memory=memory), monkeypatch)
    if num_bytes is not None:
        cubin.symbols["l2_fetch_bytes"] = num_bytes.to_bytes(4, "little")
    cubin.load()
    assert cubin.l2_fetch_bytes == (often, once)


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("kernels_start_early", b"\2\0\0\0", "is 2: make it 0 or 1"),
        ("kernels_start_early", b"\xff\xff\xff\xff", "is -1: make it 0 or 1"),
        ("kernels_start_early", b"\1", "has 1 bytes: make it int32_t"),
        ("kernels_start_early", bytes(8), "has 8 bytes: make it int32_t"),
        ("l2_fetch_bytes", bytes(4), "is 0: make it 64, 128 or 256"),
        ("l2_fetch_bytes", b"\x20\0\0\0", "is 32: make it 64, 128 or 256"),
        ("l2_fetch_bytes", b"\x80", "has 1 bytes: make it int32_t"),
        ("l2_fetch_bytes", b"\x80" + bytes(7), "has 8 bytes: make it int32_t"),
    ],
)
def test_a_wrong_variable_is_one_clear_line(cubin, variable, value, error) -> None:
    cubin.symbols[variable] = value
    with pytest.raises(UsageError, match=f"^dependent_launch: {variable} {error}$"):
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
