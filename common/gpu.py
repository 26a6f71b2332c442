"""The GPU backend: cubins from nvcc, launched by PyCUDA in torch's context and stream."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.backend import DTYPE_NAMES
from common.build import Build, Resources, build_cubin, cubin_flags, nvcc, parse_resources
from common.driver import bindings, call
from common.errors import NotEnoughMemoryError, UsageError
from common.launch import AttentionParams, LaunchDescriptor, Sizes, check_alignment, evaluate, pack
from common.step import Specialization, Step
from common.tensor_map import encode_for_gpu, tensor_maps

DEFAULT_SMEM_LIMIT = 48 * 1024  # dynamic; a kernel that wants more must say so before its launch
POISON = 0xFF  # a byte of a NaN in every dtype


@dataclass(frozen=True)
class _Module:
    """A loaded cubin."""

    descriptor: LaunchDescriptor
    functions: dict
    resources: dict[str, Resources]


class GpuBackend:
    """Runs steps on one CUDA device, torch's current one unless told.

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
        bindings()
        nvcc()
        torch.cuda.init()
        driver.init()
        self._driver = driver
        index = (
            torch.cuda.current_device() if device is None or device.index is None else device.index
        )
        self.device = torch.device("cuda", index)
        # torch works in the primary context, and so do we: its pointers are ours. It is pushed
        # around each use only, because PyCUDA keeps a stack of contexts a thread.
        self._context = driver.Device(index).retain_primary_context()
        self._capability = torch.cuda.get_device_capability(self.device)
        self._smem_limit = driver.Device(index).get_attribute(
            driver.device_attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        )
        self.multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._modules: dict[tuple[Step, Specialization], _Module] = {}
        self._lock = threading.Lock()
        self._streams: dict[int, object] = {}  # of PyCUDA's, by the handle of torch's stream
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
        """What each kernel takes, by kernel name."""
        return self._module(step, spec).resources

    def forward(
        self,
        step: Step,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> list[torch.Tensor]:
        """Launches the step on torch's current stream; returns before it has run."""
        spec = Specialization(q.shape[-1], DTYPE_NAMES[q.dtype], causal)
        if reason := self.refusal(step, spec):
            raise UsageError(f"{step.name} {reason}")
        module = self._module(step, spec)
        plan = evaluate(module.descriptor, Sizes.of(q, k), self.multiprocessors)
        check_alignment(step.name, plan.alignment, q=q, k=k, v=v, o=o)
        maps = tensor_maps(step.name, module.descriptor, q=q, k=k, v=v, o=o)
        # Once freed, torch reuses it only for work later on the same stream.
        workspace = self._allocate(step, plan.workspace_bytes)
        addresses = {
            name: tensor.data_ptr()
            for name, tensor in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse))
        }
        pointers = [part.data_ptr() for part in workspace]
        with torch.cuda.device(self.device), self._launch_stream() as stream:
            # In a context: a thread that has done nothing else yet is in none.
            encoded = encode_for_gpu(step.name, maps)
            params = bytes(pack(q, k, v, o, encoded, addresses, pointers, softmax_scale))
            try:
                for kernel in plan.kernels:
                    module.functions[kernel.name].prepared_async_call(
                        (kernel.blocks, 1, 1),
                        (kernel.threads, 1, 1),
                        stream,
                        params,
                        shared_size=kernel.smem_bytes,
                    )
            except self._driver.Error as error:
                raise RuntimeError(f"{step.name} cannot be launched: {error}") from None
        return workspace

    @contextlib.contextmanager
    def _launch_stream(self):
        """A stream for PyCUDA that is in order with torch's current one.

        PyCUDA cannot launch on a stream that it did not make. torch's default stream is its None;
        any other waits for a stream of PyCUDA's, which waited for it.
        """
        current = torch.cuda.current_stream()
        self._context.push()
        try:
            if not current.cuda_stream:
                yield None
                return
            stream = self._streams.get(current.cuda_stream)
            if stream is None:
                stream = self._streams[current.cuda_stream] = self._driver.Stream()
            beside = torch.cuda.ExternalStream(stream.handle)
            beside.wait_stream(current)
            try:
                yield stream
            finally:
                current.wait_stream(beside)
        finally:
            self._driver.Context.pop()

    def _allocate(self, step: Step, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        try:
            workspace = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in sizes]
        except torch.OutOfMemoryError:
            cached = torch.cuda.memory_reserved(self.device)
            cached -= torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + cached
            raise NotEnoughMemoryError(
                f"{step.name} needs a workspace of {sum(sizes)} bytes, and {free} are free: use "
                "shorter sequences, or a step that stores no scores"
            ) from None
        if self._poison:
            for part in workspace:
                part.fill_(POISON)
        return workspace

    def _module(self, step: Step, spec: Specialization) -> _Module:
        if (step, spec) not in self._modules:
            build = build_cubin(step, spec, self.arch(step))
            with self._lock:
                if (step, spec) not in self._modules:
                    self._modules[step, spec] = self._load(build)
        return self._modules[step, spec]

    def _load(self, build: Build) -> _Module:
        self._context.push()
        try:
            module = self._driver.module_from_file(str(build.path))
            pointer, size = module.get_global("launch_descriptor")
            descriptor = LaunchDescriptor()
            assert size == ctypes.sizeof(descriptor), "common/launch.py and launch.h differ"
            self._driver.memcpy_dtoh(descriptor, pointer)
            resources = parse_resources(build.log)
            functions = {}
            for kernel in descriptor.kernels:
                if not kernel.name:
                    continue
                name = kernel.name.decode()
                resources[name] = replace(resources[name], dynamic_smem=kernel.smem_bytes)
                functions[name] = function = module.get_function(name)
                padding = _parameter_offset(build.path, name)
                function.prepare([f"{padding}x{ctypes.sizeof(AttentionParams)}s"])
                if DEFAULT_SMEM_LIMIT < kernel.smem_bytes <= self._smem_limit:
                    function.set_attribute(
                        self._driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        kernel.smem_bytes,
                    )
            return _Module(descriptor, functions, resources)
        finally:
            self._driver.Context.pop()


def _parameter_offset(cubin: Path, kernel: str) -> int:
    """Bytes before the parameter in what is packed for a launch.

    Parameters begin at some address of constant memory, and the driver aligns only those that it
    packs itself: here the packer leaves the gap in front of the 128-byte aligned AttentionParams.
    """
    library = call("cuLibraryLoadFromFile", str(cubin).encode(), [], [], 0, [], [], 0)
    try:
        found = call("cuLibraryGetKernel", library, kernel.encode())
        offset, size = call("cuKernelGetParamInfo", found, 0)
    finally:
        call("cuLibraryUnload", library)
    assert size == ctypes.sizeof(AttentionParams), "common/launch.py and launch.h differ"
    return offset
