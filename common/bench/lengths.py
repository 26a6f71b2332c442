"""Measures packed sequences, windows and caches that are not full, forward and backward.

The record is profiles/<gpu>/lengths.json, lengths_backward.json of the backward ladder. Its keys
are those of headline.py, but for these:

sources     the hashes of the steps that take lengths, as attention() prefers them, then of the one
            that it takes without: that computes a batch in which sequences are padded
skipped     the cells whose tensors do not fit into the device's memory, by name: what that said
cells       in the order of CELLS, each an interleaved run of its own
title, group        of a cell, and what else Sequences.as_record() has
visible     of a cell: how many pairs of a query and a key that it sees there are, in each head;
            FLOPs are those of these, whoever computes more
window      of a cell: how many keys before and after its own a query sees, null for all
routes      of a cell: which code a peer runs
slow        of a cell: who was timed in rounds of their own; environment is that of the others'
attentions  of a cell, by name: the step that attention() takes for it, the other steps that take
            its head_dim, the peers and, where a batch of padded sequences gives the same outputs,
            "padded_" and its step; or why one is missing
difference  of an attention: of its o from the first step's, by comparison.difference_of(); of
            gradients the largest one of theirs

All read q, k and v [tokens, heads, head_dim], of batches [batch, sequence, heads, head_dim]; so
they do o and dout. o and lse are those of the newest forward step for any number of queries. The
keys of a cache that are not there are numbers like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from verify.case import Case
from verify.inputs import Inputs
from verify.lengths import CaseLengths

from ..catalog import steps_to_run
from ..errors import UsageError
from ..operation import BACKWARD, FORWARD, Operand, Operation
from ..problem import LENGTHS, LENGTHS_BACKWARD, Sequences
from ..record_schema import PADDED
from ..records import SCHEMA, lengths_file
from ..runtime.backend import DTYPES, run
from ..runtime.gpu import GpuBackend
from ..step import Step, few_with
from .cells import build_all, time_apart
from .comparison import agreeing
from .device_state import git_state, versions
from .peers import Outputs, Peer, load_with_lengths
from .resumed import record_cells
from .timing import summarize
from .trial import new_run

CELLS = {FORWARD: LENGTHS, BACKWARD: LENGTHS_BACKWARD}
SEED = 0
CELL_SECONDS = 1.0  # of rounds, of which there are as many as in any cell
MOST_WARMUP = 200  # rounds, none of which takes less than a millisecond
MOST_PADDED_BYTES = 8 * 10**9  # of all inputs and outputs but lse


@dataclass(frozen=True)
class Chosen:
    """The steps that take lengths, as attention() prefers them, the one that it takes without, and
    the forward step that gives a backward call o and lse.
    """

    steps: list[Step]
    padding: Step
    saving: Step

    def fitting(self, case: Case) -> list[Step]:
        """Of the steps those that take the case's head_dim."""
        return [step for step in self.steps if not step.limits.refusal(case.specialization)]


def measure_lengths(operation: Operation) -> Path:
    """Measures all cells of an operation and writes their record; returns its path.

    A run that is interrupted leaves what it has measured in build/, where the next of the same code
    on such a GPU goes on with it. Raises UsageError where a step cannot run, or where the newest
    one is wrong.
    """
    backend = GpuBackend()
    chosen, cells = chosen_steps(steps_to_run(), operation), CELLS[operation]
    cases = {name: case_of(name, sequences, operation) for name, sequences in cells.items()}
    measured = [*chosen.steps, chosen.padding]
    build_all(backend, dict.fromkeys([*measured, chosen.saving]), cases.values())
    for case in cases.values():
        for step in (*(chosen.fitting(case) or chosen.steps), chosen.saving):
            if refusal := backend.refusal(step, case.specialization):
                raise UsageError(f"{step.name} {refusal}")
    begun = {
        "schema": SCHEMA,
        "git": git_state(),
        **versions(),
        "dtype": next(iter(cells.values())).dtype,
        "sources": {each.name: {"code_sha256": each.code_sha256} for each in measured},
    }
    measure = partial(measure_cell, backend, chosen)
    return record_cells(
        lengths_file(operation),
        begun,
        dict,
        {name: partial(measure, case, cells[name]) for name, case in cases.items()},
    )


