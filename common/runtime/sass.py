"""The machine code (SASS) of a cubin, as nvdisasm lists it, and the instructions counted in it.

The counts are static: how often an opcode stands in a kernel's code, however often it is executed.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from ..errors import UsageError
from .build import toolkit_program

PACKAGE = "nvidia-cuda-nvdisasm"
PADDING = "NOP"

# Nothing in front of the dot: \s* would be tried at each of the hundreds of blanks in a line.
_SECTION = re.compile(r"\.section\s+\.text\.([^,\s]+)")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)")


def nvdisasm() -> str:
    """Path of nvdisasm: the CUDA toolkit's, else that of the package. Raises UsageError without."""
    if found := toolkit_program("nvdisasm"):
        return found
    try:
        installed = files(PACKAGE) or []
    except PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == "nvdisasm":
            return str(file.locate())
    raise UsageError(f"no nvdisasm: install the CUDA toolkit, or pip install {PACKAGE}")


def disassemble(cubin: Path, *options: str) -> str:
    """What `nvdisasm -c` lists. Raises UsageError where it is missing or cannot read the file."""
    command = [nvdisasm(), "-c", *options, str(cubin)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or ["it does not say why"]
        raise UsageError(f"nvdisasm cannot read {cubin.name}: {said[0]}")
    return ended.stdout


def count_instructions(cubin: Path) -> dict[str, dict[str, int]]:
    """How often each opcode, without its modifiers, stands in each kernel; without padding.

    Raises UsageError as disassemble does.
    """
    return parse(disassemble(cubin))


def kernels(listing: str) -> Iterator[tuple[str, list[str]]]:
    """Each kernel's name and the lines of its section, one for each instruction among them."""
    _, *sections = _SECTION.split(listing)
    for name, section in zip(sections[::2], sections[1::2], strict=True):
        yield name, section.splitlines()


def parse(listing: str) -> dict[str, dict[str, int]]:
    """From the listing of `nvdisasm -c`."""
    counts = {}
    for kernel, lines in kernels(listing):
        found = filter(None, map(_INSTRUCTION.match, lines))
        opcodes = Counter(instruction[1] for instruction in found)
        del opcodes[PADDING]
        counts[kernel] = dict(sorted(opcodes.items()))
    return counts
