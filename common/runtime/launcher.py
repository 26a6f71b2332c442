"""Launches a step's kernels on a GPU, by pack.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..lengths import Lengths
from . import driver
from .pack import UNFIT, Packer, library


class LoadedKernel(ctypes.Structure):
    """struct LoadedKernel of pack.cpp: a CUfunction and how it is launched."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("smem_bytes", ctypes.c_int32),
        ("starts_early", ctypes.c_int32),
    ]


class _Launcher(ctypes.Structure):
    """struct Launcher of pack.cpp."""

    _fields_ = [
        ("get_context", ctypes.c_void_p),
        ("push_context", ctypes.c_void_p),
        ("pop_context", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("kernel", LoadedKernel * 3),
    ]


class Launcher:
    """Launches a step's kernels, which were loaded in a context, a CUcontext."""

    def __init__(
        self, step_name: str, packer: Packer, context: int, kernels: Sequence[LoadedKernel]
    ) -> None:
        self._step_name, self._packer = step_name, packer
        self._launcher = _Launcher(
            driver.address("cuCtxGetCurrent"),
            driver.address("cuCtxPushCurrent_v2"),
            driver.address("cuCtxPopCurrent_v2"),
            driver.address("cuLaunchKernelEx"),
            context,
        )
        self._launcher.kernel[: len(kernels)] = kernels
        self._pointer = ctypes.byref(self._launcher)
        # Without the GIL: where the stream's queue is full, a launch waits for room in it.
        self._launch = library().launch

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
        workspace: Sequence[int],
        stream: int,
        lengths: Lengths | None = None,
    ) -> bool:
        """Launches on the stream, a CUstream; the rest is as Packer has it.

        False, and nothing is launched, where the tensors do not fit together, or the step cannot
        read their rows. Raises UsageError where no tensor map can describe one, RuntimeError where
        the driver does not launch.
        """
        packed = self._packer.gather(tensors, scalars, lengths, workspace)
        failure = self._launch(*packed, self._pointer, ctypes.c_void_p(stream))
        if failure < UNFIT:
            status = driver.status_name(UNFIT - failure)
            raise RuntimeError(f"{self._step_name} cannot be launched: {status}")
        return self._packer.accepts(failure, tensors)
