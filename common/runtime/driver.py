"""The CUDA driver's functions that PyCUDA lacks, through cuda-bindings."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from pathlib import Path

from ..errors import UsageError

MIN_VERSION = 12040  # CUDA 12.4, the first to have cuKernelGetParamInfo


def bindings():
    """The module cuda.bindings.driver. Raises UsageError without it or with a driver too old."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UsageError(
            f"cuda-bindings cannot be imported ({error}): pip install cuda-bindings"
        ) from None
    version = driver.cuDriverGetVersion()[1]
    if version < MIN_VERSION:
        had, needed = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, MIN_VERSION))
        raise UsageError(f"the driver is for CUDA {had}: install one for CUDA {needed} or newer")
    return driver


def call(name: str, *arguments):
    """Calls a function of the driver and returns its results without the status.

    Raises RuntimeError with the name of the status where that is not success.
    """
    driver = bindings()
    status, *result = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} returned {status.name}")
    return result[0] if len(result) == 1 else tuple(result)


@cache
def library() -> ctypes.PyDLL:
    """The driver itself, for what the bindings take too long for. Its functions return a status."""
    return ctypes.PyDLL("libcuda.so.1")


class EarlyLaunch:
    """Launches a kernel that starts before the one in front has ended; called like PyCUDA's launch.

    PyCUDA keeps its handles to itself, so the kernel is loaded once more: it shares no variables
    with the kernels that PyCUDA launches.
    """

    def __init__(self, cubin: Path, name: str, most_smem_bytes: int) -> None:
        library = call("cuLibraryLoadFromFile", str(cubin).encode(), [], [], 0, [], [], 0)
        kernel = call("cuLibraryGetKernel", library, name.encode())
        self._name = name
        self._function = call("cuKernelGetFunction", kernel)
        driver = bindings()
        self._launch = driver.cuLaunchKernelEx
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", self._function, limit, most_smem_bytes)

    def __call__(
        self, grid: tuple, block: tuple, parameter: bytes, smem_bytes: int, stream
    ) -> None:
        config = _early_config(grid, block, smem_bytes, stream.handle if stream else 0)
        parameters = ctypes.c_char_p(parameter)  # in C an array of pointers, here of one
        (status,) = self._launch(config, self._function, parameters, 0)
        if status:
            raise RuntimeError(f"{self._name} cannot be launched: {status.name}")


@lru_cache
def _early_config(grid: tuple, block: tuple, smem_bytes: int, stream: int):
    """The CUlaunchConfig of such a launch. Nobody changes it: threads share it."""
    driver = bindings()
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem_bytes
    config.hStream = driver.CUstream(stream)
    config.attrs = [attribute]
    config.numAttrs = 1
    return config
