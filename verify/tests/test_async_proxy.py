"""The async proxy: when TMA copies land and what they see, and misuse of them and of stmatrix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from common.runtime.cpu import CpuBackend, SimtError
from common.step import Step
from verify.tests.small_kernels import (
    Fault,
    expect_report,
    run,
    write_faults,
    write_scenarios,
    write_step,
)

# ---- when copies land

INCLUDE = '#include "tma.cuh"\n#include "mma.cuh"\n#include "copy.cuh"'
LAYOUT = """
    alignas(1024) Element tiles[4][128];  // 16 rows of 8
    alignas(1024) Element wide[8][64];
    Mbarrier full, other, unfenced;
"""
BOXES = ".q_box = {16, 8}, .k_box = {8, 64, SWIZZLE_128B}, .v_box = {8, 32, SWIZZLE_128B}, "
BOXES += ".o_box = {16, 8},"

SETUP = """
    if (block) return;
    if (t == 0) {
        mbarrier_init(smem.full, 1);
        mbarrier_init(smem.other, 1);
        fence_mbarrier_init();
        mbarrier_init(smem.unfenced, 1);
    }
    __syncthreads();
    [[maybe_unused]] const auto wait = [](Mbarrier& barrier, int parity) {
        while (!mbarrier_try_wait_parity(barrier, parity)) {
        }
    };
    [[maybe_unused]] const auto load = [&](int tile) {
        cp_async_bulk_tensor_load(smem.tiles[tile], p.q_map, 0, 16 * tile, 0, 0, smem.full);
    };
    [[maybe_unused]] const auto tell = [&](int at) {
        for (int tile = 0; tile < 4; ++tile)
            for (int i = t; i < 128; i += 32)
                p.lse[512 * at + 128 * tile + i] = to_float(smem.tiles[tile][i]);
    };
    [[maybe_unused]] const auto store = [&](int tile) {
        cp_async_bulk_tensor_store(p.o_map, 0, 16 * tile, 0, 0, smem.tiles[tile]);
    };
"""
EARLY_SEED, LATE_SEED = 0, 3  # of block 0
Q = torch.arange(1.0, 513).half().view(1, 1, 64, 8)  # four boxes


def write(tmp_path, body: str) -> Step:
    return write_step(
        tmp_path,
        "copies",
        SETUP + body,
        threads=32,
        globals_=INCLUDE,
        layout=LAYOUT,
        boxes=BOXES,
    )


def test_several_copies_fill_a_barrier(tmp_path):
    """All four copies of a round, whose bytes are announced together or one after another, have
    landed once the phase has completed."""
    body = """
    for (int round = 0; round < 4; ++round) {
        for (int i = t; i < 512; i += 32) smem.tiles[i / 128][i % 128] = from_float<Element>(-1);
        fence_proxy_async();
        __syncwarp();
        if (t == 0) {
            if (round % 2) mbarrier_arrive_expect_tx(smem.full, 1024);
            for (int tile = 0; tile < 4; ++tile) load(tile);
            if (round % 2 == 0) mbarrier_arrive_expect_tx(smem.full, 1024);
        }
        wait(smem.full, round % 2);
        tell(round);
        __syncwarp();
    }
"""
    step = write(tmp_path, body)
    for seed in range(6):
        _, lse = run(step, CpuBackend(seed), Q, num_lse=2048)
        assert (lse.view(4, 512) == Q.flatten()).all()


def test_a_load_is_poison_until_it_lands(tmp_path):
    """It lands early or late: some blocks see it before they wait, others do not."""
    body = """
    for (int i = t; i < 512; i += 32) smem.tiles[i / 128][i % 128] = from_float<Element>(-1);
    __syncthreads();
    if (t == 0) {
        mbarrier_arrive_expect_tx(smem.full, 1024);
        for (int tile = 0; tile < 4; ++tile) load(tile);
        tell(0);
    }
    for (int i = 0; i < 8; ++i) __syncwarp();
    tell(1);
    wait(smem.full, 0);
    tell(2);
