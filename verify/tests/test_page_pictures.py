"""The pictures on the page: maps and errors as they were recorded."""

from __future__ import annotations

import re

import pytest

from common.paths import ROOT
from common.records import HEADLINE_GPU, PROFILES_DIR
from common.report.page import pictures
from common.report.record_set import load_record_set


@pytest.fixture(scope="module")
def record() -> dict:
    return load_record_set(PROFILES_DIR / HEADLINE_GPU, ROOT).pictures.record


@pytest.mark.parametrize(("head", "row", "column"), [(0, 3, 3), (1, 31, 3), (4, 20, 5), (9, 2, 30)])
def test_a_cell_is_told(open_page, record, head: int, row: int, column: int) -> None:
    page = open_page()
    section = page.locator("#pictures")
    section.locator("select[name=head]").select_option(str(head))
    section.locator("input[name=row]").fill(str(row))
    section.locator("input[name=column]").fill(str(column))
    share = record["heads"][head]["map"][row][column] / 100
    told = section.locator(".told").text_content()
    assert f"Queries {8 * row} to {8 * row + 7} give {share:.2f} % of their weight" in told
    assert f"to keys {8 * column} to {8 * column + 7}" in told


def test_errors_are_the_records(open_page, record) -> None:
    page = open_page()
    section = page.locator("#pictures")
    section.locator("select[name=head]").select_option("6")
    rows = section.locator("tbody tr").all()
    for row, errors in zip(rows, record["heads"][6]["errors"].values(), strict=True):
        shown = [float(text) for text in row.locator("td").all_text_contents()]
        measured = [
            errors[who][key] for key in ("median", "maximum", "nrmse") for who in ("ours", "sdpa")
        ]
        assert shown == pytest.approx(measured, rel=6e-3)


def test_a_click_chooses_a_cell(open_page) -> None:
    page = open_page()
    page.locator("#pictures .map").scroll_into_view_if_needed()
    box = page.locator("#pictures .map svg").bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.25 * box["height"])
    page.mouse.down()
    page.mouse.up()
    assert int(page.locator("#pictures input[name=row]").input_value()) in range(6, 11)
    assert int(page.locator("#pictures input[name=column]").input_value()) in range(13, 18)


@pytest.mark.parametrize("width", [360, 1280])
def test_the_names_of_the_lines_can_be_read(open_page, record, width: int) -> None:
    """They are inside of the plot, and not on each other even where the lines end as one."""
    section = open_page(width=width).locator("#pictures")
    section.locator(".errors").scroll_into_view_if_needed()
    for head in range(len(record["heads"])):
        section.locator("select[name=head]").select_option(str(head))
        plot = section.locator(".errors svg").first.bounding_box()
        names = [
            section.locator(".errors svg text").filter(has_text=re.compile(name)).bounding_box()
            for name in (f"^{next(iter(record['sources']))}", "^torch's sdpa$")
        ]
        for box in names:
            assert plot["x"] <= box["x"]
            assert box["x"] + box["width"] <= plot["x"] + plot["width"]
        upper, lower = sorted(names, key=lambda box: box["y"])
        assert upper["y"] + upper["height"] <= lower["y"] + 1


def test_without_a_record(open_page, tmp_path) -> None:
    assert pictures.section(load_record_set(tmp_path, tmp_path)).data is None
    told = open_page().evaluate(
        """() => {
            const root = document.querySelector("#pictures").cloneNode(true);
            worklog.sections.pictures(root, null);
            return root.querySelector(".told").textContent;
        }"""
    )
    assert told == "Not recorded: make pictures on a GPU."
