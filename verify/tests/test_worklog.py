"""The generated parts of worklog.md and README.md, and the plots, on fake records."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest

import common.patch
from common.__main__ import main
from common.bench import headline
from common.catalog import all_steps, find_step
from common.errors import UsageError
from common.metrics import METRICS
from common.operation import BACKWARD, FORWARD
from common.paths import ROOT
from common.records import gpu_folder, write_record
from common.report import markdown, rows
from common.report.diagrams import figures
from common.report.expressions import evaluate
from common.report.markdown import PAGE, regenerate
from common.report.record_set import load_record_set
from common.step import read_step
from verify.tests.fake_records import (
    fake_decode,
    fake_distributions,
    fake_grid,
    fake_large_head_dim,
    fake_latency,
    fake_lengths,
    fake_record,
    fake_static_record,
    fake_timeline,
    fake_training_speed,
)

V01, V02, V03, V04 = all_steps()[:4]
B01, B02 = (find_step(name) for name in ("b01", "b02"))
README = """# Title
<!-- table: results --><!-- end -->
<!-- table: grid --><!-- end -->
It takes <!-- = v02.time_ms : .1f -->0<!-- end --> ms.
<!-- table: results b --><!-- end -->
<!-- table: training_speed --><!-- end -->
"""
WORKLOG = """# Title
<!-- table: results --><!-- end -->
<!-- table: memory --><!-- end -->
<!-- table: peers --><!-- end -->
<!-- table: grid --><!-- end -->
<!-- table: utilisation --><!-- end -->
<!-- table: utilisation b --><!-- end -->
<!-- table: utilisation_counted --><!-- end -->
<!-- table: utilisation_counted b --><!-- end -->
<!-- table: distributions --><!-- end -->
<!-- table: latency --><!-- end -->
<!-- table: decoding --><!-- end -->
<!-- table: decode --><!-- end -->
<!-- table: large_head_dim --><!-- end -->
<!-- table: large_head_dim_backward --><!-- end -->
<!-- table: lengths --><!-- end -->
<!-- table: pictures --><!-- end -->
<!-- table: sass --><!-- end -->
<!-- table: banks --><!-- end -->
<!-- table: resources v02 --><!-- end -->
<!-- table: counters v02 --><!-- end -->
<!-- table: experiments v02 --><!-- end -->
<!-- table: results b --><!-- end -->
<!-- table: memory b --><!-- end -->
<!-- table: peers b --><!-- end -->
<!-- table: grid b --><!-- end -->
<!-- table: training_speed --><!-- end -->
<!-- table: sharded --><!-- end -->
<!-- table: sharded_model --><!-- end -->
"""
FIGURES = [f"figures/{name}" for name in figures()]
CELL_PLOTS = ("grid", "distributions")
PLOTS = ["profiles/h200/steps.svg", "profiles/h200/steps_dark.svg"]
GENERATED = ["README.md", "worklog.md", *PLOTS, *FIGURES, PAGE]


@pytest.fixture
def root(tmp_path):
    """A project with records of v01 (its memory grows with N squared) and v02, of one run."""
    first = fake_record(V01, time_ms=40.0)
    first["memory"] = [{"seq": 512, "bytes": 10**9}, {"seq": 1024, "bytes": 4 * 10**9}]
    write_record(tmp_path / "profiles/h200/v01.json", first)
    write_record(tmp_path / "profiles/h200/v02.json", fake_record(V02, baseline=V01, time_ms=20.0))
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "worklog.md").write_text(WORKLOG)
    return tmp_path


def record_set_of(root):
    return load_record_set(root / "profiles" / "h200", root)


def table_row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith((f"| [{name}]", f"| {name}")))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_regenerate_is_stable(root):
    assert regenerate(root) == GENERATED
    assert regenerate(root) == []
    assert regenerate(root, check=True) == []


def test_tables(root):
    regenerate(root)
    readme, text = (root / "README.md").read_text(), (root / "worklog.md").read_text()
    row = table_row(readme, "v02")
    assert row[2:] == [
        "20",
        "27.49",
        "4.0%",
        "2.00 ×",
        "111",
        "3 KiB",
        "12 B",
        "68.0 MB",
        "1.0e-03",
    ]
    assert table_row(readme, "v01")[5] == ""
    assert table_row(readme, "v03")[2] == "not measured"
    assert table_row(readme, "sdpa_math")[1] == "missing"
    assert table_row(readme, "flash_attention_3")[4] == "100.0%"
    assert "It takes <!-- = v02.time_ms : .1f -->20.0<!-- end --> ms." in readme
    assert "| 1024 | 4.00 GB | 20.0 MB | 200 × |" in text
    assert "missing: out of memory" in text
    assert "| `attention_forward` | 111 | 1 KiB | 2 KiB | 0 B | 4 B | 8 B |" in text


def test_memory_is_that_of_a_step_for_any_call(root):
    """Not of the newest one, if that is for few queries."""
    few = next(step for step in all_steps() if step.few)
    write_record(root / f"profiles/h200/{few.name}.json", fake_record(few, baseline=V02))
    ladder = record_set_of(root).of(FORWARD)
    assert few.name in ladder.measured.records
    assert [*rows.memory(ladder)[0]["bytes"]] == ["v01", "v02"]


def test_rows_are_plain_values(root):
    write_record(root / "profiles/static/v02.json", fake_static_record(V02))
    write_record(root / "profiles/h200/grid.json", fake_grid(V01, V02))
    write_record(root / "profiles/h200/distributions.json", fake_distributions(V01, V02))
    write_record(root / "profiles/h200/decode.json", fake_decode(V02))
    write_record(root / "profiles/h200/large_head_dim.json", fake_large_head_dim(V02, V01))
    write_record(root / "profiles/h200/large_head_dim_backward.json", fake_large_head_dim(B02, B01))
    write_record(root / "profiles/h200/lengths.json", fake_lengths(V02, V01))
    write_record(root / "profiles/h200/latency.json", fake_latency(V02))
    write_record(root / "profiles/h200/training_speed.json", fake_training_speed(V02, B02))
    record_set = record_set_of(root)
    ladder = record_set.of(FORWARD)
    steps = {row["name"]: row for row in rows.steps(ladder)}
    assert steps["v01"]["gain"] is None
    assert (steps["v02"]["gain"], steps["v02"]["time_ms"]) == (2.0, 20.0)
    assert (steps["v02"]["registers"], steps["v02"]["smem_bytes"]) == ([111], [3072])
    assert steps["v03"].keys() == {"name", "path", "stale", "title", "status"}
    peers = {row["name"]: row for row in rows.peers(ladder)}
    assert peers["sdpa_math"] == {"name": "sdpa_math", "missing": "out of memory"}
    assert peers["sdpa_cudnn"]["fa3_share"] == pytest.approx(0.8)
    assert rows.memory(ladder)[1] == {
        "seq": 1024,
        "bytes": {"v01": 4 * 10**9, "v02": 2 * 10**7},
        "saving": 200.0,
    }
    assert rows.grid(ladder)[0]["tflops"]["sdpa_math"] is None
    assert rows.latency(record_set)[0]["device_us"]["attention()"] == 5.0
    assert rows.distributions(record_set)[0]["by_head_dim"]["64"]["ratio"] == 200 / 640
    of_a_ladder = (rows.sass, rows.banks, rows.grid)
    of_a_set = (
        rows.distributions,
        rows.decode,
        rows.large_head_dim,
        rows.lengths,
        rows.latency,
        rows.decoding,
        rows.training_speed,
    )
    of_a_step = (rows.resources, rows.counters)
    for found in (
        *(read(ladder) for read in of_a_ladder),
        *(read(record_set) for read in of_a_set),
        *(read(record_set, "v02") for read in of_a_step),
    ):
        assert json.loads(json.dumps(found))


CYCLES, DURATION = "sm__cycles_elapsed.max", "gpu__time_duration.sum"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def count(root, step, **kernels: dict) -> None:
    """Writes a record of the step whose kernels' counters are 5.0 but for those given."""
    counters = {name: dict.fromkeys(METRICS, 5.0) | changes for name, changes in kernels.items()}
    record = fake_record(step) | {"counters": counters}
    write_record(root / f"profiles/h200/{step.name}.json", record)


