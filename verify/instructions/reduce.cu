// reduce -- numbers that all blocks add to the same places
// change: none; this is the kernel of verify/tests/test_reduce.py
// why: to see that reductions add what every block brings, on a GPU as on the CPU
// limits: bf16, fp16; head_dim 8-8 by 8; sm_75
#include "reduce.cuh"

constexpr int THREADS = 64;

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_zero", .grid = {{HEADS, 1}}, .threads = THREADS},
                {.name = "attention_forward", .grid = {{SEQ_Q, 1}}, .threads = THREADS},
                {.name = "attention_read", .grid = {{HEADS, 1}}, .threads = THREADS}},
    .workspace = {{THREADS * sizeof(float), {{HEADS, 1}}}},
};
}

extern "C" __global__ void attention_zero(const __grid_constant__ AttentionParams p) {
    static_cast<float*>(p.workspace[0])[threadIdx.x] = 0.0f;
}

// Thread t of block b adds (b + 1) / 3, which rounds, to place t, and 1 to a place of another lane.
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    float* const sums = static_cast<float*>(p.workspace[0]);
    red_add(&sums[threadIdx.x], (blockIdx.x + 1) / 3.0f);
    red_add(&sums[threadIdx.x ^ blockIdx.x % THREADS], 1.0f);
}

// lse [THREADS]
extern "C" __global__ void attention_read(const __grid_constant__ AttentionParams p) {
    p.lse[threadIdx.x] = static_cast<const float*>(p.workspace[0])[threadIdx.x];
}
