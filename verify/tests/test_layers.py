"""Imports go one way: commands, bench, verify, attention(), runtime, the other modules of common/.

A report imports nothing but data: it needs neither torch nor a compiler.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.paths import ROOT

LAYERS = ("core", "runtime", "call", "verify", "bench", "commands")  # each may import those before
CALL = {"", "functional", "operator", "sharded", "transformers", "validation"}
COMMANDS = {"__main__", "commands"}
DATA = {"catalog", "errors", "metrics", "operation", "patch", "problem", "quiet", "record_schema"}
DATA |= {"paths", "records", "ring_lanes", "source", "step", "text", "timeline_events"}

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("common", "verify")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.is_relative_to(ROOT / "verify" / "tests")
}


def layer(module: str) -> str:
    package, _, rest = module.partition(".")
    name = rest.split(".")[0]
    if package == "verify" or name in ("runtime", "bench", "report"):
        return name if package == "common" else package
    return "call" if name in CALL else "commands" if name in COMMANDS else "core"


def may_import(importer: str, imported: str) -> bool:
    is_data = imported.startswith("common.") and imported.split(".")[1] in DATA
    if imported.split(".")[0] not in ("common", "verify", "torch"):
        return True
    if layer(importer) == "report":
        return is_data or layer(imported) == "report"
    if imported.split(".")[0] == "torch":
        return importer.partition(".")[2] not in DATA
    if layer(imported) == "report":
        return layer(importer) == "commands"
    return LAYERS.index(layer(imported)) <= LAYERS.index(layer(importer))


def imports(module: str, path: Path) -> Iterator[str]:
    """The modules that a file imports, at its top or in a function."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base


def test_imports_go_one_way():
    wrong = [
        f"{module} imports {imported}"
        for module, path in FILES.items()
        for imported in imports(module, path)
        if not may_import(module, imported)
    ]
    assert not wrong
    assert all(f"common.{name}" in FILES for name in DATA)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("common.records", "common.runtime.build"),
        ("common.records", "torch"),
        ("common.runtime.gpu", "verify.cases"),
        ("common.runtime.gpu", "common.operator"),
        ("common.operator", "common.bench.timing"),
        ("common", "verify.reference"),
        ("verify.compile_gate", "common.bench.static_analysis"),
        ("verify.check", "common.report.tables"),
        ("common.bench.grid", "common.report.derived"),
        ("common.bench.grid", "common.commands"),
        ("common.report.tables", "common.bench.ncu"),
        ("common.report.tables", "common.cache"),
        ("common.report.tables", "common"),
        ("common.report.tables", "verify.cases"),
        ("common.report.tables", "torch"),
    ],
)
def test_the_other_way_is_an_error(importer, imported):
    assert not may_import(importer, imported)


def test_relative_imports_are_resolved(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import os\nfrom .. import attention\nfrom . import rows\nfrom ..text import kib\n"
        "def f():\n    from verify import cases\n"
    )
    found = list(imports("common.report.module", path))
    assert found == ["os", "common", "common.report.rows", "common.text", "verify.cases"]


BLOCKED = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from common.__main__ import main
sys.exit(main(["worklog", "--check"]))
"""


def test_worklog_is_rendered_without_torch_and_compilers(tmp_path):
    """It need not be up to date: `make worklog CHECK=1` checks that."""
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path), "CXX": "none", "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert not re.search("Traceback|^error", run.stderr), run.stderr
    assert run.returncode in (0, 1)
