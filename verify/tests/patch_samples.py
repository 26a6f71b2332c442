"""Which mutants and experiments run: all take longer than a push should wait, so `make test` runs a
sample. So it does of whatever else takes turns: steps rewritten for compute-sanitizer, cases with
wrong lengths, calls on more multiprocessors, mutants of sharded attention.

Sample n is every 64th, by name, from the n-th on, and which one runs follows from the number of
commits: 64 commits in a row run all, and a commit always the same ones.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import TypeVar

from verify.turn import number_of_commits

T = TypeVar("T")
# So many that a sample takes about a tenth of all tests' time. The mutants of a step stand
# together, so that a sample has some of most steps.
SAMPLES = 64


def parse_mutants(value: str) -> int | None:
    """The number of the sample that --mutants=VALUE asks for; None where that is all."""
    if value == "all":
        return None
    if value == "sample":
        return number_of_commits() % SAMPLES
    if value.isdecimal():
        return int(value) % SAMPLES
    raise ArgumentTypeError(f"takes all, sample or the number of a sample, not '{value}'")


def chosen(variants: Sequence[T], sample: int | None) -> Sequence[T]:
    """Those of the sample; given are all, sorted."""
    return variants if sample is None else variants[sample::SAMPLES]


def describe(sample: int | None) -> str:
    """A line for pytest's header."""
    if sample is None:
        return "mutants and experiments: all"
    return (
        f"mutants and experiments: sample {sample} of 0 to {SAMPLES - 1}; "
        f"make test MUTANTS={sample} runs it again, MUTANTS=all runs all"
    )
