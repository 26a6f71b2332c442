"""The rows of the tables as plain values: numbers, texts, and lists of one number a kernel.

A key that a row lacks does not apply to it. "status" says why a row has no numbers.
"""

from __future__ import annotations

import statistics
from itertools import chain, compress
from typing import Any

from ..metrics import num_conflicts, smem_bytes, spill_bytes
from ..operation import FORWARD, OPERATIONS, Operation, operation_of
from ..problem import SHARDED
from ..quiet import quiet_turns
from ..record_schema import CACHES, FA3, NAIVE, NUMBER, RING, SHARES
from ..step import predecessor
from .derived import (
    ONE_GPU,
    ULYSSES,
    copy_shares,
    decode_ratios,
    derived,
    fastest_peer,
    head_dims,
    large_head_dim_steps,
    lengths_ratios,
    peer_ratios,
    rates_of,
    ratios_to_256,
    readable,
    ring_ratios,
    speeds_over_peers,
    static_derived,
    taken_of,
    top_stalls,
)
from .record_set import NOT_MEASURED, STALE, Ladder, RecordSet
from .ring_model import machine_of, predict

Row = dict[str, Any]

SHOWN_KEYS = (1024, 8192, 131072)  # of few queries on many keys
ATTENTION = "attention()"  # of small calls
MODELLED_GPUS = (2, 4, 8, 64)  # for which the time of a ring is predicted
GROWS = 3  # memory that more than triples when the sequence doubles holds all scores


def steps(ladder: Ladder) -> list[Row]:
    """One row per step."""
    rows = []
    for step in ladder.steps:
        row = {
            "name": step.name,
            "path": f"steps/{step.path.name}",
            "stale": step.name in ladder.measured.stale,
            "title": step.title,
        }
        record = ladder.measured.records.get(step.name)
        if record is None:
            rows.append({**row, "status": NOT_MEASURED})
            continue
        numbers, kernels = derived(record), record["resources"].values()
        rows.append(
            {
                **row,
                "time_ms": record["time_ms"],
                "tflops": record["tflops"],
                "fa3_share": numbers["fa3_share"],
                "gain": numbers["gain"],
                "registers": [kernel["registers"] for kernel in kernels],
                "smem_bytes": [smem_bytes(kernel) for kernel in kernels],
                "spill_bytes": numbers["spill_bytes"],
                "peak_memory_bytes": record["peak_memory_bytes"],
                "error": numbers["error"],
            }
        )
    return rows


def peers(ladder: Ladder) -> list[Row]:
    """One row per peer of the latest run."""
    if ladder.newest is None:
        return []
    measured = ladder.newest["peers"]
    output = ladder.operation.outputs[0].name
    fa3_ms = measured[FA3].get("time_ms")
    return [
        {"name": name, "missing": peer["missing"]}
        if "missing" in peer
        else {
            "name": name,
            "route": peer["route"],
            "time_ms": peer["time_ms"],
            "time_p25_ms": peer["time_p25_ms"],
            "time_p75_ms": peer["time_p75_ms"],
            "tflops": peer["tflops"],
            "fa3_share": fa3_ms / peer["time_ms"] if fa3_ms else None,
            "peak_memory_bytes": peer["peak_memory_bytes"],
            "error": peer["errors"][output],
        }
        for name, peer in measured.items()
    ]


