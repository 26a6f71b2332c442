"""The diff of two steps and the table of what changes with it, on fake records."""

from __future__ import annotations

import pytest

from common.catalog import all_steps
from common.errors import UsageError
from common.metrics import METRICS
from common.records import write_record
from common.report.compare import change_table, find_two, source_diff
from common.report.record_set import RecordSet, load_record_set
from verify.tests.fake_records import fake_record, fake_static_record

V01, V02, V03 = all_steps()[:3]
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
CYCLES = "sm__cycles_elapsed.max"
WAIT = "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"


def counted(kernel: str = "attention_forward", **changes: float) -> dict:
    """Counters that are all 5.0, but for those given."""
    return {kernel: dict.fromkeys(METRICS, 5.0) | changes}


@pytest.fixture
def record_set(tmp_path):
    """Loads the record set of a project whose records of v01 and v02 are changed as given."""

    def load(records: tuple[dict, dict] = ({}, {}), static: tuple[dict, dict] = ({}, {})):
        first = fake_record(V01, time_ms=40.0) | {
            "counters": counted(**{TENSOR: 10.0, CYCLES: 2e6, WAIT: 1.0})
        }
        second = fake_record(V02, baseline=V01, time_ms=20.0) | {
            "counters": counted(**{TENSOR: 40.5, CYCLES: 1e6, WAIT: 0.0})
        }
        compiled = fake_static_record(V02)["compiled"]
        kernel = compiled["resources"]["attention_forward"] | {"registers": 99, "dynamic_smem": 0}
        compiled |= {
            "resources": {"attention_forward": kernel},
            "sass": {"attention_forward": {"HMMA": 128, "MUFU": 7, "FADD": 9, "BRA": 2}},
        }
        for record, change in zip((first, second), records, strict=True):
            write_record(tmp_path / f"profiles/h200/{record['step']}.json", record | change)
        for record, change in zip(
            (fake_static_record(V01), fake_static_record(V02) | {"compiled": compiled}),
            static,
            strict=True,
        ):
            write_record(tmp_path / f"profiles/static/{record['step']}.json", record | change)
        return load_record_set(tmp_path / "profiles/h200", tmp_path)

    return load


def rows(record_set: RecordSet, first=V01, second=V02) -> dict[str, list[str]]:
    """The table's cells by the first of each row."""
    lines = change_table(record_set, first, second).splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[:1] == "|"]
    assert cells[0] == ["Metric", first.name, second.name, "Change"]
    return {name: rest for name, *rest in cells[2:]}


def test_every_metric_has_both_values_and_the_change(record_set):
    table = rows(record_set())
    assert table["time_ms"] == ["40", "20", "0.50 ×"]
    assert table["tflops"] == ["13.74", "27.49", "2.00 ×"]
    assert table["gain"] == ["not measured", "2", ""]
    assert table["registers"] == ["111", "99", "-12"]
    assert table["smem_bytes"] == ["3072", "1024", "-2048"]
    assert table["spill_bytes"] == ["12", "12", "="]
    assert table["instructions"] == ["200", "146", "-54"]
    assert table["LDSM"] == ["64", "0", "-64"]
    assert table["MUFU"] == ["0", "7", "+7"]
    assert table["tensor_percent"] == ["10", "40.5", "+30.5"]
    assert table["cycles"] == ["2e+06", "1e+06", "0.50 ×"]
    assert table["l2_gb"] == ["5e-09", "5e-09", "="]
    assert table["stalled: wait"] == ["1", "0", "0.00 ×"]


def test_equal_opcodes_and_stalls_are_left_out(record_set):
    assert not {"HMMA", "LDL", "stalled: barrier"} & rows(record_set()).keys()
    text = change_table(record_set(), V01, V02)
    assert text.endswith("Other opcodes: FADD 8 → 9, BRA 0 → 2.")


def test_the_other_way_round(record_set):
    table = rows(record_set(), V02, V01)
    assert table["time_ms"] == ["20", "40", "2.00 ×"]
    assert table["MUFU"] == ["7", "0", "-7"]
    assert table["stalled: wait"] == ["0", "1", "+1"]


def test_times_of_two_runs_are_not_compared(record_set):
    table = rows(record_set(records=({"run": "2000-01-02 b"}, {})))
    assert table["time_ms"] == ["40", "20", "not measured together"]
    assert table["gain"] == ["not measured", "2", ""]  # its baseline is of its own run
    assert table["cycles"] == ["2e+06", "1e+06", "0.50 ×"]


