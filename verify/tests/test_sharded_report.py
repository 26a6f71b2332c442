"""What reads the records of attention over several GPUs: tables, numbers, plot; and the model."""

from __future__ import annotations

import json
import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from common.bench.sharded import TIMELINE
from common.catalog import find_step
from common.errors import UsageError
from common.operation import BACKWARD, FORWARD, OPERATIONS
from common.problem import SHARDED, Problem, Shape
from common.record_schema import SHARDED_ATTENTIONS, SHARDED_RECORD, find_error
from common.records import write_record
from common.report import ring_model, ring_timeline, rows, sharded_tables
from common.report.diagrams import figures, ring
from common.report.diagrams.svg import EMPTY, TINTS
from common.report.expressions import evaluate
from common.report.markdown import PAGE, REQUIRED_TABLES, regenerate, render
from common.report.record_set import RecordSet, load_record_set, single_gpus
from common.report.ring_model import (
    NETWORK_BYTES_PER_S,
    Machine,
    hbm_bytes_per_s,
    link_bytes_per_s,
    machine_of,
    merged_bytes,
    predict,
    sent_bytes,
)
from common.report.ring_timeline import render_ring_timeline
from common.ring_lanes import MOST_BLOCKS, blocks_to_hide, blocks_used, choose_blocks
from common.sharded import ring as sharded_ring
from common.sharded.order import held_chunks
from common.sharded.ring import Options, Ring, Shard
from verify.tests.drawings import boxes, clashes, texts
from verify.tests.fake_records import B_STEP, V_STEP, fake_record, fake_sharded

CAUSAL = SHARDED["h16_causal_131072"]


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project with the records of these numbers of GPUs, changed."""

    def load(*gpus: int, **changes) -> RecordSet:
        for count in gpus:
            path = tmp_path / f"profiles/h200x{count}/sharded.json"
            write_record(path, fake_sharded(count) | changes)
        return load_record_set(tmp_path / "profiles/h200", tmp_path)

    return load


def cells_of(table: str) -> list[dict[str, str]]:
    """The rows of a table's text, by the titles of the columns."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    titles, _, *found = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    return [dict(zip(titles, row, strict=True)) for row in found]


# ---- records


def test_the_fake_record_is_one():
    assert find_error(fake_sharded(), SHARDED_RECORD) is None


def test_records_of_several_gpus_belong_to_the_gpu(record_set):
    loaded = record_set(4, 2)
    assert [*loaded.sharded] == [2, 4]
    assert loaded.sharded[4].record["gpus"] == 4
    assert loaded.folder_of(4).name == "h200x4"
    folder = loaded.folder.parent
    assert load_record_set(folder / "h20", folder.parent).sharded == {}
    write_record(folder / "h200xlx8/sharded.json", fake_sharded(8))
    assert [*record_set().sharded] == [2, 4]
    folders = {folder / name for name in ("h200", "h200x2", "h200x4", "geforce_gtx480")}
    (folder / "geforce_gtx480").mkdir()
    assert single_gpus(folders) == {folder / "h200", folder / "geforce_gtx480"}


def test_a_record_is_stale_where_its_code_has_changed(record_set):
    assert not record_set(2).sharded[2].stale
    sources = {V_STEP.name: {"code_sha256": "0" * 64}}
    assert record_set(2, sources=sources).sharded[2].stale
    assert record_set(2, sharded={"sharded/ring.py": "0" * 64}).sharded[2].stale


def test_a_malformed_record_is_named(record_set):
    with pytest.raises(UsageError, match=r"h200x2/sharded\.json: the record: link"):
        record_set(2, link=[])


# ---- tables


