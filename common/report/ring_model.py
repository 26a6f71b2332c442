"""A model of ring attention on paper: how long its steps take, as sharded/ring.py makes them.

Of a GPU's share of the products a step has one part in P, with a causal mask as well. It computes
as fast as one GPU that has the whole problem, on the SMs that NCCL leaves it, while the tensors
travel that it needs next; then it merges. The model knows nothing of what it takes to launch a
kernel or to begin a message, so where a step takes less than some hundred microseconds it promises
too much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..operation import FORWARD, Operation
from ..problem import SHARDED, Problem
from ..records import gpu_folder
from ..ring_lanes import choose_blocks
from .derived import ONE_GPU

SMS = 132  # of an H100 or H200
# Read and written by a copy; of a GPU that is not among them, as of an H100.
HBM_BYTES_PER_S = {"h200": 4.25e12, "h100": 3.0e12}
GPUS_OF_A_HOST = 8  # beyond them a ring leaves the host,
NETWORK_BYTES_PER_S = 50e9  # by a network card of 400 Gbit/s for each GPU
ELEMENT, SUM = 2, 4  # bytes: of bf16, and of what is summed or averaged of several parts


@dataclass(frozen=True)
class Machine:
    """A GPU and its links, as a call finds them."""

    flops_per_s: float
    exchange_bytes_per_s: Callable[[int], float]  # each way, by how many of NCCL's blocks
    hbm_bytes_per_s: float
    sms: int = SMS


@dataclass(frozen=True)
class Prediction:
    seconds: float
    step_s: float  # of the products of one step, by themselves
    share: float  # of the speed of as many GPUs with a problem each


def machine_of(record: dict, operation: Operation, problem: Problem, gpus: int) -> Machine | None:
    """As a record over several GPUs has it; None where it has no speed of one on such a problem."""
    rate = _rate_of_one_gpu(record, operation, problem)
    if rate is None:
        return None
    exchange_bytes_per_s = partial(link_bytes_per_s, record["link"], gpus=gpus)
    return Machine(1e12 * rate, exchange_bytes_per_s, hbm_bytes_per_s(record["device"]))


def hbm_bytes_per_s(device: str) -> float:
    return HBM_BYTES_PER_S.get(gpu_folder(device), HBM_BYTES_PER_S["h100"])


def link_bytes_per_s(link: Sequence[dict], blocks: int, gpus: int) -> float:
    """Of the longest message that was measured, by so many blocks, or in proportion by as many
    as come closest; no more than the network, where the ring leaves the host.
    """
    most_bytes = max(each["bytes"] for each in link)
    measured = [each for each in link if each["bytes"] == most_bytes]
    closest = min(measured, key=lambda each: abs(each["blocks"] - blocks))
    within = 1e9 * closest["gb_per_s"] * blocks / closest["blocks"]
    return within if gpus <= GPUS_OF_A_HOST else min(within, NETWORK_BYTES_PER_S)


def _rate_of_one_gpu(record: dict, operation: Operation, problem: Problem) -> float | None:
    """TFLOP/s on the problem or, where that was too long for one GPU, on the longest one."""
    rates = {}
    for cell in record["cells"]:
        of_one_gpu = cell[operation.name]["attentions"][ONE_GPU]
        if cell["name"] in SHARDED and "tflops" in of_one_gpu:
            measured = SHARDED[cell["name"]]
            if _heads_and_mask(measured) == _heads_and_mask(problem):
                rates[measured.shape.seq_q] = of_one_gpu["tflops"]
    seq = problem.shape.seq_q
    return rates.get(seq, rates[max(rates)] if rates else None)


def _heads_and_mask(problem: Problem) -> tuple[int, int, bool]:
    return problem.shape.heads, problem.shape.kv_heads, problem.causal


def predict(operation: Operation, problem: Problem, gpus: int, machine: Machine) -> Prediction:
    """Of a call over so many GPUs: of the rank that has most to merge."""
    whole_s = operation.flops(problem) / machine.flops_per_s
    step_s = whole_s / gpus**2
    time = _forward_s if operation == FORWARD else _backward_s
    seconds = time(_Call(operation, problem, gpus, machine, step_s))
    return Prediction(seconds, step_s, whole_s / (gpus * seconds))


@dataclass(frozen=True)
class _Call:
    operation: Operation
    problem: Problem
    gpus: int
    machine: Machine
    step_s: float

    @property
    def query_elements(self) -> int:
        """Of a rank's q, or o, or dq."""
        shape = self.problem.shape
        return shape.batch * shape.heads * shape.seq_q // self.gpus * shape.head_dim

    @property
    def key_elements(self) -> int:
        """Of a rank's k, or v, or dk, or dv."""
        shape = self.problem.shape
        return shape.batch * shape.kv_heads * shape.seq_k // self.gpus * shape.head_dim

    def blocks(self, messages: int, itemsize: int) -> int:
        """NCCL's, for so many tensors like the keys in a step, as sharded/ring.py asks."""
        flops = self.operation.flops(self.problem) / self.gpus**2
        return choose_blocks(messages, itemsize * self.key_elements, flops, self.gpus)[1]

    def step_without_s(self, blocks: int) -> float:
        """On the SMs that so many of NCCL's blocks leave."""
        return self.step_s * self.machine.sms / (self.machine.sms - blocks)

    def exchange_s(self, num_bytes: int, blocks: int) -> float:
        return num_bytes / self.machine.exchange_bytes_per_s(blocks)

    def memory_s(self, num_bytes: float) -> float:
        return num_bytes / self.machine.hbm_bytes_per_s


