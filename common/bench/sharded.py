"""Measures attention over several GPUs of a host: profiles/<gpu>x<gpus>/sharded.json.

It runs under torchrun, a process a GPU, as `make bench GPUS=2` starts it. The record's keys are
those of headline.py and, of a cell, of trial.describe_cell, but for these:

gpus        how many
sources     the hashes of the steps that attention() chooses
sharded     SHA-256 of the files of common/sharded/, by path
link        what the exchange of a message moves each way, by NCCL's thread blocks and its bytes
cells       of common.problem.SHARDED; environment is the first GPU's
forward, backward   of a cell: flops of the whole problem, and attentions by name: ours by two
            methods, one GPU, and torch's; or why one is missing
time_ms     of an attention, the slowest rank's; of one_gpu, which every rank computes on its own
            GPU at the same time, the ranks' mean
slowest_gpu_ms  of one_gpu, the longest of the ranks' medians; time_ms is the median of their means
tflops      of each GPU
peak_memory_bytes   of the rank that takes most: beyond q, k, v and dout, and what forward has saved
communication   of the ring: milliseconds in which tensors travel, and the share of them in which
            the GPU computes; of a call by itself, by torch.profiler, the ranks' mean
host_ms     of the ring: how long the host takes for a call, on the slowest rank
differences of the ring, by output: root mean square of the difference from one_gpu's, as a share
            of that of one_gpu's
timelines   by operation, of each rank, the GPU's kernels during a call of the ring, of the cell
            TIMELINE

Where a round would take longer than LONG_S, the call that tries an attention is its only
sample; the ring's is then made under the profiler. Kernels have been loaded by shorter calls.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from verify.case import Case

from .. import attention, sharded
from ..cli import guarded
from ..errors import UsageError
from ..operation import BACKWARD, FORWARD, OPERATIONS, Operation
from ..paths import BUILD_DIR
from ..problem import SHARDED, Problem
from ..record_schema import RING, SHARDED_ATTENTIONS
from ..records import (
    PROFILES_DIR,
    SCHEMA,
    SHARDED_FILE,
    gpus_folder,
    sharded_hashes,
    write_record,
)
from ..ring_lanes import MOST_BLOCKS, blocks_used
from ..runtime.backend import DTYPES
from ..runtime.gpu import GpuBackend
from ..sharded.order import held_lengths
from ..sharded.ring import ONWARD
from ..sharded.transport import transport_of
from .attentions import steps_for
from .cells import build_all, read_unfinished
from .context_parallel import ROTATIONS, ROUTE, context_parallel, sdpa, use_rotation
from .device_state import device_state, git_state, versions
from .kernel_trace import Interval, hidden_share, trace_kernels
from .peers import REFUSALS, reason
from .timing import summarize
from .together import (
    Events,
    elapsed,
    from_first_rank,
    gather,
    is_first_rank,
    mean,
    slowest,
    time_call,
    time_together,
)
from .trial import describe_cell, new_run

ONE_GPU = "one_gpu"
TIMELINE = "h16_causal_32768"
SEED = 0
LINK_BYTES = (16 << 20, 64 << 20, 512 << 20)

CELL_S = 4.0  # of rounds
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
LOADING_S = 2.0  # of backward, at most, in the calls that load the kernels of a longer cell
LONG_S = 10.0  # no peer makes a call that takes longer, and no round that takes longer is repeated
TAKES_LONG = f"a call was expected to take more than {LONG_S:g} s"
EXPECTED_FLOPS_PER_S = 500e12  # of a GPU: tells beforehand how long a call will take

# Of one call's output, as root mean squares. Roundings of bf16 make 0.003, and a part that is lost
# or has a wrong weight a tenth or more.
MOST_DIFFERENCE = 0.01


class Attention:
    """q, k and v, whole or the rank's part, to o, and to the gradients where dout is that of o.

    prepare() comes before each call of either.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        route: str,
        gpus: int,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.route, self.gpus = route, gpus
        self._function, self._prepare = function, prepare
        self._leaves = [t.detach().requires_grad_() for t in inputs]
        self._dout = dout
        self._o: Tensor | None = None  # of the last forward, with what that has saved

    def call(self, operation: Operation) -> tuple[Tensor, ...]:
        """Makes the operation's outputs. Backward's come after forward's."""
        self._prepare()
        if operation == FORWARD:
            self._o = self._function(*self._leaves)
            return (self._o.detach(),)
        if self._o is None:
            raise RuntimeError("forward did not run")
        return torch.autograd.grad(self._o, self._leaves, self._dout, retain_graph=True)


