"""The timeline of a step's pipeline: when the warpgroups of one block do what.

timelines/vNN.patch, or bNN.patch, has one block of the step write the clock of its multiprocessor
to the step's last workspace, as int64 samples[tile][warpgroup][event], events as in
timeline_events.py: the consumers, then the producer; a tile's samples are padded to the tile in the
workspace's shape. The record is profiles/<gpu>/timelines/vNN.json:

clocks    of the producer and of each consumer, by event: a clock for each tile
outputs   of each consumer: the tiles after which it wrote O, each with the clocks between

The first tile's copy starts at clock 0.
"""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path

import torch

from verify.case import Case
from verify.inputs import Inputs

from ..catalog import find_step
from ..errors import UsageError
from ..paths import ROOT
from ..records import SCHEMA
from ..runtime.backend import Backend, empty_outputs
from ..runtime.gpu import GpuBackend
from ..step import Step
from ..timeline_events import TIMELINE_EVENTS, TimelineEvents
from .device_state import device_state, git_state, versions
from .trial import new_run

WARPGROUP = 128  # threads
RUNS = 10  # the last one counts: the clocks are up by then


def timeline_patch(step: Step) -> Path:
    """Where the patch of a step is, if it has one."""
    return Path(__file__).parent / "timelines" / f"{step.name}.patch"


def timeline_record(step: Step) -> dict:
    """The record of a step that has a patch, on the headline case."""
    source = timeline_patch(step)
    patched = find_step(source)
    backend = GpuBackend(poison=True)
    case = Case.of("headline", patched.operation.headline, patched.operation)
    inputs = case.make(backend.device)
    before = device_state()
    for _ in range(RUNS):
        samples = take_samples(backend, patched, case, inputs)
    after = device_state()
    return {
        "schema": SCHEMA,
        "step": patched.name,
        "source": source.relative_to(ROOT).as_posix(),
        "code_sha256": patched.code_sha256,
        "compile": backend.compile_command(patched, case.specialization),
        "run": new_run(),
        "git": git_state(),
        **versions(),
        "environment": {"before": before, "after": after},
        "shape": case.problem.as_record(),
        **read_samples(samples, TIMELINE_EVENTS[patched.operation]),
    }


def take_samples(backend: Backend, patched: Step, case: Case, inputs: Inputs) -> torch.Tensor:
    """The samples of one run, [tiles, warpgroups, events]; poison, -1, where there is none."""
    outputs = empty_outputs(patched.operation, inputs)
    *_, samples = backend.launch(patched, *inputs, *outputs, **case.arguments)
    descriptor = backend.descriptor(patched, case.specialization)
    *_, workspace = (each for each in descriptor.workspace if each.element_bytes)
    by_tile = samples.cpu().view(torch.int64).view(-1, workspace.shape[0].tile)
    # The kernel that samples has a producer beside its consumers; others have no more threads.
    warpgroups = max(kernel.threads for kernel in descriptor.kernels) // WARPGROUP
    events = TIMELINE_EVENTS[patched.operation].all
    return by_tile[:, : warpgroups * len(events)].reshape(-1, warpgroups, len(events))


def read_samples(samples: torch.Tensor, events: TimelineEvents) -> dict:
    """The record's clocks and outputs.

    Raises UsageError where a sample is missing or out of order.
    """
    consumers = samples.shape[1] - 1
    warpgroups = {"producer": consumers} | {f"consumer {i}": i for i in range(consumers)}
    clocks, outputs = {}, {}
    for who, index in warpgroups.items():
        taken = dict(zip(events.all, samples[:, index].T.tolist(), strict=True))
        clocks[who] = {
            event: taken[event]
            for event in (events.producer if who == "producer" else events.consumer)
        }
        for event, times in clocks[who].items():
            for tile, time in enumerate(times):
                _require_sample(time, event, who, tile)
        if who != "producer":
            of_outputs = {event: taken[event] for event in events.output}
            outputs[who] = _read_outputs(who, of_outputs)
            _check_order(who, clocks["producer"] | clocks[who], of_outputs, events)
    first = clocks["producer"][events.producer[0]][0]
    return {
        "clocks": {
            who: {event: [time - first for time in times] for event, times in by_event.items()}
            for who, by_event in clocks.items()
        },
        "outputs": {
            who: [
                {"tile": tile, "start": start - first, "end": end - first}
                for tile, (start, end) in by_tile.items()
            ]
            for who, by_tile in outputs.items()
        },
    }


def _read_outputs(who: str, taken: dict[str, list[int]]) -> dict[int, tuple[int, int]]:
    """When a consumer wrote its output, by the tile before it."""
    times = dict(enumerate(zip(*taken.values(), strict=True)))
    outputs = {tile: clocks for tile, clocks in times.items() if max(clocks) >= 0}
    for tile, clocks in outputs.items() or [*times.items()][-1:]:
        for event, time in zip(taken, clocks, strict=True):
            _require_sample(time, event, who, tile)
    return outputs


def _require_sample(time: int, event: str, who: str, tile: int) -> None:
    if time < 0:
        raise UsageError(f"no sample was taken of '{event}' of {who} in tile {tile}")


def _check_order(
    who: str,
    clocks: dict[str, list[int]],
    outputs: dict[str, list[int]],
    events: TimelineEvents,
) -> None:
    """Of a consumer's events and the producer's."""
    of_tiles = clocks | outputs
    in_a_tile = (
        (f"'{earlier}'", f"'{later}'", tile, *times)
        for earlier, later in events.order
        for tile, times in enumerate(zip(of_tiles[earlier], of_tiles[later], strict=True))
        if min(times) >= 0  # an output is written after some tiles only
    )
    from_tile_to_tile = (
        (f"'{event}'", "that of the next tile", tile, *times)
        for event in clocks
        for tile, times in enumerate(pairwise(clocks[event]))
    )
    for earlier, later, tile, time, later_time in chain(in_a_tile, from_tile_to_tile):
        if time >= later_time:
            raise UsageError(
                f"samples out of order: in tile {tile} of {who} {earlier} is at clock {time}, "
                f"{later} at {later_time}"
            )
