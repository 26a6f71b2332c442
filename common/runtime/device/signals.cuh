// Several signals at a time: signal.cuh has the single ones.
// common/runtime/simt/signals.cuh is the twin for the host compiler.
#pragma once
#include "signal.cuh"

// By all lanes of a warp: each takes a signal of its own, or none where that is nullptr. They wait
// together, while one take_signal after the other would be as many journeys to the L2.
__device__ inline void take_signals(Signal* signal) {
    bool waits = signal != nullptr;
    while (__any_sync(0xffffffff, waits)) {
        if (!waits) continue;
        Signal seen;
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(signal) : "memory");
        waits = seen != POSTED;
    }
    __syncwarp();  // each lane sees what the others see
    if (signal != nullptr) *signal = 0;
}