def memory(ladder: Ladder) -> list[Row]:
    """One row per sequence length: the peak memory of some steps, the last's saving over the first.

    The steps are those that hold all scores, where there is none torch's unfused code, then of
    those that do not the latest that is for any number of queries; None does not fit.
    """
    curves = {
        name: {entry["seq"]: entry["bytes"] for entry in record["memory"]}
        for name, record in ladder.measured.records.items()
        if name not in ladder.measured.stale
    }
    if ladder.newest and not any(map(_holds_scores, curves.values())):
        naive = ladder.newest.get("naive_memory", [])
        curves = {NAIVE: {entry["seq"]: entry["bytes"] for entry in naive}} | curves
    materialising = [name for name, curve in curves.items() if _holds_scores(curve)]
    general = {step.name for step in ladder.steps if step.is_general}
    fused = [name for name in curves if name in general.difference(materialising)][-1:]
    if not fused:
        return []
    names = materialising + fused
    rows = []
    for seq in curves[names[0]]:
        row: Row = {"seq": seq, "bytes": {name: curves[name].get(seq) for name in names}}
        if materialising:
            first, *_, last = row["bytes"].values()
            row["saving"] = first / last if first and last else None
        rows.append(row)
    return rows


def _holds_scores(curve: dict[int, int | None]) -> bool:
    sizes = [size for size in curve.values() if size is not None]
    return len(sizes) > 1 and sizes[-1] > GROWS * sizes[-2]


def grid(ladder: Ladder) -> list[Row]:
    """One row per shape: the rates of steps and peers, None where missing.

    ratio is over the fastest peer's rate that of the step that attention() takes.
    """
    if ladder.grid is None:
        return []
    record = ladder.grid.record
    measured = [step.name for step in ladder.steps if step.name in record["sources"]]
    if not measured:
        return []
    names = measured + [
        name for name in record["cells"][0]["tflops"] if name not in record["sources"]
    ]
    ratios = peer_ratios(record, *ladder.taken())
    keys = ("name", "head_dim", "causal", "batch", "heads", "kv_heads", "seq")
    return [
        {
            **{key: cell[key] for key in keys},
            "seq_k": cell.get("seq_k", cell["seq"]),
            "tflops": {name: _number(cell["tflops"].get(name)) for name in names},
            "ratio": ratios.get(cell["name"]),
        }
        for cell in record["cells"]
    ]


def distributions(record_set: RecordSet) -> list[Row]:
    """A row for each kind of inputs, dtype and mask; by_head_dim has what a cell says.

    ratio and before are the rates of the last step and of the one before it over the fastest
    peer's, rescaled and redone shares of the work tiles; each is None where it is missing.
    """
    if record_set.distributions is None:
        return []
    record = record_set.distributions.record
    steps = latest_steps(record_set, record)
    if not steps:
        return []
    ratios = peer_ratios(record, steps[0])
    before = peer_ratios(record, steps[1]) if len(steps) == 2 else {}
    keys = ("inputs", "dtype", "causal")
    by_row: dict[tuple, Row] = {}
    for cell in record["cells"]:
        values = tuple(cell[key] for key in keys)
        row = by_row.setdefault(values, {**dict(zip(keys, values, strict=True)), "by_head_dim": {}})
        row["by_head_dim"][str(cell["head_dim"])] = {
            "ratio": ratios.get(cell["name"]),
            "before": before.get(cell["name"]),
            **{share: cell[share] for share in SHARES},
        }
    order = list(dict.fromkeys(cell["inputs"] for cell in record["cells"]))
    return sorted(
        by_row.values(), key=lambda row: (order.index(row["inputs"]), row["dtype"], row["causal"])
    )


def latest_steps(record_set: RecordSet, record: dict) -> list[str]:
    """The last step of the ladder in a record of cells, then the one before it, if any."""
    measured = [step.name for step in record_set.steps if step.name in record["sources"]]
    return measured[:-3:-1]


def _number(value: object) -> float | None:
    return value if isinstance(value, NUMBER) else None


