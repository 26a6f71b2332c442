// signal -- numbers that go round all blocks
// change: none; this is the kernel of verify/tests/test_signal.py
// why: to see that signals order what blocks write and read, on a GPU as on the CPU
// limits: bf16, fp16; head_dim 8-8 by 8; sm_75
#include "signal.cuh"

constexpr int WARPS = 2, ROUNDS = 20;

struct HandedOver {
    float numbers[WARPS][32];
    Signal ready[WARPS];
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward", .grid = {{SEQ_Q, 1}}, .threads = 32 * WARPS}},
    .workspace = {{sizeof(HandedOver), {{SEQ_Q, 1}}}},
};
}

// Each warp hands 32 numbers over to that of the next block, and the last block's to block 0's, for
// the next round. Each lane adds 1 to what another lane has written; lse [seq_q, WARPS, 32] is what
// it has written last.
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    HandedOver* const handed_over = static_cast<HandedOver*>(p.workspace[0]);
    const int block = blockIdx.x, last = gridDim.x - 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    HandedOver& to = handed_over[block];
    HandedOver& from = handed_over[block > 0 ? block - 1 : last];
    float number = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        if (round > 0 || block > 0) {
            take_signal(from.ready[warp]);
            number = from.numbers[warp][lane ^ round];
        }
        number += 1;
        to.numbers[warp][lane] = number;
        if (round < ROUNDS - 1 || block < last) post_signal(to.ready[warp]);
    }
    p.lse[(block * WARPS + warp) * 32 + lane] = number;
}
