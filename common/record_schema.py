"""The form of every record, as far as tables, text and plots rely on it.

The modules of common/bench/ say what the keys mean. A form is a type, a tuple of types, a
predicate, a dict of forms by key, a list with the form of its items, AnyOf several, or, where it
depends on what a step computes, ByOperation, or on how large a map is, ByCells.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from .operation import BACKWARD, FORWARD, SIZES, Operation, operation_of
from .problem import GROUPS
from .timeline_events import TIMELINE_EVENTS

NUMBER = (int, float)
SHARES = ("rescaled", "redone")  # of the work tiles
OURS = "ours"  # attention(), beside its peers
WORKLOADS = ("layer", "gpt", "llama")  # that the speed of training is measured on
SDPA = "sdpa"  # torch's scaled_dot_product_attention, with the backend of its choice
TRAININGS = (OURS, SDPA)
CACHES = (
    "sliced",
    "concatenated",
    "layered",
    "fixed",
)  # of keys and values: how a call of decoding gets them
NAIVE = "sdpa_math"  # of the peers, torch's unfused code, which holds all scores
EFFICIENT = "sdpa_efficient"  # torch's memory-efficient code, a peer only where head_dim is large
FA3 = "flash_attention_3"  # of the peers, the one whose speed others are shares of
FA3_DETERMINISTIC = "flash_attention_3_deterministic"  # its backward with the sums in one order
PADDED = "padded_"  # in front of a step's name: it computes sequences as a batch, padded
RING = "ring"  # attention() of sharded/, beside its other way, one GPU and torch's
SHARDED_ATTENTIONS = (
    RING,
    "ulysses",
    "one_gpu",
    "context_parallel_allgather",
    "context_parallel_alltoall",
)
EACH = object()  # stands for all keys of a dict that the form does not name


class AnyOf(tuple):
    __slots__ = ()


@dataclass(frozen=True)
class ByOperation:
    """The form of the records of an operation's steps; "step" or "sources" tells which it is."""

    build: Callable[[Operation], dict]

    def of(self, record: object) -> dict:
        return self.build(operation_of(_first_step(record)))


@dataclass(frozen=True)
class ByCells:
    """The form of a record of square maps; "cells" tells how many rows and columns they have."""

    build: Callable[[int], dict]

    def of(self, record: object) -> dict:
        cells = record.get("cells") if isinstance(record, dict) else None
        return self.build(cells if _count(cells) else 1)


def _first_step(record: object) -> str:
    """The name of the step, or of the first of the steps, that a record is of; "" for none."""
    if not isinstance(record, dict):
        return ""
    sources = record.get("sources")
    first = next(iter(sources), "") if isinstance(sources, dict) else ""
    step = record.get("step", first)
    return step if isinstance(step, str) else ""


def _positive(value: object) -> bool:
    return _is(value, NUMBER) and 0 < value < math.inf


def _not_negative(value: object) -> bool:
    return _is(value, NUMBER) and 0 <= value < math.inf


def _count(value: object) -> bool:
    return _is(value, int) and value > 0


def _share(value: object) -> bool:
    return _is(value, NUMBER) and 0 <= value <= 1


def _is(value: object, form: type | tuple[type, ...]) -> bool:
    """isinstance, except that true and false are not numbers."""
    return isinstance(value, form) and (form is bool or not isinstance(value, bool))


def _some(form: object) -> Callable[[object], bool]:
    """Not empty, and of that form."""
    return lambda value: bool(value) and find_error(value, form) is None


def _many(count: int, form: object) -> Callable[[object], bool]:
    """A list of so many items of that form."""
    return lambda value: find_error(value, [form]) is None and len(value) == count


def _compiled(value: object) -> bool:
    """Resources and, where they were collected, instructions of the same kernels."""
    if find_error(value, _COMPILED):
        return False
    return isinstance(value["sass"], str) or value["sass"].keys() == value["resources"].keys()


def _latency_cell(value: object) -> bool:
    """The same calls were timed on the device and on the host."""
    if find_error(value, _LATENCY_CELL) or not _on_host(value):
        return False
    return value["device_us"].keys() == value["host_us"].keys()


def _on_host(value: object) -> bool:
    """Calls in as many turns as there are between runs of the loop."""
    if find_error(value, _ON_HOST):
        return False
    return {1 + len(turns) for turns in value["host_us"].values()} == {len(value["loop_rates"])}


def _decoding(value: object) -> bool:
    """Of these numbers of keys, with each kind of cache."""
    if find_error(value, {"keys": _many(2, _count)}) or not _on_host(value):
        return False
    return value["host_us"].keys() == set(CACHES)