def counters_table(root) -> dict[str, list[str]]:
    """The cells of the table counters v02 by the first of each row."""
    regenerate(root)
    _, text = (root / "worklog.md").read_text().split("<!-- table: counters v02 -->")
    lines = text.split("<!-- end -->")[0].strip().splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_counters_stand_beside_those_of_the_same_kernel_in_the_step_before(root):
    stalled = {STALLED.format("wait"): 7.0, STALLED.format("barrier"): 6.5}
    count(root, V01, scores={}, output={})
    count(root, V02, scores={CYCLES: 3e6, DURATION: 2e6, **stalled}, fused={DURATION: None})
    table = counters_table(root)
    assert table[""] == ["v01 `scores`", "v02 `scores`", "v02 `fused`"]
    cycles = table["Duration (ms) / cycles / clock (GHz)"]
    assert cycles[1:] == ["2 / 3e+06 / 1.50", "n/a / 5 / n/a"]
    assert table["Top stalls"][1] == "wait 7.0, barrier 6.5"
    rest = [cells for title, cells in table.items() if title.startswith("Of ")]
    assert [cells[0] for cells in rest] == ["5 / 5 / 5", "5 / 5 / 5 / 5", "5 / 5"]


def test_counters_that_are_not_there(root):
    regenerate(root)
    assert "<!-- table: counters v02 -->\n\nnot collected\n\n" in (root / "worklog.md").read_text()
    count(root, V02, scores={})
    assert counters_table(root)[""] == ["v02 `scores`"]  # those of v01 are not collected
    count(root, V01, scores={})
    path = root / "profiles/h200/v01.json"
    write_record(path, json.loads(path.read_text()) | {"code_sha256": "0" * 64})
    assert counters_table(root)[""] == ["v02 `scores`"]
    path = root / "profiles/h200/v02.json"
    write_record(path, json.loads(path.read_text()) | {"code_sha256": "0" * 64})
    regenerate(root)
    text = (root / "worklog.md").read_text()
    for table in ("counters", "resources"):
        assert f"<!-- table: {table} v02 -->\n\nstale\n\n" in text


