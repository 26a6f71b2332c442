"""The playground of online softmax: its numbers are those of softmax, and of the kernels' rules."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import pytest

from common.catalog import find_step
from common.report.diagrams.softmax import LOGITS, VALUES, online, shifted
from common.report.page import softmax as playground

CALL = "([name, args]) => JSON.stringify(worklog.models.softmax[name](...args), (_, x) => "
CALL += "x === Infinity ? 'inf' : x === -Infinity ? '-inf' : Number.isNaN(x) ? 'nan' : x)"
TILES = {
    "figure": [list(tile) for tile in LOGITS],
    "one key": [[3.5]],
    "ragged": [[1.25, -3.0, 0.5, 2.0], [7.0]],
    "equal": [[5, 5], [5, 5]],
    "huge": [[1000.0, 1001.0], [1003.0, -1000.0]],
    "rises": [[1, 3, 2], [12, 20, 4], [40, 41, 7]],
    "far larger": [[1, 3, 2], [5, 4, 3], [200, 8, 7]],
    "partly masked": [[-math.inf, 2.0], [-math.inf, -math.inf], [4.0, -math.inf]],
    "first tile masked": [[-math.inf] * 3, [5, 4, 3]],
    "all masked": [[-math.inf] * 2, [-math.inf] * 2],
}


def values_for(tiles: list[list[float]]) -> list[list[float]]:
    numbers = iter(range(1, 100))
    return [[(-1) ** n * n / 2 for n, _ in zip(numbers, tile, strict=False)] for tile in tiles]


def call(page, name: str, *arguments: object):
    """A function of the model, with infinities both ways."""
    import json

    def plain(x):
        if isinstance(x, list):
            return [plain(each) for each in x]
        return (
            {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.get(x, x)
            if isinstance(x, str)
            else ({k: plain(v) for k, v in x.items()} if isinstance(x, dict) else x)
        )

    return plain(json.loads(page.evaluate(CALL, [name, list(arguments)])))


def direct(tiles: list[list[float]], values: list[list[float]]) -> tuple[float, float]:
    """O and log2 of the sum of 2^S, by the definition; 0 and -inf where no key is visible."""
    visible = [
        (Fraction(s), Fraction(v))
        for row, column in zip(tiles, values, strict=True)
        for s, v in zip(row, column, strict=True)
        if s != -math.inf
    ]
    if not visible:
        return 0.0, -math.inf
    top = max(s for s, _ in visible)
    weights = [(2 ** float(s - top), float(v)) for s, v in visible]
    total = math.fsum(w for w, _ in weights)
    return math.fsum(w * v for w, v in weights) / total, float(top) + math.log2(total)


@pytest.fixture(scope="module")
def page(browser, page_path):
    opened = browser.new_page()
    opened.goto(page_path.as_uri())
    yield opened
    opened.close()


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("dtype", [None, "fp16", "bf16"])
def test_the_result_is_softmax(page, name: str, dtype: str | None) -> None:
    tiles = TILES[name]
    values = values_for(tiles)
    if dtype is None:
        steps = call(page, "online", tiles, values)
    else:
        limits = playground.LIMITS[dtype]
        steps = call(page, "shifted", tiles, values, limits, playground.LEAST_SHIFT)
    found = call(page, "result", steps[-1])
    o, lse = direct(tiles, values)
    assert found["o"] == pytest.approx(o, rel=1e-12, abs=1e-12)
    assert found["lse"] == pytest.approx(lse, rel=1e-12)
    wrong, _ = direct(tiles, [[v + 1 for v in column] for column in values])
    assert wrong != pytest.approx(o, rel=1e-12) or name == "all masked"


def test_the_rescale_is_the_diagrams(page) -> None:
    found = call(page, "online", [list(t) for t in LOGITS], [list(v) for v in VALUES])
    for step, expected in zip(found, online(LOGITS, VALUES), strict=True):
        assert (step["m"], step["l"], step["o"]) == (
            expected.after.m,
            float(expected.after.l),
            float(expected.after.o),
        )
        assert step["p"] == [float(p) for p in expected.p]


def test_without_a_repair_the_shift_is_the_diagrams(page) -> None:
    limits = {"headroom": 0, "most": 10**6, "lost": 10**9}
    found = call(
        page, "shifted", [list(t) for t in LOGITS], [list(v) for v in VALUES], limits, -1e30
    )
    expected = shifted(LOGITS, VALUES, 10**6)
    assert [step["l"] for step in found] == [float(step.after.l) for step in expected]
    assert [step["m"] for step in found] == [step.after.m for step in expected]


@pytest.mark.parametrize(
    ("dtype", "last", "event", "raised"),
    [
        ("fp16", [3, 15], "", 0),
        ("fp16", [3, 19.1], "raised by 16", 16),
        ("fp16", [3, 60], "raised by 57", 57),
        ("fp16", [3, 103.5], "S computed again", 100.5),
        ("bf16", [3, 40], "", 0),
        ("bf16", [3, 44], "raised by 41", 41),
        ("bf16", [3, 128], "S computed again", 125),
    ],
)
def test_when_the_shift_is_raised(page, dtype, last, event, raised) -> None:
    """The first tile's maximum is 3."""
    tiles = [[1, 3], last]
    limits = playground.LIMITS[dtype]
    first, second = call(page, "shifted", tiles, [[1, 1], [1, 1]], limits, playground.LEAST_SHIFT)
    assert first["m"] == 3 + limits["headroom"]
    assert (second["event"], second["m"] - first["m"]) == (event, raised)
    assert sum(second["p"]) <= limits["most"]


