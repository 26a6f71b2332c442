"""What the ranks of test_sharded.py do: each is a process, whose findings the tests read.

A launch is a number of ranks that go through one list of things. So that not each of them has to
import torch and to read all steps, a fork server does once. torch.distributed finds what torchrun
would give it: the ranks in the environment, and a store in the process that has started them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from common import attention, sharded
from common.catalog import all_steps
from common.runtime import cpu
from verify.tests.sharded_cases import (
    BF16,
    BOTH,
    CASES_OF_2,
    CASES_OF_4,
    FP32,
    SHORT_S,
    Findings,
    attempt,
    cases_on_gpus,
    make,
    outcome,
    run_cases,
    run_on_gpus,
    short_group,
    square,
    tensors,
)
from verify.tests.sharded_failures import ENDS, WORLD, run_end, run_failures
from verify.tests.sharded_mutants import TURN, run_mutants

all_steps()  # they are kept

TIMEOUT_S = 60.0  # of groups in which nobody fails: a step may have to be compiled
LAUNCH_S = 300  # that a launch may take, whatever happens


# Groups, shard() and unshard(): 4 ranks.


def run_groups(device: str) -> Findings:
    rank = dist.get_rank()
    case = make("group", 2, square(1, 4, 2, 21, 8), FP32)[0]
    of_all = make("group", 4, square(1, 4, 2, 21, 8), FP32)[0]
    findings: Findings = {"shards": try_shards(rank), "errors": try_errors()}
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    backwards = [dist.new_group(ranks, sort_ranks=False) for ranks in ([2, 0], [3, 1])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    findings["None"] = of_all.run(device)
    findings["WORLD"] = of_all.run(device, dist.group.WORLD)
    findings["subgroup"] = case.run(device, pairs[rank % 2])
    findings["mesh of all"] = of_all.run(device, DeviceMesh("cpu", [0, 1, 2, 3]))
    findings["mesh['cp']"] = case.run(device, mesh["cp"])
    findings["mesh['dp']"] = case.run(device, mesh["dp"])
    findings["mesh of two"] = outcome(lambda: sharded.attention(*tensors(), mesh))
    findings["no group"] = outcome(lambda: sharded.attention(*tensors(), "cp"))
    not_mine = dist.new_group([rank ^ 1])  # of another rank alone: torch gives no group
    findings["another's group"] = outcome(lambda: sharded.attention(*tensors(), not_mine))
    findings["group backwards"] = attempt(case.run, device, backwards[rank % 2])
    for causal in (True, False):
        findings[f"saved elsewhere, causal={causal}"] = saved_elsewhere(causal)
    return findings


def run_lopsided(device: str) -> Findings:
    """3 ranks, of which two have made a group more than the third."""
    case = make("group", 3, square(1, 4, 2, 21, 8), FP32)[0]
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=SHORT_S))
    whole = short_group()
    if dist.get_rank():
        sharded.attention(*tensors(), pair)
    return {"lopsided": attempt(case.run, device, whole)}


def saved_elsewhere(causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Of tensors stored [batch, seq, heads, head_dim]: with a hook that gives what forward has
    saved other strides, as save_on_cpu() does, and without one.
    """

    def run() -> list[Tensor]:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors()]
        inputs = [t.requires_grad_() for t in inputs]
        o = sharded.attention(*inputs, causal=causal)
        return list(autograd.grad(o, inputs, torch.ones_like(o)))

    with saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t):
        found = run()
    return found, run()


SHARDED_SHAPES = [
    ((4,), 0),
    ((5,), 0),
    ((90, 3), 0),
    ((2, 67), 1),
    ((2, 3, 8, 2), -2),
    ((2, 9), -1),
]