"""
    step = write(tmp_path, body)
    kinds = set()
    for seed in range(8):
        _, lse = run(step, CpuBackend(seed), Q, num_lse=1536)
        issued, later, waited = lse.view(3, 4, 128)
        first, expected = issued[:, ::32], Q.view(4, 128)[:, ::32].float()
        assert (first.isnan() | (first == expected)).all()
        assert torch.equal(waited.flatten(), Q.flatten().float())
        landed = [not tile.isnan().any() for tile in later]
        kinds.add("late" if not any(landed) else "early")
    assert kinds == {"late", "early"}


def test_loads_land_in_any_order(tmp_path):
    body = """
    if (t == 0) {
        mbarrier_arrive_expect_tx(smem.full, 256);
        mbarrier_arrive_expect_tx(smem.other, 256);
        load(0);
        cp_async_bulk_tensor_load(smem.tiles[1], p.q_map, 0, 16, 0, 0, smem.other);
    }
    __syncwarp();
    wait(t % 2 ? smem.full : smem.other, 0);
    if (t < 2) p.lse[t] = to_float(smem.tiles[t][0]);
"""
    step = write(tmp_path, body)
    firsts = set()
    for seed in range(12):
        _, lse = run(step, CpuBackend(seed), Q, num_lse=2)
        firsts.add(tuple(lse.isnan().tolist()))
    assert {(True, False), (False, True)} <= firsts


# What 32 threads execute, and what is then in the four boxes of o: NaN, or the number stored.
STORES = [
    # Read in the wait that covers its group.
    ("store(0); cp_async_bulk_commit_group(); cp_async_bulk_wait_group_read<0>();", 1),
    (
        "store(0); cp_async_bulk_commit_group(); fill(2); cp_async_bulk_wait_group_read<0>();",
        2,
    ),
    (
        "store(0); cp_async_bulk_commit_group(); store(1); cp_async_bulk_commit_group();"
        "cp_async_bulk_wait_group_read<1>(); fill(2);"
        "cp_async_bulk_wait_group_read<0>();",
        1,
    ),
    # Without a commit of its own a store is in the next group.
    (
        "store(0); store(1); cp_async_bulk_commit_group(); cp_async_bulk_commit_group();"
        "cp_async_bulk_wait_group_read<1>(); fill(2);"
        "cp_async_bulk_wait_group_read<0>();",
        1,
    ),
    (
        "store(0); cp_async_bulk_wait_group_read<0>(); cp_async_bulk_commit_group(); fill(2);"
        "cp_async_bulk_wait_group_read<0>();",
        2,
    ),
]


FILL = """
    if (t) return;
    const auto fill = [&](int x) {
        for (int i = 0; i < 512; ++i) smem.tiles[i / 128][i % 128] = from_float<Element>(x);
        fence_proxy_async();
    };
    fill(1);
"""


def write_stores(tmp_path, bodies: Sequence[str]) -> Step:
    setup = SETUP + FILL
    return write_scenarios(
        tmp_path, "stores", bodies, setup, threads=32, globals_=INCLUDE, layout=LAYOUT, boxes=BOXES
    )


def test_stores_read_in_the_wait_for_their_group(tmp_path):
    step = write_stores(tmp_path, [body for body, _ in STORES])
    for scenario, (_, stored) in enumerate(STORES):
        for seed in range(2):
            o, _ = run(step, CpuBackend(seed), Q, scenario=scenario)
            assert (o[0, 0, :16] == stored).all()
            assert o[0, 0, 32:].isnan().all()


# What a thread executes between two stores to the same rows; of what is stored first, then.
BETWEEN = [
    ("cp_async_bulk_wait_group<0>();", {2}),
    ("cp_async_bulk_wait_group_read<0>();", {1, 2}),
    ("cp_async_bulk_wait_group<1>(); cp_async_bulk_wait_group_read<0>();", {1, 2}),
    ("cp_async_bulk_commit_group(); cp_async_bulk_wait_group<1>();", {2}),
]
AND_STORE_AGAIN = """
    fill(2);
    store(0);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
    fill(3);
