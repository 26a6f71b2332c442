"""The GPU backend that launches one kernel of a step by itself, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from ..problem import Specialization
from ..step import Step
from .gpu import GpuBackend, _Module
from .kernels import KernelCall, one_kernel
from .launch import Plan, sizes_of
from .launcher import Launcher, LoadedKernel
from .pack import Packer
from .tensor_map import driver_encoder


class KernelsGpuBackend(GpuBackend):
    """GpuBackend as a KernelsBackend. It finds in a step's launcher what that was loaded with."""

    def prepare_kernel(self, step: Step, spec: Specialization, name: str) -> KernelCall:
        self.prepare(step, spec)  # raises where the step is refused
        module = self._module(step, spec)
        index, plan, lasting = one_kernel(step, module.plan, name)
        loaded = module.launcher._launcher.kernel[index]
        cluster = module.launcher._packer._plan.kernel[index].cluster
        # Never early. Such a kernel may touch memory before the one in front has ended, and waits
        # for no other one: in its step that is enough. Here anything may be in front.
        in_order = LoadedKernel(loaded.function, loaded.threads, loaded.smem_bytes, False)
        packer = Packer(step, module.descriptor, plan, [cluster], spec, driver_encoder(spec))
        launcher = Launcher(step.name, packer, self._context.handle, [in_order])
        return partial(
            self._call_kernel,
            replace(module, plan=Plan(plan.kernels, plan.workspaces[:lasting])),
            replace(module, plan=Plan(plan.kernels, plan.workspaces[lasting:]), launcher=launcher),
        )

    def _call_kernel(
        self,
        lasting: _Module,
        passing: _Module,
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[float],
        workspaces: Sequence[torch.Tensor],
    ) -> list[torch.Tensor] | None:
        """The module twice: with the workspaces that live on, and with the launch's own."""
        sizes = sizes_of(tensors)
        workspaces = list(workspaces) or self._allocate(lasting, sizes)
        assert [t.nbytes for t in workspaces] == lasting.plan.workspace_bytes(sizes)
        # Once freed, torch reuses it only for work later on the same stream.
        own = self._allocate(passing, sizes)
        addresses = [t.data_ptr() for t in (*workspaces, *own)]
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        return workspaces if passing.launcher(tensors, scalars, addresses, stream) else None
