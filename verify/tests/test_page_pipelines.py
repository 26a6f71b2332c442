"""The pipelines' player: what it says of a clock is what was recorded, and its controls work."""

from __future__ import annotations

import pytest

from common.paths import ROOT
from common.records import HEADLINE_GPU, PROFILES_DIR
from common.report.page import pipelines
from common.report.pipeline import Box, Pipeline, derive
from common.report.record_set import load_record_set

AT = """
([step, clocks]) => {
    const model = worklog.models.pipelines;
    const data = JSON.parse(document.getElementById("data").textContent).pipelines;
    const pipeline = model.read(data.find((each) => each.step === step));
    const named = (box) => box && [box.what, box.tile, box.start, box.end];
    return clocks.map((clock) =>
        pipeline.boxes.map((boxes) => {
            const { now, next } = model.at(boxes, clock);
            const before = next && pipeline.before(next);
            return [now.map(named), named(next), named(before)];
        }),
    );
}
"""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Pipeline]:
    timelines = load_record_set(PROFILES_DIR / HEADLINE_GPU, ROOT).timelines
    return {name: derive(record) for name, record in timelines.records.items()}


def shown(page) -> list[float]:
    """The clocks at the ends of the axis, from its label."""
    label = page.locator("#pipelines .timeline svg").get_attribute("aria-label")
    return [float(clock) for clock in label.split("clocks ")[1].split(" to ")]


def clock(page) -> float:
    return float(page.locator("#pipelines .scrub input").input_value())


def press(page, name: str) -> None:
    page.locator("#pipelines").get_by_role("button", name=name, exact=True).press("Enter")


def test_all_that_are_recorded_are_there(recorded) -> None:
    assert {"v09", "v10", "v11", "b06", "b08"} <= recorded.keys()


@pytest.mark.parametrize("step", ["v09", "v10", "v11", "b06", "b08"])
def test_what_each_row_does_at_a_clock(open_page, recorded, step: str) -> None:
    pipeline = recorded[step]
    first, last = pipeline.window
    clocks = [*range(-2000, last - first, 613), pipeline.rows[0].boxes[3].start - first]

    def named(box: Box | None) -> list | None:
        return box and [box.what, box.tile, box.start - first, box.end - first]

    expected = []
    for at in clocks:
        rows = []
        for row in pipeline.rows:
            boxes = sorted(row.boxes, key=lambda box: box.start)
            now = [named(box) for box in boxes if box.start - first <= at < box.end - first]
            following = next((box for box in boxes if box.start - first > at), None)
            before = None
            if following and following.after:
                r, b = following.after
                before = pipeline.rows[r].boxes[b]
            rows.append([now, named(following), named(before)])
        expected.append(rows)
    found = open_page().evaluate(AT, [step, clocks])
    assert found == expected
    assert open_page().evaluate(AT, [step, [at + 100 for at in clocks]]) != expected


def test_what_comes_before_has_ended_and_is_the_last_of_what_is_needed(recorded) -> None:
    for pipeline in recorded.values():
        boxes = {
            (row.who, box.what): [b for b in row.boxes if b.what == box.what]
            for row in pipeline.rows
            for box in row.boxes
        }
        for row in pipeline.rows:
            for box in row.boxes:
                if box.after is None:
                    continue
                before = pipeline.rows[box.after[0]].boxes[box.after[1]]
                assert pipeline.rows[box.after[0]].who == row.who
                assert before.end <= box.start
                same = boxes[row.who, before.what]
                assert not [b for b in same if before.end < b.end <= box.start]
    softmax = next(row for row in recorded["v10"].rows if row.title == "softmax")
    r, b = softmax.boxes[5].after
    product = recorded["v10"].rows[r].boxes[b]
    assert (product.what, product.tile) == ("S", softmax.boxes[5].tile)


def test_events_are_stepped_through(open_page) -> None:
    page = open_page()
    press(page, "Next event")
    first = clock(page)
    press(page, "Next event")
    assert 0 < first < clock(page)
    press(page, "Previous event")
    assert clock(page) == first
    assert f"At clock {first:.0f}" in page.locator("#pipelines .now").text_content()


def test_it_plays_and_pauses(open_page) -> None:
    page = open_page(reduced_motion="no-preference")
    press(page, "Play")
    page.wait_for_function("() => document.querySelector('#pipelines .scrub input').value > 30")
    press(page, "Pause")
    stopped = clock(page)
    page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert clock(page) == stopped


def test_nothing_plays_where_motion_is_reduced(open_page) -> None:
    page = open_page()
    assert page.locator("#pipelines").get_by_role("button", name="Play").count() == 0


def test_zoom(open_page) -> None:
    page = open_page()
    page.locator("#pipelines .timeline svg").scroll_into_view_if_needed()
    page.wait_for_selector("#pipelines .timeline .box")
    low, high = shown(page)
    press(page, "Zoom in")
    assert shown(page)[1] - shown(page)[0] == pytest.approx((high - low) / 2, abs=2)
    press(page, "Zoom out")
    press(page, "All")
    assert shown(page)[1] - shown(page)[0] > high - low


def test_two_steps_share_the_axis(open_page) -> None:
    page = open_page()
    page.locator("#pipelines .timeline svg").scroll_into_view_if_needed()
    page.wait_for_selector("#pipelines .timeline .box")
    rows = page.locator("#pipelines .now tr").count()
    page.locator("#pipelines select[name=second]").select_option("v11")
    assert page.locator("#pipelines .now tr").count() == 2 * rows
    label = page.locator("#pipelines .timeline svg").get_attribute("aria-label")
    assert label.startswith("Timeline of v10 and v11")
    assert page.locator("#pipelines .timeline .tick").count() < 25  # of one axis


def test_pointing_at_a_box_tells_what_it_came_after(open_page) -> None:
    page = open_page()
    page.locator("#pipelines .timeline svg").scroll_into_view_if_needed()
    page.wait_for_selector("#pipelines .timeline .box")
    box = page.locator("#pipelines .timeline .box", has_text="30").nth(3)
    box.hover()
    told = page.locator("#pipelines .pointed").text_content()
    assert "of tile 30" in told
    assert "Came after" in told
    assert page.locator("#pipelines .timeline .before").count() == 1


def test_without_timelines(open_page, tmp_path) -> None:
    assert pipelines.section(load_record_set(tmp_path, tmp_path)).data == []
    told = open_page().evaluate(
        """() => {
            const root = document.querySelector("#pipelines").cloneNode(true);
            worklog.sections.pipelines(root, []);
            return root.querySelector(".pointed").textContent;
        }"""
    )
    assert told == "Not measured: make profile N=10."