def latency(record_set: RecordSet) -> list[Row]:
    """A row a shape: microseconds that a call of ATTENTION and of each peer takes of the device and
    the host, and the step that ATTENTION takes.

    None where a peer is missing; of the host, what _on_host() gives.
    """
    latency = record_set.latency
    if latency is None or latency.other_changed:
        return []
    record = latency.record
    cells = record["cells"]
    if any(name in latency.changed for cell in cells for name in cell["host_us"]):
        return []
    keys = ("device_us", "missing")
    names = dict.fromkeys(name for key in keys for cell in cells for name in cell[key])
    absent = dict.fromkeys([ATTENTION, *(name for name in names if name not in record["sources"])])
    rows = []
    for cell in cells:
        step = next(name for name in cell["device_us"] if name in record["sources"])
        device_us = {name: statistics.median(us) for name, us in cell["device_us"].items()}
        host_us = _on_host(cell, record)
        device_us[ATTENTION], host_us[ATTENTION] = device_us.pop(step), host_us.pop(step)
        rows.append(
            {
                "seq": cell["seq"],
                "causal": cell["causal"],
                "step": step,
                "device_us": absent | device_us,
                "host_us": absent | host_us,
                "quiet_turns": sum(_quiet_turns(cell, record)),
            }
        )
    return rows


def decoding(record_set: RecordSet) -> list[Row]:
    """A row for each kind of cache: what _on_host() gives for its calls, by who was called."""
    latency = record_set.latency
    if latency is None or latency.other_changed or latency.changed & {*latency.record["decoding"]}:
        return []
    record = latency.record
    calls = record["decoding"]
    on_host = {who: _on_host(timed, record) for who, timed in calls.items()}
    turns = min(sum(_quiet_turns(timed, record)) for timed in calls.values())
    return [
        {
            "cache": cache,
            "host_us": {who: by_cache[cache] for who, by_cache in on_host.items()},
            "quiet_turns": turns,
        }
        for cache in CACHES
    ]


def _on_host(timed: dict, record: dict) -> dict[str, tuple[float | None, float]]:
    """By call, the medians of the turns in which the host was quiet, and of all turns."""
    quiet = _quiet_turns(timed, record)
    return {
        name: (
            statistics.median(chain(*compress(turns, quiet))) if any(quiet) else None,
            statistics.median(chain(*turns)),
        )
        for name, turns in timed["host_us"].items()
    }


def _quiet_turns(timed: dict, record: dict) -> list[bool]:
    return quiet_turns(timed["loop_rates"], record["fastest_loop_rate"])


def decode(record_set: RecordSet) -> list[Row]:
    """A row for each head_dim and number of queries: the step's speed over the fastest peer's.

    by_keys has the geometric mean and the smallest over batches and heads, for each of SHOWN_KEYS;
    None where it is missing. slower counts the cells with any number of keys where it is below 1.
    copy_share is the smallest of derived.copy_shares(), where there are any.
    """
    if record_set.decode is None:
        return []
    record = record_set.decode.record
    ratios, shares = decode_ratios(record), copy_shares(record)
    by_row: dict[tuple[int, int], list[dict]] = {}
    for cell in record["cells"]:
        by_row.setdefault((cell["head_dim"], cell["seq_q"]), []).append(cell)
    found = []
    for (head_dim, seq_q), cells in by_row.items():
        compared = [cell for cell in cells if cell["name"] in ratios]
        by_keys = {}
        for seq_k in SHOWN_KEYS:
            of_keys = [ratios[cell["name"]] for cell in compared if cell["seq_k"] == seq_k]
            by_keys[str(seq_k)] = (
                {"mean": statistics.geometric_mean(of_keys), "smallest": min(of_keys)}
                if of_keys
                else None
            )
        row: Row = {
            "head_dim": head_dim,
            "seq_q": seq_q,
            "by_keys": by_keys,
            "slower": sum(ratios[cell["name"]] < 1 for cell in compared),
            "cells": len(compared),
        }
        if of_row := [shares[cell["name"]] for cell in cells if cell["name"] in shares]:
            row["copy_share"] = min(of_row)
        found.append(row)
    return found


