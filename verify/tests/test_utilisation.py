"""The model of utilisation: its counts by hand, and its tables on fake records."""

from __future__ import annotations

import json

import pytest

from common.catalog import find_step
from common.errors import UsageError
from common.metrics import METRICS
from common.operation import BACKWARD, FORWARD
from common.records import write_record
from common.report import utilisation_table
from common.report.expressions import evaluate
from common.report.record_set import load_record_set
from common.report.utilisation import (
    CLOCK_HZ,
    FUSED,
    IN_TWO_KERNELS,
    LANES,
    MMA_SYNC,
    ON_LANES,
    SMS,
    TENSOR_FMAS,
    WGMMA,
    Attention,
    attention,
    counted_shares,
    shares,
)
from verify.tests.fake_records import fake_grid, fake_record, fake_static_record

V01, V02, B01, B02 = (find_step(name) for name in ("v01", "v02", "b01", "b02"))
FORWARD_BY_WGMMA = Attention(FUSED["forward"], WGMMA)
PEAK_TFLOPS = 132 * 4096 * 1.98e9 / 1e12


def test_the_peaks_are_the_datasheets():
    tensor_flops, float32_flops = (2 * fmas * SMS for fmas in (TENSOR_FMAS, LANES))
    assert tensor_flops * 1.83e9 == pytest.approx(989e12, rel=1e-3)
    assert float32_flops * CLOCK_HZ == pytest.approx(67e12, rel=2e-3)


@pytest.mark.parametrize(
    ("work", "instruction", "head_dim", "clocks"),
    [
        # tensor, exp, fma, smem; instructions, packed, issue
        # Q K^T and P V: 256 multiply-adds; operands B: 2 x 128 x 2 bytes, for 64 rows.
        ("forward", WGMMA, 128, (1 / 8, 1 / 16, 2 / 128, 8 / 128, 261 / 128, 21 / 128, 5 / 128)),
        ("forward", WGMMA, 64, (1 / 16, 1 / 16, 2 / 128, 4 / 128, 133 / 128, 13 / 128, 5 / 128)),
        ("forward", MMA_SYNC, 128, (1 / 8, 1 / 16, 2 / 128, 1 / 8, 261 / 128, 21 / 128, 5 / 128)),
        # Without tensor cores the products are the lanes', too.
        ("forward", ON_LANES, 64, (None, 1 / 16, 130 / 128, None, *[133 / 128] * 3)),
        # 5 x 4 bytes of operands B, 4 of dS.
        ("backward", WGMMA, 128, (5 / 16, 1 / 16, 3 / 128, 24 / 128, 645 / 128, 45 / 128, 5 / 128)),
        ("in two", WGMMA, 128, (7 / 16, 1 / 8, 6 / 128, 28 / 128, 906 / 128, 66 / 128, 10 / 128)),
        ("forward", None, 64, (1 / 16, 1 / 16, 2 / 128, None, 133 / 128, 13 / 128, 5 / 128)),
    ],
)
def test_clocks_of_an_element(work, instruction, head_dim, clocks):
    of_work = FUSED.get(work, IN_TWO_KERNELS)
    assert tuple(Attention(of_work, instruction).clocks(head_dim).values()) == pytest.approx(clocks)


def test_shares_follow_from_tflops():
    at_peak = shares(FORWARD_BY_WGMMA, FORWARD, 128, PEAK_TFLOPS)
    assert [at_peak[unit] for unit in ("tensor", "exp", "smem", "fma")] == pytest.approx(
        [1, 1 / 2, 1 / 2, 1 / 8]
    )
    assert at_peak["packed"] == pytest.approx(21 / 16)
    fused, two = Attention(FUSED["backward"], WGMMA), Attention(IN_TWO_KERNELS, WGMMA)
    assert shares(fused, BACKWARD, 64, PEAK_TFLOPS)["tensor"] == pytest.approx(1)
    assert shares(two, BACKWARD, 64, PEAK_TFLOPS)["tensor"] == pytest.approx(7 / 5)
    # At half of the peak an exponential takes 1/16 of the 1/8 clock that an element has at head_dim
    # 64, where the peak has 16 elements a clock.
    assert shares(FORWARD_BY_WGMMA, FORWARD, 64, PEAK_TFLOPS / 2)["exp"] == pytest.approx(1 / 2)


def static_of(step, **sass) -> dict:
    record = fake_static_record(step)
    (resources,) = record["compiled"]["resources"].values()
    record["compiled"] |= {"sass": sass, "resources": dict.fromkeys(sass, resources)}
    return record


