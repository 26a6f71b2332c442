"""Fake records for the tests. Their numbers must never get into profiles/."""

from __future__ import annotations

from dataclasses import asdict

from common.catalog import all_steps
from common.operation import BACKWARD, FORWARD, Operation
from common.problem import (
    DECODE,
    DISTRIBUTIONS,
    LARGE_HEAD_DIMS,
    LENGTHS,
    LENGTHS_BACKWARD,
    SHARDED,
    TRAINED,
    Problem,
    Sequences,
    Shape,
)
from common.record_schema import CACHES, SDPA, SHARDED_ATTENTIONS
from common.records import SCHEMA, host_hashes, model_hashes, picture_hashes, sharded_hashes
from common.step import FEW_HEADS, FEW_ROWS, Step

# Those that attention() takes where they run; what a record of training has.
V_STEP, B_STEP = (
    [step for step in all_steps() if step.operation == operation and step.is_candidate()][-1]
    for operation in (FORWARD, BACKWARD)
)
# And for the few keys of a tiny model, or, where they are more, for its few heads.
ROWS_STEP, HEADS_STEP = (
    [step for step in all_steps() if step.few == few and not (step.takes_lengths or step.draft)][-1]
    for few in (FEW_ROWS, FEW_HEADS)
)


def fake_record(
    step: Step, *, baseline: Step | None = None, time_ms: float = 20.0, run: str = "2000-01-01 a"
) -> dict:
    """A record of the step as it is now, twice as fast as the baseline, if any."""
    operation = step.operation
    state = {
        "sm_clock_mhz": 1000,
        "memory_clock_mhz": 2000,
        "power_w": 300.0,
        "temperature_c": 40,
        "throttle_reasons": [],
    }
    return {
        "schema": SCHEMA,
        "step": step.name,
        "title": step.title,
        "source": f"steps/{step.path.name}",
        "code_sha256": step.code_sha256,
        "compile": ["nvcc", "-cubin"],
        "resources": {
            f"attention_{operation.name}": {
                "registers": 111,
                "static_smem": 1024,
                "dynamic_smem": 2048,
                "stack_bytes": 0,
                "spill_store_bytes": 4,
                "spill_load_bytes": 8,
            }
        },
        "least_bytes": 10**9,
        "run": run,
        "git": "not collected",
        "device": "NVIDIA H200",
        "driver": "1.0",
        "toolkit": "1.0",
        "torch": "1.0",
        "python": "1.0",
        "environment": {"before": state, "after": state},
        "shape": {
            "batch": 4,
            "heads": 16,
            "kv_heads": 16,
            "seq_q": 4096,
            "seq_k": 4096,
            "head_dim": 128,
            "dtype": "bf16",
            "causal": False,
        },
        "flops": operation.flops(operation.headline),
        "torch_errors": _errors(operation, 0.004, 0.05),
        "peers": {
            "sdpa_math": {"missing": "out of memory"},
            "sdpa_flash": {"route": "torch 1.0", **_outcome(operation, 2.0)},
            "sdpa_cudnn": {"route": "torch 1.0", **_outcome(operation, 1.0)},
            "flash_attention_3": {"route": "fake", **_outcome(operation, 0.8)},
        },
        **_outcome(operation, time_ms),
        "counters": "not collected",
        "memory": [{"seq": 512, "bytes": 10**7}, {"seq": 1024, "bytes": 2 * 10**7}],
        "baseline": baseline
        and {
            "step": baseline.name,
            "code_sha256": baseline.code_sha256,
            **_outcome(operation, 2 * time_ms),
        },
    }


def fake_grid(*steps: Step) -> dict:
    """Two cells where each step is 100 TFLOP/s faster than the one before, and three peers."""
    rates = {step.name: 100.0 * (index + 1) for index, step in enumerate(steps)}
    rates |= {"sdpa_math": {"missing": "out of memory"}, "sdpa_flash": 160.0, "sdpa_cudnn": 640.0}
    shape = {"batch": 4, "heads": 32, "kv_heads": 32, "seq": 4096, "head_dim": 64}
    state = fake_record(steps[0])["environment"]["before"]
    output = steps[0].operation.outputs[0]
    return {
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "dtype": "bf16",
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in steps},
        "ceiling": {"matmul": "8192^3", "tflops": 800.0, "samples_ms": [1.0, 2.0, 3.0]},
        "cells": [
            {
                "name": name,
                "run": name,
                "environment": {"before": state, "after": state},
                **shape,
                "causal": causal,
                "tflops": rates,
                "errors": {
                    name: {output.name: rate / (1e6 if causal else 1e5)}
                    for name, rate in rates.items()
                    if name != "sdpa_math"
                },
                "samples_ms": {name: [1.0, 2.0, 3.0] for name in rates},
            }
            for name, causal in (("d64_4096", False), ("d64_causal_4096", True))
        ],
    }


