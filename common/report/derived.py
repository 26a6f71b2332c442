"""Numbers that follow from a record."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from ..metrics import (
    COUNTERS,
    OPCODES,
    STALL,
    STALL_REASONS,
    num_conflicts,
    smem_bytes,
    spill_bytes,
)
from ..operation import operation_of
from ..problem import GROUPS
from ..record_schema import FA3, NUMBER, OURS, PADDED, RING, SHARDED_ATTENTIONS
from ..step import LARGE_HEAD_DIM, is_large

# Beside the ring: our other way, one GPU with the whole problem, and torch's ways.
_, ULYSSES, ONE_GPU, *CONTEXT_PARALLEL = SHARDED_ATTENTIONS
BANK_COUNTS = ("accesses", "ideal", "wavefronts")
# How many sequences, and from how many keys on, one query of each is held against a copy.
BANDWIDTH_BATCH, BANDWIDTH_KEYS = 8, 8192
# Of ratios by cell, by _figures().
_FIGURES = ("cells", "mean", "smallest", "smallest_cell", "slower")
# Of few queries on many keys: _FIGURES of the speed over the fastest peer's; the smallest of
# copy_shares(), and a copy's TB/s. And of a step, _FIGURES of the cells where attention() takes it,
# and its speed there over that of the last step, and where that is smallest.
DECODE_FIGURES = (*_FIGURES, "smallest_copy_share", "copy_tb_per_s")
DECODE_STEP_FIGURES = (*_FIGURES, "gain", "smallest_gain", "smallest_gain_cell")
# Of lengths: _FIGURES of the speed of the step that attention() takes over the fastest peer's, then
# those of each of the groups of cells; the geometric mean of its speed over that of a step on
# padded sequences, and where no sequence needs any padding.
LENGTHS_FIGURES = (
    *_FIGURES,
    *(f"{group}_{figure}" for group in GROUPS for figure in _FIGURES),
    "over_padded",
    "over_padded_equal",
)
# Of large head_dim: _FIGURES of the step's rate over the fastest peer's where attention() takes it,
# and the geometric mean of its rates at WIDE over those at LARGE_HEAD_DIM of the step taken there.
LARGE_HEAD_DIM_FIGURES = (*_FIGURES, "over_256")
WIDE = 512
# What the steps are limited by, in the order in which they meet it: shares of a peak by column.
LIMITS = {
    "L1 data": "l1_data_percent",
    "FMA": "fma_percent",
    "tensor": "tensor_percent",
    "XU": "xu_percent",
    "issue": "issue_percent",
}


def derived(record: dict) -> dict:
    """Of a step's or an experiment's record. Shares and gains are ratios of times of one run."""
    kernels = record["resources"].values()
    first, *others = operation_of(record["step"]).outputs
    baseline, fa3 = record["baseline"], record["peers"].get(FA3, {})
    return {
        "gain": baseline and baseline["time_ms"] / record["time_ms"],
        "fa3_share": fa3["time_ms"] / record["time_ms"] if "time_ms" in fa3 else None,
        "registers": max(kernel["registers"] for kernel in kernels),
        "smem_bytes": max(smem_bytes(kernel) for kernel in kernels),
        "spill_bytes": sum(spill_bytes(kernel) for kernel in kernels),
        "stack_bytes": max(kernel["stack_bytes"] for kernel in kernels),
        "error": record["errors"][first.name],
        **{f"{output.name}_error": record["errors"][output.name] for output in others},
        "torch_error": record["torch_errors"][first.name],
        "peak_memory_gb": record["peak_memory_bytes"] / 1e9,
        "least_gb": record["least_bytes"] / 1e9,
        "flops_per_byte": record["flops"] / record["least_bytes"],
        "ncu": record["counters"]
        if isinstance(record["counters"], str)  # "not collected"
        else readable(record["counters"]),
        "memory_gb": {
            str(entry["seq"]): None if entry["bytes"] is None else entry["bytes"] / 1e9
            for entry in record["memory"]
        },
    }


def readable(counters: dict[str, dict]) -> dict[str, dict[str, float | None]]:
    """The counters of each kernel under the names and in the units of COUNTERS."""
    return {
        kernel: {
            name: None if values.get(metric) is None else values[metric] * factor
            for name, (metric, factor) in COUNTERS.items()
        }
        for kernel, values in counters.items()
    }


def limits(record: dict) -> tuple[str, dict[str, float]] | None:
    """Of a step's record: its kernel that takes longest, and how close that comes to each limit.

    None where nothing was counted.
    """
    ncu = derived(record)["ncu"]
    if isinstance(ncu, str):
        return None
    kernel, values = max(ncu.items(), key=lambda item: item[1]["duration_ms"] or 0)
    return kernel, {limit: values[key] or 0.0 for limit, key in LIMITS.items()}


def top_stalls(values: dict[str, float | None], count: int = 2) -> list[tuple[str, float]]:
    """The most frequent reasons for a kernel's warps to stall, as warps stalled per issue."""
    stalls = [(reason, values.get(STALL.format(reason)) or 0.0) for reason in STALL_REASONS]
    return sorted(stalls, key=lambda stall: -stall[1])[:count]


