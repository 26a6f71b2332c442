"""Compilation on demand: once per content, whoever asks, and again where an output is damaged."""

from __future__ import annotations

import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import UsageError
from common.paths import ROOT
from common.runtime import build

# Stands for a compiler: takes its time, and keeps a list of what it was asked for.
COMPILER = """\
#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit; fi
echo "$*" >> "{log}"
sleep 0.2
for output; do :; done
if grep -q wrong "{source}"; then echo "error: so it is" >&2; exit 1; fi
echo "a remark" >&2
cp "{source}" "$output"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """The source, how to compile it, and the log of what the compiler was asked for."""
    monkeypatch.setattr(build, "BUILD_DIR", tmp_path / "build")
    source, log, program = (tmp_path / name for name in ("step.cu", "log", "compiler"))
    program.write_text(COMPILER.format(source=source, log=log))
    program.chmod(0o755)

    def compile_() -> str:
        built = build.compile_cached((str(program),), [], source, tmp_path, "step.o")
        assert built.log == "a remark\n"
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


def test_what_is_found_is_not_written_to(compiler):
    """A cache that is read-only for this user can be used."""
    source, compile_, _ = compiler
    source.write_text("a")
    compile_()
    before = {path: path.stat().st_mtime_ns for path in build.BUILD_DIR.iterdir()}
    compile_()
    assert {path: path.stat().st_mtime_ns for path in build.BUILD_DIR.iterdir()} == before


DAMAGES = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "one bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", [".o", ".o.json"])
def test_what_is_damaged_is_compiled_again(compiler, suffix, damage):
    source, compile_, asked = compiler
    source.write_text("a longer source")
    compile_()
    (damaged,) = (p for p in build.BUILD_DIR.iterdir() if "".join(p.suffixes) == suffix)
    whole = damaged.read_bytes()
    build._intact.clear()  # as in a new process
    if DAMAGES[damage]:
        damaged.write_bytes(DAMAGES[damage](whole))
    else:
        damaged.unlink()
    assert compile_() == "a longer source"
    assert len(asked()) == 2
    assert damaged.read_bytes() == whole


def test_damage_is_seen_while_the_process_lives(compiler):
    source, compile_, asked = compiler
    source.write_text("a longer source")
    compile_()
    compile_()
    (output,) = build.BUILD_DIR.glob("*.o")
    output.write_bytes(b"")
    assert compile_() == "a longer source"
    assert len(asked()) == 2


def test_a_file_in_place_of_the_folder_is_one_clear_line(compiler):
    source, compile_, _ = compiler
    source.write_text("a")
    build.BUILD_DIR.write_text("")
    with pytest.raises(UsageError, match=r"^step.cu cannot be compiled: .*build: .*: move it away"):
        compile_()
    build.BUILD_DIR.unlink()
    assert compile_() == "a"


def test_a_folder_without_permission_is_one_clear_line(compiler, monkeypatch):
    source, compile_, _ = compiler
    source.write_text("a")

    def refuse(path: Path, **_) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UsageError, match=r"build: Permission denied: change its permissions"):
        compile_()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_clear_line(compiler):
    source, compile_, asked = compiler
    source.write_text("a")
    compile_()
    (receipt,) = build.BUILD_DIR.glob("*.o.json")
    receipt.unlink()
    unfinished = build.BUILD_DIR / receipt.name.replace(".o.", ".o.tmp.")
    unfinished.symlink_to("/dev/full")
    with pytest.raises(UsageError, match=r"build: No space left on device: free some space"):
        compile_()
    assert not list(build.BUILD_DIR.glob("*.tmp*"))
    assert compile_() == "a"
    assert len(asked()) == 3


def test_a_limit_on_files_is_one_clear_line(tmp_path):
    """A real compiler is killed by the limit or reports it itself."""
    source = tmp_path / "step.cpp"
    source.write_text("int main() {}\n")
    program = (
        "import sys; from pathlib import Path\n"
        "from common.runtime import build\n"
        "folder = Path(sys.argv[1])\n"
        "build.BUILD_DIR = folder / 'build'\n"
        "try:\n"
        "    build.compile_cached(build.host_compiler(), [], folder / 'step.cpp', folder, 'step')\n"
        "except build.UsageError as error:\n"
        "    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        capture_output=True,
        text=True,
    )
    assert not ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith(("step.cpp cannot be compiled: ", "g++ cannot", "clang++ cannot"))
    assert "File too large" in line or "size limit exceeded" in line.lower()
    assert "(ulimit -f)" in line or "compile step.cpp" in line