def _of_each_training(value: object) -> bool:
    """As many numbers of one as of the other."""
    if find_error(value, dict.fromkeys(TRAININGS, _some([_positive]))):
        return False
    return len({len(value[name]) for name in TRAININGS}) == 1


def _forward_and_backward(value: object) -> bool:
    """The hashes of a step of each operation."""
    if find_error(value, {EACH: _CODE}):
        return False
    return [operation_of(name) for name in value] == [FORWARD, BACKWARD]


_MAYBE = (*NUMBER, type(None))
_STATE = {
    "sm_clock_mhz": _MAYBE,
    "power_w": _MAYBE,
    "temperature_c": _MAYBE,
    "throttle_reasons": AnyOf([type(None), [str]]),
}
_ENVIRONMENT = {"before": AnyOf([str, _STATE]), "after": AnyOf([str, _STATE])}
_KERNEL = dict.fromkeys(
    (
        "registers",
        "static_smem",
        "dynamic_smem",
        "stack_bytes",
        "spill_store_bytes",
        "spill_load_bytes",
    ),
    NUMBER,
)
_KERNELS = {EACH: _KERNEL}
_COMPILED = {
    "toolkit": str,
    "arch": str,
    "resources": _some(_KERNELS),
    "sass": AnyOf([str, {EACH: {EACH: int}}]),
}
_SHAPE = {
    **dict.fromkeys(("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"), _count),
    "dtype": str,
    "causal": bool,
}
_CODE = {"code_sha256": str}
_SOURCE = {"step": str, **_CODE}


_TIMED = {
    "time_ms": _positive,
    "time_p25_ms": _positive,
    "time_p75_ms": _positive,
    "samples_ms": [_positive],
    "peak_memory_bytes": NUMBER,
}


def _outcome(operation: Operation) -> dict:
    """Errors by output: at least the first one's, the only one that a peer returns."""
    return {**_TIMED, "tflops": _positive, "errors": {operation.outputs[0].name: NUMBER}}


def _experiment_record(operation: Operation) -> dict:
    outcome = _outcome(operation)
    peer = AnyOf([{"missing": str}, {"route": str, **outcome}])
    return {
        **_SOURCE,
        **outcome,
        "run": str,
        "device": str,
        "environment": _ENVIRONMENT,
        "shape": _SHAPE,
        "flops": _count,
        "least_bytes": _count,
        "resources": _some(_KERNELS),
        "errors": {output.name: NUMBER for output in operation.outputs},
        "torch_errors": {operation.outputs[0].name: NUMBER},
        "memory": [{"seq": _count, "bytes": _MAYBE}],
        "baseline": {**_SOURCE, **outcome},
        "peers": {FA3: peer, EACH: peer},
        "counters": AnyOf([str, _some({EACH: {EACH: _MAYBE}})]),
    }


def _step_record(operation: Operation) -> dict:
    form = _experiment_record(operation)
    return {**form, "baseline": AnyOf([type(None), form["baseline"]])}


Form = dict | ByOperation | ByCells  # of a whole record
RECORD = ByOperation(_step_record)
EXPERIMENT_RECORD = ByOperation(_experiment_record)
STATIC_RECORD = {
    **_SOURCE,
    "compiled": AnyOf([str, _compiled]),
    "shape": _SHAPE,
    "banks": [{"operation": str, "code": str, "accesses": _count, "ideal": int, "wavefronts": int}],
}


def _clocks(operation: Operation) -> Callable[[object], bool]:
    """Clocks by warpgroup and event, increasing from tile to tile; more tiles than are shown."""
    events = TIMELINE_EVENTS[operation]
    consumer = {event: [int] for event in events.consumer}
    form = {
        "producer": {event: [int] for event in events.producer},
        "consumer 0": consumer,
        EACH: consumer,
    }

    def fits(value: object) -> bool:
        if find_error(value, form):
            return False
        lists = [times for by_event in value.values() for times in by_event.values()]
        grow = all(earlier < later for times in lists for earlier, later in pairwise(times))
        tiles = {len(times) for times in lists}
        return grow and len(tiles) == 1 and min(tiles) > events.shown

    return fits


_OUTPUTS = [{"tile": int, "start": int, "end": int}]


def _timeline_record(operation: Operation) -> dict:
    return {
        **_SOURCE,
        "run": str,
        "device": str,
        "environment": _ENVIRONMENT,
        "shape": _SHAPE,
        "clocks": _clocks(operation),
        "outputs": {
            "consumer 0": _OUTPUTS,
            EACH: _OUTPUTS,
        },
    }


