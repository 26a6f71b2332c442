"""Attention whose sequence is sharded: against attention() of the whole, and when ranks fail.

The ranks are processes, on the SIMT runtime over Gloo, or on GPUs: sharded_ranks.py. All tests of a
launch read what it has found.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from common import UsageError, attention, sharded
from common.operation import FORWARD
from common.sharded.order import chunk_lengths, held_chunks, held_lengths, join_shards, take_shard
from common.sharded.sums import add, merge
from verify.accuracy import Expected, compare, expect
from verify.case import Case
from verify.reference import attention_reference
from verify.tests import sharded_ranks as ranks_of
from verify.tests.patch_samples import chosen
from verify.tests.sharded_cases import (
    BOTH,
    CASES_OF_2,
    CASES_OF_4,
    OUTPUTS,
    SHORT_S,
    Findings,
    Sharded,
    cases_on_gpus,
    make,
    square,
)
from verify.tests.sharded_failures import DISAGREEMENTS, ENDS, INVALID, inputs_of_end
from verify.tests.sharded_mutants import MUTANTS, MUTATED
from verify.tests.sharded_ranks import LAUNCHES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SLOW_S = 10.0  # that a machine with other work may take beside the time-out
EACH_MUTANT = [(kind, mutant.__name__) for kind, mutants in MUTANTS.items() for mutant in mutants]


@pytest.fixture(scope="session")
def findings(tmp_path_factory, pytestconfig) -> Callable[[str], list[Findings]]:
    """Of a launch's ranks. It runs once, whichever of pytest's processes asks first."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # of one of pytest-xdist's processes
        folder = folder.parent
    mutants = [mutant for _, mutant in chosen(EACH_MUTANT, pytestconfig.getoption("mutants"))]

    @cache
    def find(name: str) -> list[Findings]:
        place = folder / name.replace(" ", "_")
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                ranks_of.start(name, place, mutants)
        found = ranks_of.read(name, place)
        if name != "ends":
            logs = [place / f"{rank}.log" for rank in range(LAUNCHES[name].ranks)]
            assert all(found), "\n".join(log.read_text() for log in logs if log.exists())
        return found

    return find


