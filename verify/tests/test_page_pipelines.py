"""The pipelines' player: what it says of a clock is what was recorded, and its controls work."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from common.catalog import find_step
from common.errors import UsageError
from common.paths import ROOT
from common.records import HEADLINE_GPU, PROFILES_DIR
from common.report.page import pipelines
from common.report.pipeline import PRODUCER, START, Box, Need, Pipeline, derive
from common.report.record_set import load_record_set

STEPS = ["v09", "v10", "v11", "b06", "b08"]
# By copy: tiles that have a place in shared memory, and the line of the step that says so.
PLACES = {
    "v09": {"copy of K": (2, "NUM_STAGES = 2;"), "copy of V": (2, "NUM_STAGES = 2;")},
    "v10": {
        "copy of K": (2, "NUM_STAGES = CONSUMERS;"),
        "copy of V": (2, "CONSUMERS = HEAD_DIM <= 96 ? 3 : 2;"),
    },
    "v11": {
        "copy of K": (2, "NUM_STAGES = CONSUMERS;"),
        "copy of V": (2, "CONSUMERS = HEAD_DIM <= 96 ? 3 : 2;"),
    },
    "b06": {"copy of Q": (2, "NUM_STAGES = 2;"), "copy of dO": (2, "NUM_STAGES = 2;")},
    "b08": {
        "copy of Q": (3, "Q_STAGES = HEAD_DIM <= 64 ? 2 : 3;"),
        "copy of dO": (2, "DOUT_STAGES = 2;"),
    },
}

NAMED = """
const model = worklog.models.pipelines;
const data = JSON.parse(document.getElementById("data").textContent).pipelines;
const pipeline = model.read(data.find((each) => each.step === step));
const named = (box) => box && [box.row, box.what, box.tile, box.start, box.end, box.issued];
"""
AT = f"""
([step, clocks]) => {{
    {NAMED}
    return clocks.map((clock) =>
        pipeline.boxes.map((boxes) => {{
            const {{ now, next }} = model.at(boxes, clock);
            return [now.map(named), named(next)];
        }}),
    );
}}
"""
NEEDS = f"""
(step) => {{
    {NAMED}
    const needs = (box) =>
        pipeline.needs(box).map((need) => [need.why, named(need.box), need.started, need.clock]);
    const told = (box) => [named(box), pipeline.free(box), needs(box)];
    return pipeline.boxes.map((row) => row.map(told));
}}
"""


def record_of(step: str) -> dict:
    path = PROFILES_DIR / HEADLINE_GPU / "timelines" / f"{step}.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Pipeline]:
    timelines = load_record_set(PROFILES_DIR / HEADLINE_GPU, ROOT).timelines
    return {name: derive(record) for name, record in timelines.records.items()}


def in_time(boxes: tuple[Box, ...]) -> list[Box]:
    return sorted(boxes, key=lambda box: box.start)


def named(first: int, row: int, box: Box | None) -> list | None:
    """As NAMED, in clocks since the window's start."""
    times = box and [box.start - first, box.end - first, box.issued - first]
    return box and [row, box.what, box.tile, *times]


def shown(page) -> list[float]:
    """The clocks at the ends of the axis, from its label."""
    label = page.locator("#pipelines .timeline svg").get_attribute("aria-label")
    return [float(clock) for clock in label.split("clocks ")[1].split(" to ")]


def clock(page) -> float:
    return float(page.locator("#pipelines .scrub input").input_value())


def press(page, name: str) -> None:
    page.locator("#pipelines").get_by_role("button", name=name, exact=True).press("Enter")


def drawn(page) -> None:
    page.locator("#pipelines .timeline svg").scroll_into_view_if_needed()
    page.wait_for_selector("#pipelines .timeline .box")


def test_all_that_are_recorded_are_there(recorded) -> None:
    assert set(STEPS) <= recorded.keys()


@pytest.mark.parametrize("step", STEPS)
def test_what_each_row_does_at_a_clock(open_page, recorded, step: str) -> None:
    pipeline = recorded[step]
    first, last = pipeline.window
    clocks = [*range(-2000, last - first, 613), pipeline.rows[0].boxes[3].start - first]
    expected = []
    for at in clocks:
        rows = []
        for r, row in enumerate(pipeline.rows):
            boxes = in_time(row.boxes)
            now = [named(first, r, b) for b in boxes if b.start - first <= at < b.end - first]
            following = next((box for box in boxes if box.start - first > at), None)
            rows.append([now, named(first, r, following)])
        expected.append(rows)
    page = open_page()
    assert page.evaluate(AT, [step, clocks]) == expected
    assert page.evaluate(AT, [step, [at + 100 for at in clocks]]) != expected


