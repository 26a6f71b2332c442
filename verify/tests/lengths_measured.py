"""What the tests of bench --lengths measure: steps, and little sequences, windows and caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.catalog import all_steps, find_step
from common.lengths import UNLIMITED
from common.operation import BACKWARD, FORWARD
from common.problem import Sequences

V01, V02 = all_steps()[:2]
B01, B02 = [step for step in all_steps() if step.operation == BACKWARD][:2]
WITH_LENGTHS = {
    FORWARD: [find_step("v16"), find_step("v14")],
    BACKWARD: [find_step("b11"), find_step("b14")],
}
PADDING = {FORWARD: "v12", BACKWARD: "b10"}
OPERATIONS = pytest.mark.parametrize("operation", [FORWARD, BACKWARD], ids=["forward", "backward"])
RAGGED = Sequences("3 of 1 to 9", (4, 1, 9), (4, 1, 9), 4, 2, 64)
CAUSAL = replace(RAGGED, causal=True)
WINDOW = replace(RAGGED, window=(2, 3))
SLIDING = replace(CAUSAL, window=(3, UNLIMITED))
EQUAL = replace(RAGGED, seqlens_q=(5, 5), seqlens_k=(7, 7))
BATCH = replace(EQUAL, packed=False, window=(2, 0))
CACHE = replace(EQUAL, packed=False, causal=True, seqused_k=(5, 7))  # of few queries