def test_another_gpu_gets_a_table_of_its_own(root):
    record = fake_record(V02) | {"device": "NVIDIA GeForce RTX 4090"}
    write_record(root / "profiles/geforce_rtx_4090/v02.json", record)
    changed = regenerate(root)
    assert "profiles/geforce_rtx_4090/steps.svg" in changed
    readme = (root / "README.md").read_text()
    assert readme.index("NVIDIA H200;") < readme.index("On the NVIDIA GeForce RTX 4090:")


def test_tables_of_another_gpu_stand_where_they_are_asked_for(root):
    markers = "".join(
        f"<!-- table: {kind} h100 --><!-- end -->\n"
        for kind in ("results", "grid", "distributions", "memory")
    )
    (root / "README.md").write_text(README + markers)
    regenerate(root)
    readme = (root / "README.md").read_text()
    for kind in ("results", "grid", "distributions", "memory"):
        assert f"<!-- table: {kind} h100 -->\n\nnot measured\n\n<!-- end -->" in readme
    device = {"device": "NVIDIA H100 80GB HBM3"}
    folder = root / "profiles" / gpu_folder(device["device"])
    write_record(folder / "grid.json", fake_grid(V01, V02) | device)
    write_record(folder / "distributions.json", fake_distributions(V01, V02) | device)
    changed = regenerate(root)
    plots = [f"profiles/h100/{name}{dark}.svg" for name in CELL_PLOTS for dark in ("", "_dark")]
    assert changed == ["README.md", *plots, PAGE]
    readme = (root / "README.md").read_text()
    assert "<!-- table: results h100 -->\n\nnot measured\n" in readme
    assert readme.count("TFLOP/s on the NVIDIA H100 80GB HBM3 in bf16") == 1
    assert "(d64_bf16_normal_1). NVIDIA H100 80GB HBM3; batch 4" in readme
    write_record(folder / "v02.json", fake_record(V02) | device)
    assert "profiles/h100/steps_dark.svg" in regenerate(root)
    results, following = (root / "README.md").read_text().split("<!-- table: results h100 -->")
    assert "H100" not in results.split("<!-- table: grid -->")[0]  # it has a table of its own
    assert following.startswith("\n\n| Version |")
    assert "NVIDIA H100 80GB HBM3; batch 4, heads 16" in following
    assert "On the NVIDIA H100" in (root / "worklog.md").read_text()


LADDER_TABLES = (
    "results",
    "memory",
    "peers",
    "grid",
    "utilisation",
    "utilisation_counted",
    "sass",
    "banks",
)


@pytest.fixture
def backward_root(root):
    """The project with records of b01 and b02, too, of another run, and a table of each kind."""
    write_record(root / "profiles/h200/b01.json", fake_record(B01, time_ms=40.0, run="2000-01-02"))
    second = fake_record(B02, baseline=B01, time_ms=20.0, run="2000-01-02")
    write_record(root / "profiles/h200/b02.json", second)
    write_record(root / "profiles/h200/grid_backward.json", fake_grid(B01, B02))
    for step in (V02, B02):
        write_record(root / f"profiles/static/{step.name}.json", fake_static_record(step))
    tables = "".join(f"<!-- table: {kind} b --><!-- end -->\n" for kind in LADDER_TABLES)
    (root / "README.md").write_text(f"{README}{tables}{tables.replace(' b ', ' v ')}")
    return root