def peer_ratios(record: dict, *steps: str, peer: str | None = None) -> dict[str, float]:
    """By cell: the rate of the first of the steps that runs there over the fastest peer's, or over
    that of the peer that is named, where both were measured.
    """
    ratios = {}
    for cell in record["cells"]:
        rates = rates_of(cell)
        step = next((name for name in steps if name in rates), None)
        peers = [
            rate
            for name, rate in rates.items()
            if (name not in record["sources"] if peer is None else name == peer)
        ]
        if step and peers:
            ratios[cell["name"]] = rates[step] / max(peers)
    return ratios


def rates_of(cell: dict) -> dict[str, float]:
    """Of a cell of shapes or of inputs: the rates of steps and peers that are not missing."""
    return {name: rate for name, rate in cell["tflops"].items() if isinstance(rate, NUMBER)}


def large_ratios(record: dict) -> dict[str, float]:
    """Of large head_dim, by cell where it is_large(): the rate of the step that attention() takes
    over the fastest peer's, where one was measured.
    """
    steps, _ = large_head_dim_steps(record)
    large = {cell["name"] for cell in record["cells"] if is_large(*head_dims(cell))}
    return {name: ratio for name, ratio in peer_ratios(record, *steps).items() if name in large}


def large_head_dim_steps(record: dict) -> tuple[list[str], str]:
    """Of a record of large head_dim: the steps for that, of which attention() takes the first that
    runs in a cell, and the one that it takes at LARGE_HEAD_DIM.
    """
    *large, narrow = record["sources"]
    return large, narrow


def head_dims(cell: dict) -> tuple[int, int]:
    """Of a cell: that of q and k, and that of v."""
    return cell["head_dim"], cell.get("v_head_dim", cell["head_dim"])


def ratios_to_256(record: dict, *steps: str) -> dict[str, float]:
    """Of large head_dim, by cell: the rate of the first of the steps that runs there over that of
    the step taken at LARGE_HEAD_DIM, there, with the same mask and sequence, where both were
    measured.
    """
    _, narrow = large_head_dim_steps(record)
    at_256 = {
        (cell["causal"], cell["seq"]): rates_of(cell).get(narrow)
        for cell in record["cells"]
        if cell["head_dim"] == LARGE_HEAD_DIM
    }
    ratios = {}
    for cell in record["cells"]:
        rates, other = rates_of(cell), at_256.get((cell["causal"], cell["seq"]))
        rate = next((rates[step] for step in steps if step in rates), None)
        if rate and other:
            ratios[cell["name"]] = rate / other
    return ratios


def large_head_dim_figures(record: dict) -> dict[str, float | str | None]:
    """Of a record of large head_dim, under LARGE_HEAD_DIM_FIGURES; None where nothing is."""
    return {**_figures(large_ratios(record)), "over_256": _mean(wide_ratios(record).values())}