@pytest.fixture
def root(tmp_path):
    """Records of v02 (mma.sync) and b02 (wgmma, in two kernels), and grids of these two steps."""
    (tmp_path / "profiles/h200").mkdir(parents=True)
    for step, name in ((V02, "grid"), (B02, "grid_backward")):
        write_record(tmp_path / f"profiles/h200/{step.name}.json", fake_record(step))
        write_record(tmp_path / f"profiles/h200/{name}.json", fake_grid(step))
    write_record(tmp_path / "profiles/static/v02.json", fake_static_record(V02))
    of_two = static_of(B02, attention_dq={"HGMMA": 1, "HMMA": 1}, attention_dk_dv={"HGMMA": 2})
    write_record(tmp_path / "profiles/static/b02.json", of_two)
    return tmp_path


def ladder_of(root, operation=FORWARD):
    return load_record_set(root / "profiles/h200", root).of(operation)


def test_records_tell_what_a_step_does(root):
    assert attention(ladder_of(root), "v02") == Attention(FUSED["forward"], MMA_SYNC)
    assert attention(ladder_of(root, BACKWARD), "b02") == Attention(IN_TWO_KERNELS, WGMMA)
    assert attention(ladder_of(root, BACKWARD), "flash_attention_3") == Attention(
        FUSED["backward"], WGMMA
    )
    assert attention(ladder_of(root), "sdpa_flash").instruction == MMA_SYNC
    assert attention(ladder_of(root), "another").instruction is None
    assert attention(ladder_of(root), "v01") == "not measured"
    on_lanes = static_of(V02, attention_forward={"FFMA": 8, "HMMA": 0})
    write_record(root / "profiles/static/v02.json", on_lanes)
    assert attention(ladder_of(root), "v02").instruction == ON_LANES
    write_record(root / "profiles/static/v02.json", on_lanes | {"code_sha256": "0" * 64})
    assert attention(ladder_of(root), "v02") == "stale"
    not_compiled = fake_static_record(V02) | {"compiled": "not collected"}
    write_record(root / "profiles/static/v02.json", not_compiled)
    assert attention(ladder_of(root), "v02") == "not collected"


