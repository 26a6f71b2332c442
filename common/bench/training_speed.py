"""Measures what training takes on attention() and on its peers.

The record, profiles/<gpu>/training_speed.json, has three workloads:

layer   forward and backward of attention alone, by autograd: q, k and v to o, dq, dk and dv; the
        shape is that of llama's block
gpt     a training step of `make train`'s model, on batches of the same size
llama   a training step of one block of Llama 3 with 8 billion parameters, which reads and predicts
        bytes: 256 rows of embedding and head take the place of 128 256, which would take longer
        than the block

A training step is the forward pass, loss, gradients, their clipping, and AdamW's update, of float32
parameters under a bf16 autocast (trainer.py).

The record's keys are those of headline.py, but for these:

sources      the hashes of the steps that attention() chooses
models       SHA-256 of the files that say what a training step is, by path
text         as in train.py's record
workloads    by name; each is an interleaved run of its own
shape        of layer
config       of the others: the plan (trainer.py), and how many parameters the model has
attentions   of a workload: "ours" is attention(), then each peer, or why it is missing
losses       nats a byte, of each of the plan's steps before it; they are taken before anything is
             timed, from the same seed and on the same batches
peak_memory_bytes   what the forward and backward of layer take beyond q, k, v and dout, what a
             step of a model takes beyond the parameters and the optimizer's state
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from verify.accuracy import expect
from verify.case import Case
from verify.layouts import transposed

from ..operation import BACKWARD, FORWARD
from ..paths import ROOT
from ..problem import Problem
from ..record_schema import OURS
from ..records import (
    PROFILES_DIR,
    SCHEMA,
    TRAINING_SPEED_FILE,
    gpu_folder,
    model_hashes,
    write_record,
)
from ..runtime.backend import DTYPES, Backend
from ..runtime.gpu import GpuBackend
from .attentions import Differentiable, forward_and_backward, load_attentions, steps_for
from .cells import build_all
from .corpus import draw, read_corpus
from .device_state import git_state, versions
from .llama import LlamaSize
from .timing import summarize, time_rounds
from .train import PLAN
from .trainer import SEED, Plan, Training, require_agreement, train
from .trial import Trial, errors_of, new_run, peak_memory, require_right

# In so few steps roundings hardly grow. On an H200 the losses of `make train` were up to 0.02 %
# apart in its first 20 steps; on a CPU, with smaller batches, up to 0.03 %, and without the
# gradient of q, k or v at least 0.4 %.
GPT_PLAN = replace(PLAN, steps=20, window=1, tolerance=0.001)
# On a CPU, with sequences of 256, roundings brought the losses up to 0.08 % apart, and the lack of
# the gradient of q, k or v, or a softmax_scale 5 % too large, at least 2.9 %.
LLAMA_PLAN = Plan(
    LlamaSize(layers=1, heads=32, head_dim=128, context=8192, kv_heads=8, mlp_width=14336),
    batch=1,
    steps=20,
    warmup=20,
    learning_rate=3e-5,
    held_out=0,
    window=1,
    tolerance=0.003,
)


def measure_training_speed() -> Path:
    """Measures all workloads and writes their record; returns its path.

    Raises UsageError where no step can run or be compiled, where the gradients of a layer are
    wrong, and where the losses of a model drift apart.
    """
    backend = GpuBackend()
    problems = {"gpt": GPT_PLAN.problem, "llama": LLAMA_PLAN.problem}
    steps = {step.name: step for each in problems.values() for step in steps_for(backend, each)}
    cases = [Case.of(name, problem) for name, problem in problems.items()]
    build_all(backend, steps.values(), cases)
    corpus = read_corpus(ROOT)
    record = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "sources": {name: {"code_sha256": step.code_sha256} for name, step in steps.items()},
        "models": model_hashes(),
        "text": corpus.as_record(),
        "workloads": {
            "layer": measure_layer(backend, LLAMA_PLAN.problem),
            "gpt": measure_model(backend, GPT_PLAN, corpus.learned),
            "llama": measure_model(backend, LLAMA_PLAN, corpus.learned),
        },
    }
    path = PROFILES_DIR / gpu_folder(record["device"]) / TRAINING_SPEED_FILE
    write_record(path, record)
    return path


def measure_layer(backend: Backend, problem: Problem) -> dict:
    """A workload of the record. Every output is checked before anything is timed.

    Tensors lie as a model's do: stored [batch, seq, heads, head_dim].
    """
    layouts = (transposed,) * len(BACKWARD.strided)
    options = {"causal": problem.causal, "layouts": layouts, "operation": BACKWARD}
    case = Case("layer", problem.shape, DTYPES[problem.dtype], **options)
    q, k, v, *_, dout = inputs = case.make(backend.device)
    forward = replace(case, operation=FORWARD)
    o_expected, gradients_expected = expect(forward, q, k, v), expect(case, *inputs)
    attentions = load_attentions(backend, problem)
    trials = {}
    for name, each in _present(attentions).items():
        call = partial(forward_and_backward, each.call, q, k, v, dout)
        (o, *gradients), peak_memory_bytes = peak_memory(call)
        o_error = errors_of(FORWARD, (o,), o_expected.outputs)
        require_right(name, o_error, forward, o_expected)
        errors = errors_of(BACKWARD, gradients, gradients_expected.outputs)
        require_right(name, errors, case, gradients_expected)
        trials[name] = Trial(call, o_error | errors, peak_memory_bytes)
    rounds = time_rounds({name: trial.call for name, trial in trials.items()})
    flops = sum(operation.flops(problem) for operation in (FORWARD, BACKWARD))
    outcomes = {
        name: trial.outcome(rounds.samples_ms[name], flops) for name, trial in trials.items()
    }
    return {
        "run": new_run(),
        "shape": problem.as_record(),
        "environment": rounds.environment,
        "attentions": _described(attentions, outcomes),
    }


def measure_model(backend: Backend, plan: Plan, text: torch.Tensor) -> dict:
    """A workload of the record; text is uint8 [bytes]. The losses come first, and must agree."""
    attentions = load_attentions(backend, plan.problem)
    trainings = {
        name: Training(plan, each.call, backend.device)
        for name, each in _present(attentions).items()
    }
    train(plan, trainings, text)
    losses = {name: training.losses for name, training in trainings.items()}
    for name in losses:
        if name != OURS:
            require_agreement(plan, {OURS: losses[OURS], name: losses[name]})
    rng = torch.Generator().manual_seed(SEED)
    sequences = draw(text, plan.batch, plan.size.context + 1, rng).to(backend.device)
    calls = {name: partial(each.update, sequences) for name, each in trainings.items()}
    memory = {name: peak_memory(call)[1] for name, call in calls.items()}
    rounds = time_rounds(calls)
    outcomes = {
        name: {
            **summarize(samples_ms),
            "samples_ms": samples_ms,
            "peak_memory_bytes": memory[name],
            "losses": losses[name],
        }
        for name, samples_ms in rounds.samples_ms.items()
    }
    return {
        "run": new_run(),
        "config": trainings[OURS].config(),
        "environment": rounds.environment,
        "attentions": _described(attentions, outcomes),
    }


def _present(attentions: dict[str, Differentiable | str]) -> dict[str, Differentiable]:
    return {name: each for name, each in attentions.items() if isinstance(each, Differentiable)}


def _described(
    attentions: dict[str, Differentiable | str], outcomes: dict[str, dict]
) -> dict[str, dict]:
    """A workload's attentions, in their order."""
    return {
        name: {"route": each.route, **outcomes[name]}
        if isinstance(each, Differentiable)
        else {"missing": each}
        for name, each in attentions.items()
    }
