"""Calls on more multiprocessors than the checker's, and the mutants that only these reject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Protocol

import pytest
import torch

from common.patch import read_patch
from common.paths import ROOT
from common.runtime import cpu
from common.runtime.cpu import CpuBackend
from common.step import Step, read_step
from verify.case import Case
from verify.check import CaseResult, check_case
from verify.tests.patch_samples import chosen
from verify.tests.small_kernels import write_step
from verify.tests.test_mutants import flags_of_mutant


@dataclass(frozen=True)
class Call:
    case: Case
    multiprocessors: int


def check_call(step: Step, call: Call) -> CaseResult:
    """Against the oracle, and a program's second call, in another order, against the first."""
    backends = CpuBackend(0), CpuBackend(2)
    for backend in backends:
        backend.multiprocessors = call.multiprocessors
    backends[1].calls = 2
    return check_case(step, call.case, backends)


def check_bounds(step: Step, call: Call) -> None:
    """Of arrays, with a sanitizer: past a row of a part is the next row, or its m, and what a
    thread reads there is not written.
    """
    backend = CpuBackend(sanitize=True)
    backend.multiprocessors = call.multiprocessors
    result = check_case(step, call.case, [backend])
    assert result.passed, str(result)


def write_beside(folder: Path, step: Step, name: str, body: str) -> Step:
    """A step whose kernel has that body, beside all of another, or of a mutant, but for what the
    runtime reads of it.
    """
    its = ("launch_descriptor", "kernels_start_early", "l2_fetch_bytes", "simt_step")
    lines = [f"#define {symbol} {symbol}_of_schedule" for symbol in its]
    lines += [step.path.read_text(), *(f"#undef {symbol}" for symbol in its), _DIVIDE]
    return write_step(
        folder,
        name,
        body,
        globals_="\n".join(lines),
        layout="int nothing;",
        takes_divisors=True,
    )


class Sizes(Protocol):
    """Of a call that a schedule is asked about."""

    blocks: int
    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    causal: bool

    @property
    def seq_k(self) -> int: ...


# What the host leaves of a call on so many multiprocessors, as pack.cpp does of tensors: here there
# are none of these sizes.
_DIVIDE = """
void divide(DivisorsParams& p, const KernelLaunch& kernel, uint32_t multiprocessors) {
    const auto divisor = [](int64_t value) {
        const uint32_t counted = min(value, int64_t(UINT32_MAX));
        return Divisor{counted, UINT32_MAX / counted};
    };
    const int group = p.heads / p.kv_heads, padded_q = 0;
    const int sizes[] = {p.batch, p.heads,  p.kv_heads, p.seq_q,
                         p.seq_k, padded_q, HEAD_DIM,   group * p.seq_q};
    int64_t works = 1, key_tiles = 1;
    for (int axis = 0; axis < 4; ++axis) {
        const Extent extent = kernel.grid[axis];
        const int64_t tiles = extent.tile ? (sizes[extent.size] - 1) / extent.tile + 1 : 1;
        p.tiles[axis] = divisor(tiles);
        (extent.size == SEQ_K ? key_tiles : works) *= tiles;
    }
    const int64_t blocks = min(works * key_tiles, int64_t(multiprocessors));
    const int64_t rounds = (works - 1) / blocks + 1;
    const bool is_even = 10 * works >= 9 * rounds * blocks;
    p.works = divisor(works), p.blocks = divisor(blocks), p.group = divisor(group);
    p.split_keys = !is_even && key_tiles > 1 && works * key_tiles <= UINT32_MAX;
}
"""
# The call's parameters; the scenario is the index of its sizes.
_SHAPE = """
    constexpr int SIZES[][5] = {{{sizes}}};
    if (t > 0) return;
    const int* const size = SIZES[int(p.softmax_scale)];
    DivisorsParams shape = p;
    shape.batch = size[0], shape.heads = size[1], shape.kv_heads = size[2];
    shape.seq_q = size[3], shape.seq_k = size[4];
    divide(shape, launch_descriptor_of_schedule.kernels[0], gridDim.x);
"""


