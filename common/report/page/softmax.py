"""The playground of online softmax: one row, tile by tile, with the rescale and with the shift."""

from __future__ import annotations

from ..diagrams.softmax import LOGITS, VALUES
from .section import Section, read_markup

# HEADROOM, MAX_SUM and LOST_SUM of steps/v11_first_maximum.cu, by dtype.
LIMITS = {
    "fp16": {"headroom": 0, "most": 65504, "lost": 2**100},
    "bf16": {"headroom": 24, "most": 2**16, "lost": 2**100},
}
LEAST_SHIFT = -(2.0**126)  # of a row whose first tile is masked
EXAMPLES = {
    "the worklog's figure": LOGITS,
    "equal": ((5, 5, 5), (5, 5, 5), (5, 5, 5)),
    "rising by more than fp16 holds": ((1, 3, 2), (12, 20, 4), (40, 41, 7)),
    "a far larger last tile": ((1, 3, 2), (5, 4, 3), (200, 8, 7)),
    "first tile masked": (("-inf", "-inf", "-inf"), (5, 4, 3), (9, 8, 7)),
    "all masked": (("-inf", "-inf", "-inf"), ("-inf", "-inf", "-inf"), ("-inf", "-inf", "-inf")),
}


def section() -> Section:
    data = {
        "limits": LIMITS,
        "leastShift": LEAST_SHIFT,
        "examples": {name: _text(tiles) for name, tiles in EXAMPLES.items()},
        "values": _text(VALUES),
    }
    return Section("softmax", "softmax", "Online softmax", read_markup("softmax"), data)


def _text(tiles: tuple[tuple[object, ...], ...]) -> str:
    return " | ".join(" ".join(map(str, tile)) for tile in tiles)