def _forward_s(call: _Call) -> float:
    """Each step but the last takes as long as its kernel and merge, or as K and V travel.

    Its kernel shares its work out beforehand, so that it runs without those SMs to its end.
    """
    blocks = call.blocks(2, ELEMENT)
    travel_s = call.exchange_s(2 * ELEMENT * call.key_elements, blocks)
    beside_s = call.step_without_s(blocks)
    seconds = 0.0
    for step in range(call.gpus):
        merge_s = call.memory_s(call.query_elements * merged_bytes(step, call.gpus))
        last = step == call.gpus - 1
        seconds += call.step_s + merge_s if last else max(beside_s + merge_s, travel_s)
    return seconds


def merged_bytes(step: int, gpus: int) -> int:
    """Read and written in a step for an element of O: of the mean so far, which in between is in
    float32, of the part, and of the new mean.
    """
    if step == 0:
        return 0
    return (ELEMENT if step == 1 else SUM) + ELEMENT + (ELEMENT if step == gpus - 1 else SUM)


def _backward_s(call: _Call) -> float:
    """dK and dV are summed when those of the ranks before have arrived; dQ is one sum of the
    products of all parts.

    With a causal mask the rank that has most to add has parts of half of its queries and of all
    keys: they have such a sum of their own, whose dQ is added to that of its own keys.
    """
    gpus = call.gpus
    blocks = call.blocks(2, ELEMENT) if gpus == 2 else call.blocks(4, (ELEMENT + SUM) // 2)
    seconds = 0.0
    for step in reversed(range(gpus)):
        sent = sent_bytes(step, gpus)
        travel_s = call.exchange_s(2 * call.key_elements * sent, blocks)
        if step == 0 and call.problem.causal:
            # Its kernel takes work from a counter: it lacks those SMs while the tensors travel.
            beside_s = call.step_s + travel_s * blocks / call.machine.sms
        else:
            beside_s = call.step_without_s(blocks if sent else 0)
        seconds += max(beside_s, travel_s)
        if 0 < step < gpus - 1:
            to_float32 = ELEMENT + SUM if step == gpus - 2 else 0
            added = SUM + ELEMENT + SUM
            seconds += call.memory_s(2 * call.key_elements * (to_float32 + added))
    kept = ELEMENT if gpus == 2 else SUM  # an element of what is added to the own part, at the end
    of_keys = 2 * call.key_elements * (ELEMENT + kept + ELEMENT)
    of_queries = call.query_elements / 2 * (ELEMENT + ELEMENT + ELEMENT)
    return seconds + call.memory_s(of_keys + of_queries * call.problem.causal)


def sent_bytes(step: int, gpus: int) -> int:
    """In a step of backward, for an element of K and of V: itself, until it has been everywhere,
    and its gradient, which of several parts is in float32, until it is home.
    """
    gradient = ELEMENT if step == gpus - 2 else SUM
    return ELEMENT * (step > 1) + gradient * (step < gpus - 1)
