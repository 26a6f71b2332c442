"""The page as a whole, in a real browser: it runs, fits, can be read and needs no network."""

from __future__ import annotations

import pytest

from common.catalog import all_steps
from common.errors import UsageError
from common.report import page as page_module
from verify.tests.page_under_test import render

Axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe

# Of a telephone, a tablet and a screen: widths, and the scheme of colors.
WINDOWS = ((360, "light"), (768, "dark"), (1280, "light"))


def scroll_through(page) -> None:
    """Brings every part near the screen once, so that what is drawn only then is drawn."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for top in range(0, height, 2000):
        page.evaluate(f"scrollTo(0, {top})")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    page.evaluate("scrollTo(0, 0)")


def find_violations(page) -> list[dict]:
    """What axe holds against the page. It takes seconds."""
    return Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]


@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
def test_it_fits_stays_in_place_and_is_accessible(open_page, width, scheme):
    page = open_page(width=width, color_scheme=scheme)
    for summary in page.locator("details:first-of-type > summary").all()[:2]:
        summary.click()
    height = page.evaluate("document.documentElement.scrollHeight")
    scroll_through(page)
    assert page.evaluate("document.documentElement.scrollHeight") == height
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    serious = [
        (each["id"], [node["target"] for node in each["nodes"]][:3])
        for each in find_violations(page)
        if each["impact"] in ("serious", "critical")
    ]
    assert not serious


def test_a_plots_tip_is_accessible(open_page):
    page = open_page()
    plot = page.locator("svg[role=img]:has(circle)").first
    plot.scroll_into_view_if_needed()
    plot.locator("circle").first.hover(force=True)
    assert plot.locator("g[aria-label=tip] text").count()
    page.mouse.move(0, 0)  # an empty mark is left
    assert not plot.locator("g[aria-label=tip] text").count()
    assert "aria-prohibited-attr" not in [each["id"] for each in find_violations(page)]


def test_axe_would_find_something(open_page):
    page = open_page()
    page.evaluate("document.body.append(document.createElement('button'))")
    assert "button-name" in [each["id"] for each in find_violations(page)]


def test_it_asks_for_nothing_but_itself(open_page, page_path):
    assert "default-src 'none'" in page_path.read_text(encoding="utf-8")
    page = open_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    scroll_through(page)
    assert [url for url in asked if not url.startswith("data:")] == [page_path.as_uri()]


def test_every_step_has_its_article(open_page):
    page = open_page()
    shown = page.locator("article.step").evaluate_all("all => all.map((each) => each.id)")
    assert shown == [step.name for step in all_steps()]
    for step in all_steps():
        assert step.title in page.locator(f"#{step.name} h3").text_content()
    for name in ("b09", "b10"):  # nothing builds on b09
        assert "from b08:" in page.locator(f"#{name} .listing summary").text_content()


def test_a_listing_is_colored_when_it_is_opened_and_keeps_its_text(open_page):
    page = open_page()
    pre = page.locator("#v06 .listing pre")
    before = pre.text_content()
    page.locator("#v06 .listing summary").click()
    page.wait_for_selector("#v06 .listing .added .token")
    lines = pre.locator("> span").all_text_contents()
    assert "\n".join(lines) == before
    assert sum(line[:1] == "+" for line in lines) == pre.locator(".added").count()


def test_the_chart_follows_the_reader(open_page):
    page = open_page()
    for step in ("v03", "v07"):
        page.evaluate(f"document.getElementById('{step}').scrollIntoView()")
        page.wait_for_function(
            "step => document.querySelector('#forward').dataset.current == step", arg=step
        )


def test_too_large_a_page_is_an_error(monkeypatch):
    monkeypatch.setattr(page_module, "MAX_BYTES", 1_000_000)
    with pytest.raises(UsageError, match=r"docs/index.html would have \d+ bytes"):
        render()