def table_of(root, name: str) -> str:
    text = (root / "README.md").read_text()
    return text.split(f"<!-- table: {name} -->")[1].split("<!-- end -->")[0].strip()


def test_tables_of_the_backward_ladder(backward_root):
    plots = [f"profiles/h200/{n}_backward{d}.svg" for n in ("steps", "grid") for d in ("", "_dark")]
    assert set(plots) < set(regenerate(backward_root))
    assert regenerate(backward_root, check=True) == []
    results = table_of(backward_root, "results b")
    flops = 10 * 4 * 16 * 4096**2 * 128
    rate = f"{flops / 20e9:.4g}"
    assert table_row(results, "b02")[2:6] == ["20", rate, "4.0%", "2.00 ×"]
    assert table_row(results, "flash_attention_3")[3] == f"{flops / 0.8e9:.4g}"
    assert "| [v0" not in results
    for told in (
        "; q, k, v and dout normally distributed with variance 1",
        "FLOPs are 2.5 times forward's. ",
        "beyond q, k, v, o, lse and dout; of a peer that differentiates its own forward, also",
        "Max error: of dq, against float64; torch in bf16 has 4.0e-03.",
    ):
        assert told in results
    assert "not all measured in one run" not in results
    memory = table_of(backward_root, "memory b")
    assert memory.splitlines()[::2] == [
        "| N | b02 |",
        "| 512 | 10.0 MB |",
        "",
    ]
    assert "beyond q, k, v, o, lse and dout, batch 4" in memory
    assert "Max error: of dq, against float64." in table_of(backward_root, "peers b")
    assert "b02 / fastest peer |" in table_of(backward_root, "grid b")
    assert table_row(table_of(backward_root, "sass b"), "b02")[0] == "b02 `attention_backward`"
    assert table_row(table_of(backward_root, "banks b"), "b02")[1] == "`ldmatrix_x4(a)`"


def test_a_ladder_without_its_letter_is_forward(backward_root):
    regenerate(backward_root)
    readme = (backward_root / "README.md").read_text()
    forward = table_of(backward_root, "results")
    assert table_of(backward_root, "results v") == forward
    assert "b01" not in forward
    assert "FLOPs" not in forward
    assert "beyond q, k and v. Max error: against float64;" in forward
    assert "b02" not in table_of(backward_root, "sass v") + table_of(backward_root, "banks v")
    text = (backward_root / "worklog.md").read_text()
    for kind in ("memory", "peers"):
        of_letter = table_of(backward_root, f"{kind} v")
        assert f"<!-- table: {kind} -->\n\n{of_letter}\n\n<!-- end -->" in text
    assert readme.count("not measured\n\n<!-- end -->") == 3  # the forward grid, twice; training


def test_gains_are_told_over_what_a_step_changes():
    readme = (ROOT / "README.md").read_text()
    assert "Step gain: over the step before, same run; of b10 over b08" in readme
    assert "Step gain: over the step before, same run; of v14 over v12" in readme


def test_a_ladder_on_another_gpu(backward_root):
    folder, device = backward_root / "profiles/h100", {"device": "NVIDIA H100 80GB HBM3"}
    write_record(folder / "b01.json", fake_record(B01) | device)
    regenerate(backward_root)
    results = table_of(backward_root, "results b")
    assert "On the NVIDIA H100 80GB HBM3:" in results
    assert "H100" not in table_of(backward_root, "results")
    path = backward_root / "README.md"
    path.write_text(path.read_text() + "<!-- table: results b h100 --><!-- end -->\n")
    regenerate(backward_root)
    assert "H100" not in table_of(backward_root, "results b")  # it has a table of its own
    assert table_row(table_of(backward_root, "results b h100"), "b01")[2] == "20"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("b02.tflops / b01.tflops : .1f", "2.0"),
        ("b02.error : .0e", "1e-03"),
        ("b02.dk_error : .0e", "1e-06"),
        ("b02.torch_errors.dv : .2f", "0.05"),
        ("b02.gain : .1f", "2.0"),
        ("peers_backward.flash_attention_3.time_ms", "0.8"),
        ("peers_backward.sdpa_math.tflops", "missing"),
        (
            "peers_backward.flash_attention_3.tflops / peers.flash_attention_3.tflops",
            "not measured together",
        ),
        ("b02.tflops / peers_backward.flash_attention_3.tflops : .2f", "0.04"),
        ("grid_backward.d64_4096.b02", "200.0"),
        ("b02.sass.attention_backward.HMMA", "128"),
    ],
)
def test_expression_of_the_backward_ladder(backward_root, expression, text):
    assert evaluate(expression, record_set_of(backward_root)) == text