def test_table_of_a_number_of_gpus(record_set):
    table = sharded_tables.sharded(record_set(2))
    assert table.startswith("2 × NVIDIA H200:\n\n| N |")
    first, second, third, *_ = cells_of(table)
    flops = FORWARD.flops(SHARDED["h16_causal_32768"])
    assert first == {
        "N": "32768",
        "Heads": "16",
        "Mask": "causal",
        "Operation": "forward",
        "Ring (ms)": "10",
        "TFLOP/s a GPU": f"{flops / 2 / 10e9:.4g}",
        "Over 2 × one GPU": "0.950 ×",
        "Over context_parallel": "**1.200 ×**",
        "Ulysses (ms)": "11",
        "Hidden": "88 %",
        "Peak memory a GPU, ring / one GPU": "68.0 MB / 68.0 MB",
    }
    assert (second["Operation"], second["Ring (ms)"]) == ("backward", "25")
    assert third["Over context_parallel"] == "**2.000 ×**"  # the other one is missing
    for told in (
        f"Steps {V_STEP.name} and {B_STEP.name}. ",
        "of torch's two ways to rotate (fake);",
        "Median of 3 interleaved rounds,",
        "which takes 1 ms in the median row and",
        "Backward's FLOPs are 2.5 times forward's. ",
        "at most 3.0e-03 of their",
        "SM clock 1000 → 1000 MHz",
        "context_parallel_alltoall: out of memory, a call takes too long; ",
        "ulysses, one_gpu, context_parallel_allgather: a call takes too long. ",
    ):
        assert told in table


def test_what_is_missing(record_set):
    loaded = record_set(2)
    *_, last = rows.sharded(loaded, 2)
    missing = ("of_ideal", "over_context_parallel", "ulysses_ms")
    assert {last[key] for key in missing} == {None}
    assert [*last["missing"]] == list(SHARDED_ATTENTIONS[1:])
    assert json.loads(json.dumps(rows.sharded(loaded, 2) + rows.sharded_model(loaded)))
    *_, last = cells_of(sharded_tables.sharded(loaded))
    assert (last["Heads"], last["Over 2 × one GPU"]) == ("64/8", "missing")
    assert last["Peak memory a GPU, ring / one GPU"] == "68.0 MB / missing"


def test_long_times_are_whole_milliseconds(record_set):
    cells = fake_sharded()["cells"]
    cells[0]["forward"]["attentions"]["ring"]["time_ms"] = 23683.82
    assert cells_of(sharded_tables.sharded(record_set(2, cells=cells)))[0]["Ring (ms)"] == "23684"


def test_a_call_that_was_timed_once_is_told(record_set):
    cells = fake_sharded()["cells"]
    cells[-1]["forward"]["attentions"]["ring"]["samples_ms"] = [10.0]
    table = sharded_tables.sharded(record_set(2, cells=cells))
    assert "Median of 1 to 3 interleaved rounds, one where that takes long, L2" in table
    table = sharded_tables.sharded(record_set(2, cells=cells[-1:]))
    assert "two ways to rotate (missing)" in table
    assert "differ from" not in table


def test_each_number_of_gpus_has_a_table(record_set):
    parts = sharded_tables.sharded(record_set(2, 4)).split("4 × NVIDIA H200:")
    assert len(parts) == 2
    assert cells_of(parts[1])[0]["Over 4 × one GPU"] == "0.950 ×"


@pytest.mark.parametrize("table", [sharded_tables.sharded, sharded_tables.sharded_model])
def test_tables_without_numbers(record_set, table):
    assert table(record_set()) == "not measured"
    text = table(record_set(2, sharded={}))
    assert text.removeprefix("2 × NVIDIA H200:").strip() == "stale"


def test_a_stale_record_leaves_the_others(record_set, tmp_path):
    record_set(2, sharded={})
    loaded = record_set(4)
    of_two, of_four = sharded_tables.sharded(loaded).split("4 × NVIDIA H200:")
    assert of_two == "2 × NVIDIA H200:\n\nstale\n\n"
    assert len(cells_of(of_four)) == 6
    assert "from the record of 4 × NVIDIA H200" in sharded_tables.sharded_model(loaded)
    measured = [row["Forward: measured"] for row in cells_of(sharded_tables.sharded_model(loaded))]
    assert measured[:3] == ["stale", "0.950", "not measured"]


def test_markers(record_set, tmp_path, monkeypatch):
    monkeypatch.setitem(REQUIRED_TABLES, "text.md", ())
    loaded, path = record_set(2), tmp_path / "text.md"
    markers = [f"table: {name}" for name in ("sharded", "sharded h100", "sharded_model")]
    number = "sharded_x2.h16_causal_32768.forward.ring.of_ideal : .2f"
    markers += [f"= {number}", f"= h200 {number}", f"= h100 {number}"]
    path.write_text("".join(f"<!-- {marker} --><!-- end -->" for marker in markers))
    filled = render(path, loaded, []).split("<!-- end -->")
    here, other, model, *numbers = (text.split(" -->")[1].strip() for text in filled[:-1])
    assert here == sharded_tables.sharded(loaded)
    assert other == "not measured"
    assert model == sharded_tables.sharded_model(loaded)
    assert numbers == ["0.95", "0.95", "not measured"]