def fake_large_head_dim(step: Step, narrow: Step) -> dict:
    """The step does 300 TFLOP/s at head_dim 512 and 200 elsewhere, 30 more with a causal mask, and
    the other one 400 at 256, where a peer does 250. Elsewhere one does 100 but where N is 16384:
    there sdpa_math does 25, and sdpa_efficient nothing where head_dim is 1024.
    """
    fake = fake_grid(step, narrow)
    cell = {key: fake["cells"][0][key] for key in ("environment", "samples_ms")}

    def rates(problem: Problem) -> dict:
        shape = problem.shape
        is_long, at_256 = shape.seq_q == 16384, shape.head_dim == 256
        refused = {"missing": "head dimension at most 256"}
        too_large = {"missing": "too large"} if shape.head_dim == 1024 else 20.0
        return {
            step.name: (300.0 if shape.head_dim == 512 else 200.0) + 30.0 * problem.causal,
            **({narrow.name: 400.0} if at_256 else {}),
            "sdpa_math": 25.0 if is_long else {"missing": "out of memory"},
            "sdpa_efficient": too_large if is_long else 100.0,
            "flash_attention_3": 250.0 if at_256 else refused,
        }

    return fake | {
        "cells": [
            {
                **cell,
                "name": name,
                "run": name,
                **{key: getattr(problem.shape, key) for key in ("batch", "heads", "kv_heads")},
                "seq": problem.shape.seq_q,
                "head_dim": problem.shape.head_dim,
                **({"v_head_dim": problem.shape.v_head_dim} if "_v" in name else {}),
                "causal": problem.causal,
                "tflops": rates(problem),
                "routes": {"sdpa_math": "torch, math", "sdpa_efficient": "torch"},
                "errors": {step.name: {step.operation.outputs[0].name: 0.001}},
                "slow": ["sdpa_math"],
            }
            for name, problem in LARGE_HEAD_DIMS.items()
        ]
    }


def fake_distributions(*steps: Step, trained: bool = False) -> dict:
    """Cells as fake_grid() has them, where the last step has repaired some work tiles.

    All of them, or all but those of trained inputs.
    """
    cell = fake_grid(*steps)["cells"][0]
    keys = ("batch", "heads", "kv_heads", "head_dim")
    return {
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in steps},
        "repairs": {"step": steps[-1].name, "code_sha256": steps[-1].code_sha256},
        "cells": [
            {
                **cell,
                "name": name,
                "run": name,
                **{key: getattr(problem.shape, key) for key in keys},
                "seq": problem.shape.seq_q,
                "causal": problem.causal,
                "dtype": problem.dtype,
                "inputs": inputs,
                "rescaled": 0.25,
                "redone": 0.001,
            }
            for name, (problem, inputs) in DISTRIBUTIONS.items()
            if trained or inputs != TRAINED
        ],
    }


