// Reductions of four floats at once (sm_90). common/runtime/simt/reduce_vector.cuh is the twin for
// the host compiler.
#pragma once
#include "attention.cuh"

// to[i] += x[i] for four floats; `to` must be 16-byte aligned. Otherwise like reduce.cuh's red_add.
__device__ inline void red_add_v4(float* to, float4 x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