def test_without_backward_records_its_numbers_are_not_measured(root):
    assert (
        evaluate("peers_backward.flash_attention_3.time_ms", record_set_of(root)) == "not measured"
    )
    assert record_set_of(root).of(BACKWARD).newest is None


def test_without_records_nothing_is_made_up(root):
    for path in (root / "profiles/h200").iterdir():
        path.unlink()
    assert regenerate(root) == ["README.md", "worklog.md", *FIGURES, PAGE]
    readme = (root / "README.md").read_text()
    assert "-->not measured<!--" in readme
    assert table_row(readme, "v01")[2:4] == ["not measured", ""]


def test_timeline_is_drawn_from_its_record(root):
    patch = "common/bench/timelines/v09.patch"
    (root / patch).parent.mkdir(parents=True)
    (root / patch).write_text((ROOT / patch).read_text())
    assert regenerate(root) == GENERATED
    name = "profiles/h200/timelines/v09.svg"
    record = fake_timeline(find_step(patch))
    write_record(root / name.replace("svg", "json"), record)
    both = [name, name.replace(".svg", "_dark.svg")]
    assert regenerate(root, check=True) == [*both, PAGE]
    assert regenerate(root) == [*both, PAGE]
    svg = (root / name).read_text()
    (root / name).write_text(svg.replace("2200 clocks", "2000 clocks"))
    assert regenerate(root, check=True) == [name]
    write_record(root / name.replace("svg", "json"), record | {"code_sha256": "0" * 64})
    assert regenerate(root) == [*both, PAGE]
    assert "v09 (stale)" in (root / name).read_text()


@pytest.mark.parametrize("name", ["README.md", "worklog.md"])
def test_pictures_of_the_text_exist_for_both_themes(name):
    text = (ROOT / name).read_text()
    assert not re.search(r"!\[[^]]*\]\(", text)  # these know no theme
    pictures = re.findall(
        r'^<picture>\n  <source media="\(prefers-color-scheme: dark\)" srcset="(.*)_dark\.svg">\n'
        r'  <img alt="[^"]+" src="(.*)\.svg">\n</picture>$',
        text,
        re.MULTILINE,
    )
    assert len(pictures) == text.count("<picture>") > 0
    for dark, light in pictures:
        assert dark == light
        for theme in ("", "_dark"):
            assert (ROOT / f"{light}{theme}.svg").exists()


def test_stale_record_is_called_stale(root):
    write_record(root / "profiles/h200/v02.json", fake_record(V02) | {"code_sha256": "0" * 64})
    regenerate(root)
    readme = (root / "README.md").read_text()
    assert table_row(readme, "v02")[0].endswith("(stale)")
    assert "-->stale<!--" in readme


RECORDS = [
    "h200/v02.json",
    "h200/experiments/v02_nothing.json",
    "h200/grid.json",
    "h200/grid_previous.json",
    "h200/b01.json",
    "h200/grid_backward.json",
    "h200/grid_backward_previous.json",
    "h200/distributions.json",
    "h200/distributions_previous.json",
    "h200/decode.json",
    "h200/large_head_dim.json",
    "h200/large_head_dim_previous.json",
    "h200/large_head_dim_backward.json",
    "h200/lengths.json",
    "h200/latency.json",
    "h200/training_speed.json",
    "h200/timelines/v09.json",
    "static/v02.json",
    "geforce_rtx_4090/v02.json",
]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ('{"schema": 2}', "the record has no "),
        ("\xff", "codec can't decode"),
    ],
)
def test_malformed_record_changes_nothing(root, monkeypatch, capsys, name, content, told):
    """It fails in one line naming the file, even where other files differ from their records."""

    def contents() -> dict:
        return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    path = root / "profiles" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("latin-1"))
    before = contents()
    monkeypatch.setattr(markdown, "regenerate", partial(regenerate, root))
    for arguments in (["worklog"], ["worklog", "--check"]):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: malformed record {path}: ")
        assert told in line
        assert contents() == before