def table_rows(text: str) -> dict[tuple[str, str], list[str]]:
    """The other cells by head_dim and name."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(head_dim, name): rest for head_dim, name, *rest in cells}


def test_table(root):
    text = utilisation_table.utilisation(ladder_of(root))
    found = table_rows(text)
    # 640 TFLOP/s at head_dim 64 are 2.5e12 elements a second, 9.5653 an SM and clock.
    assert found["64", "sdpa_cudnn"] == [
        *("640", "**60 %**", "**60 %**", "15 %", "30 %", "9.94 ×", "0.97 ×")
    ]
    # mma.sync reads 8 bytes for 1/16 clock of the tensor cores: 1/16 clock.
    assert found["64", "v02"] == [
        *("100", "**9 %**", "**9 %**", "2 %", "**9 %**", "1.55 ×", "0.15 ×")
    ]
    assert ("64", "sdpa_math") not in found
    # The grid has nothing at head_dim 128, where the record of the headline is: 27.49 TFLOP/s.
    assert found["128", "v02"][:3] == ["27.49", "**3 %**", "1 %"]
    assert list(found) == [
        *(("64", name) for name in ("v02", "sdpa_flash", "sdpa_cudnn")),
        ("128", "v02"),
    ]
    assert "of the NVIDIA H200 must be busy" in text
    backward = table_rows(utilisation_table.utilisation(ladder_of(root, BACKWARD)))
    # 100 TFLOP/s are counted of five products: 1.5625e11 elements a second, 0.59783 an SM and
    # clock, of which seven products take 7/32 clock and two exponentials 1/8.
    assert backward["64", "b02"][1:3] == ["**13 %**", "7 %"]


def test_what_is_stale_or_missing_is_told(root):
    for name in ("v02", "grid"):
        path = root / f"profiles/h200/{name}.json"
        text = path.read_text().replace(V02.code_sha256, "0" * 64)
        path.write_text(text)
    found = table_rows(utilisation_table.utilisation(ladder_of(root)))
    assert found["64", "v02 (stale)"][:2] == ["100", "**9 %**"]
    assert found["128", "v02 (stale)"][0] == "27.49"
    (root / "profiles/static/v02.json").unlink()
    found = table_rows(utilisation_table.utilisation(ladder_of(root)))
    assert found["64", "v02 (stale)"] == ["100", "not measured", "", "", "", "", ""]
    for path in (root / "profiles/h200").iterdir():
        path.unlink()
    assert utilisation_table.utilisation(ladder_of(root)) == "not measured"
    assert utilisation_table.utilisation_counted(ladder_of(root)) == "not measured"


def test_another_gpu_is_not_modelled(root):
    for name in ("v02", "grid"):
        path = root / f"profiles/h200/{name}.json"
        record = json.loads(path.read_text()) | {"device": "NVIDIA GeForce RTX 4090"}
        record["counters"] = {"attention_forward": dict.fromkeys(METRICS, 5.0)}
        write_record(path, record)
    ladder = ladder_of(root)
    assert utilisation_table.utilisation(ladder).startswith("not modelled: ")
    assert utilisation_table.utilisation_counted(ladder).startswith("not modelled: ")
    record_set = load_record_set(root / "profiles/h200", root)
    assert evaluate("utilisation.d64_4096.v02.exp : .2f", record_set) == "not modelled"


TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
CYCLES, DURATION = "sm__cycles_elapsed.max", "gpu__time_duration.sum"


def counted_record() -> dict:
    """Two kernels: 3 Mclocks in 2 ms, the tensor cores at 80 %, and 1 Mclock in 0.5 ms, at 20 %."""
    counters = {
        name: dict.fromkeys(METRICS, 50.0) | {CYCLES: cycles, DURATION: ns, TENSOR: tensor}
        for name, cycles, ns, tensor in (("one", 3e6, 2e6, 80.0), ("two", 1e6, 0.5e6, 20.0))
    }
    return fake_record(V02) | {"counters": counters}


def test_shares_of_the_counted_clocks():
    found = counted_shares(FORWARD_BY_WGMMA, counted_record())
    assert found["ghz"] == pytest.approx(1.6)
    assert found["counted"]["tensor"] == pytest.approx((0.8 * 3 + 0.2 * 1) / 4)
    # 64 x 4096^2 elements of S on 132 SMs in 4 Mclocks are 2.0336 a clock.
    assert found["predicted"]["tensor"] == pytest.approx(2.0336 / 8, rel=1e-4)
    assert found["predicted"]["issue"] == pytest.approx(2.0336 * 5 / 128, rel=1e-4)
    causal = counted_record()
    causal["shape"]["causal"] = True
    halved = counted_shares(FORWARD_BY_WGMMA, causal)["predicted"]
    assert halved["exp"] == pytest.approx(found["predicted"]["exp"] / 2)
    not_all = counted_record()
    not_all["counters"]["two"][TENSOR] = None
    assert counted_shares(FORWARD_BY_WGMMA, not_all) is None
    assert counted_shares(FORWARD_BY_WGMMA, fake_record(V02)) is None


def test_table_of_counted_clocks(root):
    assert utilisation_table.utilisation_counted(ladder_of(root)) == "not measured"
    write_record(root / "profiles/h200/v02.json", counted_record())
    text = utilisation_table.utilisation_counted(ladder_of(root))
    assert "| v02 | 1.60 | 25 / 65 | 13 / 50 | 3 / 50 | 25 / 50 | 8 / 50 |" in text
    stale = counted_record() | {"code_sha256": "0" * 64}
    write_record(root / "profiles/h200/v02.json", stale)
    assert "| v02 | stale |  |" in utilisation_table.utilisation_counted(ladder_of(root))


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("utilisation.d64_4096.sdpa_cudnn.exp : .1%", "59.8%"),
        ("utilisation.d64_causal_4096.sdpa_cudnn.exp : .1%", "59.8%"),  # of visible keys, as FLOPs
        ("utilisation.d64_4096.v02.tensor + utilisation.d64_4096.v02.exp : .1%", "18.7%"),
        ("utilisation_backward.d64_4096.b02.packed : .3f", "0.177"),
        ("utilisation.d64_4096.v01.tensor", "not measured"),
        ("utilisation.d128_4096.v02.tensor", "not measured"),
        ("utilisation.d64_4096.sdpa_math.tensor", "missing"),
        (
            "utilisation.d64_4096.v02.exp / utilisation.d64_causal_4096.v02.exp",
            "not measured together",
        ),
    ],
)
def test_expression(root, expression, text):
    assert evaluate(expression, load_record_set(root / "profiles/h200", root)) == text


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("utilisation.d64_4096.v02", "utilisation.d64_1024.v07.tensor"),
        ("utilisation.d64_4096.v02.alu", "no 'alu'"),
        ("utilisation.d64_4096.nobody.exp", "no 'nobody'"),
        ("utilisation.d65_4096.v02.exp", "no 'd65_4096'"),
    ],
)
def test_expression_that_means_nothing(root, expression, told):
    with pytest.raises(UsageError, match=told):
        evaluate(expression, load_record_set(root / "profiles/h200", root))
