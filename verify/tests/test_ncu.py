"""Reading ncu's CSV page; collecting needs a GPU."""

from __future__ import annotations

import pytest

from common.bench import ncu as counters
from common.bench.ncu import collect, parse
from common.catalog import find_step
from common.errors import UsageError
from common.metrics import COUNTERS, METRICS, STALL
from common.report.derived import readable, top_stalls


def _page(**values: str) -> list[str]:
    """ncu's raw page of two kernels: every metric 1, but those named by COUNTERS's key."""
    cells = dict.fromkeys(METRICS, "1")
    cells |= {COUNTERS[name][0]: value for name, value in values.items()}
    names = ["ID", "Kernel Name", *METRICS]
    rows = [names, [""] * len(names)]
    rows += [[str(i), f"attention_{i}(AttentionParams)", *cells.values()] for i in range(2)]
    return [",".join(f'"{cell}"' for cell in row) for row in rows]


def test_parse_knows_kernels_units_and_thousands() -> None:
    kernels = readable(parse(_page(duration_ms="1,234,500", dram_read_gb="2000000000")))
    assert list(kernels) == ["attention_0", "attention_1"]
    assert kernels["attention_1"]["duration_ms"] == pytest.approx(1.2345)
    assert kernels["attention_1"]["dram_read_gb"] == pytest.approx(2.0)


def test_top_stalls_are_the_largest() -> None:
    values = parse(_page())["attention_0"]
    values[STALL.format("wait")] = 3.0
    values[STALL.format("barrier")] = 2.0
    assert top_stalls(values) == [("wait", 3.0), ("barrier", 2.0)]


@pytest.fixture
def ncu(monkeypatch, tmp_path):
    """Replaces ncu by a shell script."""

    def replace(script: str | None) -> None:
        path = tmp_path / "ncu"
        if script is not None:
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setattr(
            counters, "toolkit_program", lambda name: None if script is None else str(path)
        )

    return replace


def test_counters_that_the_driver_keeps_are_not_collected(ncu) -> None:
    ncu("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1")
    assert collect(find_step("v04")) == "not collected: not permitted (ERR_NVGPUCTRPERM)"


def test_any_other_failure_is_one_clear_line(ncu) -> None:
    ncu("echo '==ERROR== Failed to prepare kernel'; exit 1")
    with pytest.raises(UsageError, match="ncu collected nothing: ==ERROR== Failed to prepare"):
        collect(find_step("v04"))
    ncu(None)
    with pytest.raises(UsageError, match="no ncu on PATH"):
        collect(find_step("v04"))


@pytest.mark.gpu
def test_collect() -> None:
    collected = collect(find_step("v04"))
    if isinstance(collected, str):
        pytest.skip(collected)
    kernels = readable(collected)
    assert list(kernels) == ["attention_forward"]
    assert 0 < kernels["attention_forward"]["fma_percent"] <= 100
    assert kernels["attention_forward"]["local_loads"] == 0