def test_numbers_of_another_gpu(record_set, tmp_path):
    write_record(tmp_path / "profiles/h100x2/sharded.json", fake_sharded())
    other = load_record_set(tmp_path / "profiles/h100", tmp_path)
    path = "sharded_x2.h16_causal_32768.forward"
    ratio = f"{path}.one_gpu.time_ms / {path}.ring.time_ms : .2f"
    assert evaluate(f"h100 {ratio}", record_set(), [other]) == "1.90"
    assert evaluate(f"h100 ({path}.ring.time_ms - 1) : .1f", record_set(), [other]) == "9.0"
    assert evaluate(ratio, record_set(), [other]) == "not measured"
    assert evaluate(f"rtx_4090 {ratio}", record_set(), [other]) == "not measured"
    with pytest.raises(UsageError, match="no 'rong'; there are link"):
        evaluate("rtx_4090 sharded_x2.rong.forward.ring", record_set(), [other])
    with pytest.raises(UsageError, match="does not read like"):
        evaluate(f"h100 {path}.ring.time_ms h200", record_set(), [other])


def other_tables(worklog: str) -> list[str]:
    return [table for table in worklog.split("<!-- table: ") if not table.startswith("sharded")]


def test_such_a_record_adds_its_tables_and_plot_and_nothing_else(record_set, tmp_path):
    """Nothing to other tables, to README.md, to the page and its explorer."""
    for name, required in REQUIRED_TABLES.items():
        text = "".join(f"<!-- table: {table} --><!-- end -->\n" for table in required)
        (tmp_path / name).write_text(text)
    write_record(tmp_path / "profiles/h200/v01.json", fake_record(find_step("v01")))
    assert PAGE in regenerate(tmp_path)
    before = other_tables((tmp_path / "worklog.md").read_text())
    record_set(2)
    plots = [f"profiles/h200x2/ring_timeline{dark}.svg" for dark in ("", "_dark")]
    assert regenerate(tmp_path) == ["worklog.md", *plots]
    assert other_tables((tmp_path / "worklog.md").read_text()) == before
    assert regenerate(tmp_path, check=True) == []
    (tmp_path / plots[0]).write_text("another")
    assert regenerate(tmp_path, check=True) == plots[:1]
    write_record(tmp_path / "profiles/h100x2/sharded.json", fake_sharded())  # without h100
    assert [path.replace("h100", "h200") for path in regenerate(tmp_path)[-2:]] == plots


# ---- inline numbers


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("h16_causal_32768.forward.ring.time_ms : .1f", "10.0"),
        ("h16_causal_32768.backward.ulysses.time_ms : .1f", "27.5"),
        ("h16_causal_32768.forward.ring.of_ideal : .3f", "0.950"),
        ("h16_causal_32768.forward.ring.over_context_parallel : .2f", "1.20"),
        ("h16_causal_131072.forward.ring.over_context_parallel : .2f", "2.00"),
        ("h16_causal_32768.forward.ring.communication.hidden : .1%", "87.5%"),
        ("h16_causal_32768.backward.ring.host_ms : .1f", "1.5"),
        ("h16_causal_32768.forward.ring.differences.o : .3f", "0.003"),
        ("h16_causal_32768.forward.flops / 1000000000000 : .2f", "4.40"),
        ("h16_causal_131072.forward.context_parallel_alltoall.time_ms", "missing"),
        ("h64_causal_1048576.forward.ring.of_ideal", "not measured"),
        ("h64_causal_32768.forward.ring.time_ms", "not measured"),
        ("link.4.512 : .0f", "80"),
        ("link.1.16 : .0f", "15"),
    ],
)
def test_expression(record_set, expression, text):
    loaded = record_set(2)
    assert evaluate(f"sharded_x2.{expression}", loaded) == text
    assert evaluate(f"sharded_x8.{expression}", loaded) == "not measured"


def test_expression_of_a_stale_record(record_set):
    expression = "sharded_x2.h16_causal_32768.forward.ring.time_ms"
    assert evaluate(expression, record_set(2, sharded={})) == "stale"


