"""Compilation on demand: once for each content, whoever asks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from common.errors import UsageError
from common.runtime import build

# Stands for a compiler: takes its time, and keeps a list of what it was asked for.
COMPILER = """\
#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit; fi
echo "$*" >> "{log}"
sleep 0.2
for output; do :; done
if grep -q wrong "{source}"; then echo "error: so it is" >&2; exit 1; fi
cp "{source}" "$output"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """The source, how to compile it, and what the compiler has been asked for."""
    monkeypatch.setattr(build, "BUILD_DIR", tmp_path / "build")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    source, log, program = (tmp_path / name for name in ("step.cu", "log", "compiler"))
    program.write_text(COMPILER.format(source=source, log=log))
    program.chmod(0o755)

    def compile_() -> str:
        built = build.compile_cached((str(program),), [], source, tmp_path, "step.o")
        return built.path.read_text()

    return source, compile_, lambda: log.read_text().splitlines()


def test_each_content_is_compiled_once(compiler):
    source, compile_, asked = compiler
    for text in ("a", "b", "a"):
        source.write_text(text)
        assert compile_() == text
    assert len(asked()) == 2


def test_who_comes_while_it_is_compiled_waits(compiler):
    source, compile_, asked = compiler
    source.write_text("a")
    # A lock is of an open file, and each call opens its own: threads do as well as processes.
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(compile_) for _ in range(4)]
    assert [result.result() for result in results] == ["a"] * 4
    assert len(asked()) == 1


def test_what_does_not_compile_is_tried_again(compiler):
    source, compile_, asked = compiler
    source.write_text("wrong")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"compiler cannot compile step.cu: error: so it is"):
            compile_()
    assert len(asked()) == 2
    source.write_text("right")
    assert compile_() == "right"
