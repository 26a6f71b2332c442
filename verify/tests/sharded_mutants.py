"""Mistakes in sharded attention, each in one place: a mutant is made in a context, in which a case
then runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from common import sharded
from common.sharded import order, ring, ulysses
from verify.tests.sharded_cases import BOTH, Findings, make, square

Patch = pytest.MonkeyPatch
TURN = "TEST_SHARDED_MUTANTS"  # a variable of the environment: those whose turn it is, by name


def weights_swapped(patch: Patch) -> None:
    def merge(o, lse, part, part_lse, out):
        weight = torch.sigmoid(lse - part_lse).unsqueeze(-1)
        out.copy_(torch.lerp(o.float(), part.float(), weight))
        lse.copy_(torch.logaddexp(lse, part_lse))

    patch.setattr(ring, "merge", merge)


def lse_not_updated(patch: Patch) -> None:
    merge = ring.merge
    patch.setattr(ring, "merge", lambda o, lse, *rest, out: merge(o, lse.clone(), *rest, out=out))


def part_lost(patch: Patch) -> None:
    """A rank's first part of other keys."""
    add, seen = ring._Mean.add, []

    def add_but_the_first(self, *part):
        seen.append(self)
        if seen.count(self) > 1:
            add(self, *part)

    patch.setattr(ring._Mean, "add", add_but_the_first)


def keys_of_the_wrong_chunk(patch: Patch) -> None:
    def part(self, step):
        its = PART(self, step)
        if its.keys.stop is None:
            return its
        return replace(its, keys=slice(its.keys.stop, 2 * its.keys.stop))

    patch.setattr(ring.Ring, "part", part)


def queries_of_the_wrong_chunk(patch: Patch) -> None:
    """The first chunk's last row is taken for one of the second; forward's mean leaves it out."""

    def part(self, step):
        its = PART(self, step)
        return replace(its, first_query=max(its.first_query - 1, 0))

    patch.setattr(ring.Ring, "part", part)


def keys_taken_for_those_of_another_rank(patch: Patch) -> None:
    origin = ring.Ring.origin
    patch.setattr(ring.Ring, "origin", lambda self, step: origin(self, self.size - step))


def causal_lost_on_own_keys(patch: Patch) -> None:
    patch.setattr(ring.Ring, "part", lambda self, step: replace(PART(self, step), causal=False))


def contiguous_shards(patch: Patch) -> None:
    patch.setattr(
        sharded, "take_shard", lambda x, ranks, rank, dim: x.tensor_split(ranks, dim)[rank]
    )


def key_sums_not_added(patch: Patch) -> None:
    patch.setattr(ring, "_add_part", lambda arrived, of_keys, part: of_keys)


def key_sums_swapped(patch: Patch) -> None:
    add = ring._add_part
    patch.setattr(ring, "_add_part", lambda arrived, *rest: add(arrived[::-1], *rest))


def key_sums_lost_at_home(patch: Patch) -> None:
    pass_on = ring.Ring.pass_on

    def forget(self, lane, step, *sent):
        arrive = pass_on(self, lane, step, *sent)

        def arrive_at_home():
            keys, sums = arrive()
            return keys, [t.zero_() for t in sums] if step == 0 else sums

        return arrive_at_home

    patch.setattr(ring.Ring, "pass_on", forget)


def second_chunk_not_added(patch: Patch) -> None:
    """Its dq, which alone is added in a tensor's own dtype."""
    add = ring.add

    def add_in_float32(total, part):
        if total.dtype != part.dtype:
            add(total, part)

    patch.setattr(ring, "add", add_in_float32)


def counter_of_the_parts_before(patch: Patch) -> None:
    """All workspaces are those of the sums, so that no part gets a copy."""
    prepared = ring._prepared_parts

    class Every(int):
        __hash__ = None

        def __eq__(self, other):
            return True

    patch.setattr(ring, "_prepared_parts", lambda *wanted: prepared(*wanted)._replace(sums=Every()))


def query_sums_begin_again(patch: Patch) -> None:
    add = ring._SharedSums.add

    def begin_and_add(self, *part):
        self._workspaces[1].zero_()
        add(self, *part)

    patch.setattr(ring._SharedSums, "add", begin_and_add)


def sum_of_calls_begins_again(patch: Patch) -> None:
    """Of a step whose kernels are not launched by themselves."""
    add = ring._SumOfCalls.add

    def forget_and_add(self, *part):
        if self._sum is not None:
            self._sum.zero_()
        add(self, *part)

    patch.setattr(ring, "_prepared_parts", lambda *_: None)
    patch.setattr(ring._SumOfCalls, "add", forget_and_add)


def heads_in_another_order(patch: Patch) -> None:
    to_heads = ulysses.HeadExchange.to_heads
    patch.setattr(
        ulysses.HeadExchange, "to_heads", lambda self, x: to_heads(self, x.roll(1, dims=1))
    )


def positions_in_the_ranks_order(patch: Patch) -> None:
    patch.setattr(ulysses, "join_shards", lambda shards, dim: torch.cat(shards, dim))


def positions_not_given_back(patch: Patch) -> None:
    def in_order(x, ranks, to, dim):
        lengths = [sum(order.held_lengths(x.shape[dim], ranks, rank)) for rank in range(ranks)]
        return x.split(lengths, dim)[to]

    patch.setattr(ulysses, "take_shard", in_order)


PART = ring.Ring.part
# By the outputs that each makes wrong, and whether backward must be run to see it.
MUTANTS: dict[str, list[Callable[[Patch], None]]] = {
    "ring forward": [
        weights_swapped,
        lse_not_updated,
        part_lost,
        keys_of_the_wrong_chunk,
        keys_taken_for_those_of_another_rank,
        causal_lost_on_own_keys,
        contiguous_shards,
    ],
    "ring backward": [
        queries_of_the_wrong_chunk,
        key_sums_not_added,
        key_sums_swapped,
        key_sums_lost_at_home,
        second_chunk_not_added,
        counter_of_the_parts_before,
        query_sums_begin_again,
        sum_of_calls_begins_again,
    ],
    "ulysses forward": [
        heads_in_another_order,
        positions_in_the_ranks_order,
        positions_not_given_back,
    ],
}
MUTATED = {method: make("mutated", 3, square(1, 6, 3, 96), methods=[method])[0] for method in BOTH}


def run_mutants(device: str) -> Findings:
    findings, turn = {}, os.environ[TURN].split()
    for kind, mutants in MUTANTS.items():
        method, which = kind.split()
        case = replace(MUTATED[method], backward=which == "backward")
        findings[kind] = case.run(device)
        for mutant in mutants:
            if mutant.__name__ not in turn:
                continue
            with pytest.MonkeyPatch.context() as patch:
                mutant(patch)
                findings[mutant.__name__] = case.run(device)
    return findings