def test_times_are_compared_within_a_cell(record_set):
    loaded = record_set(2, 4)
    cell = "sharded_x2.h16_causal_32768"
    ratio = f"{cell}.forward.one_gpu.time_ms / {cell}.forward.ring.time_ms : .2f"
    assert evaluate(ratio, loaded) == "1.90"
    other = f"{cell}.forward.ring.time_ms / sharded_x2.h16_causal_131072.forward.ring.time_ms"
    assert evaluate(other, loaded) == "not measured together"


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("sharded_x2", "does not read like 'sharded_x2.h16_causal_131072.forward.ring.time_ms'"),
        ("sharded_x2.h16_causal_32768.forward", "does not read like"),
        ("sharded_x2.h16_causal_1.forward.ring.time_ms", "no 'h16_causal_1'; there are link, h16_"),
        ("sharded_x2.h16_causal_32768.sideward.ring.time_ms", "there are forward, backward"),
        ("sharded_x2.h16_causal_32768.forward.rong.time_ms", "no 'rong'"),
        ("sharded_x2.h16_causal_32768.forward.ring", "is not a number"),
        ("sharded_x2.link.3.512", "no '3'; there are 1, 2, 4"),
        ("sharded_x2.link.1.7", "no '7'; there are 16, 512"),
        ("sharded_x.link.1.16", "no 'sharded_x'"),
    ],
)
def test_expression_that_means_nothing(record_set, expression, told):
    with pytest.raises(UsageError) as error:
        evaluate(expression, record_set(2))
    assert told in str(error.value)


# ---- the model


def machine(rate: float = 500e12, **changes) -> Machine:
    """One that exchanges and merges in no time and has so many SMs that NCCL's take none away."""
    ideal = {
        "exchange_bytes_per_s": lambda blocks: math.inf,
        "sms": 10**12,
        "hbm_bytes_per_s": math.inf,
    }
    return Machine(rate, **ideal | changes)


PROBLEMS = [CAUSAL, SHARDED["h16_131072"], SHARDED["h64_causal_32768"]]


@pytest.mark.parametrize(
    ("operation", "problem", "gpus"), [*product(OPERATIONS.values(), PROBLEMS, (2, 4, 8, 64))]
)
def test_an_ideal_machine_loses_nothing(operation, problem, gpus):
    prediction = predict(operation, problem, gpus, machine())
    assert prediction.share == pytest.approx(1)
    assert prediction.seconds == pytest.approx(operation.flops(problem) / gpus / 500e12)
    assert prediction.step_s == pytest.approx(prediction.seconds / gpus)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_slow_link_is_waited_for(gpus):
    """But forward's last step has no exchange beside it, nor has backward over two GPUs the part of
    the other GPU's keys.
    """
    slow = machine(exchange_bytes_per_s=lambda blocks: 1e9)
    keys = 2 * 16 * 131072 // gpus * 128  # elements of a rank's k and v
    forward, backward = (predict(each, CAUSAL, gpus, slow) for each in (FORWARD, BACKWARD))
    assert 2 * keys / 1e9 > backward.step_s
    expected_s = (gpus - 1) * 2 * keys / 1e9 + forward.step_s
    assert forward.seconds == pytest.approx(expected_s)
    expected_s = sum(keys * sent_bytes(step, gpus) / 1e9 for step in range(gpus))
    assert backward.seconds == pytest.approx(expected_s + backward.step_s * (gpus == 2))


def test_sms_that_nccl_takes_are_lost_to_all_of_a_kernel():
    """But to backward's with a mask only while the tensors travel, here half as long as a step
    computes.
    """
    step_s = predict(FORWARD, CAUSAL, 2, machine()).step_s
    message_bytes = 2 * 16 * 65536 * 128
    _, blocks = choose_blocks(2, message_bytes, FORWARD.flops(CAUSAL) / 4, 2)
    assert blocks > 1
    few = machine(sms=4 * blocks)
    assert predict(FORWARD, CAUSAL, 2, few).seconds == pytest.approx(step_s * (4 / 3 + 1))

    step_s = predict(BACKWARD, CAUSAL, 2, machine()).step_s
    _, blocks = choose_blocks(2, message_bytes, BACKWARD.flops(CAUSAL) / 4, 2)
    rate = 2 * message_bytes / (step_s / 2)
    few = machine(sms=4 * blocks, exchange_bytes_per_s=lambda blocks: rate)
    seconds = predict(BACKWARD, CAUSAL, 2, few).seconds
    assert seconds == pytest.approx(2 * step_s + step_s / 2 / 4)

    problem = SHARDED["h16_131072"]
    step_s = predict(BACKWARD, problem, 2, machine()).step_s
    _, blocks = choose_blocks(2, message_bytes, BACKWARD.flops(problem) / 4, 2)
    seconds = predict(BACKWARD, problem, 2, machine(sms=4 * blocks)).seconds
    assert seconds == pytest.approx(step_s + step_s * 4 / 3)  # nothing travels beside the first