def test_steps_of_the_backward_ladder(tmp_path):
    b01, b02 = find_two("b01", "b02")
    for step, time_ms in ((b01, 40.0), (b02, 10.0)):
        record = fake_record(step, time_ms=time_ms) | {"counters": counted("attention_backward")}
        write_record(tmp_path / f"profiles/h200/{step.name}.json", record)
        write_record(tmp_path / f"profiles/static/{step.name}.json", fake_static_record(step))
    table = rows(load_record_set(tmp_path / "profiles/h200", tmp_path), b01, b02)
    assert table["time_ms"] == ["40", "10", "0.25 ×"]
    assert table["registers"] == ["111", "111", "="]
    assert table["cycles"] == ["5", "5", "="]


def test_stale_records_are_called_stale(record_set):
    changed = {"code_sha256": "0" * 64}
    table = rows(record_set(records=({}, changed), static=(changed, {})))
    assert table["time_ms"] == ["40", "stale", ""]
    assert table["cycles"] == ["2e+06", "stale", ""]
    assert table["registers"] == ["stale", "99", ""]
    assert table["HMMA"] == ["stale", "128", ""]
    both = rows(record_set(records=(changed, changed), static=(changed, changed)))
    groups = ("time", "resources", "instructions", "counters")
    assert both == {group: ["stale", "stale", ""] for group in groups}


def test_missing_records_are_not_measured(record_set, tmp_path):
    table = rows(record_set(), V02, V03)
    assert table["time_ms"] == ["20", "not measured", ""]
    assert table["registers"] == ["99", "not measured", ""]
    assert table["tensor_percent"] == ["40.5", "not measured", ""]
    nothing = rows(load_record_set(tmp_path / "none", tmp_path / "none"))
    assert nothing["time"] == ["not measured", "not measured", ""]


def test_what_was_not_collected_says_so(record_set):
    compiled = fake_static_record(V02)["compiled"] | {"sass": "not collected"}
    uncounted = counted(**{TENSOR: None})
    table = rows(
        record_set(
            records=({"counters": "not collected"}, {"counters": uncounted}),
            static=({"compiled": "not collected"}, {"compiled": compiled}),
        )
    )
    assert table["cycles"] == ["not collected", "5", ""]
    assert table["tensor_percent"] == ["not collected", "n/a", ""]
    assert table["registers"] == ["not collected", "111", ""]
    assert table["instructions"] == ["not collected", "not collected", ""]


def test_one_number_a_kernel(record_set):
    one = counted(**{CYCLES: 4.0})["attention_forward"]
    two = {"counters": {"attention_scores": one, "attention_output": one}}
    table = rows(record_set(records=(two, {})))
    assert table["cycles"] == ["4 / 4", "1e+06", ""]  # of different kernels
    table = rows(record_set(records=(two, two)))
    assert table["cycles"] == ["4 / 4", "4 / 4", "= / ="]


def test_diff_is_that_of_the_files():
    lines = source_diff(V01, V02).splitlines()
    assert lines[0] == f"--- a/steps/{V01.path.name}"
    assert lines[1] == f"+++ b/steps/{V02.path.name}"
    kept = [line[1:] for line in lines[2:] if line[0] in " +"]
    assert set(kept) <= set(V02.path.read_text().splitlines())
    assert f"-// {V01.name} -- {V01.title}" in lines
    assert f"+// {V02.name} -- {V02.title}" in lines


@pytest.mark.parametrize("names", [("2", "v02"), ("steps/v02", f"steps/{V02.path.name}")])
def test_a_step_is_not_compared_with_itself(names):
    with pytest.raises(UsageError, match="both v02"):
        find_two(*names)


@pytest.mark.parametrize(
    ("name", "told"),
    [("99", "no step '99'; the steps are v01"), ("none.cu", r"no file 'none\.cu'")],
)
def test_unknown_step(name, told):
    with pytest.raises(UsageError, match=told):
        find_two("1", name)
    with pytest.raises(UsageError, match=told):
        find_two(name, "1")


def test_only_steps_are_compared():
    with pytest.raises(UsageError, match=r"no_padding\.patch' is not in steps/"):
        find_two("4", "experiments/v04_no_padding.patch")
