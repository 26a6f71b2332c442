// Bulk copies (sm_90) of consecutive bytes, which need no tensor map, and reductions of them in
// global memory, to which any number of blocks add in any order.
// common/runtime/simt/bulk.cuh is the twin for the host compiler.
#pragma once
#include "tma.cuh"

// Starts a copy of bytes to shared memory, which count towards the barrier's phase. Both addresses
// must be 16-byte aligned, and `bytes` a multiple of 16. The copy need not see what ordinary stores
// of the same launch have written to global memory.
__device__ inline void cp_async_bulk_load(void* to_shared, const void* from_global, int bytes,
                                          Mbarrier& barrier) {
    const uint32_t to = __cvta_generic_to_shared(to_shared);
    const uint32_t full = __cvta_generic_to_shared(&barrier);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from_global), "r"(bytes), "r"(full)
        : "memory");
}

// Starts to_global[i] += from_shared[i] for all floats of so many bytes; both addresses must be
// 16-byte aligned, and `bytes` a multiple of 16. Others see the sums when the launch has ended. The
// order of the additions is open, and so are the last bits of the sums.
// It belongs to a group, as cp_async_bulk_tensor_store does, and needs fence_proxy_async like it.
// from_shared may be written again after the group's cp_async_bulk_wait_group_read. What ordinary
// stores of the same launch have written to to_global it need not see.
__device__ inline void cp_reduce_async_bulk_add(float* to_global, const float* from_shared,
                                                int bytes) {
    const uint32_t from = __cvta_generic_to_shared(from_shared);
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
        "[%0], [%1], %2;" ::"l"(to_global),
        "r"(from), "r"(bytes)
        : "memory");
}