def positions(seq: int, ranks: int, rank: int) -> torch.Tensor:
    """Those that a rank holds, by the definition of the zigzag order."""
    chunks = torch.arange(seq).tensor_split(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def whole(case: Sharded, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The outputs, of the ranks' parts; NaN where no rank has any."""
    outputs = {}
    for name in OUTPUTS[: len(parts[0])]:
        which = int(name in ("dk", "dv"))
        seq = (case.case.shape.seq_q, case.case.shape.seq_k)[which]
        first = parts[0][name]
        shape = (*first.shape[:2], seq, *first.shape[3:])
        outputs[name] = torch.full(shape, torch.nan, dtype=first.dtype)
        for rank, part in enumerate(parts):
            if case.lengths is None:
                held = positions(seq, case.ranks, rank)
            else:
                held = torch.arange(seq).split(case.lengths[which])[rank]
            outputs[name][:, :, held] = part[name]
    return outputs


@cache
def expected_of(case: Case, device: str) -> tuple[Expected, Expected]:
    """Of forward and of backward; on the CPU."""
    inputs = case.make(device)
    both = expect(replace(case, operation=FORWARD), *inputs[:3]), expect(case, *inputs)
    return tuple(
        replace(
            each,
            outputs=tuple(t.cpu() for t in each.outputs),
            zeros={name: t.cpu() for name, t in each.zeros.items()},
        )
        for each in both
    )


def mistakes(case: Sharded, found: list[Findings], name: str = "", device: str = "cpu") -> list:
    """What check.py would say of the outputs, did they come from one call."""
    outputs = list(whole(case, [its[name or case.name] for its in found]).values())
    forward, backward = expected_of(case.case, device)
    of_forward = replace(case.case, operation=FORWARD)
    measures, errors = compare(of_forward, forward, outputs[:2])
    if case.backward:
        more, more_errors = compare(case.case, backward, outputs[2:])
        measures, errors = measures + more, errors + more_errors
    return errors + [f"{each.name} {each}" for each in measures if not each.passed]


def named(cases: list[Sharded]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@named(CASES_OF_2)
def test_2_ranks_compute_what_one_does(findings, case) -> None:
    assert mistakes(case, findings("cases of 2")) == []


@named(CASES_OF_4)
def test_4_ranks_compute_what_one_does(findings, case) -> None:
    assert mistakes(case, findings("cases of 4")) == []


@pytest.mark.gpu
@named(cases_on_gpus(1))
def test_a_gpu_computes_what_it_does_alone(findings, case) -> None:
    assert mistakes(case, findings("1 GPU"), device="cuda") == []


@pytest.mark.gpu
@named(cases_on_gpus(2))
def test_2_gpus_compute_what_one_does(findings, case) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    assert mistakes(case, findings("2 GPUs"), device="cuda") == []


@pytest.mark.gpu
def test_it_is_in_order_with_the_current_stream_and_lets_the_host_go_on(findings) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for found in findings("2 GPUs"):
        assert found["late"] == {"host waited": False, "equal": [True] * 3}
        assert found["late, out of order"]["equal"] != [True] * 3


@pytest.mark.gpu
def test_it_takes_no_more_memory_than_it_says(findings) -> None:
    """Of two ranks with as many heads of keys as of queries: o, a part of it, and k and v that
    arrive; dq, dk and dv, dk and dv that leave and that arrive (one or the other of half of the
    keys), dq in float32, which is b10's, and on one of the ranks dq of its second chunk. And some
    for each row, and v12's workspace, here a quarter of q.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for found in findings("2 GPUs"):
        assert 3 < found["memory"]["forward"] < 4.4
        assert 8 < found["memory"]["backward"] < 8.8


# That they can fail.


@pytest.mark.parametrize("kind", MUTANTS)
def test_what_mutants_are_made_of_is_right(findings, kind) -> None:
    method, which = kind.split()
    case = replace(MUTATED[method], backward=which == "backward")
    assert mistakes(case, findings("mutants"), kind) == []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_mutant_is_rejected:
        turn = chosen(EACH_MUTANT, metafunc.config.getoption("mutants"))
        metafunc.parametrize(("kind", "mutant"), turn)


def test_a_mutant_is_rejected(findings, kind, mutant) -> None:
    method, which = kind.split()
    case = replace(MUTATED[method], backward=which == "backward")
    assert mistakes(case, findings("mutants"), mutant) != []


# Failures.


def told(findings, launch: str, name: str) -> list[tuple[str, str]]:
    """The type and the message of each rank's error."""
    outcomes = [found[name] for found in findings(launch)]
    assert all(each["seconds"] < SHORT_S + SLOW_S for each in outcomes)
    return [(each["type"], each["message"]) for each in outcomes]


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(findings, name) -> None:
    errors = told(findings, "failures", name)
    assert {type_ for type_, _ in errors} == {"UsageError"}
    (message,) = {message for _, message in errors}
    assert message.startswith(f"the ranks must have the same {name}, not ")
    assert " on ranks 0, 2; " in message
    assert message.endswith(" on rank 1")


@pytest.mark.parametrize("name", INVALID)
def test_one_rank_with_invalid_inputs(findings, name) -> None:
    peer, (own_type, own), other_peer = told(findings, "failures", name)
    assert own_type == "UsageError"
    assert peer == other_peer
    assert peer[0] == "PeerError"
    begin = "rank 1 of 3 has failed: UsageError: "
    assert peer[1].startswith(begin)
    assert own.startswith(peer[1].removeprefix(begin))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("an unknown method", "method must be one of ring, ulysses, not 'rings'"),
        ("another call", "the ranks must have the same pass, not forward on ranks 0, 2; unshard"),
        ("not shard()'s lengths", "of 13 positions [5, 4, 4] on the ranks, not [4, 5, 4]"),
        ("keys and queries", "as many keys as queries, not 4 queries and 5 keys as rank 0"),
        ("heads that do not divide", "heads must be a multiple of 3 ranks, not 4"),
        ("kv_heads that do not divide", "kv_heads must be a multiple of 3 ranks, not 2"),
    ],
)
def test_what_is_wrong_on_all_ranks(findings, name, message) -> None:
    errors = told(findings, "failures", name)
    assert {type_ for type_, _ in errors} == {"UsageError"}
    assert all(message in text for _, text in errors)


def test_after_what_was_refused_the_group_works(findings) -> None:
    assert told(findings, "failures", "a right call") == 3 * [(None, "")]


NO_ANSWER = (
    f"of 3 has no answer from the others within {SHORT_S:g} s: one has ended, or does not make this"
)
NO_TENSORS = f"of 3 has lost another rank, or waited for it for {SHORT_S:g} s: "


@pytest.fixture
def end(request, findings) -> list[dict]:
    """How the ranks of one of ENDS have ended; compiled before, so that no time-out is over."""
    return [
        found.get("end") for found in findings("ends")[3 * list(ENDS).index(request.param) :][:3]
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    attention(*inputs_of_end()).sum().backward()


def named_ends(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("end", names, indirect=True)


def require_in_time(outcomes: list[dict]) -> None:
    assert all(each["seconds"] < SHORT_S + SLOW_S for each in outcomes)


@named_ends(
    "silent", "silent unshard", "no backward (ring)", "no backward (ulysses)", "silent at first"
)
def test_a_rank_that_does_not_call(end, request) -> None:
    first, silent, last = end
    assert silent["type"] is None
    require_in_time([first, last])
    for rank, error in ((0, first), (2, last)):
        assert error["type"] == "PeerError"
        assert error["message"].startswith(f"rank {rank} of 3 ")
        assert "one has ended, or does not make this call (" in error["message"]
        assert error["seconds"] >= 0.9 * SHORT_S


@named_ends("another pass")
def test_a_rank_in_another_pass(end) -> None:
    message = "the ranks must have the same pass, not backward on ranks 0, 2; forward on rank 1"
    assert [(each["type"], each["message"]) for each in end] == 3 * [("UsageError", message)]


@named_ends("another order")
def test_a_rank_in_the_backward_pass_of_another_call(end) -> None:
    assert {each["type"] for each in end} == {"UsageError"}
    assert all("the ranks must have the same call, not " in each["message"] for each in end)


@named_ends(*(name for name in ENDS if name.startswith("raises")))
def test_a_rank_that_fails_within(end) -> None:
    first, failed, last = end
    require_in_time(end)
    assert (failed["type"], failed["message"]) == ("RuntimeError", "a kernel has failed")
    message = "rank 1 of 3 has failed: RuntimeError: a kernel has failed"
    for error in (first, last):
        assert (error["type"], error["message"]) == ("PeerError", message)


@named_ends(*(name for name in ENDS if name.startswith("exit")))
def test_a_rank_that_exits(end) -> None:
    first, ended, last = end
    assert ended is None
    require_in_time([first, last])
    for rank, error in ((0, first), (2, last)):
        assert error["type"] == "PeerError"
        assert any(f"rank {rank} {text}" in error["message"] for text in (NO_ANSWER, NO_TENSORS))


def test_every_end_is_tested() -> None:
    kinds = ("silent", "no backward", "another pass", "another order", "raises", "exit")
    assert all(name.startswith(kinds) for name in ENDS)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: sharded.attention(x, x, x),
        lambda x: sharded.shard(x, dim=2),
        lambda x: sharded.unshard(x, dim=2),
    ],
    ids=["attention", "shard", "unshard"],
)
def test_without_ranks(call) -> None:
    with pytest.raises(UsageError, match=r"^there are no ranks: call .*init_process_group"):
        call(torch.ones(1, 1, 4, 8))


# Groups, shard() and unshard().


@pytest.mark.parametrize("name", ["None", "WORLD", "mesh of all"])
def test_groups_of_all_ranks(findings, name) -> None:
    case = make("group", 4, square(1, 4, 2, 21, 8), FP32)[0]
    assert mistakes(case, findings("groups"), name) == []


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("subgroup", [[0, 2], [1, 3]]),
        ("mesh['cp']", [[0, 1], [2, 3]]),
        ("mesh['dp']", [[0, 2], [1, 3]]),
        ("group backwards", [[2, 0], [3, 1]]),
    ],
)
def test_groups_of_some_ranks(findings, name, groups) -> None:
    case = make("group", 2, square(1, 4, 2, 21, 8), FP32)[0]
    found = findings("groups")
    for group in groups:
        own = [found[rank] for rank in group]
        assert [its[name] for its in own if isinstance(its[name], str)] == []
        assert mistakes(case, own, name) == []