@pytest.mark.parametrize("step", STEPS)
def test_what_each_box_waited_for(open_page, recorded, step: str) -> None:
    def of(pipeline: Pipeline) -> list:
        first, _ = pipeline.window
        rows = []
        for r, row in enumerate(pipeline.rows):
            boxes = in_time(row.boxes)
            lines = 2 if row.who == PRODUCER else 1
            rows.append([])
            for place, box in enumerate(boxes):
                free = boxes[place - lines].end - first if place >= lines else None
                needs = [
                    [met.why, named(first, met.row, met.box), met.event == START, met.clock - first]
                    for met in pipeline.needs_of(r, box)
                ]
                rows[-1].append([named(first, r, box), free, needs])
        return rows

    found = open_page().evaluate(NEEDS, step)
    assert found == of(recorded[step])
    one_later = {
        what: tuple(replace(need, back=need.back + 1) for need in needs)
        for what, needs in recorded[step].rows[0].needs.items()
    }
    rows = recorded[step].rows
    assert found != of(replace(recorded[step], rows=(replace(rows[0], needs=one_later), *rows[1:])))


def copies(pipeline: Pipeline) -> dict[str, set[int]]:
    """How many tiles before a copy its place was another tile's."""
    return {
        what: {need.back for need in needs if need.why.startswith("a free place")}
        for row in pipeline.rows
        if row.who == PRODUCER
        for what, needs in row.needs.items()
    }


@pytest.mark.parametrize("step", STEPS)
def test_places_in_shared_memory_are_those_of_the_step(recorded, step: str) -> None:
    source = find_step(step).path.read_text(encoding="utf-8")
    assert copies(recorded[step]) == {what: {tiles} for what, (tiles, _) in PLACES[step].items()}
    for _, line in PLACES[step].values():
        assert f"constexpr int {line}" in source


def test_a_place_is_free_when_all_consumers_have_read_it(recorded) -> None:
    """From the record itself: two tiles before, by the last one."""
    record, pipeline = record_of("v10"), recorded["v10"]
    copy = pipeline.rows[0].boxes[7]
    consumers = [record["clocks"][f"consumer {n}"] for n in range(2)]
    assert copy.start == record["clocks"]["producer"]["load K"][7]
    last = pipeline.needs_of(0, copy)[0]
    assert last.clock == max(clocks["end S"][5] for clocks in consumers)
    assert pipeline.rows[last.row].who == "consumer 1"


def test_a_turn_of_b08_begins_when_the_other_consumer_has_started_its_products(recorded) -> None:
    record, pipeline = record_of("b08"), recorded["b08"]
    for r, row in enumerate(pipeline.rows):
        boxes = [box for box in row.boxes if box.what == "dV"]
        for tile, box in enumerate(boxes[1:-1], 1):
            last = pipeline.needs_of(r, box)[0]
            second = row.who == "consumer 1"
            other = record["clocks"]["consumer 0" if second else "consumer 1"]
            assert last.why.startswith("its turn")
            assert last.clock == other["start dP"][tile + second]


def test_only_steps_that_take_turns_wait_for_them(recorded) -> None:
    """That is: the samples of b06, whose source has no such barrier, contradict it."""
    for name, pipeline in recorded.items():
        needs = [need for row in pipeline.rows for each in row.needs.values() for need in each]
        takes_turns = "wait_for_turn" in find_step(name).path.read_text(encoding="utf-8")
        assert any(need.why.startswith("its turn") for need in needs) == takes_turns


def test_needs_are_met_before_a_box_begins(recorded) -> None:
    """But where a barrier is behind the sample: v09's first S, and the place of b08's dQ."""
    late = set()
    for name, pipeline in recorded.items():
        for r, row in enumerate(pipeline.rows):
            for box in row.boxes:
                for met in pipeline.needs_of(r, box):
                    assert met.clock <= box.end
                    if met.clock > box.start:
                        late.add((name, row.who, box.what, met.why.partition(", by")[0]))
    assert late == {
        ("v09", "consumer 1", "S", "its turn"),
        ("b08", "consumer 0", "dQ to shared memory", "the free place of dQ"),
        ("b08", "consumer 1", "dQ to shared memory", "the free place of dQ"),
    }


