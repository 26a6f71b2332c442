// ticket -- works that blocks take one by one, whoever comes first
// change: none; this is the kernel of verify/tests/test_ticket.py
// why: to see that each work is taken exactly once, on a GPU as on the CPU
// limits: bf16, fp16; head_dim 8-8 by 8; sm_75
#include "reduce.cuh"
#include "ticket.cuh"

constexpr int THREADS = 32;

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_zero", .grid = {{HEADS, 1}}, .threads = THREADS},
                {.name = "attention_forward", .grid = {{SEQ_Q, 1}}, .threads = THREADS}},
    .workspace = {{.element_bytes = sizeof(int)}},
};
}

extern "C" __global__ void attention_zero(const __grid_constant__ AttentionParams p) {
    if (threadIdx.x == 0) *static_cast<int*>(p.workspace[0]) = 0;
    for (int i = threadIdx.x; i < p.seq_k; i += THREADS) p.lse[i] = 0.0f;
}

// Work i of seq_k adds i + 1 to lse[i], with another lane each time.
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    int* const counter = static_cast<int*>(p.workspace[0]);
    for (;;) {
        const int own = threadIdx.x == 0 ? take_ticket(counter) : 0;
        const int work = __shfl_sync(0xffffffff, own, 0);
        if (work >= p.seq_k) break;
        if (threadIdx.x == work % THREADS) red_add(&p.lse[work], work + 1);
    }
}
