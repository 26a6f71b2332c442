"""A record that is made cell by cell; where a run is interrupted, the next one goes on with it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from ..errors import NotEnoughMemoryError
from ..paths import BUILD_DIR
from ..records import PROFILES_DIR, gpu_folder, write_record
from .cells import read_unfinished
from .peers import reason

SAVE_SECONDS = 10.0  # what an interrupted run loses, at most: the unfinished record is a long one


def record_cells(
    file: str,
    begun: dict,
    more: Callable[[], dict],
    cells: Mapping[str, Callable[[], dict]],
) -> Path:
    """Measures the cells and writes their record into that file of the GPU's; returns its path.

    The record begins with begun, then with more(); cells, by name, give its entries. Those for
    which memory does not suffice are named in "skipped", with what that said. A run that is
    interrupted leaves what it has measured in build/, where the next one that begins alike goes on
    with it.
    """
    folder = gpu_folder(begun["device"])
    unfinished = BUILD_DIR / "bench" / folder / file
    record = read_unfinished(unfinished, begun)
    if record is None:
        record = {**begun, **more(), "skipped": {}, "cells": []}
    seen = {cell["name"] for cell in record["cells"]} | record["skipped"].keys()
    left = [name for name in cells if name not in seen]
    if seen:
        print(f"going on after {len(seen)} of {len(cells)} cells", file=sys.stderr)
    saved = time.monotonic()
    for name in tqdm(left, Path(file).stem, unit="cell", leave=False, disable=None):
        try:
            record["cells"].append(cells[name]())
        except (NotEnoughMemoryError, torch.OutOfMemoryError) as error:
            record["skipped"][name] = reason(error)
        torch.cuda.empty_cache()
        if time.monotonic() - saved > SAVE_SECONDS:
            write_record(unfinished, record)
            saved = time.monotonic()
    path = PROFILES_DIR / folder / file
    write_record(path, record)
    unfinished.unlink(missing_ok=True)
    return path
