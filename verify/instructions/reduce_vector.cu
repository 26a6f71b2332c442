// reduce_vector -- four numbers at once that all blocks add to the same places
// change: none; this is a kernel of verify/tests/test_reduce.py
// why: to see that reductions of four add what every block brings, on a GPU as on the CPU
// limits: bf16, fp16; head_dim 8-8 by 8; sm_90
#include "reduce_vector.cuh"

constexpr int THREADS = 16, FLOATS = 4 * THREADS;

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_zero", .grid = {{HEADS, 1}}, .threads = THREADS},
                {.name = "attention_forward", .grid = {{SEQ_Q, 1}}, .threads = THREADS},
                {.name = "attention_read", .grid = {{HEADS, 1}}, .threads = THREADS}},
    .workspace = {{FLOATS * sizeof(float), {{HEADS, 1}}}},
};
}

extern "C" __global__ void attention_zero(const __grid_constant__ AttentionParams p) {
    float* const sums = static_cast<float*>(p.workspace[0]);
    store_float4(&sums[4 * threadIdx.x], make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}

// Block b adds (b + 1) / 3, which rounds, to all places, and 1 to four places of another lane.
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    float* const sums = static_cast<float*>(p.workspace[0]);
    const float x = (blockIdx.x + 1) / 3.0f;
    red_add_v4(&sums[4 * threadIdx.x], make_float4(x, x, x, x));
    red_add_v4(&sums[4 * (threadIdx.x ^ blockIdx.x % THREADS)],
               make_float4(1.0f, 1.0f, 1.0f, 1.0f));
}

// lse [FLOATS]
extern "C" __global__ void attention_read(const __grid_constant__ AttentionParams p) {
    for (int i = 0; i < 4; ++i)
        p.lse[4 * threadIdx.x + i] = static_cast<const float*>(p.workspace[0])[4 * threadIdx.x + i];
}
