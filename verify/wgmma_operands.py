"""Finds wgmma whose operand A is in registers that something else is written to as well.

K of a block may stay in registers for all tiles. ptxas 13.0 has put dS into the same ones: the
first tile's product reads K, the next one's the dS of the tile before. That shows in the machine
code alone: what the product reads comes from LDSM on one path, and from F2FP on another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common.runtime.sass import disassemble, kernels

A_REGISTERS = 4  # of a thread, for 16-bit elements
# What writes an operand A: rows that stay, from shared memory; or else P or dS, converted, taken
# apart where pairs were kept, or handed over by another block, in global memory as in v12 or in
# shared memory as in v15.
WRITERS = ({"LDSM"}, {"F2FP", "PRMT", "LDG", "LDS"})

_FIRST_REGISTER = re.compile(r".*// \| +# (?=0)")
_LABEL = re.compile(r"\.L_x_\d+")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?\w+ )?\s*(([A-Z]\w*).*?)\s*;")
_READS_A = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_LEAVES = re.compile(r"BRA `|BRX|EXIT|RET")  # the next instruction is not executed after it


@dataclass
class Instruction:
    """An instruction, and which ones may be executed just before it.

    A guarded instruction has a predicate: it may leave its registers as they are. marks[n] says
    what it does to Rn; few of them are ever looked at.
    """

    address: str
    text: str
    opcode: str
    guarded: bool
    marks: str
    before: list[Instruction] = field(default_factory=list, repr=False)

    def writes(self, register: int) -> bool:
        return self.marks[register : register + 1] in ("^", "x")


def mixed_operands(cubin: Path) -> list[str]:
    """A line for each kernel in which such a wgmma is. Raises UsageError as disassemble does."""
    return parse(disassemble(cubin, "-plr", "-lrm", "narrow"))


def parse(listing: str) -> list[str]:
    """From the listing of `nvdisasm -c -plr -lrm narrow`, which marks what is written."""
    return [
        f"{kernel}: {mistake}"
        for kernel, lines in kernels(listing)
        for mistake in _mistakes(_instructions(lines))[:1]
    ]


def _mistakes(code: list[Instruction]) -> list[str]:
    mistakes = []
    for x in code:
        if a := _READS_A.match(x.text):
            first = int(a[1])
            found = set().union(*(_writers(first + i, x) for i in range(A_REGISTERS)))
            if not any(set() < found <= writers for writers in WRITERS):
                opcodes = " and ".join(sorted(found)) or "nothing"
                mistakes.append(f"wgmma at {x.address} reads R{first}, written by {opcodes}")
    return mistakes


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


def _instructions(lines: Iterable[str]) -> list[Instruction]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    first_column = 0  # of those that stand for R0, R1, ...
    for line in lines:
        if header := _FIRST_REGISTER.match(line):
            first_column = header.end()
        elif label := _LABEL.match(line):
            labels[label[0]] = len(code)
        elif found := _INSTRUCTION.match(line):
            address, guard, text, opcode = found.groups()
            # The marks of a call are those of all registers that the function may write.
            marks = "" if opcode == "CALL" else line[first_column:].partition("|")[0]
            code.append(Instruction(address, text, opcode, bool(guard), marks))
    for i, x in enumerate(code):
        after = [] if _LEAVES.match(x.text) and not x.guarded else [i + 1]
        if x.opcode != "BSSY":  # that names the label where the paths meet again
            after += [labels[label] for label in _LABEL.findall(x.text)]
        for n in after:
            if n < len(code):
                code[n].before.append(x)
    return code
