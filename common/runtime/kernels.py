"""One kernel of a step by itself, with workspaces that live on from its launch to another one's.

This is not in backend.py and gpu.py, whose hashes the records of attention()'s time on the host
have: attention() never launches kernels so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..errors import UsageError
from ..problem import Specialization
from ..step import Step
from .backend import Backend
from .launch import Plan

# As Call, of one kernel. It takes the workspaces that an earlier call has returned, of whichever of
# the step's kernels on as many queries and heads; without any it makes new ones. It changes them,
# and returns them. They are those that have axes: what has none is for blocks of one launch, and
# each has its own. Outputs that the kernel does not write stay as they are.
KernelCall = Callable[
    [Sequence[torch.Tensor], Sequence[float], Sequence[torch.Tensor]], list[torch.Tensor] | None
]


class KernelsBackend(Backend, Protocol):
    """A backend that launches kernels by themselves, too."""

    def prepare_kernel(self, step: Step, spec: Specialization, name: str) -> KernelCall:
        """Raises UsageError where the step is refused, or has no such kernel."""


class OneKernel(NamedTuple):
    index: int  # among the step's
    plan: Plan  # of this kernel, with all workspaces of the step
    lasting: int  # how many of those, the first ones, live on


def one_kernel(step: Step, plan: Plan, name: str) -> OneKernel:
    """Raises UsageError where the step, which has this plan, has no such kernel."""
    names = [kernel.name for kernel in plan.kernels]
    if name not in names:
        raise UsageError(f"{step.name} has no kernel {name}: it has {', '.join(names)}")
    index = names.index(name)
    has_axes = [bool(workspace.axes) for workspace in plan.workspaces]
    lasting = sum(has_axes)
    assert all(has_axes[:lasting]), "workspaces without axes come last"
    return OneKernel(index, Plan((plan.kernels[index],), plan.workspaces), lasting)