def fake_decode(step: Step, before: Step | None = None) -> dict:
    """Of every problem with 32 heads, whose K and V fit: the step takes 1 ms, the one before 3.

    One peer takes 2 ms, the other 1.5, and with 128 queries 0.8; with one query it is missing. At
    batch 8 the step reaches 0.9 of a copy's speed for each query, and 0.7 at 131072 keys.
    """
    state = fake_record(step)["environment"]["before"]
    steps = [each for each in (step, before) if each]
    problems = {name: problem for name, problem in DECODE.items() if problem.shape.heads == 32}
    too_large = [
        name for name, p in problems.items() if (p.shape.batch, p.shape.seq_k) == (64, 131072)
    ]

    def outcome(shape: Shape, time_ms: float) -> dict:
        share = 0.7 if shape.seq_k == 131072 else 0.9
        return {
            "time_ms": time_ms,
            "time_p25_ms": time_ms * 0.99,
            "time_p75_ms": time_ms * 1.01,
            "samples_ms": [time_ms] * 3,
            "tflops": 100.0 / time_ms,
            "bytes_per_second": 4 * 10**12 * share * shape.seq_q / time_ms,
            "difference": 0.002,
        }

    def cell(name: str, shape: Shape) -> dict:
        attentions = {step.name: outcome(shape, 1.0)}
        if before:
            attentions[before.name] = outcome(shape, 3.0)
        attentions["sdpa_cudnn"] = outcome(shape, 0.8 if shape.seq_q == 128 else 1.5)
        if shape.seq_q == 1:
            attentions["sdpa_cudnn"] = {"missing": "no such shape."}
        return {
            "name": name,
            "run": name,
            "environment": {"before": state, "after": state},
            **asdict(shape),
            "routes": {"flash_attention_3": "fake"},
            "taken": step.name,
            "attentions": {**attentions, "flash_attention_3": outcome(shape, 2.0)},
        }

    return {
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "dtype": "bf16",
        "sources": {each.name: {"code_sha256": each.code_sha256} for each in steps},
        "copy_bytes_per_second": 4 * 10**12,
        "copy_samples_ms": [1.0, 1.0],
        "skipped": dict.fromkeys(too_large, "out of memory"),
        "cells": [cell(name, p.shape) for name, p in problems.items() if name not in too_large],
    }


def fake_lengths(step: Step, padding: Step) -> dict:
    """The step takes 1 ms of every cell but one; one peer 2 of packed sequences, 1.5 with windows,
    0.8 on caches and 1.2 for few queries; on caches the other one, which takes 4, is missing.

    Of padded sequences the other step takes 3 ms, and 1.25 where lengths are equal; with a very
    long one it is missing. The cells are those of the step's operation.
    """
    state = fake_record(step)["environment"]["before"]
    operation = step.operation
    cells = LENGTHS if operation == FORWARD else LENGTHS_BACKWARD
    too_large = [name for name in cells if name.endswith("_one_long")][-1]
    peer_ms = {"packed": 2.0, "windows": 1.5, "caches": 0.8, "decoding": 1.2}

    def cell(name: str, sequences: Sequences) -> dict:
        def outcome(time_ms: float) -> dict:
            return {
                "time_ms": time_ms,
                "time_p25_ms": time_ms * 0.99,
                "time_p75_ms": time_ms * 1.01,
                "samples_ms": [time_ms] * 3,
                "tflops": sequences.flops(operation.products) / time_ms / 1e9,
                "difference": 0.002,
            }

        attentions = {
            step.name: outcome(1.0),
            "flash_attention_3": outcome(peer_ms[sequences.group]),
            "varlen_attn": outcome(4.0),
        }
        if sequences.seqused_k:
            attentions["varlen_attn"] = {"missing": "no seqused_k"}
        if sequences.group == "packed" and (sequences.causal or sequences.are_equal):
            padded = outcome(1.25 if sequences.are_equal else 3.0)
            if "one_long" in name:
                padded = {"missing": "the padded batch takes 15 GB"}
            attentions[f"padded_{padding.name}"] = padded
        return {
            "name": name,
            "run": name,
            "environment": {"before": state, "after": state},
            **sequences.as_record(),
            "routes": {"flash_attention_3": "fake"},
            "slow": ["varlen_attn"],
            "attentions": attentions,
        }

    return {
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "dtype": "bf16",
        "sources": {each.name: {"code_sha256": each.code_sha256} for each in (step, padding)},
        "skipped": {too_large: "out of memory"},
        "cells": [cell(name, each) for name, each in cells.items() if name != too_large],
    }


