// dependent_launch -- numbers that pass through three kernels
// change: none; these are the kernels of verify/tests/test_dependent_launch.py
// why: to see that griddepcontrol_wait waits for the kernels in front, on a GPU as on the CPU
// limits: bf16, fp16; head_dim 8-8 by 8; sm_90
#include "dependent_launch.cuh"

constexpr int THREADS = 64, ROUNDS = 10000;

struct Numbers {
    float of[THREADS];
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels =
        {
            {.name = "first", .grid = {{SEQ_Q, 1}}, .threads = THREADS},
            {.name = "second", .grid = {{SEQ_Q, 1}}, .threads = THREADS},
            {.name = "third", .grid = {{SEQ_Q, 1}}, .threads = THREADS},
        },
    .workspace = {{sizeof(Numbers), {{SEQ_Q, 1}}}, {sizeof(Numbers), {{SEQ_Q, 1}}}},
};
__constant__ int32_t kernels_start_early = 1;
}

// 2, whatever x is. Takes so long that the kernel behind has begun.
__device__ float slow_two(float x) {
    for (int i = 0; i < ROUNDS; ++i) x = x * 0.5f + 1.0f;
    return x;
}

// q of the block's query.
__device__ float own_q(const AttentionParams& p) {
    return to_float(p.q[blockIdx.x * p.q_stride.row]);
}

// Each kernel reads what other blocks of the kernels in front have written: lse [seq_q, THREADS] of
// the third depends on both.
extern "C" __global__ void first(const __grid_constant__ AttentionParams p) {
    griddepcontrol_launch_dependents();
    const float q = own_q(p);
    static_cast<Numbers*>(p.workspace[0])[blockIdx.x].of[threadIdx.x] =
        slow_two(q) * threadIdx.x + q;
}

// One thread waits for all.
extern "C" __global__ void second(const __grid_constant__ AttentionParams p) {
    griddepcontrol_launch_dependents();
    const float q = own_q(p);
    if (threadIdx.x == 0) griddepcontrol_wait();
    __syncthreads();  // what the kernel in front has written is visible to all threads
    const Numbers& from = static_cast<const Numbers*>(p.workspace[0])[gridDim.x - 1 - blockIdx.x];
    static_cast<Numbers*>(p.workspace[1])[blockIdx.x].of[threadIdx.x] =
        slow_two(q) * from.of[THREADS - 1 - threadIdx.x] + q;
}

// Each thread waits for itself.
extern "C" __global__ void third(const __grid_constant__ AttentionParams p) {
    const float q = own_q(p);
    griddepcontrol_wait();
    const Numbers* const by_first = static_cast<const Numbers*>(p.workspace[0]);
    const Numbers& by_second =
        static_cast<const Numbers*>(p.workspace[1])[gridDim.x - 1 - blockIdx.x];
    p.lse[blockIdx.x * THREADS + threadIdx.x] =
        by_second.of[THREADS - 1 - threadIdx.x] + by_first[blockIdx.x].of[threadIdx.x] + q;
}
