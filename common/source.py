"""Which headers a source includes, and hashes of its code."""

from __future__ import annotations

import hashlib
import re
import tokenize
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from .paths import DEVICE_DIR

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)".*$', re.MULTILINE)
_TOKEN = re.compile(
    r"""
      (?P<literal> "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
    | (?P<comment> //[^\n]* | /\*.*?\*/ )
    | (?P<directive> ^[ \t]*\#(?:\\\n|//[^\n]*|[^\n])* )
    | (?P<space> \s+ )
    | (?P<word> \w+ )
    | (?P<other> . )
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


# The same headers are asked about again and again: by each step, and by each mutant of one.
_resolve = lru_cache(maxsize=256)(Path.resolve)
_included_names = lru_cache(maxsize=256)(_INCLUDE.findall)


def included_headers(source: Path, include_dir: Path) -> list[Path]:
    """The headers that a source includes in quotation marks, directly or not."""
    found: set[Path] = set()

    def visit(path: Path) -> None:
        for name in _included_names(path.read_text(encoding="utf-8")):
            header = next(
                (p for p in (path.parent / name, include_dir / name) if p.is_file()), None
            )
            if header and _resolve(header) not in found:
                found.add(_resolve(header))
                visit(header)

    visit(source)
    return sorted(found)


@lru_cache(maxsize=256)  # every mutant's hash needs the same headers
def strip_comments(text: str) -> str:
    """C++ code without comments, includes of headers, and white space that separates nothing."""
    kept: list[str] = []
    previous_is_word = False
    for token in _TOKEN.finditer(_INCLUDE.sub("", text)):
        kind, piece = token.lastgroup, token[0]
        if kind in ("comment", "space"):
            continue
        if kind == "directive":  # it ends with its line
            piece = "\n" + " ".join(re.sub(r"//.*|/\*.*?\*/|\\\n", " ", piece).split()) + "\n"
        elif kind == "word" and previous_is_word:
            piece = " " + piece
        kept.append(piece)
        previous_is_word = kind == "word"
    return "".join(kept)


def code_sha256(source: Path) -> str:
    """SHA-256 of the code of a step and of the headers it includes on a GPU.

    Comments, white space and the places of the headers do not matter to it.
    """
    own, *headers = (
        strip_comments(path.read_text(encoding="utf-8"))
        for path in (source, *included_headers(source, DEVICE_DIR))
    )
    return hashlib.sha256("\0".join([own, *sorted(headers)]).encode()).hexdigest()


def python_sha256(path: Path) -> str:
    """SHA-256 of a Python file's code without comments, docstrings and white space."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    begins = list(accumulate(map(len, lines), initial=0))
    kept, end = [], 0
    line_is_new = True
    for token in tokenize.generate_tokens(iter(lines).__next__):
        docstring = token.type == tokenize.STRING and line_is_new
        if token.type == tokenize.COMMENT or docstring:
            start = begins[token.start[0] - 1] + token.start[1]
            kept.append(text[end:start])
            end = begins[token.end[0] - 1] + token.end[1]
        line_is_new = token.type in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        ) or (line_is_new and token.type in (tokenize.NL, tokenize.COMMENT, tokenize.ENCODING))
    kept.append(text[end:])
    return hashlib.sha256("".join("".join(kept).split()).encode()).hexdigest()
