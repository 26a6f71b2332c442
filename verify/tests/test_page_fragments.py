"""The playground of fragments shows the layouts of the PTX ISA, for every thread and register."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest

from common.report.diagrams.fragments import k_row, v_row
from common.report.page.fragments import N

MMA, LDMATRIX, TRANS, WGMMA, S_TO_A = range(5)

# Of each view, once more, from the tables of the PTX ISA: the element that value i of thread t is,
# g = t % 32 / 4 and c = t % 4. A value is a half of a register of 16-bit elements, or a float.


def isa_a(t: int, i: int) -> tuple[int, int]:
    row = t % 32 // 4 + (0 if i < 2 or 4 <= i < 6 else 8)
    return 16 * (t // 32) + row, t % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


def isa_b(t: int, i: int) -> tuple[int, int]:
    return t % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), t // 4


def isa_d(t: int, i: int) -> tuple[int, int]:
    return t // 4 + (0 if i < 2 else 8), t % 4 * 2 + (i & 1)


def isa_wgmma_d(t: int, i: int) -> tuple[int, int]:
    row = 16 * (t // 32) + t % 32 // 4 + (8 if i % 4 >= 2 else 0)
    return row, 8 * (i // 4) + t % 4 * 2 + (i & 1)


def isa_ldmatrix_k(t: int, i: int) -> tuple[int, int]:
    """Matrices 0 and 1 are d 0 to 7 and 8 to 15 of keys 0 to 7, 2 and 3 those of keys 8 to 15."""
    return t // 4 + 8 * (i // 4), t % 4 * 2 + (i & 1) + 8 * (i // 2 % 2)


def isa_ldmatrix_v(t: int, i: int) -> tuple[int, int]:
    """Matrices 0 and 1 are keys 0 to 7 and 8 to 15 of d 0 to 7, 2 and 3 those of d 8 to 15."""
    return t % 4 * 2 + (i & 1) + 8 * (i // 2 % 2), t // 4 + 8 * (i // 4)


EXPECTED = {
    (MMA, "A"): (isa_a, 32, 8),
    (MMA, "B"): (isa_b, 32, 4),
    (MMA, "D"): (isa_d, 32, 4),
    (LDMATRIX, "K"): (isa_ldmatrix_k, 32, 8),
    (TRANS, "V"): (isa_ldmatrix_v, 32, 8),
    (WGMMA, "D"): (isa_wgmma_d, 128, N // 2),
    (WGMMA, "A"): (isa_a, 128, 8),
    (S_TO_A, "S"): (isa_wgmma_d, 32, 8),
    (S_TO_A, "P"): (isa_a, 32, 8),
}


def views(page) -> list[dict]:
    return json.loads(page.locator("#data").text_content())["fragments"]


def by_thread(page, grid: dict, threads: int) -> list[list[tuple[int, int]]]:
    found = page.evaluate(
        """([grid, threads]) => d3.range(threads).map((thread) =>
            worklog.models.fragments.elements(grid, thread))""",
        [grid, threads],
    )
    return [[tuple(element) for element in each] for each in found]


def by_element(page, grid: dict) -> dict[tuple[int, int], tuple[int, int]]:
    """Thread and value."""
    places = list(product(range(grid["rows"]), range(grid["columns"])))
    found = page.evaluate(
        """([grid, places]) => places.map(([row, column]) =>
            worklog.models.fragments.holder(grid, row, column))""",
        [grid, places],
    )
    return {
        place: (each["thread"], each["value"]) for place, each in zip(places, found, strict=True)
    }


def test_every_thread_and_register_is_as_in_the_isa(open_page):
    page = open_page()
    shown = {
        (n, grid["name"]): grid for n, view in enumerate(views(page)) for grid in view["grids"]
    }
    assert shown.keys() == EXPECTED.keys()
    for key, (element, threads, values) in EXPECTED.items():
        grid = shown[key]
        expected = [[element(t, i) for i in range(values)] for t in range(threads)]
        assert by_thread(page, grid, threads) == expected
        assert by_element(page, grid) == {
            place: (t, i) for t, each in enumerate(expected) for i, place in enumerate(each)
        }
        assert len(grid["words"]) == len(grid["cells"]) == len(grid["colors"]) == values

    # The comparison notices two registers that have changed places.
    grid = shown[MMA, "A"]
    grid["holders"] = [held ^ 2 for held in grid["holders"]]
    assert by_thread(page, grid, 32) != [[isa_a(t, i) for i in range(8)] for t in range(32)]


def test_registers_have_their_names(open_page):
    page = open_page()
    found = views(page)
    mma_a, mma_b, mma_d = found[MMA]["grids"]
    halves = "lower", "upper"
    for grid, letter, registers in (mma_a, "a", 4), (mma_b, "b", 2):
        assert grid["words"] == [
            f"the {half} half of {letter}{r}" for r in range(registers) for half in halves
        ]
    assert mma_d["words"] == ["d0", "d1", "d2", "d3"]
    for view, tiles, letter in (WGMMA, N // 8, "d"), (S_TO_A, 2, "s"):
        assert found[view]["grids"][0]["words"] == [
            f"{letter}[{j}][{i}]" for j in range(tiles) for i in range(4)
        ]


def test_s_becomes_a_without_a_move(open_page):
    page = open_page()
    s, p = views(page)[S_TO_A]["grids"]
    of_s, of_p = by_element(page, s), by_element(page, p)
    for place, (thread, value) in of_s.items():
        assert of_p[place][0] == thread
        # The pair s[j][2 r], s[j][2 r + 1] is the register a[2 j + r], and so is its color.
        assert value // 2 == of_p[place][1] // 2
        assert s["colors"][value] == p["colors"][of_p[place][1]] == value // 2


def test_lanes_give_the_addresses_of_the_rows(open_page):
    found = views(open_page())
    for view, row_of in (LDMATRIX, k_row), (TRANS, v_row):
        (grid,) = found[view]["grids"]
        assert grid["addresses"] == [list(row_of(lane)) for lane in range(32)]


# ---- what one sees


@pytest.fixture
def page(open_page):
    page = open_page()
    page.locator("#fragments").scroll_into_view_if_needed()
    return page


def control(page, label: str):
    labels = page.locator("#fragments label", has_text=re.compile(f"^{label}"))
    return labels.locator("select, input")


def told(page, part: str = "told") -> str:
    return page.locator(f"#fragments .{part}").text_content()


def own_cells(page, grid: int) -> list[str]:
    board = page.locator("#fragments .boards > div").nth(grid)
    return board.locator(".own text").all_text_contents()


def test_a_lane_shows_what_it_holds(page):
    control(page, "Thread").fill("30")
    control(page, "Thread").press("ArrowUp")
    assert [own_cells(page, grid) for grid in range(3)] == [
        ["a0", "a0", "a2", "a2", "a1", "a1", "a3", "a3"],
        ["b0", "b0", "b1", "b1"],
        ["d0", "d1", "d2", "d3"],
    ]
    assert told(page) == "A[7, 6] is in the lower half of a0 of lane 31."
    assert told(page, "holds") == (
        "Lane 31 has g = 7 and t = 3; it holds a0: A[7, 6–7]; a1: A[15, 6–7]; a2: A[7, 14–15]; "
        "a3: A[15, 14–15]; b0: B[6–7, 7]; b1: B[14–15, 7]; d0, d1: D[7, 6–7]; d2, d3: D[15, 6–7]."
    )
    control(page, "Thread").press("ArrowUp")  # 31 is the last
    assert told(page).endswith("lane 31.")


def test_an_element_shows_who_holds_it(page):
    b = page.locator("#fragments .boards > div").nth(1)
    b.locator(".cell").nth(8 * 9 + 5).hover()  # B[9, 5]
    assert told(page) == "B[9, 5] is in the upper half of b1 of lane 20."
    assert control(page, "Thread").input_value() == "20"
    assert control(page, "row").input_value() == "9"
    assert own_cells(page, 1) == ["b0", "b0", "b1", "b1"]
    control(page, "Element of").select_option("2")
    control(page, "row").fill("12")
    control(page, "column").fill("3")
    assert told(page) == "D[12, 3] is in d3 of lane 17."


def test_a_warpgroup_shows_the_rows_of_the_threads_warp(page):
    control(page, "Instruction").select_option(str(WGMMA))
    control(page, "Thread").fill("127")
    assert told(page) == "D[55, 6] is in d[0][0] of thread 127."
    assert "Thread 127, lane 31 of warp 3, has g = 7 and t = 3" in told(page, "holds")
    rows = page.locator("#fragments .boards > div").nth(1).locator(".at").all_text_contents()
    assert rows == [str(row) for row in range(48, 64)]
    assert own_cells(page, 0) == (N // 8) * ["[0]", "[1]"] + (N // 8) * ["[2]", "[3]"]
    control(page, "row").fill("20")
    assert told(page) == "D[20, 6] is in d[0][0] of thread 51."
    control(page, "Instruction").select_option(str(MMA))  # which has no thread 51
    assert told(page).endswith("lane 31.")


def test_ldmatrix_shows_who_gives_an_address_and_who_receives(page):
    control(page, "Instruction").select_option(str(TRANS))
    control(page, "Thread").fill("18")
    assert "it gives the address of V[2, 8–15] and holds r0: V[4–5, 4]" in told(page, "holds")
    assert page.locator("#fragments .gives").all_text_contents() == ["← 18"]


def test_s_and_p_are_outlined_together(page):
    control(page, "Instruction").select_option(str(S_TO_A))
    page.locator("#fragments .boards > div").nth(1).locator(".cell").nth(16 * 9 + 12).click()
    assert told(page) == (
        "P[9, 12] is in the lower half of a3 of lane 6, S[9, 12] in s[1][2] of the same lane."
    )
    outlined = page.locator("#fragments .outline:not([visibility])").evaluate_all(
        "all => all.map((each) => each.getAttribute('x'))"
    )
    assert len(outlined) == 2
    assert len(set(outlined)) == 1


@pytest.mark.parametrize(("label", "last"), [("Thread", 31), ("row", 15), ("column", 15)])
def test_a_number_that_is_none_is_said(page, label, last):
    before = own_cells(page, 0)
    for wrong in ("", "-1", str(last + 1), "1.5"):
        control(page, label).fill(wrong)
        assert told(page) == f"A whole number from 0 to {last} is needed."
        assert own_cells(page, 0) == before
    control(page, label).fill(str(last))
    assert "is in" in told(page)
