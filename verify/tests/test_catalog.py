"""The steps in the folder: how they are found, and what a malformed file does to the others."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from common import attention, catalog, commands
from common.__main__ import main
from common.catalog import all_steps, find_step, require_well_formed, step_before, steps_to_run
from common.errors import UsageError
from common.paths import ROOT
from common.problem import Specialization
from common.report.markdown import regenerate
from common.runtime.backend import DTYPE_NAMES
from common.step import (
    ARCHITECTURES,
    DTYPES,
    FEW_HEADS,
    FEW_QUERIES,
    FEW_ROWS,
    FEW_WORK_TILES,
    FEWEST_ROWS,
    Parts,
    read_step,
)
from verify.check import main as check

NAMES = [step.name for step in all_steps()]
LIMITS = "limits: bf16, fp16; head_dim 8-256 by 8; sm_80"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of steps, which can be changed until the first look at it."""
    copy = tmp_path.resolve() / "steps"
    shutil.copytree(ROOT / "steps", copy)
    monkeypatch.setattr(catalog, "STEPS_DIR", copy)
    catalog._catalog.cache_clear()
    yield copy
    catalog._catalog.cache_clear()


def replace(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# What is done to v03_online_softmax.cu, and what is said of it.
MALFORMED = {
    "no header": (lambda path: path.write_text("int x;\n"), "the first line must read '// v04 --"),
    "empty": (lambda path: path.write_text(""), "the first line must read"),
    "no title": (lambda path: replace(path, "// v03 -- ", "// v03: "), "the first line must read"),
    "other name": (lambda path: replace(path, "// v03", "// v04"), "calls it v04, not v03"),
    "no field": (lambda path: replace(path, "// why:", "// because:"), "no '// why:' line"),
    "no reason": (lambda path: replace(path, "// why:", "// draft:\n// why:"), "must say why, as"),
    "not taken": (
        lambda path: replace(path, "// why:", "// taken: seldom\n// why:"),
        'must read like "only with deterministic=True; why", "only for lengths and windows; why", '
        '"only for lengths and windows that no other step takes; why", '
        '"only for large head_dim; why" or, of a forward step, "only for few rows; why", "only '
        'for few queries; why", "only for few queries of few heads; why", "only for few work '
        'tiles; why" or "only for few queries with lengths or windows; why", not \'seldom\'',
    ),
    "no parts": (
        lambda path: replace(path, "// why:", "// parts: some\n// why:"),
        "'parts:' must read like \"attention_backward adds to workspace 1, any number of times",
    ),
    "no UTF-8": (lambda path: path.write_bytes(b"// v03 -- \xff"), "is not UTF-8 text"),
    "dtype": (lambda path: replace(path, ": bf16, ", ": bf61, "), "can name bf16, fp16, fp32, not"),
    "architecture": (lambda path: replace(path, "; sm_80", "; sm_81"), "can name sm_75, sm_80,"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read: Is a directory"),
    "dangling": (
        lambda path: (path.unlink(), path.symlink_to("nowhere")),
        "cannot be read: No such file",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_an_error_only_for_itself(folder, capsys, kind):
    change, told = MALFORMED[kind]
    path = folder / "v03_online_softmax.cu"
    change(path)
    others = [step.name for step in all_steps()]
    assert others == [name for name in NAMES if name != "v03"]
    assert find_step("v07").name == "v07"
    for name in ("3", "v03", "steps/v03", "v03_online_softmax"):
        with pytest.raises(UsageError) as error:
            find_step(name)
        assert str(path) in str(error.value)
        assert told in str(error.value)
    with pytest.raises(UsageError, match="v03_online_softmax"):
        require_well_formed()
    assert not capsys.readouterr().err
    assert [step.name for step in steps_to_run()] == others
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: skipped ")
    assert told in line


def test_attention_works_beside_a_malformed_file(folder):
    (folder / "v03_online_softmax.cu").write_text("int x;\n")
    q = torch.zeros(1, 1, 4, 8)
    assert torch.equal(attention(q, q, q, step="v01"), q)
    with pytest.raises(UsageError, match="the first line must read"):
        attention(q, q, q, step="v03")


def test_check_of_a_malformed_file_is_one_clear_line(folder, capsys):
    (folder / "v03_online_softmax.cu").write_text("int x;\n")
    for name in ("v03", str(folder / "v03_online_softmax.cu")):
        assert check([name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "v03_online_softmax.cu: the first line must read" in line


def test_the_worklog_loses_no_row_to_a_malformed_file(folder, capsys):
    (folder / "v03_online_softmax.cu").write_text("int x;\n")
    before = (ROOT / "README.md").read_bytes()
    commands._report_regenerated()  # after another step has been measured
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: tables and plots stay as they are: ")
    with pytest.raises(UsageError, match=r"v03_online_softmax.cu: the first line must read"):
        regenerate()
    assert (ROOT / "README.md").read_bytes() == before


def test_lint_reports_every_malformed_file(folder, capsys):
    assert main(["lint"]) == 0
    catalog._catalog.cache_clear()
    (folder / "v03_online_softmax.cu").write_text("int x;\n")
    (folder / "v08_wgmma.cu").write_text("int x;\n")
    assert main(["lint"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "v03_online_softmax.cu" in line
    assert "v08_wgmma.cu" in line


@pytest.mark.parametrize("name", ["v3_x.cu", "v99.cu", "v99-x.cu", "x99_x.cu", "V99_x.cu", "n.cu"])
def test_a_file_with_another_name_is_named(folder, name):
    (folder / name).write_text("")
    assert [step.name for step in all_steps()] == NAMES
    with pytest.raises(UsageError, match=f"{name}: name a step's file like v04_register"):
        require_well_formed()


@pytest.mark.parametrize("name", [".v99_x.cu", "v99_x.cu~", "notes.md"])
def test_other_files_are_nobodys_concern(folder, name):
    (folder / name).write_text("")
    require_well_formed()


def test_two_files_of_one_name_are_both_refused(folder):
    """It is not clear which of them is meant."""
    shutil.copy(folder / "v10_fused.cu", folder / "v10_better.cu")
    assert [step.name for step in all_steps()] == [name for name in NAMES if name != "v10"]
    with pytest.raises(UsageError, match=r"v10_better.cu: v10_fused.cu is v10 too: rename one"):
        find_step("v10")


def test_no_step_at_all_is_one_clear_line(folder, capsys):
    for path in folder.iterdir():
        path.write_text("")
    assert check([]) == 2
    *warnings, error = capsys.readouterr().err.splitlines()
    assert len(warnings) == len(NAMES)
    assert error.startswith("error: no steps in ")


def test_the_step_before(folder):
    (folder / "v03_online_softmax.cu").write_text("int x;\n")
    before = {step.name: step_before(step) for step in all_steps()}
    assert before["v01"] is None
    assert before["v02"].name == "v01"
    assert before["v04"] is None  # not v02: what v04 gains over that is not one step's
    assert before["v10"].name == "v09"
    assert before["v15"].name == "v12"  # v13 is for few queries, v14 for lengths
    assert before["b10"].name == "b08"  # b09 is only for those who ask for the same bits


TWO_LADDERS = """
import sys
from pathlib import Path
from common import step
step.LETTERS = "vb"
from common import catalog
catalog.STEPS_DIR = Path(sys.argv[1])
print([s.name for s in catalog.all_steps()])
print([catalog.find_step(name).name for name in ("2", "02", "v02", "b02", "b2", "steps/b01")])
print([catalog.step_before(s) and catalog.step_before(s).name for s in catalog.all_steps()])
"""


def test_two_ladders(tmp_path):
    """A number alone means the forward step; a step is compared with one of its own ladder."""
    for name in ("b01", "b02", "v01", "v02"):
        write(tmp_path, LIMITS).rename(tmp_path / f"{name}_x.cu")
        replace(tmp_path / f"{name}_x.cu", "v99", name)
    told = subprocess.run(
        [sys.executable, "-c", TWO_LADDERS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert told.stdout.splitlines() == [
        "['v01', 'v02', 'b01', 'b02']",
        "['v02', 'v02', 'v02', 'b02', 'b02', 'b01']",
        "[None, 'v01', None, 'b01']",
    ], told.stderr


def write(tmp_path, limits: str):
    path = tmp_path / "v99_x.cu"
    path.write_text(f"// v99 -- title\n// change: a\n// why: b\n// {limits}\n")
    return path


def test_limits(tmp_path):
    step = read_step(write(tmp_path, "limits: fp32, bf16; head_dim 16-128 by 16; sm_90a, so far"))
    assert step.limits.dtypes == ("fp32", "bf16")
    limits = step.limits
    assert (limits.lowest_head_dim, limits.highest_head_dim, limits.head_dim_multiple) == (
        *(16, 128),
        16,
    )
    assert limits.arch == "sm_90a"
    assert limits.large_smem_head_dim is None


def test_limits_of_v(tmp_path):
    """Of the head_dims that the line promises, v may have another than q and k."""
    same, other = (Specialization(64, "bf16", False, v_head_dim) for v_head_dim in (64, 128))
    assert same == Specialization(64, "bf16", False)
    limits = read_step(write(tmp_path, LIMITS)).limits
    assert limits.refusal(same) is None
    assert limits.refusal(other) == (
        "takes v of q's head_dim, 64, not of 128: pad q and k with zeros and give softmax_scale"
    )
    told = LIMITS.replace("by 8;", "by 8, v's may differ;")
    limits = read_step(write(tmp_path, told)).limits
    assert (limits.v_may_differ, limits.arch) == (True, "sm_80")
    assert limits.refusal(other) is None
    for v_head_dim in (264, 60):
        refused = limits.refusal(Specialization(64, "bf16", False, v_head_dim))
        assert refused == f"takes head_dim 8 to 256 in multiples of 8, not {v_head_dim}"


def test_limits_of_shared_memory(tmp_path):
    told = "more than 99 KiB of shared memory from head_dim 160 on"
    step = read_step(write(tmp_path, f"{LIMITS}; {told}\n//     above head_dim 160 slow"))
    assert step.limits.large_smem_head_dim == 160
    step = read_step(write(tmp_path, f"{LIMITS}\n//     in fp32 {told}"))
    assert step.limits.large_smem_head_dim is None


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("fp16", "fp61", "can name bf16, fp16, fp32, not fp61"),
        ("fp16", "FP16", "must read like"),
        ("bf16, fp16", "bf16 fp16", "must read like"),
        ("8-256", "256-8", "not 256-8 by 8"),
        ("8-256", "8-250", "not 8-250 by 8"),
        ("8-256", "4-256", "not 4-256 by 8"),
        ("by 8", "by 0", "not 8-256 by 0"),
        ("8-256", "8-1032", "can promise head_dim 8-1024 by 8, .* not 8-1032 by 8"),
        ("8-256 by 8", "4-256 by 4", "can promise head_dim 8-1024 by 8, .* not 4-256 by 4"),
        ("8-256 by 8", "12-252 by 12", "can promise head_dim 8-1024 by 8, .* not 12-252 by 12"),
        ("sm_80", "sm_81", "not sm_81"),
        ("sm_80", "sm_70", "not sm_70"),
        ("sm_80", "sm_80a", "not sm_80a"),
        ("sm_80", "sm_90ab", "must read like"),
        ("sm_80", "80", "must read like"),
    ],
)
def test_wrong_limits_are_one_clear_line(tmp_path, old, new, told):
    assert old in LIMITS
    with pytest.raises(UsageError, match=f"v99_x.cu: 'limits:' .*{told}"):
        read_step(write(tmp_path, LIMITS.replace(old, new)))


@pytest.mark.parametrize(
    ("taken", "condition"),
    [
        ("", None),
        ("\n// taken: only with deterministic=True; slower", "only_deterministic"),
        ("\n// taken: only for lengths and windows; slower", "takes_lengths"),
        ("\n// taken: only for large head_dim; else slower", "only_large_head_dim"),
        (
            "\n// taken: only for lengths and windows that no other step takes; slower",
            "only_left_over",
        ),
    ],
)
def test_where_a_step_is_taken(tmp_path, taken, condition):
    step = read_step(write(tmp_path, LIMITS + taken))
    for each in ("only_deterministic", "only_left_over", "only_large_head_dim"):
        assert getattr(step, each) is (each == condition)
    assert step.takes_lengths is (condition in ("takes_lengths", "only_left_over"))
    assert step.few is None
    assert step.is_candidate() == (condition is None)
    assert step.is_candidate(deterministic=True) == (condition in (None, "only_deterministic"))


@pytest.mark.parametrize("few", [FEW_HEADS, FEW_ROWS, FEWEST_ROWS, FEW_QUERIES, FEW_WORK_TILES])
def test_a_step_may_be_taken_for_few(tmp_path, few):
    step = read_step(write(tmp_path, LIMITS + f"\n// taken: only {few}; for more,\n//     slower"))
    assert step.few == few
    assert not step.takes_lengths
    assert not step.is_candidate()


def test_a_step_may_be_taken_for_few_queries_with_lengths(tmp_path):
    step = read_step(
        write(tmp_path, LIMITS + "\n// taken: only for few queries with lengths or windows; slower")
    )
    assert step.few == FEW_QUERIES
    assert step.takes_lengths
    assert not step.is_candidate()


@pytest.mark.parametrize(
    "wrong",
    [
        "only for few queries with lengths or windows",
        "only for few queries",
        "only for few queries;",
        "only for few rows",
        "only for few rows with lengths or windows; slower",
        "only for few queries of few heads",
        "only for few queries of few heads with lengths or windows; slower",
        "only for few work tiles with lengths or windows; slower",
        "for few queries; slower",
        "only for many queries; slower",
        "only with deterministic=True, only for few queries; slower",
        "only for lengths and windows",
        "only for lengths; slower",
        "only for windows and lengths; slower",
        "only for large head_dim",
        "only for head_dim above 256; slower",
    ],
)
def test_a_wrong_taken_is_one_clear_line(tmp_path, wrong):
    told = (
        "v99_x.cu: 'taken:' must .* \"only for large head_dim; why\" or, of a forward step, "
        '"only for few rows; why", "only for few queries; why", "only for few queries of few '
        'heads; why", "only for few work tiles; why" or "only for few queries with lengths or '
        f"windows; why\", not '{wrong}'$"
    )
    with pytest.raises(UsageError, match=told):
        read_step(write(tmp_path, f"{LIMITS}\n// taken: {wrong}"))


@pytest.mark.parametrize(
    "few",
    [
        "few rows",
        "few queries",
        "few queries of few heads",
        "few work tiles",
        "few queries with lengths or windows",
    ],
)
def test_no_backward_step_is_for_few_queries(tmp_path, few):
    """Its lookup does not depend on their number."""
    path = write(tmp_path, f"{LIMITS}\n// taken: only for {few}; slower")
    path.write_text(path.read_text().replace("v99", "b99"))
    with pytest.raises(UsageError, match="of a forward step"):
        read_step(path)


def test_a_backward_step_may_take_lengths(tmp_path):
    path = write(tmp_path, LIMITS + "\n// taken: only for lengths and windows; slower")
    path.write_text(path.read_text().replace("v99", "b99"))
    step = read_step(path)
    assert step.takes_lengths
    assert not step.is_candidate()


@pytest.mark.parametrize(
    ("repeats", "unordered", "by_multiprocessors"),
    [
        ("", (), False),
        ("\n// repeats: all bits but o's, lse's; in any order", ("o", "lse"), False),
        ("\n// repeats: all bits on as many multiprocessors;\n//     cut there", (), True),
    ],
)
def test_what_repeats(tmp_path, repeats, unordered, by_multiprocessors):
    step = read_step(write(tmp_path, LIMITS + repeats))
    assert (step.unordered, step.by_multiprocessors) == (unordered, by_multiprocessors)
    assert step.is_candidate(deterministic=True) == (not unordered)


@pytest.mark.parametrize(
    "wrong",
    [
        "all bits",
        "all bits but dq's; in any order",  # which forward does not have
        "all bits on as many multiprocessors",
        "all bits on as many multiprocessors;",
        "all bits on as many blocks; cut there",
    ],
)
def test_a_wrong_repeats_is_one_clear_line(tmp_path, wrong):
    told = f"v99_x.cu: 'repeats:' must .* o, lse, or like .*, not '{wrong}'$"
    with pytest.raises(UsageError, match=told):
        read_step(write(tmp_path, f"{LIMITS}\n// repeats: {wrong}"))


PARTS = (
    "parts: attention_backward adds to workspace 1, any number of times between attention_delta\n"
    "//     and attention_round"
)


def test_parts(tmp_path):
    step = read_step(write(tmp_path, f"{LIMITS}\n// {PARTS}"))
    assert step.parts == Parts("attention_delta", "attention_backward", "attention_round", 1)
    assert read_step(write(tmp_path, LIMITS)).parts is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("workspace 1", "workspace 2"),  # forward has two
        ("workspace 1", "workspace"),
        ("attention_backward", "it all"),
        ("any number of times", "often"),
        (" and attention_round", ""),
        ("attention_round", "attention_round; so far"),
    ],
)
def test_wrong_parts_are_one_clear_line(tmp_path, old, new):
    wrong = PARTS.replace("\n//    ", "").replace(old, new)
    with pytest.raises(UsageError, match=r"v99_x.cu: 'parts:' must .* workspaces 0 to 1, not '"):
        read_step(write(tmp_path, f"{LIMITS}\n// {wrong}"))


def test_names_of_dtypes_are_those_of_the_backends():
    assert set(DTYPES) == set(DTYPE_NAMES.values())


def test_architectures_of_the_steps_are_known():
    assert {int(step.limits.arch[3:].rstrip("a")) for step in all_steps()} <= set(ARCHITECTURES)
