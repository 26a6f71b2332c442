"""Timelines: the patch that takes the samples, their record and its diagram."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from common import commands
from common.bench.timeline import read_samples, take_samples, timeline_patch, timeline_record
from common.catalog import find_step
from common.errors import UsageError
from common.metrics import spill_bytes
from common.operation import BACKWARD, FORWARD
from common.paths import ROOT
from common.problem import COUNTED
from common.record_schema import TIMELINE_RECORD
from common.records import read_records, write_record
from common.report.diagrams.svg import WIDTH
from common.report.pipeline import busy_times, clocks_a_product
from common.report.record_set import Recorded, load_record_set
from common.report.timeline_plot import LEFT, render_timelines
from common.runtime.build import build_cubin, nvcc, parse_resources
from common.runtime.cpu import CpuBackend
from common.step import Step
from common.timeline_events import TIMELINE_EVENTS
from verify.cases import Case, Shape
from verify.check import check_case
from verify.tests.fake_records import fake_record, fake_static_record, fake_timeline

PATCHES = sorted((ROOT / "common" / "bench" / "timelines").glob("*.patch"))
PATCHED = {path.stem: find_step(path) for path in PATCHES}
V09, V09_PATCHED, B06_PATCHED = find_step("v09"), PATCHED["v09"], PATCHED["b06"]
# Three tiles for each of four heads: of keys, or of queries for each of three blocks of keys. With
# two multiprocessors there are more of them than one for a block that stays.
SHAPES = {FORWARD: Shape(1, 4, 4, 128, 384, 128), BACKWARD: Shape(1, 4, 4, 192, 384, 128)}
SVG = "{http://www.w3.org/2000/svg}"


def small_case(patched: Step) -> Case:
    case = Case.of("headline", COUNTED, patched.operation)
    return replace(case, shape=SHAPES[patched.operation])


@cache
def taken(patched: Step) -> torch.Tensor:
    case = small_case(patched)
    return take_samples(CpuBackend(), patched, case, case.make("cpu"))


def read_clocks(samples: torch.Tensor, patched: Step) -> dict:
    return read_samples(samples, TIMELINE_EVENTS[patched.operation])


@pytest.fixture(params=PATCHED)
def patched(request):
    return PATCHED[request.param]


def test_the_patched_step_is_right(patched):
    result = check_case(patched, small_case(patched), (CpuBackend(0), CpuBackend(1)))
    assert result.passed, str(result)


@pytest.mark.parametrize("seed", [0, 1])  # a guard page behind the workspace, and before it
def test_a_block_without_a_tile_takes_no_samples(seed):
    shape = Shape(1, 1, 1, 512, 64, 128)  # of four blocks the last one sees keys
    case = replace(Case.of("headline", COUNTED), shape=shape, causal=True)
    samples = take_samples(CpuBackend(seed), V09_PATCHED, case, case.make("cpu"))
    assert (samples == -1).all()


def test_samples_become_clocks(patched):
    """A persistent forward step's begin within one work tile and end in the next one's first."""
    last_tile = {"v09": [2], "v10": [1], "v11": [1]}.get(patched.name, [])
    record = read_clocks(taken(patched), patched)
    assert list(record["clocks"]) == ["producer", "consumer 0", "consumer 1"]
    assert next(iter(record["clocks"]["producer"].values()))[0] == 0
    lists = [times for events in record["clocks"].values() for times in events.values()]
    assert {len(times) for times in lists} == {3}
    assert [output["tile"] for outputs in record["outputs"].values() for output in outputs] == (
        last_tile * 2
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
    ("name", "tile", "warpgroup", "event", "told"),
    [
        ("v09", 0, 2, "load K", "'load K' of producer in tile 0"),
        ("v09", 2, 2, "load V", "'load V' of producer in tile 2"),
        ("v09", 1, 1, "end softmax", "'end softmax' of consumer 1 in tile 1"),
        ("v09", 2, 0, "start O", "'start O' of consumer 0 in tile 2"),
        ("v09", 2, 0, "end O", "'end O' of consumer 0 in tile 2"),
        ("b06", 1, 2, "load dO", "'load dO' of producer in tile 1"),
        ("b06", 2, 1, "dQ read", "'dQ read' of consumer 1 in tile 2"),
    ],
)
def test_a_missing_sample_is_named(name, tile, warpgroup, event, told):
    patched = PATCHED[name]
    samples = taken(patched).clone()
    samples[tile, warpgroup, TIMELINE_EVENTS[patched.operation].all.index(event)] = -1
    with pytest.raises(UsageError, match=f"^no sample was taken of {told}$"):
        read_clocks(samples, patched)


@pytest.mark.parametrize(
    ("name", "tile", "warpgroup", "event", "time", "told"),
    [
        ("v09", 1, 0, "end S", 0, "in tile 1 of consumer 0 'start S' is at clock"),
        ("v09", 1, 2, "load V", 1, "in tile 0 of consumer 0 'load V' is at clock .*, that"),
        ("v09", 2, 1, "end softmax", 999, "in tile 2 of consumer 1 'end softmax' is at clock 999"),
        ("v09", 0, 2, "load K", 999, "in tile 0 of consumer 0 'load K' is at clock 999"),
        ("v09", 0, 2, "load V", 999, "in tile 0 of consumer 0 'load V' is at clock 999"),
        ("v09", 2, 0, "start O", 1, "in tile 2 of consumer 0 'end PV' is at clock"),
        ("v09", 2, 0, "end O", 1, "in tile 2 of consumer 0 'start O' is at clock"),
        ("b06", 0, 2, "load dO", 999, "in tile 0 of consumer 0 'load dO' is at clock 999"),
        ("b06", 2, 1, "dQ full", 1, "in tile 2 of consumer 1 'dQ stored' is at clock"),
        ("b06", 1, 0, "start dQ", 1, "in tile 1 of consumer 0 'end dS' is at clock"),
    ],
)
def test_samples_out_of_order_are_named(name, tile, warpgroup, event, time, told):
    patched = PATCHED[name]
    samples = taken(patched).clone()
    samples[tile, warpgroup, TIMELINE_EVENTS[patched.operation].all.index(event)] = time
    with pytest.raises(UsageError, match=f"^samples out of order: {told}"):
        read_clocks(samples, patched)


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
    name = record["step"]
    return render_timelines(Recorded({name: record}, stale))[f"{name}.svg"]


def test_figure_shows_the_recorded_times():
    """The window begins as consumer 0 starts S of tile 13, and takes six tiles of 2200 clocks."""
    drawn = ElementTree.fromstring(draw(fake_timeline(V09_PATCHED)))
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


def test_backward_figure_shows_the_recorded_times():
    """The window begins as consumer 0 starts S of tile 30, and takes three tiles of 3200 clocks."""
    svg = draw(fake_timeline(B06_PATCHED))
    scale = (WIDTH - 24 - LEFT) / (3 * 3200)
    rows = list(rows_of(svg).values())
    products, others, added = rows[4:7]  # of consumer 0, below the producer's four

    def places(*clocks: tuple[int, int]) -> list:
        return [
            pytest.approx((LEFT + (start + 3200 * tile) * scale, (end - start) * scale), abs=0.2)
            for start, end in clocks
            for tile in range(3)
        ]

    # S, dP, dV, dK, dQ: each from its start, or from the end of the one before it.
    assert products == places((0, 320), (320, 720), (1020, 1400), (1700, 2100), (1400, 1700))
    assert others == places((320, 700), (720, 1000), (1700, 1900))  # P, dS, dQ
    assert added == places((1950, 2500))
    texts = {text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert "b06, one block on an NVIDIA H200: a tile every 3200 clocks" in texts
    assert {"30", "32", "dV", "adds dQ", "9000"} <= texts
    assert not {"softmax", "O to memory"} & texts


def test_tensor_cores_are_busy_with_one_product_after_another():
    """[64, 128] by [128, 128] takes 512 clocks. Each consumer starts two, 100 clocks apart."""
    *_, busy, _legend = rows_of(draw(fake_timeline(V09_PATCHED))).values()
    scale = (WIDTH - 24 - LEFT) / (6 * 2200)
    assert len(busy) == 12
    for n, box in enumerate(busy):
        assert box == pytest.approx((LEFT + 1100 * n * scale, 1024 * scale), abs=0.2)


def test_tensor_cores_are_busy_with_the_products_of_backward():
    """[64, 64] by [64, 128] takes 256 clocks, as do the others. Five overlap, 1600 clocks apart."""
    *_, busy, _legend = rows_of(draw(fake_timeline(B06_PATCHED))).values()
    scale = (WIDTH - 24 - LEFT) / (3 * 3200)
    first, *inner, last = busy
    assert len(inner) == 5
    for n, box in enumerate(inner):
        assert box == pytest.approx((LEFT + (1020 + 1600 * n) * scale, 1280 * scale), abs=0.2)
    # The window cuts the others off.
    assert first == pytest.approx((LEFT, 700 * scale), abs=0.2)
    assert sum(last) == pytest.approx(WIDTH - 24, abs=0.2)


RECORDED = read_records(ROOT / "profiles" / "h200" / "timelines", TIMELINE_RECORD)


@pytest.mark.parametrize("record", RECORDED.values(), ids=RECORDED)
def test_a_product_is_not_seen_done_before_the_tensor_cores_have_done_it(record):
    """Of the committed records: after each busy time, or at its end, a product is seen done."""
    consumers = [clocks for who, clocks in record["clocks"].items() if who != "producer"]
    products = sorted(
        (start, end)
        for clocks in consumers
        for event in clocks
        if event.startswith("start")
        for start, end in zip(clocks[event], clocks[event.replace("start", "end")], strict=True)
    )
    needed = clocks_a_product(record)
    intervals = busy_times([start for start, _ in products], needed)
    assert needed == {"v": 512, "b": 256}[record["step"][0]]
    assert sum(end - start for start, end in intervals) == needed * len(products)
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


def test_each_ladder_has_a_scale():
    v09, b06 = fake_timeline(V09_PATCHED), fake_timeline(B06_PATCHED)
    svgs = render_timelines(Recorded({"v09": v09, "b06": b06}, frozenset()))
    assert (svgs["v09.svg"], svgs["b06.svg"]) == (draw(v09), draw(b06))


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


@pytest.mark.parametrize(("patched", "rows_of_a_consumer"), [(V09_PATCHED, 2), (B06_PATCHED, 3)])
def test_boxes_of_a_row_do_not_overlap(patched, rows_of_a_consumer):
    rows = rows_of(draw(fake_timeline(patched))).values()
    assert len(rows) == 4 + 2 * rows_of_a_consumer + 1 + 1
    for row in rows:
        row.sort()
        assert all(sum(one) <= other[0] + 0.1 for one, other in pairwise(row))


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
    ("patched", "path", "value"),
    [
        (V09_PATCHED, ("producer",), None),
        (V09_PATCHED, ("consumer 0",), None),
        (V09_PATCHED, ("consumer 1", "end S"), None),
        (V09_PATCHED, ("consumer 1", "end S"), [1, 2]),
        (V09_PATCHED, ("consumer 1", "end S"), [1] * 32),
        (V09_PATCHED, ("producer", "load K"), [0.5] * 32),
        (B06_PATCHED, ("producer", "load dO"), None),
        (B06_PATCHED, ("consumer 1", "dQ read"), [1] * 64),
    ],
)
def test_malformed_record_is_named(tmp_path, patched, path, value):
    record = fake_timeline(patched)
    node = record["clocks"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    write_record(tmp_path / f"{patched.name}.json", record)
    with pytest.raises(UsageError, match=rf"{patched.name}\.json: the record: clocks cannot be"):
        read_records(tmp_path, TIMELINE_RECORD)


@pytest.mark.parametrize(
    ("patched", "tiles", "read"),
    [
        (V09_PATCHED, 6, False),
        (V09_PATCHED, 7, True),
        (V09_PATCHED, 8, True),
        (B06_PATCHED, 3, False),
        (B06_PATCHED, 4, True),
    ],
)
def test_a_record_has_the_tiles_that_are_shown(tmp_path, patched, tiles, read):
    record = fake_timeline(patched, tiles)
    write_record(tmp_path / f"{patched.name}.json", record)
    if read:
        assert read_records(tmp_path, TIMELINE_RECORD) == {patched.name: record}
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