def chosen_steps(steps: Sequence[Step], operation: Operation) -> Chosen:
    """Of these steps, those for the operation. Raises UsageError where there is none."""

    def newest_first(ladder: Operation, is_chosen: Callable[[Step], bool], what: str) -> list[Step]:
        found = [each for each in reversed(steps) if each.operation == ladder and is_chosen(each)]
        if not found:
            raise UsageError(f"nothing to measure: there is no {ladder.name} step that {what}")
        return found

    without = newest_first(operation, Step.is_candidate, "attention() takes without lengths")
    saving = newest_first(
        FORWARD,
        lambda step: step.takes_lengths and not step.few,
        "takes lengths of any number of queries",
    )
    with_lengths = newest_first(operation, lambda step: step.takes_lengths, "takes lengths")
    with_lengths.sort(key=lambda step: step.only_left_over)
    return Chosen(with_lengths, without[0], saving[0])


def case_of(name: str, sequences: Sequences, operation: Operation = FORWARD) -> Case:
    packed = (sequences.seqlens_q, sequences.seqlens_k) if sequences.packed else (None, None)
    lengths = CaseLengths(*packed, sequences.seqused_k, *sequences.window)
    shape, dtype = sequences.shape, DTYPES[sequences.dtype]
    causal = sequences.causal
    return Case(name, shape, dtype, causal=causal, operation=operation, lengths=lengths)


def measure_cell(backend: GpuBackend, chosen: Chosen, case: Case, sequences: Sequences) -> dict:
    """An entry of the record's cells. Every output is compared before anything is timed.

    Raises UsageError where the first step agrees with no peer, and an error of not enough memory
    where it cannot run for that. Whoever else it disagrees with is missing.
    """
    operation, padding = case.operation, chosen.padding
    inputs = make_inputs(backend, chosen.saving, case)
    arguments = case.arguments_on(backend.device)
    shape = case.shape
    sizes = shape.batch, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_k
    window_right = 0 if case.causal else arguments["lengths"].window_right
    few = few_with(arguments["lengths"]._replace(window_right=window_right), *sizes)
    fitting = chosen.fitting(case)
    taken = next(step for step in fitting if step.few in (None, few))
    steps = [taken, *(step for step in fitting if step is not taken)]
    calls: dict[str, Callable[[], Outputs]] = {
        step.name: partial(run, backend, step, *inputs, **arguments) for step in steps
    }
    expected = _strided(operation, calls[steps[0].name]())
    longest = (max(sequences.seqlens_q), max(sequences.seqlens_k))
    peers = load_with_lengths(
        operation, inputs, arguments["lengths"], causal=case.causal, longest=longest
    )
    calls |= {name: peer.call for name, peer in peers.items() if isinstance(peer, Peer)}
    missing = {name: peer for name, peer in peers.items() if isinstance(peer, str)}
    ran = [name for name in calls if name in peers]
    compared = dict(calls)
    names = [*(step.name for step in steps), *peers]
    if _is_as_if_padded(sequences):
        names.append(padded := f"{PADDED}{padding.name}")
        padded_bytes = _padded_bytes(operation, sequences)
        if refusal := padding.limits.refusal(case.specialization):
            missing[padded] = refusal
        elif padded_bytes > MOST_PADDED_BYTES:
            missing[padded] = f"the padded batch takes {padded_bytes / 1e9:.0f} GB"
        else:
            batch = _pad(operation.inputs, inputs, sequences)
            arguments = {name: arguments[name] for name in ("causal", "softmax_scale")}
            calls[padded] = call = partial(run, backend, padding, *batch, **arguments)
            compared[padded] = lambda: _unpad(operation, call(), sequences)
    # Other steps may be wrong in the same way: they count only where there is no peer.
    witnesses = ran or names[1:]
    differences = agreeing(
        steps[0].name, case.name, expected, compared, witnesses, missing, operation
    )
    del expected
    flops = sequences.flops(operation.products)
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
                "tflops": flops / summary["time_ms"] / 1e9,
                "difference": differences[name],
            }
            if name in differences
            else {"missing": missing[name]}
            for name in names
        },
    }