@dataclass(frozen=True)
class Trial:
    """A call of this rank, and what was seen of it."""

    call: Callable[[], tuple[Tensor, ...]]
    ms: float
    host_ms: float
    peak_memory_bytes: int
    kernels: list[Interval]


def measure_sharded() -> Path:
    """Measures all cells; the first rank writes their record. Returns its path.

    A run of all cells takes many minutes. One that is interrupted leaves what it has measured in
    build/, where the next of the same code on such GPUs goes on with it. Raises UsageError, on all
    ranks, where the ring's results are not those of one GPU.
    """
    backend = GpuBackend()
    cases = [Case.of(name, problem) for name, problem in SHARDED.items()]
    steps = {step.name: step for case in cases for step in steps_for(backend, case.problem)}
    if is_first_rank():
        build_all(backend, steps.values(), cases)
    dist.barrier()
    gpus = dist.get_world_size()
    begun = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "gpus": gpus,
        "dtype": cases[0].specialization.dtype,
        "sources": {name: {"code_sha256": step.code_sha256} for name, step in steps.items()},
        "sharded": sharded_hashes(),
    }
    folder = gpus_folder(begun["device"], gpus)
    unfinished = BUILD_DIR / "bench" / folder / SHARDED_FILE
    record = from_first_rank(read_unfinished(unfinished, begun))
    if record is None:
        record = {**begun, "link": measure_link(), "cells": [], "timelines": {}}
    measured = {cell["name"] for cell in record["cells"]}
    for case in cases:
        if case.name in measured:
            continue
        start = time.monotonic()
        try:
            cell, kernels = measure_cell(case, backend)
        except UsageError as error:
            raise UsageError(f"{case.name}: {error}") from error
        record["cells"].append(cell)
        if case.name == TIMELINE:
            record["timelines"] = {name: _timeline(ranks) for name, ranks in kernels.items()}
        torch.cuda.empty_cache()
        if is_first_rank():
            write_record(unfinished, record)
            took = time.monotonic() - start
            print(f"measured {case.name} in {took:.0f} s", file=sys.stderr, flush=True)
    path = PROFILES_DIR / folder / SHARDED_FILE
    if is_first_rank():
        write_record(path, record)
        unfinished.unlink(missing_ok=True)
    return path


def measure_link() -> list[dict]:
    """The record's link: all ranks send to the next one at once."""
    transport = transport_of(dist.group.WORLD, "cuda")
    found = []
    for num_bytes in LINK_BYTES:
        sent = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        received = torch.empty_like(sent)
        for most_blocks in MOST_BLOCKS:
            blocks = blocks_used(num_bytes, most_blocks, transport.size)
            lane = transport.lane_of(ONWARD, most_blocks, blocks)
            call = partial(_exchange, lane, sent, received)
            call()  # connects
            samples, _ = time_together({RING: call}, rounds=5)
            ms = statistics.median(slowest(samples[RING]))
            found.append({"blocks": blocks, "bytes": num_bytes, "gb_per_s": num_bytes / ms / 1e6})
    return list({(each["blocks"], each["bytes"]): each for each in found}.values())


def _exchange(lane, sent: Tensor, received: Tensor) -> None:
    lane.pass_on([sent], [received])()


def measure_cell(case: Case, backend: GpuBackend) -> tuple[dict, dict[str, list[list[Interval]]]]:
    """An entry of the record's cells; and by operation, of each rank, the kernels of a call."""
    problem, run = case.problem, from_first_rank(new_run())
    route = " and ".join(step.name for step in steps_for(backend, problem))
    _load_kernels(problem, route)
    environment = {"before": device_state()}
    measured, kernels = {}, {}
    with ExitStack() as stack:
        attentions = _load(problem, route, stack)
        for operation in OPERATIONS.values():
            outcomes, of_ranks = _measure(operation, problem, attentions)
            measured[operation.name] = {
                "flops": operation.flops(problem),
                "attentions": {name: outcomes[name] for name in SHARDED_ATTENTIONS},
            }
            kernels[operation.name] = of_ranks
    environment["after"] = device_state()
    return {**describe_cell(case, environment), "run": run, **measured}, kernels