def write_schedule(folder: Path, step: Step, body: str, calls: Sequence[Sizes]) -> Step:
    """A step each of whose blocks leaves numbers in lse: what body finds for `shape`."""
    sizes = ", ".join(
        f"{{{size.batch}, {size.heads}, {size.kv_heads}, {size.seq_q}, {size.seq_k}}}"
        for size in calls
    )
    return write_beside(folder, step, "schedule", _SHAPE.format(sizes=sizes) + body)


def ask_schedule(
    schedule: Step, sizes: Sizes, scenario: int, width: int, head_dim: int = 8
) -> list[list[int]]:
    """The numbers of each block, of which there is room for so many."""
    q = torch.zeros(1, 1, sizes.blocks, head_dim, dtype=torch.float16)
    lse = torch.zeros(sizes.blocks * width)
    CpuBackend().launch(
        schedule, q, q, q, torch.zeros_like(q), lse, causal=sizes.causal, softmax_scale=scenario
    )
    return lse.view(sizes.blocks, width).int().tolist()


def segments(works: int, tiles: int, blocks: int) -> list[tuple[int, int, int, int]]:
    """How v13 shares out the tiles of keys of so many work tiles: (block, work tile, first tile,
    end) of each segment, in order.
    """
    if blocks % works == 0:
        # As many parts of each, which have as many tiles, or one more.
        parts = blocks // works
        cuts = [work * tiles + n * tiles // parts for work in range(works) for n in range(parts)]
        cuts.append(works * tiles)
    else:
        # The first blocks have as many tiles as the others, or one more.
        share, longer = divmod(works * tiles, blocks)
        cuts = [share * block + min(block, longer) for block in range(blocks + 1)]
    found = []
    for block, (begin, end) in enumerate(pairwise(cuts)):
        for work in range(begin // tiles, (end - 1) // tiles + 1):
            before = work * tiles
            found.append((block, work, max(begin - before, 0), min(end - before, tiles)))
    return found


class OnMoreMultiprocessors:
    """Tests of a step's calls, checks of what no output tells, and that its mutants are rejected
    whose cases name these calls and checks, or tests that the file has itself. A file has a
    subclass, whose name begins with Test.
    """

    step: Step
    calls: Mapping[str, Call]
    tests: Mapping[str, Callable[[Step], None]]
    checks: ClassVar[Mapping[str, Callable[[Step], None]]] = {}
    folder: str  # of the mutants, in verify/mutants

    @classmethod
    def mutants(cls) -> list[Path]:
        return sorted((ROOT / "verify" / "mutants" / cls.folder).glob("*.patch"))

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """The mutants whose turn it is, the calls that these name, and those whose turn it is."""
        sample = metafunc.config.getoption("mutants")
        paths = chosen(cls.mutants(), sample)
        if "path" in metafunc.fixturenames:
            metafunc.parametrize("path", paths, ids=[path.stem for path in paths])
        if "name" in metafunc.fixturenames:
            named = {name for path in paths for name in read_patch(path).header["cases"].split()}
            turns = chosen(sorted(cls.calls), sample)
            names = [name for name in cls.calls if name in named or name in turns]
            metafunc.parametrize("name", names)
        if "check" in metafunc.fixturenames:
            metafunc.parametrize("check", cls.checks)

    def test_call(self, name: str) -> None:
        result = check_call(self.step, self.calls[name])
        assert result.passed, str(result)

    def test_accepted(self, check: str) -> None:
        self.checks[check](self.step)

    def test_every_patch_applies(self) -> None:
        known = self.calls.keys() | self.tests.keys() | self.checks.keys()
        for path in self.mutants():
            patch = read_patch(path)
            patch.apply()
            assert patch.header["breaks"]
            assert {*patch.header["cases"].split()} <= known

    def test_rejected(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By each of the calls, checks and tests that the patch names as its cases."""
        patch = read_patch(path)
        mutant = read_step(patch.write())
        assert mutant.name == path.stem
        monkeypatch.setattr(cpu, "STEP_FLAGS", flags_of_mutant(mutant))
        for name in patch.header["cases"].split():
            if test := self.tests.get(name) or self.checks.get(name):
                with pytest.raises(AssertionError):
                    test(mutant)
                continue
            CpuBackend(0).build(mutant, self.calls[name].case.specialization)
            result = check_call(mutant, self.calls[name])
            assert result.verdict == "FAIL", f"not rejected: {result}"