def test_of_backwards_steps_with_a_mask_the_last_one_alone_has_it():
    """Over four GPUs, tensors travel beside all of them, half as long as a step computes."""
    step_s = predict(BACKWARD, CAUSAL, 4, machine()).step_s
    message_bytes = 16 * 32768 * 128 * 3
    _, blocks = choose_blocks(4, message_bytes, BACKWARD.flops(CAUSAL) / 16, 4)
    elements = 2 * 16 * 32768 * 128
    beside_last = elements * sent_bytes(0, 4) / (step_s / 2)
    few = machine(sms=4 * blocks, exchange_bytes_per_s=lambda blocks: beside_last)
    seconds = predict(BACKWARD, CAUSAL, 4, few).seconds
    assert seconds == pytest.approx(3 * step_s * 4 / 3 + step_s + step_s / 2 / 4)


def test_bandwidth_of_memory_is_the_gpus():
    assert hbm_bytes_per_s("NVIDIA H200") == 4.25e12
    assert hbm_bytes_per_s("NVIDIA H100 80GB HBM3") == 3.0e12
    assert hbm_bytes_per_s("NVIDIA B200") == 3.0e12


@pytest.mark.parametrize(
    ("operation", "gpus", "of_queries", "of_keys"),
    [
        (FORWARD, 2, 6, 0),
        (FORWARD, 4, 8 + 10 + 8, 0),
        (BACKWARD, 2, 0, 2 * 6),
        # To float32, then sums of float32 and bf16; at the end those in float32 and the own part.
        (BACKWARD, 4, 0, 2 * (6 + 10 + 10 + 8)),
    ],
)
def test_merges_and_sums_take_memory_traffic(operation, gpus, of_queries, of_keys):
    """Bytes for each element of a rank's q, and of its k."""
    problem = SHARDED["h64_131072"]
    ideal = predict(operation, problem, gpus, machine())
    slow = predict(operation, problem, gpus, machine(hbm_bytes_per_s=1e9))
    tokens, head_dim = 131072 // gpus, 128
    num_bytes = (64 * of_queries + 8 * of_keys) * tokens * head_dim
    assert slow.seconds - ideal.seconds == pytest.approx(num_bytes / 1e9)


def test_with_a_causal_mask_half_of_the_queries_have_a_sum_of_their_own():
    elements = 131072 // 4 * 128
    for name, heads, kv_heads in (("h16_causal_131072", 16, 16), ("h64_causal_131072", 64, 8)):
        ideal, slow = (
            predict(BACKWARD, SHARDED[name], 4, machine(hbm_bytes_per_s=speed))
            for speed in (math.inf, 1e9)
        )
        num_bytes = (heads * 6 / 2 + 2 * kv_heads * (6 + 10 + 10 + 8)) * elements
        assert slow.seconds - ideal.seconds == pytest.approx(num_bytes / 1e9)


