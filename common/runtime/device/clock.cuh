// The clock of the multiprocessor that a thread runs on. common/runtime/simt/clock.cuh is the twin for the
// host compiler.
#pragma once
#include "attention.cuh"

// Clock cycles since a moment that is the same for all threads of a block.
__device__ inline int64_t mov_clock64() {
    int64_t clocks;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clocks)::"memory");
    return clocks;
}