TIMELINE_RECORD = ByOperation(_timeline_record)
_CELL = {
    "name": str,
    "run": str,
    "environment": _ENVIRONMENT,
    **dict.fromkeys(("batch", "heads", "kv_heads", "seq", "head_dim"), _count),
    "causal": bool,
}


def cell_form(operation: Operation) -> dict:
    """Of a cell of a record of an operation's steps."""
    return {
        **_CELL,
        "tflops": {EACH: AnyOf([_positive, {"missing": str}])},
        "errors": {EACH: {operation.outputs[0].name: NUMBER}},
        "samples_ms": _some({EACH: [_positive]}),
    }


def _grid_record(operation: Operation) -> dict:
    return {
        "device": str,
        "dtype": str,
        "sources": {EACH: _CODE},
        "ceiling": {"matmul": str, "tflops": _positive, "samples_ms": _some([_positive])},
        "cells": _some([cell_form(operation)]),
    }


GRID_RECORD = ByOperation(_grid_record)


def _large_head_dim_record(operation: Operation) -> dict:
    return {
        **_grid_record(operation),
        "sources": lambda value: find_error(value, {EACH: _CODE}) is None and len(value) >= 2,
        "cells": _some([{**cell_form(operation), "routes": {EACH: str}}]),
    }


LARGE_HEAD_DIM_RECORD = ByOperation(_large_head_dim_record)
_COMPARED = {
    **dict.fromkeys(("time_ms", "time_p25_ms", "time_p75_ms", "tflops"), _positive),
    "samples_ms": _some([_positive]),
    "difference": _not_negative,
}
_DECODED = {**_COMPARED, "bytes_per_second": _positive}
DECODE_RECORD = {
    "device": str,
    "dtype": str,
    "sources": _some({EACH: _CODE}),
    "copy_bytes_per_second": _positive,
    "copy_samples_ms": _some([_positive]),
    "skipped": {EACH: str},
    "cells": _some(
        [
            {
                "name": str,
                "run": str,
                "environment": _ENVIRONMENT,
                **dict.fromkeys(SIZES, _count),
                "head_dim": _count,
                "routes": {EACH: str},
                "taken": str,
                "attentions": {EACH: AnyOf([{"missing": str}, _DECODED])},
            }
        ]
    ),
}
_SIDE = AnyOf([type(None), _not_negative])  # of a window
LENGTHS_RECORD = {
    "device": str,
    "dtype": str,
    "sources": _some({EACH: _CODE}),
    "skipped": {EACH: str},
    "cells": _some(
        [
            {
                "name": str,
                "run": str,
                "environment": _ENVIRONMENT,
                "title": str,
                "group": lambda value: value in GROUPS,
                **dict.fromkeys(("heads", "kv_heads", "head_dim", "visible"), _count),
                **dict.fromkeys(("sequences", "queries", "keys"), _count),
                **dict.fromkeys(("causal", "packed", "are_equal"), bool),
                "window": _many(2, _SIDE),
                "routes": {EACH: str},
                "slow": [str],
                "attentions": {EACH: AnyOf([{"missing": str}, _COMPARED])},
            }
        ]
    ),
}
_SHARE = AnyOf([type(None), _share])
DISTRIBUTIONS_RECORD = {
    "device": str,
    "sources": {EACH: _CODE},
    "repairs": AnyOf([type(None), _SOURCE]),
    "cells": _some(
        [{**cell_form(FORWARD), "dtype": str, "inputs": str, **dict.fromkeys(SHARES, _SHARE)}]
    ),
}
_SAMPLES = _some({EACH: _some([_positive])})
_ON_HOST = {"host_us": _some({EACH: _some([_some([_positive])])}), "loop_rates": [_positive]}
_LATENCY_CELL = {**_CELL, "device_us": _SAMPLES, "missing": {EACH: str}}
LATENCY_RECORD = {
    "device": str,
    "dtype": str,
    "sources": _some({EACH: _CODE}),
    "host": {EACH: str},
    "cells": _some([_latency_cell]),
    "decoding": _some({EACH: _decoding}),
    "fastest_loop_rate": _positive,
}


