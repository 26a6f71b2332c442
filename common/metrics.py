"""What the compiler and Nsight Compute count in a kernel, and its names in tables and text."""

from __future__ import annotations

# By a counter's name in tables and text: ncu's name, and the factor from its unit to ours.
COUNTERS = {
    "duration_ms": ("gpu__time_duration.sum", 1e-6),
    "cycles": ("sm__cycles_elapsed.max", 1),
    "sm_percent": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "memory_percent": ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "tensor_percent": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "xu_percent": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1),
    "fma_percent": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active", 1),
    "lsu_percent": ("sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active", 1),
    "l1_data_percent": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", 1),
    "occupancy_percent": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "issue_percent": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "dram_read_gb": ("dram__bytes_read.sum", 1e-9),
    "dram_write_gb": ("dram__bytes_write.sum", 1e-9),
    "l2_gb": ("lts__t_bytes.sum", 1e-9),
    "bank_conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", 1),
    "local_loads": ("smsp__inst_executed_op_local_ld.sum", 1),
    "local_stores": ("smsp__inst_executed_op_local_st.sum", 1),
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALL_REASONS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
METRICS = (
    *(metric for metric, _ in COUNTERS.values()),
    *(STALL.format(reason) for reason in STALL_REASONS),
)

# The opcodes that tell the steps apart: tensor cores, of a warp and of a warpgroup; copies between
# global and shared memory and registers; local memory; multiply-adds; special functions; exchange
# between lanes; barriers and mbarriers.
OPCODES = (
    "HMMA",
    "HGMMA",
    "LDSM",
    "LDGSTS",
    "UTMALDG",
    "UTMASTG",
    "LDG",
    "LDS",
    "LD",
    "STS",
    "LDL",
    "STL",
    "FFMA",
    "MUFU",
    "SHFL",
    "BAR",
    "SYNCS",
)


def smem_bytes(kernel: dict) -> int:
    return kernel["static_smem"] + kernel["dynamic_smem"]


def num_conflicts(place: dict) -> int:
    """Of accesses to shared memory in a static record: the wavefronts beyond the ideal."""
    return place["wavefronts"] - place["ideal"]


def spill_bytes(kernel: dict) -> int:
    return kernel["spill_store_bytes"] + kernel["spill_load_bytes"]
