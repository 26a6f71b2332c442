"""The text that `make train` learns: this repository's own."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SUFFIXES = (".py", ".cu", ".cuh", ".h", ".cpp", ".md")
HELD_OUT = 0.05  # of the bytes: the last ones


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn and bytes held out, uint8 [bytes] each, and which files they are of."""

    learned: torch.Tensor
    held_out: torch.Tensor
    files: int
    sha256: str  # of all bytes

    def as_record(self) -> dict:
        sizes = {"bytes": len(self.learned) + len(self.held_out), "held_out": len(self.held_out)}
        return {"files": self.files, **sizes, "sha256": self.sha256}


def read_corpus(root: Path) -> Corpus:
    """The files that git tracks in a folder, as they are there; outside of git, all.

    They are in the order of their paths' SHA-256: the last few, held out, are of all kinds, and a
    new file leaves the others in their order.
    """
    paths = sorted(_files(root), key=lambda path: hashlib.sha256(path.encode()).digest())
    text = read_text(root / path for path in paths)
    held_out = int(HELD_OUT * len(text))
    learned = text[: len(text) - held_out]
    sha256 = hashlib.sha256(text.numpy()).hexdigest()
    return Corpus(learned, text[len(learned) :], len(paths), sha256)


def read_text(paths: Iterable[Path]) -> torch.Tensor:
    """The bytes of files, one after the other, uint8 [bytes]."""
    content = b"".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _files(root: Path) -> list[str]:
    """Paths from root, with "/" between the parts."""
    paths = _tracked(root) or [path.relative_to(root).as_posix() for path in _walk(root)]
    return [path for path in paths if path.endswith(SUFFIXES) and (root / path).is_file()]


def _tracked(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return []
    return listed.split("\0")[:-1]


def _walk(root: Path) -> Iterator[Path]:
    """All files but those of hidden folders and what was built."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name != "build"]
        yield from (Path(folder, name) for name in names)


def draw(text: torch.Tensor, batch: int, length: int, rng: torch.Generator) -> torch.Tensor:
    """Sequences from anywhere in the text, int64 [batch, length] on its device."""
    starts = torch.randint(len(text) - length + 1, (batch, 1), generator=rng)
    places = starts + torch.arange(length)
    return text[places.to(text.device)].long()


def cut(text: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """The text's first sequences, int64 [count, length] on its device; fewer where it ends."""
    return text[: count * length].unfold(0, length, length).long()
