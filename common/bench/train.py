"""Trains a byte-level GPT on this repository's text, once on our attention and once on torch's.

profiles/<gpu>/train.json says how that went, and trained.npz keeps what some heads of the model
trained on ours make of text that it has not learned. The record's keys are those of headline.py,
but for these:

sources         the hashes of the forward and the backward step
text            how many files there are, and how many of their bytes were held out (corpus.py)
config          the plan (trainer.py), and how many parameters the model has
losses          of each training, "ours" on attention() and "sdpa" on scaled_dot_product_attention:
                nats a byte, of each step's batch before the step
step_ms         likewise, of each step: host time from an idle device to an idle device
route           of a training: which code computes its attention
loss            of a training: the mean of the last steps', config.window of them
held_out_loss   of a training: at the end, of the text that was held out
ms_per_step     of a training: the median
peak_memory_bytes   of a training: what the gradients of a batch take, with all that is saved for
                them, beyond the parameters and the optimizer's state
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from verify.case import Case

from .. import attention
from ..paths import ROOT
from ..problem import TRAINED_SHAPE
from ..records import PROFILES_DIR, SCHEMA, TRAIN_FILE, TRAINED_FILE, gpu_folder, write_record
from ..runtime.backend import Backend
from ..runtime.cpu import CpuBackend
from ..runtime.gpu import GpuBackend
from ..step import Step
from ..text import listed
from ..trained_inputs import TrainedInputs, write_trained
from .attentions import steps_for, zeros_for
from .cells import build_all
from .corpus import cut, read_corpus, read_text
from .device_state import device_state, git_state, versions
from .gpt import Size
from .trainer import Plan, Training, require_agreement, train
from .trial import new_run, peak_memory

PLAN = Plan(
    Size(TRAINED_SHAPE.heads, 6, TRAINED_SHAPE.head_dim, TRAINED_SHAPE.seq_q),
    batch=16,
    steps=800,
    warmup=40,
    learning_rate=1e-3,
    held_out=64,
    window=50,
    # In some hundred steps other roundings make another model of it, as good, that may learn a
    # thing some steps earlier or later. Of a small one on a CPU the means were up to 0.2 % apart,
    # and 26 % without the gradient of q. A gradient that is only too small does not show, as AdamW
    # divides by its size: verify/ finds that.
    tolerance=0.05,
)
# For the SIMT runtime. Of its text, with the instructions of several CPUs, the losses came up to
# 0.05 % apart, and without the gradient of q, k or v at least 0.32 %. Another text is another
# training: in some of a hundred, roundings went further than a lost gradient did in others.
TINY_TEXT = ROOT / "LICENSE"  # not edited, as the rest of the repository is
TINY_PLAN = Plan(
    Size(2, 2, 16, 32),
    batch=2,
    steps=8,
    warmup=1,
    learning_rate=3e-3,
    held_out=2,
    window=1,
    tolerance=0.002,
)


def try_training() -> dict[str, list[float]]:
    """The losses of each step of both trainings by TINY_PLAN of TINY_TEXT on the CPU, by name."""
    backend = CpuBackend()
    trainings = _trainings(TINY_PLAN, steps_for(backend, TINY_PLAN.problem), backend.device)
    train(TINY_PLAN, trainings, read_text([TINY_TEXT]))
    return {name: training.losses for name, training in trainings.items()}


def measure_training() -> Path:
    """Trains by PLAN; writes the trained inputs and the record, and returns its path.

    Raises UsageError where no step can run or be compiled, and where the losses drift apart.
    """
    backend = GpuBackend()
    steps = steps_for(backend, PLAN.problem)
    build_all(backend, steps, [Case.of("train", PLAN.problem)])
    corpus = read_corpus(ROOT)
    trainings = _trainings(PLAN, steps, backend.device)
    record = {
        "schema": SCHEMA,
        "run": new_run(),
        "git": git_state(),
        **versions(),
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in steps},
        "text": corpus.as_record(),
        "config": trainings["ours"].config(),
    }
    before = device_state()
    train(PLAN, trainings, corpus.learned)
    record["environment"] = {"before": before, "after": device_state()}
    record["losses"] = {name: training.losses for name, training in trainings.items()}
    require_agreement(PLAN, record["losses"])
    record["step_ms"] = {name: training.step_ms for name, training in trainings.items()}
    held_out = cut(corpus.held_out, PLAN.held_out, PLAN.size.context + 1).to(backend.device)
    routes = {"ours": listed(step.name for step in steps), "sdpa": _sdpa_route(PLAN, backend)}
    for name, training in trainings.items():
        record[name] = {"route": routes[name], **_summary(PLAN, training, held_out)}
    folder = PROFILES_DIR / gpu_folder(record["device"])
    trained = TrainedInputs(trainings["ours"].heads(held_out[:1]), record["run"])
    write_trained(folder / TRAINED_FILE, trained)
    write_record(folder / TRAIN_FILE, record)
    return folder / TRAIN_FILE


def _trainings(plan: Plan, steps: list[Step], device: torch.device) -> dict[str, Training]:
    forward, backward = (step.name for step in steps)
    attentions = {
        "ours": partial(attention, causal=True, step=forward, backward_step=backward),
        "sdpa": partial(scaled_dot_product_attention, is_causal=True),
    }
    return {name: Training(plan, each, device) for name, each in attentions.items()}


def _sdpa_route(plan: Plan, backend: Backend) -> str:
    """What scaled_dot_product_attention takes where it is left to choose."""
    q, k, v = (x.requires_grad_() for x in zeros_for(backend, plan.problem))
    chosen = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True))
    return f"torch {torch.__version__}, {chosen.name}"


def _summary(plan: Plan, training: Training, held_out: torch.Tensor) -> dict:
    """The record's part on one training; held_out are sequences [any, context + 1]."""
    batches = held_out.split(plan.batch)
    _, peak_memory_bytes = peak_memory(partial(training.add_gradients, batches[0]))
    return {
        "loss": statistics.fmean(training.losses[-plan.window :]),
        "held_out_loss": training.mean_loss(batches),
        "ms_per_step": statistics.median(training.step_ms),
        "peak_memory_bytes": peak_memory_bytes,
    }