def fake_latency(step: Step) -> dict:
    """Two cells where the step takes 5 us of the device, 20 of the host; a peer ten times that.

    The host is quiet in one turn of two, and while sdpa decodes never.
    """
    shape = {"batch": 1, "heads": 16, "kv_heads": 16, "seq": 128, "head_dim": 128}
    state = fake_record(step)["environment"]["before"]
    return {
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "dtype": "bf16",
        "sources": {step.name: {"code_sha256": step.code_sha256}},
        "host": host_hashes(),
        "cells": [
            {
                "name": name,
                "run": name,
                "environment": {"before": state, "after": state},
                **shape,
                "causal": causal,
                "device_us": {step.name: [4.0, 5.0, 60.0], "sdpa_flash": [40.0, 50.0, 60.0]},
                "host_us": {
                    step.name: [[19.0, 20.0], [21.0, 22.0]],
                    "sdpa_flash": [[190.0, 210.0], [191.0, 215.0]],
                },
                "loop_rates": [8.0, 9.0, 7.9],
                "missing": {"flash_attention_3": "not installed"},
            }
            for name, causal in (("n128", False), ("n128_causal", True))
        ],
        "decoding": {
            step.name: {
                "keys": [532, 571],
                "host_us": {cache: [[33.0, 35.0], [29.0, 31.0]] for cache in CACHES},
                "loop_rates": [7.9, 8.0, 10.0],
            },
            SDPA: {
                "keys": [532, 551],
                "host_us": {cache: [[39.0, 41.0]] for cache in CACHES},
                "loop_rates": [7.9, 10.0],
            },
        },
        "fastest_loop_rate": 10.0,
    }


def fake_pictures(forward: Step, backward: Step) -> dict:
    """Two heads: the one looks at the diagonal, the other, causal, at the first key."""

    def head(name: str, causal: bool, cells: list[list[int]]) -> dict:
        error = {"median": 1e-4, "maximum": 1e-2, "nrmse": 2e-3, "groups": [1e-3, 3e-3]}
        by_who = {"ours": error, "sdpa": {**error, "nrmse": 4e-3}}
        return {
            "name": name,
            "causal": causal,
            "seq": 256,
            "head_dim": 64,
            "map": cells,
            "errors": dict.fromkeys(("o", "dq", "dk", "dv"), by_who),
        }

    return {
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "dtype": "bf16",
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in (forward, backward)},
        "made_by": picture_hashes(),
        "trained": "a run",
        "cells": 2,
        "heads": [
            head("local", False, [[10_000, 0], [0, 10_000]]),
            head("layer 0", True, [[10_000, 0], [9_000, 1_000]]),
        ],
    }


def fake_training(forward: Step, backward: Step, steps: int = 8) -> dict:
    """Losses from 6 to 3 nats, 4 of held-out text; ours 1.5 % above, in twice the time."""
    losses = [6 - 3 * step / (steps - 1) for step in range(steps)]
    state = fake_record(forward)["environment"]["before"]

    def outcome(route: str, factor: float, ms: float) -> dict:
        return {
            "route": route,
            "loss": 3 * factor,
            "held_out_loss": 4 * factor,
            "ms_per_step": ms,
            "peak_memory_bytes": 10**9,
        }

    return {
        "schema": SCHEMA,
        "run": "2000-01-01 a",
        "device": "NVIDIA H200",
        "environment": {"before": state, "after": state},
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in (forward, backward)},
        "text": {"files": 100, "bytes": 10**6, "held_out": 50000, "sha256": "0" * 64},
        "config": {
            "layers": 6,
            "heads": 6,
            "head_dim": 64,
            "context": 1024,
            "batch": 16,
            "steps": steps,
            "window": 1,
            "parameters": 10**7,
        },
        "ours": outcome(f"{forward.name} and {backward.name}", 1.015, 20.0),
        "sdpa": outcome("torch 1.0, FLASH_ATTENTION", 1.0, 10.0),
        "losses": {"ours": [1.015 * loss for loss in losses], "sdpa": losses},
        "step_ms": {"ours": [20.0] * steps, "sdpa": [10.0] * steps},
    }