def large_head_dim(record_set: RecordSet, operation: Operation = FORWARD) -> list[Row]:
    """A row for each head_dim, of q and of v, and step, that which attention() takes in front of
    the others.

    by_column has for each mask and sequence the step's rate, peer, the fastest one's, its name,
    ratio, the step's rate over that, and over_256, of a step for large head_dim that over the rate
    of the one taken at 256; None for what is missing.
    """
    cells = record_set.cells.get(operation.named("large_head_dim"))
    if cells is None or cells.stale:
        return []
    record = cells.record
    large, narrow = large_head_dim_steps(record)
    of_256 = {name: ratios_to_256(record, name) for name in large}
    columns = dict.fromkeys(map(_mask_and_seq, record["cells"]))
    found: dict[tuple, Row] = {}
    for cell in record["cells"]:
        rates = rates_of(cell)
        of_peers = {name: rate for name, rate in rates.items() if name not in record["sources"]}
        peer = max(of_peers, key=of_peers.__getitem__, default=None)
        for name in (narrow, *large):
            if name not in cell["tflops"]:
                continue
            head_dim, v_head_dim = head_dims(cell)
            row = found.setdefault(
                (head_dim, v_head_dim, name),
                {
                    "head_dim": head_dim,
                    "v_head_dim": v_head_dim,
                    "step": name,
                    "by_column": dict.fromkeys(columns),
                },
            )
            rate = rates.get(name)
            row["by_column"][_mask_and_seq(cell)] = {
                "rate": rate,
                "peer": of_peers.get(peer),
                "name": peer,
                "ratio": rate / of_peers[peer] if rate and peer else None,
                "over_256": of_256.get(name, {}).get(cell["name"]),
            }
    return list(found.values())


def _mask_and_seq(cell: dict) -> str:
    return f"N {cell['seq']}{', causal' if cell['causal'] else ''}"


def lengths(record_set: RecordSet, operation: Operation = FORWARD) -> list[Row]:
    """A row for each kind of sequences and mask: TFLOP/s of the step that attention() takes, and
    the fastest peer's.

    by_heads has step, peer, name and ratio for each head_dim and numbers of heads; None where the
    cell is missing, peer, name and ratio where no peer was measured.
    """
    whole = record_set.lengths.get(operation.named("lengths"))
    if whole is None or whole.stale:
        return []
    record = whole.record
    ratios = lengths_ratios(record)
    columns = dict.fromkeys(map(_heads_of, record["cells"]))
    found: dict[tuple, Row] = {}
    for cell in record["cells"]:
        what = {key: cell[key] for key in ("title", "group", "causal", "window")}
        row = found.setdefault(
            tuple(map(str, what.values())), {**what, "by_heads": dict.fromkeys(columns)}
        )
        peer = fastest_peer(cell, record["sources"])
        row["by_heads"][_heads_of(cell)] = {
            "step": cell["attentions"][taken_of(cell)].get("tflops"),
            "peer": peer and cell["attentions"][peer]["tflops"],
            "name": peer,
            "ratio": ratios.get(cell["name"]),
        }
    return list(found.values())


def _heads_of(cell: dict) -> str:
    queries, keys = cell["heads"], cell["kv_heads"]
    heads = f"{queries}" if queries == keys else f"{queries}/{keys}"
    return f"head_dim {cell['head_dim']}, {heads} heads"


def pictures(record_set: RecordSet) -> list[Row]:
    """A row for each head: the errors of each output, of the step and of torch."""
    if record_set.pictures is None:
        return []
    return [
        {"head": head["name"], "causal": head["causal"], "errors": head["errors"]}
        for head in record_set.pictures.record["heads"]
    ]


