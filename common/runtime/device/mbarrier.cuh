// Barriers in shared memory that count arrivals and bytes (sm_90). A phase of an mbarrier completes
// when `count` arrivals have come and as many bytes as they announced; the next phase then begins.
// common/runtime/simt/mbarrier.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// An mbarrier; the bits are the hardware's. 8-byte aligned, in shared memory.
using Mbarrier = uint64_t;

// Makes an mbarrier whose phases take `count` arrivals each, and begins its phase 0.
__device__ inline void mbarrier_init(Mbarrier& barrier, int count) {
    const uint32_t address = __cvta_generic_to_shared(&barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
}

// Makes the mbarriers that this thread has initialized visible to the async proxy, that is to TMA.
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives. This thread's earlier memory accesses are visible to whoever waits for the phase.
__device__ inline void mbarrier_arrive(Mbarrier& barrier) {
    const uint32_t address = __cvta_generic_to_shared(&barrier);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}

// Announces `bytes` that copies will bring in this phase, and arrives.
__device__ inline void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
    const uint32_t address = __cvta_generic_to_shared(&barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
                 : "memory");
}

// Whether the phase of this parity (0 of phase 0, 1 of phase 1, 0 of phase 2 ...) has completed, and
// the one after it has not. Waits for a limited time: call it in a loop.
__device__ inline bool mbarrier_try_wait_parity(Mbarrier& barrier, int parity) {
    const uint32_t address = __cvta_generic_to_shared(&barrier);
    uint32_t completed;
    asm volatile(
        "{\n"
        ".reg .pred completed;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 completed, [%1], %2;\n"
        "selp.u32 %0, 1, 0, completed;\n"
        "}"
        : "=r"(completed)
        : "r"(address), "r"(parity)
        : "memory");
    return completed;
}
