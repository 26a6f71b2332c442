"""Counting the instructions of a cubin."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from common.catalog import find_step
from common.errors import UsageError
from common.metrics import OPCODES
from common.problem import COUNTED
from common.runtime import sass
from common.runtime.build import build_cubin, headline_arch, nvcc
from common.runtime.sass import count_instructions, nvdisasm, parse

LISTING = """
	.target	sm_90
	.section	.text.attention_scores,"ax",@progbits
.text.attention_scores:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 IMAD.IADD R7, R7, 0x1, -R6 ;
        /*0020*/             @!UP1 IMAD.MOV.U32 R4, RZ, RZ, RZ ;
.L_x_0:
        /*0030*/                   HFMA2.MMA R8, -RZ, RZ, 0, 0 ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R4, R2, RZ ;
        /*0050*/                   BRA `(.L_x_0) ;
        /*0060*/                   NOP;
	.section	.text.attention_output,"ax",@progbits
        /*12340*/             @!P2 EXIT ;
	.section	.nv.shared.attention_output,"aw",@nobits
	.section	.text.attention_forward,"ax",@progbits
        /*0000*/               @P0 ELECT P2, URZ, PT ;
        /*0010*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x34028], RZ ;
        /*0020*/              @UP2 UTMALDG.4D [UR8], [UR6] ;
        /*0030*/             @!UPT UIADD3 URZ, URZ, URZ, URZ ;
        /*0040*/                   HGMMA.64x176x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
"""


def has(tool) -> bool:
    try:
        return bool(tool())
    except UsageError:
        return False


def counts_of(name: str) -> dict[str, int]:
    step = find_step(name)
    cubin = build_cubin(step, COUNTED.specialization, headline_arch(step)).path
    return count_instructions(cubin)["attention_forward"]


def test_opcodes_are_counted_by_kernel_without_modifiers_predicates_and_padding() -> None:
    assert parse(LISTING) == {
        "attention_scores": {"BRA": 1, "HFMA2": 1, "HMMA": 1, "IMAD": 2, "LDC": 1},
        "attention_output": {"EXIT": 1},
        "attention_forward": {
            "ELECT": 1,
            "HGMMA": 1,
            "SYNCS": 1,
            "UIADD3": 1,
            "USETMAXREG": 1,
            "UTMALDG": 1,
            "WARPGROUP": 1,
        },
    }


@pytest.mark.skipif(not has(nvcc) or not has(nvdisasm), reason="no nvcc or no nvdisasm")
def test_local_memory_shows_in_the_instructions() -> None:
    step, trap = counts_of("v04"), counts_of("experiments/v04_runtime_index.patch")
    assert step["FFMA"] > 500
    assert not step.keys() & {"LDL", "STL", "HMMA"}
    assert trap["LDL"] > 0
    assert trap["STL"] > 0


@pytest.mark.skipif(not has(nvcc) or not has(nvdisasm), reason="no nvcc or no nvdisasm")
def test_hoppers_units_show_in_the_instructions() -> None:
    hopper = {"HGMMA", "UTMALDG", "UTMASTG", "SYNCS"}
    assert set(OPCODES) >= hopper
    assert not counts_of("v07").keys() & hopper
    counts = counts_of("v08")
    assert counts.keys() >= hopper
    assert not counts.keys() & {"HMMA", "LDSM", "LDGSTS", "LDL", "STL"}


@pytest.mark.skipif(not has(nvdisasm), reason="no nvdisasm")
def test_a_file_that_is_no_cubin_is_named(tmp_path) -> None:
    path = tmp_path / "v01.cubin"
    path.write_text("nothing")
    with pytest.raises(UsageError, match=r"nvdisasm cannot read v01\.cubin: nvdisasm fatal"):
        count_instructions(path)


def test_without_nvdisasm_the_package_is_named(monkeypatch) -> None:
    def not_installed(name: str):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sass, "toolkit_program", lambda name: None)
    monkeypatch.setattr(sass, "files", not_installed)
    with pytest.raises(UsageError, match="pip install nvidia-cuda-nvdisasm"):
        nvdisasm()