def test_measuring_again_repairs_a_malformed_record(root, capsys):
    path = root / "profiles/h200/v01.json"
    path.write_text("{")
    assert headline.counters_so_far(path, V01) == "not collected"
    assert f"warning: malformed record {path}" in capsys.readouterr().err
    write_record(path, fake_record(V01))
    regenerate(root)
    assert table_row((root / "README.md").read_text(), "v01")[2] == "20"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("README.md", "-->20.0<", "-->21.0<"),
        ("README.md", "| 27.49 |", "| 99.99 |"),
        ("worklog.md", "4.00 GB", "3.00 GB"),
        ("profiles/h200/steps.svg", "27.5", "99.9"),
        ("profiles/h200/steps_dark.svg", "27.5", "99.9"),
        ("figures/swizzle_banks.svg", "8 wavefronts", "7 wavefronts"),
    ],
)
def test_check_finds_an_edit(root, name, old, new):
    regenerate(root)
    path = root / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert regenerate(root, check=True) == [name]
    assert path.read_text() != text  # a check repairs nothing
    assert regenerate(root) == [name]
    assert path.read_text() == text


def test_check_finds_a_missing_plot(root):
    regenerate(root)
    (root / "profiles/h200/steps.svg").unlink()
    assert regenerate(root, check=True) == ["profiles/h200/steps.svg"]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("worklog.md", "<!-- table: memory --><!-- end -->", "", "<!-- table: memory -->"),
        ("worklog.md", "memory --><!-- end -->", "memory -->", "no <!-- end -->"),
        ("README.md", "0<!-- end --> ms", "0 ms", "no <!-- end -->"),
        ("README.md", "table: results", "table: result", "marker <!-- table: result -->"),
        ("README.md", "table: grid", "table: ", "marker <!-- table:  -->"),
        ("README.md", "table: grid", "table: grid H100", "marker <!-- table: grid H100 -->"),
        ("worklog.md", "table: sass", "table: sass h100", "marker <!-- table: sass h100 -->"),
        ("worklog.md", "table: sass", "table: sass x", "marker <!-- table: sass x -->"),
        ("worklog.md", "table: latency", "table: latency b", "marker <!-- table: latency b -->"),
        ("worklog.md", "table: memory -->", "table: memory b -->", "<!-- table: memory -->"),
        (
            "worklog.md",
            "table: peers",
            "table: peers h100 b",
            "marker <!-- table: peers h100 b -->",
        ),
        ("README.md", "v02.time_ms", "v02.time", "no 'time'"),
        ("README.md", "v02.time_ms", "v77.time_ms", "no 'v77'"),
    ],
)
def test_a_wrong_marker_leaves_the_file_alone(root, name, old, new, message):
    regenerate(root)
    path = root / name
    broken = {"README.md": README, "worklog.md": WORKLOG}[name].replace(old, new)
    path.write_text(broken)
    (root / "profiles/h200/steps.svg").unlink()
    with pytest.raises(UsageError, match=re.escape(name)) as error:
        regenerate(root)
    assert message in str(error.value)
    assert path.read_text() == broken
    assert (root / "profiles/h200/steps.svg").exists()  # the rest is done


