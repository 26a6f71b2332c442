"""The plots of the steps, on fake records."""

from __future__ import annotations

import math

import pytest

from common.catalog import all_steps
from common.metrics import COUNTERS
from common.records import write_record
from common.report.diagrams.svg import ACCENT
from common.report.plots import LIMITS, render_plots
from common.report.record_set import load_record_set
from verify.tests.drawings import boxes, clashes, dots, texts
from verify.tests.fake_records import fake_record

STEPS = all_steps()
RATES = [2.1, 21, 27, 37, 130, 210, 360, 640, 700, 760]  # fast steps are close to one another


def counters(**shares: float) -> dict:
    """Of a kernel that takes 1 ms, as ncu gives them."""
    values = dict.fromkeys(COUNTERS, 0.0) | {"duration_ms": 1.0} | shares
    return {COUNTERS[name][0]: value / COUNTERS[name][1] for name, value in values.items()}


@pytest.fixture
def plot(tmp_path):
    """Draws a project with the records of the first steps, changed as told."""

    def draw(*changes: dict) -> dict[str, str]:
        for step, changed in zip(STEPS, changes, strict=False):
            write_record(tmp_path / f"{step.name}.json", fake_record(step) | changed)
        return render_plots(load_record_set(tmp_path, tmp_path))

    return draw


def test_steps_are_dots_on_a_logarithmic_axis(plot):
    svg = plot(*({"tflops": rate} for rate in RATES))["steps.svg"]
    found = dots(svg)
    assert len(found) == min(len(RATES), len(STEPS))
    (x0, y0, _), (x1, *_), *_ = found
    decade = (x1 - x0) / math.log10(RATES[1] / RATES[0])
    for (x, y, _), rate in zip(found[1:], RATES[1:], strict=False):
        assert x - x0 == pytest.approx(decade * math.log10(rate / RATES[0]), abs=0.3)
        assert y > y0


def test_steps_and_peers_are_labelled(plot):
    svg = plot(*({"tflops": rate} for rate in RATES))["steps.svg"]
    assert not clashes(svg)
    found = [text.text for text in texts(svg)]
    assert {"2.1", "27", "760", "v01", "naive", "v09", "warp specialized"} <= {*found}
    assert "sdpa_cudnn  550" in found
    assert not any("sdpa_math" in text for text in found)  # missing


def test_a_changed_step_is_called_stale(plot):
    svg = plot({"code_sha256": "0" * 64, "counters": {"attention_scores": counters()}})
    assert "v01 (stale)" in [text.text for text in texts(svg["steps.svg"])]
    assert "v01 (stale)" in [text.text for text in texts(svg["limits.svg"])]


def test_the_closest_limit_of_the_longest_kernel_is_marked(plot):
    kernels = {
        "attention_scores": counters(duration_ms=2.0, l1_data_percent=90.0, issue_percent=40.0),
        "attention_softmax": counters(xu_percent=99.0),
    }
    fused = {"attention_forward": counters(tensor_percent=75.0, xu_percent=50.0)}
    svg = plot({"counters": kernels}, {"counters": fused}, {})["limits.svg"]
    assert not clashes(svg)
    found = texts(svg)
    columns = {text.text: text.left for text in found if text.text in LIMITS}
    assert [*columns] == [*LIMITS]
    first, second = [box for box in boxes(svg) if ACCENT in box.roles]
    assert (first.left, second.left) == (columns["L1 data"], columns["tensor"])
    assert first.width / second.width == pytest.approx(90 / 75, rel=0.01)
    everything = [text.text for text in found]
    assert {"attention_scores", "90", "40", "75", "50", "not collected"} <= {*everything}
    assert "attention_forward" not in everything  # it has one kernel
    assert "99" not in everything


def test_no_limits_without_counters(plot):
    assert plot({}).keys() == {"steps.svg", "steps_dark.svg"}
