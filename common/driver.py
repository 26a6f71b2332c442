"""The calls of the CUDA driver that PyCUDA does not have, by cuda-bindings."""

from __future__ import annotations

from common.errors import UsageError


def bindings():
    """The module cuda.bindings.driver. Raises UsageError where it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UsageError(
            f"cuda-bindings cannot be imported ({error}): pip install cuda-bindings"
        ) from None
    return driver


def call(name: str, *arguments):
    """What the call gives beside its status. Raises RuntimeError with the name of a failure."""
    driver = bindings()
    status, *result = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} says {status.name}")
    return result[0] if len(result) == 1 else tuple(result)