def try_shards(rank: int) -> list[str]:
    """What is wrong."""
    wrong = []
    for shape, dim in SHARDED_SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
        part = sharded.shard(whole, dim=dim)
        if not torch.equal(sharded.unshard(part.detach(), dim=dim), whole):
            wrong.append(f"unshard of shard: {shape}, {dim}")
        positions = sharded.shard(torch.arange(shape[dim]), dim=0)
        if not torch.equal(part, whole.index_select(dim, positions)):
            wrong.append(f"positions: {shape}, {dim}")
        weights = torch.randn(part.shape)
        part.backward(weights)
        expected = torch.zeros(shape).index_add_(dim, positions, weights)
        if not torch.equal(whole.grad, expected):
            wrong.append(f"gradient: {shape}, {dim}")
        if not torch.equal(sharded.shard(whole[:], dist.group.WORLD, dim=dim), part):
            wrong.append(f"group: {shape}, {dim}")
    for dtype in (torch.int64, BF16, torch.bool):  # not contiguous, with nothing to differentiate
        whole = torch.arange(2 * 21).view(21, 2).t().to(dtype)
        if not torch.equal(sharded.unshard(sharded.shard(whole, dim=1), dim=1), whole):
            wrong.append(f"dtype {dtype}")
    with torch.no_grad():
        sharded.unshard(torch.ones(2, requires_grad=True), dim=0)
    return wrong


def try_errors() -> dict[str, dict]:
    rank = dist.get_rank()
    x = torch.ones(3, 8)
    return {
        "too short": outcome(lambda: sharded.shard(x, dim=0)),
        "shard's dim": outcome(lambda: sharded.shard(x, dim=2)),
        "shard's dim -3": outcome(lambda: sharded.shard(x, dim=-3)),
        "unshard's dim": outcome(lambda: sharded.unshard(x, dim=2)),
        "unshard's gradient": outcome(lambda: sharded.unshard(x.clone().requires_grad_(), dim=1)),
        "unshard's parts": outcome(lambda: sharded.unshard(x[:, : 3 + (rank == 1)], dim=1)),
        "unshard's shape": outcome(lambda: sharded.unshard(x[: 2 + (rank == 1)], dim=1)),
        "unshard's dtype": outcome(lambda: sharded.unshard(x.to([FP32, BF16][rank % 2]), dim=1)),
        "unshard's dims": outcome(lambda: sharded.unshard(x, dim=rank % 2)),
        "unshard works": outcome(lambda: sharded.unshard(x, dim=1)),
    }


# With the rest of torch: 2 ranks.


