"""Tries calls before they are timed: do they work, how wrong are they, what memory do they take?"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from verify.accuracy import Expected
from verify.case import Case
from verify.inputs import Inputs

from ..errors import UsageError
from ..operation import Operation
from ..runtime.backend import run
from ..runtime.gpu import GpuBackend
from ..step import Step
from .peers import Outputs, Peer
from .timing import summarize


@dataclass(frozen=True)
class Trial:
    """A call that works, and what was seen when it was tried."""

    call: Callable[[], Outputs]
    errors: dict[str, float]  # by output: the largest absolute difference from the oracle
    peak_memory_bytes: int

    def outcome(self, samples_ms: list[float], flops: int) -> dict:
        """The part of a record that every timed call has."""
        summary = summarize(samples_ms)
        return {
            **summary,
            "tflops": flops / summary["time_ms"] / 1e9,
            "samples_ms": samples_ms,
            "errors": self.errors,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def try_steps(
    backend: GpuBackend,
    steps: Iterable[Step],
    case: Case,
    inputs: Inputs,
    oracle: Sequence[torch.Tensor],
) -> tuple[dict[str, Trial], dict[str, str]]:
    """The trials of the steps that run, and why the others do not, by the steps' names."""
    trials, refusals = {}, {}
    for step in steps:
        try:
            call = partial(run, backend, step, *inputs, **case.arguments)
            trials[step.name] = try_call(call, step.operation, oracle)
        except UsageError as refusal:
            refusals[step.name] = str(refusal)
    return trials, refusals


def try_peers(
    peers: Mapping[str, Peer | str], operation: Operation, oracle: Sequence[torch.Tensor]
) -> dict[str, Trial]:
    """The trials of the peers that are not missing, by name."""
    return {
        name: try_call(peer.call, operation, oracle, peer.held_bytes)
        for name, peer in peers.items()
        if isinstance(peer, Peer)
    }


def try_call(
    call: Callable[[], Outputs],
    operation: Operation,
    oracle: Sequence[torch.Tensor],
    held_bytes: int = 0,
) -> Trial:
    """call uses held_bytes of memory that were allocated before."""
    result, peak_memory_bytes = peak_memory(call)
    outputs = (result,) if isinstance(result, torch.Tensor) else result
    errors = errors_of(operation, outputs, oracle)
    return Trial(call, errors, held_bytes + peak_memory_bytes)


def errors_of(
    operation: Operation, outputs: Sequence[torch.Tensor], oracle: Sequence[torch.Tensor]
) -> dict[str, float]:
    """The largest absolute difference of each output there is; NaN if an element is NaN."""
    return {
        operand.name: (output - expected).abs().max().item()
        for operand, output, expected in zip(operation.outputs, outputs, oracle, strict=False)
    }


def peak_memory(call: Callable[[], object]) -> tuple[object, int]:
    """The call's result, and the most bytes that torch's allocator had handed out to it at once."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def require_right(name: str, errors: dict[str, float], case: Case, expected: Expected) -> None:
    """Raises UsageError where an output differs from the oracle by more than the case allows."""
    for output, error in errors.items():
        allowed = expected.allowances[f"{output} max"]
        if not error <= allowed:  # as for NaN
            raise UsageError(
                f"{name} is wrong on {case.name}: an error of {error:.1e} in {output}, where "
                f"{allowed:.1e} is allowed"
            )


def new_run() -> str:
    """What the records of one interleaved run share; later ones sort last."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return f"{now} {secrets.token_hex(4)}"


def describe_cell(case: Case, environment: dict) -> dict:
    """The part that all records of cells share; each cell is its own run.

    seq is the number of queries; seq_k is there where there are not as many keys, v_head_dim where
    v has another head_dim than q and k.
    """
    shape = case.shape
    keys = {} if shape.seq_k == shape.seq_q else {"seq_k": shape.seq_k}
    of_v = {} if shape.v_head_dim == shape.head_dim else {"v_head_dim": shape.v_head_dim}
    return {
        "name": case.name,
        "run": new_run(),
        "environment": environment,
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "seq": shape.seq_q,
        **keys,
        "head_dim": shape.head_dim,
        **of_v,
        "causal": case.causal,
    }
