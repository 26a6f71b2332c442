"""The CUDA driver: its functions through cuda-bindings, and their addresses."""

from __future__ import annotations

import ctypes
from functools import cache

from ..errors import UsageError

MIN_VERSION = 12040  # CUDA 12.4, the first to have cuFuncGetParamInfo


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


def status_name(status: int) -> str:
    """That of a CUresult; of one that the bindings do not know, its number."""
    try:
        return bindings().CUresult(status).name
    except ValueError:
        return str(status)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def address(name: str) -> int:
    """Where a function of the driver is, for pack.cpp.

    The bindings make an object of each number, and that takes longer than the driver does.
    """
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value
