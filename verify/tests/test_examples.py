"""The examples run as they stand, and what they print shows that they worked."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from common.paths import ROOT

FOLDER = ROOT / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "attention_worklog")
NUMBER = r"(\d+\.\d+e[-+]\d+)"


def losses(printed: str) -> bool:
    first, *_, last = map(float, re.findall(r": (\d+\.\d+) nats", printed))
    return last < first / 2


def agrees_with_sdpa(printed: str) -> bool:
    """In half of the digits at least. How close it must be is what test_transformers.py tests."""
    differences = re.findall(rf"differs? from SDPA's by {NUMBER} of", printed)
    (rounding,) = re.findall(rf"rounds by {NUMBER}", printed)
    return max(map(float, differences)) < math.sqrt(float(rounding))


def learns_as_on_one_rank(printed: str) -> bool:
    (difference,) = re.findall(rf"differs from one rank's by {NUMBER} of it", printed)
    return losses(printed) and float(difference) < 1e-3


WORKED = {
    "diffusion_block": agrees_with_sdpa,
    "sharded_training": learns_as_on_one_rank,
    "training_loop": losses,
    "transformers_model": agrees_with_sdpa,
}


def run_example(path: Path, folder: Path, **environment: str) -> str:
    """What the example prints, from any folder."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *(launch if "torchrun" in path.read_text() else []), str(path)]
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "UserWarning" not in ended.stderr, "something fell back"
    return ended.stdout


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_as_it_stands(name: str, device: str, tmp_path: Path) -> None:
    if name == "transformers_model" and find_spec("transformers") is None:
        pytest.skip("no transformers")
    if name == "sharded_training" and device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    devices = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    assert WORKED[name](run_example(FOLDER / f"{name}.py", tmp_path, **devices))


def test_what_did_not_work_is_seen() -> None:
    assert not losses("step 0: 5.5 nats a byte\nstep 9: 4.5 nats a byte\n")
    told = "output [2]: differs from SDPA's by 1.0e-08 of its norm\n"
    told += "gradient [2]: differs from SDPA's by 2.0e-02 of its norm\n"
    assert not agrees_with_sdpa(told + "torch.float32 rounds by 1.2e-07\n")
    learned = "step 0: 5.5 nats a byte\nstep 9: 2.5 nats a byte\n"
    assert not learns_as_on_one_rank(f"{learned}loss differs from one rank's by 2.0e-02 of it")
