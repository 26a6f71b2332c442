"""What counts as a change of a source: code, and not how it is laid out or commented."""

from __future__ import annotations

import pytest

from common import source
from common.source import code_sha256, included_headers, python_sha256, strip_comments

CODE = 'int f(unsigned a) {\n    return a / 2;  // half\n}\n#define TWO 2\nauto s = "a // b";\n'


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("// half", "/* a half,\n rounded down */"),
        CODE.replace("  // half", ""),
        CODE.replace("{\n    return", "{ return"),
        CODE.replace("(unsigned a)", "(\n    unsigned  a )"),
        CODE.replace("TWO 2", "TWO  2 // the number"),
        '#include "other.h"\n' + CODE,
    ],
)
def test_comments_and_layout_are_no_code(same):
    assert strip_comments(same) == strip_comments(CODE)


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("/ 2;", "/ 3;"),
        CODE.replace("a // b", "a // c"),
        CODE.replace("a // b", "a  // b"),
        CODE.replace("unsigned a", "unsigneda"),
        CODE.replace("#define TWO 2\n", "#define TWO 2 "),
        CODE.replace("#define TWO 2", "// #define TWO 2"),
    ],
)
def test_code_is_code(other):
    assert strip_comments(other) != strip_comments(CODE)


def test_headers_count_wherever_they_are(tmp_path, monkeypatch):
    include_dir = tmp_path / "device"
    include_dir.mkdir()
    monkeypatch.setattr(source, "DEVICE_DIR", include_dir)
    step, header, below = (
        tmp_path / "v01_x.cu",
        include_dir / "attention.cuh",
        tmp_path / "launch.h",
    )
    step.write_text('#include "attention.cuh"\n' + CODE)
    header.write_text('#include "../launch.h"\nint b;\n')
    below.write_text("int c;  // a comment\n")
    assert included_headers(step, include_dir) == sorted([header, below])
    before = code_sha256(step)
    below.write_text("int c;\n")
    assert code_sha256(step) == before
    below.rename(include_dir / "launch.h")
    header.write_text('#include "launch.h"\nint b;\n')
    assert code_sha256(step) == before
    (include_dir / "launch.h").write_text("int d;\n")
    assert code_sha256(step) != before


def test_headers_are_those_of_the_files_as_they_are_now(tmp_path):
    step, first, second = (tmp_path / name for name in ("v01_x.cu", "first.cuh", "second.cuh"))
    step.write_text('#include "first.cuh"\n')
    first.write_text("")
    second.write_text("")
    assert included_headers(step, tmp_path) == [first]
    first.write_text('#include "second.cuh"\n')
    assert included_headers(step, tmp_path) == [first, second]
    step.write_text('#include "second.cuh"\n')
    assert included_headers(step, tmp_path) == [second]


PYTHON = '"""Doc."""\n\n\ndef f(a):\n    """Says what."""\n    return f"{a} # no" + "x"  # why\n'


def test_python_without_comments_and_docstrings(tmp_path):
    path = tmp_path / "a.py"

    def digest(text: str) -> str:
        path.write_text(text)
        return python_sha256(path)

    before = digest(PYTHON)
    assert digest(PYTHON.replace("Doc.", "Other.\n\nMore.")) == before
    assert digest(PYTHON.replace("Says what.", "Says it better.")) == before
    assert digest(PYTHON.replace("  # why", "")) == before
    assert digest(PYTHON.replace("# no", "# yes")) != before
    assert digest(PYTHON.replace('"x"', '"y"')) != before