@pytest.mark.parametrize("gpus", [2, 3, 4, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_sent_and_merged_is_what_the_ring_sends_and_merges(monkeypatch, gpus, causal):
    """Of the rank that has most to do, with kernels that compute nothing: the last merges most,
    and the first sends all of the gradients that it has.
    """
    seq, heads, kv_heads, head_dim = 4, 4, 2, 8
    problem = Problem(Shape(1, heads, kv_heads, gpus * seq, gpus * seq, head_dim), "bf16", causal)
    asked, modelled, sent, merged, added = [], [], [], [], []

    class Lane:
        sms = 0

        def __init__(self, turn):
            self.turn = turn

        def pass_on(self, tensors, received):
            sent.append(sum(t.numel() * t.element_size() for t in tensors))
            assert [t.dtype for t in tensors] == [t.dtype for t in received]
            return lambda: None

    def lane(turn, messages, message_bytes, flops):
        asked.append((messages, message_bytes, flops))
        return Lane(turn)

    def merge(o, lse, part, part_lse, out):
        merged.append(o.numel() * sum(t.element_size() for t in (o, part, out)))

    def add(total, part):
        if total.shape[1] == heads:
            added.append((total.shape[2], total.dtype))

    kernels = sharded_ring._PartKernels(*3 * [lambda *_: []], sums=1)
    monkeypatch.setattr(sharded_ring, "_launch", lambda *_: None)
    monkeypatch.setattr(sharded_ring, "_prepared_parts", lambda *_: kernels)
    monkeypatch.setattr(sharded_ring, "merge", merge)
    monkeypatch.setattr(sharded_ring, "add", add)

    options = Options(causal, softmax_scale=1.0, deterministic=False)
    first, last = (
        Ring(
            1,
            SimpleNamespace(rank=rank, size=gpus, lane=lane),
            (Shard(seq, seq, transposed=False),) * gpus,
            options,
        )
        for rank in (0, gpus - 1)
    )
    q, o, dout = (torch.zeros(1, heads, seq, head_dim, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.zeros(1, kv_heads, seq, head_dim, dtype=torch.bfloat16) for _ in range(2))
    keys = 2 * k.numel()

    sharded_ring._forward(last, q, k, v)
    assert sent == [2 * keys] * (gpus - 1)
    assert sum(merged) == q.numel() * sum(merged_bytes(step, gpus) for step in range(gpus))
    sent.clear()
    sharded_ring._backward(first, (q, k, v, o, torch.zeros(1, heads, seq), dout), [k, v])
    expected = [keys * sent_bytes(step, gpus) for step in reversed(range(gpus))]
    assert sent == [num_bytes for num_bytes in expected if num_bytes]
    assert added == [(seq // 2, q.dtype)] * causal  # dq

    monkeypatch.setattr(
        ring_model, "choose_blocks", lambda *terms: modelled.append(terms) or (1, 1)
    )
    for operation in OPERATIONS.values():
        predict(operation, problem, gpus, machine())
    assert {(*terms, gpus) for terms in asked} == {*modelled}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rank", "gpus"), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])
def test_launches_leave_the_exchange_its_sms(monkeypatch, rank, gpus, causal):
    """But for backward's with a mask, which take work from a counter."""
    events, kernels, seq = [], [], 4

    class Lane:
        turn, sms = 1, 3

        def pass_on(self, sent, received):
            events.append("exchange")
            return lambda: events.append("arrived")

    def launch(ring, operation, inputs, outputs, causal, busy_sms):
        events.append(((operation, causal), busy_sms))

    def prepared_parts(ring, q, causal, busy_sms):
        """Of kernels that need no workspaces."""

        def products(*_):
            kernels.append("products")
            events.append(((BACKWARD, causal), busy_sms))
            return []

        begin, finish = (
            lambda *_, name=name: kernels.append(name) or [] for name in ("begin", "finish")
        )
        return sharded_ring._PartKernels(begin, products, finish, sums=1)

    monkeypatch.setattr(sharded_ring, "_launch", launch)
    monkeypatch.setattr(sharded_ring, "_prepared_parts", prepared_parts)
    for name in ("merge", "add"):
        monkeypatch.setattr(sharded_ring, name, lambda *_, **__: None)
    ring = Ring(
        1,
        SimpleNamespace(rank=rank, size=gpus, lane=lambda *_: Lane()),
        (Shard(seq, seq, transposed=False),) * gpus,
        Options(causal, softmax_scale=1.0, deterministic=False),
    )
    q, k, v = (torch.zeros(1, 1, seq, 8, dtype=torch.bfloat16) for _ in range(3))
    sharded_ring._forward(ring, q, k, v)
    sharded_ring._backward(ring, (q, k, v, q, torch.zeros(1, 1, seq), q), [k, v])
    launches, busy = [], False
    for event in events:
        if isinstance(event, str):
            busy = event == "exchange"
        else:
            launches.append((event, busy))
    assert len(launches) == 2 * gpus
    of_backward = 1 if gpus == 2 else gpus
    assert [beside for _, beside in launches].count(True) == gpus - 1 + of_backward
    for (call, busy_sms), beside in launches:
        assert busy_sms == (3 if beside and call != (BACKWARD, True) else 0)
    # Queries that all parts of backward have in common; alone, a part is a whole call.
    groups = [gpus - 1 - rank, 1 + rank] if causal else [gpus]
    of_groups = [["begin", *n * ["products"], "finish"] for n in groups if n > 1]
    assert kernels == [kernel for of_group in of_groups for kernel in of_group]


def test_the_fewest_blocks_are_chosen_that_hide_the_messages():
    of_computations = [1e10 * 1.5**n for n in range(24)]
    for message_bytes, flops, ranks in product((1 << 20, 1 << 26), of_computations, (2, 8)):
        most_blocks, used = choose_blocks(2, message_bytes, flops, ranks)
        assert used == blocks_used(message_bytes, most_blocks, ranks)
        needed = blocks_to_hide(2 * message_bytes, flops)
        fewer = [most for most in MOST_BLOCKS if most < most_blocks]
        assert all(blocks_used(message_bytes, most, ranks) < needed for most in fewer)
        assert used >= needed or most_blocks == MOST_BLOCKS[-1]


def test_bandwidth_is_that_of_the_longest_message():
    link = fake_sharded()["link"]
    assert [link_bytes_per_s(link, blocks, 8) for blocks in (1, 2, 4)] == [20e9, 40e9, 80e9]
    assert link_bytes_per_s(link, 8, 2) == 160e9  # as many times those of 4
    assert link_bytes_per_s(link, 8, 64) == NETWORK_BYTES_PER_S
    assert link_bytes_per_s(link, 1, 64) == 20e9


def test_speed_of_one_gpu():
    record = fake_sharded()
    for name, cell in zip(("h16_causal_32768", "h16_causal_131072"), record["cells"], strict=False):
        rate = cell["forward"]["attentions"]["one_gpu"]["tflops"]
        assert machine_of(record, FORWARD, SHARDED[name], 2).flops_per_s == 1e12 * rate
    # Of the longest that was measured, with the same heads and mask.
    longer = machine_of(record, FORWARD, SHARDED["h16_causal_1048576"], 2)
    assert longer.flops_per_s == 1e12 * rate
    for name in ("h16_32768", "h64_causal_1048576"):
        assert machine_of(record, FORWARD, SHARDED[name], 2) is None


def test_predictions_stand_beside_what_was_measured(record_set):
    loaded = record_set(2, 4)
    found = {
        (row["Heads"], row["N"], row["GPUs"]): row
        for row in cells_of(sharded_tables.sharded_model(loaded))
    }
    assert len(found) == 2 * 4 * len(rows.MODELLED_GPUS)
    record = loaded.sharded[2].record
    for gpus, measured in (("2", "0.950"), ("4", "0.950"), ("8", "not measured")):
        row = found["16", "131072", gpus]
        for operation in OPERATIONS.values():
            known = machine_of(record, operation, CAUSAL, int(gpus))
            share = predict(operation, CAUSAL, int(gpus), known).share
            title = operation.name.capitalize()
            assert row[f"{title}: predicted"] == f"{share:.3f}"
            assert row[f"{title}: measured"] == measured
    assert found["16", "65536", "2"]["Forward: measured"] == "not measured"
    alone = found["64/8", "1048576", "2"]
    assert alone["Forward: predicted"] == "not measured"
    assert alone["Forward: measured"] == "one GPU missing"


# ---- the diagrams


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_chunks_are_held_as_in_a_call(ranks):
    for rank in range(ranks):
        held = [chunk for chunk, holder in enumerate(ring.zigzag(ranks)) if holder == rank]
        assert held == list(held_chunks(ranks, rank))


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_each_rank_computes_in_each_step_what_the_diagram_says(ranks):
    chunk = 6
    shards = (Shard(2 * chunk, 2 * chunk, transposed=False),) * ranks
    options = Options(causal=True, softmax_scale=1.0, deterministic=False)
    for rank, of_steps in enumerate(ring.work(ring.zigzag(ranks))):
        of_rank = Ring(1, SimpleNamespace(rank=rank, size=ranks), shards, options)
        for step, squares in enumerate(of_steps):
            assert ring.step_of(rank, of_rank.origin(step), ranks) == step
            part = of_rank.part(step)
            queries = 2 * chunk - part.first_query
            keys = len(range(2 * chunk)[part.keys])
            assert queries * keys / (2 if part.causal else 1) == squares * chunk**2


def test_zigzag_gives_all_ranks_the_same_work():
    assert ring.work(ring.zigzag(4)) == [[2.0] * 4] * 4
    assert ring.durations(ring.zigzag(4)) == [2.0] * 4
    assert ring.work(ring.contiguous(4))[0] == [2.0, 0.0, 0.0, 0.0]
    assert ring.durations(ring.contiguous(4)) == [2.0, 4.0, 4.0, 4.0]


def test_zigzag_figure_shows_the_work_over_time():
    drawn = figures()["ring_zigzag.svg"]
    found = [text.text for text in texts(drawn)]
    assert "Zigzag, chunks r and 2 P − 1 − r: 8 units of time" in found
    assert "Contiguous, one part after another: 14 units of time" in found
    in_time = [box for box in boxes(drawn) if box.height == ring.ROW]
    for rank, color in enumerate(TINTS):
        computes = [box.width for box in in_time if color in box.roles]
        work = (ring.work(order(4))[rank] for order in (ring.zigzag, ring.contiguous))
        assert computes == [ring.UNIT * squares for order in work for squares in order if squares]
    waits = [box for box in in_time if EMPTY in box.roles]
    assert len(waits) == 2 * 4 * 4  # behind what is computed


def test_merge_figure_shows_the_mean():
    weight, lse, value = ring.merged(ring.LSES, ring.VALUES)
    first, second = (torch.tensor(lse) for lse in ring.LSES)
    assert weight == pytest.approx(torch.sigmoid(second - first).item())
    assert lse == pytest.approx(torch.logaddexp(first, second).item())
    assert value == pytest.approx(torch.lerp(*map(torch.tensor, ring.VALUES), weight).item())
    found = [text.text for text in texts(figures()["ring_merge.svg"])]
    assert {f"w = {weight:.3f}", f"both: {lse:.3g}", f"both: {value:.3g}"} <= {*found}


# ---- the timeline


def test_the_timeline_is_of_the_recorded_cell():
    assert ring_timeline.CELL == TIMELINE


@pytest.mark.parametrize("gpus", [2, 8])
def test_timeline_draws_each_kernel_to_scale(record_set, gpus):
    loaded = record_set(gpus).sharded[gpus]
    drawn = render_ring_timeline(loaded)
    assert [*drawn] == ["ring_timeline.svg", "ring_timeline_dark.svg"]
    svg = drawn["ring_timeline.svg"]
    assert not clashes(svg)
    timelines = loaded.record["timelines"]
    kernels = [kernel for ranks in timelines.values() for rank in ranks for kernel in rank]
    found = [box for box in boxes(svg) if box.height == ring_timeline.LANE - 2]
    assert len(found) == len(kernels)
    scale = (ring_timeline.RIGHT - ring_timeline.LEFT) / max(k["end_us"] for k in kernels)
    for box, kernel in zip(found, kernels, strict=True):
        assert ring_timeline.COLORS[kernel["what"]] in box.roles
        assert box.left == pytest.approx(ring_timeline.LEFT + scale * kernel["start_us"], abs=0.1)
        width = scale * (kernel["end_us"] - kernel["start_us"])
        assert box.width == pytest.approx(max(1, width), abs=0.1)
    lanes = {box.top for box in found}
    assert len(lanes) == 2 * 2 * gpus
    exchange = ring_timeline.COLORS["exchange"]
    transfers = {box.top for box in found if exchange in box.roles}
    assert len(transfers) == 2 * gpus
    assert not {box.top for box in found if exchange not in box.roles} & transfers
    named = [text.text for text in texts(svg)]
    assert named[0].startswith(
        f"{gpus} × NVIDIA H200: attention() by the ring, 16 heads, N = 32768"
    )
    assert [*timelines] == [text for text in named if text in ("forward", "backward")]


def test_timeline_of_a_stale_record_says_so(record_set):
    drawn = render_ring_timeline(record_set(2, sharded={}).sharded[2])
    assert "attention() by the ring (stale), 16" in texts(drawn["ring_timeline.svg"])[0].text


def test_short_kernels_and_unknown_ones_are_drawn(record_set):
    timelines = fake_sharded()["timelines"]
    timelines["forward"][0].append({"what": "another", "start_us": 3800.0, "end_us": 3800.5})
    svg = render_ring_timeline(record_set(2, timelines=timelines).sharded[2])["ring_timeline.svg"]
    (short,) = [box for box in boxes(svg) if box.width == 1.0]
    assert short.roles == (ring_timeline.COLORS["sum"], "stroke-none")
