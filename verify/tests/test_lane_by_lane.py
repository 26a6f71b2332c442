"""What is found in the machine code of a copy."""

from __future__ import annotations

import pytest

from verify.lane_by_lane import copies_lane_by_lane
from verify.machine_code import parse
from verify.tests.listings import listing

COPY = "UTMALDG.5D [UR8], [UR16]"
ELECT, AGAIN = "@P0 ELECT P2, URZ, PT", "@P0 BRA.U.ANY `(.L_x_1)"
MOVE, KEEP = "@P2 R2UR UR11, R7", "UMOV UR11, UR35"
OTHERS = ["@P2 PLOP3.LUT P0, PT, P2, PT, PT, 0x8, 0x0", "PLOP3.LUT P2, PT, PT, PT, PT, 0x8, 0x0"]


@pytest.mark.parametrize(
    ("code", "moved"),
    [
        ([".L_x_1", ELECT, KEEP, KEEP, COPY, *OTHERS, AGAIN], 0),
        ([".L_x_1", ELECT, MOVE, KEEP, MOVE, OTHERS[0], COPY, OTHERS[1], AGAIN], 2),
        # Guarded itself, where a branch has become a predicate.
        ([".L_x_1", ELECT, MOVE, *OTHERS, f"@!UP2 {COPY}", AGAIN], 1),
        # Moved once, before lanes are elected.
        ([MOVE, MOVE, ".L_x_1", ELECT, KEEP, COPY, *OTHERS, AGAIN], 0),
        # Nobody is elected.
        ([MOVE, MOVE, COPY], 0),
    ],
)
def test_registers_moved_for_each_lane(code, moved):
    found = copies_lane_by_lane(parse(listing(*code, "EXIT")))
    assert len(found) == bool(moved)
    assert all(f" moves {moved} registers " in line for line in found)