"""


def test_stores_land_in_any_order_unless_awaited(tmp_path):
    """One of two consecutive seeds shows it."""
    bodies = [
        f"store(0); cp_async_bulk_commit_group(); {between} {AND_STORE_AGAIN}"
        for between, _ in BETWEEN
    ]
    step = write_stores(tmp_path, bodies)
    for scenario, (_, stored) in enumerate(BETWEEN):
        for seed in range(0, 8, 2):
            runs = [run(step, CpuBackend(s), Q, scenario=scenario)[0] for s in (seed, seed + 1)]
            assert {x for o in runs for x in o[0, 0, :16].flatten().tolist()} == stored


def test_a_store_is_in_the_tensor_after_its_wait(tmp_path):
    """Before its wait it may or may not be there."""
    tell = "p.lse[{}] = to_float(p.o[{}]);"
    body = f"""
    store(0);
    cp_async_bulk_commit_group();
    store(1);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
    {tell.format(0, 0)}
    cp_async_bulk_wait_group<1>();
    {tell.format(1, 0)}
    {tell.format(2, 128)}
    cp_async_bulk_wait_group<0>();
    {tell.format(3, 128)}
"""
    step = write_stores(tmp_path, [body])
    for seed, missing in (EARLY_SEED, [False] * 4), (LATE_SEED, [True, False, True, False]):
        _, lse = run(step, CpuBackend(seed), Q, num_lse=4)
        assert lse.isnan().tolist() == missing


# ---- who sees what


STMATRIX = "stmatrix_x4(&smem.tiles[t / 16][t % 16 * 8], r);"
STORE_ALL = """
    if (t == 0) {
        store(0);
        store(1);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
"""
WRITERS = {
    "store_uint4": "store_uint4(&smem.tiles[t / 16][t % 16 * 8], {1, 2, 3, 4});",
    "store_vector": "float x[8] = {1, 1}; store_vector(&smem.tiles[t / 16][t % 16 * 8], x);",
    "store_float4": "store_float4(reinterpret_cast<float*>(&smem.tiles[t / 16][t % 16 * 8]), "
    "{1, 1});",
    "store_float4_rounded": "for (int i = 0; i < 8; i += 4) "
    "store_float4(&smem.tiles[t / 16][t % 16 * 8 + i], {1, 1});",
    "stmatrix": STMATRIX,
}


def test_what_is_fenced_is_seen(tmp_path):
    """Writes through a wrapper need their own thread's fence. An ordinary write is published by any
    thread's, since its writer is not known; what TMA writes needs none."""
    bodies = [
        f"{write} fence_proxy_async(); __syncwarp(); {STORE_ALL}" for write in WRITERS.values()
    ]
    bodies += [
        "for (int i = 0; i < 8; ++i) smem.tiles[t / 16][t % 16 * 8 + i] = from_float<Element>(t);"
        f"__syncwarp(); if (t == 5) fence_proxy_async(); __syncwarp(); {STORE_ALL}",
        "if (t == 0) { mbarrier_arrive_expect_tx(smem.full, 512); load(0); load(1); }"
        f"wait(smem.full, 0); __syncwarp(); {STORE_ALL}",
    ]
    step = write_scenarios(
        tmp_path,
        "seen",
        bodies,
        SETUP + "uint32_t r[4] = {};",
        threads=32,
        globals_=INCLUDE,
        layout=LAYOUT,
        boxes=BOXES,
    )
    for scenario in range(len(bodies)):
        for seed in range(2):
            o, _ = run(step, CpuBackend(seed), Q, scenario=scenario)
            assert not o[0, 0, :32].isnan().any()
    assert torch.equal(o[0, 0, :32], Q[0, 0, :32])


def test_writes_before_stmatrix_need_a_barrier(tmp_path):
    """Lanes store some time after the collective: the next reader needs a __syncwarp()."""
    for barrier in "__syncwarp();", "":
        body = f"""
    for (int i = 0; i < 8; ++i) smem.tiles[t / 16][t % 16 * 8 + i] = from_float<Element>(1);
    __syncwarp();
    uint32_t r[4] = {{}};
    {STMATRIX}
    {barrier}
    for (int i = 0; i < 8; ++i)
        p.lse[8 * t + i] = to_float(smem.tiles[1 - t / 16][(15 - t % 16) * 8 + i]);
"""
        step = write(tmp_path, body)
        for seed in range(3):
            if barrier:
                assert not run(step, CpuBackend(seed), Q, num_lse=256)[1].any()
            else:
                with pytest.raises(SimtError, match="data race"):
                    run(step, CpuBackend(seed), Q, num_lse=256)


# ---- misuse

# What 32 threads execute; shared memory has 2048 bytes and the mbarriers, in 3072.
FAULTS = [
    Fault(
        "no_map",
        "if (t == 0) { TensorMap none = {};\n"
        "cp_async_bulk_tensor_load(smem.tiles[0], none, 0, 0, 0, 0, smem.full); }",
        r"no tensor map .*, thread 0: cp_async_bulk_tensor_load \(faults.cu:\d+\) needs the map of "
        "a tensor whose box in the launch descriptor has rows",
    ),
    Fault(
        "narrow_box",
        "cp_async_bulk_tensor_load(smem.wide[0], p.v_map, 0, 0, 0, 0, smem.full);",
        "box and swizzle do not fit .*: cp_async_bulk_tensor_load @ swizzles 128 bytes, and a row "
        "of the box has 64",
    ),
    Fault(
        "misaligned_box",
        "cp_async_bulk_tensor_load(smem.tiles[0], p.q_map, 4, 0, 0, 0, smem.full);",
        "misaligned box .*: cp_async_bulk_tensor_load @ needs a d of a multiple of 16 bytes, not "
        "4 elements",
    ),
    Fault(
        "store_before_the_tensor",
        "cp_async_bulk_tensor_store(p.o_map, 0, -1, 0, 0, smem.tiles[0]);",
        "store before the tensor .*: cp_async_bulk_tensor_store @ can start no box at d 0, row "
        "-1, head 0, batch 0",
    ),
    Fault(
        "misaligned_load",
        "cp_async_bulk_tensor_load(smem.tiles[0] + 32, p.q_map, 0, 0, 0, 0, smem.full);",
        r"misaligned access .*: cp_async_bulk_tensor_load @ needs a multiple of 128 bytes, not the "
        "address at byte 64 of shared memory",
    ),
    Fault(
        "misaligned_pattern",
        "cp_async_bulk_tensor_load(smem.wide[1], p.k_map, 0, 0, 0, 0, smem.full);",
        r"misaligned access .*: .* needs a multiple of 1024 bytes, .* at byte 1152 of shared",
    ),
    Fault(
        "misaligned_store",
        "cp_async_bulk_tensor_store(p.o_map, 0, 0, 0, 0, smem.tiles[0] + 8);",
        r"misaligned access .*: cp_async_bulk_tensor_store @ needs a multiple of 128 bytes, .* at "
        "byte 16 of shared memory",
    ),
    Fault(
        "load_to_global",
        "cp_async_bulk_tensor_load(p.o, p.q_map, 0, 0, 0, 0, smem.full);",
        r"outside shared memory .*: cp_async_bulk_tensor_load @ needs 256 bytes of the block's "
        "shared memory, not the address at byte 0 of o",
    ),
    Fault(
        "load_past_end",
        "cp_async_bulk_tensor_load(smem.wide[24], p.q_map, 0, 0, 0, 0, smem.full);",
        "outside shared memory .* past the end of shared memory",
    ),
    Fault(
        "load_partly_past_end",
        "cp_async_bulk_tensor_load(smem.wide[15], p.q_map, 0, 0, 0, 0, smem.full);",
        r"outside shared memory .* at byte 2944 of shared memory \(3072 bytes\)",
    ),
    Fault(
        "mbarrier_not_initialized",
        "if (t == 0) cp_async_bulk_tensor_load(smem.tiles[0], p.q_map, 0, 0, 0, 0, "
        "*(&smem.unfenced + 1));",
        r"mbarrier not initialized .*: cp_async_bulk_tensor_load @ needs an mbarrier_init",
    ),
    Fault(
        "missing_fence_init",
        "if (t == 9) cp_async_bulk_tensor_load(smem.tiles[0], p.q_map, 0, 0, 0, 0, smem.unfenced);",
        r"missing fence_mbarrier_init .*, thread 9: cp_async_bulk_tensor_load @ needs one of "
        "thread 0 after it has initialized the mbarrier at byte 2064",
    ),
    Fault(
        "other_threads_fence_init",
        "fence_mbarrier_init(); __syncwarp(); if (t == 9) mbarrier_init(*(&smem.unfenced + 1), 1);"
        "__syncwarp(); if (t == 8) fence_mbarrier_init(); __syncwarp();"
        "if (t == 9) cp_async_bulk_tensor_load(smem.tiles[0], p.q_map, 0, 0, 0, 0, "
        "*(&smem.unfenced + 1));",
        r"missing fence_mbarrier_init .*, thread 9: .* needs one of thread 9 after",
    ),
    Fault(
        "barrier_overwritten_by_load",
        "if (t == 0) { mbarrier_arrive_expect_tx(smem.full, 256);"
        "cp_async_bulk_tensor_load(smem.wide[8], p.q_map, 0, 0, 0, 0, smem.full); }"
        "__syncwarp(); wait(smem.full, 0);",
        "mbarrier overwritten .* finds something else in the mbarrier at byte 2048",
    ),
    Fault(
        "too_many_bytes",
        "if (t == 0) { mbarrier_arrive_expect_tx(smem.full, 320); load(0); load(1); }"
        "wait(smem.full, 0);",
        r"more bytes than announced in kernel test_kernel, block 0: cp_async_bulk_tensor_load "
        r"\(faults.cu:\d+\) ends phase 0 of the mbarrier at byte 2048 of shared memory .* "
        "over by 192 bytes",
    ),
    Fault(
        "announced_too_late",
        "if (t == 0) { load(0); load(1); wait(smem.other, 1); } __syncwarp();"
        "for (int i = 0; i < 40; ++i) __syncwarp();"
        "if (t == 0) mbarrier_arrive_expect_tx(smem.full, 256);",
        r"more bytes than announced .*, thread 0: mbarrier_arrive_expect_tx @ ends phase 0 of the "
        "mbarrier at byte 2048 .* over by 256 bytes",
        seed=EARLY_SEED,
    ),
    Fault(
        "too_few_bytes",
        "if (t == 0) { mbarrier_arrive_expect_tx(smem.full, 640); load(0); load(1); }"
        "wait(smem.full, 0);",
        r"deadlock .*\n.*\n  the mbarrier at byte 2048 .*: in phase 0 \(parity 0\), 0 of 1 "
        "arrivals missing, still expects 128 bytes: no copy is on its way",
    ),
    Fault(
        "load_in_flight_at_the_end",
        "if (t == 0) { mbarrier_arrive_expect_tx(smem.full, 256); load(0); }",
        r"block ends with a load in flight in kernel test_kernel, block 0: "
        r"cp_async_bulk_tensor_load \(faults.cu:\d+\) has not landed: wait for its mbarrier",
        seed=LATE_SEED,
    ),
    Fault(
        "bytes_never_announced",
        "if (t == 0) load(0); wait(smem.full, 0);",
        r"deadlock .*\n.*\n.* in phase 0 \(parity 0\), 1 of 1 arrivals missing, 256 bytes not "
        "announced",
    ),
    Fault(
        "store_in_flight_at_exit",
        "if (t == 3) { store(0); cp_async_bulk_commit_group(); }",
        r"exit with a store in flight .*, thread 3: cp_async_bulk_tensor_store \(faults.cu:\d+\) "
        "may not have read shared memory yet",
    ),
    Fault(
        "store_not_committed",
        "if (t == 3) { store(0); cp_async_bulk_wait_group_read<0>(); }",
        "exit with a store in flight .*, thread 3: .* call cp_async_bulk_commit_group",
    ),
    Fault(
        "another_thread_waits",
        "if (t == 3) { store(0); cp_async_bulk_commit_group(); } __syncwarp();"
        "if (t == 4) cp_async_bulk_wait_group_read<0>();",
        "exit with a store in flight .*, thread 3",
    ),
    Fault(
        "store_to_input",
        "if (t == 0) { cp_async_bulk_tensor_store(p.q_map, 0, 0, 0, 0, smem.tiles[0]);"
        "cp_async_bulk_commit_group(); cp_async_bulk_wait_group_read<0>(); }",
        r"write to an input .*, thread 0 @: at byte 0 of q",
    ),
    *[
        Fault(
            f"no_fence_after_{name}",
            f"{write} __syncwarp(); {STORE_ALL}",
            r"missing fence_proxy_async .*, thread 0: cp_async_bulk_tensor_store "
            r"\(faults.cu:\d+\) reads byte \d+ of shared memory, written by thread \d+ with no "
            "fence_proxy_async since",
        )
        for name, write in WRITERS.items()
    ],
    *[
        Fault(
            f"another_threads_fence_after_{name}",
            f"{write} __syncwarp(); if (t != 5) fence_proxy_async(); __syncwarp(); {STORE_ALL}",
            "missing fence_proxy_async .* reads byte 80 of shared memory, written by thread 5 with",
        )
        for name, write in WRITERS.items()
    ],
    Fault(
        "fence_before_the_write",
        f"fence_proxy_async(); {STMATRIX} __syncwarp(); {STORE_ALL}",
        r"missing fence_proxy_async .* reads byte 0 of shared memory, written by thread 0 with",
    ),
    Fault(
        "no_fence_after_ordinary_write",
        "if (t == 9) smem.tiles[0][25] = from_float<Element>(1); __syncwarp();" + STORE_ALL,
        r"missing fence_proxy_async .* reads byte 50 of shared memory, written with no "
        "fence_proxy_async since",
    ),
    Fault(
        "changed_before_the_wait",
        "if (t == 9) { store(0); cp_async_bulk_commit_group();"
        "smem.tiles[0][25] = from_float<Element>(1); cp_async_bulk_wait_group_read<0>(); }",
        r"missing fence_proxy_async .*, thread 9: .* reads byte 50 of shared memory, written with",
    ),
    Fault(
        "stmatrix_misaligned",
        "stmatrix_x4(&smem.tiles[0][t % 16 * 8 + (t == 5)], r);",
        r"misaligned access .*, thread 5: stmatrix_x4 @ needs a multiple of 16 bytes",
    ),
    Fault(
        "stmatrix_global",
        "stmatrix_x4(t == 9 ? p.o : smem.tiles[0], r);",
        r"outside shared memory .*, thread 9: stmatrix_x4 @ needs 16 bytes of the block's shared "
        "memory, not the address at byte 0 of o",
    ),
    Fault(
        "stmatrix_missing_lane",
        "if (t < 31) stmatrix_x4(smem.tiles[0], r);",
        r"lane that has exited .*\n  threads 0-30 wait at stmatrix_x4 @",
    ),
]


@pytest.fixture(scope="module")
def faults_step(tmp_path_factory) -> Step:
    return write_faults(
        tmp_path_factory.mktemp("tma_faults"),
        FAULTS,
        SETUP + "    uint32_t r[4] = {};",
        threads=32,
        globals_=INCLUDE,
        layout=LAYOUT,
        boxes=BOXES,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_reported(faults_step, fault):
    expect_report(faults_step, FAULTS, fault, q=Q)