def _pictures_record(cells: int) -> dict:
    """Of heads with a map of as many rows and columns, and errors of as many groups."""
    errors = {
        **dict.fromkeys(("median", "maximum", "nrmse"), _not_negative),
        "groups": _many(cells, _not_negative),
    }
    by_who = dict.fromkeys(TRAININGS, errors)
    head = {
        "name": str,
        "causal": bool,
        "seq": lambda value: _count(value) and value % cells == 0,
        "head_dim": _count,
        "map": _many(cells, _many(cells, lambda value: _is(value, int) and value >= 0)),
        "errors": dict.fromkeys(("o", "dq", "dk", "dv"), by_who),
    }
    return {
        "cells": _count,
        "device": str,
        "dtype": str,
        "sources": _forward_and_backward,
        "made_by": {EACH: str},
        "trained": AnyOf([str, type(None)]),
        "heads": _some([head]),
    }


PICTURES_RECORD = ByCells(_pictures_record)

_TRAINING = {
    "route": str,
    **dict.fromkeys(("loss", "held_out_loss", "ms_per_step"), _positive),
    "peak_memory_bytes": NUMBER,
}
_CONFIG = ("layers", "heads", "head_dim", "context", "batch", "steps", "window", "parameters")
TRAIN_RECORD = {
    "run": str,
    "device": str,
    "environment": _ENVIRONMENT,
    "sources": _forward_and_backward,
    "text": {**dict.fromkeys(("files", "bytes", "held_out"), _count), "sha256": str},
    "config": dict.fromkeys(_CONFIG, _count),
    **dict.fromkeys(TRAININGS, _TRAINING),
    "losses": _of_each_training,
    "step_ms": _of_each_training,
}


def _workload(more: dict, of_attention: dict) -> dict:
    """Of what training was timed on: what it is, and how each attention did."""
    measured = {"route": str, **_TIMED, **of_attention}
    attentions = {OURS: measured, EACH: AnyOf([{"missing": str}, measured])}
    return {"run": str, "environment": _ENVIRONMENT, **more, "attentions": attentions}


_LAYER = _workload(
    {"shape": _SHAPE},
    {"tflops": _positive, "errors": dict.fromkeys(("o", "dq", "dk", "dv"), NUMBER)},
)
_TRAINING_STEP = _workload(
    {"config": {**dict.fromkeys(_CONFIG, _count), "tolerance": _positive}},
    {"losses": _some([_positive])},
)
TRAINING_SPEED_RECORD = {
    "device": str,
    "sources": _some({EACH: _CODE}),
    "models": {EACH: str},
    "workloads": dict(zip(WORKLOADS, (_LAYER, _TRAINING_STEP, _TRAINING_STEP), strict=True)),
}


_OVER_GPUS = {"route": str, **_TIMED, "tflops": _positive}
_RING = {
    **_OVER_GPUS,
    "communication": {"ms": _positive, "hidden": _share},
    "host_ms": _positive,
    "differences": {EACH: _not_negative},
}
_OVER_GPUS_OF_OPERATION = {
    "flops": _count,
    "attentions": {
        **dict.fromkeys(SHARDED_ATTENTIONS, AnyOf([{"missing": str}, _OVER_GPUS])),
        RING: _RING,
    },
}
_BY_OPERATION = (FORWARD.name, BACKWARD.name)
_INTERVALS = _some([{"what": str, "start_us": _not_negative, "end_us": _positive}])
SHARDED_RECORD = {
    "device": str,
    "gpus": _count,
    "dtype": str,
    "sources": _some({EACH: _CODE}),
    "sharded": {EACH: str},
    "link": _some([{"blocks": _count, "bytes": _count, "gb_per_s": _positive}]),
    "cells": _some([{**_CELL, **dict.fromkeys(_BY_OPERATION, _OVER_GPUS_OF_OPERATION)}]),
    "timelines": dict.fromkeys(_BY_OPERATION, _some([_INTERVALS])),  # by rank
}


def find_error(value: object, form: object, where: str = "the record") -> str | None:
    """The first error of a value that should have this form, or None."""
    if isinstance(form, (ByOperation, ByCells)):
        return find_error(value, form.of(value), where)
    if isinstance(form, AnyOf):
        fits = any(find_error(value, alternative) is None for alternative in form)
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            return f"{where} is {value!r:.40}, not an object"
        for key in form:
            if key is not EACH and key not in value:
                return f"{where} has no {key}"
        items = ((key, form.get(key, form.get(EACH))) for key in value)
        errors = (find_error(value[key], f, f"{where}: {key}") for key, f in items if f is not None)
        return next((error for error in errors if error), None)
    elif isinstance(form, list):
        fits = isinstance(value, list) and all(find_error(item, form[0]) is None for item in value)
    elif isinstance(form, (type, tuple)):
        fits = _is(value, form)
    else:
        fits = form(value)
    return None if fits else f"{where} cannot be {value!r:.40}"