def test_a_missing_file_is_named(root):
    (root / "worklog.md").unlink()
    with pytest.raises(UsageError, match=r"worklog\.md"):
        regenerate(root)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("v02.time_ms", "20.0"),
        ("v02.tflops : .1f", "27.5"),
        ("v02.tflops / v01.tflops : .2f", "2.00"),
        ("v02.time_ms / v01.time_ms : .0%", "50%"),
        ("v02.time_ms * 1000 / 2 : .0f", "10000"),
        ("v01.time_ms - v02.time_ms / 2 - 5 : .0f", "25"),
        ("v01.time_ms / (v02.time_ms - 10) : .0f", "4"),
        ("(v01.time_ms+2)*(3-1)/v02.time_ms : .1f", "4.2"),
        ("v02.time_ms / (v01.time_ms - 40) : .1f", "undefined: a division by zero"),
        ("v02.registers", "111"),
        ("v02.spill_bytes", "12"),
        ("v02.fa3_share : .1%", "4.0%"),
        ("v02.gain : .1f", "2.0"),
        ("v01.gain : .1f", "not measured"),
        ("v02.memory_gb.1024 : .3f", "0.020"),
        ("v02.resources.attention_forward.dynamic_smem : ,", "2,048"),
        ("v02.environment.after.sm_clock_mhz", "1000"),
        ("v02.git.commit", "not collected"),
        ("v02.ncu.attention_scores.cycles : .2e", "not collected"),
        ("v03.time_ms : .1f", "not measured"),
        ("v03.time_ms / v02.time_ms : .1f", "not measured"),
        ("peers.sdpa_cudnn.time_ms : .2f", "1.00"),
        ("peers.sdpa_math.time_ms : .2f", "missing"),
    ],
)
def test_expression(root, expression, text):
    assert evaluate(expression, record_set_of(root)) == text


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "v02",
        "v02.",
        "v02.tflop",
        "v02.tflops +",
        "v02.tflops (v01.tflops)",
        "(v02.tflops + 1",
        "v02.tflops + 1)",
        "()",
        "-1",
        "v02.tflops % 2",
        "v02.tflops : q",
        "v02.shape",
        "v02.time_ms.x",
        "v99.time_ms",
        "peers.none.time_ms",
        "experiments.none.time_ms",
        "__import__('os')",
    ],
)
def test_expression_that_means_nothing(root, expression):
    with pytest.raises(UsageError):
        evaluate(expression, record_set_of(root))


def test_times_of_different_runs_are_not_compared(root):
    write_record(
        root / "profiles/h200/v02.json", fake_record(V02, baseline=V01, run="2000-01-02 b")
    )
    record_set = record_set_of(root)
    assert evaluate("v02.tflops / v01.tflops : .1f", record_set) == "not measured together"


def test_a_peers_time_beside_a_steps_is_of_that_run(root):
    peer = "peers.sdpa_cudnn.time_ms"
    expressions = [f"v01.time_ms / {peer}", f"2 * v01.time_ms / {peer}", f"{peer} / v01.time_ms"]
    together = [evaluate(each, record_set_of(root)) for each in expressions]
    later = fake_record(V02, baseline=V01, run="2000-01-02 b")
    later["peers"]["sdpa_cudnn"]["time_ms"] *= 4
    write_record(root / "profiles/h200/v02.json", later)
    assert [evaluate(each, record_set_of(root)) for each in expressions] == together


def test_gain_over_a_changed_baseline_is_not_shown(root):
    assert evaluate("v02.gain : .1f", record_set_of(root)) == "2.0"
    record = fake_record(V02, baseline=V01)
    record["baseline"]["code_sha256"] = "0" * 64
    write_record(root / "profiles/h200/v02.json", record)
    assert evaluate("v02.gain : .1f", record_set_of(root)) == "not measured"


def test_experiments(root, monkeypatch):
    lines = V02.path.read_text().splitlines()
    patch = (
        "tries: nothing\npredicts: no change\n"
        f"--- a/steps/{V02.path.name}\n+++ b/steps/{V02.path.name}\n@@ -1,3 +1,4 @@\n"
        + "".join(f" {line}\n" for line in lines[:2])
        + "+// nothing\n"
    )
    folder = root / "experiments"
    folder.mkdir()
    (folder / "v02_nothing.patch").write_text(patch)
    regenerate(root)
    row = table_row((root / "worklog.md").read_text(), "v02_nothing")
    assert row[1:] == ["nothing", "no change", "", "not measured", "", "", ""]
    (patched,) = record_set_of(root).patches
    record = fake_record(read_step(patched.write()), baseline=V02, time_ms=10.0)
    write_record(root / "profiles/h200/experiments/v02_nothing.json", record)
    regenerate(root)
    row = table_row((root / "worklog.md").read_text(), "v02_nothing")
    assert row[3:] == ["20", "10", "2.00 ×", "111", "0 B"]
    assert evaluate("experiments.v02_nothing.gain : .1f", record_set_of(root)) == "2.0"
    static = fake_static_record(read_step(patched.write()))
    write_record(root / "profiles/static/v02_nothing.json", static)
    assert (
        evaluate("experiments.v02_nothing.banks.ldmatrix_x4.ideal", record_set_of(root)) == "5120"
    )
    # A patched step that cannot be written is an error and makes no record stale.
    (root / "build").write_text("")
    with monkeypatch.context() as in_the_way:
        in_the_way.setattr(common.patch, "BUILD_DIR", root / "build")
        with pytest.raises(UsageError, match=r"v02_nothing\.patch cannot be applied"):
            regenerate(root)
    (root / "worklog.md").write_text(WORKLOG.replace("<!-- table: experiments v02 -->", ""))
    with pytest.raises(UsageError, match="experiments v02"):
        regenerate(root)