def test_the_limits_are_the_steps() -> None:
    source = find_step("v11").path.read_text(encoding="utf-8")
    headroom = re.search(r"HEADROOM = std::is_same_v<Element, fp16> \? (\d+) : (\d+);", source)
    most = re.search(r"MAX_SUM = std::is_same_v<Element, fp16> \? (\S+)f : (\S+)f;", source)
    lost = re.search(r"LOST_SUM = (\S+)f;", source)
    least = re.search(r"tile_max \+ HEADROOM, (\S+)f\)", source)
    for n, dtype in enumerate(("fp16", "bf16"), 1):
        limits = playground.LIMITS[dtype]
        assert limits["headroom"] == int(headroom[n])
        assert limits["most"] == (float.fromhex(most[n]) if "x" in most[n] else float(most[n]))
        assert limits["lost"] == float.fromhex(lost[1])
    assert float.fromhex(least[1]) == playground.LEAST_SHIFT


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("1 -inf | 2,5", [[1, -math.inf], [2, 5]]),
        ("1 | ", "each tile needs a number"),
        ("1 x", "“x” is no finite number and not -inf"),
        ("inf", "“inf” is no finite number and not -inf"),
    ],
)
def test_what_is_typed(page, text, parsed) -> None:
    assert call(page, "parse", text) == parsed


def test_it_is_walked_through_tile_by_tile(open_page) -> None:
    page = open_page()
    section = page.locator("#softmax")
    assert section.locator(".rescale tbody tr:not(.hidden)").count() == 1
    section.get_by_role("button", name="Next tile").press("Enter")
    assert section.locator(".rescale tbody tr:not(.hidden)").count() == 2
    section.get_by_role("button", name="All tiles").press("Enter")
    o, lse = direct(TILES["figure"], [list(v) for v in VALUES])
    for table in (".rescale", ".shift"):
        shown = section.locator(f"{table} tfoot td").text_content()
        assert shown == f"{o:.5g}; log2 of the sum of 2^S: {lse:.5g}"
    section.get_by_label("S", exact=True).fill("1 2 | oops")
    assert "“oops” is no finite number" in section.locator(".told").text_content()


def test_all_examples_are_shown(open_page) -> None:
    page = open_page()
    section = page.locator("#softmax")
    for name in playground.EXAMPLES:
        section.locator("select").first.select_option(name)
        section.get_by_role("button", name="All tiles").click()
        assert "After 3 of 3 tiles" in section.locator(".told").text_content()
        assert "NaN" not in section.text_content()
