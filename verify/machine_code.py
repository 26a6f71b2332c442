"""The machine code of a cubin's kernels, and which instruction may follow which."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common.runtime.sass import disassemble, kernels

_FIRST_REGISTER = re.compile(r".*// \| +# (?=0)")
_LABEL = re.compile(r"\.L_x_\d+")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?\w+ )?\s*(([A-Z]\w*).*?)\s*;")
_LEAVES = re.compile(r"BRA `|BRX|EXIT|RET")  # the next instruction is not executed after it


@dataclass
class Instruction:
    """An instruction, and which ones may be executed just before it, and just after.

    A guarded instruction has a predicate: it may leave its registers as they are. marks[n] says
    what it does to Rn; few of them are ever looked at.
    """

    address: str
    text: str
    opcode: str
    guarded: bool
    marks: str
    before: list[Instruction] = field(default_factory=list, repr=False)
    after: list[Instruction] = field(default_factory=list, repr=False)

    def writes(self, register: int) -> bool:
        return self.marks[register : register + 1] in ("^", "x")


def machine_code(cubin: Path) -> dict[str, list[Instruction]]:
    """By kernel. Raises UsageError as disassemble does."""
    return parse(disassemble(cubin, "-plr", "-lrm", "narrow"))


def parse(listing: str) -> dict[str, list[Instruction]]:
    """From the listing of `nvdisasm -c -plr -lrm narrow`, which marks what is written."""
    return {kernel: _instructions(lines) for kernel, lines in kernels(listing)}


def first_mistakes(
    kernels: dict[str, list[Instruction]], find: Callable[[list[Instruction]], list[str]]
) -> list[str]:
    """A line for each kernel in which there are some: the first one."""
    return [
        f"{kernel}: {mistake}" for kernel, code in kernels.items() for mistake in find(code)[:1]
    ]


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
        places = [] if _LEAVES.match(x.text) and not x.guarded else [i + 1]
        if x.opcode != "BSSY":  # that names the label where the paths meet again
            places += [labels[label] for label in _LABEL.findall(x.text)]
        x.after = [code[n] for n in places if n < len(code)]
        for y in x.after:
            y.before.append(x)
    return code
