// What warp specialization needs in a block of several warpgroups, 128 threads each: registers that
// move from one to another (sm_90a), and barriers for some of the block's threads.
// common/runtime/simt/warpgroup.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// Sets the warpgroup's registers per thread, a multiple of 8 from 24 to 256: dec releases those
// beyond REGISTERS, inc waits for more. A thread starts with as many as __launch_bounds__ allows.
template <int REGISTERS>
__device__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Barrier `id`, 1 to 15, of the block: waits until num_threads threads, in whole warps, have come,
// by this or by bar_arrive, which does not wait.
__device__ inline void bar_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ inline void bar_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
