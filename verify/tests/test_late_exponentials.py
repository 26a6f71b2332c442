"""What is found in the machine code of a tile loop."""

from __future__ import annotations

import re

import pytest

from verify.late_exponentials import late_exponentials
from verify.machine_code import parse
from verify.tests.listings import listing

Q_K = "HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
P_V = "HGMMA.64x128x16.F32.BF16 R24, R0, gdesc[UR8], R24, gsb0"
LOAD_Q, ROUND_P = "LDSM.16.M88.4 R4, [R9]", "F2FP.BF16.F32.PACK_AB R0, R9, R9"
S, ALL = (f"WARPGROUP.DEPBAR.LE gsb0, {products}" for products in ("0x1", "0x0"))
EXPONENTIAL = "MUFU.EX2 R90, R26"
AGAIN = "@P0 BRA `(.L_x_1)"
SKIP = "@P1 BRA `(.L_x_2)"


def of_all(*code: str | tuple[int, str]) -> str:
    """A listing of labels and instructions, or of so many like one."""
    marks = {LOAD_Q: "    ^^^^", ROUND_P: "^^^^"}
    counted = [item if isinstance(item, tuple) else (1, item) for item in code]
    texts = [text for count, text in counted for _ in range(count)]
    return listing(*((text, marks.get(text, "")) for text in texts))


def tile(early: int, late: int, *rest: str | tuple[int, str]) -> list:
    """A loop that starts S and O += P V, and waits for one and then for the other."""
    products = [(8, Q_K), (8, P_V), S]
    softmax = [(early, EXPONENTIAL), ALL, (late, EXPONENTIAL), *rest, ROUND_P]
    return [LOAD_Q, ROUND_P, ".L_x_1", *products, *softmax, AGAIN, "EXIT"]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (tile(64, 0), []),
        (tile(52, 12), []),
        (tile(32, 32), []),
        (tile(10, 54), [(54, 10)]),
        (tile(0, 64), [(64, 0)]),
        # Computed again where P was lost: on a way that need not be taken.
        (tile(63, 1, SKIP, (64, EXPONENTIAL), ".L_x_2"), []),
        (tile(10, 30, SKIP, (64, EXPONENTIAL), ".L_x_2"), [(30, 10)]),
        # They need what is under way: S of the next work tile's first tile, or backward's S.
        ([LOAD_Q, ROUND_P, (8, P_V), (8, Q_K), S, ALL, (64, EXPONENTIAL), P_V], []),
        # Nothing else is under way.
        ([LOAD_Q, ROUND_P, P_V, ALL, (64, EXPONENTIAL), P_V], []),
        # P V is started behind the wait for S.
        ([LOAD_Q, ROUND_P, Q_K, S, (9, EXPONENTIAL), P_V, ALL, (64, EXPONENTIAL), P_V], []),
    ],
)
def test_exponentials_behind_both_waits(code, found: list[tuple[int, int]]) -> None:
    told = r"kernel: (\d+) exponentials wait at \w+ for a product under way, and (\d+) do not"
    mistakes = [re.fullmatch(told, each) for each in late_exponentials(parse(of_all(*code)))]
    assert [tuple(map(int, each.groups())) for each in mistakes] == found


def test_a_loop_that_waits_for_a_copy_is_passed() -> None:
    wait = [".L_x_3", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4", "@!P0 BRA `(.L_x_3)"]
    softmax = [S, *wait, (9, EXPONENTIAL), ALL, (55, EXPONENTIAL), ROUND_P]
    code = [LOAD_Q, ROUND_P, ".L_x_1", Q_K, P_V, *softmax, AGAIN]
    (mistake,) = late_exponentials(parse(of_all(*code, "EXIT")))
    assert "55 exponentials wait" in mistake
