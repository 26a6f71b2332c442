"""The walk over the tiles: who computes what when is what the diagrams and the steps say."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from common.report.diagrams import backward_order, backward_schedule, blocks
from common.report.page import tiles as playground

CALL = """
([name, options, data]) => {
    const model = worklog.models.tiles;
    const works = model.works(options);
    if (name === "works") return works;
    if (name === "inOrder") return model.inOrder(works);
    if (name === "byFreeSm") return model.byFreeSm(works, options.sms);
    return model[name](works, options, data);
}
"""
DATA = playground.section().data


@pytest.fixture(scope="module")
def page(browser, page_path):
    opened = browser.new_page()
    opened.goto(page_path.as_uri())
    yield opened
    opened.close()


def taken(page, name: str, **options) -> list:
    shape = {"backward": False, "causal": True, "queries": 6, "keys": 6, "heads": 4, "sms": 6}
    return page.evaluate(CALL, [name, shape | options, DATA])


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 7), (7, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_every_visible_tile_is_walked_once(page, queries, keys, causal, backward) -> None:
    """The last query sees the last key."""
    shape = {"queries": queries, "keys": keys, "causal": causal, "backward": backward}
    works = taken(page, "works", heads=2, **shape)
    found = Counter(
        (work["head"], *((tile, work["own"]) if backward else (work["own"], tile)))
        for work in works
        for tile in work["tiles"]
    )
    visible = {
        (head, i, j)
        for head, i, j in product(range(2), range(queries), range(keys))
        if not causal or j <= i + keys - queries
    }
    assert found == Counter(visible)


def test_the_grids_order_is_the_diagrams(page) -> None:
    found = taken(page, "byFreeSm")
    expected = blocks.as_they_come()
    assert [[(w["head"], w["own"], len(w["tiles"])) for w in works] for works in found] == [
        [(work.head, work.q_block, work.tiles) for work in works] for works in expected
    ]


def test_v10s_order_is_the_diagrams(page) -> None:
    found = taken(page, "sorted")
    expected = blocks.rounds()
    assert [[(w["head"], w["own"]) for w in works] for works in found] == [
        [(works[sm].head, works[sm].q_block) for works in expected] for sm in range(6)
    ]


@pytest.mark.parametrize(
    ("queries", "heads", "sms"), [(6, 4, 6), (5, 3, 4), (10, 4, 8), (3, 1, 8), (7, 4, 3), (1, 2, 1)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_v10_computes_each_work_tile_once(page, queries, heads, sms, causal) -> None:
    shape = {"queries": queries, "keys": queries, "heads": heads, "sms": sms, "causal": causal}
    found = taken(page, "sorted", **shape)
    assert len(found) == sms
    work_tiles = sorted((work["head"], work["own"]) for works in found for work in works)
    assert work_tiles == sorted(product(range(heads), range(queries)))


@pytest.mark.parametrize(
    ("queries", "heads", "sms", "keys"),
    [(7, 1, 4, 32), (5, 2, 4, 10), (6, 4, 5, 10), (6, 4, 6, 10), (3, 3, 8, 10), (10, 4, 7, 9)],
)
def test_equal_shares_are_the_diagrams(page, queries, heads, sms, keys) -> None:
    shape = {"queries": queries, "heads": heads, "sms": sms, "keys": keys, "causal": False}
    found = taken(page, "shares", **shape)
    expected = blocks.equal_shares(sms, queries * heads, keys)
    assert [
        [
            (work["head"] * queries + work["own"], work["tiles"][0], work["tiles"][-1] + 1)
            for work in works
        ]
        for works in found
    ] == [[(piece.work, piece.first, piece.end) for piece in pieces] for pieces in expected]


def test_backward_in_the_grids_order_is_the_diagrams(page) -> None:
    found = taken(page, "byFreeSm", backward=True, heads=backward_schedule.HEADS)
    assert [[(w["head"], w["own"]) for w in works] for works in found] == [
        [(work.head, work.k_block) for work in works] for works in backward_schedule.as_they_come()
    ]


def test_longest_first_is_the_diagrams(page) -> None:
    found = taken(page, "longestFirst", backward=True, heads=backward_schedule.HEADS)
    assert [[(w["head"], w["own"]) for w in works] for works in found] == [
        [(work.head, work.k_block) for work in works] for works in backward_schedule.longest_first()
    ]
    for work in (work for works in found for work in works):
        assert work["tiles"] == backward_schedule.walk(work["own"])


def test_b09s_order_is_the_diagrams(page) -> None:
    found = taken(page, "inOrder", backward=True, heads=1)
    expected = backward_order.schedule(last_keys_first=True)
    times = {(each["key"], each["query"]): each["time"] for each in found}
    assert times == {
        (block, tile): start for block, starts in expected.items() for tile, start in starts.items()
    }
    others = backward_order.schedule(last_keys_first=False)
    assert times != {
        (block, tile): start for block, starts in others.items() for tile, start in starts.items()
    }


def test_limits_of_shares_are_v12s() -> None:
    assert DATA == {"maxBlocks": blocks.MAX_BLOCKS, "minSavedTiles": blocks.MIN_SAVED_TILES}


def test_every_step_can_be_walked(open_page) -> None:
    page = open_page()
    section = page.locator("#tiles")
    for step in section.locator("select[name=step] option").all_text_contents():
        section.locator("select[name=step]").select_option(step)
        for name, value in (("queries", "1"), ("keys", "9"), ("sms", "8"), ("queries", "9")):
            control = section.locator(f"input[name={name}]")
            if control.is_enabled():
                control.fill(value)
        told = section.locator(".told").text_content()
        assert "NaN" not in told
        assert "undefined" not in told
        numbers = section.locator(".heads svg text").all_text_contents()
        assert f"{sum(bool(text) for text in numbers)} tiles on" in told


def test_time_goes_back_and_forth(open_page) -> None:
    page = open_page()
    section = page.locator("#tiles")
    computed = section.locator(".sms svg g").count()
    section.get_by_role("button", name="Back").press("Enter")
    fewer = section.locator(".sms svg g").count()
    assert fewer < computed
    section.get_by_role("button", name="Next").press("Enter")
    assert section.locator(".sms svg g").count() == computed