def test_ranks_in_unequal_numbers_of_groups(findings) -> None:
    case = make("group", 3, square(1, 4, 2, 21, 8), FP32)[0]
    found = findings("lopsided")
    assert [its["lopsided"] for its in found if isinstance(its["lopsided"], str)] == []
    assert mistakes(case, found, "lopsided") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mesh of two", "must have one dimension, not 2: pass one of it, as in mesh['cp']"),
        ("no group", "group must be a process group of this rank, a DeviceMesh or None, not str"),
        ("another's group", "group must be a process group of this rank, a DeviceMesh or None"),
    ],
)
def test_what_is_no_group(findings, name, message) -> None:
    for found in findings("groups"):
        assert found[name]["type"] == "UsageError"
        assert message in found[name]["message"]


def test_shard_and_unshard(findings) -> None:
    assert [found["shards"] for found in findings("groups")] == 4 * [[]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too short", "a sequence of 3 cannot be sharded over 4 ranks"),
        ("shard's dim", "dim must be one of the 2 dimensions of x, not 2"),
        ("shard's dim -3", "dim must be one of the 2 dimensions of x, not -3"),
        ("unshard's dim", "dim must be one of the 2 dimensions of x, not 2"),
        ("unshard's gradient", "unshard() has no gradient: pass x.detach()"),
        ("unshard's parts", "of 13 positions [3, 3, 3, 4] on the ranks, not [3, 4, 3, 3]"),
        ("unshard's shape", "the ranks must have the same shape but for dim, not [2] on ranks 0"),
        ("unshard's dtype", "the ranks must have the same dtype, not torch.float32 on ranks 0, 2"),
        ("unshard's dims", "the ranks must have the same dim, not 0 on ranks 0, 2; 1 on ranks"),
    ],
)
def test_what_cannot_be_sharded(findings, name, message) -> None:
    for found in findings("groups"):
        error = found["errors"][name]
        assert error["type"] == "UsageError"
        assert message in error["message"]
        assert found["errors"]["unshard works"]["type"] is None


