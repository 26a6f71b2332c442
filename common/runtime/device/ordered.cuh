// Ordered sections: code that blocks of a launch pass one after another, by their places 0, 1, 2, ...,
// which a counter in global memory counts. A block may wait only for one that is certain to run
// meanwhile, as for a signal (signal.cuh).
// common/runtime/simt/ordered.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// By all lanes of a warp. Waits until the warps of all earlier places have ended their sections, and
// sees what those have written or added, also by reductions of the async proxy that they have waited
// for. The counter is in a workspace, where a kernel in front must have set it to 0.
__device__ inline void begin_ordered(int& counter, int place) {
    int ended;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                     : "=r"(ended)
                     : "l"(&counter)
                     : "memory");
        ended = __shfl_sync(0xffffffff, ended, 0);  // tells ptxas that no warp diverges here
    } while (ended != place);
    asm volatile("fence.proxy.async.global;" ::: "memory");
    __syncwarp();  // the others see what lane 0 sees
}

// By all lanes of the warp. Bulk reductions that it has not waited for (cp_async_bulk_wait_group) may
// come later than those of the next place.
__device__ inline void end_ordered(int& counter, int place) {
    __syncwarp();  // lane 0 passes on what the others have written
    if (threadIdx.x % 32 == 0)
        asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(&counter), "r"(place + 1)
                     : "memory");
}