def _load_kernels(problem: Problem, route: str) -> None:
    """By calls on a shorter sequence, where the problem's own take long.

    The first call with such tensors loads kernels, and for that CUDA waits until the GPU has
    nothing to do, an exchange included. (Not all: Triton compiles another kernel for strides from
    2^31 on, and over more GPUs the shorter sequence may take other SMs. Then the host waits.)
    """
    shorter, gpus = problem, dist.get_world_size()
    while _seconds(BACKWARD, shorter, gpus) > LOADING_S:
        seq = shorter.shape.seq_q // 2
        shorter = replace(shorter, shape=replace(shorter.shape, seq_q=seq, seq_k=seq))
    if shorter == problem:
        return
    with ExitStack() as stack:
        attentions = _load(shorter, route, stack)
        for operation in OPERATIONS.values():
            for name, each in attentions.items():
                try:
                    if not isinstance(each, str):
                        each.call(operation)
                except REFUSALS:
                    if name == RING:
                        raise
        del attentions, each
    torch.cuda.empty_cache()


def _load(problem: Problem, route: str, stack: ExitStack) -> dict[str, Attention | str]:
    """The attentions by name, on the same inputs, or why one is missing."""
    causal, gpus = problem.causal, dist.get_world_size()
    runs_whole = _seconds(FORWARD, problem, 1) <= LONG_S
    whole, part = _make_inputs(problem, whole=runs_whole)

    def on_part(function: Callable[..., Tensor], route: str, prepare=lambda: None) -> Attention:
        return Attention(partial(function, causal=causal), *part, route, gpus, prepare)

    found: dict[str, Attention | str] = {
        method: on_part(partial(sharded.attention, method=method), f"{route}, {method}")
        for method in sharded.METHODS
    }
    found[ONE_GPU] = TAKES_LONG
    if whole:
        found[ONE_GPU] = Attention(partial(attention, causal=causal), *whole, route, gpus=1)
    try:
        mesh = init_device_mesh("cuda", (gpus,))
        stack.enter_context(context_parallel(mesh, causal=causal))
    except REFUSALS as error:
        return found | dict.fromkeys(ROTATIONS, reason(error))
    return found | {
        name: on_part(sdpa, f"{ROUTE}, {rotation}", partial(use_rotation, name))
        for name, rotation in ROTATIONS.items()
    }


_Inputs = tuple[tuple[Tensor, Tensor, Tensor], Tensor]  # q, k and v; dout


def _make_inputs(problem: Problem, whole: bool) -> tuple[_Inputs | None, _Inputs]:
    """Normally distributed: the whole, where asked for, and the rank's part, of it or by itself."""
    shape, rank, gpus = problem.shape, dist.get_rank(), dist.get_world_size()
    rng = torch.Generator("cuda").manual_seed(SEED if whole else SEED + rank)

    def make(size: tuple[int, ...]) -> Tensor:
        batch, heads, seq, head_dim = size
        if not whole:
            seq = sum(held_lengths(seq, gpus, rank))
        options = {"dtype": DTYPES[problem.dtype], "device": "cuda", "generator": rng}
        return torch.randn(batch, heads, seq, head_dim, **options)

    q, k, v, dout = (make(size) for size in (shape.q, shape.kv, shape.kv, shape.q))
    if not whole:
        return None, ((q, k, v), dout)
    parts = [sharded.shard(t, dim=2) for t in (q, k, v, dout)]
    return ((q, k, v), dout), (tuple(parts[:3]), parts[3])


def _seconds(operation: Operation, problem: Problem, gpus: int) -> float:
    """About how long a call will take."""
    return operation.flops(problem) / gpus / EXPECTED_FLOPS_PER_S