class Block(nn.Module):
    """Attention between two linear maps; the same on all ranks."""

    def __init__(self, method: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(16, 3 * 16), nn.Linear(16, 16)
        self.method = method

    def attend(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return sharded.attention(q, k, v, causal=True, method=self.method)

    def forward(self, x: Tensor) -> Tensor:
        o = self.attend(self.before(x).relu())
        return self.after(o.transpose(1, 2).flatten(2).sin())


class Checkpointed(Block):
    def attend(self, qkv: Tensor) -> Tensor:
        return checkpoint(super().attend, qkv, use_reentrant=False)


def train(model: nn.Module) -> list[Tensor]:
    """The output and the gradients."""
    x = sharded.shard(torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(1)), dim=1)
    x.requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def run_torch(device: str) -> Findings:
    findings: Findings = {}
    for method in BOTH:
        expected = train(Block(method))
        findings[f"checkpoint {method}"] = (train(Checkpointed(method)), expected)
        compiled = torch.compile(
            Block(method), backend="eager" if method == "ring" else "aot_eager"
        )
        findings[f"compile {method}"] = (train(compiled), expected)
        findings[f"autocast {method}"] = autocast(method)
    findings["autocast of float64"] = autocast_of_float64()
    findings["backward twice"] = backward_twice()
    findings["no gradient"] = no_gradient()
    findings["second derivative"] = outcome(second_derivative)
    case = make("again", 2, square(1, 2, 2, 21, 8), FP32)[0]
    findings["before"] = case.run(device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    findings["without ranks"] = outcome(lambda: sharded.attention(*tensors()))
    store = dist.PrefixStore("again", connect())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    findings["after"] = case.run(device)
    return findings


def autocast(method: str) -> tuple[list[Tensor], list[Tensor]]:
    def run(cast: Callable, context: Callable) -> list[Tensor]:
        inputs = tensors(requires_grad=True)
        with context():
            o = sharded.attention(*map(cast, inputs), method=method, deterministic=True)
        return [o.detach(), *autograd.grad(o, inputs, torch.ones_like(o))]

    with_it = run(lambda t: t, lambda: torch.autocast("cpu", dtype=BF16))
    return with_it, run(lambda t: t.to(BF16), torch.enable_grad)


def autocast_of_float64() -> list[dict]:
    """Of one GPU and of several."""
    inputs = [t.double() for t in tensors()]
    with torch.autocast("cpu", dtype=BF16):
        return [outcome(partial(each, *inputs)) for each in (attention, sharded.attention)]


def backward_twice() -> tuple[list[Tensor], list[Tensor]]:
    inputs = tensors(requires_grad=True)
    o = sharded.attention(*inputs)
    first = autograd.grad(o, inputs, torch.ones_like(o), retain_graph=True)
    return list(autograd.grad(o, inputs, torch.ones_like(o))), list(first)


class Constant(autograd.Function):
    """Its output depends on no input, as far as autograd is told."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> None:
        return None


def no_gradient() -> tuple[list[Tensor], list[Tensor]]:
    """Where o of one rank has none; and where that is 0."""

    def run(spoil: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = tensors(requires_grad=True)
        o = sharded.attention(*inputs)
        y = spoil(o) if dist.get_rank() == 1 else o
        return list(autograd.grad(y.sum(), inputs))

    return run(Constant.apply), run(lambda o: 0 * o)


def second_derivative() -> None:
    inputs = tensors(requires_grad=True)
    o = sharded.attention(*inputs)
    (dq,) = autograd.grad(o.square().sum(), inputs[:1], create_graph=True)
    dq.sum().backward()


@dataclass(frozen=True)
class Launch:
    """worlds: how many sets of ranks do so at the same time."""

    ranks: int
    play: Callable[[str], Findings]  # of a device type
    device: str = "cpu"
    worlds: int = 1
    timeout_s: float = TIMEOUT_S


LAUNCHES = {
    "cases of 2": Launch(2, partial(run_cases, CASES_OF_2)),
    "cases of 4": Launch(4, partial(run_cases, CASES_OF_4)),
    "mutants": Launch(3, run_mutants),
    "failures": Launch(3, run_failures),
    "ends": Launch(3, run_end, worlds=len(ENDS), timeout_s=SHORT_S),
    "groups": Launch(4, run_groups),
    "lopsided": Launch(3, run_lopsided),
    "torch": Launch(2, run_torch),
    "1 GPU": Launch(1, partial(run_cases, cases_on_gpus(1)), "cuda"),
    "2 GPUs": Launch(2, run_on_gpus, "cuda"),
}


def connect() -> dist.Store:
    """The store of the process that has started the ranks."""
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


def has_begun(rank: int) -> str:
    """The key in the store by which a rank tells so."""
    return f"rank {rank} has begun"


def be_rank(
    name: str, world: int, rank: int, port: int, path: Path, mutants: Sequence[str]
) -> None:
    """Goes through a launch, and writes what it finds."""
    launch = LAUNCHES[name]
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    cpu._num_cores = lambda: 1  # of the SIMT runtime: each core has a rank
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(launch.ranks)}
    own = {WORLD: str(world), TURN: " ".join(mutants), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({**address, **place, **own})
    if launch.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if launch.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=launch.timeout_s))
    connect().set(has_begun(rank), "")
    try:
        torch.save(launch.play(launch.device), path)
    except BaseException:
        traceback.print_exc()
        raise
    if name != "ends":  # where not all are left
        dist.destroy_process_group()


def start(name: str, folder: Path, mutants: Sequence[str]) -> None:
    """Runs a launch, until all its ranks have ended. Of the mutants, those with these names."""
    folder.mkdir()
    launch = LAUNCHES[name]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    stores, processes = [], []
    for world in range(launch.worlds):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores.append(store)
        for rank in range(launch.ranks):
            path = folder / f"{world * launch.ranks + rank}.pt"
            process = context.Process(
                target=be_rank, args=(name, world, rank, store.port, path, mutants)
            )
            process.start()
            processes.append(process)
        # If all worlds began at once, ranks might not find each other within a short time-out.
        keys = [has_begun(rank) for rank in range(launch.ranks)]
        store.wait(keys, timedelta(seconds=TIMEOUT_S))
    deadline = time.monotonic() + LAUNCH_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()


def read(name: str, folder: Path) -> list[Findings]:
    """By rank, one world after the other: empty for one that has not lived to write any."""
    launch = LAUNCHES[name]
    paths = [folder / f"{i}.pt" for i in range(launch.worlds * launch.ranks)]
    return [torch.load(path) if path.exists() else {} for path in paths]
