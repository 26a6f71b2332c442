"""Kernels divide by multiplying with what the host has divided: every quotient is right, by
divisors.h's Divisor. test_launch.py has what the host leaves in it.
"""

from __future__ import annotations

import pytest
import torch

from common.runtime.cpu import CpuBackend
from common.step import Step
from verify.tests.small_kernels import run, write_scenarios

# Small ones, powers of two and what is next to them, powers of other primes, and large ones.
DIVISORS = sorted(
    {
        *range(1, 300),
        *(2**n + more for n in range(9, 32) for more in (-1, 0, 1)),
        *(3**n for n in range(6, 20)),
        *(5**n + more for n in range(5, 14) for more in (-2, 2)),
        *(999983, 0x2AAAAAAB, 0x55555555, 2**31 - 19),
    }
)
# Each block has one, and leaves how many quotients of it are wrong.
DIVISIONS = """
    if (t > 0) return;
    const uint32_t by = DIVISORS[block];
    const Divisor divisor = {{by, {inverse}}};
    uint32_t wrong = 0;
    const auto divide = [&](uint32_t n) {{ wrong += {quotient} != n / by; }};
    // A multiple, and the numbers before and after it. These may begin again at 0 or at 2^32 - 1.
    const auto divide_at = [&](uint32_t multiple) {{
        for (uint32_t n = multiple - 2; n != multiple + 3; ++n) divide(n);
    }};
    const uint32_t most = UINT32_MAX / by;
    for (uint32_t i = 0; i <= min(most, 100); ++i) divide_at(i * by), divide_at((most - i) * by);
    divide(UINT32_MAX);
    uint32_t random = 1;
    for (int i = 0; i < 2000; ++i) {{
        random = random * 1664525 + 1013904223;
        divide(random), divide(random >> i % 32), divide_at(random % most * by);
    }}
    p.lse[block] = wrong;
"""

INVERSE, QUOTIENT = "UINT32_MAX / by", "divisor.divide(n)"
UNCORRECTED = "uint32_t(uint64_t(n) * divisor.inverse >> 32)"
LEFT = f"(n - {UNCORRECTED} * by)"
# What is right, and the same with one thing wrong.
WAYS = {
    "right": (INVERSE, QUOTIENT),
    "right_written_out": (INVERSE, f"{UNCORRECTED} + ({LEFT} >= by)"),
    "inverse_one_less": (f"{INVERSE} - 1", QUOTIENT),
    "inverse_rounded_up": ("(UINT32_MAX - 1) / by + 1", QUOTIENT),
    "inverse_even": ("uint32_t(INT32_MAX) / by * 2", QUOTIENT),
    "inverse_of_a_float": ("uint32_t(4294967040.0f / by)", QUOTIENT),
    "product_of_32_bits": (INVERSE, "uint32_t(uint64_t(n * divisor.inverse) >> 32)"),
    "not_corrected": (INVERSE, UNCORRECTED),
    "always_corrected": (INVERSE, f"{UNCORRECTED} + (n > 0)"),
    "multiples_not_corrected": (INVERSE, f"{UNCORRECTED} + ({LEFT} > by)"),
}


@pytest.fixture(scope="module")
def divisions(tmp_path_factory) -> Step:
    """Its scenarios are WAYS."""
    bodies = [DIVISIONS.format(inverse=inverse, quotient=by) for inverse, by in WAYS.values()]
    divisors = ", ".join(f"{divisor}u" for divisor in DIVISORS)
    return write_scenarios(
        tmp_path_factory.mktemp("divisions"),
        "divisions",
        bodies,
        globals_=f"constexpr uint32_t DIVISORS[] = {{{divisors}}};",
        takes_divisors=True,
    )


@pytest.mark.parametrize("way", WAYS)
def test_quotients(divisions, way):
    q = torch.zeros(1, 1, len(DIVISORS), 8)
    scenario = list(WAYS).index(way)
    _, wrong = run(divisions, CpuBackend(), q, num_lse=len(DIVISORS), scenario=scenario)
    assert (wrong.max() == 0) == way.startswith("right")