def fake_training_speed(forward: Step, backward: Step) -> dict:
    """Ours takes 20 ms of each workload, one peer 10, one 30, and one is missing."""
    state = fake_record(forward)["environment"]["before"]
    config = {
        **{"layers": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "context": 8192},
        **{"batch": 1, "steps": 2, "window": 1, "tolerance": 0.003, "parameters": 22 * 10**7},
    }
    shape = fake_record(forward)["shape"] | {"kv_heads": 8, "causal": True}

    def workload(name: str, more: dict, of_attention: dict) -> dict:
        def outcome(route: str, time_ms: float) -> dict:
            measured = _outcome(backward.operation, time_ms)
            errors = {"o": 0.001, **measured["errors"]}
            return {"route": route, **measured, "errors": errors, **of_attention}

        return {
            "run": f"2000-01-01 {name}",
            "environment": {"before": state, "after": state},
            **more,
            "attentions": {
                "ours": outcome(f"{forward.name} and {backward.name}", 20.0),
                "sdpa_flash": outcome("torch 1.0", 30.0),
                "sdpa_cudnn": outcome("torch 1.0", 10.0),
                "flash_attention_3": {"missing": "not installed"},
            },
        }

    return {
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in (forward, backward)},
        "models": model_hashes(),
        "workloads": {
            "layer": workload("layer", {"shape": shape}, {}),
            "gpt": workload("gpt", {"config": config}, {"losses": [6.0, 5.0]}),
            "llama": workload("llama", {"config": config}, {"losses": [6.0, 5.5]}),
        },
    }


def fake_sharded(gpus: int = 2) -> dict:
    """The ring takes 10 ms forward, 25 backward: 0.95 of the speed of as many single GPUs.

    Torch's ways take 2 and 1.2 times as long, Ulysses 1.1 times; of the second problem the faster
    one of torch's is missing, of the third all but the ring.
    """
    state = fake_record(V_STEP)["environment"]["before"]
    missing = {
        "h16_causal_32768": {},
        "h16_causal_131072": {"context_parallel_alltoall": "out of memory"},
        "h64_causal_1048576": dict.fromkeys(SHARDED_ATTENTIONS[1:], "a call takes too long"),
    }
    ring_ms = {FORWARD: 10.0, BACKWARD: 25.0}
    slower = dict(zip(SHARDED_ATTENTIONS, (1, 1.1, 0.95 * gpus, 2, 1.2), strict=True))

    def attentions(operation: Operation, name: str) -> dict:
        flops = operation.flops(SHARDED[name])

        def outcome(attention: str) -> dict:
            time_ms = ring_ms[operation] * slower[attention]
            its_gpus = 1 if attention == "one_gpu" else gpus
            outcome = {**_outcome(operation, time_ms), "tflops": flops / its_gpus / time_ms / 1e9}
            del outcome["errors"]
            return {"route": f"fake, {attention}", **outcome}

        found = {
            attention: {"missing": missing[name][attention]}
            if attention in missing[name]
            else outcome(attention)
            for attention in SHARDED_ATTENTIONS
        }
        if "time_ms" in found["one_gpu"]:
            found["one_gpu"]["slowest_gpu_ms"] = 1.02 * found["one_gpu"]["time_ms"]
        found["ring"] |= {
            "communication": {"ms": 1.0, "hidden": 0.875},
            "host_ms": 0.5 if operation == FORWARD else 1.5,
            "differences": {} if missing[name] else {operation.outputs[0].name: 0.003},
        }
        return {"flops": flops, "attentions": found}

    def cell(name: str) -> dict:
        shape = SHARDED[name].shape
        return {
            "name": name,
            "run": f"2000-01-01 {name}",
            "environment": {"before": state, "after": state},
            **{key: getattr(shape, key) for key in ("batch", "heads", "kv_heads", "head_dim")},
            "seq": shape.seq_q,
            "causal": SHARDED[name].causal,
            **{each.name: attentions(each, name) for each in (FORWARD, BACKWARD)},
        }

    def kernels(rank: int, *summed: str) -> list[dict]:
        found = (("exchange", 0, 900), ("attention", 20, 1800), ("attention", 1802, 3600))
        found += tuple((what, 3600 + 40 * n, 3640 + 40 * n) for n, what in enumerate(summed))
        return [
            {"what": what, "start_us": 3.0 * rank + start, "end_us": 3.0 * rank + end}
            for what, start, end in found
        ]

    return {
        "schema": SCHEMA,
        "device": "NVIDIA H200",
        "gpus": gpus,
        "dtype": "bf16",
        "sources": {step.name: {"code_sha256": step.code_sha256} for step in (V_STEP, B_STEP)},
        "sharded": sharded_hashes(),
        "link": [
            {"blocks": blocks, "bytes": mib << 20, "gb_per_s": rate * blocks}
            for mib, rate in ((16, 15.0), (512, 20.0))
            for blocks in (1, 2, 4)
        ],
        "cells": [cell(name) for name in missing],
        "timelines": {
            "forward": [kernels(rank, "merge") for rank in range(gpus)],
            "backward": [kernels(rank, "sum", "sum", "sum") for rank in range(gpus)],
        },
    }


