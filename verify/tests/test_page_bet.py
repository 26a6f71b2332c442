"""The bet: every number that it shows is a record's."""

from __future__ import annotations

import pytest

from common.paths import ROOT
from common.problem import NORMAL
from common.records import HEADLINE_GPU, PROFILES_DIR
from common.report.derived import peer_ratios
from common.report.page import bet
from common.report.record_set import load_record_set


@pytest.fixture(scope="module")
def record() -> dict:
    return load_record_set(PROFILES_DIR / HEADLINE_GPU, ROOT).distributions.record


def test_a_line_has_the_measured_spreads_in_order(open_page, record) -> None:
    page = open_page()
    data = bet.section(load_record_set(PROFILES_DIR / HEADLINE_GPU, ROOT)).data
    for dtype in ("bf16", "fp16"):
        for causal in (False, True):
            found = page.evaluate(
                "([cells, of]) => worklog.models.bet.line(cells, of)",
                [data["cells"], {"dtype": dtype, "head_dim": 64, "causal": causal}],
            )
            assert [cell["std"] for cell in found] == sorted(NORMAL.values())
            for cell in found:
                (measured,) = [
                    c
                    for c in record["cells"]
                    if NORMAL.get(c["inputs"]) == cell["std"]
                    and (c["dtype"], c["head_dim"], c["causal"]) == (dtype, 64, causal)
                ]
                assert cell["tflops"] == pytest.approx(measured["tflops"], rel=1e-3)
                assert (cell["rescaled"], cell["redone"]) == (
                    measured["rescaled"],
                    measured["redone"],
                )


def share(x: float | None) -> str:
    if x is None:
        return "–"
    if 0 < x < 0.01:
        return "< 1 %"
    if 0.99 < x < 1:
        return "> 99 %"
    return f"{100 * x:.0f} %"


@pytest.mark.parametrize("std", sorted(NORMAL.values()))
def test_the_slider_tells_what_was_measured(open_page, record, std: int) -> None:
    page = open_page()
    section = page.locator("#bet")
    section.locator("input[type=range]").fill(str(sorted(NORMAL.values()).index(std)))
    assert section.locator("output").text_content() == str(std)
    told = section.locator(".told").text_content()
    names = {value: name for name, value in NORMAL.items()}
    ratios = peer_ratios(record, "v12")
    for cell in record["cells"]:
        if (cell["inputs"], cell["head_dim"], cell["causal"]) != (names[std], 128, False):
            continue
        tflops = float(f"{cell['tflops']['v12']:.4g}")
        assert f"{cell['dtype']}: v12 {tflops:g} TFLOP/s" in told
        told_ratio = float(told.split(f"{cell['dtype']}: ")[1].split(" × ")[0].split(", ")[1])
        assert told_ratio == pytest.approx(ratios[cell["name"]], abs=0.0015)
        assert f"{share(cell['rescaled'])} of the work tiles were rescaled" in told


def test_other_inputs(open_page, record) -> None:
    page = open_page()
    section = page.locator("#bet")
    section.locator("select[name=inputs]").select_option("own_key")
    assert section.locator("input[type=range]").is_disabled()
    (cell,) = [c for c in record["cells"] if c["name"] == "d128_fp16_own_key"]
    told = section.locator(".told").text_content()
    tflops = float(f"{cell['tflops']['v12']:.4g}")
    assert f"fp16: v12 {tflops:g} TFLOP/s" in told


def test_what_was_not_measured_is_told(open_page, tmp_path) -> None:
    nothing = bet.section(load_record_set(tmp_path, tmp_path))
    assert nothing.data is None
    page = open_page()
    page.locator("#bet select[name=inputs]").select_option("trained")
    assert page.locator("#bet .told").text_content() == "Not measured with this head_dim and mask."
    told = page.evaluate(
        """() => {
            const root = document.querySelector("#bet").cloneNode(true);
            worklog.sections.bet(root, null);
            return root.querySelector(".told").textContent;
        }"""
    )
    assert told == "Not measured: make bench DIST=1."
