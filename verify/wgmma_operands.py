"""Finds wgmma whose operand A is in registers that something else is written to as well.

K of a block may stay in registers for all tiles. ptxas 13.0 has put dS into the same ones: the
first tile's product reads K, the next one's the dS of the tile before. That shows in the machine
code alone: what the product reads comes from LDSM on one path, and from F2FP on another.
"""

from __future__ import annotations

import re

from .machine_code import Instruction, first_mistakes

A_REGISTERS = 4  # of a thread, for 16-bit elements
# What writes an operand A: rows that stay, from shared memory; or else P or dS, converted, taken
# apart where pairs were kept, or handed over by another block, in global memory as in v12 or in
# shared memory as in v15.
WRITERS = ({"LDSM"}, {"F2FP", "PRMT", "LDG", "LDS"})

_READS_A = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")


def mixed_operands(kernels: dict[str, list[Instruction]]) -> list[str]:
    """A line for each of these kernels in which such a wgmma is."""
    return first_mistakes(kernels, _mistakes)


def _mistakes(code: list[Instruction]) -> list[str]:
    mistakes = []
    for x in code:
        if found := writers_of_a(x):
            first, opcodes = found
            if not any(set() < opcodes <= writers for writers in WRITERS):
                told = " and ".join(sorted(opcodes)) or "nothing"
                mistakes.append(f"wgmma at {x.address} reads R{first}, written by {told}")
    return mistakes


def writers_of_a(x: Instruction) -> tuple[int, set[str]] | None:
    """Of a wgmma with operand A in registers, the first of these and the opcodes that have written
    them.
    """
    if not (found := _READS_A.match(x.text)):
        return None
    first = int(found[1])
    return first, set().union(*(_writers(first + i, x) for i in range(A_REGISTERS)))


def _writers(register: int, reader: Instruction) -> set[str]:
    """On each path to the reader, the opcode that has written the register last."""
    opcodes, seen = set(), set()
    paths = list(reader.before)
    while paths:
        x = paths.pop()
        if x.address in seen:
            continue
        seen.add(x.address)
        writes = x.writes(register)
        if writes:
            opcodes.add(x.opcode)
        if not writes or x.guarded:
            paths += x.before
    return opcodes