def test_a_need_that_a_sample_contradicts_is_dropped(recorded) -> None:
    pipeline = recorded["v10"]
    turn = next(need for need in pipeline.rows[2].needs["S"] if need.why.startswith("its turn"))
    assert not pipeline.contradicts(2, "S", turn)
    assert pipeline.contradicts(2, "S", replace(turn, back=turn.back - 1))
    # One copy of K that starts before the tile two before it has been read: there are three places.
    early = deepcopy(record_of("v10"))
    read = min(early["clocks"][f"consumer {n}"]["end S"][8] for n in range(2))
    early["clocks"]["producer"]["load K"][10] = read - 1
    assert copies(derive(early))["copy of K"] == {3}
    none = Need("none such", 0, "copy of nothing", 0, START)
    assert not pipeline.contradicts(2, "S", none)


def test_events_are_stepped_through(open_page) -> None:
    page = open_page()
    press(page, "Next event")
    first = clock(page)
    press(page, "Next event")
    assert 0 < first < clock(page)
    press(page, "Previous event")
    assert clock(page) == first
    assert f"At clock {first:.0f}" in page.locator("#pipelines .now").text_content()


def test_a_step_changes_only_what_it_is_about(open_page) -> None:
    """What a live region repeats, a screen reader repeats."""
    page = open_page()
    cells = page.locator("#pipelines .now td")
    before = cells.all_text_contents()
    cells.evaluate_all("(cells) => cells.forEach((cell) => (cell.firstChild.kept = true))")
    press(page, "Next event")
    after = cells.all_text_contents()
    kept = cells.evaluate_all("(cells) => cells.map((cell) => cell.firstChild.kept ?? false)")
    assert kept == [old == new for old, new in zip(before, after, strict=True)]
    assert any(kept)
    assert not all(kept)


def test_it_plays_and_pauses(open_page) -> None:
    page = open_page(reduced_motion="no-preference")
    now = page.locator("#pipelines .now")
    assert now.get_attribute("aria-live") == "polite"
    assert clock(page) == 0  # nothing plays by itself
    press(page, "Play")
    page.wait_for_function("() => document.querySelector('#pipelines .scrub input').value > 30")
    assert now.get_attribute("aria-live") == "off"
    press(page, "Pause")
    stopped = clock(page)
    page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert clock(page) == stopped
    assert now.get_attribute("aria-live") == "polite"


def test_where_motion_is_reduced_it_plays_from_event_to_event(open_page, recorded) -> None:
    page = open_page()
    first, _ = recorded["v10"].window
    boxes = [box for row in recorded["v10"].rows for box in row.boxes]
    events = {clock - first for box in boxes for clock in (box.start, box.end)}
    page.clock.install(time=0)
    page.clock.pause_at(3600)  # it goes on by run_for() only, however slow this machine is
    press(page, "Play")
    seen = [clock(page)]
    for _ in range(3):
        page.clock.run_for(700)
        seen.append(clock(page))
    assert seen == sorted(event for event in events if event > 0)[:4]
    press(page, "Pause")
    page.clock.run_for(5000)
    assert clock(page) == seen[-1]


def test_it_is_scrubbed_by_keyboard(open_page) -> None:
    page = open_page()
    scrub = page.locator("#pipelines .scrub input")
    scrub.press("End")
    assert "no more samples" in page.locator("#pipelines .now").text_content()
    end = clock(page)
    scrub.press("Home")
    assert clock(page) < 0 < end
    low, high = shown(page)
    assert low <= clock(page) <= high  # the axis follows


def test_zoom(open_page) -> None:
    page = open_page()
    drawn(page)
    low, high = shown(page)
    press(page, "Zoom in")
    assert shown(page)[1] - shown(page)[0] == pytest.approx((high - low) / 2, abs=2)
    press(page, "Zoom out")
    press(page, "All")
    assert shown(page)[1] - shown(page)[0] > high - low


