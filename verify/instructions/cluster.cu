// cluster -- clusters of two blocks that exchange tiles and load each other's
// change: none; this is the kernel of verify/tests/test_cluster.py
// why: to see that the CPU twins of the instructions do what a GPU does
// limits: bf16, fp16; head_dim 64-64 by 8; sm_90
#include "slices.cuh"

constexpr int THREADS = 64, WARPS = THREADS / 32;
constexpr int ROUNDS = 7, STAGES = 2;
constexpr int ROWS = 3;  // of a box of k: each block loads one, to both
constexpr int BOX_WORDS = ROWS * HEAD_DIM / 2;

struct SharedMemory {
    alignas(128) Element loaded[2][1024];  // a box in each, 128-byte aligned
    alignas(16) float own[STAGES][THREADS];
    alignas(16) float other[STAGES][THREADS];  // a copy of the other block's
    Mbarrier full[STAGES];                     // `other` is there
    Mbarrier empty[STAGES];                    // the other block has its copy, and has read it
    Mbarrier boxes;                            // both boxes are there
    Mbarrier told;                             // each thread of the other block has stored a number
    alignas(16) float given[THREADS][4];       // stored by the other block's threads
    Mbarrier all_given;                        // all of them are there
};

extern "C" {
__constant__ LaunchDescriptor launch_descriptor = {
    .alignment = 16,
    .kernels = {{.name = "attention_forward",
                 .grid = {{SEQ_Q, 1}},
                 .threads = THREADS,
                 .smem_bytes = sizeof(SharedMemory)}},
    .workspace = {{THREADS * sizeof(float), {{SEQ_Q, 1}}}},
    .k_box = {ROWS, HEAD_DIM, SWIZZLE_NONE},
};
}

__device__ void wait_for(Mbarrier& barrier, int parity) {
    while (!mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// Block b writes row b of lse [SEQ_Q, (ROUNDS + 5) * THREADS + 2 * BOX_WORDS]: the numbers that the
// other block of its cluster has stored in global memory, and those that it has copied here, round
// by round; then what its threads have stored in this block's shared memory, and the boxes as they
// lie there, of which its own one begins at row b of k.
extern "C" __global__ void __cluster_dims__(2) __launch_bounds__(THREADS, 1)
    attention_forward(const __grid_constant__ AttentionParams p) {
    SharedMemory& smem = shared_memory<SharedMemory>();
    const int thread = threadIdx.x, block = blockIdx.x;
    const int rank = cluster_rank(), peer = 1 - rank;
    float* out = p.lse + block * ((ROUNDS + 5) * THREADS + 2 * BOX_WORDS);

    if (thread == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(smem.full[stage], 1);
            mbarrier_init(smem.empty[stage], WARPS);
        }
        mbarrier_init(smem.boxes, 1);
        mbarrier_init(smem.told, THREADS);
        mbarrier_init(smem.all_given, 1);
        fence_mbarrier_init();
    }
    cluster_arrive();
    cluster_wait();  // both blocks have initialized their mbarriers

    if (thread == 0) {
        mbarrier_arrive_expect_tx(smem.boxes, 2 * BOX_WORDS * sizeof(float));
        cp_async_bulk_tensor_load_multicast(smem.loaded[rank], p.k_map, 0, block, 0, 0, smem.boxes,
                                            3);
    }

    float* stored = static_cast<float*>(p.workspace[0]);
    stored[block * THREADS + thread] = -1.0f - 1000 * block - thread;
    mbarrier_arrive_cluster(smem.told, peer);
    while (!mbarrier_try_wait_parity_cluster(smem.told, 0)) {
    }
    out[thread] = stored[(block ^ 1) * THREADS + (thread ^ 1)];
    out += THREADS;

    for (int round = 0; round < ROUNDS; ++round, out += THREADS) {
        const int stage = round % STAGES, phase = round / STAGES;
        wait_for(smem.empty[stage], (phase + 1) % 2);
        smem.own[stage][thread] = 1000 * block + 100 * round + thread;
        fence_proxy_async();
        __syncthreads();  // `own` is complete, and each thread has fenced
        if (thread == 0) {
            mbarrier_arrive_expect_tx(smem.full[stage], sizeof(smem.other[stage]));
            cp_async_bulk_cluster(smem.other[stage], smem.own[stage], sizeof(smem.own[stage]),
                                  smem.full[stage], peer);
        }
        wait_for(smem.full[stage], phase % 2);
        out[thread] = smem.other[stage][thread ^ 1];
        __syncwarp();  // all lanes have read
        if (thread % 32 == 0) mbarrier_arrive_cluster_relaxed(smem.empty[stage], peer);
    }

    if (thread == 0) mbarrier_arrive_expect_tx(smem.all_given, sizeof(smem.given));
    const float x = 1000 * block + 4 * thread + 0.5f;
    st_async(smem.given[thread ^ 2], make_float4(x, x + 1, x + 2, x + 3), smem.all_given, peer);
    wait_for(smem.all_given, 0);
    memcpy(out + 4 * thread, smem.given[thread], sizeof(smem.given[thread]));
    out += 4 * THREADS;

    wait_for(smem.boxes, 0);
    for (int i = thread; i < 2 * BOX_WORDS; i += THREADS)
        memcpy(out + i, &smem.loaded[i / BOX_WORDS][2 * (i % BOX_WORDS)], sizeof(float));
    cluster_arrive();
    cluster_wait();  // the other block has read what was copied from here, and arrives no more
}
