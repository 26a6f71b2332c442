"""The GPU backend: cubins from nvcc, launched on torch's stream.

PyCUDA retains torch's context and reads the device's memory; cuda-bindings load, and pack.cpp has
the driver launch. PyCUDA launches on its own streams only, and keeps its kernels' handles.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ..errors import UsageError
from ..lengths import Lengths
from ..problem import Specialization
from ..step import Step
from .backend import Call, empty_on_gpu, launch, not_enough_memory
from .build import Build, Resources, build_cubin, cubin_flags, nvcc, parse_resources
from .driver import bindings, call
from .launch import (
    Kernel,
    LaunchDescriptor,
    Plan,
    descriptor_type,
    lengths_of,
    params_bytes,
    read_plan,
    sizes_of,
)
from .launcher import Launcher, LoadedKernel
from .pack import Packer
from .tensor_map import L2_FETCH_BYTES, driver_encoder

POISON = 0xFF  # a byte of a NaN in every dtype
# In bytes per second; and what L2 is told to fetch at once from memory that is faster. With 256
# bytes few queries took an H200 (4.9e12) up to 14 % longer, and an H100 (3.4e12) up to 0.7 % less.
FAST_MEMORY, FAST_FETCH_BYTES = 4e12, 128
NOTHING = torch.empty(0, dtype=torch.uint8)  # a workspace that a step is not given, at address 0


@dataclass(frozen=True)
class _Module:
    """A loaded cubin: a step for a specialization, and all of a call that is the same each time.

    What depends on how the tensors lie is computed for each call. A cache of that would not be of
    use in decoding, where each call has a key more than the one before.
    """

    step: Step
    descriptor: LaunchDescriptor
    plan: Plan
    launcher: Launcher
    resources: dict[str, Resources]


class GpuBackend:
    """Runs steps on one CUDA device, by default torch's current one.

    The first call of a specialization compiles and loads it, which cannot happen while a CUDA graph
    is captured. poison fills workspaces with NaN before each call, so that a check sees what a step
    reads without having written it. Raises UsageError where PyCUDA, cuda-bindings, nvcc or a CUDA
    device is missing.
    """

    name = "gpu"

    def __init__(self, device: torch.device | None = None, *, poison: bool = False) -> None:
        if not torch.cuda.is_available():
            raise UsageError("no CUDA device: use the cpu backend")
        try:
            import pycuda.driver as driver
        except ImportError as error:
            raise UsageError(f"PyCUDA cannot be imported ({error}): pip install pycuda") from None
        self._bindings = bindings()
        nvcc()
        torch.cuda.init()
        driver.init()
        self._driver = driver
        index = (
            torch.cuda.current_device() if device is None or device.index is None else device.index
        )
        self.device, self._index = torch.device("cuda", index), index
        # torch works in the primary context, and so do we: its pointers are ours.
        self._context = driver.Device(index).retain_primary_context()
        self._capability = torch.cuda.get_device_capability(self.device)
        attribute, attributes = driver.Device(index).get_attribute, driver.device_attribute
        self._smem_limit = attribute(attributes.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        wires, khz = attributes.GLOBAL_MEMORY_BUS_WIDTH, attributes.MEMORY_CLOCK_RATE
        bytes_per_second = 2 * attribute(wires) / 8 * attribute(khz) * 1000  # twice in each clock
        self._has_fast_memory = bytes_per_second > FAST_MEMORY
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._modules: dict[tuple[Step, Specialization], _Module] = {}
        self._lock = threading.Lock()
        self._poison = poison

    def refusal(self, step: Step, spec: Specialization) -> str | None:
        reason = step.limits.refusal(spec) or step.limits.arch_refusal(self._capability)
        if reason:
            return reason
        needed = max(kernel.smem_bytes for kernel in self.descriptor(step, spec).kernels)
        if needed > self._smem_limit:
            return (
                f"needs {needed} bytes of shared memory a block at head_dim {spec.head_dim} in "
                f"{spec.dtype}; this device has {self._smem_limit}"
            )
        return None

    def arch(self, step: Step) -> str:
        """The architecture the step is compiled for here."""
        exact = step.limits.arch.endswith("a")
        return step.limits.arch if exact else "sm_{}{}".format(*self._capability)

    def compile_command(self, step: Step, spec: Specialization) -> list[str]:
        return ["nvcc", *cubin_flags(spec, self.arch(step))]

    def build(self, step: Step, spec: Specialization) -> Path:
        return build_cubin(step, spec, self.arch(step)).path

    def descriptor(self, step: Step, spec: Specialization) -> LaunchDescriptor:
        return self._module(step, spec).descriptor

    def resources(self, step: Step, spec: Specialization) -> dict[str, Resources]:
        """Each kernel's resources, by its name."""
        return self._module(step, spec).resources

    def launch(
        self,
        step: Step,
        *tensors: torch.Tensor,
        causal: bool,
        lengths: Lengths | None = None,
        **scalars: float,
    ) -> list[torch.Tensor]:
        """Launches the step on torch's current stream; returns before it has run."""
        return launch(self, step, tensors, causal, lengths, scalars)

    def prepare(self, step: Step, spec: Specialization) -> Call:
        if reason := self.refusal(step, spec):
            raise UsageError(f"{step.name} {reason}")
        return partial(self._call, self._module(step, spec))

    def _call(
        self,
        module: _Module,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
        lengths: Lengths | None = None,
    ) -> list[torch.Tensor] | None:
        lengths = lengths_of(module.step, lengths)
        sizes = sizes_of(tensors, lengths)
        # Once freed, torch reuses it only for work later on the same stream.
        workspace = self._allocate(module, sizes) if module.plan.workspaces else []
        # The bare handle, as torch's compiled code gets it: current_stream() makes an object.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        addresses = [part.data_ptr() for part in workspace]
        launched = module.launcher(tensors, scalars, addresses, stream, lengths)
        return workspace if launched else None

    @contextlib.contextmanager
    def _pushed_context(self):
        self._context.push()
        try:
            yield
        finally:
            self._driver.Context.pop()

    def _allocate(self, module: _Module, sizes: Sequence[int]) -> list[torch.Tensor]:
        num_bytes = module.plan.workspace_bytes(sizes)
        try:
            workspace = [
                empty_on_gpu((n,), (1,), torch.uint8, self._index) if n else NOTHING
                for n in num_bytes
            ]
        except torch.OutOfMemoryError:
            cached = torch.cuda.memory_reserved(self.device)
            cached -= torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + cached
            raise not_enough_memory(module.step, sum(num_bytes), free) from None
        if self._poison:
            for part in workspace:
                part.fill_(POISON)
        return workspace

    def _module(self, step: Step, spec: Specialization) -> _Module:
        if (step, spec) not in self._modules:
            build = build_cubin(step, spec, self.arch(step))
            with self._lock:
                if (step, spec) not in self._modules:
                    self._modules[step, spec] = self._load(step, spec, build)
        return self._modules[step, spec]

    def _load(self, step: Step, spec: Specialization, build: Build) -> _Module:
        """Loads it, for as long as the process lives."""
        with self._pushed_context():
            module = call("cuModuleLoad", str(build.path).encode())
            descriptor = descriptor_type(step.operation)()
            size = self._read(module, "launch_descriptor", descriptor)
            assert size == ctypes.sizeof(descriptor), "launch.py and launch.h differ"
            starts_early = self._kernels_start_early(step, module)
            resources = parse_resources(build.log)
            plan = read_plan(step, descriptor, self.multiprocessors)
            planned, kernels, clusters = [], [], []
            for index, kernel in enumerate(plan.kernels):
                name = kernel.name
                resources[name] = replace(resources[name], dynamic_smem=kernel.smem_bytes)
                function, cluster = self._function(step, module, kernel)
                planned.append(self._that_fits(kernel, function, cluster))
                early = starts_early and index > 0
                kernels.append(LoadedKernel(function, kernel.threads, kernel.smem_bytes, early))
                clusters.append(cluster)
            plan = replace(plan, kernels=tuple(planned))
            encoder = driver_encoder(spec, *self._l2_fetch_bytes(step, module))
            packer = Packer(step, descriptor, plan, clusters, spec, encoder)
            launcher = Launcher(step.name, packer, self._context.handle, kernels)
            return _Module(step, descriptor, plan, launcher, resources)

    def _read(self, module, name: str, variable: ctypes.Structure | ctypes.c_int32) -> int:
        """Copies a variable of a module if it has this size; returns its size, 0 if it is none."""
        status, pointer, size = self._bindings.cuModuleGetGlobal(module, name.encode())
        if status == self._bindings.CUresult.CUDA_ERROR_NOT_FOUND:
            return 0
        if status:
            raise RuntimeError(f"cuModuleGetGlobal returned {status.name}")
        if size == ctypes.sizeof(variable):
            self._driver.memcpy_dtoh(variable, int(pointer))
        return size

    def _kernels_start_early(self, step: Step, module) -> bool:
        """Whether the step defines it as 1."""
        return bool(self._defined(step, module, "kernels_start_early", 0, (0, 1)))

    def _l2_fetch_bytes(self, step: Step, module) -> tuple[int, int]:
        """As the step defines it, or else the most; and the same where keys are read once. On fast
        memory at most FAST_FETCH_BYTES, unless the step defines nothing and keys are read often.
        """
        told = self._defined(step, module, "l2_fetch_bytes", 0, L2_FETCH_BYTES)
        often = once = told or L2_FETCH_BYTES[-1]
        if self._has_fast_memory:
            once = min(once, FAST_FETCH_BYTES)
            if told:
                often = once
        return often, once

    def _defined(
        self, step: Step, module, name: str, default: int, allowed: tuple[int, ...]
    ) -> int:
        """An int32_t of the module, or the default where the step does not define it."""
        defined = ctypes.c_int32()
        size = self._read(module, name, defined)
        if size == 0:
            return default
        if size != ctypes.sizeof(defined):
            raise UsageError(f"{step.name}: {name} has {size} bytes: make it int32_t")
        if defined.value not in allowed:
            *others, last = allowed
            choice = f"{', '.join(map(str, others))} or {last}"
            raise UsageError(f"{step.name}: {name} is {defined.value}: make it {choice}")
        return defined.value

    def _function(self, step: Step, module, kernel: Kernel) -> tuple[int, int]:
        """The kernel's CUfunction, ready for its shared memory, and the blocks of a cluster."""
        attributes = self._bindings.CUfunction_attribute
        function = call("cuModuleGetFunction", module, kernel.name.encode())
        _, size = call("cuFuncGetParamInfo", function, 0)
        assert size == params_bytes(step), "launch.py and launch.h differ"
        call(
            "cuFuncSetAttribute",
            function,
            attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            min(kernel.smem_bytes, self._smem_limit),  # refusal() tells of a larger one
        )
        width = attributes.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
        return int(function), call("cuFuncGetAttribute", width, function) or 1  # 0: no clusters

    def _that_fits(self, kernel: Kernel, function: int, cluster: int) -> Kernel:
        """The kernel; if its blocks are persistent, with no more than run at a time.

        The blocks of a cluster are in one part of the chip, whose number of multiprocessors need
        not be a multiple of the cluster's size.
        """
        if cluster == 1 or not kernel.most_blocks:
            return kernel
        config = self._bindings.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = min(kernel.smem_bytes, self._smem_limit)
        clusters = call("cuOccupancyMaxActiveClusters", function, config)
        return replace(kernel, most_blocks=min(kernel.most_blocks, cluster * max(1, clusters)))
