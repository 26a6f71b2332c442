"""The file of trained inputs: q, k and v of the GPT that `make train` trains, in bf16.

A .npz of "q", "k" and "v", the bits of bf16 as uint16 [heads, seq, head_dim], and "run", that of
the training's record.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from .errors import UsageError
from .problem import TRAINED_SHAPE
from .records import write_atomically

_NAMES = ("q", "k", "v")


@dataclass(frozen=True)
class TrainedInputs:
    """q, k and v, bf16 [heads, seq, head_dim] of TRAINED_SHAPE, and the run they are of."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    run: str


def write_trained(path: Path, trained: TrainedInputs) -> None:
    arrays = (x.cpu().view(torch.uint16).numpy() for x in trained.tensors)
    content = io.BytesIO()
    np.savez_compressed(content, run=trained.run, **dict(zip(_NAMES, arrays, strict=True)))
    write_atomically(path, content.getvalue())


def read_trained(path: Path) -> TrainedInputs:
    """Raises UsageError where the file is damaged or of another shape."""
    try:
        with np.load(path) as file:
            arrays = [file[name] for name in _NAMES]
            run = str(file["run"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}; make train writes it again") from None
    shape = TRAINED_SHAPE.q[1:]
    for name, array in zip(_NAMES, arrays, strict=True):
        if array.dtype != np.uint16 or array.shape != shape:
            raise UsageError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}, not uint16 {list(shape)}: "
                "make train writes it again"
            )
    q, k, v = (torch.from_numpy(array).view(torch.bfloat16) for array in arrays)
    return TrainedInputs((q, k, v), run)