def _measure(
    operation: Operation, problem: Problem, attentions: dict[str, Attention | str]
) -> tuple[dict[str, dict], list[list[Interval]]]:
    """The record's attentions of an operation; and of each rank, the kernels of the ring's call."""
    outcomes: dict[str, dict] = {}
    chosen: dict[str, Attention] = {}
    for name, each in attentions.items():
        if isinstance(each, str):
            outcomes[name] = {"missing": each}
        elif name != RING and _seconds(operation, problem, each.gpus) > LONG_S:
            outcomes[name] = {"missing": TAKES_LONG}
        else:
            chosen[name] = each
    takes_long = sum(_seconds(operation, problem, e.gpus) for e in chosen.values()) > LONG_S
    trials: dict[str, Trial] = {}
    outputs: dict[str, tuple[Tensor, ...]] = {}
    for name, each in chosen.items():
        trial, made, refusal = None, (), None
        try:
            trial, made = _try(
                partial(each.call, operation), warms_up=not takes_long, traces=name == RING
            )
        except REFUSALS as error:
            if name == RING:
                raise
            refusal = reason(error)
        if refusals := [told for told in gather(refusal) if told]:  # on any rank
            outcomes[name] = {"missing": refusals[0]}
            continue
        trials[name] = trial
        if name in (RING, ONE_GPU):
            outputs[name] = made
        del made
    differences = _compare(operation, outputs)
    outputs.clear()

    samples = {name: [trial.ms] for name, trial in trials.items()}
    host_ms = [trials[RING].host_ms]
    if not takes_long:
        round_s = max(gather(sum(trial.ms for trial in trials.values()))) / 1e3
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(CELL_S / round_s)))
        calls = {name: trial.call for name, trial in trials.items()}
        samples, hosts_ms = time_together(calls, rounds)
        host_ms = hosts_ms[RING]
    for name, trial in trials.items():
        combine = mean if name == ONE_GPU else slowest
        outcomes[name] = {
            "route": chosen[name].route,
            **_outcome(combine(samples[name]), operation.flops(problem) / chosen[name].gpus),
            "peak_memory_bytes": max(gather(trial.peak_memory_bytes)),
        }
        if name == ONE_GPU:
            outcomes[name]["slowest_gpu_ms"] = max(gather(statistics.median(samples[name])))
    of_ranks = gather(trials[RING].kernels)
    travel_ms, hidden = zip(*(hidden_share(kernels) for kernels in of_ranks), strict=True)
    outcomes[RING] |= {
        "communication": {"ms": statistics.mean(travel_ms), "hidden": statistics.mean(hidden)},
        "host_ms": max(gather(statistics.median(host_ms))),
        "differences": differences,
    }
    return outcomes, of_ranks


def _try(
    call: Callable[[], tuple[Tensor, ...]], warms_up: bool, traces: bool
) -> tuple[Trial, tuple]:
    """Calls once, after a call that does not count where there is time; and returns the outputs."""
    if warms_up:
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    timed: list[tuple[Events, float, tuple[Tensor, ...]]] = []
    kernels = []
    if traces:
        kernels = trace_kernels(lambda: timed.append(time_call(call)))
    else:
        timed.append(time_call(call))
        torch.cuda.synchronize()
    peak_memory_bytes = torch.cuda.max_memory_allocated() - before
    events, host_ms, outputs = timed.pop()
    return Trial(call, elapsed(events), host_ms, peak_memory_bytes, kernels), outputs


def _compare(operation: Operation, outputs: dict[str, tuple[Tensor, ...]]) -> dict[str, float]:
    """The record's differences. Raises UsageError where one is too large."""
    if ONE_GPU not in outputs:
        return {}
    differences = {}
    for operand, ours, whole in zip(
        operation.outputs, outputs[RING], outputs[ONE_GPU], strict=False
    ):
        expected = sharded.shard(whole, dim=2).float()
        squares = torch.stack([(ours - expected).square().sum(), expected.square().sum()])
        dist.all_reduce(squares)
        difference = (squares[0] / squares[1]).sqrt().item()
        if not difference <= MOST_DIFFERENCE:  # as for NaN
            raise UsageError(
                f"the ring is wrong: {operand.name} differs from one GPU's by {difference:.2g} of "
                f"its root mean square, where {MOST_DIFFERENCE} is allowed"
            )
        differences[operand.name] = difference
    return differences


def _outcome(samples_ms: list[float], flops: float) -> dict:
    summary = summarize(samples_ms if len(samples_ms) > 1 else samples_ms * 2)
    return {**summary, "samples_ms": samples_ms, "tflops": flops / summary["time_ms"] / 1e9}


def _timeline(of_ranks: list[list[Interval]]) -> list[list[dict]]:
    """The record's timeline of an operation: microseconds from the first kernel of any rank."""
    zero = min(kernel.start for kernels in of_ranks for kernel in kernels)
    return [
        [
            {
                "what": kernel.what,
                "start_us": (kernel.start - zero) / 1e3,
                "end_us": (kernel.end - zero) / 1e3,
            }
            for kernel in kernels
        ]
        for kernels in of_ranks
    ]


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        path = measure_sharded()
        if is_first_rank():
            print(path)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