def make_inputs(backend: GpuBackend, saving: Step, case: Case) -> Inputs:
    """Normally distributed q, k and v, as a step takes them; of a backward case also o and lse,
    which the step gives for these, and a normally distributed dout.
    """
    rng = torch.Generator(backend.device).manual_seed(SEED)

    def drawn(size: tuple[int, ...]) -> torch.Tensor:
        batch, heads, rows, head_dim = size
        made = (batch, rows, heads, head_dim)
        x = torch.randn(made, generator=rng, dtype=case.dtype, device=backend.device)
        return x.transpose(1, 2)

    inputs = tuple(drawn(size) for size in (case.shape.q, case.shape.kv, case.shape.kv))
    if case.operation == FORWARD:
        return inputs
    saved = run(backend, saving, *inputs, **case.arguments_on(backend.device))
    return (*inputs, *saved, drawn(case.shape.q))


def _strided(operation: Operation, outputs: Outputs) -> tuple[torch.Tensor, ...]:
    """All outputs but lse, which peers do not return."""
    pairs = zip(operation.outputs, outputs, strict=True)
    return tuple(output for operand, output in pairs if operand.strided)


def _is_as_if_padded(sequences: Sequences) -> bool:
    """Whether each query of a batch of padded sequences would see the same keys.

    A causal mask hides those behind a sequence's end, where it has as many queries as keys.
    """
    if not sequences.packed or sequences.has_window or sequences.seqused_k:
        return False
    return sequences.are_equal or (sequences.causal and sequences.seqlens_q == sequences.seqlens_k)


def _padded_bytes(operation: Operation, sequences: Sequences) -> int:
    rows = sum(
        getattr(sequences, operand.axes[1]) * max(_seqlens(operand, sequences))
        for operand in operation.strided
    )
    count, element_bytes = len(sequences.seqlens_q), DTYPES[sequences.dtype].itemsize
    return count * rows * sequences.head_dim * element_bytes


def _seqlens(operand: Operand, sequences: Sequences) -> tuple[int, ...]:
    return sequences.seqlens_k if "seq_k" in operand.axes else sequences.seqlens_q


def _pad(operands: Iterable[Operand], tensors: Inputs, sequences: Sequences) -> Inputs:
    """A batch of the packed sequences, with zeros behind their ends.

    There dout is zero, too, so that these queries add nothing to the gradients of any key.
    """
    padded = []
    for operand, x in zip(operands, tensors, strict=True):
        rows = x[0].transpose(0, 1).split(_seqlens(operand, sequences))
        batch = pad_sequence(rows, batch_first=True).transpose(1, 2)
        padded.append(batch if operand.strided else batch.contiguous())
    return tuple(padded)


def _unpad(
    operation: Operation, outputs: Outputs, sequences: Sequences
) -> tuple[torch.Tensor, ...]:
    """The packed sequences of such a batch, of all outputs but lse."""
    packed = []
    operands = (operand for operand in operation.outputs if operand.strided)
    for operand, x in zip(operands, _strided(operation, outputs), strict=True):
        seqlens = torch.tensor(_seqlens(operand, sequences), device=x.device)
        is_there = torch.arange(x.shape[2], device=x.device) < seqlens[:, None]
        packed.append(x.transpose(1, 2)[is_there].transpose(0, 1).unsqueeze(0))
    return tuple(packed)