# The rest of torch.


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("what", ["checkpoint", "compile"])
def test_within_torch(findings, what, method) -> None:
    """A module with attention in its middle: its output and all gradients."""
    for found in findings("torch"):
        got, expected = found[f"{what} {method}"]
        assert len(got) == len(expected) == 6
        for t, other in zip(got, expected, strict=True):
            torch.testing.assert_close(t, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["autocast ring", "autocast ulysses", "backward twice", "no gradient"]
)
def test_the_same_bits(findings, name) -> None:
    """As with inputs that are cast by hand; as the first time; as where it is 0."""
    for found in findings("torch"):
        got, expected = found[name]
        for t, other in zip(got, expected, strict=True):
            torch.testing.assert_close(t, other, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_what_is_saved_may_come_back_with_other_strides(findings, causal) -> None:
    for found in findings("groups"):
        got, expected = found[f"saved elsewhere, causal={causal}"]
        for t, other in zip(got, expected, strict=True):
            torch.testing.assert_close(t, other, rtol=0, atol=0)


def test_autocast_casts_what_attention_casts(findings) -> None:
    for found in findings("torch"):
        of_one, of_all = found["autocast of float64"]
        assert (of_all["type"], of_all["message"]) == (of_one["type"], of_one["message"])


def test_a_second_derivative_is_an_error(findings) -> None:
    assert all(found["second derivative"]["type"] for found in findings("torch"))


def test_a_new_group_after_the_end_of_the_first(findings) -> None:
    case = make("again", 2, square(1, 2, 2, 21, 8), FP32)[0]
    for name in ("before", "after"):
        assert mistakes(case, findings("torch"), name) == []
    for found in findings("torch"):
        assert found["without ranks"]["type"] == "UsageError"


# The order.

MANY = [(seq, ranks) for ranks in (1, 2, 3, 4, 5, 8, 16) for seq in (*range(ranks, 70), 90, 1000)]


def test_every_position_is_held_once() -> None:
    for seq, ranks in MANY:
        x = torch.arange(seq)
        shards = [take_shard(x, ranks, rank, 0) for rank in range(ranks)]
        assert torch.cat(shards).sort().values.equal(x)
        assert all(map(torch.equal, shards, (positions(seq, ranks, r) for r in range(ranks))))
        assert join_shards(shards, 0).equal(x)


def test_lengths() -> None:
    for seq, ranks in MANY:
        lengths = chunk_lengths(seq, ranks)
        assert lengths == [len(c) for c in torch.arange(seq).tensor_split(2 * ranks)]
        held = [held_lengths(seq, ranks, rank) for rank in range(ranks)]
        assert sum(map(sum, held)) == seq
        assert all(first >= 1 and first - second in (0, 1) for first, second in held)
        assert [len(positions(seq, ranks, rank)) for rank in range(ranks)] == [*map(sum, held)]


def test_a_causal_mask_gives_every_rank_the_same_work() -> None:
    """In halves of a square of chunks."""
    for ranks in range(1, 20):
        work = [sum(2 * c + 1 for c in held_chunks(ranks, rank)) for rank in range(ranks)]
        assert work == [4 * ranks] * ranks
        chunks = [c for rank in range(ranks) for c in held_chunks(ranks, rank)]
        assert sorted(chunks) == [*range(2 * ranks)]


# The mean and the sum of parts.


def parts_of(cuts: list[int], logits: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """o and lse, float32, of the keys between the cuts; then of all."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 40, 16, generator=rng) for _ in "qkv")
    bounds = [0, *cuts, 40]
    ranges = [*pairwise(bounds), (0, 40)]
    parts = [
        attention_reference(
            q, k[:, :, i:j], v[:, :, i:j], causal=False, softmax_scale=logits * 16**-0.5
        )
        for i, j in ranges
    ]
    return [(o.float(), lse.float()) for o, lse in parts]


@pytest.mark.parametrize("logits", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("cuts", [[20], [1], [39], [7, 30], [13, 14], [5, 11, 29]])
def test_merged_parts_are_the_whole(cuts, logits) -> None:
    (o, lse), *others, (whole_o, whole_lse) = parts_of(cuts, logits)
    for part, part_lse in others:
        merge(o, lse, part, part_lse, out=o)
    # A weight is as wrong as its lse, which each merge rounds.
    rounding = len(cuts) * torch.finfo(FP32).eps * whole_lse.abs().max().item()
    torch.testing.assert_close(o, whole_o, rtol=0, atol=1e-6 + 2 * rounding)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-6 + 2 * rounding)


def test_merging_does_not_depend_on_the_order() -> None:
    (o, lse), (part, part_lse), _ = parts_of([20])
    other, other_lse = part.clone(), part_lse.clone()
    merge(other, other_lse, o, lse, out=other)
    merge(o, lse, part, part_lse, out=o)
    torch.testing.assert_close(o, other)
    torch.testing.assert_close(lse, other_lse)


def test_rows_that_have_seen_no_key_take_the_part() -> None:
    (o, lse), (part, part_lse), _ = parts_of([20])
    o[:, :, ::2], lse[:, :, ::2] = 0, -torch.inf
    merge(o, lse, part, part_lse, out=o)
    assert o[:, :, ::2].equal(part[:, :, ::2])
    assert lse[:, :, ::2].equal(part_lse[:, :, ::2])
    assert lse.isfinite().all()
    assert o.isfinite().all()


def test_it_rounds_once() -> None:
    (o, lse), (part, part_lse), _ = parts_of([20])
    kept = torch.empty_like(o)
    merge(o, lse.clone(), part.bfloat16(), part_lse, out=kept)
    out = torch.empty_like(o, dtype=BF16)
    merge(o, lse, part.bfloat16(), part_lse, out=out)
    assert out.equal(kept.bfloat16())


def rows_of_a_view(dtype: torch.dtype, head_dim: int, rng: torch.Generator) -> torch.Tensor:
    t = torch.randn(2, 200, 3, head_dim, generator=rng, device="cuda").to(dtype)
    return t.transpose(1, 2)[:, :, 63:]


HEAD_DIMS = pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])


@pytest.mark.gpu
@HEAD_DIMS
@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (FP16, FP16), (FP32, BF16), (FP32, FP32)], ids=str
)
def test_the_kernel_adds_as_torch_does(head_dim, dtypes) -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    total, part = (rows_of_a_view(dtype, head_dim, rng) for dtype in dtypes)
    expected = total._base.clone()
    expected.transpose(1, 2)[:, :, 63:].add_(part)
    add(total, part)
    assert total._base.equal(expected)


@pytest.mark.gpu
@HEAD_DIMS
@pytest.mark.parametrize(
    "dtypes",
    [(BF16, BF16, BF16), (FP16, FP16, FP32), (FP32, BF16, FP32), (FP32, FP16, FP16), (FP32,) * 3],
    ids=str,
)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_kernel_merges_as_torch_does(head_dim, dtypes, in_place) -> None:
    """Rows of o, part and out: those of a view, stored [batch, seq, heads, head_dim]."""
    if in_place and dtypes[0] != dtypes[2]:
        pytest.skip("out is not o")
    rng = torch.Generator("cuda").manual_seed(0)
    o, part, out = (rows_of_a_view(dtype, head_dim, rng) for dtype in dtypes)
    lse, part_lse = (
        10 * torch.randn(2, 3, 200, generator=rng, device="cuda")[:, :, 63:] for _ in "12"
    )
    lse[0, 0, :5] = -torch.inf
    out = o if in_place else out
    before = out._base.clone()
    expected, expected_lse = out.cpu(), lse.cpu()
    arguments = [t.cpu() for t in (o, part, part_lse)]
    its_o = expected if in_place else arguments[0]
    merge(its_o, expected_lse, *arguments[1:], out=expected)
    merge(o, lse, part, part_lse, out=out)
    # float32: exp and sigmoid of a GPU are wrong by some units in the last place.
    tolerance = max(torch.finfo(dtypes[2]).eps, 1e-6)
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=4e-6)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-6, atol=4e-6)
    assert out._base[:, :63].equal(before[:, :63])