@pytest.fixture
def static_root(root):
    """The project with static records of v01, v02 and v03."""
    not_compiled = fake_static_record(V01) | {"compiled": "not collected", "banks": []}
    no_sass = fake_static_record(V03)
    no_sass["compiled"]["sass"] = "not collected"
    for record in (not_compiled, fake_static_record(V02), no_sass):
        write_record(root / f"profiles/static/{record['step']}.json", record)
    return root


def test_static_tables(static_root, capsys):
    assert regenerate(static_root) == GENERATED
    assert not capsys.readouterr().err  # static/ is not taken for a GPU's records
    text = (static_root / "worklog.md").read_text()
    sass, banks = text[text.index("table: sass") :].split("<!-- table: banks -->")
    resources = ["111", "0 B", "12 B"]
    assert table_row(sass, "v01")[1:3] == ["not collected", ""]
    opcodes = ["200", "128", "0", "64"]
    assert table_row(sass, "v02 `attention_forward`")[1:8] == [*resources, *opcodes]
    assert table_row(sass, "v03 `attention_forward`")[1:6] == [*resources, "not collected", ""]
    assert "Compiled for sm_1 by nvcc 1.0: head_dim 128, bf16" in sass
    assert [line for line in banks.splitlines() if line.startswith("| v02")] == [
        "| v02 | `ldmatrix_x4(a)` | 4 → 32 | 7168 |",
        "| v02 | `ldmatrix_x4(b)` | 4 → 4 | 0 |",
        "| v02 | `store_uint4` | 4 → 4 | 0 |",
    ]
    assert "| v01" not in banks


def test_stale_static_record_is_called_stale(static_root):
    record = fake_static_record(V02) | {"code_sha256": "0" * 64}
    write_record(static_root / "profiles/static/v02.json", record)
    regenerate(static_root)
    text = (static_root / "worklog.md").read_text()
    assert "| v02 | stale | " in text[text.index("table: sass") :]
    assert "| v02 | stale |  |  |" in text[text.index("table: banks") :]
    for expression in ("v02.sass.attention_forward.HMMA", "v02.banks.store_uint4.conflicts"):
        value = evaluate(expression, record_set_of(static_root))
        assert value == "stale"
    assert evaluate("v02.registers", record_set_of(static_root)) == "111"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("v02.sass.attention_forward.HMMA", "128"),
        ("v02.sass.attention_forward.LDL", "0"),
        ("v02.sass.attention_forward.FADD", "8"),
        ("v02.sass.attention_forward.instructions", "200"),
        ("v02.banks.ldmatrix_x4.conflicts : ,", "7,168"),
        ("v02.banks.ldmatrix_x4.wavefronts / v02.banks.ldmatrix_x4.accesses : .1f", "9.6"),
        ("v01.sass.attention_scores.HMMA", "not collected"),
        ("v03.sass.attention_forward.HMMA", "not collected"),
        ("v03.banks.store_uint4.ideal", "2304"),
        ("v04.sass.attention_forward.HMMA", "not measured"),
    ],
)
def test_static_expression(static_root, expression, text):
    assert evaluate(expression, record_set_of(static_root)) == text


@pytest.mark.parametrize(
    "expression",
    [
        "v02.sass",
        "v02.sass.attention_forward.HMA",
        "v02.banks.ldmatrix_x4.line",
        "v01.banks.x.ideal",
    ],
)
def test_static_expression_that_means_nothing(static_root, expression):
    with pytest.raises(UsageError):
        evaluate(expression, record_set_of(static_root))


def test_command_reports(monkeypatch, capsys):
    monkeypatch.setattr(markdown, "regenerate", lambda check: ["README.md"])
    assert main(["worklog", "--check"]) == 1
    assert capsys.readouterr().out == "README.md differs: run make worklog\n"
    assert main(["worklog"]) == 0
    assert capsys.readouterr().out == "wrote README.md\n"

    def broken(check):
        raise UsageError("worklog.md: missing marker")

    monkeypatch.setattr(markdown, "regenerate", broken)
    assert main(["worklog"]) == 2
    assert capsys.readouterr().err == "error: worklog.md: missing marker\n"


def anchors(path) -> set[str]:
    """The headings' anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
    for link in links:
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        assert (ROOT / (target or name)).exists(), link
        assert not anchor or anchor in anchors(ROOT / (target or name)), link
