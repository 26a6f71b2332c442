"""How many thread blocks NCCL moves tensors around the ring with, and so how many SMs are left.

Without torch: sharded/transport.py chooses by it, report/ring_model.py predicts what that gives.
"""

from __future__ import annotations

# On an H100 or H200: what NCCL sends and receives with a thread block, which has an SM of its own,
# beside kernels that compute; and what those compute.
BYTES_PER_S_OF_BLOCK = 17e9
FLOPS_PER_S = 700e12
MOST_BLOCKS = (1, 2, 4, 8, 16, 32)  # that NCCL's communicators are made with: powers of two
BYTES_OF_BLOCK = 16 << 20  # of a message that is larger, NCCL gives parts to more blocks


def blocks_to_hide(num_bytes: int, flops: float) -> float:
    """How many of NCCL's thread blocks move so much in the time of a computation."""
    return num_bytes / (flops / FLOPS_PER_S) / BYTES_PER_S_OF_BLOCK


def blocks_used(message_bytes: int, most_blocks: int, ranks: int) -> int:
    """How many blocks NCCL moves a message with, by its rule of 2.28.

    It leaves some for messages to the other ranks, whether or not there are any.
    """
    blocks = most_blocks
    while blocks > 1 and blocks * ranks > most_blocks:
        blocks //= 2
    while blocks < most_blocks and message_bytes > blocks * BYTES_OF_BLOCK:
        blocks *= 2
    return blocks


def choose_blocks(messages: int, message_bytes: int, flops: float, ranks: int) -> tuple[int, int]:
    """The fewest with which the messages travel in the time of a computation, or the most there
    are: of the communicator, and of those how many are used.
    """
    needed = blocks_to_hide(messages * message_bytes, flops)
    for most_blocks in MOST_BLOCKS:
        used = blocks_used(message_bytes, most_blocks, ranks)
        if used >= needed:
            break
    return most_blocks, used