def wide_ratios(record: dict) -> dict[str, float]:
    """ratios_to_256() of the cells of head_dim WIDE."""
    wide = {cell["name"] for cell in record["cells"] if cell["head_dim"] == WIDE}
    steps, _ = large_head_dim_steps(record)
    return {name: ratio for name, ratio in ratios_to_256(record, *steps).items() if name in wide}


def decode_ratios(
    record: dict, over: str | None = None, taken: str | None = None
) -> dict[str, float]:
    """Of few queries on many keys, by cell: the speed of the step that attention() takes over the
    fastest peer's, or over that of the one that is named, where one was measured; of all cells, or
    of those where it takes a certain step.
    """
    ratios = {}
    for cell in record["cells"]:
        step = cell["taken"]
        if taken not in (None, step):
            continue
        times_ms = {
            name: each["time_ms"] for name, each in cell["attentions"].items() if "time_ms" in each
        }
        others_ms = [
            ms
            for name, ms in times_ms.items()
            if (name not in record["sources"] if over is None else name == over)
        ]
        if step in times_ms and others_ms and step != over:
            ratios[cell["name"]] = min(others_ms) / times_ms[step]
    return ratios


def copy_shares(record: dict) -> dict[str, float]:
    """By cell with one query on BANDWIDTH_KEYS or more of BANDWIDTH_BATCH sequences: the bytes that
    the step that attention() takes must move, in a second, as a share of those that a copy moves.
    """
    return {
        cell["name"]: each["bytes_per_second"] / record["copy_bytes_per_second"]
        for cell in record["cells"]
        if (cell["batch"], cell["seq_q"]) == (BANDWIDTH_BATCH, 1)
        and cell["seq_k"] >= BANDWIDTH_KEYS
        and "bytes_per_second" in (each := cell["attentions"].get(cell["taken"], {}))
    }


def decode_figures(record: dict) -> dict[str, float | str | None]:
    """Of a record of few queries on many keys, under DECODE_FIGURES; None where nothing is."""
    shares = copy_shares(record)
    return {
        **_figures(decode_ratios(record)),
        "smallest_copy_share": min(shares.values(), default=None),
        "copy_tb_per_s": record["copy_bytes_per_second"] / 1e12,
    }


def decode_step_figures(record: dict) -> dict[str, dict[str, float | str | None]]:
    """Likewise of each of its steps, under DECODE_STEP_FIGURES."""
    *_, general = record["sources"]
    found = {}
    for step in record["sources"]:
        gained = _figures(decode_ratios(record, general, step))
        found[step] = {
            **_figures(decode_ratios(record, taken=step)),
            "gain": gained["mean"],
            "smallest_gain": gained["smallest"],
            "smallest_gain_cell": gained["smallest_cell"],
        }
    return found


def _figures(ratios: dict[str, float]) -> dict[str, float | str | None]:
    """Of ratios by cell, under _FIGURES; None where there are none."""
    smallest = min(ratios, key=ratios.__getitem__, default=None)
    return {
        "cells": len(ratios),
        "mean": _mean(ratios.values()),
        "smallest": ratios[smallest] if ratios else None,
        "smallest_cell": smallest,
        "slower": sum(ratio < 1 for ratio in ratios.values()),
    }


def _mean(ratios: Collection[float]) -> float | None:
    return statistics.geometric_mean(ratios) if ratios else None


def fastest_peer(cell: dict, own: Collection[str]) -> str | None:
    """Of lengths, in a cell: the name of the fastest peer, where one was measured.

    own are the names of the steps, which are no peers, padded or not.
    """
    times_ms = {
        name: each["time_ms"]
        for name, each in cell["attentions"].items()
        if "time_ms" in each and name.removeprefix(PADDED) not in own
    }
    return min(times_ms, key=times_ms.__getitem__, default=None)


def taken_of(cell: dict) -> str:
    """Of lengths: the step that attention() takes for the cell, which comes first there."""
    return next(iter(cell["attentions"]))


