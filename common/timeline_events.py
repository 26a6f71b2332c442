"""What a timeline samples of each tile that a block works on, by ladder, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, pairwise

from .operation import BACKWARD, FORWARD, Operation


@dataclass(frozen=True)
class TimelineEvents:
    """In the order of enum Event of the ladder's patches."""

    producer: tuple[str, ...]
    consumer: tuple[str, ...]
    output: tuple[str, ...]  # a consumer's too, where it writes its output: after some tiles only
    chains: tuple[tuple[str, ...], ...]  # each in the order of time, whatever the hardware does
    axis: str  # of whose rows a tile has some
    shown: int  # tiles in the diagram

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.producer, *self.consumer, *self.output)

    @property
    def order(self) -> tuple[tuple[str, str], ...]:
        """What comes before what in a tile."""
        return tuple(chain.from_iterable(map(pairwise, self.chains)))


TIMELINE_EVENTS: Mapping[Operation, TimelineEvents] = {
    FORWARD: TimelineEvents(
        producer=("load K", "load V"),
        consumer=("start S", "end S", "end softmax", "start PV", "end PV"),
        output=("start O", "end O"),
        chains=(
            (
                *("load K", "start S", "end S", "end softmax", "start PV", "end PV"),
                *("start O", "end O"),
            ),
            ("load V", "start PV"),
        ),
        axis="seq_k",
        shown=6,
    ),
    # The last two events of a consumer are those of the warp that adds its dQ to the sum.
    BACKWARD: TimelineEvents(
        producer=("load Q", "load dO"),
        consumer=(
            *("start S", "end S", "end P", "start dP", "end dP", "end dS"),
            *("start dV", "end dV", "start dK", "end dK", "start dQ", "end dQ"),
            *("dQ stored", "dQ full", "dQ read"),
        ),
        output=(),
        chains=(
            ("load Q", "start S", "end S", "end P", "start dV", "end dV"),
            ("load dO", "start dP", "end dP", "end dS", "start dK", "end dK"),
            ("end P", "end dS", "start dQ", "end dQ", "dQ stored", "dQ full", "dQ read"),
        ),
        axis="seq_q",
        shown=3,
    ),
}
