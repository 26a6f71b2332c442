"""Timelines: the patch that takes the samples, their record and its diagram."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from common import commands
from common.bench.timeline import (
    EVENTS,
    read_samples,
    take_samples,
    timeline_patch,
    timeline_record,
)
from common.catalog import find_step
from common.errors import UsageError
from common.metrics import spill_bytes
from common.paths import ROOT
from common.problem import COUNTED
from common.record_schema import TIMELINE_RECORD
from common.records import read_records, write_record
from common.report.diagrams.svg import WIDTH
from common.report.record_set import Recorded, load_record_set
from common.report.timeline_plot import LEFT, busy_times, clocks_a_product, render_timelines
from common.runtime.build import build_cubin, nvcc, parse_resources
from common.runtime.cpu import CpuBackend
from common.step import Step
from verify.cases import Case, Shape
from verify.check import check_case
from verify.tests.fake_records import fake_record, fake_static_record, fake_timeline

PATCHES = sorted((ROOT / "common" / "bench" / "timelines").glob("*.patch"))
V09, V09_PATCHED = find_step("v09"), find_step(PATCHES[0])
# Three tiles for each of four heads: with two multiprocessors two of them for a block that stays.
CASE = replace(Case.of("headline", COUNTED), shape=Shape(1, 4, 4, 128, 384, 128))
SVG = "{http://www.w3.org/2000/svg}"


@cache
def taken(patched: Step = V09_PATCHED) -> torch.Tensor:
    return take_samples(CpuBackend(), patched, CASE, CASE.make("cpu"))


@pytest.fixture(params=PATCHES, ids=lambda path: path.stem)
def patched(request):
    return find_step(request.param)


def test_the_patched_step_is_right(patched):
    result = check_case(patched, CASE, (CpuBackend(0), CpuBackend(1)))
    assert result.passed, str(result)


@pytest.mark.parametrize("seed", [0, 1])  # a guard page behind the workspace, and before it
def test_a_block_without_a_tile_takes_no_samples(seed):
    shape = Shape(1, 1, 1, 512, 64, 128)  # of four blocks the last one sees keys
    case = replace(Case.of("headline", COUNTED), shape=shape, causal=True)
    samples = take_samples(CpuBackend(seed), V09_PATCHED, case, case.make("cpu"))
    assert (samples == -1).all()


def test_samples_become_clocks(patched):
    """A persistent step's begin within one work tile and end with the next one's first tile."""
    last_tile = {"v09": 2, "v10": 1, "v11": 1}[patched.name]
    record = read_samples(taken(patched))
    assert list(record["clocks"]) == ["producer", "consumer 0", "consumer 1"]
    assert record["clocks"]["producer"]["load K"][0] == 0
    lists = [times for events in record["clocks"].values() for times in events.values()]
    assert {len(times) for times in lists} == {3}
    assert [output["tile"] for outputs in record["outputs"].values() for output in outputs] == (
        [last_tile] * 2
    )
    clocks = [time for times in lists for time in times]
    clocks += [
        output[end]
        for outputs in record["outputs"].values()
        for output in outputs
        for end in ("start", "end")
    ]
    assert sorted(clocks) == list(range(len(clocks)))  # the runtime's clock counts samples


@pytest.mark.parametrize(
    ("tile", "warpgroup", "event", "told"),
    [
        (0, 2, "load K", "'load K' of producer in tile 0"),
        (2, 2, "load V", "'load V' of producer in tile 2"),
        (1, 1, "end softmax", "'end softmax' of consumer 1 in tile 1"),
        (2, 0, "start O", "'start O' of consumer 0 in tile 2"),
        (2, 0, "end O", "'end O' of consumer 0 in tile 2"),
    ],
)
def test_a_missing_sample_is_named(tile, warpgroup, event, told):
    samples = taken().clone()
    samples[tile, warpgroup, EVENTS.index(event)] = -1
    with pytest.raises(UsageError, match=f"^no sample was taken of {told}$"):
        read_samples(samples)


@pytest.mark.parametrize(
    ("tile", "warpgroup", "event", "time", "told"),
    [
        (1, 0, "end S", 0, "in tile 1 of consumer 0 'start S' is at clock"),
        (
            1,
            2,
            "load V",
            1,
            "in tile 0 of consumer 0 'load V' is at clock \\d, that of the next",
        ),
        (2, 1, "end softmax", 999, "in tile 2 of consumer 1 'end softmax' is at clock 999, 'st"),
        (0, 2, "load K", 999, "in tile 0 of consumer 0 'load K' is at clock 999, 'start S' at"),
        (0, 2, "load V", 999, "in tile 0 of consumer 0 'load V' is at clock 999, 'start PV' at"),
        (2, 0, "start O", 1, "in tile 2 of consumer 0 'end PV' is at clock"),
        (2, 0, "end O", 1, "in tile 2 of consumer 0 'start O' is at clock"),
    ],
)
def test_samples_out_of_order_are_named(tile, warpgroup, event, time, told):
    samples = taken().clone()
    samples[tile, warpgroup, EVENTS.index(event)] = time
    with pytest.raises(UsageError, match=f"^samples out of order: {told}"):
        read_samples(samples)


def test_the_patch_costs_no_local_memory(patched):
    try:
        nvcc()
    except UsageError as missing:
        pytest.skip(str(missing))
    build = build_cubin(patched, COUNTED.specialization, patched.limits.arch)
    assert "serialized" not in build.log
    for resources in parse_resources(build.log).values():
        assert spill_bytes(asdict(resources)) == resources.stack_bytes == 0


def draw(record: dict, stale: frozenset[str] = frozenset()) -> str:
    return render_timelines(Recorded({"v09": record}, stale))["v09.svg"]


@pytest.fixture
def drawn():
    return ElementTree.fromstring(draw(fake_timeline(V09_PATCHED)))


def test_figure_shows_the_recorded_times(drawn):
    """The window begins as consumer 0 starts S of tile 13, and takes six tiles of 2200 clocks."""
    scale = (WIDTH - 24 - LEFT) / (6 * 2200)
    boxes = [
        [float(box.get(key)) for key in ("x", "y", "width", "height")]
        for box in drawn.iter(f"{SVG}rect")
        if box.get("y")
    ]
    rows = {}
    for x, y, width, _ in boxes:
        assert x >= LEFT or y > 350  # the legend stands below
        assert x + width <= WIDTH - 24 + 0.1
        rows.setdefault(y, []).append((x, width))
    products = next(row for row in rows.values() if len(row) == 12)  # of consumer 0
    (first_s, *_), (first_pv, *_) = products[:6], products[6:]
    assert first_s == pytest.approx((LEFT, 600 * scale), abs=0.2)
    # From the end of S(13), as PV(12) starts before it.
    assert first_pv == pytest.approx((LEFT + 600 * scale, 550 * scale), abs=0.2)
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "v09, one block on an NVIDIA H200: a tile every 2200 clocks" in texts
    assert {"13", "18", "12000"} <= set(texts)
    assert not {"6", "O"} & set(texts)


def test_figure_shows_where_o_is_written():
    """It lies between two softmaxes in the window, which begins at clock 30100."""
    record = fake_timeline(V09_PATCHED)
    output = {"tile": 15, "start": 2200 * 16 + 3200, "end": 2200 * 16 + 4000}
    outputs = record["outputs"] | {"consumer 0": [output, *record["outputs"]["consumer 0"]]}
    svg = draw(record | {"outputs": outputs})
    scale = (WIDTH - 24 - LEFT) / (6 * 2200)
    (o,) = [text for text in ElementTree.fromstring(svg).iter(f"{SVG}text") if text.text == "O"]
    middle = LEFT + (2200 * 16 + 3600 - 30100) * scale
    assert float(o.get("x")) == pytest.approx(middle, abs=0.2)
    softmax = (text for text in ElementTree.fromstring(svg).iter(f"{SVG}text") if text.text == "16")
    assert o.get("y") in [text.get("y") for text in softmax]


def rows_of(svg: str) -> dict[float, list[tuple[float, float]]]:
    """Left and width of the boxes of each row, by its top."""
    rows: dict[float, list[tuple[float, float]]] = {}
    for box in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if box.get("y"):
            place = float(box.get("x")), float(box.get("width"))
            rows.setdefault(float(box.get("y")), []).append(place)
    return rows


def test_tensor_cores_are_busy_with_one_product_after_another():
    """[64, 128] by [128, 128] takes 512 clocks. Each consumer starts two, 100 clocks apart."""
    *_, busy, _legend = rows_of(draw(fake_timeline(V09_PATCHED))).values()
    scale = (WIDTH - 24 - LEFT) / (6 * 2200)
    assert len(busy) == 12
    for n, box in enumerate(busy):
        assert box == pytest.approx((LEFT + 1100 * n * scale, 1024 * scale), abs=0.2)


RECORDED = read_records(ROOT / "profiles" / "h200" / "timelines", TIMELINE_RECORD)


@pytest.mark.parametrize("record", RECORDED.values(), ids=RECORDED)
def test_a_product_is_not_seen_done_before_the_tensor_cores_have_done_it(record):
    """Of the committed records: after each busy time, or at its end, a product is seen done."""
    consumers = [clocks for who, clocks in record["clocks"].items() if who != "producer"]
    products = sorted(
        (start, end)
        for clocks in consumers
        for what in ("S", "PV")
        for start, end in zip(clocks[f"start {what}"], clocks[f"end {what}"], strict=True)
    )
    intervals = busy_times([start for start, _ in products], clocks_a_product(record))
    assert sum(end - start for start, end in intervals) == 512 * len(products)
    for first, last in intervals:
        inside = [end for start, end in products if first <= start <= last]
        assert max(inside) >= last


def test_all_timelines_show_as_many_clocks():
    slow = fake_timeline(V09_PATCHED)
    fast = fake_timeline(V09_PATCHED)
    fast["clocks"] = {
        who: {event: [time // 2 for time in times] for event, times in clocks.items()}
        for who, clocks in slow["clocks"].items()
    }
    svgs = render_timelines(Recorded({"v09": slow, "v10": fast}, frozenset()))
    assert svgs["v09.svg"] == draw(slow)
    softmax = [sorted(rows_of(svgs[name]).values(), key=len)[-1] for name in ("v09.svg", "v10.svg")]
    assert len(softmax[1]) >= 2 * len(softmax[0]) - 2


def test_tiles_are_counted_in_their_work_tile():
    """Where the samples begin within one and end within the next."""
    record = fake_timeline(V09_PATCHED)
    record["outputs"] = {
        who: [output | {"tile": 15} for output in outputs]
        for who, outputs in record["outputs"].items()
    }
    texts = [text.text for text in ElementTree.fromstring(draw(record)).iter(f"{SVG}text")]
    assert {"29", "30", "31", "0", "1", "2"} <= set(texts)
    assert not {"13", "14", "15", "16", "17"} & set(texts)


def test_boxes_of_a_row_do_not_overlap(drawn):
    rows = {}
    for box in drawn.iter(f"{SVG}rect"):
        if box.get("y"):
            left = float(box.get("x"))
            rows.setdefault(box.get("y"), []).append((left, left + float(box.get("width"))))
    assert len(rows) == 4 + 2 * 2 + 1 + 1
    for row in rows.values():
        row.sort()
        assert all(one[1] <= other[0] + 0.1 for one, other in pairwise(row))


@pytest.fixture
def root(tmp_path):
    """A project with the patch and a record."""
    (tmp_path / "common/bench/timelines").mkdir(parents=True)
    (tmp_path / "common/bench/timelines/v09.patch").write_text(timeline_patch(V09).read_text())
    write_record(tmp_path / "profiles/h200/timelines/v09.json", fake_timeline(V09_PATCHED))
    return tmp_path


def test_record_set_has_the_timeline(root):
    def timelines():
        return load_record_set(root / "profiles/h200", root).timelines

    assert timelines() == Recorded({"v09": fake_timeline(V09_PATCHED)}, frozenset())
    record = fake_timeline(V09_PATCHED) | {"code_sha256": "0" * 64}
    write_record(root / "profiles/h200/timelines/v09.json", record)
    assert timelines().stale == {"v09"}
    assert "v09 (stale), one block" in draw(record, frozenset({"v09"}))
    (root / "common/bench/timelines/v09.patch").unlink()
    assert timelines().records == {}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("producer",), None),
        (("consumer 0",), None),
        (("consumer 1", "end S"), None),
        (("consumer 1", "end S"), [1, 2]),
        (("consumer 1", "end S"), [1] * 32),
        (("producer", "load K"), [0.5] * 32),
    ],
)
def test_malformed_record_is_named(tmp_path, path, value):
    record = fake_timeline(V09_PATCHED)
    node = record["clocks"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    write_record(tmp_path / "v09.json", record)
    with pytest.raises(UsageError, match=r"v09\.json: the record: clocks cannot be"):
        read_records(tmp_path, TIMELINE_RECORD)


@pytest.mark.parametrize(("tiles", "read"), [(6, False), (7, True), (8, True)])
def test_a_record_has_the_tiles_that_are_shown(tmp_path, tiles, read):
    record = fake_timeline(V09_PATCHED, tiles)
    write_record(tmp_path / "v09.json", record)
    if read:
        assert read_records(tmp_path, TIMELINE_RECORD) == {"v09": record}
        assert draw(record)
    else:
        with pytest.raises(UsageError, match="clocks cannot be"):
            read_records(tmp_path, TIMELINE_RECORD)


def test_profile_takes_the_timeline_along(tmp_path, monkeypatch, capsys):
    """On a GPU, for a step with a patch."""
    monkeypatch.setattr(commands, "PROFILES_DIR", tmp_path)
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "regenerate", list)
    monkeypatch.setattr(commands, "static_record", fake_static_record)
    monkeypatch.setattr(commands, "static_path", lambda step: tmp_path / f"{step.name}.json")
    monkeypatch.setattr(commands, "timeline_record", lambda step: fake_timeline(V09_PATCHED))
    monkeypatch.setattr(commands, "collect", lambda step: "not collected: fake")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    runs = (False, "v09", False), (True, "v04", False), (True, "v09", True)
    for has_gpu, name, written in runs:
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        write_record(tmp_path / f"h200/{name}.json", fake_record(find_step(name)))
        assert commands.profile([name]) == 0
        assert bool(read_records(tmp_path / "h200/timelines", TIMELINE_RECORD)) == written
    assert "recorded h200/timelines/v09.json" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", [path.stem for path in PATCHES])
def test_record_on_a_gpu(tmp_path, name):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{name} needs exactly sm_90a")
    write_record(tmp_path / f"{name}.json", timeline_record(find_step(name)))
    assert list(read_records(tmp_path, TIMELINE_RECORD)) == [name]
