// Reductions in global memory, to which any number of blocks add in any order.
// common/runtime/simt/reduce.cuh is the twin for the host compiler.
#pragma once
#include "attention.cuh"

// *to += x. Others see the sum when the launch has ended. The order of the additions is open, and so
// are the last bits of the sum.
__device__ inline void red_add(float* to, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
