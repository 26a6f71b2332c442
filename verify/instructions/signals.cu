// signals -- numbers of all blocks, which one of them takes together
// change: none; this is the kernel of verify/tests/test_signal.py
// why: to see that a warp takes a signal for each lane, on a GPU as on the CPU
// limits: bf16, fp16; head_dim 8-8 by 8; sm_75
#include "signals.cuh"

constexpr int ROUNDS = 20;

struct HandedOver {
    float numbers[32];
    Signal ready, read;
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward", .grid = {{SEQ_Q, 1}}, .threads = 32}},
    .workspace = {{sizeof(HandedOver), {{SEQ_Q, 1}}}},
};
}

// In each round every block but the last hands over 32 numbers, and the last one adds them up. Its
// lanes take those blocks' signals, other ones in each round, or none, and then read what all of them
// have written. lse [seq_q, 32] is what each block has in the end: the last one has the sums.
extern "C" __global__ void attention_forward(const __grid_constant__ AttentionParams p) {
    HandedOver* const handed_over = static_cast<HandedOver*>(p.workspace[0]);
    const int block = blockIdx.x, last = gridDim.x - 1, lane = threadIdx.x;
    HandedOver& own = handed_over[block];
    float number = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        if (block < last) {
            number = round * (block + 1) + lane;
            if (round > 0) take_signal(own.read);
            own.numbers[lane] = number;
            post_signal(own.ready);
            continue;
        }
        for (int first = 0; first < last; first += 32) {
            const int of = first + (lane ^ round);
            take_signals(of < last ? &handed_over[of].ready : nullptr);
            for (int i = first; i < min(first + 32, last); ++i)
                number += handed_over[i].numbers[lane ^ round];
        }
        for (int i = 0; round < ROUNDS - 1 && i < last; ++i) post_signal(handed_over[i].read);
    }
    p.lse[block * 32 + lane] = number;
}
