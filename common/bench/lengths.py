"""Measures packed sequences, windows and caches that are not full: profiles/<gpu>/lengths.json.

The record's keys are those of headline.py, but for these:

sources     the hashes of the steps that take lengths, the newest first, then of the one that
            attention() takes without: that computes a batch in which sequences are padded
skipped     the cells whose tensors do not fit into the device's memory, by name: what that said
cells       in the order of common.problem.LENGTHS, each an interleaved run of its own
title, group        of a cell, and what else Sequences.as_record() has
visible     of a cell: how many pairs of a query and a key that it sees there are, in each head;
            FLOPs are those of these, whoever computes more
window      of a cell: how many keys before and after its own a query sees, null for all
routes      of a cell: which code a peer runs
slow        of a cell: who was timed in rounds of their own; environment is that of the others'
attentions  of a cell, by name: the steps, the peers and, where a batch of padded sequences gives
            the same o, "padded_" and its step; or why one is missing
difference  of an attention: of its o from the newest step's, by comparison.difference_of()

All read q, k and v [tokens, heads, head_dim], of batches [batch, sequence, heads, head_dim]. The
keys of a cache that are not there are numbers like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from verify.case import Case
from verify.inputs import Inputs
from verify.lengths import CaseLengths

from ..catalog import steps_to_run
from ..errors import UsageError
from ..operation import FORWARD
from ..problem import LENGTHS, Sequences
from ..record_schema import PADDED
from ..records import LENGTHS_FILE, SCHEMA
from ..runtime.backend import DTYPES, run
from ..runtime.gpu import GpuBackend
from ..step import Step
from .cells import build_all, time_apart
from .comparison import agreeing
from .device_state import git_state, versions
from .peers import Outputs, Peer, load_with_lengths
from .resumed import record_cells
from .timing import summarize
from .trial import new_run

SEED = 0
CELL_SECONDS = 1.0  # of rounds, of which there are as many as in any cell
MOST_WARMUP = 200  # rounds, none of which takes less than a millisecond
MOST_PADDED_BYTES = 8 * 10**9  # of q, k, v and o


def measure_lengths() -> Path:
    """Measures all cells and writes their record; returns its path.

    A run that is interrupted leaves what it has measured in build/, where the next of the same code
    on such a GPU goes on with it. Raises UsageError where a step cannot run, or where the newest
    one is wrong.
    """
    backend = GpuBackend()
    steps, padding = chosen_steps(steps_to_run())
    cases = {name: case_of(name, sequences) for name, sequences in LENGTHS.items()}
    build_all(backend, [*steps, padding], cases.values())
    for spec in dict.fromkeys(case.specialization for case in cases.values()):
        for step in steps:
            if refusal := backend.refusal(step, spec):
                raise UsageError(f"{step.name} {refusal}")
    begun = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "dtype": next(iter(LENGTHS.values())).dtype,
        "sources": {each.name: {"code_sha256": each.code_sha256} for each in (*steps, padding)},
    }
    measure = partial(measure_cell, backend, steps, padding)
    return record_cells(
        LENGTHS_FILE,
        begun,
        dict,
        {name: partial(measure, case, LENGTHS[name]) for name, case in cases.items()},
    )


def chosen_steps(steps: Sequence[Step]) -> tuple[list[Step], Step]:
    """Those that take lengths, the newest first, and the one for padded sequences.

    Raises UsageError where there is none.
    """
    forward = [step for step in reversed(steps) if step.operation == FORWARD]
    with_lengths = [step for step in forward if step.takes_lengths]
    without = [step for step in forward if step.is_candidate()]
    if not with_lengths or not without:
        what = "takes lengths" if not with_lengths else "attention() takes without lengths"
        raise UsageError(f"nothing to measure: there is no step that {what}")
    return with_lengths, without[0]


def case_of(name: str, sequences: Sequences) -> Case:
    packed = (sequences.seqlens_q, sequences.seqlens_k) if sequences.packed else (None, None)
    lengths = CaseLengths(*packed, sequences.seqused_k, *sequences.window)
    shape, dtype = sequences.shape, DTYPES[sequences.dtype]
    return Case(name, shape, dtype, causal=sequences.causal, lengths=lengths)


def measure_cell(
    backend: GpuBackend, steps: Sequence[Step], padding: Step, case: Case, sequences: Sequences
) -> dict:
    """An entry of the record's cells. Every output is compared before anything is timed.

    Raises UsageError where the first step agrees with no peer, and an error of not enough memory
    where it cannot run for that. Whoever else it disagrees with is missing.
    """
    inputs = _make_inputs(case, backend.device)
    arguments = case.arguments_on(backend.device)
    calls: dict[str, Callable[[], Outputs]] = {
        step.name: partial(run, backend, step, *inputs, **arguments) for step in steps
    }
    o, _ = calls[steps[0].name]()
    longest = (max(sequences.seqlens_q), max(sequences.seqlens_k))
    peers = load_with_lengths(*inputs, arguments["lengths"], causal=case.causal, longest=longest)
    calls |= {name: peer.call for name, peer in peers.items() if isinstance(peer, Peer)}
    missing = {name: peer for name, peer in peers.items() if isinstance(peer, str)}
    ran = [name for name in calls if name in peers]
    compared = dict(calls)
    names = [*(step.name for step in steps), *peers]
    if _is_as_if_padded(sequences):
        names.append(padded := f"{PADDED}{padding.name}")
        padded_bytes = _padded_bytes(sequences)
        if padded_bytes > MOST_PADDED_BYTES:
            missing[padded] = f"the padded batch takes {padded_bytes / 1e9:.0f} GB"
        else:
            batch = _pad(inputs, sequences)
            arguments = {name: arguments[name] for name in ("causal", "softmax_scale")}
            calls[padded] = call = partial(run, backend, padding, *batch, **arguments)
            compared[padded] = lambda: _unpad(call()[0], sequences)
    # Other steps may be wrong in the same way: they count only where there is no peer.
    witnesses = ran or names[1:]
    differences = agreeing(steps[0].name, case.name, o, compared, witnesses, missing)
    del o
    timed, slow = time_apart({name: calls[name] for name in differences}, CELL_SECONDS, MOST_WARMUP)
    return {
        "name": case.name,
        "run": new_run(),
        "environment": timed.environment,
        **sequences.as_record(),
        "routes": {name: peer.route for name, peer in peers.items() if isinstance(peer, Peer)},
        "slow": slow,
        "attentions": {
            name: {
                **(summary := summarize(timed.samples_ms[name])),
                "samples_ms": timed.samples_ms[name],
                "tflops": sequences.flops / summary["time_ms"] / 1e9,
                "difference": differences[name],
            }
            if name in differences
            else {"missing": missing[name]}
            for name in names
        },
    }


def _make_inputs(case: Case, device: torch.device) -> Inputs:
    """Normally distributed q, k and v, as a step takes them."""
    rng = torch.Generator(device).manual_seed(SEED)
    made = []
    for batch, heads, rows, head_dim in (case.shape.q, case.shape.kv, case.shape.kv):
        size = (batch, rows, heads, head_dim)
        x = torch.randn(size, generator=rng, dtype=case.dtype, device=device)
        made.append(x.transpose(1, 2))
    return tuple(made)


def _is_as_if_padded(sequences: Sequences) -> bool:
    """Whether each query of a batch of padded sequences would see the same keys.

    A causal mask hides those behind a sequence's end, where it has as many queries as keys.
    """
    if not sequences.packed or sequences.has_window or sequences.seqused_k:
        return False
    return sequences.are_equal or (sequences.causal and sequences.seqlens_q == sequences.seqlens_k)


def _padded_bytes(sequences: Sequences) -> int:
    """Of q, k, v and o."""
    count, element_bytes = len(sequences.seqlens_q), DTYPES[sequences.dtype].itemsize
    rows = 2 * sequences.heads * max(sequences.seqlens_q)
    rows += 2 * sequences.kv_heads * max(sequences.seqlens_k)
    return count * rows * sequences.head_dim * element_bytes


def _pad(inputs: Inputs, sequences: Sequences) -> Inputs:
    """A batch of the packed sequences, with zeros behind their ends."""
    seqlens = (sequences.seqlens_q, sequences.seqlens_k, sequences.seqlens_k)
    return tuple(
        pad_sequence(x[0].transpose(0, 1).split(each), batch_first=True).transpose(1, 2)
        for x, each in zip(inputs, seqlens, strict=True)
    )


def _unpad(o: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """The packed sequences of such a batch."""
    seqlens = torch.tensor(sequences.seqlens_q, device=o.device)
    is_there = torch.arange(o.shape[2], device=o.device) < seqlens[:, None]
    return o.transpose(1, 2)[is_there].transpose(0, 1).unsqueeze(0)