def lengths_ratios(record: dict, over: str | None = None) -> dict[str, float]:
    """Of lengths, by cell: the speed of the step that attention() takes over the fastest peer's, or
    over that of the one that is named, where one was measured.
    """
    ratios = {}
    for cell in record["cells"]:
        attentions = cell["attentions"]
        other = attentions.get(over or fastest_peer(cell, record["sources"]), {})
        ours = attentions[taken_of(cell)]
        if "time_ms" in ours and "time_ms" in other:
            ratios[cell["name"]] = other["time_ms"] / ours["time_ms"]
    return ratios


def padded_ratios(record: dict, *, equal: bool) -> dict[str, float]:
    """Of lengths, by cell: the speed of the step that attention() takes over that of one on padded
    sequences; of the cells where all have equal lengths, or of those where they have not.
    """
    kept = {cell["name"] for cell in record["cells"] if cell["are_equal"] == equal}
    *_, padding = record["sources"]
    ratios = lengths_ratios(record, f"{PADDED}{padding}")
    return {name: ratio for name, ratio in ratios.items() if name in kept}


def lengths_figures(record: dict) -> dict[str, float | str | None]:
    """Of a record of lengths, under LENGTHS_FIGURES; None where nothing is."""
    ratios = lengths_ratios(record)
    figures = _figures(ratios)
    for group, of_group in by_group(record, ratios).items():
        figures |= {f"{group}_{figure}": each for figure, each in _figures(of_group).items()}
    return {
        **figures,
        "over_padded": _mean(padded_ratios(record, equal=False).values()),
        "over_padded_equal": _mean(padded_ratios(record, equal=True).values()),
    }


def by_group(record: dict, ratios: dict[str, float]) -> dict[str, dict[str, float]]:
    """Ratios by cell for each group of a record of lengths."""
    groups = {cell["name"]: cell["group"] for cell in record["cells"]}
    return {
        group: {name: ratio for name, ratio in ratios.items() if groups[name] == group}
        for group in GROUPS
    }


def first_that_run(record: dict, steps: Sequence[str]) -> tuple[str, ...]:
    """Those of the steps that run in a cell where none in front of them does."""
    first = {
        next((name for name in steps if isinstance(cell["tflops"].get(name), NUMBER)), None)
        for cell in record["cells"]
    }
    return tuple(name for name in steps if name in first)


def speeds_over_peers(workload: dict) -> dict[str, float]:
    """Of a workload of the speed of training, by peer: attention()'s speed over the peer's."""
    attentions = workload["attentions"]
    ours_ms = attentions[OURS]["time_ms"]
    return {
        name: each["time_ms"] / ours_ms
        for name, each in attentions.items()
        if name != OURS and "time_ms" in each
    }


def ring_ratios(attentions: dict[str, dict], gpus: int) -> dict[str, float | None]:
    """Of an operation in a cell of attention over several GPUs: the ring's speed over as many times
    one GPU's, and over the faster of torch's ways; None where those are missing.
    """
    ring_ms = attentions[RING]["time_ms"]
    whole_ms = attentions[ONE_GPU].get("time_ms")
    torch_ms = [attentions[name].get("time_ms") for name in CONTEXT_PARALLEL]
    fastest_ms = min((ms for ms in torch_ms if ms), default=None)
    return {
        "of_ideal": whole_ms / (gpus * ring_ms) if whole_ms else None,
        "over_context_parallel": fastest_ms / ring_ms if fastest_ms else None,
    }


def static_derived(record: dict) -> dict:
    """Of a static record: instructions by kernel, shared memory accesses by operation."""
    compiled = record["compiled"]
    sass = compiled if isinstance(compiled, str) else compiled["sass"]  # "not collected"
    banks: dict[str, dict[str, int]] = {}
    for place in record["banks"]:
        total = banks.setdefault(place["operation"], dict.fromkeys(BANK_COUNTS, 0))
        for key in BANK_COUNTS:
            total[key] += place[key]
    for total in banks.values():
        total["conflicts"] = num_conflicts(total)
    return {
        "sass": sass
        if isinstance(sass, str)
        else {
            kernel: {"instructions": sum(counts.values()), **dict.fromkeys(OPCODES, 0), **counts}
            for kernel, counts in sass.items()
        },
        "banks": banks,
    }
