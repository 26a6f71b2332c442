"""A model of how busy an SM's units are: what an element of S must cost, over the measured time.

FLOP/s count the products only. But an element of S, one query's logit of one key, also costs an
exponential, some float32 instructions and bytes of shared memory, and each of these has a unit of
its own, with a peak of its own. The model counts what every attention must do, at the least, with
the instruction that its products use; a unit's share is the time that this takes the unit at its
peak, over the time that was measured. So the unit is busy at least that long.

Counted, for an element of S that is seen (with a causal mask, half of them):

- the multiply-adds of each product of matrices, head_dim of them, on the tensor cores, or on the
  FMA pipe where a step uses no tensor cores;
- the exponentials, on the unit of special functions (MUFU, which Nsight Compute calls XU);
- of the softmax, what the FMA pipe does: forward, scale and maximum in one multiply-add, and the
  addition to the row's sum; backward, scale and lse in one multiply-add, dP - delta, and its
  product with P;
- the bytes that the products read from shared memory: of each product operand B, 2 head_dim bytes
  for a key (or a query), once for all rows of a warpgroup or warp, by ROWS. A comes from
  registers. Only dS of a backward kernel that computes dQ, dK and dV must pass through shared
  memory, as dQ sums over what are rows to dK: stored and, for dQ, read once, 2 bytes each.

Not counted: maxima, conversions and the rescaling of O (but as instructions, below); operands A
in shared memory, what a step reads or computes twice, how Q, K, V and dO get there, and sums of dQ
on their way to L2; the parts of tiles that a mask or a sequence's end hides; delta, the rounding of
dQ, and all that happens once a row.

Beside that stands a count of instructions, each for one lane: a multiply-add of a product counts as
one, and the softmax as FORWARD_INSTRUCTIONS or BACKWARD_INSTRUCTIONS.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..operation import BACKWARD, FORWARD, Operation
from ..records import gpu_folder
from .derived import readable
from .pipeline import TENSOR_FLOP
from .record_set import Ladder
from .ring_model import SMS

# The highest clock of an H100 or H200, from which the power limit takes something during a run.
# What records have of their runs' clocks is from before and after.
CLOCK_HZ = 1.98e9
GPUS = ("h200", "h100")  # whose SMs do as much in a clock, and have as many
# Of an SM, in a clock. 132 SMs with these at 1.83 GHz are the datasheet's 989 TFLOP/s; its 67 in
# float32 are 132 times 128 multiply-adds at 1.98 GHz.
TENSOR_FMAS = TENSOR_FLOP // 2  # of bf16 or fp16
EXPS = 16
LANES = 128  # of four schedulers, each of which issues for 32: instructions, or float32 FMAs
SMEM_BYTES = 128
FMAS_A_SLOT = TENSOR_FMAS // LANES  # the tensor cores' FMAs while a lane issues one instruction

# What the products use, by what is in a step's code. A peer's, by what it is written for:
# FlashAttention-2 for cards before Hopper.
WGMMA, MMA_SYNC, ON_LANES = "wgmma", "mma.sync", "FMA pipe"
PEERS = {
    "sdpa_flash": MMA_SYNC,
    "sdpa_cudnn": WGMMA,
    "flash_attention_3": WGMMA,
    "flash_attention_3_deterministic": WGMMA,
}
# Rows for which operand B is read once: of a warpgroup's product, or the most that a warp has
# registers for, as in v07 up to head_dim 128. (v05, v06, b04 and b03 for dK
# and dV have 16.)
ROWS = {WGMMA: 64, MMA_SYNC: 32}
ELEMENT_BYTES = 2

# Maximum, multiply-add, exponential, addition to the sum; the conversion and the rescaling of O
# make up the fifth.
FORWARD_INSTRUCTIONS = 5
# Multiply-add, exponential, dP - delta, its product with P, and half a conversion of P and of dS.
BACKWARD_INSTRUCTIONS = 5


@dataclass(frozen=True)
class Work:
    """For an element of S."""

    products: int  # of matrices, each with head_dim multiply-adds
    exps: int
    fmas: int  # of the softmax, on the FMA pipe
    instructions: int  # of the softmax, for a lane
    passed_bytes: int  # through shared memory, but for operands B


FUSED = {
    FORWARD.name: Work(2, exps=1, fmas=2, instructions=FORWARD_INSTRUCTIONS, passed_bytes=0),
    BACKWARD.name: Work(
        5, exps=1, fmas=3, instructions=BACKWARD_INSTRUCTIONS, passed_bytes=2 * ELEMENT_BYTES
    ),
}
# One kernel for dQ, with three products, and one for dK and dV, with four: S and dP in both.
# dS is an operand A where it is computed.
IN_TWO_KERNELS = Work(7, exps=2, fmas=6, instructions=2 * BACKWARD_INSTRUCTIONS, passed_bytes=0)
DQ_KERNEL = "attention_dq"

UNITS = ("tensor", "exp", "fma", "smem")
# Beside the units: instructions over what the lanes can issue, with each FMA of the tensor cores as
# one; with FMAS_A_SLOT of them as one; and without them.
COUNTS = ("instructions", "packed", "issue")
# What Nsight Compute counts of each, by its name among metrics.COUNTERS.
COUNTED = {
    "tensor": "tensor_percent",
    "exp": "xu_percent",
    "fma": "fma_percent",
    "smem": "l1_data_percent",
    "issue": "issue_percent",
}


@dataclass(frozen=True)
class Attention:
    """What a step or a peer does for an element of S, and what its products use, if known."""

    work: Work
    instruction: str | None

    def clocks(self, head_dim: int) -> dict[str, float | None]:
        """By UNITS and COUNTS: for how many clocks an SM's unit is busy with an element of S.

        None where the model does not say.
        """
        work, fmas = self.work, self.work.products * head_dim
        on_lanes = fmas if self.instruction == ON_LANES else 0
        rows = ROWS.get(self.instruction or "")
        smem_bytes = rows and fmas * ELEMENT_BYTES / rows + work.passed_bytes
        packed = on_lanes or fmas / FMAS_A_SLOT
        return {
            "tensor": None if on_lanes else fmas / TENSOR_FMAS,
            "exp": work.exps / EXPS,
            "fma": (work.fmas + on_lanes) / LANES,
            "smem": smem_bytes and smem_bytes / SMEM_BYTES,
            "instructions": (fmas + work.instructions) / LANES,
            "packed": (packed + work.instructions) / LANES,
            "issue": (on_lanes + work.instructions) / LANES,
        }


def is_modelled(device: str) -> bool:
    """Whether the peaks above are those of a device."""
    return gpu_folder(device) in GPUS


def attention(ladder: Ladder, name: str) -> Attention | str:
    """Of a step or a peer; of a step whose code was not looked at since it has changed, why not.

    Its static record tells which instruction it uses, and how many kernels share the products.
    """
    if name not in [step.name for step in ladder.steps]:
        return Attention(FUSED[ladder.operation.name], PEERS.get(name))
    static = ladder.static.current(name)
    compiled = static if isinstance(static, str) else static["compiled"]
    sass = compiled if isinstance(compiled, str) else compiled["sass"]
    if isinstance(sass, str):
        return sass
    opcodes = {opcode for counts in sass.values() for opcode, count in counts.items() if count}
    instruction = ON_LANES
    if opcodes & {"HGMMA", "HMMA"}:
        instruction = WGMMA if "HGMMA" in opcodes else MMA_SYNC
    work = IN_TWO_KERNELS if DQ_KERNEL in sass else FUSED[ladder.operation.name]
    return Attention(work, instruction)


def shares(
    attention: Attention, operation: Operation, head_dim: int, tflops: float
) -> dict[str, float | None]:
    """Of the peak at CLOCK_HZ, by UNITS and COUNTS, from TFLOP/s as tables have them.

    These count the operation's products, and of visible keys only. So they tell how many elements
    of S a second has.
    """
    elements_per_s = 1e12 * tflops / (2 * operation.products * head_dim)
    return _of_clocks(attention.clocks(head_dim), elements_per_s / (SMS * CLOCK_HZ))


def counted_shares(attention: Attention, record: dict) -> dict[str, dict] | None:
    """Of a step's record: the shares of all clocks that Nsight Compute counted, by UNITS and
    "issue": "predicted", and those "counted", which are of the step's kernels, by their clocks.

    None where it has counted nothing, or not all; "ghz" is the clock while it did.
    """
    if isinstance(record["counters"], str):
        return None
    kernels = readable(record["counters"]).values()
    needed = {"cycles", "duration_ms", *COUNTED.values()}
    if any(kernel[name] is None for kernel in kernels for name in needed):
        return None
    cycles = sum(kernel["cycles"] for kernel in kernels)
    clocks = {name: attention.clocks(record["shape"]["head_dim"])[name] for name in COUNTED}
    return {
        "ghz": cycles / sum(kernel["duration_ms"] for kernel in kernels) / 1e6,
        "predicted": _of_clocks(clocks, _elements(record["shape"]) / (SMS * cycles)),
        "counted": {
            unit: sum(kernel[name] * kernel["cycles"] for kernel in kernels) / cycles / 100
            for unit, name in COUNTED.items()
        },
    }


def _of_clocks(clocks: dict[str, float | None], elements: float) -> dict[str, float | None]:
    """Shares of a clock, of so many elements of S in each."""
    return {name: each if each is None else each * elements for name, each in clocks.items()}


def _elements(shape: dict) -> float:
    """Of S, of a headline record's shape; those that are seen."""
    pairs = shape["batch"] * shape["heads"] * shape["seq_q"] * shape["seq_k"]
    return pairs / 2 if shape["causal"] else pairs