def training_speed(record_set: RecordSet) -> list[Row]:
    """A row for each attention in each workload; speedup is attention()'s speed over a peer's.

    loss is that of the last step; a layer alone has none.
    """
    if record_set.training_speed is None or record_set.training_speed.stale:
        return []
    keys = ("route", "time_ms", "time_p25_ms", "time_p75_ms", "peak_memory_bytes")
    rows = []
    for workload, measured in record_set.training_speed.record["workloads"].items():
        speedups = speeds_over_peers(measured)
        for name, each in measured["attentions"].items():
            row: Row = {"workload": workload, "name": name}
            if "missing" in each:
                rows.append({**row, "missing": each["missing"]})
                continue
            row |= {key: each[key] for key in keys}
            if name in speedups:
                row["speedup"] = speedups[name]
            if "losses" in each:
                row["loss"] = each["losses"][-1]
            rows.append(row)
    return rows


def sharded(record_set: RecordSet, gpus: int) -> list[Row]:
    """A row for each cell and operation over so many GPUs; None is missing, and missing says why.

    of_ideal and over_context_parallel are those of derived.ring_ratios().
    """
    whole = record_set.sharded.get(gpus)
    if whole is None or whole.stale:
        return []
    keys = ("name", "seq", "heads", "kv_heads", "causal")
    rows = []
    for cell in whole.record["cells"]:
        for operation in OPERATIONS.values():
            attentions = cell[operation.name]["attentions"]
            ring = attentions[RING]
            rows.append(
                {
                    **{key: cell[key] for key in keys},
                    "operation": operation.name,
                    "time_ms": ring["time_ms"],
                    "tflops": ring["tflops"],
                    **ring_ratios(attentions, gpus),
                    "ulysses_ms": attentions[ULYSSES].get("time_ms"),
                    "hidden": ring["communication"]["hidden"],
                    "peak_memory_bytes": {
                        name: attentions[name].get("peak_memory_bytes") for name in (RING, ONE_GPU)
                    },
                    "missing": {
                        name: each["missing"]
                        for name, each in attentions.items()
                        if "missing" in each
                    },
                }
            )
    return rows


def sharded_model(record_set: RecordSet) -> list[Row]:
    """A row for each causal problem and number of GPUs: by operation, the shares of as many times
    one GPU that ring_model predicts and that were measured, or why they were not.

    It predicts from what the record of the fewest GPUs says of one of them, and of their link.
    step_ms is how long a GPU computes in a step of the ring.
    """
    current = [whole.record for whole in record_set.sharded.values() if not whole.stale]
    if not current:
        return []
    rows = []
    causal = {name: problem for name, problem in SHARDED.items() if problem.causal}
    for name, problem in sorted(causal.items(), key=lambda item: item[1].shape.heads):
        for gpus in MODELLED_GPUS:
            row: Row = {
                "seq": problem.shape.seq_q,
                "heads": problem.shape.heads,
                "kv_heads": problem.shape.kv_heads,
                "gpus": gpus,
                **{key: {} for key in ("predicted", "measured", "step_ms")},
            }
            for operation in OPERATIONS.values():
                share = _share_of_ideal(record_set, gpus, name, operation.name)
                row["measured"][operation.name] = share
                if machine := machine_of(current[0], operation, problem, gpus):
                    prediction = predict(operation, problem, gpus, machine)
                    row["predicted"][operation.name] = prediction.share
                    row["step_ms"][operation.name] = 1e3 * prediction.step_s
            rows.append(row)
    return rows


def _share_of_ideal(record_set: RecordSet, gpus: int, name: str, operation: str) -> float | str:
    """The ring's measured speed over that of as many GPUs by themselves, or why there is none."""
    whole = record_set.sharded.get(gpus)
    if whole is None or whole.stale:
        return STALE if whole else NOT_MEASURED
    cell = next((cell for cell in whole.record["cells"] if cell["name"] == name), None)
    if cell is None:
        return NOT_MEASURED
    share = ring_ratios(cell[operation]["attentions"], gpus)["of_ideal"]
    return "one GPU missing" if share is None else share


def resources(record_set: RecordSet, step: str) -> list[Row]:
    """One row per kernel of the step: what the compiler gave it."""
    record = record_set.measured.current(step)
    if isinstance(record, str):
        return [{"status": record}]
    return [{"kernel": name, **kernel} for name, kernel in record["resources"].items()]