def fake_static_record(step: Step) -> dict:
    """A static record of the step as it is now: two operations, one of them in two places."""
    places = [
        ("ldmatrix_x4", "ldmatrix_x4(a)", 256, 1024, 8192),
        ("ldmatrix_x4", "ldmatrix_x4(b)", 1024, 4096, 4096),
        ("store_uint4", "store_uint4(c)", 576, 2304, 2304),
    ]
    return {
        "schema": SCHEMA,
        "step": step.name,
        "code_sha256": step.code_sha256,
        "shape": fake_record(step)["shape"],
        "compiled": {
            "toolkit": "1.0",
            "arch": "sm_1",
            "resources": fake_record(step)["resources"],
            "sass": {f"attention_{step.operation.name}": {"HMMA": 128, "LDSM": 64, "FADD": 8}},
        },
        "banks": [
            {
                "operation": operation,
                "code": code,
                "accesses": accesses,
                "ideal": ideal,
                "wavefronts": wavefronts,
            }
            for operation, code, accesses, ideal, wavefronts in places
        ],
    }


def fake_timeline(step: Step, tiles: int | None = None) -> dict:
    """A timeline of the step as it is now, on the headline's tiles: the consumers take turns."""
    fake = _FAKE_TIMELINES[step.operation]
    tiles, period = tiles or fake["tiles"], fake["period"]

    def of_all_tiles(events: dict[str, int], later: int = 0) -> dict[str, list[int]]:
        return {
            event: [first + later + period * tile for tile in range(tiles)]
            for event, first in events.items()
        }

    consumers = {f"consumer {index}": index * period // 2 for index in range(2)}
    last = period * (tiles - 1)
    record = fake_record(step)
    keys = ("schema", "step", "code_sha256", "run", "device", "environment", "shape")
    return {
        **{key: record[key] for key in keys},
        "clocks": {
            "producer": of_all_tiles(fake["producer"]),
            **{who: of_all_tiles(fake["consumer"], later) for who, later in consumers.items()},
        },
        "outputs": {
            who: [
                {"tile": tiles - 1, "start": last + start + later, "end": last + end + later}
                for start, end in fake["outputs"]
            ]
            for who, later in consumers.items()
        },
    }


# The clocks of the first tile, and of an output as if it followed; of the first consumer.
_FAKE_TIMELINES = {
    FORWARD: {
        "tiles": 32,
        "period": 2200,
        "producer": {"load K": 0, "load V": 600},
        "consumer": {
            "start S": 1500,
            "end S": 2100,
            "end softmax": 3100,
            "start PV": 3800,
            "end PV": 4850,
        },
        "outputs": [(4900, 5600)],
    },
    BACKWARD: {
        "tiles": 64,
        "period": 3200,
        "producer": {"load Q": 0, "load dO": 600},
        "consumer": {
            "start S": 1500,
            "start dP": 1520,
            "end S": 1820,
            "end P": 2200,
            "end dP": 2220,
            "end dS": 2500,
            "start dV": 2520,
            "start dQ": 2620,
            "end dV": 2900,
            "start dK": 2920,
            "end dQ": 3200,
            "dQ stored": 3400,
            "dQ full": 3450,
            "end dK": 3600,
            "dQ read": 4000,
        },
        "outputs": [],
    },
}


def _errors(operation: Operation, of_first: float, of_others: float) -> dict[str, float]:
    first, *others = (output.name for output in operation.outputs)
    return {first: of_first, **dict.fromkeys(others, of_others)}


def _outcome(operation: Operation, time_ms: float) -> dict:
    return {
        "time_ms": time_ms,
        "time_p25_ms": time_ms * 0.99,
        "time_p75_ms": time_ms * 1.01,
        "tflops": operation.flops(operation.headline) / time_ms / 1e9,
        "samples_ms": [time_ms] * 3,
        "errors": _errors(operation, 0.001, 1e-6),
        "peak_memory_bytes": 68 * 10**6,
    }
