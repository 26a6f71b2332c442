// bulk -- bulk copies to shared memory, and bulk reductions of what they bring
// change: none; this is the kernel of verify/tests/test_bulk.py
// why: to see that the CPU twins copy and add what a GPU does
// limits: bf16, fp16; head_dim 8-8 by 8; sm_90
#include "bulk.cuh"

constexpr int THREADS = 64;
constexpr int FLOATS = 256;  // in k, and in shared memory

struct SharedMemory {
    alignas(16) float loaded[FLOATS];
    alignas(16) float terms[FLOATS];
    Mbarrier full;
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_zero", .grid = {{HEADS, 1}}, .threads = THREADS},
                {.name = "attention_forward",
                 .grid = {{SEQ_Q, 1}},
                 .threads = THREADS,
                 .smem_bytes = sizeof(SharedMemory)},
                {.name = "attention_read", .grid = {{HEADS, 1}}, .threads = THREADS}},
    .workspace = {{FLOATS * sizeof(float), {{HEADS, 1}}}},
};
}

extern "C" __global__ void attention_zero(const __grid_constant__ AttentionParams p) {
    for (int i = threadIdx.x; i < FLOATS; i += THREADS)
        static_cast<float*>(p.workspace[0])[i] = 0.0f;
}

// k is an array of floats. The first integers of row b of q say what block b does with them: how
// many it copies, from which one on, and to which place in shared memory. What is then there goes
// to row b of lse [SEQ_Q + 1, FLOATS]. Each copied float, over b + 3, is added to the sum of its
// number.
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const auto* place = reinterpret_cast<const int16_t*>(p.q + blockIdx.x * p.q_stride.row);
    const int bytes = place[0] * sizeof(float), from = place[1], to = place[2];

    for (int i = threadIdx.x; i < FLOATS; i += THREADS) smem.loaded[i] = -1.0f;
    fence_proxy_async();
    if (threadIdx.x == 0) {
        mbarrier_init(smem.full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();  // `loaded` is filled, and the mbarrier initialized
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(smem.full, bytes);
        cp_async_bulk_load(&smem.loaded[to], reinterpret_cast<const float*>(p.k) + from, bytes,
                           smem.full);
    }
    while (!mbarrier_try_wait_parity(smem.full, 0)) {
    }
    for (int i = threadIdx.x; i < FLOATS; i += THREADS) {
        p.lse[blockIdx.x * FLOATS + i] = smem.loaded[i];
        smem.terms[i] = smem.loaded[i] / (blockIdx.x + 3);
    }
    fence_proxy_async();
    __syncthreads();  // the terms are there, and each thread has fenced
    if (threadIdx.x == 0) {
        cp_reduce_async_bulk_add(static_cast<float*>(p.workspace[0]) + from, &smem.terms[to],
                                 bytes);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
    __syncthreads();  // the terms have been read, and nobody sees what overwrites them
    for (int i = threadIdx.x; i < FLOATS; i += THREADS) smem.terms[i] = 1e30f;
}

// Row SEQ_Q of lse: the sums.
extern "C" __global__ void attention_read(const __grid_constant__ AttentionParams p) {
    for (int i = threadIdx.x; i < FLOATS; i += THREADS)
        p.lse[p.seq_q * FLOATS + i] = static_cast<const float*>(p.workspace[0])[i];
}