def counters(record_set: RecordSet, step: str) -> list[Row]:
    """One row per kernel of the step, after that of the same kernel in the step that it changes.

    What Nsight Compute counted, or None.
    """
    steps = record_set.of(operation_of(step)).steps
    previous = predecessor(next(each for each in steps if each.name == step), steps)
    kernels = _counters(record_set, step)
    if isinstance(kernels, str):
        return [{"step": step, "status": kernels}]
    before = _counters(record_set, previous.name) if previous else {}
    found = []
    for kernel, row in kernels.items():
        if not isinstance(before, str) and kernel in before:
            found.append(before[kernel])
        found.append(row)
    return found


def _counters(record_set: RecordSet, step: str) -> dict[str, Row] | str:
    """One row per kernel, or why there is none."""
    record = record_set.measured.current(step)
    collected = record if isinstance(record, str) else record["counters"]
    if isinstance(collected, str):
        return collected
    return {
        kernel: {
            "step": step,
            "kernel": kernel,
            **numbers,
            "stalls": top_stalls(collected[kernel]),
        }
        for kernel, numbers in readable(collected).items()
    }


def sass(ladder: Ladder) -> list[Row]:
    """One row per kernel of each step: what the compiler gave it, and instructions in its code.

    instructions counts each opcode, or says why they are not counted.
    """
    rows = []
    for step in ladder.steps:
        record = ladder.static.records.get(step.name)
        if record is None:
            continue
        compiled = record["compiled"]
        if isinstance(compiled, str) or step.name in ladder.static.stale:
            status = compiled if isinstance(compiled, str) else STALE
            rows.append({"step": step.name, "status": status})
            continue
        counts = static_derived(record)["sass"]
        rows += [
            {
                "step": step.name,
                "kernel": name,
                "compiler": f"{compiled['arch']} by nvcc {compiled['toolkit']}",
                "registers": kernel["registers"],
                "stack_bytes": kernel["stack_bytes"],
                "spill_bytes": spill_bytes(kernel),
                "instructions": counts if isinstance(counts, str) else counts[name],
            }
            for name, kernel in compiled["resources"].items()
        ]
    return rows


def banks(ladder: Ladder) -> list[Row]:
    """One row per place where a step or an experiment accesses shared memory."""
    rows = []
    for name, record in ladder.static.records.items():
        if name in ladder.static.stale:
            rows.append({"name": name, "status": STALE})
            continue
        operations = [place["operation"] for place in record["banks"]]
        rows += [
            {
                "name": name,
                # An operation that is called in several places is told by its call.
                "access": place["code"]
                if operations.count(place["operation"]) > 1
                else place["operation"],
                **{key: place[key] for key in ("accesses", "ideal", "wavefronts")},
                "conflicts": num_conflicts(place),
            }
            for place in record["banks"]
        ]
    return rows


def experiments(record_set: RecordSet, step: str) -> list[Row]:
    """One row per experiment on the step: tried, predicted, measured against it in the same run."""
    rows = []
    for patch in record_set.patches:
        if patch.step.name != step:
            continue
        row = {
            "name": patch.name,
            "path": f"experiments/{patch.name}.patch",
            "tries": patch.header.get("tries", ""),
            "predicts": patch.header.get("predicts", ""),
        }
        record = record_set.experiments.current(patch.name)
        if isinstance(record, str):
            rows.append({**row, "status": record})
            continue
        kernels = record["resources"].values()
        rows.append(
            {
                **row,
                "baseline_ms": record["baseline"]["time_ms"],
                "time_ms": record["time_ms"],
                "gain": derived(record)["gain"],
                "registers": [kernel["registers"] for kernel in kernels],
                "stack_bytes": [kernel["stack_bytes"] for kernel in kernels],
            }
        )
    return rows
