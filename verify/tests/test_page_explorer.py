"""The grid explorer: every measured cell can be reached, and says what the record says."""

from __future__ import annotations

import pytest

from common.operation import BACKWARD, FORWARD, OPERATIONS
from common.paths import ROOT
from common.records import HEADLINE_GPU, PROFILES_DIR
from common.report import rows
from common.report.page import explorer
from common.report.record_set import load_record_set
from verify.tests.page_under_test import render

KEYS = ("dtype", "inputs", "head_dim", "mask", "shape")
NEAREST = """
([cells, wanted, first]) => worklog.models.explorer.nearest(cells, wanted, first).name
"""


@pytest.fixture(scope="module")
def record_sets() -> list:
    return [load_record_set(PROFILES_DIR / gpu, ROOT) for gpu in (HEADLINE_GPU, "h100")]


@pytest.fixture(scope="module")
def boards(record_sets) -> list[dict]:
    return explorer.section(record_sets).data


def chosen(page, key: str) -> str:
    return page.locator(f"#grid select[name={key}]").input_value()


def choose(page, key: str, value: str) -> None:
    page.locator(f"#grid select[name={key}]").select_option(value)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_all_rates_of_the_grid_are_there(record_sets, boards, operation) -> None:
    (board,) = [
        each
        for each in boards
        if (each["device"], each["operation"]) == ("NVIDIA H200", operation.name)
    ]
    cells = {cell["name"]: cell for cell in board["cells"]}
    for row in rows.grid(record_sets[0].of(operation)):
        shown = cells[row["name"]]
        measured = {n: rate for n, rate in row["tflops"].items() if isinstance(rate, float)}
        assert shown["tflops"] == pytest.approx(measured, rel=1e-3)
        assert shown["ratio"] == row["ratio"]


def test_the_first_gpus_forward_board_has_both_dtypes_and_all_inputs(record_sets, boards) -> None:
    distributions = record_sets[0].distributions.record["cells"]
    names = {cell["name"] for cell in boards[0]["cells"]}
    grid = {cell["name"] for cell in record_sets[0].of(FORWARD).grid.record["cells"]}
    assert grid <= names
    assert len(boards[0]["cells"]) > len(grid)
    for cell in distributions:
        same_as_the_grid = (cell["inputs"], cell["dtype"]) == ("normal_1", "bf16")
        assert (cell["name"] in names) != same_as_the_grid


def test_what_is_chosen_keeps_as_much_of_the_cell_as_it_can(open_page, boards) -> None:
    page = open_page()
    cells = boards[0]["cells"]
    for first, value in (("dtype", "fp16"), ("head_dim", 64), ("mask", "causal")):
        for wanted in cells[:: max(1, len(cells) // 7)]:
            asked = wanted | {first: value}
            name = page.evaluate(NEAREST, [cells, asked, first])
            found = next(cell for cell in cells if cell["name"] == name)
            assert found[first] == value
            order = [first, *(key for key in KEYS if key != first)]
            best = max([c[key] == asked[key] for key in order] for c in cells)
            assert [found[key] == asked[key] for key in order] == best


def test_a_choice_is_told_in_words_and_in_the_address(open_page, boards) -> None:
    page = open_page()
    choose(page, "mask", "causal")
    choose(page, "head_dim", "64")
    values = [chosen(page, key) for key in KEYS]
    (cell,) = [cell for cell in boards[0]["cells"] if [str(cell[key]) for key in KEYS] == values]
    assert (cell["mask"], cell["head_dim"]) == ("causal", 64)
    told = page.locator("#grid .told").text_content()
    step = next(name for name in boards[0]["taken"] if name in cell["tflops"])
    assert f"attention() takes {step}: {cell['tflops'][step]:g} TFLOP/s" in told
    assert f"{cell['ratio']:.3f} ×" in told
    assert page.url.endswith(cell["name"])


def test_an_address_opens_its_cell(open_page, page_path, boards) -> None:
    page = open_page()
    backward = next(board for board in boards if board["operation"] == BACKWARD.name)
    cell = backward["cells"][-1]
    page.goto(f"{page_path.as_uri()}#grid=NVIDIA%20H200%2Fbackward%2F{cell['name']}")
    page.reload()
    assert chosen(page, "operation") == "backward"
    assert chosen(page, "head_dim") == str(cell["head_dim"])


def test_a_second_gpu_is_there_by_itself(open_page, record_sets, boards, tmp_path) -> None:
    devices = list(dict.fromkeys(board["device"] for board in boards))
    assert len(devices) > 1
    path = tmp_path / "two.html"
    path.write_text(render(record_sets[1]), encoding="utf-8")
    page = open_page(path)
    shown = page.locator("#grid select[name=device] option").all_text_contents()
    assert shown == devices
    choose(page, "device", devices[1])
    assert chosen(page, "device") == devices[1]


def test_a_dot_is_chosen_with_a_click(open_page, boards) -> None:
    page = open_page()
    page.locator("#grid .overview").scroll_into_view_if_needed()
    page.locator("#grid .overview path[fill='var(--ramp6)']").nth(5).click(force=True)
    assert page.url.split("%2F")[-1] in {cell["name"] for cell in boards[0]["cells"]}


def test_nothing_measured_is_told(open_page) -> None:
    page = open_page()
    told = page.evaluate(
        """() => {
            const root = document.querySelector('#grid').cloneNode(true);
            worklog.sections.explorer(root, []);
            return root.querySelector('.told').textContent;
        }"""
    )
    assert told == "Not measured: make bench GRID=1."
