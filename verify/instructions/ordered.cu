// ordered -- blocks that add to the same sums, one after another
// change: none; this is the kernel of verify/tests/test_ordered.py
// why: to see that sections follow each other in the order of their places, on a GPU as on the CPU
// limits: bf16, fp16; head_dim 8-8 by 8; sm_90
#include "bulk.cuh"
#include "ordered.cuh"
#include "ticket.cuh"

constexpr int WARPS = 2, LANES = 32;

struct Sums {
    float sum[WARPS][LANES];
    int ended[WARPS];  // sections
    int taken;         // tickets
};

struct SharedMemory {
    alignas(16) float terms[WARPS][LANES];
    int ticket;
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_zero", .threads = WARPS * LANES},
                {.name = "attention_forward",
                 .grid = {{SEQ_Q, 1}},
                 .threads = WARPS * LANES,
                 .smem_bytes = sizeof(SharedMemory)},
                {.name = "attention_copy", .threads = WARPS * LANES}},
    .workspace = {{.element_bytes = (sizeof(Sums) + 15) / 16 * 16}},
};
}

extern "C" __global__ void attention_zero(const __grid_constant__ AttentionParams p) {
    Sums& sums = *static_cast<Sums*>(p.workspace[0]);
    const int warp = threadIdx.x / LANES;
    sums.sum[warp][threadIdx.x % LANES] = 0.0f;
    if (threadIdx.x % LANES == 0) sums.ended[warp] = 0;
    if (threadIdx.x == 0) sums.taken = 0;
}

// The block with ticket i adds terms (-1)^i (1 + lane) 2^(i % 24), of which a sum keeps what its 24 bits
// hold: what is lost depends on the order.
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    Sums& sums = *static_cast<Sums*>(p.workspace[0]);
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (threadIdx.x == 0) smem.ticket = take_ticket(&sums.taken);
    __syncthreads();
    const int place = smem.ticket;
    const int term = 1 + lane << place % 24;
    smem.terms[warp][lane] = place % 2 ? -term : term;
    fence_proxy_async();
    __syncwarp();
    begin_ordered(sums.ended[warp], place);
    if (lane == 0) {
        cp_reduce_async_bulk_add(sums.sum[warp], smem.terms[warp], sizeof(smem.terms[warp]));
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
    end_ordered(sums.ended[warp], place);
}

// lse [WARPS, LANES]
extern "C" __global__ void attention_copy(const __grid_constant__ AttentionParams p) {
    const Sums& sums = *static_cast<Sums*>(p.workspace[0]);
    p.lse[threadIdx.x] = sums.sum[threadIdx.x / LANES][threadIdx.x % LANES];
}
