"""The diagram of what backward by wgmma must find room for: registers and shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .backward import K_COLOR, O_COLOR, Q_COLOR, V_COLOR
from .svg import BANK_COLORS, EMPTY, MUTED, RED, SMALL, TITLE, Drawing, text_width

# b05 and b06 up to head_dim 128, and b08, which has more tiles of Q above head_dim 64.
BLOCK_M, BLOCK_N, PANEL, NUM_STAGES = 64, 128, 64, 2
TALL_BLOCK_M = 128  # of b08 up to head_dim 64
GROUP_KEYS, WARPGROUP, WARPGROUPS = 64, 128, 2  # keys and threads of a warpgroup
ALIGNMENT = 1024  # of shared memory

MAX_REGISTERS, CONSUMER_REGISTERS = 255, 240  # of a thread: at most, and of a consumer
SHARED_KIB = 227  # of a block at most
WIDE = 256  # the head_dim of the last bars: b06 divides the work there

LEFT, REGISTER, KIB = 146, 1.8, 2.8  # of the bars; pixels of one
HEIGHT, SPACE = 21, 9  # of a bar; between what belongs together
SCORES, GRADIENTS = BANK_COLORS[4:6]
COLORS = {
    "K": K_COLOR,
    "dK": K_COLOR,
    "V": V_COLOR,
    "dV": V_COLOR,
    "Q": Q_COLOR,
    "dQ": Q_COLOR,
    "dO": O_COLOR,
    "S": SCORES,
    "P": SCORES,
    "dP": GRADIENTS,
    "dS": GRADIENTS,
}


def figures() -> dict[str, Drawing]:
    """The drawings by the names of their files."""
    return {"backward_registers": _backward_registers()}


@dataclass(frozen=True)
class Part:
    """So many registers of a thread, or bytes of shared memory."""

    name: str
    size: int


def dim(head_dim: int) -> int:
    """In whole products."""
    return -(-head_dim // 16) * 16


def in_panels(head_dim: int) -> int:
    """Columns of a tile in shared memory."""
    return -(-head_dim // PANEL) * PANEL


def dq_columns(head_dim: int) -> int:
    """Of each warpgroup: half of the panels, or of a single one half of the whole products."""
    half = in_panels(head_dim) // 2 if head_dim > PANEL else dim(head_dim) // 2
    return dim(half)


# ---- registers


def _accumulator(name: str, rows: int, columns: int) -> Part:
    """A float each, divided among the threads of a warpgroup."""
    return Part(name, rows * columns // WARPGROUP)


def _operand(name: str, rows: int, columns: int) -> Part:
    """The same with two elements a register."""
    return Part(name, rows * columns // WARPGROUP // 2)


def _scores(block_m: int) -> tuple[Part, Part, Part, Part]:
    """S, dP, P and dS of a tile."""
    s, dp = (_accumulator(name, GROUP_KEYS, block_m) for name in ("S", "dP"))
    p, ds = (_operand(name, GROUP_KEYS, block_m) for name in ("P", "dS"))
    return s, dp, p, ds


@dataclass(frozen=True)
class Live:
    """What a thread has in registers at once: while it computes P and dS, and dV, dK and dQ."""

    softmax: tuple[Part, ...]
    products: tuple[Part, ...]


def live(head_dim: int, *, kv_in_registers: bool = False) -> Live:
    """In b05, and in b06: a warpgroup has dK and dV of its keys, and a part of dQ. So has one of
    b08 above head_dim 64.
    """
    kept = _kept(head_dim)
    if kv_in_registers:
        kept += [_operand(name, GROUP_KEYS, dim(head_dim)) for name in ("K", "V")]
    s, dp, p, ds = _scores(BLOCK_M)
    dq = _accumulator("dQ", BLOCK_M, dq_columns(head_dim))
    return Live((*kept, s, dp, p), (*kept, p, ds, dq))


def live_tall(head_dim: int) -> Live:
    """In b08 up to head_dim 64: of dQ a warpgroup has half of the rows, with all columns."""
    kept = _kept(head_dim)
    s, dp, p, ds = _scores(TALL_BLOCK_M)
    dq = _accumulator("dQ", TALL_BLOCK_M // WARPGROUPS, dim(head_dim))
    return Live((*kept, s, dp, p), (*kept, p, ds, dq))


def _kept(head_dim: int) -> list[Part]:
    return [_accumulator(name, GROUP_KEYS, dim(head_dim)) for name in ("dK", "dV")]


def live_by_roles(head_dim: int) -> dict[str, Live]:
    """In b06 above head_dim 128 two warpgroups share their keys: one has P and dV, one dS and dK,
    and each a part of dQ. P comes to the second one rounded, and is converted back.
    """
    dk, dv = _kept(head_dim)
    s, dp, p, ds = _scores(BLOCK_M)
    p_float = _accumulator("P", GROUP_KEYS, BLOCK_M)
    first, rest = (
        _accumulator("dQ", BLOCK_M, columns) for columns in (2 * PANEL, dim(head_dim) - 2 * PANEL)
    )
    return {"dV": Live((dv, s, p), (dv, p, first)), "dK": Live((dk, dp, p_float), (dk, ds, rest))}


# ---- shared memory


@dataclass(frozen=True)
class Step:
    """What a step has besides tiles of K, V and dQ, and two of dO."""

    ds_stages: int
    mbarriers: int
    q_stages: int = NUM_STAGES
    block_m: int = BLOCK_M
    works: int = 0  # of 44 bytes


B05, B06 = Step(1, 6), Step(NUM_STAGES, 10)
B08, B08_TALL = Step(3, 21, q_stages=3, works=2), Step(3, 19, block_m=TALL_BLOCK_M, works=2)


def shared_memory(step: Step, head_dim: int) -> list[Part]:
    """Of a block, in bytes; what is no tile comes last, in whole periods of the swizzle."""
    row = 2 * in_panels(head_dim)
    parts = [Part(name, BLOCK_N * row) for name in ("K", "V")]
    parts += [Part("Q", step.block_m * row)] * step.q_stages
    parts += [Part("dO", step.block_m * row)] * NUM_STAGES
    parts += [Part("dS", 2 * BLOCK_N * step.block_m)] * step.ds_stages
    parts.append(Part("dQ", 4 * step.block_m * in_panels(head_dim)))
    return [*parts, _rest(step)]


def _rest(step: Step) -> Part:
    """lse and delta, and b08's first query, of each tile of Q; the mbarriers, the works."""
    of_tile = 2 * 4 * step.block_m + (4 if step.works else 0)
    rest = step.q_stages * of_tile + 8 * step.mbarriers + 44 * step.works
    return Part("", -(-rest // ALIGNMENT) * ALIGNMENT)


def shared_memory_by_roles(head_dim: int) -> list[Part]:
    """Of a block of b06 above head_dim 128, with the keys of one warpgroup: dQ leaves from
    registers.
    """
    tile, scores = 2 * GROUP_KEYS * in_panels(head_dim), 2 * GROUP_KEYS * BLOCK_M
    return [
        *(Part(name, tile) for name in ("K", "V", "Q", "Q", "dO", "dO")),
        *(Part(name, scores) for name in ("dS", "dS", "P")),
        _rest(B06),
    ]


# ---- the bars


def _backward_registers() -> Drawing:
    """A bar for each head_dim and moment, and for each block; what there is, as dashed lines."""
    drawing = Drawing(808)
    title = f"Registers of a thread, for {GROUP_KEYS} keys a warpgroup and {BLOCK_M} queries"
    tall = f", or in b08 {TALL_BLOCK_M} up to head_dim {PANEL}"
    drawing.text(18, 22, title + tall, TITLE, bold=True)
    drawing.text(18, 52, "head_dim", SMALL, MUTED)
    roles = live_by_roles(WIDE)
    threads = (
        ("64 in b05", live(64)),
        ("64 in b06", live(64, kv_in_registers=True)),
        ("64 in b08", live_tall(64)),
        ("96", live(96)),
        ("128", live(128)),
        (f"{WIDE}", live(WIDE)),
        (f"{WIDE}: dV", roles["dV"]),
        (f"{WIDE}: dK", roles["dK"]),
    )
    top = y = 66
    for name, of_thread in threads:
        drawing.text(18, y + HEIGHT, name, bold=True)
        for moment in ("softmax", "products"):
            drawing.text(LEFT - 8, y + HEIGHT / 2, moment, SMALL, MUTED, anchor="end")
            parts = getattr(of_thread, moment)
            _bar(drawing, y, parts, REGISTER, sum(part.size for part in parts) > MAX_REGISTERS)
            y += HEIGHT
        y += SPACE
    for limit, anchor in ((CONSUMER_REGISTERS, "end"), (MAX_REGISTERS, "start")):
        _limit(drawing, limit, limit * REGISTER, top, y - SPACE, anchor)

    y += 26
    drawing.text(18, y, "Shared memory of a block, in KiB", TITLE, bold=True)
    y += 44
    top = y
    drawing.text(18, y - 14, "head_dim", SMALL, MUTED)
    for name, parts in (
        ("64 in b05", shared_memory(B05, 64)),
        ("64 in b06", shared_memory(B06, 64)),
        ("64 in b08", shared_memory(B08_TALL, 64)),
        ("96, 128 in b05", shared_memory(B05, 128)),
        ("96, 128 in b06", shared_memory(B06, 128)),
        ("96, 128 in b08", shared_memory(B08, 128)),
        (f"{WIDE} in b06", shared_memory_by_roles(WIDE)),
    ):
        drawing.text(18, y + HEIGHT / 2, name, bold=True)
        in_kib = [Part(part.name, part.size // 1024) for part in parts]
        _bar(drawing, y, in_kib, KIB, False)
        y += HEIGHT + 2
    _limit(drawing, SHARED_KIB, SHARED_KIB * KIB, top, y, "start")
    drawing.notes(
        y + 26,
        "Above: while P and dS are computed, and while dV, dK and dQ are; addresses and indices "
        f"come on top. {MAX_REGISTERS} is a thread's most,",
        f"{CONSUMER_REGISTERS} what a consumer of b06 or b08 has. At head_dim {WIDE} dK and dV "
        f"alone are too much for one. b06 has two share {GROUP_KEYS} keys:",
        "one has P and dV, the other dS and dK, and each half of dQ, which leaves from registers; "
        "P goes through shared memory, too.",
    )
    return drawing


def _bar(drawing: Drawing, y: float, parts: Sequence[Part], unit: float, is_too_much: bool) -> None:
    x = LEFT
    for part in parts:
        width, text = part.size * unit, f"{part.name} {part.size}"
        text = text if part.name and text_width(text, SMALL) < width else part.name
        drawing.cell(x, y, width, HEIGHT, COLORS.get(part.name, EMPTY), text)
        x += width
    color = RED if is_too_much else MUTED
    total = f"{sum(part.size for part in parts)}"
    drawing.text(x + 6, y + HEIGHT / 2, total, SMALL, color, bold=is_too_much)


def _limit(
    drawing: Drawing, limit: int, offset: float, top: float, bottom: float, anchor: str
) -> None:
    x = LEFT + offset
    drawing.line(x, top - 6, x, bottom, dashed=True)
    drawing.text(x + (3 if anchor == "start" else -3), top - 14, f"{limit}", SMALL, anchor=anchor)
