"""Finds loads of tensors by TMA whose coordinates go to uniform registers lane by lane.

TMA takes them from there. Where ptxas cannot know that they are the same in all lanes of a warp, as
of a thread that has read them from memory, it elects a lane, moves what this one has, copies, and
goes on with the lanes that have something else. That takes two to three times as many instructions,
one after the other, though only one lane is there. It says nothing. v14, v18 and b14 were
like that.
"""

from __future__ import annotations

from .machine_code import Instruction, first_mistakes


def copies_lane_by_lane(kernels: dict[str, list[Instruction]]) -> list[str]:
    """A line for each of these kernels that has such a copy."""
    return first_mistakes(kernels, _mistakes)


def _mistakes(code: list[Instruction]) -> list[str]:
    return [
        f"the copy at {x.address} moves {count} registers of each lane to uniform ones"
        for x in code
        if x.opcode == "UTMALDG" and (count := _moved(x))
    ]


def _moved(copy: Instruction) -> int:
    """How many registers are moved between the election of a lane and its copy."""
    count, x = 0, copy
    while len(x.before) == 1:  # back to where paths meet: between the two there is one
        x = x.before[0]
        if x.opcode == "ELECT":
            return count
        count += x.opcode == "R2UR"
    return 0
