// Signals from one block to another of the same launch, through global memory. A block may wait only
// for one that is certain to run meanwhile: for any where all fit on the device at once, otherwise for
// one that starts earlier and waits for nobody before it posts.
// common/runtime/simt/signal.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// Posted or not. 8-byte aligned, in a workspace, where it needs no initialization: POSTED is noise
// that nothing else leaves there.
using Signal = uint64_t;
constexpr Signal POSTED = 0xcb51de8d0c59f19c;

// By all lanes of a warp. What they have written before is visible to the warp that takes the signal.
__device__ inline void post_signal(Signal& signal) {
    __syncwarp();  // lane 0 passes on what the others have written
    if (threadIdx.x % 32 == 0)
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&signal), "l"(POSTED) : "memory");
}

// By all lanes of a warp. Waits until the signal is posted, and takes it away, so that neither this
// launch nor the next finds it again.
__device__ inline void take_signal(Signal& signal) {
    Signal seen;
    do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(&signal) : "memory");
        // All lanes leave the loop together, and by the shuffle ptxas knows it. Where it believes that
        // a warp may diverge, it keeps nothing in uniform registers, in the whole kernel.
        seen = __shfl_sync(0xffffffff, seen, 0);
    } while (seen != POSTED);
    __syncwarp();  // the others see what lane 0 sees, and have loaded the signal
    if (threadIdx.x % 32 == 0) signal = 0;
}
