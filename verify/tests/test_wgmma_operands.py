"""What is refused in the machine code of wgmma."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.catalog import find_step
from common.errors import UsageError
from common.problem import Specialization
from common.runtime.build import build_cubin, nvcc
from common.runtime.sass import disassemble, nvdisasm
from verify.machine_code import machine_code, parse
from verify.tests.listings import listing
from verify.wgmma_operands import mixed_operands

# Of a draft of b07, head_dim 64, by ptxas 13.0: K is loaded before the loop, and R184 is dS, too.
B07 = Path(__file__).with_name("b07_mixed_operands.sass").read_text(encoding="utf-8")
# Instructions, and how nvdisasm marks R0, R1, ...: ^ is written, x read and written.
LOAD = ("LDSM.16.M88.4 R0, [R4]", "^^^^v")
CONVERT = [
    ("F2FP.BF16.F32.PACK_AB R0, R5, R6", "^    vv"),
    ("F2FP.BF16.F32.PACK_AB R1, R5, R6", ":^   vv"),
    ("F2FP.BF16.F32.PACK_AB R2, R5, R6", "::^  vv"),
    ("F2FP.BF16.F32.PACK_AB R3, R5, R6", ":::^ vv"),
]
RECEIVE = ("@P0 LDG.E R0, desc[UR4][R4.64]", "^:::vv")
CALL = ("CALL.REL.NOINC `($slow)", "^^^^")
MULTIPLY = ("HGMMA.64x16x16.F32.BF16 R8, R0, gdesc[UR4], R8", "vvvv    xxxxxxxx")


def has(tool) -> bool:
    try:
        return bool(tool())
    except UsageError:
        return False


def test_what_a_loop_writes_over_rows_that_stay_is_found() -> None:
    assert mixed_operands(parse(B07)) == [
        "attention_dk_dv: wgmma at 0f80 reads R184, written by F2FP and LDSM"
    ]
    *straight, loop = B07.splitlines()
    assert "BRA `(.L_x_7)" in loop
    assert mixed_operands(parse("\n".join(straight))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ([LOAD, MULTIPLY], ""),
        ([LOAD, *CONVERT, MULTIPLY], ""),
        ([LOAD, *CONVERT, RECEIVE, MULTIPLY], ""),
        ([LOAD, CALL, MULTIPLY], ""),
        ([LOAD, *CONVERT[1:], MULTIPLY], "F2FP and LDSM"),
        ([LOAD, RECEIVE, MULTIPLY], "LDG and LDSM"),
        ([LOAD, ("LDS.128 R0, [R4]", "^^^^v"), MULTIPLY], ""),
        ([LOAD, ("@P0 LDS.128 R0, [R4]", "^^^^v"), MULTIPLY], "LDS and LDSM"),
        ([*CONVERT, ("FMUL R2, R2, R5", "::x  v"), MULTIPLY], "F2FP and FMUL"),
        ([MULTIPLY], "nothing"),
        ([LOAD, ("BRA `(.L_x_1)", ""), *CONVERT, ("EXIT", ""), ".L_x_1", MULTIPLY], ""),
        ([LOAD, ("BSSY B0, `(.L_x_1)", ""), *CONVERT, ".L_x_1", MULTIPLY], ""),
        ([LOAD, ("@P0 BRA `(.L_x_1)", ""), *CONVERT, ".L_x_1", MULTIPLY], "F2FP and LDSM"),
        ([LOAD, ("BRA.U UP0, `(.L_x_1)", ""), *CONVERT, ".L_x_1", MULTIPLY], "F2FP and LDSM"),
        ([".L_x_1", LOAD, MULTIPLY, *CONVERT, ("@!P0 BRA `(.L_x_1)", "")], ""),
        ([LOAD, ".L_x_1", MULTIPLY, *CONVERT, ("@!P0 BRA `(.L_x_1)", "")], "F2FP and LDSM"),
    ],
)
def test_all_paths_to_a_product_are_followed(code, found) -> None:
    (mistake,) = mixed_operands(parse(listing(*code))) or [""]
    assert mistake.partition("reads R0, written by ")[2] == found


@pytest.mark.skipif(not has(nvcc) or not has(nvdisasm), reason="no nvcc or no nvdisasm")
def test_nvdisasm_lists_what_is_looked_for() -> None:
    cubin = build_cubin(find_step("b06"), Specialization(64, "bf16", False), "sm_90a").path
    assert mixed_operands(machine_code(cubin)) == []
    lines = disassemble(cubin, "-plr", "-lrm", "narrow").splitlines()
    others = "\n".join(line for line in lines if "LDSM" not in line)
    (mistake,) = mixed_operands(parse(others))
    assert mistake.startswith("attention_backward: wgmma at ")
