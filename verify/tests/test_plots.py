"""The plots of the steps, on fake records."""

from __future__ import annotations

import math

import pytest

from common.catalog import all_steps
from common.metrics import COUNTERS
from common.operation import BACKWARD, FORWARD
from common.records import write_record
from common.report.diagrams.svg import ACCENT
from common.report.plots import LIMITS, render_plots
from common.report.record_set import load_record_set
from common.step import Step
from verify.tests.drawings import boxes, clashes, dots, texts
from verify.tests.fake_records import fake_record

STEPS = [step for step in all_steps() if step.operation == FORWARD]
BACKWARD_STEPS = [step for step in all_steps() if step.operation == BACKWARD]
RATES = [2.1, 21, 27, 37, 130, 210, 360, 640, 700, 760]  # fast steps are close to one another


def counters(**shares: float) -> dict:
    """Of a kernel that takes 1 ms, as ncu gives them."""
    values = dict.fromkeys(COUNTERS, 0.0) | {"duration_ms": 1.0} | shares
    return {COUNTERS[name][0]: value / COUNTERS[name][1] for name, value in values.items()}


@pytest.fixture
def plot(tmp_path):
    """Draws a project with the records of a ladder's first steps, changed as told."""

    def draw(*changes: dict, steps: list[Step] = STEPS) -> dict[str, str]:
        for step, changed in zip(steps, changes, strict=False):
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


def test_every_ladder_has_plots_of_its_own(plot):
    kernels = {
        "attention_dq": counters(fma_percent=40.0),
        "attention_dk_dv": counters(duration_ms=3.0, l1_data_percent=90.0),
    }
    forward = plot({}, {})
    both = plot({"counters": kernels, "tflops": 3.0}, {"tflops": 30.0}, steps=BACKWARD_STEPS)
    assert {name: both[name] for name in forward} == forward
    added = both.keys() - forward.keys()
    assert added == {f"{n}_backward{d}.svg" for n in ("steps", "limits") for d in ("", "_dark")}
    for name in ("steps_backward.svg", "limits_backward.svg"):
        assert not clashes(both[name])
    steps, limits = (
        [text.text for text in texts(both[f"{name}_backward.svg"])] for name in ("steps", "limits")
    )
    assert steps[0].startswith("NVIDIA H200, backward: batch 4, heads 16, N = 4096")
    assert {"b01", "scalar", "b02", "30", "sdpa_flash  687"} <= {*steps}
    assert not any(text.startswith("v0") for text in steps)
    assert {"b01", "attention_dk_dv", "90", "b02", "not collected"} <= {*limits}


def test_no_limits_without_counters(plot):
    assert plot({}).keys() == {"steps.svg", "steps_dark.svg"}