def test_the_wheel_zooms_only_with_ctrl(open_page) -> None:
    page = open_page()
    drawn(page)
    page.locator("#pipelines .timeline svg").hover()
    before, top = shown(page), page.evaluate("scrollY")
    page.mouse.wheel(0, 60)
    page.wait_for_function(f"() => scrollY !== {top}")
    assert shown(page) == before
    page.locator("#pipelines .timeline svg").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -60)
    page.wait_for_function(
        "(label) => document.querySelector('#pipelines .timeline svg').ariaLabel !== label",
        arg=f"Timeline of v10, clocks {before[0]:.0f} to {before[1]:.0f}",
    )
    assert shown(page)[1] - shown(page)[0] < before[1] - before[0]


def test_two_steps_share_the_axis(open_page) -> None:
    page = open_page()
    drawn(page)
    rows = page.locator("#pipelines .now tr").count()
    page.locator("#pipelines select[name=second]").select_option("v11")
    assert page.locator("#pipelines .now tr").count() == 2 * rows
    label = page.locator("#pipelines .timeline svg").get_attribute("aria-label")
    assert label.startswith("Timeline of v10 and v11")
    assert page.locator("#pipelines .timeline .tick").count() < 25  # of one axis
    # Both have S of the first consumer begin at clock 0, so at the same place.
    starts = page.locator("#pipelines .timeline .box rect").evaluate_all(
        """(boxes) => boxes
            .filter((box) => box.__data__.what === "S" && box.__data__.start === 0)
            .map((box) => box.getAttribute("x"))"""
    )
    assert len(starts) == 2
    assert len(set(starts)) == 1


def test_pointing_at_a_box_tells_what_it_waited_for(open_page) -> None:
    page = open_page()
    drawn(page)
    box = page.locator("#pipelines .timeline .box", has_text="31").first  # copy of K
    box.hover()
    told = page.locator("#pipelines .pointed").text_content()
    assert "producer: copy of K of tile 31" in told
    assert "a free place in shared memory" in told
    assert "S of tile 29 of consumer 1 ended" in told
    assert page.locator("#pipelines .timeline .before").text_content() == "29"
    assert page.locator("#pipelines .timeline .arrow").count() == 1


def test_pointing_beside_a_box_tells_of_the_wait_before_the_next(open_page) -> None:
    page = open_page()
    drawn(page)
    softmax = page.locator("#pipelines .timeline .box", has_text="30").last.bounding_box()
    page.mouse.move(softmax["x"] - 5, softmax["y"] + softmax["height"] / 2)
    told = page.locator("#pipelines .pointed").text_content()
    assert "v10, consumer 1: a gap of" in told
    assert "before softmax of tile 30" in told
    assert "S of tile 30 of consumer 1 ended" in told
    assert page.locator("#pipelines .timeline .wait").count() == 1


def test_an_interval_is_chosen_by_keyboard(open_page) -> None:
    page = open_page()
    drawn(page)
    buttons = page.locator("#pipelines .now button")
    buttons.first.press("Enter")
    told = page.locator("#pipelines .pointed").text_content()
    assert buttons.first.text_content() in told
    assert "It needed" in told
    assert page.locator("#pipelines .timeline .chosen").count() == 1
    assert buttons.first.evaluate("(button) => button === document.activeElement")


def test_it_fits_a_phone(open_page) -> None:
    page = open_page(width=360)
    drawn(page)
    page.locator("#pipelines select[name=second]").select_option("b08")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_without_timelines(open_page, tmp_path: Path) -> None:
    assert pipelines.section(load_record_set(tmp_path, tmp_path)).data == []
    told = open_page().evaluate(
        """() => [[], undefined].map((data) => {
            const root = document.querySelector("#pipelines").cloneNode(true);
            worklog.sections.pipelines(root, data);
            return root.querySelector(".pointed").textContent;
        })"""
    )
    assert told == ["Not measured: make profile N=10."] * 2


def test_a_malformed_timeline_is_refused(tmp_path: Path) -> None:
    record = record_of("v10")
    del record["clocks"]["consumer 1"]["end S"][3]
    (tmp_path / "timelines").mkdir()
    path = tmp_path / "timelines" / "v10.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UsageError, match=r"v10\.json"):
        load_record_set(tmp_path, ROOT)
