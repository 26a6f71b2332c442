"""The GPU backend: cubins from nvcc, launched by PyCUDA in torch's context and stream."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ..errors import UsageError
from ..problem import Specialization
from ..step import Step
from .backend import Call, empty_on_gpu, launch, not_enough_memory
from .build import Build, Resources, build_cubin, cubin_flags, nvcc, parse_resources
from .driver import EarlyLaunch, bindings, call
from .launch import (
    LaunchDescriptor,
    Plan,
    descriptor_type,
    params_type,
    read_plan,
    sizes_of,
)
from .pack import Packer
from .tensor_map import driver_encoder

DEFAULT_SMEM_LIMIT = 48 * 1024  # dynamic; a kernel that wants more must say so before its launch
POISON = 0xFF  # a byte of a NaN in every dtype
NOTHING = torch.empty(0, dtype=torch.uint8)  # a workspace that a step is not given, at address 0


@dataclass(frozen=True)
class _Launch:
    """A kernel of a loaded cubin."""

    start: Callable  # PyCUDA's or alike
    gap: bytes  # what to put before the parameter
    block: tuple[int, int, int]
    smem_bytes: int


@dataclass(frozen=True)
class _Module:
    """A loaded cubin: a step for a specialization, and all of a call that is the same each time.

    What depends on how the tensors lie is computed for each call. A cache of that would not be of
    use in decoding, where each call has a key more than the one before.
    """

    step: Step
    descriptor: LaunchDescriptor
    plan: Plan
    packer: Packer
    launches: tuple[_Launch, ...]
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
        # torch works in the primary context, and so do we: its pointers are ours. It is pushed
        # around a use only, because PyCUDA keeps a stack of contexts per thread.
        self._context = driver.Device(index).retain_primary_context()
        self._context_handle = self._bindings.CUcontext(self._context.handle)
        self._capability = torch.cuda.get_device_capability(self.device)
        self._smem_limit = driver.Device(index).get_attribute(
            driver.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        )
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._modules: dict[tuple[Step, Specialization], _Module] = {}
        self._lock = threading.Lock()
        self._streams: dict[int, tuple] = {}  # by the handle of torch's stream
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
        self, step: Step, *tensors: torch.Tensor, causal: bool, **scalars: float
    ) -> list[torch.Tensor]:
        """Launches the step on torch's current stream; returns before it has run."""
        return launch(self, step, tensors, causal, scalars)

    def prepare(self, step: Step, spec: Specialization) -> Call:
        if reason := self.refusal(step, spec):
            raise UsageError(f"{step.name} {reason}")
        return partial(self._call, self._module(step, spec))

    def _call(
        self,
        module: _Module,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
    ) -> list[torch.Tensor] | None:
        # A thread that torch works in has the context already.
        if self._bindings.cuCtxGetCurrent()[1] == self._context_handle:
            return self._call_in_context(module, tensors, scalars)
        with self._pushed_context():
            return self._call_in_context(module, tensors, scalars)

    def _call_in_context(
        self,
        module: _Module,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
    ) -> list[torch.Tensor] | None:
        # Once freed, torch reuses it only for work later on the same stream.
        workspace = self._allocate(module, sizes_of(tensors)) if module.plan.workspaces else []
        packed = module.packer(tensors, scalars, [part.data_ptr() for part in workspace])
        if packed is None:
            return None
        # The bare handle, as torch's compiled code gets it: current_stream() makes an object.
        if torch._C._cuda_getCurrentRawStream(self._index):
            self._launch_beside(module, *packed)
        else:
            self._launch(module, *packed, None)
        return workspace

    @contextlib.contextmanager
    def _pushed_context(self):
        self._context.push()
        try:
            yield
        finally:
            self._driver.Context.pop()

    def _launch(self, module: _Module, params: bytes, blocks: list[int], stream) -> None:
        """Launches the kernels, in order with a stream of PyCUDA's. None is torch's default one."""
        try:
            for each, count in zip(module.launches, blocks, strict=True):
                grid = (count, 1, 1)
                each.start(grid, each.block, each.gap + params, each.smem_bytes, stream)
        except self._driver.Error as error:
            raise RuntimeError(f"{module.step.name} cannot be launched: {error}") from None

    def _launch_beside(self, module: _Module, params: bytes, blocks: list[int]) -> None:
        """Launches the kernels, in order with torch's current stream.

        PyCUDA launches only on streams of its own: one of those waits for torch's, runs the
        kernels, and torch's waits for it.
        """
        current = torch.cuda.current_stream(self._index)
        stream, beside = self._stream_beside(current)
        beside.wait_stream(current)
        try:
            self._launch(module, params, blocks, stream)
        finally:
            current.wait_stream(beside)

    def _stream_beside(self, current: torch.cuda.Stream) -> tuple:
        """PyCUDA's stream for one of torch's, and the same as torch sees it."""
        with self._lock:
            if current.cuda_stream not in self._streams:
                with self._pushed_context():
                    stream = self._driver.Stream()
                beside = torch.cuda.ExternalStream(stream.handle, self.device)
                self._streams[current.cuda_stream] = stream, beside
            return self._streams[current.cuda_stream]

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
        with self._pushed_context():
            module = self._driver.module_from_file(str(build.path))
            pointer, size = module.get_global("launch_descriptor")
            descriptor = descriptor_type(step.operation)()
            assert size == ctypes.sizeof(descriptor), "launch.py and launch.h differ"
            self._driver.memcpy_dtoh(descriptor, pointer)
            start_early = self._kernels_start_early(step, module)
            resources = parse_resources(build.log)
            plan = read_plan(descriptor, self.multiprocessors)
            launches, clusters = [], []
            for index, kernel in enumerate(plan.kernels):
                name, block = kernel.name, (kernel.threads, 1, 1)
                resources[name] = replace(resources[name], dynamic_smem=kernel.smem_bytes)
                params_bytes = ctypes.sizeof(params_type(step.operation))
                offset, cluster = _inspect(build.path, name, params_bytes, self._index)
                clusters.append(cluster)
                if start_early and index > 0:
                    most_smem_bytes = min(kernel.smem_bytes, self._smem_limit)
                    # The driver knows the parameter's place, and leaves the gap itself.
                    early = EarlyLaunch(build.path, name, most_smem_bytes)
                    launches.append(_Launch(early, b"", block, kernel.smem_bytes))
                    continue
                function = module.get_function(name)
                # The end of prepared_async_call, which packs the bytes first: most of its time.
                launches.append(
                    _Launch(function._launch_kernel, bytes(offset), block, kernel.smem_bytes)
                )
                if DEFAULT_SMEM_LIMIT < kernel.smem_bytes <= self._smem_limit:
                    function.set_attribute(
                        self._driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        kernel.smem_bytes,
                    )
            packer = Packer(step, descriptor, plan, clusters, spec, driver_encoder(spec))
            return _Module(step, descriptor, plan, packer, tuple(launches), resources)

    def _kernels_start_early(self, step: Step, module) -> bool:
        """Whether the step defines it as 1."""
        try:
            pointer, size = module.get_global("kernels_start_early")
        except self._driver.LogicError:
            return False
        defined = ctypes.c_int32()
        if size != ctypes.sizeof(defined):
            raise UsageError(f"{step.name}: kernels_start_early has {size} bytes: make it int32_t")
        self._driver.memcpy_dtoh(defined, pointer)
        if defined.value not in (0, 1):
            raise UsageError(f"{step.name}: kernels_start_early is {defined.value}: make it 0 or 1")
        return bool(defined.value)


def _inspect(cubin: Path, kernel: str, params_bytes: int, device: int) -> tuple[int, int]:
    """Bytes before the parameter in what is packed for a launch, and the blocks of a cluster.

    Parameters begin at some address of constant memory, and the driver aligns only those that it
    packs itself: here a gap is left in front of the 128-byte aligned struct.
    """
    cluster_width = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
    library = call("cuLibraryLoadFromFile", str(cubin).encode(), [], [], 0, [], [], 0)
    try:
        found = call("cuLibraryGetKernel", library, kernel.encode())
        offset, size = call("cuKernelGetParamInfo", found, 0)
        cluster = call("cuKernelGetAttribute", cluster_width, found, device)
    finally:
        call("cuLibraryUnload", library)
    assert size == params_bytes, "launch.py and launch.h differ"
    return offset, cluster or 1  # 0: no clusters
